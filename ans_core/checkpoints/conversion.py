"""Checkpoint folders of one layout -> folders of the other, tensor by tensor, and upstream's training states
-> models.

    ans convert --check SRC            what a checkpoint is, and whether every tensor is known
    ans convert SRC DST [--to upstream|sa2va-i] [--sam2 sam2_hiera_large.pt]

Only the output shard at hand is in memory. No pickle code is ever run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ans_core import prompts
from ans_core.checkpoints import bases, checkpoint, layouts, pickles, qwen_config, upstream_files
from ans_core.checkpoints import folder as folders
from ans_core.checkpoints.memory import DECODER, ORIGINAL
from ans_core.model.config import Sa2VAConfig
from ans_core.model.network import Network
from ans_core.written import atomic_folder

Kind = Literal["native", "upstream", "sa2va-i"]
"""Our layout; upstream's, with one mask decoder; kumuji's Sa2VA-i, with SAM2's original mask decoder beside
the trained one."""
KINDS = {checkpoint.OUR_TYPE: "native", checkpoint.RELEASE_TYPE: "upstream", **checkpoint.BASES}

LORA_ALPHA_PER_RANK = 2.0
"""Upstream trains with r = 128, alpha = 256; its state holds the rank alone."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """Description of a checkpoint. No `problems` means: every tensor is known, none is missing, all have the
    right shape and are finite, and the files are as the manifest has them."""

    kind: str
    tensors: int
    parameters: int
    dtypes: tuple[str, ...]
    problems: tuple[str, ...]


class Reader:
    """Tensors of a folder by name, read on access."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, Tensor] = {}
        """Shapes and dtypes of all tensors, on the meta device."""
        self._files: dict[str, Path] = {}
        self._added: dict[str, Tensor] = {}
        for name, view, file in folders.tensors_with_file(folders.weight_files(folder)):
            self.shapes[name], self._files[name] = view.to("meta"), file

    def add(self, tensors: dict[str, Tensor]) -> None:
        """Add tensors from another file (as views)."""
        self._added |= tensors
        self.shapes |= {name: tensor.to("meta") for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._added:
            return self._added[name]
        with safe_open(self._files[name], framework="pt") as reader:
            return reader.get_tensor(name)


def account(source: str | Path) -> Account:
    """Compare names and shapes with the model that config.json describes and files with the manifest, and
    look for weights that are NaN or infinite: reads each tensor twice.

    Raises ValueError for a folder that is no checkpoint, or one of another family.
    """
    summary, _, _, reader = _account(Path(source))
    problems = [*summary.problems, *checkpoint.not_finite((name, reader[name]) for name in reader.shapes)]
    try:
        folders.verify(Path(source))
    except ValueError as error:
        problems.append(str(error))
    return replace(summary, problems=tuple(problems))


def parameters(source: str | Path) -> int:
    """Count the parameters by the headers of the files alone. Raises ValueError as `account` does."""
    return _account(Path(source))[0].parameters


def _account(source: Path) -> tuple[Account, Sa2VAConfig, PreTrainedTokenizerBase, Reader]:
    values = checkpoint.read_config(source)
    kind = KINDS[values["model_type"]]
    tokenizer, reader = checkpoint.read_tokenizer(source), Reader(source)
    base = values["model_type"] in checkpoint.BASES
    if base:
        tokenizer.add_tokens(list(prompts.SA2VA_TOKENS), special_tokens=True)
    template = "qwen_chat" if base else None  # a base has none of ours, and its tensors don't depend on it
    config = checkpoint.described(source, values, tokenizer, keys=reader.shapes, template=template)
    tensors = list(reader.shapes.items())
    if kind != "native":
        tensors = list(
            layouts.to_native(
                tensors, replace(layouts.layout_of(config), base=base and config.kind in qwen_config.KINDS)
            )
        )
        kind = "sa2va-i" if config.grounding.original_decoder else kind
    shapes = {name: tensor.shape for name, tensor in checkpoint.empty(config, tokenizer).state_dict().items()}
    if base:
        tied = f"{config.kind}.lm_head.weight" if bases.is_tied(values) else None
        shapes = {
            name: shape
            for name, shape in shapes.items()
            if name.startswith(f"{config.kind}.") and name != tied
        }
    return (
        _account_of(kind, reader.shapes.values(), checkpoint.misfits(shapes, dict(tensors))),
        config,
        tokenizer,
        reader,
    )


def _account_of(kind: str, tensors: Collection[Tensor], problems: Iterable[str]) -> Account:
    return Account(
        kind=kind,
        tensors=len(tensors),
        parameters=sum(t.numel() for t in tensors),
        dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in tensors})),
        problems=tuple(problems),
    )


# Between the layouts

Recipe = tuple[tuple[str, ...], Callable[[list[Tensor]], Tensor]]
"""Names of the input tensors of one output, and the function that makes it."""


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Kind,
    sam2: str | Path = "",
    max_shard: str = "5GB",
    metadata: dict[str, Any],
) -> None:
    """Write `target`, whole or not at all; dtypes are kept. To the same layout, only the shards change.

    `sam2`: a published SAM2 (file, folder or hub id), whose mask decoder is added as the original one.
    `to="upstream"` leaves an original one out. From a release to upstream's layouts, the files beside the
    weights are copied as they are (Python code only where it reads the layout: not from Sa2VA to Sa2VA-i or
    back). Our layout keeps none of them, so from ours config.json, tokenizer and (Qwen-VL) processor files
    are written anew, and upstream's own classes need the code files of a release beside them. Raises
    ValueError for a damaged source, one with a tensor that is not known, missing or mis-shaped, or not
    finite, where an original decoder is wanted but not there, or there twice, and for a target that holds
    something else than an earlier conversion of metadata's `source` (default: `source`).
    """
    source, target = Path(source), Path(target)
    folders.refuse_to_replace(target, metadata.get("source", source))
    folders.verify(source)
    summary, config, tokenizer, reader = _account(source)
    if summary.problems:
        raise ValueError(
            f"{source} does not fit the model that its config.json describes: {'; '.join(summary.problems)}"
        )
    if summary.kind not in get_args(Kind):
        raise ValueError(
            f"{source} is a base ({summary.kind}), half of a Sa2VA: import it together with SAM2 "
            "(base.internvl, base.sam2)"
        )
    native = _to_native(reader.shapes, layouts.layout_of(config), summary.kind)
    if sam2:
        wanted = {
            name: _made(recipe, reader.shapes).shape
            for name, recipe in native.items()
            if name.startswith(DECODER)
        }
        added = _original_decoder(bases.sam2_file(sam2), wanted, config, to)
        config = replace(config, grounding=replace(config.grounding, original_decoder=True))
        reader.add(added)
        native |= _unchanged(added)
    elif to == "sa2va-i" and not config.grounding.original_decoder:
        raise ValueError(
            f"{source} holds one mask decoder; sa2va-i needs SAM2's original one too: --sam2 "
            "sam2_hiera_large.pt"
        )
    recipes = _unchanged(reader.shapes) if summary.kind == to else _from_native(native, config, to)
    shapes = {name: _made(recipe, reader.shapes) for name, recipe in recipes.items()}
    plan = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard)
    total = sum(t.numel() * t.element_size() for t in shapes.values())
    with atomic_folder(target, size=total) as unfinished:
        for file, names in plan.filename_to_tensors.items():
            inputs = {i for name in names for i in recipes[name][0]}
            # views of the source's files: held for a shard, they take no memory
            read = {i: reader[i] for i in inputs}
            if problems := checkpoint.not_finite(read.items()):
                raise ValueError(f"{source}: {'; '.join(problems)}")
            save_file(
                {name: _made(recipes[name], read).contiguous() for name in names},
                unfinished / file,
                metadata={"format": "pt"},
            )
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (unfinished / folders.WEIGHTS_INDEX).write_text(json.dumps(index, indent=1) + "\n")
        if to == "native":
            written = config.as_dict()
            tokenizer.save_pretrained(unfinished)
        elif summary.kind == "native":
            written = upstream_files.upstream_config(config)
            upstream_files.write_tokenizer(tokenizer, unfinished)
            upstream_files.write_processor(config, unfinished)
        else:
            written = checkpoint.read_config(source)
            upstream_files.copy_release(source, unfinished, code=summary.kind == to)
        (unfinished / "config.json").write_text(json.dumps(written, indent=1) + "\n")
        folders.write_manifest(unfinished, metadata)


def _original_decoder(
    file: Path, wanted: Mapping[str, torch.Size], config: Sa2VAConfig, to: Kind
) -> dict[str, Tensor]:
    """Read the mask decoder of a SAM2 file, named as the original one of a model. `wanted`: the trained one's
    shapes."""
    if config.grounding.original_decoder:
        raise ValueError(f"the source holds an original mask decoder already; leave --sam2 {file} out")
    if to == "upstream":
        raise ValueError(
            "upstream's layout has one mask decoder; add SAM2's original one with --to native or --to sa2va-i"
        )
    decoder = {
        k.removeprefix("sam_mask_decoder."): t
        for k, t in bases.sam2_tensors(file)
        if k.startswith("sam_mask_decoder.")
    }
    if problems := checkpoint.misfits({k.removeprefix(DECODER): s for k, s in wanted.items()}, decoder):
        raise ValueError(f"the mask decoder of {file} does not fit: {'; '.join(problems)}")
    return {ORIGINAL + name: tensor for name, tensor in decoder.items()}


def _made(recipe: Recipe, tensors: Mapping[str, Tensor]) -> Tensor:
    inputs, make = recipe
    return make([tensors[i] for i in inputs])


def _unchanged(names: Iterable[str]) -> dict[str, Recipe]:
    return {name: ((name,), lambda parts: parts[0]) for name in names}


def _to_native(shapes: Mapping[str, Tensor], layout: layouts.Layout, kind: str) -> dict[str, Recipe]:
    """Map our tensors to recipes over the source's."""
    if kind == "native":
        return _unchanged(shapes)
    return {
        name: ((key,), _cutting(key, place, layout))
        for key in shapes
        for place, name in enumerate(layouts.native_names(key, layout))
    }


def _cutting(key: str, place: int, layout: layouts.Layout) -> Callable[[list[Tensor]], Tensor]:
    return lambda parts: layouts.split(key, parts[0], layout)[place]


def _from_native(native: Mapping[str, Recipe], config: Sa2VAConfig, to: Kind) -> dict[str, Recipe]:
    """Map the target's tensors to recipes over the source's, by way of ours."""
    if to == "native":
        return dict(native)
    layout = replace(layouts.layout_of(config), two_decoders=to == "sa2va-i")
    keys = dict.fromkeys(
        layouts.upstream_name(name, layout)
        for name in native
        if layout.two_decoders or not name.startswith(ORIGINAL)
    )
    return {
        key: _joining(key, [native[name] for name in layouts.native_names(key, layout)], layout)
        for key in keys
    }


def _joining(key: str, parts: list[Recipe], layout: layouts.Layout) -> Recipe:
    def make(inputs: list[Tensor]) -> Tensor:
        remaining = iter(inputs)
        return layouts.join(key, [made([next(remaining) for _ in names]) for names, made in parts], layout)

    return tuple(name for names, _ in parts for name in names), make


# Upstream's training states

TRAINED_PARTS = ("mlp1.", "text_hidden_fcs.", f"{layouts.UP_SAM}.sam_mask_decoder.")
WORDS = re.compile(
    r"language_model\.(model\.(embed_tokens|tok_embeddings)|lm_head|output)\.weight"
    r"|model\.(model\.language_model\.embed_tokens|lm_head)\.weight"  # Qwen-VL
)
LAYERS = ("language_model.model.layers.", "model.model.language_model.layers.")
"""Upstream trains TRAINED_PARTS (Qwen-VL has no mlp1) and WORDS fully, and LoRA on every matrix of LAYERS."""
DEEPSPEED_FILE, ZERO3_FILES = "mp_rank_00_model_states.pt", "zero_pp_rank_*_model_states.pt"
"""Files inside `iter_1000.pth` or `global_step1000` where that is a folder: all weights; with ZeRO-3 a
process's share of them."""
POINTERS = ("latest", "last_checkpoint")
"""Files in the folder around training states that name the last one: DeepSpeed's, mmengine's."""


def _file_of(state: str | Path) -> Path:
    file = training_file(Path(state))
    if file is None:
        raise ValueError(f"{state} is no training state: neither a file nor a folder with {DEEPSPEED_FILE}")
    return file


def training_file(source: Path) -> Path | None:
    """Find the file of a training state: `source` itself, the one in DeepSpeed's folder, or in the last one
    of the folders in `source`. None for any other folder. Raises ValueError, with the way out, for weights
    that ZeRO-3 divided and where no last state is named."""
    if not source.is_dir() or (source / "config.json").exists():
        return source if source.is_file() else None
    state = _last_state(source)
    file = state / DEEPSPEED_FILE if state.is_dir() else state
    if not file.exists() and any(state.glob(ZERO3_FILES)):
        place = state.resolve()
        raise ValueError(
            f"{state} holds weights that ZeRO-3 divided among processes. DeepSpeed's zero_to_fp32.py joins "
            f"them: `python -m deepspeed.utils.zero_to_fp32 {place.parent} OUT -t {place.name} "
            "--max_shard_size 1000GB`; then give OUT/pytorch_model.bin"
        )
    return file if file.is_file() else None


def _last_state(source: Path) -> Path:
    for pointer in (source / name for name in POINTERS if (source / name).is_file()):
        # mmengine's path is of the machine that trained
        state = source / Path(pointer.read_text(encoding="utf-8").strip()).name
        if not state.exists():
            raise ValueError(
                f"{pointer} names {state.name}, which is not there; give a training state by its own name"
            )
        return state
    inside = sorted(
        {file.parent for pattern in (DEEPSPEED_FILE, ZERO3_FILES) for file in source.glob(f"*/{pattern}")}
    )
    if inside:
        raise ValueError(
            f"{source} holds training states and no file that names the last; give one: "
            f"{', '.join(map(str, inside))}"
        )
    return source


def from_training_state(
    state: str | Path,
    *,
    internvl: str | Path,
    sam2: str | Path,
    template: str,
    alpha_per_rank: float = LORA_ALPHA_PER_RANK,
) -> Network:
    """Build a model of what upstream's training saved (.pth, a folder of DeepSpeed's, or .safetensors:
    trained tensors alone with LoRA unmerged, or a whole model under the same names) on the bases it was
    trained from. LoRA is merged: W + alpha / r * B A.

    Raises ValueError listing keys that fit nothing of the bases, mis-shaped tensors, and what is missing: the
    bases stand in for no tensor that upstream trains. A state with anything beside those is a whole model.
    LoRA is on every matrix of the layers, or on none.
    """
    file = _file_of(state)
    model = bases.import_base(internvl, sam2, template)
    merged, remaining, layout = _by_release_names(model)
    saved = _state_tensors(file, release_names=merged)
    if problems := _state_problems(merged, saved):
        raise ValueError(f"{state} does not fit {internvl} with {sam2}: {'; '.join(problems)}")
    if problems := checkpoint.not_finite(saved.items()):
        raise ValueError(f"{state}: {'; '.join(problems)}")
    merged |= {key: tensor for key, tensor in saved.items() if key in merged}
    for down in (key for key in saved if key.endswith(".lora_A")):
        key, up = f"{down.removesuffix('.lora_A')}.weight", f"{down.removesuffix('A')}B"
        change = alpha_per_rank * saved[up].float() @ saved[down].float()
        merged[key] = (merged[key].float() + change).to(merged[key].dtype)
    checkpoint.fill(model, (*layouts.to_native(merged.items(), layout), *remaining.items()), where=str(state))
    return model.eval()


def training_account(state: str | Path, *, internvl: str | Path, sam2: str | Path, template: str) -> Account:
    """Describe a training state as `account` does; its bases are read."""
    file = _file_of(state)
    merged, _, _ = _by_release_names(bases.import_base(internvl, sam2, template))
    saved = _state_tensors(file, release_names=merged)
    kind = (
        "training state with LoRA unmerged"
        if any(key.endswith(".lora_A") for key in saved)
        else "training state"
    )
    return _account_of(
        kind, saved.values(), (*_state_problems(merged, saved), *checkpoint.not_finite(saved.items()))
    )


def _by_release_names(model: Network) -> tuple[dict[str, Tensor], dict[str, Tensor], layouts.Layout]:
    """Return a model's tensors as named in a release with one mask decoder, the remaining tensors by our
    names, and that layout."""
    layout = replace(layouts.layout_of(model.config), two_decoders=False)
    state = model.state_dict()
    remaining = {name: tensor for name, tensor in state.items() if name.startswith(ORIGINAL)}
    return (
        dict(
            layouts.to_upstream(
                {name: tensor for name, tensor in state.items() if name not in remaining}, layout
            )
        ),
        remaining,
        layout,
    )


def _state_tensors(file: Path, *, release_names: Container[str]) -> dict[str, Tensor]:
    """Read the tensors of a training state, by their names in a release where these are `release_names`."""
    tensors: dict[str, Tensor] = {}
    for saved, tensor in _training_tensors(file):
        if ".original_module." in saved:
            continue  # PEFT's copy of the base beside the module that was trained
        key = _plain_key(saved, release_names)
        fits = key not in tensors and (key in release_names or key.endswith((".lora_A", ".lora_B")))
        # what is unknown, or there twice, is told by the name that the file has
        tensors[key if fits else saved] = tensor
    return tensors


def _state_problems(merged: Mapping[str, Tensor], saved: Mapping[str, Tensor]) -> list[str]:
    return checkpoint.misfits(
        _wanted_of_state({key: tensor.shape for key, tensor in merged.items()}, saved), saved
    )


def _wanted_of_state(shapes: Mapping[str, torch.Size], saved: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    """Return the names and shapes that a training state with `saved` must have. `shapes`: those of the model.
    LoRA's rank is each matrix's own."""
    trained = {
        key: shape for key, shape in shapes.items() if key.startswith(TRAINED_PARTS) or WORDS.fullmatch(key)
    }
    wanted = dict(shapes if any(key in shapes and key not in trained for key in saved) else trained)
    adapted = {key.rpartition(".lora_")[0] for key in saved if key.endswith((".lora_A", ".lora_B"))}
    if adapted:
        adapted |= {
            key.removesuffix(".weight")
            for key, shape in shapes.items()
            if key.startswith(LAYERS) and len(shape) == 2
        }
    for matrix in adapted:
        if (shape := shapes.get(f"{matrix}.weight")) and len(shape) == 2:
            down, up = saved.get(f"{matrix}.lora_A"), saved.get(f"{matrix}.lora_B")
            rank = (
                down.shape[0]
                if down is not None and down.ndim
                else up.shape[-1]
                if up is not None and up.ndim
                else 0
            )
            wanted |= {
                f"{matrix}.lora_A": torch.Size((rank, shape[1])),
                f"{matrix}.lora_B": torch.Size((shape[0], rank)),
            }
    return wanted


def _training_tensors(file: Path) -> Iterable[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        return folders.tensors([file])
    state = pickles.read(file, entry="state_dict")
    for name in ("state_dict", "module"):  # mmengine's, DeepSpeed's
        state = state[name] if isinstance(state, dict) and name in state else state
    return pickles.tensors(file, state)


def _plain_key(key: str, release_names: Container[str]) -> str:
    """Return the name in a release: without the wrappers of training (mmengine's `mllm.`, PEFT's; InternVL's
    names lose the `model.` after it, Qwen-VL's keep it), SAM2's gamma as upstream calls it; LoRA's halves are
    called as their matrix, with `.lora_A` and `.lora_B`."""
    key = key.removeprefix("mllm.").replace("base_model.model.", "")
    key = re.sub(r"\.(base_layer|modules_to_save\.default)\.", ".", key)
    key = re.sub(r"(\.lora_[AB])\.(?:\w+\.)?weight$", r"\1", key)
    if re.sub(r"\.lora_[AB]$", ".weight", key) not in release_names:
        key = key.removeprefix("model.")
    return re.sub(r"(fuser\.layers\.\d+)\.gamma$", r"\1.g_weight", key)
