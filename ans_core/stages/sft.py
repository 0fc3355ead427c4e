"""sft: the base model and the mixture in, the fine-tuned tensors out (the base is referred to by its hash).

    dvc repro -s sft           tiny: 10 to 13 minutes on 2 cores

Without steps the base, a Sa2VA, is passed through: RL then starts from it. Frozen: vision tower, SAM2's image
encoder, prompt encoder and memory. Trained: LoRA on the language model, embeddings, head, projector,
text_hidden_fcs and SAM2's mask decoder, all in fp32.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from ans_core import data, dist
from ans_core.checkpoints import checkpoint, memory
from ans_core.checkpoints.trained import refuse_untaught
from ans_core.config import Config
from ans_core.data.collate import Batch, Layout, collate_readable
from ans_core.data.left_out import LeftOutFile
from ans_core.data.length_groups import LengthGroups, row_length
from ans_core.data.mixture import PoolRows
from ans_core.model import adapters
from ans_core.model.footprint import Operations, Work, peak_flops
from ans_core.model.lora_ranks import rank_pattern
from ans_core.model.network import Network
from ans_core.model.parts import check_moved, hashes, part_of
from ans_core.model.supervised import Supervised
from ans_core.model.validation import ValidationSlice
from ans_core.stages.gpu_memory import checkpointed_layers, loader_bytes
from ans_core.stages.launch import (
    check_shared_memory,
    last_means,
    lasting,
    local_processes,
    machine_of,
    schedule_of,
    show_ranks,
    weights_dtype,
    write_trained,
)
from ans_core.stages.supervision import mixture_of, objective_of, sft_layout
from ans_core.train import loop, sharding
from ans_core.train.watch import OPERATIONS, Validation, Watch
from ans_core.types import Log


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: data, base, memory (whose tensors replace the base's). Writes the trained
    tensors (delta), curves.csv and moved.json to `out`. Samples that can't be read or are too long are left
    out: the curve `skipped_samples` counts them, `left_out-<process>.jsonl` in `scratch` names them."""
    settings, base = cfg.sft, inputs["base"] / "base"
    machine = machine_of(cfg.launch, settings.dtype, log=log)
    if (inputs["base"] / "sam2").is_dir():
        raise ValueError(
            "base.source is sam2, a SAM2 without a language model: its pipeline ends with the stage memory"
        )
    if not (settings.optim.steps or settings.optim.epochs):
        return _passed_through(inputs, out)
    divide = sharding.divide if machine.deepspeed_stage == 3 else None
    model = checkpoint.load(base, dtype=weights_dtype(machine.dtype), device=machine.device, divide=divide)
    of_memory = memory.load_into(model, inputs["memory"], base=base)
    model.compiled = machine.compile
    if settings.object_weight:
        model.use_seg_object_score()
    lora = {**settings.lora.model_dump(), **_ranks(cfg, model)}
    show_ranks(lora, log)
    adapters.prepare_sft(model, adapters.lora_config(**lora), seed=dist.seed_of(cfg.seed, "sft lora"))
    model.checkpointing = checkpointed_layers(cfg, model, "sft", machine=machine, log=log)
    check_shared_memory(
        machine.workers,
        loader_bytes(cfg, model, "sft", processes=dist.world_size()),
        processes=local_processes(),
    )
    before = hashes(model)
    loop.let_processes_talk(machine)  # the first looks at the data for all
    mixture = mixture_of(cfg, data.sources(inputs["data"], "train"), seed=cfg.seed)
    optim = lasting(settings.optim, "sft", samples=mixture.epoch)
    show_mixture(mixture.table(optim.steps * optim.batch), log)
    layout = sft_layout(cfg, model)
    measure = partial(row_length, tokenizer=model.tokenizer, layout=layout)
    groups = (
        LengthGroups(mixture, measure, window=settings.length_window) if settings.length_window else mixture
    )
    left_out = LeftOutFile(scratch / f"left_out-{dist.rank()}.jsonl", rows=optim.batch)
    rows = partial(groups.rows, batch=optim.batch, micros=optim.accumulate)

    def make(step: int, micro: int) -> Batch:
        batch, samples = collate_readable(rows(step, micro), model.tokenizer, layout)
        left_out.add(step, samples)
        return batch

    module = objective_of(cfg, model)
    peak = peak_flops(machine.device) if machine.dtype == "bf16" else None
    watch = Watch(
        validation=_validation(cfg, module, machine, layout, inputs["data"]) if settings.val_every else None,
        rows=lambda step: [row.name for micro in range(optim.accumulate) for row in rows(step, micro)],
        counts=partial(_counts, operations=None if peak is None else Operations(model)),
        peak_flops=peak,
        part_of=part_of,
        runs_again=True,
    )
    curves = loop.train(
        module, make, name="sft", schedule=schedule_of(optim), machine=machine, seed=cfg.seed,
        scratch=scratch, log=log, after_step=lambda step: left_out.metrics(step, machine.device),
        scales={"sam_mask_decoder": settings.decoder_lr}, watch=watch,
    )  # fmt: skip
    moved = check_moved(before, model)
    config = {
        "stage": "sft",
        "lora": lora,
        "seed": cfg.seed,
        "seg_object_score": model.config.seg_object_score,
    }
    base_hash = checkpoint.weights_hash(base) if dist.rank() == 0 else ""

    def write(folder: Path) -> None:
        trained = adapters.trained(model)  # by all processes: ZeRO-3 has divided it
        if dist.rank() == 0:
            tensors = memory.joined(of_memory, trained)
            checkpoint.save_delta(tensors, folder, base_hash=base_hash, config=config)

    write_trained(
        write, module, "sft", curves, moved,
        out=out, scratch=scratch, keep_best=settings.keep_best, device=machine.device,
    )  # fmt: skip
    dist.wait_for_all()
    return last_means(curves)


def _passed_through(inputs: dict[str, Path], out: Path) -> dict[str, float]:
    """Write a delta that holds what `memory` trained and no tensor of its own. Raises ValueError for a base
    that has not learned what `[SEG]` means."""
    base = inputs["base"] / "base"
    refuse_untaught(base)
    if dist.rank() == 0:
        base_hash = checkpoint.weights_hash(base)
        of_memory, _ = checkpoint.load_delta(inputs["memory"], base_hash=base_hash)
        config = {"stage": "sft", "lora": None}
        checkpoint.save_delta(memory.joined(of_memory, {}), out, base_hash=base_hash, config=config)
    return {"trained": 0.0}


def _counts(batch: Batch, *, operations: Operations | None) -> dict[str, float]:
    """Count a micro-batch's rows, tokens and, where the GPU's peak is known, operations."""
    counts = {"rows": float(len(batch.input_ids)), "tokens": float((batch.branch >= 0).sum())}
    return (
        counts if operations is None else counts | {OPERATIONS: sum(operations.of(Work.of(batch)).values())}
    )


def _ranks(cfg: Config, base: Network) -> dict[str, dict[str, int]]:
    """Return the ranks of layers that differ from `sft.lora.rank`."""
    if not cfg.sft.lora_ranks_from:
        return {}
    tuned = checkpoint.load(cfg.sft.lora_ranks_from, dtype=next(base.parameters()).dtype)
    return {"rank_pattern": rank_pattern(base, dict(tuned.named_parameters()), energy=cfg.sft.lora_energy)}


def _validation(
    cfg: Config, module: Supervised, machine: loop.Machine, layout: Layout, prepared: Path
) -> Validation:
    """Validate on the split `val`. Raises ValueError if it holds nothing of the mixture."""
    settings, sources = cfg.sft, data.sources(prepared, "val")
    if not sources:
        raise ValueError(
            "sft.val_every is set, and the data has no split 'val'; add one to prepare.sources, or set "
            "sft.val_every=0"
        )
    held_out = ValidationSlice(
        module,
        mixture_of(cfg, sources, seed=dist.seed_of(cfg.seed, "validation")),
        layout,
        rows=settings.val_rows,
        batch=max(dist.world_size(), settings.optim.batch // settings.optim.accumulate),
        autocast=machine.autocast(),
    )
    return Validation(every=settings.val_every, measure=held_out.measure, patience=settings.early_stop)


def show_mixture(table: Sequence[PoolRows], log: Log) -> None:
    """Print rows and epochs of every pool of the mixture, and log them as metrics."""
    if dist.rank() > 0:
        return
    total = sum(pool.rows for pool in table)
    lines = [("data sets", "images", "samples", "rows", "share", "epochs")]
    for p in table:
        numbers = (
            f"{p.images:,}",
            f"{p.samples:,}",
            f"{p.rows:,}",
            f"{p.rows / total:.1%}",
            f"{p.epochs:.2f}",
        )
        lines.append((" + ".join(p.datasets), *numbers))
    first, *widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    aligned = [
        "  ".join([line[0].ljust(first), *(n.rjust(w) for n, w in zip(line[1:], widths, strict=True))])
        for line in lines
    ]
    print("\n".join(aligned))
    log(
        {
            f"mixture/{p.name}/{key}": value
            for p in table
            for key, value in (("rows", float(p.rows)), ("epochs", p.epochs))
        },
        0,
    )
