"""Published bases in, the model that SFT starts from out: InternVL joined with SAM2, or a whole Sa2VA
release."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ans_core import prompts
from ans_core.checkpoints import checkpoint, layouts, pickles, qwen_config
from ans_core.checkpoints import folder as folders
from ans_core.model.network import Network


def import_base(internvl: str | Path, sam2: str | Path, template: str, *, seed: int = 0) -> Network:
    """Build the model that SFT starts from: an InternVL2.5, Qwen2.5-VL or Qwen3-VL (hub's layout) joined with
    a SAM2, or a whole Sa2VA, a release or one of ours (`sam2` empty).

    Both are hub ids or local: a folder, for SAM2 also a file. The tokenizer gets `[SEG] <p> </p> <vp> </vp>`;
    their embeddings, and `text_hidden_fcs`, which no base has, are drawn from `seed`. Raises ValueError as
    `load` does.
    """
    folder = folders.local_folder(internvl)
    values = checkpoint.read_config(folder)
    sa2va_types = (checkpoint.RELEASE_TYPE, checkpoint.OUR_TYPE)
    if values["model_type"] in sa2va_types:
        if str(sam2):
            raise ValueError(
                f"{internvl} is a whole Sa2VA and holds its own SAM2; leave base.sam2 empty (it is "
                f"{str(sam2)!r})"
            )
        return checkpoint.load(folder)
    if values["model_type"] not in checkpoint.BASES:
        valid_types = ", ".join((*checkpoint.BASES, *sa2va_types))
        raise ValueError(
            f"{folder}/config.json: model_type {values['model_type']!r}; a base is one of {valid_types}"
        )
    if not str(sam2):
        raise ValueError(
            f"{internvl} is a {values['model_type']}, no whole Sa2VA ({', '.join(sa2va_types)}): name the SAM2 to "
            "join it with (base.sam2)"
        )
    file = sam2_file(sam2)
    # beside small test weights; the published file is hiera-large
    sizes_file = file.with_name("tiny_sam2_config.json")
    tokenizer = checkpoint.read_tokenizer(folder)
    words = len(tokenizer)
    tokenizer.add_tokens(list(prompts.SA2VA_TOKENS), special_tokens=True)
    with folders.reading(sizes_file):
        sizes = layouts.grounding_config(
            json.loads(sizes_file.read_text(encoding="utf-8")) if sizes_file.exists() else None
        )
    config = checkpoint.described(folder, values, tokenizer, template=template, sam2=sizes)
    config.backbone["text_config"]["vocab_size"] = len(tokenizer)
    model = checkpoint.empty(config, tokenizer, where=folder)
    generator = torch.Generator().manual_seed(seed)
    folders.verify(folder)
    layout = replace(layouts.layout_of(config), base=config.kind in qwen_config.KINDS)
    base = layouts.to_native(
        _untied(folders.tensors(folders.weight_files(folder)), tied=is_tied(values)), layout
    )
    grown = ((name, _grown(name, tensor, words, len(tokenizer), generator)) for name, tensor in base)
    grounding = ((f"sam2.{key}", tensor) for key, tensor in sam2_tensors(file))
    fresh = (
        (f"text_hidden_fcs.{key}", tensor) for key, tensor in _fresh_head(model.text_hidden_fcs, generator)
    )
    checkpoint.fill(model, (*grown, *grounding, *fresh), where=f"{internvl} with {sam2}")
    model.keep_original_decoder()
    return model.eval()


def sam2_file(source: str | Path) -> Path:
    """Find the file of SAM2 weights: `source` itself, the only .pt (else .safetensors) in that folder, or a
    hub repository's .pt."""
    if Path(source).is_file():
        return Path(source)
    folder = folders.local_folder(source, ("*.pt",))
    for ending in ("*.pt", "*.safetensors"):
        files = sorted(folder.glob(ending))
        if len(files) == 1:
            return files[0]
        if files:
            raise ValueError(
                f"{folder} holds {len(files)} files {ending} ({files[0].name}, ...); name the one of SAM2"
            )
    raise ValueError(f"{folder} holds no SAM2 weights (.pt or .safetensors)")


def sam2_tensors(file: Path) -> Iterable[tuple[str, Tensor]]:
    """Read the tensors of a published SAM2 file by SAM2's names; no pickle code is run. Raises ValueError for
    a file of something else."""
    if file.suffix == ".safetensors":
        return folders.tensors([file])
    state = pickles.read(file, entry="model")
    if not isinstance(state, dict) or "model" not in state:
        raise ValueError(f"{file} is no SAM2 checkpoint: it has no entry 'model'")
    return pickles.tensors(file, state["model"])


def is_tied(values: Mapping[str, Any]) -> bool:
    """Say whether a base's head is its embedding, and is not stored."""
    text = values.get("text_config", {})
    return bool(
        values.get("tie_word_embeddings", isinstance(text, Mapping) and text.get("tie_word_embeddings"))
    )


def _untied(state: Iterable[tuple[str, Tensor]], *, tied: bool) -> Iterable[tuple[str, Tensor]]:
    """Add the head of a base whose embedding stands for it: Sa2VA trains both."""
    for name, tensor in state:
        yield name, tensor
        if tied and name.endswith("embed_tokens.weight"):
            yield "lm_head.weight", tensor


def _grown(name: str, tensor: Tensor, words: int, rows: int, generator: torch.Generator) -> Tensor:
    """Cut embedding and head to the tokenizer's words (Qwen's are padded), and add rows for the new tokens,
    initialised as transformers does (normal, std 0.02)."""
    if not name.endswith(("embed_tokens.weight", "lm_head.weight")):
        return tensor
    new = torch.randn(rows - min(words, len(tensor)), tensor.shape[1], generator=generator) * 0.02
    return torch.cat([tensor[:words], new.to(tensor.dtype)])


def _fresh_head(head: nn.Module, generator: torch.Generator) -> list[tuple[str, Tensor]]:
    """Initialise Linear layers as torch does: weights and biases uniform within 1 / sqrt(inputs)."""
    tensors = []
    for name, layer in head.named_children():
        if isinstance(layer, nn.Linear):
            bound = layer.in_features**-0.5
            for key, shape in (("weight", layer.weight.shape), ("bias", layer.bias.shape)):
                tensors.append((f"{name}.{key}", (torch.rand(shape, generator=generator) * 2 - 1) * bound))
    return tensors
