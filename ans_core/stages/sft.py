"""sft: the base model and the mixture in, the fine-tuned tensors out (the base is referred to by its hash).

    dvc repro -s sft           tiny: 10 to 13 minutes on 2 cores

Frozen: vision tower, SAM2's image encoder, prompt encoder and memory. Trained: LoRA on the language model, embeddings, head, projector,
text_hidden_fcs and SAM2's mask decoder, all in fp32.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from ans_core import data, dist, loop
from ans_core.checkpoints import checkpoint, memory
from ans_core.config import Config
from ans_core.data import conversation
from ans_core.data.collate import Batch, collate_readable
from ans_core.data.left_out import LeftOutFile
from ans_core.data.length_groups import LengthGroups, row_length
from ans_core.data.mixture import Mixture, PoolRows
from ans_core.model import adapters
from ans_core.model.parts import check_moved, hashes
from ans_core.model.supervised import Supervised, layout_of
from ans_core.stages.launch import last_means, machine_of, schedule_of, weights_dtype
from ans_core.types import Log


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: data, base, memory (whose tensors replace the base's). Writes the trained tensors (delta), curves.csv and
    moved.json to `out`. Samples that can't be read or are too long are left out: the curve `skipped_samples` counts them,
    `left_out-<process>.jsonl` in `scratch` names them."""
    settings, base = cfg.sft, inputs["base"] / "base"
    machine = machine_of(cfg.launch, settings.dtype)
    if (inputs["base"] / "sam2").is_dir():
        raise ValueError("base.source is sam2, a SAM2 without a language model: its pipeline ends with the stage memory")
    model = checkpoint.load(base, dtype=weights_dtype(settings.dtype), device=machine.device)
    of_memory = memory.load_into(model, inputs["memory"], base=base)
    lora = adapters.lora_config(**settings.lora.model_dump())
    adapters.prepare_sft(model, lora, seed=dist.seed_of(cfg.seed, "sft lora"))
    before = hashes(model)
    sources = data.sources(inputs["data"], "train")
    mixture = Mixture(
        sources,
        settings.mixture,
        questions=settings.questions_per_image,
        frames=settings.frames,
        seed=cfg.seed,
        turn=conversation.turn,
    )
    show_mixture(mixture.table(settings.optim.steps * settings.optim.batch), log)
    layout = layout_of(model, mask_size=settings.mask_size, max_length=settings.max_length)
    measure = partial(row_length, tokenizer=model.tokenizer, layout=layout)
    groups = LengthGroups(mixture, measure, window=settings.length_window) if settings.length_window else mixture
    left_out = LeftOutFile(scratch / f"left_out-{dist.rank()}.jsonl")

    def make(step: int, micro: int) -> Batch:
        rows = groups.rows(step, micro, batch=settings.optim.batch, micros=settings.optim.accumulate)
        batch, samples = collate_readable(rows, model.tokenizer, layout)
        left_out.add(step, samples)
        return batch

    def count(step: int) -> dict[str, float]:
        skipped = dist.shared_sum(torch.tensor(float(left_out.count(step))), machine.device)
        return {"skipped_samples": float(skipped)} if skipped else {}

    module = Supervised(model, mask_weight=settings.mask_weight, dice_weight=settings.dice_weight, points=settings.mask_points)
    curves = loop.train(
        module, make, name="sft", schedule=schedule_of(settings.optim), machine=machine, seed=cfg.seed, scratch=scratch, log=log,
        after_step=count, scales={"sam_mask_decoder": settings.decoder_lr},
    )  # fmt: skip
    moved = check_moved(before, model)
    if dist.rank() == 0:
        config = {"stage": "sft", "lora": settings.lora.model_dump(), "seed": cfg.seed}
        checkpoint.save_delta(
            memory.beside(of_memory, adapters.trained(model)), out, base_hash=checkpoint.weights_hash(base), config=config
        )
        loop.write_curves(out / "curves.csv", {"sft": curves})
        (out / "moved.json").write_text(json.dumps(moved, indent=1))
    dist.wait_for_all()
    return last_means(curves)


def show_mixture(table: Sequence[PoolRows], log: Log) -> None:
    """Print rows and epochs of every pool of the mixture, and log them as metrics."""
    if dist.rank() > 0:
        return
    total = sum(pool.rows for pool in table)
    lines = [("data sets", "images", "samples", "rows", "share", "epochs")]
    for p in table:
        numbers = (f"{p.images:,}", f"{p.samples:,}", f"{p.rows:,}", f"{p.rows / total:.1%}", f"{p.epochs:.2f}")
        lines.append((" + ".join(p.datasets), *numbers))
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = ["  ".join([line[0].ljust(first), *(n.rjust(w) for n, w in zip(line[1:], widths, strict=True))]) for line in lines]
    print("\n".join(aligned))
    log({f"mixture/{p.name}/{key}": value for p in table for key, value in (("rows", float(p.rows)), ("epochs", p.epochs))}, 0)
