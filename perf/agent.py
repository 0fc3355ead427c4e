"""The agent's table: `make agent` for several seeds, then figures of every row (mean, deviation, gains of RFT
paired by seed) and the bars.

    python perf/agent.py --profile tiny --seeds 0 1 2      # makes the model of each seed first, if it is not there
    python perf/agent.py --seeds 1 --on runs/tiny          # the stages alone, on the data and the model of this folder, whatever their seed
    python perf/agent.py --seeds 1 --on runs/tiny --rows sft rft oracle       # without the row `direct` and its training
    python perf/agent.py --table [--on runs/tiny]          # only the table, from perf/results/

Every seed's metrics/agent.json is kept as perf/results/agent-<profile>-seed<N>.json, of --on as
agent-<profile>-on-seed<N>.json. params.yaml is as before afterwards. What --on makes lies in
perf/runs/agent-seed<N>: the same command goes on from there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ans_core.config import load
from ans_core.written import atomic_folder
from perf.bar import spread
from tasks.stages import AGENT, TABLE, Stage

RESULTS, RUNS = Path("perf/results"), Path("perf/runs")
ROWS = ("direct", "sft", "rft", "oracle")
FAMILIES = ("easy", "pattern", "text", "larger", "moves")
METRICS = (
    "needed/accuracy", *(f"{family}/accuracy" for family in FAMILIES), "needed/RaPR", "easy/RaPR",
    "needed/evidence", "needed/valid_calls",
    *(f"{control}/needed/accuracy" for control in ("forbidden", "random", "shuffled", "blank", "plan")),
    "referring/gIoU_all",
)  # fmt: skip
CONTROLS = ("forbidden", "random", "shuffled", "blank")
Figures = Mapping[str, Mapping[str, float]]
"""Row -> metric -> value."""


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A figure that shall be `at least`, or `at most`, this in the mean over the seeds."""

    name: str
    of: Callable[[Figures], float]
    at_least: float | None = None
    at_most: float | None = None
    beyond_spread: bool = False
    """Above 0 by more than the deviation of the seeds, instead of a number."""

    def line(self, runs: Mapping[int, Figures]) -> str:
        try:
            values: list[float | None] = [self.of(figures) for figures in runs.values()]
        except KeyError as lacking:
            return f"| {self.name} | not measured ({lacking.args[0]}) | {self._wanted} | |"
        mean = statistics.mean(v for v in values if v is not None)
        if self.beyond_spread:
            met = len(values) > 1 and mean > statistics.stdev(v for v in values if v is not None)
        else:
            met = (self.at_least is None or mean >= self.at_least) and (
                self.at_most is None or mean <= self.at_most
            )
        return f"| {self.name} | {spread(values)} | {self._wanted} | {'met' if met else 'missed'} |"

    @property
    def _wanted(self) -> str:
        if self.beyond_spread:
            return "> 0 beyond the spread"
        return f">= {self.at_least:g}" if self.at_least is not None else f"<= {self.at_most:g}"


BARS = (
    Bar(name="rft, needed/accuracy", of=lambda f: f["rft"]["needed/accuracy"], at_least=0.65),
    Bar(name="rft - direct", of=lambda f: f["rft"]["needed/accuracy"] - f["direct"]["needed/accuracy"], at_least=0.20),
    Bar(name="rft / oracle", of=lambda f: f["rft"]["needed/accuracy"] / f["oracle"]["needed/accuracy"], at_least=0.8),
    Bar(name="sft, needed/accuracy", of=lambda f: f["sft"]["needed/accuracy"], at_least=0.55),
    Bar(name="direct, needed/accuracy", of=lambda f: f["direct"]["needed/accuracy"], at_most=0.50),
    Bar(name="sft, pattern/accuracy", of=lambda f: f["sft"]["pattern/accuracy"], at_least=0.75),
    Bar(
        name="direct, pattern/accuracy above the prior",
        of=lambda f: f["direct"]["pattern/accuracy"] - f["direct"]["pattern/prior"],
        at_most=0.08,
    ),
    *(
        Bar(name=f"rft under {c}", of=lambda f, key=f"{c}/needed/accuracy": f["rft"][key], at_most=0.45)  # type: ignore[misc]
        for c in CONTROLS
    ),
    Bar(name="rft - sft", of=lambda f: f["rft"]["needed/accuracy"] - f["sft"]["needed/accuracy"], beyond_spread=True),
    Bar(name="rft, needed/RaPR", of=lambda f: f["rft"]["needed/RaPR"], at_least=0.90),
    Bar(name="rft, easy/RaPR", of=lambda f: f["rft"]["easy/RaPR"], at_most=0.25),
    Bar(name="rft - direct, easy/accuracy", of=lambda f: f["rft"]["easy/accuracy"] - f["direct"]["easy/accuracy"], at_least=-0.03),
    Bar(name="rft, evidence of right answers, pattern", of=lambda f: f["rft"]["pattern/evidence"], at_least=0.80),
    Bar(name="rft, evidence of right answers, text", of=lambda f: f["rft"]["text/evidence"], at_least=0.80),
    Bar(
        name="rft, referring gIoU - its base's",
        of=lambda f: f["rft"]["referring/gIoU_all"] - f["rft"]["referring/gIoU_all_base"],
        at_least=-0.02,
    ),
)  # fmt: skip


def run(profile: str, seed: int) -> None:
    """One seed through DVC; what is cached is not done again."""
    ans = str(Path(sys.executable).with_name("ans"))
    before = Path("params.yaml").read_text()
    try:
        subprocess.run([ans, "profile", profile, f"seed={seed}", "--force"], check=True)
        subprocess.run([ans, "run", "--agent"], check=True)
        RESULTS.mkdir(exist_ok=True)
        shutil.copyfile("metrics/agent.json", RESULTS / f"agent-{profile}-seed{seed}.json")
    finally:
        Path("params.yaml").write_text(before)


def run_on(profile: str, seed: int, made: Path, rows: Sequence[str]) -> None:
    """One seed of the agent's stages in this process, without DVC and MLflow, on the data and the model of a
    folder like runs/tiny."""
    cfg = load(Path("params.yaml"))
    if cfg.profile != profile:
        raise SystemExit(
            f"params.yaml is of the profile {cfg.profile}; run `ans profile {profile} --force` first"
        )
    cfg = cfg.model_copy(update={"seed": seed})
    own = RUNS / f"agent-seed{seed}"
    places = {name: made / name for name in ("data", "model")}
    for stage in wanted(rows):
        began, out, scratch = time.perf_counter(), own / stage.out, own / "scratch" / stage.out
        places[stage.out] = out
        if stage.name == "agent_report":
            shutil.rmtree(out, ignore_errors=True)  # an earlier call may have had other rows
        if out.exists():
            continue
        scratch.mkdir(parents=True, exist_ok=True)
        inputs = {name: places[name] for name in stage.inputs if name in places}
        words = {"row": stage.row} if stage.row else {}
        module = importlib.import_module(f"ans_core.stages.{stage.task}")
        with atomic_folder(out) as partial:
            module.run(
                cfg, inputs=inputs, out=partial, scratch=scratch, log=lambda metrics, step: None, **words
            )
        print(f"{stage.name}: {time.perf_counter() - began:.0f} s", flush=True)
    RESULTS.mkdir(exist_ok=True)
    shutil.copyfile(own / "agent/report/agent.json", RESULTS / f"agent-{profile}-on-seed{seed}.json")


def wanted(rows: Sequence[str]) -> list[Stage]:
    """The agent's stages that lead to these rows of the table, in their order."""
    stages = {stage.out: stage for stage in TABLE if stage.group == AGENT}
    needed: set[str] = set()
    ways = [f"agent/evaluate/{row}" for row in rows]
    while ways:
        way = ways.pop()
        if way in stages and way not in needed:
            needed.add(way)
            ways += stages[way].inputs
    return [stage for out, stage in stages.items() if out in needed or stage.name == "agent_report"]


def table(name: str) -> str:
    """Raises SystemExit where no seed was run."""
    files = sorted(RESULTS.glob(f"agent-{name}-seed*.json"))
    runs: dict[int, Figures] = {
        int(file.stem.rpartition("seed")[2]): json.loads(file.read_text()) for file in files
    }
    if not runs:
        raise SystemExit(f"{RESULTS} has no agent-{name}-seed*.json; run `python perf/agent.py` first")
    lines = [
        f"{len(runs)} seeds: {sorted(runs)}",
        "",
        "| metric | " + " | ".join(ROWS) + " | rft - sft, paired |",
        "|-" * (len(ROWS) + 2) + "|",
    ]
    for metric in METRICS:
        cells = [spread([figures.get(row, {}).get(metric) for figures in runs.values()]) for row in ROWS]
        both = [
            (f["rft"][metric], f["sft"][metric])
            for f in runs.values()
            if metric in f.get("rft", {}) and metric in f.get("sft", {})
        ]
        lines.append(
            f"| {metric} | "
            + " | ".join(cells)
            + f" | {spread([after - before for after, before in both], sign='+')} |"
        )
    lines += ["", "| bar | measured | wanted | |", "|-|-|-|-|", *(bar.line(runs) for bar in BARS)]
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--on", type=Path, help="folder with `data` and `model` of one pipeline run")
    parser.add_argument("--rows", choices=ROWS, nargs="*", default=ROWS, help="of the table, with --on")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        for seed in arguments.seeds:
            if arguments.on:
                run_on(arguments.profile, seed, arguments.on, arguments.rows)
            else:
                run(arguments.profile, seed)
    print(table(f"{arguments.profile}-on" if arguments.on else arguments.profile))
