"""Disk and GPU memory that the full-size profiles need, computed from the models' shapes (nothing is downloaded): a Markdown table.

`python perf/memory.py [--gpus 8] [--rank 128]`. P = parameters of the model, F = those of its modules that
are trained in full (embeddings, head, projector, text_hidden_fcs, SAM2's mask decoder), A = those of the LoRA adapters, T = F + A,
n = GPUs.

- base on disk: 2 P bytes (bf16). Delta of sft or rl: 4 T (fp32). Resumable training state: 12 T (fp32 weights, two Adam moments).
- one GPU in training, DeepSpeed ZeRO-2: 2 (P - F) frozen in bf16 + 4 T trained in fp32, whole on every GPU, + 16 T / n: gradients,
  the optimizer's own copy of the weights and Adam's two moments, fp32 and divided among the GPUs.
- one GPU in inference: 2 P.

Activations, the KV cache, communication buckets and CUDA's own memory come on top: they depend on batch and length and are not
included.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from torch import nn

from ans_core.checkpoints.published import PUBLISHED, build_meta
from ans_core.model.adapters import full_modules
from ans_core.model.sa2va import Sa2VA

GB = 1e9


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
    def per_gpu(self) -> float:
        return 2 * (self.parameters - self.full) + 4 * self.trained + 16 * self.trained / self.gpus


def needs(model: Sa2VA, *, rank: int, gpus: int) -> Needs:
    """LoRA on every linear layer of the text model, as the family trains it; a pair of factors has rank * (inputs + outputs)."""
    full = [module for _, module in full_modules(model)]
    linears = [m for m in model.vlm.model.language_model.modules() if isinstance(m, nn.Linear)]
    return Needs(
        parameters=sum(p.numel() for p in model.parameters()),
        full=sum(p.numel() for module in full for p in module.parameters()),
        adapters=sum(rank * (m.in_features + m.out_features) for m in linears),
        gpus=gpus,
    )


def table(*, rank: int, gpus: int) -> str:
    lines = [
        f"| profile | parameters | trained (LoRA r{rank} + full modules) | base, disk | delta, disk | training state, disk |"
        f" training, each of {gpus} GPUs | inference, one GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in PUBLISHED:
        need = needs(build_meta(name), rank=rank, gpus=gpus)
        share = need.trained / (need.parameters + need.adapters)
        lines.append(
            f"| {name} | {need.parameters / 1e9:.3f} B | {need.trained / 1e9:.3f} B ({share:.0%}) | "
            + " | ".join(f"{size / GB:.1f} GB" for size in (need.base, need.delta, need.training_state, need.per_gpu, need.base))
            + " |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Disk and GPU memory of the full-size profiles, without activations.")
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rank", type=int, default=128)
    arguments = parser.parse_args()
    print(table(rank=arguments.rank, gpus=arguments.gpus))
