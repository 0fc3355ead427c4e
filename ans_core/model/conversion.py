"""Checkpoint folders of one layout -> folders of the other, tensor by tensor, and upstream's training states -> models.

    ans convert --check SRC            what a folder is, and whether every tensor is known
    ans convert SRC DST [--to upstream|sa2va-i] [--sam2 sam2_hiera_large.pt]

Only the output shard at hand is in memory. No pickle code is ever run.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
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
from ans_core.model import checkpoint, layouts
from ans_core.model import folder as folders
from ans_core.model.grounding import GroundingConfig
from ans_core.model.sa2va import Sa2VA, Sa2VAConfig

Kind = Literal["native", "upstream", "sa2va-i"]
"""Ours; upstream's releases, with one mask decoder; kumuji's Sa2VA-i, which has SAM2's original one beside it."""
KINDS = {checkpoint.OUR_TYPE: "native", checkpoint.RELEASE_TYPE: "upstream", checkpoint.BASE_TYPE: "InternVL base"}
OTHER_FAMILIES = ("qwen", "llava")
"""In the names of Sa2VA releases that are built on other models."""

TRAINED, ORIGINAL = "sam2.sam_mask_decoder.", "sam2.original_mask_decoder."
"""Our names of SAM2's mask decoder after and before Sa2VA's training."""

LORA_ALPHA_PER_RANK = 2.0
"""Upstream trains with r = 128, alpha = 256; its state holds the rank alone."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """What a checkpoint folder is. `problems` empty: every tensor is known, none is missing, all have their shape."""

    kind: str
    tensors: int
    parameters: int
    dtypes: tuple[str, ...]
    problems: tuple[str, ...]


class Reader:
    """The tensors of a folder by name, read when asked for."""

    def __init__(self, folder: Path) -> None:
        self.shapes: dict[str, Tensor] = {}
        """On the meta device: shapes and dtypes without memory."""
        self._files: dict[str, Path] = {}
        self._added: dict[str, Tensor] = {}
        for file in folders.weight_files(folder):
            for name, view in folders.tensors([file]):
                self.shapes[name], self._files[name] = view.to("meta"), file

    def add(self, tensors: dict[str, Tensor]) -> None:
        """From elsewhere than the folder (views of another file)."""
        self._added |= tensors
        self.shapes |= {name: tensor.to("meta") for name, tensor in tensors.items()}

    def __getitem__(self, name: str) -> Tensor:
        if name in self._added:
            return self._added[name]
        with safe_open(self._files[name], framework="pt") as reader:
            return reader.get_tensor(name)


def account(source: str | Path) -> Account:
    """Compares names and shapes with the model that config.json describes, on the meta device; reads no weights.

    Raises ValueError for a folder that is no checkpoint, or one of another family.
    """
    return _account(Path(source))[0]


def _account(source: Path) -> tuple[Account, Sa2VAConfig, PreTrainedTokenizerBase, Reader]:
    values = checkpoint.read_config(source)
    kind = KINDS.get(values["model_type"], "")
    if not kind:
        family = next((name for name in OTHER_FAMILIES if name in json.dumps(values).lower()), None)
        because = f"it is built on {family}, and only InternVL's are read" if family else f"known are {', '.join(KINDS)}"
        raise ValueError(f"{source}/config.json: model_type {values['model_type']!r}: {because}")
    tokenizer, reader = checkpoint.read_tokenizer(source), Reader(source)
    if kind == "native":
        config = Sa2VAConfig.from_dict(values)
        found = list(reader.shapes.items())
    else:
        if kind == "InternVL base":
            tokenizer.add_tokens(list(prompts.SA2VA_TOKENS), special_tokens=True)
        two = layouts.has_two_decoders(reader.shapes)
        kind = "sa2va-i" if two else kind
        config = layouts.from_upstream_config(values, tokenizer, template=values.get("template", "qwen_chat"), two_decoders=two)
        found = list(layouts.to_native(reader.shapes.items(), layouts.layout_of(config)))
    shapes = {name: tensor.shape for name, tensor in checkpoint.empty(config, tokenizer).state_dict().items()}
    if kind == "InternVL base":
        shapes = {name: shape for name, shape in shapes.items() if name.startswith("internvl.")}
    sizes = reader.shapes.values()
    told = Account(
        kind=kind,
        tensors=len(reader.shapes),
        parameters=sum(t.numel() for t in sizes),
        dtypes=tuple(sorted({str(t.dtype).removeprefix("torch.") for t in sizes})),
        problems=tuple(checkpoint.misfits(shapes, {name: tensor.shape for name, tensor in found})),
    )
    return told, config, tokenizer, reader


# Between the layouts

Recipe = tuple[tuple[str, ...], Callable[[list[Tensor]], Tensor]]
"""Names of the tensors that an output is made of, and how."""


def convert(
    source: str | Path, target: str | Path, *, to: Kind, sam2: str | Path = "", max_shard: str = "5GB", metadata: dict[str, Any]
) -> None:
    """Writes `target`, whole or not at all; dtypes are kept. The same layout as before: shards are written anew.

    `sam2`: a published SAM2 (file, folder or hub id), whose mask decoder is added as the original one. `to="upstream"` leaves an original
    one out. An upstream folder needs the code files of a release beside the weights to be loaded by upstream's own classes.
    Raises ValueError for a damaged source, one with a tensor that is not known, missing or mis-shaped (all are listed), and where an
    original decoder is wanted but not there, or there twice, and for a target that holds something else than a former output.
    """
    source, target = Path(source), Path(target)
    folders.refuse_to_replace(target)
    folders.verify(source)
    told, config, tokenizer, reader = _account(source)
    if told.problems:
        raise ValueError(f"{source} does not fit the model that its config.json describes: {'; '.join(told.problems)}")
    if told.kind not in get_args(Kind):
        raise ValueError(f"{source} is an {told.kind}, half of a Sa2VA: import it together with SAM2 (base.internvl, base.sam2)")
    native = _to_native(reader.shapes, layouts.layout_of(config), told.kind)
    if sam2:
        wanted = {name: _made(recipe, reader.shapes).shape for name, recipe in native.items() if name.startswith(TRAINED)}
        added = _original_decoder(checkpoint.sam2_file(sam2), wanted, config, to)
        config = replace(config, grounding=replace(config.grounding, original_decoder=True))
        reader.add(added)
        native |= _unchanged(added)
    elif to == "sa2va-i" and not config.grounding.original_decoder:
        raise ValueError(f"{source} holds one mask decoder; sa2va-i needs SAM2's original one too: --sam2 sam2_hiera_large.pt")
    recipes = _unchanged(reader.shapes) if told.kind == to else _from_native(native, config, to)
    shapes = {name: _made(recipe, reader.shapes) for name, recipe in recipes.items()}
    plan = split_torch_state_dict_into_shards(shapes, max_shard_size=max_shard)
    total = sum(t.numel() * t.element_size() for t in shapes.values())
    with folders.written_whole(target, size=total) as unfinished:
        for file, names in plan.filename_to_tensors.items():
            inputs = {i for name in names for i in recipes[name][0]}
            read = {i: reader[i] for i in inputs}  # views of the source's files: held for a shard, they take no memory
            save_file({name: _made(recipes[name], read).contiguous() for name in names}, unfinished / file, metadata={"format": "pt"})
        if plan.is_sharded:
            index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
            (unfinished / folders.WEIGHTS_INDEX).write_text(json.dumps(index, indent=1) + "\n")
        tokenizer.save_pretrained(unfinished)
        written = (
            config.as_dict() if to == "native" else checkpoint.read_config(source) if told.kind != "native" else upstream_config(config)
        )
        (unfinished / "config.json").write_text(json.dumps(written, indent=1) + "\n")
        folders.write_manifest(unfinished, metadata)


def _original_decoder(file: Path, wanted: Mapping[str, torch.Size], config: Sa2VAConfig, to: Kind) -> dict[str, Tensor]:
    """The mask decoder of a SAM2 file by the names that it has in a model as the original one. `wanted`: the trained one's shapes."""
    if config.grounding.original_decoder:
        raise ValueError(f"the source holds an original mask decoder already; leave --sam2 {file} out")
    if to == "upstream":
        raise ValueError("upstream's layout has one mask decoder; add SAM2's original one with --to native or --to sa2va-i")
    found = {k.removeprefix("sam_mask_decoder."): t for k, t in checkpoint.sam2_tensors(file) if k.startswith("sam_mask_decoder.")}
    if problems := checkpoint.misfits({k.removeprefix(TRAINED): s for k, s in wanted.items()}, {k: t.shape for k, t in found.items()}):
        raise ValueError(f"the mask decoder of {file} does not fit: {'; '.join(problems)}")
    return {ORIGINAL + name: tensor for name, tensor in found.items()}


def _made(recipe: Recipe, tensors: Mapping[str, Tensor]) -> Tensor:
    inputs, make = recipe
    return make([tensors[i] for i in inputs])


def _unchanged(names: Iterable[str]) -> dict[str, Recipe]:
    return {name: ((name,), lambda parts: parts[0]) for name in names}


def _to_native(shapes: Mapping[str, Tensor], layout: layouts.Layout, kind: str) -> dict[str, Recipe]:
    """How our tensors are made of the source's."""
    if kind == "native":
        return _unchanged(shapes)
    return {name: ((key,), _cutting(key, place, layout)) for key in shapes for place, name in enumerate(layouts.native_names(key, layout))}


def _cutting(key: str, place: int, layout: layouts.Layout) -> Callable[[list[Tensor]], Tensor]:
    return lambda parts: layouts.split(key, parts[0], layout)[place]


def _from_native(native: Mapping[str, Recipe], config: Sa2VAConfig, to: Kind) -> dict[str, Recipe]:
    """How the target's tensors are made of the source's, by way of ours."""
    if to == "native":
        return dict(native)
    layout = replace(layouts.layout_of(config), two_decoders=to == "sa2va-i")
    keys = dict.fromkeys(layouts.upstream_name(name, layout) for name in native if layout.two_decoders or not name.startswith(ORIGINAL))
    return {key: _joining(key, [native[name] for name in layouts.native_names(key, layout)], layout) for key in keys}


def _joining(key: str, parts: list[Recipe], layout: layouts.Layout) -> Recipe:
    def make(inputs: list[Tensor]) -> Tensor:
        given = iter(inputs)
        return layouts.join(key, [made([next(given) for _ in names]) for names, made in parts], layout)

    return tuple(name for names, _ in parts for name in names), make


def upstream_config(config: Sa2VAConfig) -> dict[str, Any]:
    """Our configuration -> upstream's config.json, as `layouts.from_upstream_config` reads it and upstream's classes need it."""
    vision, text = config.internvl["vision_config"], config.internvl["text_config"]
    side = vision["image_size"][0]
    grounding = {theirs: getattr(config.grounding, ours) for ours, theirs in layouts.SAM_KEYS.items()}
    return {
        "model_type": checkpoint.RELEASE_TYPE,
        "architectures": ["Sa2VAChatModel"],
        "auto_map": {
            "AutoConfig": "configuration_sa2va_chat.Sa2VAChatConfig",
            "AutoModel": "modeling_sa2va_chat.Sa2VAChatModel",
            "AutoModelForCausalLM": "modeling_sa2va_chat.Sa2VAChatModel",
        },
        "vision_config": _upstream_vision(vision),
        "llm_config": _upstream_text(text),
        "template": config.template,
        "dynamic_image_size": config.max_tiles > 1,
        "max_dynamic_patch": config.max_tiles,
        "min_dynamic_patch": 1,
        "use_thumbnail": True,
        "force_image_size": side,
        "downsample_ratio": config.internvl["downsample_ratio"],
        "ps_version": "v2",
        "select_layer": -1,
        "pad2square": False,
        "use_backbone_lora": 0,
        "use_llm_lora": 0,
        "hidden_size": text["hidden_size"],
        "tie_word_embeddings": False,
    } | ({} if replace(config.grounding, original_decoder=False) == GroundingConfig() else {"tiny_sam2_config": grounding})


def _upstream_vision(ours: Mapping[str, Any]) -> dict[str, Any]:
    copied = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    return {
        **{key: ours[key] for key in copied},
        "hidden_act": ours.get("hidden_act", "gelu"),
        "norm_type": ours.get("norm_type", "layer_norm"),
        "layer_norm_eps": ours.get("layer_norm_eps", 1e-6),
        "model_type": "intern_vit_6b",
        "architectures": ["InternVisionModel"],
        "image_size": ours["image_size"][0],
        "patch_size": ours["patch_size"][0],
        "num_channels": 3,
        "qkv_bias": ours["attention_bias"],
        "qk_normalization": ours.get("use_qk_norm", False),
        "use_flash_attn": False,
        "dropout": 0.0,
        "drop_path_rate": 0.0,
        "attention_dropout": 0.0,
    }


def _upstream_text(ours: Mapping[str, Any]) -> dict[str, Any]:
    kind = {"llama": "internlm2"}.get(ours["model_type"], ours["model_type"])
    classes = {"qwen2": "Qwen2ForCausalLM", "internlm2": "InternLM2ForCausalLM", "phi3": "Phi3ForCausalLM"}
    rope = dict(ours["rope_parameters"])
    theta, scaling = rope.pop("rope_theta"), rope.pop("rope_type")
    dropped = ("rope_parameters", "attention_bias", "mlp_bias")
    config = {key: value for key, value in ours.items() if key not in dropped}
    config |= {"model_type": kind, "architectures": [classes[kind]], "rope_theta": theta}
    config["rope_scaling"] = None if scaling == "default" else {"type": scaling, **rope}
    return config | ({"bias": ours.get("attention_bias", False)} if kind == "internlm2" else {})


# Upstream's training states


def from_training_state(
    state: str | Path, *, internvl: str | Path, sam2: str | Path, template: str, alpha_per_rank: float = LORA_ALPHA_PER_RANK
) -> Sa2VA:
    """What upstream's training saved (.pth or .safetensors: trained tensors alone with LoRA unmerged, or a whole model under the same
    names) on the bases it was trained from. LoRA is merged: W + alpha / r * B A.

    Raises ValueError listing keys that fit nothing of the bases, LoRA halves without the other, and mis-shaped tensors.
    """
    model = checkpoint.import_base(internvl, sam2, template)
    layout = replace(layouts.layout_of(model.config), two_decoders=False)
    state_of = model.state_dict()
    kept = {name: tensor for name, tensor in state_of.items() if name.startswith(ORIGINAL)}
    merged = dict(layouts.to_upstream({name: tensor for name, tensor in state_of.items() if name not in kept}, layout))
    halves: dict[str, dict[str, Tensor]] = {}
    wanted: dict[str, torch.Size] = {}
    found: dict[str, torch.Size] = {}
    for saved, tensor in _training_tensors(Path(state)):
        if ".original_module." in saved:
            continue  # PEFT's copy of the base beside the module that was trained
        key = _plain_key(saved)
        if match := re.fullmatch(r"(.+)\.lora_([AB])\.(?:\w+\.)?weight", key):
            halves.setdefault(f"{match[1]}.weight", {})[match[2]] = tensor
            continue
        found[saved] = tensor.shape
        if key in merged:
            wanted[saved] = merged[key].shape
            merged[key] = tensor
    for key, pair in halves.items():
        if key not in merged or pair.keys() != {"A", "B"}:
            found[f"LoRA of {key}"] = torch.Size()
        else:
            change = alpha_per_rank * pair["B"].float() @ pair["A"].float()
            merged[key] = (merged[key].float() + change).to(merged[key].dtype)
    if problems := checkpoint.misfits(wanted, found):
        raise ValueError(f"{state} does not fit {internvl} with {sam2}: {'; '.join(problems)}")
    checkpoint.fill(model, (*layouts.to_native(merged.items(), layout), *kept.items()), where=str(state))
    return model.eval()


def _training_tensors(file: Path) -> Iterator[tuple[str, Tensor]]:
    if file.suffix == ".safetensors":
        yield from folders.tensors([file])
        return
    state = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    for name in ("state_dict", "module"):
        state = state[name] if isinstance(state, dict) and name in state else state
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{file} holds no state dict of tensors")
    yield from state.items()


def _plain_key(key: str) -> str:
    """The name in a release: without the wrappers of training (mmengine's `mllm.model.`, PEFT's), SAM2's gamma as upstream calls it."""
    key = key.removeprefix("mllm.model.").removeprefix("mllm.")
    key = key.replace("language_model.base_model.model.", "language_model.")
    key = re.sub(r"\.(base_layer|modules_to_save\.default)\.", ".", key)
    return re.sub(r"(fuser\.layers\.\d+)\.gamma$", r"\1.g_weight", key)
