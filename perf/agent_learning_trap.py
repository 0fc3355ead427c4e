"""The learning trap: an agent that rarely calls and gains nothing by it. What keeps calls alive, the task's reward alone or curiosity?

    ans run --agent                                        # makes runs/tiny, up to `cota` is enough
    python perf/agent_learning_trap.py                     # 2 cores: about half an hour; writes perf/results/agent-trap-seed<N>.json

The weak start is the agent's SFT on the profile's traces, of which `--direct` are answered at once, for `--sft-steps` steps. All arms go on
from it with the profile's `rft` for `--steps` steps: with the task's reward alone, with curiosity beside it, and as it is, where looks are
paid, too. Printed: RaPR (share of sampled episodes with a successful call) and accuracy over families that need an operation, as means of
10 steps.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from statistics import fmean
from typing import Any

from ans_core.agent import rows
from ans_core.agent.world.trace_file import FILE, Trace, read_traces
from ans_core.config import Config, load
from ans_core.dist import rng_of
from ans_core.stages import agent_sft, rft

ALONE = {"curiosity": 0.0, "evidence": 0.0, "coherence": 0.0, "penalty": 0.0}
ARMS: dict[str, dict[str, Any]] = {
    "task alone": ALONE,
    "with curiosity": ALONE | {"curiosity": 1.0},
    "as in the profile": {},
}
"""Name -> what differs from the profile's `agent.rft`."""
MEAN = 10


def configured(cfg: Config, arguments: argparse.Namespace, changes: dict[str, Any]) -> Config:
    values = cfg.model_dump()
    values["seed"] = arguments.seed
    values["agent"]["families"] = list(arguments.families)
    values["agent"]["sft"]["optim"] |= {"steps": arguments.sft_steps}
    values["agent"]["sft"] |= {"checked": 0, "referring": 0.0}
    values["agent"]["rft"] |= {"samples_every": 0, **changes}
    values["agent"]["rft"]["optim"] |= {"steps": arguments.steps, "batch": arguments.batch}
    return Config.model_validate(values)


def weak_traces(folder: Path, out: Path, *, direct: float, seed: int) -> None:
    """Write the traces of a folder into another, a share of them answered at once; pictures stay where they are."""
    out.mkdir(parents=True)
    (out / "pictures").symlink_to((folder / "pictures").resolve())
    rng = rng_of(seed, "weak start")
    with (out / FILE).open("w", encoding="utf-8") as lines:
        for trace in rows.lessons(read_traces(folder)):
            chosen: Trace = rows.direct(trace).model_copy(update={"kind": "golden"}) if rng.random() < direct else trace
            lines.write(chosen.model_dump_json(exclude_defaults=True) + "\n")


def curve(folder: Path, name: str) -> list[float]:
    """Return a curve of the stage as means of MEAN steps."""
    lines = [line.split(",") for line in (folder / "curves.csv").read_text().splitlines()]
    values = {int(step): float(value) for step, found, value in lines[1:] if found == f"rft/agent/needed/{name}"}
    return [round(fmean(values[s] for s in values if first <= s < first + MEAN), 3) for first in range(0, max(values) + 1, MEAN)]


def trained(stage: Any, cfg: Config, inputs: dict[str, Path], folder: Path, **words: str) -> Path:
    out = folder / "out"
    out.mkdir(parents=True)
    stage.run(cfg, inputs=inputs, out=out, scratch=folder / "scratch", log=lambda metrics, step: None, **words)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--families", nargs="+", default=["pattern", "text"])
    parser.add_argument("--direct", type=float, default=0.8, help="share of the traces that are answered at once")
    parser.add_argument("--sft-steps", type=int, default=300)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="questions per step")
    arguments = parser.parse_args()
    cfg, runs = load(Path("params.yaml")), arguments.runs
    found: dict[str, Any] = {"settings": {k: v for k, v in vars(arguments).items() if k != "runs"}}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        weak_traces(runs / "agent/cota/train", folder / "cota/train", direct=arguments.direct, seed=arguments.seed)
        inputs = {"model": runs / "model", "data": runs / "data", "agent/cota": folder / "cota"}
        start = trained(agent_sft, configured(cfg, arguments, {}), inputs, folder / "sft", row="tools")
        for arm, changes in ARMS.items():
            began = time.perf_counter()
            inputs = {"model": runs / "model", "agent/sft/tools": start}
            out = trained(rft, configured(cfg, arguments, changes), inputs, folder / arm.replace(" ", "_"))
            seconds = (time.perf_counter() - began) / arguments.steps
            found[arm] = {"RaPR": curve(out, "RaPR"), "accuracy": curve(out, "accuracy"), "seconds_a_step": round(seconds, 2)}
            print(arm, json.dumps(found[arm]), flush=True)
    Path(f"perf/results/agent-trap-seed{arguments.seed}.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
