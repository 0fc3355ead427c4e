"""What each part of the agent's RFT is good for: the stage `rft` with a part left out, from one agent after
SFT.

    ans run --agent                                        # makes runs/tiny, up to `agent_sft@tools` is enough
    python perf/agent_ablation.py                          # an hour on 2 cores; writes perf/results/agent-ablation-seed<N>.json as it goes
    python perf/agent_ablation.py --table                  # only the table, of all seeds that are there

Every run is the profile's `rft` with `--steps` steps, judged greedily on `--each` held-out questions a family
(`agent.evaluate.split`): accuracy where operations are needed and of `easy`, the share of episodes with a
call there, and the share of right answers that rest on a look. Gains are over the agent after SFT on the same
questions. Without a curriculum all parts count from the third step on. Late curiosity counts in the last
phase alone.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ans_core.agent.rewards import curriculum
from ans_core.config import Config, load
from ans_core.stages import agent_evaluate, rft
from perf.bar import spread

AT_ONCE = {"threshold": -9.0, "steps": 1}
RUNS: dict[str, dict[str, Any]] = {
    "as in the profile": {},
    "no pay for looks": {"evidence": 0.0},
    "no curiosity": {"curiosity": 0.0},
    "late curiosity": {},
    "no coherence": {"coherence": 0.0},
    "no curriculum": {"phases": {"base": AT_ONCE, "coherence": AT_ONCE, "every": 1, "allowed_loss": 1.0}},
    "task alone": {"evidence": 0.0, "curiosity": 0.0, "coherence": 0.0, "penalty": 0.0},
}
"""Name -> what differs from the profile's `agent.rft`."""
NAMES = ("needed/accuracy", "needed/evidence", "needed/RaPR", "easy/accuracy", "easy/RaPR")


def configured(cfg: Config, changes: dict[str, Any], *, steps: int, each: int) -> Config:
    values = cfg.model_dump()
    settings = values["agent"]["rft"]
    settings |= {"samples_every": 0, **changes}
    settings["optim"] |= {"steps": steps}
    values["agent"]["evaluate"] |= {"each": each, "controls": False, "referring": 0, "shown": 0}
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


def table(paths: Sequence[Path]) -> str:
    """Gains over SFT; of several seeds their mean +- deviation."""
    seeds = [json.loads(path.read_text())["runs"] for path in paths]
    lines = [f"| run | {' | '.join(NAMES)} |", "|-" * (len(NAMES) + 1) + "|"]
    lines.append(f"| SFT | {' | '.join(spread([runs['SFT'][name] for runs in seeds]) for name in NAMES)} |")
    for run in RUNS:
        if all(run in runs for runs in seeds):
            gains = (spread([runs[run][name] - runs["SFT"][name] for runs in seeds], "+") for name in NAMES)
            lines.append(f"| {run} | {' | '.join(gains)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--each", type=int, default=100)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    cfg, runs = load(Path("params.yaml")), arguments.runs
    path = Path(f"perf/results/agent-ablation-seed{cfg.seed}.json")
    path.parent.mkdir(exist_ok=True)
    if arguments.table:
        print(table(sorted(path.parent.glob("agent-ablation-seed*.json"))))
        return
    inputs = {name: runs / name for name in ("data", "model", "agent/cota", "agent/sft/tools")}
    found: dict[str, Any] = {"seed": cfg.seed, "steps": arguments.steps, "each": arguments.each, "runs": {}}
    found["runs"]["SFT"] = judged(
        configured(cfg, {}, steps=arguments.steps, each=arguments.each), "sft", inputs
    )
    for name in arguments.only:
        began, changed = (
            time.perf_counter(),
            configured(cfg, RUNS[name], steps=arguments.steps, each=arguments.each),
        )
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng(), parts_of(name):
            out = trained(rft, changed, inputs, Path(folder))
            found["runs"][name] = judged(changed, "rft", {**inputs, "agent/rft": out})
        path.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{name}: {time.perf_counter() - began:.0f} s\n{table([path])}", flush=True)


if __name__ == "__main__":
    main()
