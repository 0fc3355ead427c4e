"""Bytes that a model needs in training, on disk and on a GPU, from its shapes alone (perf/memory.py has the formulas in words)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from ans_core.model.adapters import full_modules
from ans_core.model.network import Network


@dataclass(frozen=True, kw_only=True)
class Needs:
    """Bytes, except for the three counts of parameters."""

    parameters: int
    full: int
    adapters: int
    gpus: int

    @property
    def trained(self) -> int:
        return self.full + self.adapters

    @property
    def base(self) -> int:
        return 2 * self.parameters

    @property
    def delta(self) -> int:
        return 4 * self.trained

    @property
    def training_state(self) -> int:
        return 12 * self.trained

    @property
    def whole_weights(self) -> int:
        return 2 * (self.parameters - self.full) + 4 * self.trained

    @property
    def plain(self) -> int:
        """Return what one GPU holds in training without DeepSpeed."""
        return self.whole_weights + 12 * self.trained

    @property
    def per_gpu(self) -> float:
        """Return what each GPU holds in training with ZeRO-2."""
        return self.whole_weights + 16 * self.trained / self.gpus

    @property
    def per_gpu_zero3(self) -> float:
        return (self.whole_weights + 16 * self.trained) / self.gpus


def needs(model: Network, *, rank: int, gpus: int) -> Needs:
    """LoRA on every linear layer of the text model, as the family trains it; a pair of factors has rank * (inputs + outputs)."""
    full = [module for _, module in full_modules(model)]
    linears = [m for m in model.vlm.model.language_model.modules() if isinstance(m, nn.Linear)]
    return Needs(
        parameters=sum(p.numel() for p in model.parameters()),
        full=sum(p.numel() for module in full for p in module.parameters()),
        adapters=sum(rank * (m.in_features + m.out_features) for m in linears),
        gpus=gpus,
    )
