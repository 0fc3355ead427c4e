"""The optimizer of the trainable parameters, AdamW or Muon beside it, and the learning rate of every step."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

from ans_core.precision import bf16_is_faster

IN_STACK = re.compile(r"\.\d+\.")
"""In the name of a parameter of a layer among several in a row."""


class BatchedMuon(Muon):
    """torch's Muon (its state, its groups, its update), iterating over all matrices of one shape at once, in
    bf16 where the device computes that faster, else in fp32. torch's own iterates over one matrix after the
    other, always in bf16, which most CPUs emulate."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            alike: dict[tuple[torch.Size, torch.device], list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape, p.device].append(p)
            for (shape, device), parameters in alike.items():
                directions = orthogonal(
                    torch.stack([self._direction(p, group["momentum"]) for p in parameters]),
                    coefficients=group["ns_coefficients"],
                    steps=group["ns_steps"],
                    eps=group["eps"],
                    dtype=torch.bfloat16 if bf16_is_faster(device) else torch.float32,
                )
                # of AdamW's update: Liu et al. 2025, section 2.2
                size = group["lr"] * 0.2 * math.sqrt(max(shape))
                for p, direction in zip(parameters, directions, strict=True):
                    p.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-size)

    def _direction(self, p: nn.Parameter, momentum: float) -> Tensor:
        """Return Nesterov's momentum of a matrix with a gradient, and move its buffer on."""
        assert p.grad is not None
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p.grad)
        state["momentum_buffer"].lerp_(p.grad, 1 - momentum)
        return p.grad.lerp(state["momentum_buffer"], momentum)


def orthogonal(
    matrices: Tensor, *, coefficients: tuple[float, float, float], steps: int, eps: float, dtype: torch.dtype
) -> Tensor:
    """Bring the singular values of matrices (B, m, n) to about 1 by Newton-Schulz iterations computed in
    `dtype`, as torch.optim.Muon does (Jordan et al. 2024). Returns the dtype of `matrices`."""
    a, b, c = coefficients
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = (matrices.mT if tall else matrices).to(dtype)  # (B, short, long)
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=eps)  # no singular value is above 1

    def quadratic(gram: Tensor) -> Tensor:
        return torch.baddbmm(gram, gram, gram, beta=b, alpha=c)  # (B, short, short): b gram + c gram²

    if dtype == torch.float32 and x.shape[-1] >= 3 * x.shape[-2]:
        # The same polynomial of the small Gram matrix, applied to x once. What is multiplied here is
        # symmetric and commutes. In bf16 the squares of small singular values would be lost.
        identity, gram = a * torch.eye(x.shape[-2], device=x.device), x @ x.mT
        factor = product = identity + quadratic(gram)
        for _ in range(steps - 1):
            gram = factor @ gram @ factor
            factor = identity + quadratic(gram)
            product = factor @ product
        x = product @ x
    else:
        for _ in range(steps):
            x = torch.baddbmm(x, quadratic(x @ x.mT), x, beta=a)
    return (x.mT if tall else x).to(matrices.dtype)


class Together(Optimizer):
    """Several optimizers, each with parameters of its own, as one: its groups are theirs."""

    def __init__(self, parts: Sequence[Optimizer]) -> None:
        self.parts = tuple(parts)
        super().__init__([group for part in self.parts for group in part.param_groups], {})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for part in self.parts:
            part.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)
        # loading has made new ones
        self.param_groups = [group for part in self.parts for group in part.param_groups]


def optimizer_of(
    module: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    scales: Mapping[str, float],
    muon_lr: float = 0.0,
    fused: bool = False,
) -> Optimizer:
    """Make the optimizer of all parameters that require a gradient: AdamW; norms, biases and embeddings are
    decayed too, as upstream does.

    `muon_lr`: not 0 = Muon for the matrices of stacked layers (a number in the name, as in `layers.3.`), its
    update scaled to the size of AdamW's (Jordan et al. 2024; Liu et al. 2025). `scales`: part of a name ->
    factor on the learning rate of the parameters whose names contain it. `fused`: AdamW as one kernel for
    many tensors.

    Raises ValueError if a trained tensor is not fp32: bf16 AdamW at lr 1e-5 moves hardly any weight.
    """
    groups: dict[tuple[bool, float], list[nn.Parameter]] = defaultdict(list)
    for name, p in module.named_parameters():
        if p.requires_grad:
            if p.dtype != torch.float32:
                raise ValueError(
                    f"{name} is trained in {p.dtype}; cast it to float32 (autocast keeps the compute in bf16)"
                )
            scale = next((factor for part, factor in scales.items() if part in name), 1.0)
            matrix = muon_lr > 0 and p.ndim == 2 and IN_STACK.search(name) is not None
            groups[matrix, scale * muon_lr / lr if matrix else scale].append(p)
    if not groups:
        raise ValueError("nothing to train: no parameter requires a gradient")
    matrices, others = (
        [{"params": ps, "scale": scale} for (m, scale), ps in groups.items() if m == chosen]
        for chosen in (True, False)
    )
    parts: list[Optimizer] = (
        [BatchedMuon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")]
        if matrices
        else []
    )
    parts += (
        [AdamW(others, lr=lr, betas=(0.9, 0.999), weight_decay=weight_decay, fused=fused)] if others else []
    )
    return parts[0] if len(parts) == 1 else Together(parts)


def lr_factor(step: int, *, steps: int, warmup: float) -> float:
    """Return the learning rate's factor: linear warm-up over the first share `warmup` of the steps, then
    cosine to 0. It depends on the step alone, so there is nothing to save."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    return 0.5 * (1 + math.cos(math.pi * (step - rising) / max(1, steps - rising)))
