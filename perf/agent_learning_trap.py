"""The learning trap: an agent that rarely calls and gains nothing by it. What keeps calls alive, the task's
reward alone or curiosity?

    ans run --agent                                        # makes runs/tiny, up to `agent_sft@tools` is enough
    python perf/agent_learning_trap.py                     # 2 cores: an hour or two; writes perf/results/agent-trap-seed<N>.json
    python perf/agent_learning_trap.py --steps 120 --phase-steps 40 --name agent-weak-ablation --arms "task alone" "as in the profile" \
        "no curiosity" "late curiosity" "no coherence" "no curriculum" "no pay for looks"     # what each part is good for

The weak start can call, and seldom does: the agent after SFT, taught for `--sft-steps` further steps on
traces of which `--direct` are answered at once. All arms go on from it with `rft` for `--steps` steps: with
the task's reward alone, with curiosity beside it, as in the profile, where looks are paid, too, or with one
part of that left out; `late curiosity` counts in the last phase alone, and without a curriculum all parts
count from the third step on. Printed: RaPR (share of sampled episodes with a successful
call) and accuracy over families that need an operation, as means of 10 steps; and the same of `--each`
held-out questions a family, answered greedily, of the start and at the end. The file is written after every
arm, and one that has an arm keeps it. A file of other settings is written anew: `--name` another.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from ans_core.agent import rows
from ans_core.agent.episode import Toolbox
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.policy import load_policy
from ans_core.agent.rewards import curriculum
from ans_core.agent.world.trace_file import FILE, Trace, read_traces
from ans_core.checkpoints import checkpoint
from ans_core.config import Config, load
from ans_core.dist import rng_of
from ans_core.model.supervised import Supervised
from ans_core.stages import agent_evaluate, rft
from ans_core.stages.agent_sft import Part, TraceBatches
from ans_core.stages.launch import machine_of, schedule_of
from ans_core.train import loop

AT_ONCE = {"threshold": -9.0, "steps": 1}
TASK_ALONE = {"evidence": 0.0, "curiosity": 0.0, "coherence": 0.0, "penalty": 0.0}
ARMS: dict[str, dict[str, Any]] = {
    "as in the profile": {},
    "no pay for looks": {"evidence": 0.0},
    "no curiosity": {"curiosity": 0.0},
    "late curiosity": {},
    "no coherence": {"coherence": 0.0},
    "no curriculum": {"phases": {"base": AT_ONCE, "coherence": AT_ONCE, "every": 1, "allowed_loss": 1.0}},
    "task alone": TASK_ALONE,
    "with curiosity": TASK_ALONE | {"curiosity": 1.0},
}
"""Name -> what differs from the profile's `agent.rft`."""
NAMES = ("needed/accuracy", "needed/evidence", "needed/RaPR", "easy/accuracy", "easy/RaPR")
MEAN = 10


def configured(cfg: Config, arguments: argparse.Namespace, changes: dict[str, Any]) -> Config:
    values = cfg.model_dump()
    values["seed"] = arguments.seed
    values["agent"]["families"] = list(arguments.families)
    values["agent"]["sft"]["optim"] |= {"steps": arguments.sft_steps}
    values["agent"]["sft"] |= {"checked": 0, "referring": 0.0}
    values["agent"]["rft"] |= {"samples_every": 0}
    if arguments.phase_steps:
        for phase in ("base", "coherence"):
            values["agent"]["rft"]["phases"][phase] |= {"steps": arguments.phase_steps}
    values["agent"]["rft"] |= changes
    values["agent"]["rft"]["optim"] |= {"steps": arguments.steps, "batch": arguments.batch}
    values["agent"]["evaluate"] |= {"each": arguments.each, "controls": False, "referring": 0, "shown": 0}
    return Config.model_validate(values)


@contextmanager
def parts_of(name: str) -> Iterator[None]:
    """Let curiosity count in the last phase alone, if that is the run's name."""
    before = dict(curriculum.PARTS)
    if name == "late curiosity":
        for phase in curriculum.PHASES[:-1]:
            curriculum.PARTS[phase] = tuple(part for part in before[phase] if part != "curiosity")
    try:
        yield
    finally:
        curriculum.PARTS.update(before)


def trained(stage: Any, cfg: Config, inputs: dict[str, Path], folder: Path, **words: str) -> Path:
    """Run a stage that trains and return its output."""
    out = folder / "out"
    out.mkdir(parents=True)
    stage.run(
        cfg, inputs=inputs, out=out, scratch=folder / "scratch", log=lambda metrics, step: None, **words
    )
    return out


def judged(cfg: Config, row: str, inputs: dict[str, Path]) -> dict[str, float]:
    """Return the figures of NAMES that these families have, of `agent.evaluate.each` held-out questions each,
    answered greedily."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "out")
        out.mkdir()
        found = agent_evaluate.run(
            cfg, row=row, inputs=inputs, out=out, scratch=Path(folder), log=lambda metrics, step: None
        )
    return {name: round(found[name], 4) for name in NAMES if name in found}


def weak_traces(folder: Path, out: Path, *, direct: float, seed: int) -> None:
    """Write the traces of a folder into another, a share of them answered at once; pictures stay where they
    are."""
    out.mkdir(parents=True)
    (out / "pictures").symlink_to((folder / "pictures").resolve())
    rng = rng_of(seed, "weak start")
    with (out / FILE).open("w", encoding="utf-8") as lines:
        for trace in rows.lessons(read_traces(folder)):
            chosen: Trace = (
                rows.direct(trace).model_copy(update={"kind": "golden"}) if rng.random() < direct else trace
            )
            lines.write(chosen.model_dump_json(exclude_defaults=True) + "\n")


def weakened(cfg: Config, runs: Path, traces: Path, folder: Path) -> Path:
    """Teach the agent after SFT on these traces, and return its new adapter."""
    base, settings = runs / "model", cfg.agent.sft
    policy = load_policy(base, runs / "agent/sft/tools", operations=OPERATIONS)
    lessons = tuple(rows.lessons(read_traces(traces / "train")))
    with Toolbox(
        policy.model,
        adapters_off=policy.base,
        seconds=cfg.agent.episode.time_limit_s,
        reader=cfg.agent.reader,
    ) as toolbox:
        batches = TraceBatches(cfg, policy, toolbox, {}, traces / "train", "tools")
        part = Part(name="weak", traces=lessons, before=(), first=0, steps=settings.optim.steps)
        loop.train(
            Supervised(policy.model, mask_weight=0.0, dice_weight=0.0, points=cfg.sft.mask_points),
            batches.of(part), name="weak start", schedule=schedule_of(settings.optim),
            machine=replace(machine_of(cfg.launch, settings.dtype), deepspeed_stage=0), seed=cfg.seed,
            scratch=folder / "scratch", log=lambda metrics, step: None,
        )  # fmt: skip
    out = folder / "out"
    out.mkdir()
    policy.save(
        out,
        base_hash=checkpoint.weights_hash(base),
        about={"stage": "agent_sft", "row": "tools", "seed": cfg.seed},
    )
    return out


def curve(folder: Path, name: str) -> list[float]:
    """Return a curve of the stage as means of MEAN steps."""
    lines = [line.split(",") for line in (folder / "curves.csv").read_text().splitlines()]
    values = {
        int(step): float(value) for step, found, value in lines[1:] if found == f"rft/agent/needed/{name}"
    }
    return [
        round(fmean(values[s] for s in values if first <= s < first + MEAN), 3)
        for first in range(0, max(values) + 1, MEAN)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", default=["pattern", "text"])
    parser.add_argument(
        "--direct", type=float, default=0.67, help="share of the traces that are answered at once"
    )
    parser.add_argument("--sft-steps", type=int, default=60)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--phase-steps",
        type=int,
        help="most steps of the first two phases of rewards (default: the profile's)",
    )
    parser.add_argument("--batch", type=int, default=8, help="questions per step")
    parser.add_argument("--each", type=int, default=200, help="held-out questions a family")
    parser.add_argument(
        "--arms", nargs="+", default=["task alone", "with curiosity", "as in the profile"], choices=list(ARMS)
    )
    parser.add_argument("--name", default="agent-trap", help="of the file under perf/results")
    arguments = parser.parse_args()
    cfg, runs = load(Path("params.yaml")), arguments.runs
    path = Path(f"perf/results/{arguments.name}-seed{arguments.seed}.json")
    chosen = {
        name: value
        for name, value in vars(arguments).items()
        if name not in ("runs", "arms", "name") and value is not None
    }
    found: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    if found.get("settings") != chosen:
        found = {"settings": chosen}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        weak_traces(
            runs / "agent/cota/train", folder / "cota/train", direct=arguments.direct, seed=arguments.seed
        )
        same = configured(cfg, arguments, {})
        start = weakened(same, runs, folder / "cota", folder / "sft")
        inputs = {name: runs / name for name in ("model", "data", "agent/cota")} | {"agent/sft/tools": start}
        found["start"] = judged(same, "sft", inputs)
        print("start", json.dumps(found["start"]), flush=True)
        for arm in arguments.arms:
            if arm in found:
                continue
            began, changed = time.perf_counter(), configured(cfg, arguments, ARMS[arm])
            with parts_of(arm):
                out = trained(rft, changed, inputs, folder / arm.replace(" ", "_"))
            seconds = (time.perf_counter() - began) / arguments.steps
            held_out = judged(changed, "rft", {**inputs, "agent/rft": out})
            sampled = {name: curve(out, name) for name in ("RaPR", "accuracy")}
            found[arm] = {**sampled, "held out": held_out, "seconds_a_step": round(seconds, 2)}
            print(arm, json.dumps(found[arm]), flush=True)
            path.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
