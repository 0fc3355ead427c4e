"""Frozen and trained parts: LoRA on the language model, full training of the small modules, and the trained
tensors of a stage."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer, LoraModel
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import Tensor, nn

from ans_core.model.network import Network
from ans_core.train import sharding

LORA_TARGETS = (
    r".*language_model\..*\.(q_proj|k_proj|v_proj|o_proj|qkv_proj|gate_proj|up_proj|down_proj|gate_up_proj)"
)
"""Names inside `Sa2VA` of all linear layers of the text model except the head (upstream's choice)."""


def lora_config(
    *,
    rank: int,
    alpha: int,
    dropout: float,
    modules_to_save: list[str] | None = None,
    rank_pattern: Mapping[str, int] | None = None,
    rows: Sequence[int] = (),
) -> LoraConfig:
    """Make PEFT's settings. `rank_pattern`: ranks of layers by name; their factor alpha / rank is that of the
    others. `rows`: tokens whose rows of embeddings and head are trained."""
    ranks = dict(rank_pattern or {})
    return LoraConfig(
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        bias="none",
        target_modules=LORA_TARGETS,
        modules_to_save=modules_to_save,
        rank_pattern=ranks,
        alpha_pattern={name: layer_rank * alpha / rank for name, layer_rank in ranks.items()},
        trainable_token_indices=_trained_rows(rows),
    )


def copies_config(model: Network, *, modules_to_save: Sequence[str], rows: Sequence[int] = ()) -> LoraConfig:
    """Make PEFT's settings of an adapter without LoRA: each linear layer that LoRA would change is copied,
    and the copy trained."""
    layers = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and re.fullmatch(LORA_TARGETS, name)
    ]
    return LoraConfig(
        target_modules=DUMMY_TARGET_MODULES,
        modules_to_save=[*modules_to_save, *layers],
        trainable_token_indices=_trained_rows(rows),
    )


def _trained_rows(rows: Sequence[int]) -> dict[str, list[int]] | None:
    return {name: list(rows) for name in ("embed_tokens", "lm_head")} if rows else None


def prepare_sft(model: Network, config: LoraConfig, *, seed: int) -> LoraModel:
    """Freeze the model, add LoRA (initialised from `seed`) and unfreeze the modules that SFT trains fully;
    trained tensors become fp32.

    Trained: LoRA on all linears of the text model, embeddings and head, projector (Qwen-VL has none: its
    merger stays frozen), text_hidden_fcs, SAM2's mask decoder but for its scores. Frozen: vision tower,
    SAM2's image encoder, prompt encoder and memory, and the decoder's two scores (predicted IoU, presence),
    which no loss of SFT reads: several processes would wait for their gradients. Presence is trained in a
    model with `seg_object_score`.
    """
    model.requires_grad_(False)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        tuner = LoraModel(model, {"default": config}, "default")
    open_fully([m for _, m in full_modules(model)])
    decoder = model.sam2.sam_mask_decoder
    decoder.iou_prediction_head.requires_grad_(False)
    decoder.pred_obj_score_head.requires_grad_(model.sam2.seg_object_score)
    for p in model.parameters():
        if p.requires_grad:
            p.data = p.data.float()
    return tuner


def full_modules(model: Network) -> list[tuple[str, nn.Module]]:
    """Return (name, module) of all modules that SFT trains fully, beside LoRA."""
    return [
        ("embed_tokens", model.vlm.get_input_embeddings()),
        ("lm_head", model.vlm.lm_head),
        *(("projector", getattr(model.vlm.model, name)) for name in model.backbone.projectors),
        ("text_hidden_fcs", model.text_hidden_fcs),
        ("mask_decoder", model.sam2.sam_mask_decoder),
    ]


def open_fully(modules: Iterable[nn.Module]) -> None:
    for module in modules:
        module.requires_grad_(True)


def merge(tuner: LoraModel) -> None:
    """Merge every LoRA into its base weight and remove the wrappers, in place."""
    tuner.merge_and_unload()


def trained(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that require a gradient, by name. All processes must call it."""
    return {name: sharding.read(p) for name, p in model.named_parameters() if p.requires_grad}


def load_trained(model: nn.Module, tensors: dict[str, Tensor]) -> None:
    """Copy a stage's trained tensors into a model prepared the same way. Raises ValueError unless names and
    shapes are the same."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    missing, unknown = sorted(parameters.keys() - tensors.keys()), sorted(tensors.keys() - parameters.keys())
    shapes = [n for n in parameters.keys() & tensors.keys() if parameters[n].shape != tensors[n].shape]
    if missing or unknown or shapes:
        raise ValueError(
            f"trained tensors do not fit: {len(missing)} missing {missing[:3]}, {len(unknown)} unknown "
            f"{unknown[:3]}, "
            f"{len(shapes)} of another shape {shapes[:3]}; they belong to other model or LoRA settings"
        )
    with torch.no_grad():
        for name, p in parameters.items():
            p.copy_(tensors[name])


@contextmanager
def lora_in(dtype: torch.dtype, model: nn.Module) -> Iterator[None]:
    """Put copies of the active LoRA's factors in this precision in their place in the context, and themselves
    again afterwards. Autocast would cast them to the same numbers whenever a layer is called.

    Their own `data` must stay: with another dtype a parameter gets a new gradient accumulator, and the hooks
    by which DistributedDataParallel averages gradients over the processes are on the old one.
    """
    factors = [
        (linear, key, p)
        for layer in model.modules() if isinstance(layer, LoraLayer) and not layer.disable_adapters
        for of in (layer.lora_A, layer.lora_B)
        for name in layer.active_adapters if name in of
        for linear in (of[name],)
        for key, p in linear.named_parameters()
    ]  # fmt: skip
    for linear, key, p in factors:
        setattr(linear, key, nn.Parameter(p.detach().to(dtype), requires_grad=False))
    try:
        yield
    finally:
        for linear, key, p in factors:
            setattr(linear, key, p)


# Adapters over one frozen backbone (RL, the agent)

DRAWING = ("text_hidden_fcs", "sam_mask_decoder")
"""Modules that RL trains fully beside the projector, with one copy per adapter; embeddings and head stay
frozen."""


def policy_modules(model: Network, *, drawing: bool) -> list[str]:
    """Return the modules that a run trains. drawing: something gives the mask modules a gradient
    (`Rl.drawing`); otherwise they stay frozen."""
    return [*model.backbone.projectors, *(DRAWING if drawing else ())]


def rl_config(*, rank: int, alpha: int, dropout: float, modules: Sequence[str]) -> LoraConfig:
    return lora_config(rank=rank, alpha=alpha, dropout=dropout, modules_to_save=list(modules))


class Adapters:
    """PEFT adapters over one model, the first of which is trained; with all of them off it is the model as it
    was, bit for bit.

    One of them is active at a time, and only `using` changes which: a change between a forward and its
    backward would give the wrong weights their gradient without a word.
    """

    def __init__(
        self, model: Network, config: LoraConfig, *, names: Sequence[str], off: str, seed: int
    ) -> None:
        """Add adapters, which all begin as the first one. `off`: what the model without any is called in
        `using`."""
        self.model, self.names, self.off = model, tuple(names), off
        self.active = names[0]
        with torch.random.fork_rng(), warnings.catch_warnings():
            # nothing is merged into 8 bits
            warnings.filterwarnings("ignore", "TorchaoLoraLinear was instantiated without")
            torch.manual_seed(seed)
            self.peft = get_peft_model(model, config, adapter_name=names[0])
            for name in names[1:]:
                self.peft.add_adapter(name, config)
        named = [(f"{name}.", p) for name, p in self.model.named_parameters()]
        # to find them takes a walk through thousands of modules, and each `using` needs them
        self._parameters = {
            adapter: {
                name.replace(f".{adapter}.", ".*.").removesuffix("."): p
                for name, p in named
                if f".{adapter}." in name
            }
            for adapter in names
        }
        for name in names:
            for p in self.parameters(name).values():
                p.data = p.data.float()
        for name in names[1:]:
            self.load(name, self.tensors(names[0]))
        self._activate(names[0])

    def parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """Return an adapter's parameters, by names without the adapter's own."""
        return dict(self._parameters[adapter])

    def tensors(self, adapter: str) -> dict[str, Tensor]:
        """Return an adapter's tensors, by names without the adapter's own."""
        return {name: p.detach() for name, p in self.parameters(adapter).items()}

    def load(self, adapter: str, tensors: dict[str, Tensor]) -> None:
        current = self.tensors(adapter)
        if current.keys() != tensors.keys():
            raise ValueError(
                f"tensors of another adapter: {sorted(current.keys() ^ tensors.keys())[:3]} differ"
            )
        with torch.no_grad():
            for name, value in current.items():
                value.copy_(tensors[name])

    @contextmanager
    def using(self, adapter: str) -> Iterator[None]:
        """Activate an adapter, or what is called `off`, in the context, and restore the previous one
        afterwards."""
        before = self.active
        self._activate(adapter)
        try:
            yield
            assert self.active == adapter, (
                f"inside using({adapter!r}) the active adapter became {self.active!r}"
            )
        finally:
            self._activate(before)

    def _activate(self, adapter: str) -> None:
        tuner: Any = self.peft.base_model
        if adapter == self.off:
            tuner.disable_adapter_layers()
        else:
            tuner.enable_adapter_layers()
            self.peft.set_adapter(adapter, inference_mode=adapter != self.names[0])
        self.active = adapter
        for p in self.model.parameters():  # whatever PEFT switched on or off
            p.requires_grad_(False)
        for p in self.parameters(self.names[0]).values():
            p.requires_grad_(True)

    @torch.no_grad()
    def ema(self, decay: float) -> float:
        """Update the adapter teacher = decay * teacher + (1 - decay) * policy in fp32. Return the root mean
        square distance between them afterwards."""
        teacher, policy = self.tensors("teacher"), self.tensors("policy")
        square, count = 0.0, 0
        for name, value in teacher.items():
            value.lerp_(policy[name], 1 - decay)
            square += float((value - policy[name]).pow(2).sum())
            count += value.numel()
        return (square / count) ** 0.5

    def merged(self, adapter: str) -> Network:
        """Merge this adapter and return the bare model; all adapters are removed."""
        self._activate(adapter)
        merged = self.peft.merge_and_unload(adapter_names=[adapter])
        assert isinstance(merged, Network)
        return merged


class Policies(Adapters):
    """Policy and EMA teacher over the merged SFT model; with adapters off it is the reference."""

    def __init__(self, model: Network, config: LoraConfig, *, seed: int) -> None:
        super().__init__(model, config, names=("policy", "teacher"), off="reference", seed=seed)
