"""Disk and GPU memory that the full-size profiles need, and how long a step takes, computed from the models'
shapes (nothing is downloaded): three Markdown tables.

`python perf/memory.py [--gpus 8] [--rank 128] [--tokens 4096] [--rows 2] ...`. P = parameters of the model, F
= those of its modules that are trained in full (embeddings, head, projector, text_hidden_fcs, SAM2's mask
decoder), A = those of the LoRA adapters, T = F + A, n = GPUs.

- base on disk: 2 P bytes (bf16). Delta of sft or rl: 4 T (fp32). Resumable training state: 12 T (fp32
  weights, two Adam moments).
- one GPU in training, DeepSpeed ZeRO-2: 2 (P - F) frozen in bf16 + 4 T trained in fp32, whole on every GPU, +
  16 T / n: gradients,
  the optimizer's own copy of the weights and Adam's two moments, fp32 and divided among the GPUs. ZeRO-3 divides the first two by n too.
- one GPU in inference: 2 P.
- activations of a micro-batch: ans_core/model/footprint.py, checked against measured peaks by
  perf/activations.py.
- hours per 1,000 steps: the operations of all GPUs' micro-batches, at a share of the GPU's peak (an estimate,
  not a measurement).

The KV cache, communication buckets and CUDA's own memory come on top.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ans_core.checkpoints.published import PUBLISHED, build_meta
from ans_core.config import PROFILES, Config, resolve
from ans_core.model.footprint import MicroBatch, Operations, Work, activation_bytes, parameters_of
from ans_core.stages.gpu_memory import stage_memory

GB = 1e9
ROOT = Path(__file__).resolve().parents[1]
ONE = ("launch.deepspeed_stage=0", "sft.optim.accumulate=64", "rl.optim.accumulate=64")
MACHINES = (
    (1, 24, "sa2va-1b", ONE), (1, 24, "sa2va-qwen3-2b", ONE), (1, 80, "sa2va-4b", ONE),
    (1, 80, "sa2va-8b", ONE),
    *((8, 80, name, ()) for name in PUBLISHED if name != "sa2va-26b"),
    (8, 80, "sa2va-26b", ("launch.deepspeed_stage=3",)), (8, 141, "sa2va-8b", ()), (8, 141, "sa2va-26b", ()),
)  # fmt: skip
"""GPUs, GB of each, profile, further settings."""


def table(*, rank: int, gpus: int) -> str:
    lines = [
        f"| profile | parameters | trained (LoRA r{rank} + full modules) | base, disk | delta, disk | "
        f"training state, disk | training, each of {gpus} GPUs | inference, one GPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in PUBLISHED:
        counts = parameters_of(build_meta(name), rank=rank)
        share = counts.trained / (counts.total + counts.adapters)
        each = sum(counts.held(deepspeed_stage=2, gpus=gpus).values())
        lines.append(
            f"| {name} | {counts.total / 1e9:.3f} B | {counts.trained / 1e9:.3f} B ({share:.0%}) | "
            + " | ".join(
                f"{size / GB:.1f} GB"
                for size in (counts.base, counts.delta, counts.training_state, each, counts.base)
            )
            + " |"
        )
    return "\n".join(lines)


def steps_table(
    *, rows: int, tokens: int, learned: int, masks: int, picture: tuple[int, int],
    accumulate: int, rank: int, gpus: int, peak_tflops: float, mfu: float,
) -> str:  # fmt: skip
    """One row a profile: memory of a GPU with and without checkpointing, and estimated hours."""
    lines = [
        "| profile | activations, no checkpointing | activations, `checkpointing: layers` | each GPU, "
        "ZeRO-2, no checkpointing | each GPU, ZeRO-2 + layers | each GPU, ZeRO-3 + layers | operations a "
        "step | hours per 1,000 steps, estimated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name in PUBLISHED:
        model = build_meta(name)
        batch = MicroBatch(
            rows=rows,
            tokens=tokens,
            learned=learned,
            masks=masks,
            grids=model.backbone.cutter.grids(*picture),
        )
        zero2, zero3 = (
            sum(parameters_of(model, rank=rank).held(deepspeed_stage=stage, gpus=gpus).values())
            for stage in (2, 3)
        )
        none, layers = (
            sum(activation_bytes(model, batch, rank=rank, dropout=True, half=True, recomputed=count).values())
            for count in (0, None)
        )
        work = accumulate * sum(Operations(model, rank=rank).of(Work.planned(batch)).values())
        hours = 1000 * work / (peak_tflops * 1e12 * mfu) / 3600
        cells = " | ".join(
            f"{size / GB:.1f} GB" for size in (none, layers, zero2 + none, zero2 + layers, zero3 + layers)
        )
        lines.append(f"| {name} | {cells} | {work * gpus / 1e15:.1f} PFLOP | {hours:.1f} |")
    return "\n".join(lines)


def machines_table() -> str:
    """One row a machine and profile: each GPU's memory with the profile's longest rows, and layers that are
    computed again to fit it."""
    lines = [
        "| machine | profile | `sft`, each GPU | layers computed again | `rl`, each GPU | layers computed "
        "again |",
        "|-|-|-|-|-|-|",
    ]
    for gpus, gpu_gb, name, words in MACHINES:
        config = Config.model_validate(
            resolve(ROOT / PROFILES / f"{name}.yaml", (f"launch.processes={gpus}", *words))
        )
        model, cells = build_meta(name), list[str]()
        for stage in ("sft", "rl"):
            memory = stage_memory(config, model, stage, gpu_bytes=gpu_gb * 10**9)
            fits = memory.fits(gpu_gb * 10**9) and not (stage == "rl" and config.launch.deepspeed_stage == 3)
            cells += (
                [f"{memory.total / GB:.0f} GB", f"{memory.recomputed} of {memory.layers}"]
                if fits
                else ["does not fit", ""]
            )
        lines.append(f"| {gpus} x {gpu_gb} GB | {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Disk and GPU memory of the full-size profiles, and estimated time."
    )
    parser.add_argument("--gpus", type=int, default=8)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--rows", type=int, default=1, help="of one GPU's micro-batch")
    parser.add_argument("--accumulate", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=4096, help="of a row, pictures included")
    parser.add_argument("--learned", type=int, default=300, help="tokens of a row's answers")
    parser.add_argument(
        "--picture",
        type=int,
        nargs=2,
        default=(1000, 750),
        help="width and height of a row's picture, in pixels",
    )
    parser.add_argument("--masks", type=int, default=5, help="of a row")
    parser.add_argument(
        "--peak-tflops", type=float, default=989, help="of the GPU, dense bf16 (H100 and H200: 989)"
    )
    parser.add_argument(
        "--mfu",
        type=float,
        default=0.4,
        help="share of the peak that is reached, operations of recomputed layers left out",
    )
    a = parser.parse_args()
    print(table(rank=a.rank, gpus=a.gpus))
    print(
        f"\n{a.rows} rows of {a.tokens:,} tokens, {a.accumulate} times a step, {a.mfu:.0%} of "
        f"{a.peak_tflops:g} TFLOP/s:\n"
    )
    print(steps_table(**vars(a)))
    print(f"\nThe profiles' longest rows, `checkpointing: auto`:\n\n{machines_table()}")
