"""What Prefect, DVC and MLflow cost: a Markdown table with the bar that each figure must stay below.

    python perf/orchestration.py [--repeat 3]

Stages are stand-ins that compute nothing (tests/workspace.py), in a throw-away checkout with the real dvc,
Prefect and MLflow. Each time is the least of several; the processor's time of the processes that were waited
for tells how much of it a loaded machine added.

- nothing to do: `dvc repro` and the flow `full-pipeline` on a server that runs, where every stage is cached.
- a stage: what each of STAGES adds to a flow that runs it. One start of Python is a process that imports the
  stage's runner.
- a metric: what `log` costs the training thread, of 1,000 steps with 10 metrics each.
- memory: of `ans up` (server, worker, MLflow) when idle; shared pages count once.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tasks.tracker import stage_run
from tests.workspace import ans, dvc, end_all, environment, executed, living, make

STAGES = ("prepare", "judge_questions", "report")
FLOW = """
import json, sys
from pathlib import Path
from flows.launch import quiet_prefect
quiet_prefect(Path.cwd())
from flows.pipeline import full_pipeline
full_pipeline(**json.loads(sys.argv[1]))
"""
IDLE_S = 20


@dataclass(frozen=True)
class Seconds:
    wall: float
    processor: float

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.wall - other.wall, self.processor - other.processor)

    def __truediv__(self, count: int) -> Seconds:
        return Seconds(self.wall / count, self.processor / count)


def least(what: Callable[[], object], repeat: int) -> Seconds:
    """Return the least times of several."""
    took = []
    for _ in range(repeat):
        start_s, used = time.perf_counter(), os.times()
        what()
        now = os.times()
        processor = now.children_user + now.children_system - used.children_user - used.children_system
        took.append(Seconds(time.perf_counter() - start_s, processor))
    return Seconds(min(t.wall for t in took), min(t.processor for t in took))


def python(folder: Path, *words: str, **extra: str) -> None:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(folder, **extra),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]


def memory_gb(folder: Path) -> float:
    return sum(process.memory_full_info().pss for process in living(folder)) / 1e9


def metric_ms(folder: Path) -> float:
    given = {
        "stage": "sft",
        "version": "1",
        "profile": "smoke",
        "state_key": "k",
        "params": {},
        "settings": {},
        "data": {},
    }
    with stage_run(folder, **given) as run:
        metrics = {f"m{i}": 0.5 for i in range(10)}
        start_s = time.perf_counter()
        for step in range(1000):
            run.log(metrics, step)
        took_s = time.perf_counter() - start_s
    return took_s / 10_000 * 1000


def measure(folder: Path, repeat: int) -> list[tuple[str, Seconds | float, float, str]]:
    """Return (figure, value, bar, unit)."""
    rows: list[tuple[str, Seconds | float, float, str]]
    ans(folder, "run")
    rows = [("nothing to do: dvc repro", least(lambda: dvc(folder, "repro"), repeat), 6.0, "s")]
    rows.append(("nothing to do: ans run", least(lambda: ans(folder, "run"), repeat), 10.0, "s"))
    ans(folder, "up", "--port", "0", "--ui-port", "0")
    time.sleep(IDLE_S)
    rows.append(("server, worker and MLflow, idle", memory_gb(folder), 1.0, "GB"))
    prefect = json.loads((folder / ".ans/services.json").read_text())[0]
    client = {"PREFECT_API_URL": f"{prefect['url']}/api", "PREFECT_API_AUTH_STRING": prefect["key"]}

    def flow(**given: list[str]) -> Seconds:
        return least(lambda: python(folder, "-c", FLOW, json.dumps(given), **client), repeat)

    rows.append(("nothing to do: flow on a server", flow(), 10.0, "s"))
    start = least(lambda: python(folder, "-c", "import tasks.runner"), repeat)
    executed(folder)
    added = (flow(stages=list(STAGES), force=list(STAGES)) - flow(stages=list(STAGES))) / len(STAGES)
    assert len(executed(folder)) == repeat * len(STAGES)
    rows.append((f"a stage, of which one start of Python {start.wall:.1f} s", added, 3.0 + start.wall, "s"))
    rows.append(("a metric, on the training thread", metric_ms(folder), 0.5, "ms"))
    return rows


def main(repeat: int) -> int:
    with tempfile.TemporaryDirectory(prefix="ans-perf-") as name:
        folder = make(Path(name))
        try:
            rows = measure(folder, repeat)
        finally:
            ans(folder, "down", status=None)
            end_all(folder)
    print("| what | measured | processor | bar | |", "|-|-:|-:|-:|-|", sep="\n")
    above = False
    for what, found, bar, unit in rows:
        value = found.wall if isinstance(found, Seconds) else found
        processor = f"{found.processor:.3g} s" if isinstance(found, Seconds) else ""
        print(
            f"| {what} | {value:.3g} {unit} | {processor} | {bar:.3g} {unit} | "
            f"{'ok' if value <= bar else 'ABOVE'} |"
        )
        above |= value > bar
    return int(above)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="What the orchestration costs, against its bars.")
    parser.add_argument("--repeat", type=int, default=3)
    sys.exit(main(parser.parse_args().repeat))
