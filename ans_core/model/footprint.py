"""A model's shapes and a row's length -> bytes that training keeps for the backward pass, and floating point operations, by formula.

Counted for LoRA on every linear layer of a Llama-like text model whose other weights are frozen, with the vision tower and SAM2's image
encoder frozen. A tensor that is kept counts once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ans_core.data.views import Tiling
from ans_core.model.attention import DENSE
from ans_core.model.checkpointing import LOGITS
from ans_core.model.grounding import Grounding, GroundingConfig
from ans_core.model.network import Network

LORA_LINEARS = 7
"""q, k, v, o, gate, up, down."""
LOGIT_COPIES = 3
"""Logits, their log-softmax and its gradient, all in fp32, exist at once."""


@dataclass(frozen=True, kw_only=True)
class TextShape:
    """Sizes of a text model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    words: int

    @staticmethod
    def of(model: Network) -> TextShape:
        config: Any = model.vlm.config.text_config
        return TextShape(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            words=model.vlm.lm_head.out_features,
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one process computes at once."""

    rows: int
    tokens: int
    """Per row, image tokens included."""
    learned: int
    """Tokens of answers, per row."""
    tiles: int
    """Per row."""
    masks: int
    """Pairs of a `[SEG]` and a frame, per row."""


def _tiling(model: Network) -> Tiling:
    cutter = model.backbone.cutter
    assert isinstance(cutter, Tiling), "only InternVL's sizes are counted"
    return cutter


def layer_bytes(text: TextShape, batch: MicroBatch, *, rank: int, dropout: bool, half: bool, dropout_mask: int = 1) -> int:
    """Return what one layer keeps, in fp32 or (`half`) under bf16 autocast, where the residual stream stays fp32.

    Of every token: the residual before both norms; q, k and v for every head; the attention's result; gate, its SiLU, up and their product;
    what LoRA's A matrices read and give. Under bf16, and with dropout, each of them reads a copy of its own; dropout keeps a mask beside
    it, of `dropout_mask` bytes an element (a GPU's 1; a CPU's 4). A dense attention mask is kept in the dtype of the scores.
    """
    count, h, i, size = batch.rows * batch.tokens, text.hidden, text.inner, 2 if half else 4
    reads, attended = (5 * h, 2 * h) if half or dropout else (2 * h, h)
    kept = 2 * h * 4 + (reads + 3 * h + attended + 4 * i + LORA_LINEARS * rank) * size + (text.heads + 2) * 4
    if dropout:
        kept += (6 * h + i) * dropout_mask
    dense = count * batch.tokens
    return count * kept + (dense * size if dense <= DENSE else 0)


def activation_bytes(model: Network, batch: MicroBatch, *, rank: int, dropout: bool, half: bool, checkpointing: bool) -> dict[str, int]:
    """Return the peak's parts: layers, gradients of one layer's activations, logits, projector, mask decoder. With checkpointing the layers
    keep their inputs; two at a time keep all, for one is computed again before the one above it is let go (measured)."""
    text = TextShape.of(model)
    count = batch.rows * batch.tokens
    one = layer_bytes(text, batch, rank=rank, dropout=dropout, half=half)
    layers = text.layers * count * text.hidden * 4 + 2 * one if checkpointing else text.layers * one
    layers += 3 * count * text.hidden * 4  # the embeddings, the final norm's input and result
    logits = min(batch.rows * batch.learned * text.words, LOGITS) * 4 * LOGIT_COPIES
    projected = model.vlm.model.multi_modal_projector.linear_1
    seen = batch.rows * batch.tiles * _tiling(model).grid ** 2
    projector = seen * (2 * projected.in_features + 3 * projected.out_features) * 4
    side = model.config.grounding.image_size // 16
    masks = batch.rows * batch.masks * side**2 * decoder_bytes_per_cell(model.config.grounding.width)
    gradients = 4 * count * (text.hidden + text.inner) * (2 if half else 4)  # of its widest tensors, while it is walked backward
    return {"layers": layers, "gradients": gradients, "logits": logits, "projector": projector, "mask decoder": masks}


def decoder_bytes_per_cell(width: int) -> int:
    """Return what the mask decoder keeps for one mask and one cell of the 1/16 map, in fp32, counted on a small picture."""
    small = GroundingConfig(
        image_size=128, embed=8, heads=1, stages=(1, 1, 1, 1), global_blocks=(2,), windows=(4, 2, 4, 2), width=width, memory_layers=1
    )  # fmt: skip
    sam2 = Grounding(small).requires_grad_(False)
    sam2.sam_mask_decoder.requires_grad_(True)
    features = sam2.blank_features(torch.zeros(1))

    def kept(masks: int) -> int:
        prompt = torch.zeros(masks, width, requires_grad=True)
        own = {p.untyped_storage().data_ptr() for p in sam2.parameters()}
        return kept_bytes(lambda: sam2.decode(features, torch.zeros(masks, dtype=torch.long), prompt).logits, own)

    return (kept(3) - kept(1)) // 2 // (small.image_size // 16) ** 2


def kept_bytes(compute: Any, weights: set[int]) -> int:
    """Return the bytes of all tensors that autograd keeps of a computation, each storage once, but for the weights (by data pointer)."""
    found: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no pointer is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = compute()
    del result
    return sum(found.values())


# Floating point operations


def linear_parameters(module: nn.Module) -> int:
    return sum(m.weight.numel() for m in module.modules() if isinstance(m, (nn.Linear, nn.Conv2d, nn.ConvTranspose2d)))


def flops(model: Network, batch: MicroBatch, *, rank: int, checkpointing: bool) -> dict[str, float]:
    """Return the floating point operations of a step's micro-batch by part: 2 a weight and token forward, as many backward for inputs, and
    again for trained weights; the frozen encoders, whose results a feature cache keeps, forward alone. SAM2 encodes one frame for every row
    with masks."""
    text, inner = TextShape.of(model), model.vlm.model
    count = batch.rows * batch.tokens
    linears = [m for m in inner.language_model.modules() if isinstance(m, nn.Linear)]
    frozen = sum(m.weight.numel() for m in linears)
    trained = sum(rank * (m.in_features + m.out_features) for m in linears)
    attention = 2.0 * text.layers * text.hidden * batch.tokens  # of 4 L H a token, half is masked; backward takes twice as much
    forward = 2.0 * (frozen + trained) + attention
    language = count * (forward * (3 if checkpointing else 2) + attention + 2.0 * trained)
    head = batch.rows * batch.learned * 6.0 * model.vlm.lm_head.weight.numel()
    tiling = _tiling(model)
    cells = (tiling.size // int(inner.vision_tower.config.patch_size[0])) ** 2 + 1
    vision_layers = len(inner.vision_tower.encoder.layer)
    tower = linear_parameters(inner.vision_tower.encoder) + 2 * vision_layers * cells * inner.vision_tower.config.hidden_size
    vision = batch.rows * batch.tiles * cells * 2.0 * tower
    projector = batch.rows * batch.tiles * tiling.grid**2 * 6.0 * linear_parameters(inner.multi_modal_projector)
    sam = batch.rows * bool(batch.masks) * sam2_flops(model.config.grounding)
    return {"language": language, "head": head, "projector": projector, "frozen encoders": vision + sam}


@cache
def sam2_flops(config: GroundingConfig) -> int:
    """Count the operations of SAM2's image encoder for one frame, on the meta device."""
    with init_empty_weights(include_buffers=False):
        encoder = Grounding(config).image_encoder
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(torch.zeros(1, 3, config.image_size, config.image_size, device="meta"))
    return int(counter.get_total_flops())
