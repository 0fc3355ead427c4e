"""A frozen base that operations run on, and the agent's adapters on it: LoRA (or copies of the layers),
projector, and rows of the tokens that it says.

With the adapters off the model is the base, bit for bit, whatever is trained.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from peft.utils import ModulesToSaveWrapper
from torch import Tensor, nn

from ans_core import dist, prompts
from ans_core.agent.operations import Operation
from ans_core.agent.protocol import call_tokens
from ans_core.checkpoints import checkpoint
from ans_core.data.views import Patches, Tiling
from ans_core.model.adapters import Adapters, copies_config, lora_config
from ans_core.model.network import Network
from ans_core.model.quantization import Quantization, quantizer

AGENT, BASE = "agent", "base"
"""The adapter's name, and what the model without it is called."""
TILE_PIXELS = 448 * 448


def load_base(
    path: Path,
    *,
    operations: Mapping[str, Operation],
    device: torch.device | str = "cpu",
    tiles: Sequence[int] = (),
    pixels: Sequence[int] = (),
    dtype: torch.dtype | None = None,
    quantize: Quantization | None = None,
) -> Network:
    """Load the model that the agent starts from, with tokens for calls. Raises ValueError for one that has no
    `[SEG]`. `tiles`, `pixels`: see `set_resolution`. `dtype`: None keeps the stored one. `quantize`: as in
    `Sa2VA.from_pretrained`, for inference."""
    model = checkpoint.load(path, device=device, dtype=dtype, quantize=quantize)
    if prompts.SEG not in model.tokenizer.get_vocab():
        raise ValueError(
            f"{path} has no {prompts.SEG}: operations draw masks with it; take a Sa2VA with its own "
            "tokenizer as agent.base"
        )
    add_call_tokens(model, operations)
    set_resolution(model, tiles=tiles, pixels=pixels)
    return model.requires_grad_(False).eval()


def set_resolution(model: Network, *, tiles: Sequence[int] = (), pixels: Sequence[int] = ()) -> None:
    """Cut pictures into `tiles` = (fewest, most) tiles from now on; Qwen-VL, which has none: show so many
    times 448 x 448 pixels. Or show `pixels` = (fewest, most); InternVL: in as many tiles as hold the fewest,
    and as go into the most. Empty, or zeros = as before. Raises ValueError for pixels that can't hold."""
    if not tiles and not any(pixels):
        return
    cutter = model.backbone.cutter
    if any(pixels) and isinstance(cutter, Tiling):
        tiles = (-(-pixels[0] // cutter.size**2), pixels[1] // cutter.size**2)
        if tiles[0] > tiles[1]:
            raise ValueError(
                f"agent.min_pixels {pixels[0]}, agent.max_pixels {pixels[1]}: no whole number of tiles of "
                f"{cutter.size} x {cutter.size} = {cutter.size**2} pixels lies between; change one of them"
            )
    elif any(pixels) and isinstance(cutter, Patches) and pixels[1] < cutter.unit**2:
        raise ValueError(
            f"agent.max_pixels {pixels[1]} is less than one image token's {cutter.unit} x {cutter.unit}; raise it"
        )
    if tiles:
        model.config = replace(model.config, min_tiles=tiles[0], max_tiles=tiles[1])
        pixels = tuple(count * TILE_PIXELS for count in tiles)
    if isinstance(cutter, Patches):
        model.config = replace(model.config, min_pixels=pixels[0], max_pixels=pixels[1])
    model.backbone.cutter = model.backbone.cutter_of(model.backbone.native.config, model.config)


@torch.no_grad()
def add_call_tokens(model: Network, operations: Mapping[str, Operation]) -> list[int]:
    """Add the pieces of calls that the tokenizer lacks, in place; return the ids of all pieces.

    A new embedding is the mean of those it was spelled with. A new row of the head equals that of the first
    of these, which comes before it: greedy search takes the first of equal logits, so the base says none of
    the new tokens.
    """
    tokenizer = copy.deepcopy(model.tokenizer)
    pieces = call_tokens(operations)
    new = [piece for piece in pieces if piece not in tokenizer.get_vocab()]
    spelled = [tokenizer.encode(piece, add_special_tokens=False) for piece in new]
    tokenizer.add_tokens(new)
    ids: Any = tokenizer.convert_tokens_to_ids(pieces)
    embeddings, head = model.vlm.get_input_embeddings(), model.vlm.lm_head
    lacking = len(tokenizer) - len(head.weight)
    if lacking > 0:
        last = spelled[len(spelled) - lacking :]
        embeddings.weight = _grown(embeddings.weight, [embeddings.weight[ids].mean(0) for ids in last])
        head.weight = _grown(head.weight, [head.weight[ids[0]] for ids in last])
        embeddings.num_embeddings = head.out_features = len(tokenizer)
        model.vlm.config.text_config.vocab_size = len(tokenizer)
        backbone = copy.deepcopy(model.config.backbone)
        backbone["text_config"]["vocab_size"] = len(tokenizer)
        model.config = replace(model.config, backbone=backbone)
    model.tokenizer = tokenizer
    return list(ids)


def _grown(weight: Float[Tensor, "V D"], rows: Sequence[Float[Tensor, " D"]]) -> nn.Parameter:
    return nn.Parameter(torch.cat([weight, torch.stack(list(rows))]), requires_grad=False)


class AgentPolicy:
    """The base with the agent's adapter, which is active but inside of `base()`."""

    def __init__(
        self,
        model: Network,
        *,
        lora: Mapping[str, Any] | None,
        rows: Sequence[int],
        seed: int,
        names: Sequence[str] = (AGENT,),
    ) -> None:
        """`lora`: None = copies of the layers instead. `names`: adapters, of which the first is trained. All
        begin as the first."""
        projectors = list(model.backbone.projectors)
        if lora is None:
            config = copies_config(model, modules_to_save=projectors, rows=rows)
        else:
            config = lora_config(**lora, modules_to_save=projectors, rows=rows)
        self.adapters = Adapters(model, config, names=names, off=BASE, seed=seed)
        self.lora, self.rows = None if lora is None else dict(lora), list(rows)
        self.operations_told: bool | None = None
        """Whether operations stood before the questions that it was trained on; None where nobody wrote that
        down."""
        self.operations: list[str] | None = None
        """Names of the operations that it was trained with, whose calls have tokens; None where nobody wrote
        that down."""
        self.ocr: str | None = None
        """The reader (`ocr.Reader`) of the READ_TEXT calls that it was trained on; None without such calls,
        or where it is not known."""

    def lists_operations(self, otherwise: bool) -> bool:
        """Return whether it is to be told the operations: as it was trained, else as the settings say."""
        return otherwise if self.operations_told is None else self.operations_told

    @property
    def model(self) -> Network:
        return self.adapters.model

    def base(self) -> AbstractContextManager[None]:
        """Return the context in which the model is the base: what operations run in
        (`Toolbox(adapters_off=...)`)."""
        return self.adapters.using(BASE)

    def about(self) -> dict[str, Any]:
        """Return what `load_policy` needs beside the tensors, and how it is to be asked."""
        config = self.model.config
        tiles = [count for count in (config.min_tiles, config.max_tiles) if count is not None]
        pixels = [count for count in (config.min_pixels, config.max_pixels) if count is not None]
        optional = {"operations_told": self.operations_told, "operations": self.operations, "ocr": self.ocr}
        return {
            "lora": self.lora,
            "rows": self.rows,
            "tokens": self.model.tokenizer.convert_ids_to_tokens(self.rows),
            "tiles": tiles if len(tiles) == 2 else [],
            "pixels": pixels if len(pixels) == 2 and len(tiles) < 2 else [],
            **{name: value for name, value in optional.items() if value is not None},
        }

    def save(self, out: Path, *, base_hash: str, about: Mapping[str, Any]) -> None:
        """Write the trained adapter with the hash of its base. `about` (JSON): how it was trained."""
        config = self.about() | dict(about)
        checkpoint.save_delta(
            self.adapters.tensors(self.adapters.names[0]), out, base_hash=base_hash, config=config
        )


def load_policy(
    base: Path,
    folder: Path,
    *,
    operations: Mapping[str, Operation],
    device: torch.device | str = "cpu",
    names: Sequence[str] = (AGENT,),
    dtype: torch.dtype | None = None,
    quantize: Quantization | None = None,
    reader: str | None = None,
) -> AgentPolicy:
    """Load a trained agent; all adapters begin as what was trained. Raises ValueError where it was trained on
    another base, for what another stage wrote, and where its tokens for calls are not those of `operations`
    any more. Operations that came after its training have none: their tokens would take the places of its
    own. Warns if READ_TEXT has another `reader` here (None: not compared) than in its training.

    quantize: the linear layers that the agent and its base speak with in 8 bits, for inference. LoRA,
    projector and rows of embeddings and head stay as they are; copies of layers take their place only once
    they are loaded, so they are quantized after that, as their base's layers are. With the adapters off the
    model is the base as `Sa2VA.from_pretrained(quantize=...)` loads it."""
    tensors, config = checkpoint.load_delta(folder, base_hash=checkpoint.weights_hash(base))
    if "rows" not in config:
        raise ValueError(
            f"{folder} is of stage {config.get('stage')!r}, not an agent's; give what `agent_sft` or `rft` "
            "wrote"
        )
    copies = config["lora"] is None
    trained_with: list[str] = config.get("operations", list(operations))
    if gone := [name for name in trained_with if name not in operations]:
        raise ValueError(
            f"{folder} was trained with operations that are gone ({', '.join(gone)}); train it again"
        )
    with_tokens = {name: operations[name] for name in trained_with}
    if reader is not None:
        warn_of_other_reader(
            {config["ocr"]} if "ocr" in config else (), here=reader, what=f"the agent in {folder} was trained"
        )
    model = load_base(
        base,
        operations=with_tokens,
        device=device,
        tiles=config.get("tiles", ()),
        pixels=config.get("pixels", ()),
        dtype=dtype,
        quantize=None if copies else quantize,
    )
    row_tokens = model.tokenizer.convert_ids_to_tokens(config["rows"])
    if config.get("tokens", row_tokens) != row_tokens:
        raise ValueError(
            f"{folder} was trained on other tokens: an operation's call_pieces have changed since; train it "
            "again"
        )
    policy = AgentPolicy(model, lora=config["lora"], rows=config["rows"], seed=0, names=names)
    policy.operations_told, policy.operations, policy.ocr = (
        config.get(name) for name in ("operations_told", "operations", "ocr")
    )
    for name in names:
        policy.adapters.load(name, {key: tensor.to(model.device) for key, tensor in tensors.items()})
    if copies and quantize is not None:
        _quantize_with_copies(model.vlm.model.language_model, quantize)
    policy.model.eval()
    return policy


def reader_of(folder: Path, reader: str | None) -> str:
    """Return the reader of READ_TEXT that is asked for; without one, what the agent was trained with, else
    rapidocr. Raises ValueError for a folder without an agent."""
    return reader or checkpoint.delta_config(folder).get("ocr") or "rapidocr"


def warn_of_other_reader(readers: Iterable[str], *, here: str, what: str) -> None:
    """Warn, in the first process, if these readers of READ_TEXT, which `what` was made with, are not the one
    that reads now, `here`."""
    if not (other := sorted(set(readers))) or dist.rank() or other == [here]:
        return
    there = next(reader for reader in other if reader != here)
    warnings.warn(
        f"{what} with what READ_TEXT read by {' and '.join(other)}; now it reads by {here}, so the same "
        "text may be read otherwise."
        f" Set the reader to {there} (agent.reader; --reader), or make traces and agent anew.",
        stacklevel=2,
    )


def _quantize_with_copies(language_model: Any, quantize: Quantization) -> None:
    """Quantize a language model's layers and the copies in them. Those are in fp32, as they were trained:
    they get the layers' precision, which 8-bit weights compute in."""
    work = quantizer(language_model, quantize)
    for layer in language_model.get_submodule("layers").children():
        for module in layer.modules():
            if isinstance(module, ModulesToSaveWrapper):
                module.modules_to_save.to(module.original_module.weight.dtype)
        work(layer)
