"""Model folders <-> Sa2VA: ours and upstream's Hugging Face layout are read, ours is written; trained tensors
alone are deltas.

Our folder: config.json (Sa2VAConfig), tokenizer files, sharded safetensors with index, manifest.json. No
pickle code is ever run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from accelerate import init_empty_weights
from huggingface_hub import save_torch_state_dict
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, Qwen2Tokenizer
from transformers.modeling_layers import GradientCheckpointingLayer
from typing_extensions import TypeVar

from ans_core import prompts
from ans_core.checkpoints import folder as folders
from ans_core.checkpoints import layouts, qwen_config, sentencepiece
from ans_core.model.config import Sa2VAConfig
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import HALF, Network
from ans_core.model.quantization import Quantization, check, is_quantized, quantizer
from ans_core.precision import inference_dtype, warn_if_emulated
from ans_core.written import atomic_folder

Model = TypeVar("Model", bound=Network, default=Network)

OUR_TYPE, RELEASE_TYPE = "ans_sa2va", "sa2va_chat"
BASES = {"internvl_chat": "InternVL base", "qwen2_5_vl": "Qwen2.5-VL base", "qwen3_vl": "Qwen3-VL base"}
"""model_type of the backbones' own repositories -> what they are."""
WINDOW_OFF = ("qwen2", "qwen2_5_vl_text")
"""Text models whose `sliding_window` counts only with `use_sliding_window`."""
OTHER_FAMILIES = ("llava", "sam3")
"""Parts of the names of Sa2VA releases that are built on other models."""
WEIGHT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
DTYPES = (*WEIGHT_DTYPES, torch.float64)
"""dtypes of tensors that count as weights."""
LISTED = 10
"""Names of tensors that one line of a message holds; the line says how many more there are."""
CONFIG_SUFFIXES = (".json", ".txt", ".model")
DELTA, DELTA_WEIGHTS = "delta.json", "delta.safetensors"


# Whole models


def save(model: Network, path: Path, *, max_shard: str = "5GB", metadata: dict[str, Any]) -> None:
    """Write our folder, whole or not at all; a folder already at `path` is replaced. LoRA must have been
    merged.

    `metadata` (JSON) goes into the manifest. dtypes are kept. Raises ValueError for quantized weights, of
    which no folder can be made.
    """
    state = model.state_dict()
    if any(is_quantized(tensor) for tensor in state.values()):
        raise ValueError(
            "the model's weights are quantized, which is for inference: save the model that was loaded "
            "without `quantize`"
        )
    with atomic_folder(path, size=_bytes(state.values())) as partial:
        (partial / "config.json").write_text(json.dumps(model.config.as_dict(), indent=1) + "\n")
        model.tokenizer.save_pretrained(partial)
        save_torch_state_dict(state, partial, max_shard_size=max_shard)
        folders.write_manifest(partial, metadata)


def load(
    path: str | Path,
    *,
    kind: type[Model] = Network,  # type: ignore[assignment]
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    divide: Callable[[nn.Module], None] | None = None,
    quantize: Quantization | None = None,
) -> Model:
    """Load a Sa2VA in eval mode from our folder or a release in upstream's layout, or of what a stage trained
    (runs/<profile>/sft, rl, rl/teacher), with what lies around it. `dtype` None keeps each tensor's own.

    kind: the class to build, the network or the front that is built on it. quantize: every layer of the
    language model as soon as it is loaded, so that never more than one of them is there in full. divide:
    called with every layer of the language model and the vision tower once it is loaded, before the next one
    is: no process then holds the whole model (`sharding.divide`). SAM2's layer norms become fp32 in any case,
    and all layer norms where fp32 and half precision are mixed. Raises ValueError for a damaged file, for
    missing, unexpected or mis-shaped tensors, for weights that are NaN or infinite, also in `dtype` alone,
    and where `dtype` is None for tensors in two half precisions, or in float64.
    """
    path = Path(path)
    if (path / DELTA).is_file():
        from ans_core.checkpoints.trained import stage_model  # which loads its base by this module

        if divide or quantize:
            raise ValueError(
                f"{path} is a stage's output, of which layers are not loaded one by one: make a model of it "
                "(`ans convert`)"
            )
        return cast("Model", stage_model(path, dtype=dtype, device=device, kind=kind))
    config, tokenizer, state = opened(path)
    model = empty(config, tokenizer, kind=kind, where=path)
    if quantize is not None:
        divide = quantizer(model.vlm.model.language_model, quantize)
    fill(model, state, where=str(path), dtype=dtype, device=device, divide=divide)
    stored = {p.dtype for p in model.parameters()}
    if torch.float64 in stored or stored >= set(HALF):
        listed = ", ".join(sorted(map(_name, stored)))
        raise ValueError(
            f'{path} holds weights in {listed}, which no forward pass takes together; load it in one: dtype="bfloat16"'
        )
    model.norms_in_fp32()
    return model.eval()


def opened(path: Path) -> tuple[Sa2VAConfig, PreTrainedTokenizerBase, Iterable[tuple[str, Tensor]]]:
    """Return configuration, tokenizer and, one at a time, the tensors by our names, of our folder or a
    release. Raises ValueError for a damaged file and for a base."""
    values = read_config(path)
    if base := BASES.get(values["model_type"]):
        raise ValueError(
            f"{path}/config.json: model_type {values['model_type']!r} is no Sa2VA ({OUR_TYPE}, "
            f"{RELEASE_TYPE}); a base ({base}) is imported together with SAM2 (base.internvl, base.sam2)"
        )
    folders.verify(path)
    tokenizer = read_tokenizer(path)
    files = folders.weight_files(path)
    config = described(path, values, tokenizer, keys=[key for key, _ in folders.tensors(files)])
    state = folders.tensors(files)
    if values["model_type"] == RELEASE_TYPE:
        return config, tokenizer, layouts.to_native(state, layouts.layout_of(config))
    return config, tokenizer, state


def from_pretrained(
    kind: type[Model],
    path: str | Path,
    *,
    dtype: torch.dtype | str | None,
    device_map: torch.device | str | None,
    attn_implementation: str | None,
    quantize: str | None,
) -> Model:
    """Implement `Sa2VA.from_pretrained` for the class `kind`."""
    device = present_device(device_map)  # before anything is fetched
    wanted = _weights_dtype(dtype, device)
    bits = None if quantize is None else check(quantize, device)
    model = load(folders.local_folder(path), kind=kind, dtype=wanted, device=device, quantize=bits)
    if attn_implementation is not None:
        model.vlm.set_attn_implementation(attn_implementation)
    return model


def _weights_dtype(dtype: torch.dtype | str | None, device: torch.device) -> torch.dtype | None:
    if dtype is None or dtype == "auto":
        return inference_dtype(device)
    resolved = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if resolved not in WEIGHT_DTYPES:
        raise ValueError(f"dtype {dtype!r} holds no weights; use {', '.join(map(_name, WEIGHT_DTYPES))}")
    if resolved in HALF:
        warn_if_emulated(device)
    return resolved


def present_device(device_map: torch.device | str | None) -> torch.device:
    gpus = torch.cuda.device_count()
    if isinstance(device_map, dict):
        raise ValueError(
            f'device_map {device_map} names several devices; a Sa2VA lies on one: give "cpu", "cuda" or "cuda:1", or "auto"'
        )
    if device_map is None or device_map == "auto":
        return torch.device("cuda" if device_map and gpus else "cpu")
    try:
        device = torch.device(device_map)
    except RuntimeError as error:
        raise ValueError(
            f'device_map {device_map!r} is no device; give one, as "cpu", "cuda" or "cuda:1", or "auto"'
        ) from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f'device_map {device_map!r}: only "cpu" and "cuda" are supported')
    if device.type == "cuda" and (device.index or 0) >= gpus:
        raise ValueError(
            f'device_map {device_map!r}: torch {torch.__version__} sees {gpus} GPUs here; give another device, or "auto"'
        )
    return device


def weights_hash(path: str | Path) -> str:
    """Return one hash of all tensors of a model folder, from its manifest if it has one. A delta names its
    base by it."""
    path = Path(path)
    manifest = folders.read_manifest(path)
    files = folders.weight_files(path)
    manifest_sums = manifest["sha256"] if manifest else {}
    sums = [manifest_sums.get(f.name) or folders.file_hash(f) for f in files]
    return hashlib.sha256("\n".join(sums).encode()).hexdigest()


def config_hash(path: str | Path) -> str:
    """Return one hash of what beside its tensors decides a model folder's answers: config.json, the
    tokenizer's files and every other .json, .txt and .model in it, by name and bytes; not the manifest,
    and not the hidden files in which a download keeps what it has compared."""
    files = sorted(
        f
        for f in Path(path).glob("[!.]*")
        if f.suffix in CONFIG_SUFFIXES and f.name != folders.MANIFEST and f.is_file()
    )
    return hashlib.sha256("\n".join(f"{f.name} {folders.file_hash(f)}" for f in files).encode()).hexdigest()


def read_config(path: Path) -> dict[str, Any]:
    """Read config.json. Raises ValueError for an unknown model type, saying why it is not read."""
    file = path / "config.json"
    if not file.exists():
        if any(path.glob("*model_states.pt")) or any(path.glob("*/*model_states.pt")):
            raise ValueError(
                f"{path} is a training state of DeepSpeed: `ans convert {path} DST --internvl BASE --sam2 "
                "SAM2` makes a model of it"
            )
        raise ValueError(f"{path} is no model folder: it has no config.json")
    with folders.reading(file):
        values = dict(json.loads(file.read_text(encoding="utf-8")))
    if "model_type" not in values:
        raise ValueError(f"{file} has no model_type; a Sa2VA's says {OUR_TYPE} or {RELEASE_TYPE}")
    valid_types = (OUR_TYPE, RELEASE_TYPE, *BASES)
    if values["model_type"] not in valid_types:
        family = next((name for name in OTHER_FAMILIES if name in json.dumps(values).lower()), None)
        because = (
            f"it is built on {family}, and only those on InternVL and Qwen-VL are read"
            if family
            else f"known are {', '.join(valid_types)}"
        )
        raise ValueError(
            f"{file}: model_type {values['model_type']!r} is no Sa2VA that is read here: {because}"
        )
    return values


def described(
    path: Path,
    values: Mapping[str, Any],
    tokenizer: PreTrainedTokenizerBase,
    *,
    keys: Collection[str] = (),
    template: str | None = None,
    sam2: GroundingConfig | None = None,
) -> Sa2VAConfig:
    """Make a configuration of config.json's `values` in any layout. `keys`: names of the tensors, which alone
    mark a Sa2VA-i. `template` and `sam2`: for a base, which has neither. Raises ValueError naming file and
    key of what is missing, malformed or not supported."""
    with folders.reading(path / "config.json"):
        if values["model_type"] == OUR_TYPE:
            config = Sa2VAConfig.from_dict(dict(values))
        else:
            layouts.check_sam2(keys)
            two = layouts.has_two_decoders(keys)
            config = layouts.from_upstream_config(
                values, tokenizer, template=template, sam2=sam2, two_decoders=two
            )
        vision, text = config.backbone["vision_config"], config.backbone["text_config"]
        if not (isinstance(vision, dict) and isinstance(text, dict)):
            raise ValueError("'vision_config' and 'text_config' are to be the sizes of a model")
        qwen_config.check_processor(path, vision, kind=config.kind)
        if config.template not in prompts.TEMPLATES:
            raise ValueError(f"no 'template' {config.template!r}; there are {', '.join(prompts.TEMPLATES)}")
        window = (
            text.get("sliding_window")
            if text.get("use_sliding_window", text["model_type"] not in WINDOW_OFF)
            else None
        )
        if window and window < text["max_position_embeddings"]:
            raise ValueError(f"'sliding_window' {window}: attention that forgets is not supported")
    return config


def read_tokenizer(path: Path) -> PreTrainedTokenizerBase:
    """Load a tokenizer from tokenizer.json, Qwen2's vocab.json, or SentencePiece's tokenizer.model; code that
    a folder brings for it is not run."""
    if (file := path / "tokenizer.json").exists():
        with folders.reading(file):
            # the library's own errors name neither file nor key
            json.loads(file.read_text(encoding="utf-8"))["model"]["vocab"]
            return PreTrainedTokenizerFast.from_pretrained(path)
    if (path / "vocab.json").exists():
        return Qwen2Tokenizer.from_pretrained(path)
    if (path / "tokenizer.model").exists():
        return sentencepiece.fast_tokenizer(path)
    raise ValueError(f"{path} holds no tokenizer: neither tokenizer.json nor vocab.json nor tokenizer.model")


def empty(
    config: Sa2VAConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    kind: type[Model] = Network,  # type: ignore[assignment]
    where: Path | str = "the model",
) -> Model:
    """Build a model with parameters on the meta device: shapes without memory. Unsaved buffers (rope tables)
    are real.

    Raises ValueError naming `where` for sizes or a tokenizer that no model can have.
    """
    try:
        with init_empty_weights(include_buffers=False):
            return kind(config, tokenizer)
    except (StrictDataclassError, ValueError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())}") from error


def fill(
    model: nn.Module,
    state: Iterable[tuple[str, Tensor]],
    *,
    where: str,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    divide: Callable[[nn.Module], None] | None = None,
) -> None:
    """Copy tensors into the model, each once; `divide` gets every layer that is complete. Raises ValueError
    unless names and shapes are exactly the model's and all weights are finite."""
    shapes = {name: tensor.shape for name, tensor in model.state_dict().items()}
    layers = _Layers(model, divide) if divide is not None else None
    taken: dict[str, Tensor] = {}
    on_meta: dict[str, Tensor] = {}
    broken: list[tuple[str, Tensor]] = []
    for name, tensor in state:
        on_meta[name] = tensor.to("meta")
        if shapes.get(name) == tensor.shape:
            wanted = dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype
            taken[name] = tensor.to(device, wanted, copy=True, memory_format=torch.contiguous_format)
            if not is_finite(taken[name]):
                broken.append((name, tensor))
            if layers is not None:
                layers.take(name, taken)
    if problems := misfits(shapes, on_meta):
        raise ValueError(
            f"{where} does not fit the model that its config.json describes: {'; '.join(problems)}"
        )
    if broken:
        problems = not_finite(broken) or [
            f"{_listed(f'too large for {_name(dtype)}', dict(broken))}; load it in bfloat16 or float32"
        ]
        raise ValueError(f"{where}: {problems[0]}")
    model.load_state_dict(taken, assign=True, strict=layers is None)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)


class _Layers:
    """The layers of a model that are divided one by one, as soon as their tensors are there."""

    def __init__(self, model: nn.Module, divide: Callable[[nn.Module], None]) -> None:
        self.divide = divide
        layers = [
            (f"{name}.", m) for name, m in model.named_modules() if isinstance(m, GradientCheckpointingLayer)
        ]
        self.of = {prefix + key: (prefix, layer) for prefix, layer in layers for key in layer.state_dict()}
        self.lacking = {prefix: set(layer.state_dict()) for prefix, layer in layers}

    def take(self, name: str, taken: dict[str, Tensor]) -> None:
        """Note that a tensor was taken; if it completes its layer, move the layer's tensors into it and
        divide it."""
        if name not in self.of:
            return
        prefix, layer = self.of[name]
        self.lacking[prefix].discard(name.removeprefix(prefix))
        if not self.lacking[prefix]:
            layer.load_state_dict(
                {key: taken.pop(prefix + key) for key in list(layer.state_dict())}, assign=True
            )
            self.divide(layer)


def misfits(wanted: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> list[str]:
    """List what keeps tensors from fitting a model: at most one line each for missing, unexpected and
    mis-shaped tensors and for those of a dtype that holds no weights."""
    both = [(name, tensor) for name, tensor in tensors.items() if name in wanted]
    kinds = {
        "missing": [name for name in wanted if name not in tensors],
        "unexpected": [name for name in tensors if name not in wanted],
        "mis-shaped": [
            f"{name} {tuple(t.shape)} for {tuple(wanted[name])}"
            for name, t in both
            if t.shape != wanted[name]
        ],
        "not of floating point": [f"{name} {_name(t.dtype)}" for name, t in both if t.dtype not in DTYPES],
    }
    return [_listed(kind, names) for kind, names in kinds.items() if names]


def is_finite(tensor: Tensor) -> bool:
    """Say whether no weight is NaN or infinite. What holds no weights counts as finite."""
    if tensor.dtype not in DTYPES or tensor.is_meta or not tensor.numel():
        return True
    # both are NaN if any weight is; a tenth of a copy's time, where isfinite takes three copies'
    low, high = torch.aminmax(tensor)
    return bool(torch.isfinite(low) & torch.isfinite(high))


def not_finite(tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Name the tensors with weights that are NaN or infinite, in one line with a remedy; no line where all
    are finite."""
    names = [name for name, tensor in tensors if not is_finite(tensor)]
    remedy = (
        "numbers overflowed where it was trained, merged or cast: take an earlier checkpoint, or write it "
        "again in bfloat16 or float32"
    )
    return [f"{_listed('with weights that are NaN or infinite', names)} ({remedy})"] if names else []


def _listed(kind: str, names: Collection[str]) -> str:
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return f"{len(names)} {kind}: {', '.join(sorted(names)[:LISTED])}{more}"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _bytes(state: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in state)


# Deltas: what a training stage changed


def save_delta(tensors: dict[str, Tensor], path: Path, *, base_hash: str, config: dict[str, Any]) -> None:
    """Write a folder with trained tensors only. `config` (JSON): how they were trained, so that a loader can
    rebuild the model."""
    with atomic_folder(path, size=_bytes(tensors.values())) as partial:
        save_file(
            {name: t.detach().cpu().contiguous() for name, t in tensors.items()}, partial / DELTA_WEIGHTS
        )
        (partial / DELTA).write_text(json.dumps({"base_hash": base_hash, "config": config}, indent=1) + "\n")
        folders.write_manifest(partial, {})


def delta_config(path: str | Path) -> dict[str, Any]:
    """Return how a delta was trained, without loading its tensors. Raises ValueError where there is none."""
    file = Path(path) / DELTA
    if not file.exists():
        raise ValueError(f"{path} holds no {DELTA}: it is no folder of trained tensors")
    config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))["config"]
    return config


def load_delta(path: str | Path, *, base_hash: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Load (tensors, config) of a delta. Raises ValueError when the delta is damaged, not finite, or was
    trained on another base than `base_hash`."""
    path = Path(path)
    if not (path / DELTA).exists():
        raise ValueError(f"{path} holds no {DELTA}: it is no folder of trained tensors")
    folders.verify(path)
    values = json.loads((path / DELTA).read_text(encoding="utf-8"))
    if values["base_hash"] != base_hash:
        raise ValueError(
            f"{path} was trained on the base {values['base_hash'][:12]}, not on {base_hash[:12]}; use its "
            "own base or train again"
        )
    tensors = {name: tensor.clone() for name, tensor in folders.tensors([path / DELTA_WEIGHTS])}
    if problems := not_finite(tensors.items()):
        raise ValueError(f"{path}: {problems[0]}")
    return tensors, values["config"]
