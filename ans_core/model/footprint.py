"""A model's shapes and a row's length -> the bytes that training holds, and its floating point operations, by
formula.

Counted for LoRA on every linear layer of a Llama-like text model whose other weights are frozen, with the
vision tower and SAM2's image encoder frozen. A tensor that is kept counts once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from ans_core.data.collate import Batch
from ans_core.data.views import Grid
from ans_core.model.adapters import full_modules
from ans_core.model.attention import DENSE
from ans_core.model.checkpointing import LOGITS
from ans_core.model.grounding import Grounding, GroundingConfig
from ans_core.model.network import Network

LORA_LINEARS = 7
"""q, k, v, o, gate, up, down."""
LOGIT_COPIES = 3
"""Logits, their log-softmax and its gradient, all in fp32, exist at once."""
HIERA_COPIES = 10
"""Of a place of SAM2's first stage, in widths of the stage: residual, norm, and an MLP four times as wide
before and after its GELU."""
PEAK_FLOPS = (
    ("H100 PCIe", 756e12), ("H100 NVL", 835e12), ("H100", 989e12), ("H200", 989e12), ("GH200", 989e12),
    ("H800", 989e12),
    ("B200", 2250e12), ("A100", 312e12), ("A800", 312e12), ("L40S", 362e12), ("RTX 4090", 165e12),
    ("RTX 3090", 71e12),
)  # fmt: skip
"""(part of a GPU's name, operations a second in bf16 without sparsity, by its data sheet); the first that
fits counts."""


def peak_flops(device: torch.device) -> float | None:
    """Return the most bf16 operations a second that the device can do; None where it is not known, and for a
    CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for part, peak in PEAK_FLOPS if part in name), None)


# Weights, gradients and the optimizer


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Numbers of weights of a model whose text model gets LoRA: frozen ones in bf16, trained ones in fp32.
    All else is bytes."""

    total: int
    """Of the model without LoRA."""
    full: int
    """Of these, trained."""
    adapters: int
    """Of LoRA."""

    @property
    def trained(self) -> int:
        return self.full + self.adapters

    @property
    def base(self) -> int:
        return 2 * self.total

    @property
    def delta(self) -> int:
        return 4 * self.trained

    @property
    def training_state(self) -> int:
        return 12 * self.trained

    def held(self, *, deepspeed_stage: int, gpus: int) -> dict[str, float]:
        """Return what each GPU holds in SFT."""
        return held_bytes(
            frozen=2 * (self.total - self.full),
            trained=self.trained,
            deepspeed_stage=deepspeed_stage,
            gpus=gpus,
        )


def held_bytes(
    *, frozen: int, trained: int, deepspeed_stage: int, gpus: int, teacher: bool = False
) -> dict[str, float]:
    """Return the bytes of weights, gradients and optimizer on each GPU. `frozen`: bytes of what no gradient
    reaches. `trained`: weights in fp32, twice where a teacher follows them. ZeRO divides gradients, AdamW's
    two moments and a copy of the weights of its own; ZeRO-3 the weights, too."""
    weights = frozen + 4.0 * trained * (1 + teacher)
    gradients, optimizer = 4.0 * trained, 8.0 * trained
    if deepspeed_stage:
        gradients, optimizer = gradients / gpus, (optimizer + 4.0 * trained) / gpus
    if deepspeed_stage == 3:
        weights /= gpus
    return {"weights": weights, "gradients": gradients, "optimizer": optimizer}


def parameters_of(model: Network, *, rank: int) -> Parameters:
    """Count a model without adapters, as SFT trains it. LoRA's factors of a layer have rank * (inputs +
    outputs) weights."""
    return Parameters(
        total=sum(p.numel() for p in model.parameters()),
        full=sum(p.numel() for _, module in full_modules(model) for p in module.parameters()),
        adapters=lora_weights(model, rank=rank),
    )


def lora_weights(model: Network, *, rank: int) -> int:
    linears = [m for m in model.vlm.model.language_model.modules() if isinstance(m, nn.Linear)]
    return sum(rank * (m.in_features + m.out_features) for m in linears)


# Activations


@dataclass(frozen=True, kw_only=True)
class TextShape:
    """Sizes of a text model."""

    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head: int
    """Values of a head; all of them may be more than `hidden`."""
    words: int
    normed_heads: bool
    """Whether queries and keys have a norm of their own (Qwen3)."""

    @property
    def width(self) -> int:
        """Values of all queries of a token."""
        return self.heads * self.head

    @staticmethod
    def of(model: Network) -> TextShape:
        config: Any = model.vlm.config.text_config
        return TextShape(
            hidden=config.hidden_size,
            inner=config.intermediate_size,
            layers=config.num_hidden_layers,
            heads=config.num_attention_heads,
            kv_heads=config.num_key_value_heads,
            head=getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
            words=model.vlm.lm_head.out_features,
            normed_heads=hasattr(model.vlm.model.language_model.layers[0].self_attn, "q_norm"),
        )


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """What one process computes at once."""

    rows: int
    tokens: int
    """Per row, image tokens included."""
    learned: int
    """Tokens of answers, per row."""
    grids: tuple[Grid, ...] = ()
    """Image tokens of a row's pictures, as the vision tower sees them."""
    masks: int = 0
    """Pairs of a `[SEG]` and a frame, per row."""
    frames: int = 1
    """That SAM2 encodes, per row with masks."""


def layer_bytes(
    text: TextShape, batch: MicroBatch, *, rank: int, dropout: bool, half: bool, dropout_mask: int = 1
) -> int:
    """Return what one layer keeps, in fp32 or (`half`) under bf16 autocast, where the residual stream stays
    fp32.

    Of every token: the residual before both norms; q, k and v for every head; the attention's result; gate,
    its SiLU, up and their product; what LoRA's A matrices read and give. Under bf16, and with dropout, each
    of them reads a copy of its own; dropout keeps a mask beside it, of `dropout_mask` bytes an element (a
    GPU's 1; a CPU's 4). A dense attention mask is kept in the dtype of the scores.
    """
    count, h, w, i, size = batch.rows * batch.tokens, text.hidden, text.width, text.inner, 2 if half else 4
    reads, attended = (5 * h, 2 * w) if half or dropout else (2 * h, w)
    per_token = (
        2 * h * 4 + (reads + 3 * w + attended + 4 * i + LORA_LINEARS * rank) * size + (text.heads + 2) * 4
    )
    if text.normed_heads:  # their inputs in fp32, and a factor for each head
        per_token += (w + text.kv_heads * text.head + text.heads + text.kv_heads) * 4
    if dropout:
        per_token += (5 * h + w + i) * dropout_mask
    dense = count * batch.tokens
    return count * per_token + (dense * size if dense <= DENSE else 0)


def activation_bytes(
    model: Network, batch: MicroBatch, *, rank: int, dropout: bool, half: bool, recomputed: int | None = 0
) -> dict[str, int]:
    """Return the peak's parts: layers, gradients of one layer's activations, logits, projector, SAM2's
    encoder and mask decoder.

    recomputed: layers that keep their inputs alone (None: all). The first ones do, so that the others have
    gone by the time they are computed again; then two at a time keep all, for one is computed again before
    the one above it is let go (measured).
    """
    text, grounding = TextShape.of(model), model.config.grounding
    count = batch.rows * batch.tokens
    one = layer_bytes(text, batch, rank=rank, dropout=dropout, half=half)
    again = text.layers if recomputed is None else min(recomputed, text.layers)
    layers = again * count * text.hidden * 4 + max(text.layers - again, min(2, again)) * one
    # the embeddings, the final norm's input and result
    layers += count * (model.backbone.token_width + 2 * text.hidden) * 4
    logits = min(batch.rows * batch.learned * text.words, LOGITS) * 4 * LOGIT_COPIES
    cells = sum(rows * columns for rows, columns in batch.grids)
    side = grounding.image_size // 16
    masks = batch.rows * batch.masks * side**2 * decoder_bytes_per_cell(grounding.width)
    # of its widest tensors, while it is walked backward
    gradients = 4 * count * (text.hidden + text.inner) * (2 if half else 4)
    return {
        "layers": layers,
        "gradients": gradients,
        "logits": logits,
        "projector": model.backbone.projector_bytes(batch.rows * cells),
        "SAM2 encoder": batch.rows * batch.frames * frame_bytes(grounding) if batch.masks else 0,
        "mask decoder": masks,
    }


def all_activations(model: Network, batches: Sequence[MicroBatch], **options: Any) -> int:
    """Return the bytes of all parts of all batches. `options`: of `activation_bytes`."""
    return sum(sum(activation_bytes(model, batch, **options).values()) for batch in batches)


def recomputed_layers(
    model: Network, batches: Sequence[MicroBatch], *, room: int, rank: int, dropout: bool, half: bool
) -> int:
    """Return how few layers must be computed again for the activations of all these to take at most `room`
    bytes. If no number is enough: all but two, since more save nothing."""
    most = max(TextShape.of(model).layers - 2, 0)

    def fits(count: int) -> bool:
        return (
            all_activations(model, batches, rank=rank, dropout=dropout, half=half, recomputed=count) <= room
        )

    return next((count for count in range(most) if fits(count)), most)


def frame_bytes(config: GroundingConfig) -> int:
    """Return what SAM2's frozen image encoder needs for one frame, in fp32: its widest place, and the three
    maps that are kept."""
    cells = (config.image_size // 4) ** 2
    maps = cells + cells // 4 + cells // 16
    return (cells * config.embed * HIERA_COPIES + maps * config.width) * 4


def cache_bytes(model: Network, *, rows: int, tokens: int) -> int:
    """Return the bytes of keys and values of all layers, in bf16."""
    text = TextShape.of(model)
    return rows * tokens * text.layers * 2 * text.kv_heads * text.head * 2


@cache
def decoder_bytes_per_cell(width: int) -> int:
    """Return what the mask decoder keeps for one mask and one cell of the 1/16 map, in fp32, counted on a
    small picture."""
    sam2, cells = _small_sam2(width)
    sam2.sam_mask_decoder.requires_grad_(True)
    features = sam2.blank_features(torch.zeros(1))

    def bytes_of(masks: int) -> int:
        prompt = torch.zeros(masks, width, requires_grad=True)
        weights = {p.untyped_storage().data_ptr() for p in sam2.parameters()}
        return saved_bytes(
            lambda: sam2.decode(features, torch.zeros(masks, dtype=torch.long), prompt).logits, weights
        )

    return (bytes_of(3) - bytes_of(1)) // 2 // cells


def _small_sam2(width: int) -> tuple[Grounding, int]:
    """Return a frozen SAM2 of small pictures with a mask decoder of this width, and the cells of its 1/16
    map."""
    small = GroundingConfig(
        image_size=128, embed=8, heads=1, stages=(1, 1, 1, 1), global_blocks=(2,), windows=(4, 2, 4, 2),
        width=width, memory_layers=1
    )  # fmt: skip
    return Grounding(small).requires_grad_(False), (small.image_size // 16) ** 2


def saved_bytes(compute: Callable[[], Any], weights: set[int]) -> int:
    """Return the bytes of all tensors that autograd keeps of a computation, each storage once, but for the
    weights (by data pointer)."""
    sizes: dict[int, int] = {}
    alive: list[Tensor] = []  # so that no pointer is used twice

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            sizes[storage.data_ptr()] = storage.nbytes()
            alive.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = compute()
    del result
    return sum(sizes.values())


def loaded_bytes(model: Network, batch: MicroBatch, *, mask_size: int) -> int:
    """Return the bytes of a batch as a loader makes it: pixels for both encoders in fp32, and the masks'
    targets."""
    cells = sum(rows * columns for rows, columns in batch.grids)
    pixels = cells * model.backbone.cutter.token_values + batch.frames * 3 * model.sam2.image_size**2
    return batch.rows * (4 * pixels + batch.masks * mask_size**2)


# Floating point operations


@dataclass(frozen=True, kw_only=True)
class Work:
    """What is computed once, forward and backward, summed over rows."""

    tokens: int
    """Padding left out."""
    pairs: float
    """Of a token and one that it attends to, itself included."""
    learned: int
    """Tokens of answers."""
    grids: tuple[Grid, ...] = ()
    """Image tokens of all pictures."""
    frames: int = 0
    """That SAM2 encodes."""
    masks: int = 0

    @staticmethod
    def planned(batch: MicroBatch) -> Work:
        """Full rows of one conversation each."""
        return Work(
            tokens=batch.rows * batch.tokens,
            pairs=batch.rows * batch.tokens**2 / 2,
            learned=batch.rows * batch.learned,
            grids=batch.grids * batch.rows,
            frames=batch.rows * batch.frames if batch.masks else 0,
            masks=batch.rows * batch.masks,
        )

    @staticmethod
    def of(batch: Batch) -> Work:
        """Count a batch. It must be on the CPU."""
        places = batch.places
        first, prefix, later = (
            (spans >= 0).sum(1).double() for spans in (places.first, places.prefix, places.later)
        )
        pairs = (first**2).sum() / 2 + (later * prefix[places.rows] + later**2 / 2).sum()
        return Work(
            tokens=int((batch.branch >= 0).sum()),
            pairs=float(pairs),
            learned=batch.learned.shape[1],
            grids=tuple(grid for views in batch.views for grid in views.grids),
            frames=len(batch.sam_frames) if len(batch.pair_seg) else 0,
            masks=len(batch.pair_seg),
        )


class Operations:
    """Counts floating point operations of SFT: of a model with its adapters, or of one that would get LoRA of
    `rank`.

    2 a weight and token forward, as many backward for inputs, and again for trained weights alone; the frozen
    encoders forward alone.
    """

    def __init__(self, model: Network, *, rank: int = 0) -> None:
        self.backbone, self.grounding, self.text = model.backbone, model.config.grounding, TextShape.of(model)
        linears = [m for m in model.vlm.model.language_model.modules() if isinstance(m, nn.Linear)]
        self.weights = sum(m.weight.numel() for m in linears)
        if rank:
            self.trained = lora_weights(model, rank=rank)
            self.weights += self.trained
        else:
            self.trained = sum(m.weight.numel() for m in linears if m.weight.requires_grad)
        self.head = model.vlm.lm_head.weight.numel()
        projectors = [getattr(model.vlm.model, name) for name in model.backbone.projectors]
        self.projector = sum(
            m.weight.numel() for part in projectors for m in part.modules() if isinstance(m, nn.Linear)
        )

    def of(self, work: Work, *, recomputed: int | None = 0) -> dict[str, float]:
        """Return the operations by part. `recomputed`: layers that run forward twice (None: all)."""
        layers = self.text.layers
        again = (layers if recomputed is None else min(recomputed, layers)) / layers
        cells = sum(rows * columns for rows, columns in work.grids)
        side = self.grounding.image_size // 16
        scores = 4.0 * layers * self.text.width * work.pairs  # queries with keys, weights with values
        return {
            "language": work.tokens * (2.0 * self.weights * (2 + again) + 2.0 * self.trained),
            "attention": scores * (3 + again),
            "head": work.learned * 6.0 * self.head,
            "projector": cells * 6.0 * self.projector,
            "mask decoder": work.masks * 3.0 * side**2 * decoder_flops_per_cell(self.grounding.width)
            if work.masks
            else 0.0,
            "frozen encoders": self.backbone.vision_flops(work.grids)
            + (work.frames * sam2_flops(self.grounding) if work.frames else 0),
        }


@cache
def sam2_flops(config: GroundingConfig) -> int:
    """Count the operations of SAM2's image encoder for one frame, on the meta device."""
    with init_empty_weights(include_buffers=False):
        encoder = Grounding(config).image_encoder
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        encoder(torch.zeros(1, 3, config.image_size, config.image_size, device="meta"))
    return int(counter.get_total_flops())


@cache
def decoder_flops_per_cell(width: int) -> float:
    """Count the mask decoder's operations, forward, for one mask and one cell of the 1/16 map, on a small
    picture."""
    sam2, cells = _small_sam2(width)
    prompt = torch.zeros(1, width)
    # Plain matrix products: torch does not count a CPU's fused attention.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        sam2.decode(sam2.blank_features(prompt), torch.zeros(1, dtype=torch.long), prompt)
    return counter.get_total_flops() / cells
