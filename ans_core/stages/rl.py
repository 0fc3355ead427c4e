"""rl: the merged SFT model and (image, mask, caption) samples in, the policy's trained tensors out.

    dvc repro -s rl            tiny: about 6 minutes on 2 cores

Policy and teacher are two adapters over one backbone; adapters off is the reference. Frozen: embeddings,
head, encoders.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

from ans_core import data, dist
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints.trained import TEACHER, sft_model
from ans_core.config import Config
from ans_core.data.left_out import LeftOutFile
from ans_core.data.selection import Joined, Selected
from ans_core.judge.choose import is_judged, judge_of
from ans_core.judge.judging import Judging
from ans_core.judge.questions import read_questions
from ans_core.model import adapters
from ans_core.model.network import Network
from ans_core.model.parts import check_moved, hashes, part_of
from ans_core.rewards import REWARDS, corpus_rewards
from ans_core.rl.batch import rl_batch
from ans_core.rl.dual_loop import LOOPS, Beside, DualLoop, check_learned
from ans_core.rl.validation import HeldOutRewards
from ans_core.stages.gpu_memory import checkpointed_layers, loader_bytes
from ans_core.stages.launch import (
    check_shared_memory,
    last_means,
    lasting,
    local_processes,
    machine_of,
    schedule_of,
    weights_dtype,
    write_trained,
)
from ans_core.stages.rl_batches import (
    LoopSamples,
    RolloutBatches,
    compares_masks,
    compares_words,
    rows_of_sft,
    samples_by_loop,
)
from ans_core.stages.supervision import objective_of
from ans_core.train import loop, states
from ans_core.train.watch import VALIDATION_LOSS, Validation, Watch
from ans_core.types import Log, Sample


def run(
    cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log, must_learn: bool = True
) -> dict[str, float]:
    """Run the stage. inputs: data, base, sft, questions. Writes the policy's tensors (delta on SFT), the
    teacher's (teacher/, the same), curves.csv, rewards.json, moved.json and `samples` (pictures of rollouts)
    to `out`. Another sample is practised in the place of one that can't be read; the curve `skipped_samples`
    counts them, `left_out-<process>.jsonl` in `scratch` names them. Raises RuntimeError if no step had a
    gradient, unless `must_learn` is False (a trial of a few steps)."""
    with _judging(cfg, inputs) as judging:
        return _run(cfg, judging, inputs=inputs, out=out, scratch=scratch, log=log, must_learn=must_learn)


@contextmanager
def _judging(cfg: Config, inputs: dict[str, Path]) -> Iterator[Judging | None]:
    """Yield the judge and its questions; None if no loop is judged."""
    if not is_judged(cfg.rl.loops, loop1=cfg.rl.use_llm_judge, loop2=cfg.rl.use_llm_judge_loop2):
        yield None
        return
    with closing(judge_of(cfg)) as judge:
        yield Judging(
            judge=judge,
            questions=read_questions(inputs["questions"] / "questions.jsonl"),
            meteor_weight=cfg.judge.meteor_weight,
            judge_weight=cfg.judge.judge_weight,
            on_failure=cfg.judge.on_failure,
        )


def _run(
    cfg: Config,
    judging: Judging | None,
    *,
    inputs: dict[str, Path],
    out: Path,
    scratch: Path,
    log: Log,
    must_learn: bool,
) -> dict[str, float]:
    settings = cfg.rl
    machine = machine_of(cfg.launch, settings.dtype, log=log)
    if machine.deepspeed_stage == 3:
        raise ValueError(
            "rl: launch.deepspeed_stage 3 divides weights that its three policies read whole; use 2, or 0"
        )
    loop.let_processes_talk(machine)  # the first looks at the data for all
    sources = data.sources(inputs["data"], "train")
    joined = Joined([source.samples for source in sources])
    practice = samples_by_loop(
        joined,
        settings.loops,
        absent=settings.absent,
        wordless=not compares_words(settings),
        maskless=not compares_masks(settings),
    )
    # of the loop with most samples; the others repeat theirs
    epoch = max(len(samples) for samples in practice.samples)
    optim = lasting(
        settings.optim, "rl", samples=epoch, batch=settings.rolled_out, inner_steps=settings.inner_steps
    )
    settings = settings.model_copy(update={"optim": optim})
    cfg = cfg.model_copy(update={"rl": settings})
    model = sft_model(
        inputs["base"] / "base", inputs["sft"], dtype=weights_dtype(machine.dtype), device=machine.device
    )
    model.compiled = machine.compile
    modules = adapters.policy_modules(model, drawing=settings.drawing)
    lora = adapters.rl_config(**settings.lora.model_dump(), modules=modules)
    policies = adapters.Policies(model, lora, seed=dist.seed_of(cfg.seed, "rl lora"))
    model.checkpointing = checkpointed_layers(cfg, model, "rl", machine=machine, log=log)
    check_shared_memory(
        machine.workers,
        loader_bytes(cfg, model, "rl", processes=dist.world_size()),
        processes=local_processes(),
    )
    module = _dual_loop(cfg, policies, practice, judging, log=log, pictures_to=scratch / "samples")
    before = hashes(model)  # with the head in fp32
    validation = _validation(cfg, module, machine, inputs["data"]) if settings.val_every else None
    left_out = LeftOutFile(scratch / f"left_out-{dist.rank()}.jsonl", rows=settings.optim.batch)
    rows = rows_of_sft(cfg, sources, model, left_out) if settings.rows else None
    make = RolloutBatches(cfg, practice, model, joined, left_out, rows)
    curves = loop.train(
        module, make, name="rl", schedule=schedule_of(settings.optim, inner_steps=settings.inner_steps),
        machine=machine, seed=cfg.seed,
        scratch=scratch, log=log,
        after_step=lambda step: module.after_step(step) | left_out.metrics(step, machine.device),
        scales=dict.fromkeys(modules, settings.modules_lr), watch=Watch(validation=validation, part_of=part_of),
    )  # fmt: skip
    if validation is not None:
        warn_unless_better(curves)
    if must_learn:
        check_learned(curves)
    moved = check_moved(before, model)
    config = {"stage": "rl", "lora": settings.lora.model_dump(), "modules": modules, "seed": cfg.seed}
    base_hash = checkpoint.weights_hash(inputs["sft"]) if dist.rank() == 0 else ""

    def write(folder: Path, adapter: str = "policy") -> None:
        if dist.rank() == 0:
            tensors = policies.tensors(adapter)
            checkpoint.save_delta(tensors, folder, base_hash=base_hash, config=config)

    write_trained(
        write, module, "rl", curves, moved,
        out=out, scratch=scratch, keep_best=settings.keep_best, device=machine.device,
    )  # fmt: skip
    write(out / TEACHER, "teacher")
    if dist.rank() == 0:
        (out / "rewards.json").write_text(json.dumps(module.record))
    dist.wait_for_all()
    return last_means(curves)


def _dual_loop(
    cfg: Config,
    policies: adapters.Policies,
    practice: LoopSamples,
    judging: Judging | None,
    *,
    log: Log,
    pictures_to: Path,
) -> DualLoop:
    settings = cfg.rl
    kinds = ("caption", "mask", "ground", "text")
    needed = set().union(*(getattr(settings, f"rewards_{kind}") for kind in kinds))
    captions = (s.text for samples in practice.samples for s in samples if s.text)
    return DualLoop(
        policies,
        settings,
        seed=cfg.seed,
        points=cfg.sft.mask_points,
        loss_weights=(cfg.sft.mask_weight, cfg.sft.dice_weight),
        rewards=REWARDS | corpus_rewards(captions, needed=needed),
        judging=judging,
        beside=Beside(supervised=objective_of(cfg, policies.model)) if settings.rows else None,
        log=log,
        pictures_to=pictures_to,
    )


def _validation(cfg: Config, module: DualLoop, machine: loop.Machine, prepared: Path) -> Validation:
    """Measure the loops on the split `val`. Raises ValueError if it has nothing that they could practise."""
    s = cfg.rl
    joined = Joined([source.samples for source in data.sources(prepared, "val")])
    samples = {}
    for name in s.loops:
        taken = Selected(joined, joined.where(LOOPS[name].takes))
        if some := held_out(taken, s.val_rows, module.model, mask_size=cfg.sft.mask_size, seed=cfg.seed):
            samples[str(name)] = some
        else:
            logging.warning(
                "rl.val_every: the split 'val' has nothing for the loop %s, which needs %s: its rewards are "
                "not measured",
                name,
                LOOPS[name].wants,
            )
    if not samples:
        raise ValueError(
            "rl.val_every is set, and the split 'val' has nothing that a loop of rl.loops practises; add data "
            "with one to prepare.sources, or set rl.val_every=0"
        )
    measured = HeldOutRewards(
        module,
        samples,
        batch=max(1, s.optim.batch // (s.optim.accumulate * dist.world_size())),
        mask_size=cfg.sft.mask_size,
        autocast=machine.autocast(),
    )
    return Validation(every=s.val_every, measure=measured.measure, patience=s.early_stop, at_start=True)


def held_out(
    samples: Sequence[Sample], rows: int, model: Network, *, mask_size: int, seed: int
) -> list[Sample]:
    """Return so many samples that can be read, in an order that the seed decides."""
    chosen: list[Sample] = []
    for place in range(len(samples)):
        if len(chosen) == rows:
            break
        sample = samples[dist.permuted(place, len(samples), seed, "rl validation")]
        try:
            rl_batch([sample], [sample.text], model, mask_size=mask_size)
        except ValueError as error:
            logging.warning("rl: validation leaves out %s/%s: %s", sample.dataset, sample.sample_id, error)
            continue
        chosen.append(sample)
    return chosen


def warn_unless_better(curves: states.Curves) -> None:
    """Say so where no validation was better than that of the model which RL began with."""
    before, *after = [value for _, name, value in curves if name == VALIDATION_LOSS]
    best = min(after, default=math.nan)
    if dist.rank() == 0 and not best < before:
        logging.warning(
            "rl: no validation is better than that of the model it began with (val/loss %.4f, then %.4f at "
            "best): keep that one, or see docs/trouble.md",
            before,
            best,
        )
