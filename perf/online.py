"""Learning online, measured: the search for neighbours, and answers while a worker learns on the same
machine.

    ans run --agent                           # makes runs/<profile>
    python perf/online.py                     # 2 cores: a quarter of an hour; writes perf/results/online.json
    python perf/online.py --questions 0       # the search alone

Printed: milliseconds of a search among 10,000 experiences (of 200), also in processor time, which other work
does not lengthen. Seconds of an answer over HTTP: by the engine alone, one question after the other and from
CLIENTS at once, which are answered in batches, and beside a worker that learns from these questions without a
pause, from its first update on. Lost: questions without an answer. Updates, releases: of the worker while
they were answered.
"""

from __future__ import annotations

import argparse
import base64
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ans_core.agent.world.question import Question
from ans_core.config import load
from ans_core.online.neighbours import Neighbours
from ans_core.online.simulation import STREAM_FROM, QuestionStream
from ans_core.online.store import Store

EXPERIENCES, DIMENSIONS, SEARCHES, CLIENTS = 10_000, 256, 200, 8


def quantiles(seconds: list[float], unit: float = 1.0) -> dict[str, float]:
    return {
        name: round(float(np.quantile(seconds, share)) / unit, 4)
        for name, share in (("p50", 0.5), ("p99", 0.99), ("most", 1.0))
    }


def timed(function: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    start = clock()
    function()
    return clock() - start


def searches(clock: Callable[[], float]) -> dict[str, float]:
    rng = np.random.default_rng(0)
    known = Neighbours()
    known.add(np.arange(EXPERIENCES) + 1, rng.standard_normal((EXPERIENCES, DIMENSIONS)).astype(np.float32))
    asked = rng.standard_normal((SEARCHES, DIMENSIONS)).astype(np.float32)
    return quantiles([timed(lambda vector=vector: known.search(vector, 5), clock) for vector in asked], 1e-3)


def ask(url: str, name: str, question: str, frame: bytes) -> None:
    body = json.dumps(
        {"question": question, "image": base64.b64encode(frame).decode(), "request": name}
    ).encode()
    with urllib.request.urlopen(
        urllib.request.Request(url, body, {"Content-Type": "application/json"}), timeout=600
    ) as reply:
        json.load(reply)


def answers(
    url: str, stream: QuestionStream, numbers: range, clients: int = 1
) -> tuple[list[float], dict[str, float]]:
    """Return the seconds of each answer, answers a second, and how many questions got none."""
    questions = [stream.number(number) for number in numbers]  # to draw them takes longer than to answer

    def answered(question: Question) -> float | None:
        name = question.question_id.replace("/", ":")
        try:
            return timed(lambda: ask(url, name, question.text, question.frames[0]))
        except OSError as error:
            print(f"question {name} got no answer: {error}", flush=True)
            return None

    start_s = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        found = list(pool.map(answered, questions))
    taken_s = time.perf_counter() - start_s
    seconds = [one for one in found if one is not None]
    return seconds, {"lost": len(found) - len(seconds), "answers_per_s": round(len(seconds) / taken_s, 2)}


def events(folder: Path) -> dict[str, int]:
    """Count the worker's updates and releases so far."""
    with Store(folder) as store:
        counted = dict(store.rows("SELECT event, COUNT(*) FROM audit GROUP BY event"))
    return {"updates": counted.get("update", 0), "releases": counted.get("published", 1) - 1}


def wait_for_update(folder: Path, worker: subprocess.Popen[bytes]) -> None:
    while not events(folder)["updates"]:
        if worker.poll() is not None:
            raise SystemExit(f"the worker ended with status {worker.returncode} before its first update")
        time.sleep(0.5)


def served(count: int) -> dict[str, object]:
    """Measure answers to `count` questions by an engine alone, to as many from several clients, and to as many
    beside a worker."""
    found: dict[str, object] = {}
    first = 0
    settings = load(Path("params.yaml")).agent.online.simulation
    stream = QuestionStream(
        settings.families, split="train", seed=0, tile=96, first=STREAM_FROM, shift=settings.shift
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "flows.cli", "agent"]
        where = ["--store", f"{folder}/store"]
        engine = subprocess.Popen(
            [*command, "serve", *where, "--port", "0"], stdout=subprocess.PIPE, text=True
        )
        worker = None
        try:
            assert engine.stdout is not None
            url = engine.stdout.readline().split("answers on ")[1].split(",")[0]
            for name, clients in (("alone", 1), ("at_once", CLIENTS)):
                numbers = range(first, first + count)
                first += count
                seconds, counts = answers(url, stream, numbers, clients)
                found[name] = quantiles(seconds) | counts
            worker = subprocess.Popen([*command, "worker", *where])
            wait_for_update(store := Path(folder, "store"), worker)
            before = events(store)
            seconds, counts = answers(url, stream, range(first, first + count))
            found["beside_worker"] = quantiles(seconds) | counts
            found |= {name: now - before[name] for name, now in events(store).items()}
        finally:
            for process in (worker, engine):
                if process is not None:
                    process.terminate()
                    process.wait()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=int, default=300)
    parser.add_argument("--out", type=Path, default=Path("perf/results/online.json"))
    arguments = parser.parse_args()
    found: dict[str, object] = {
        "search_ms": searches(time.perf_counter),
        "search_cpu_ms": searches(time.process_time),
    }
    print(json.dumps(found), flush=True)
    if arguments.questions:
        if arguments.questions < (cold := load(Path("params.yaml")).agent.online.admission.cold_start):
            raise SystemExit(
                f"--questions {arguments.questions}: the worker learns from {cold} on "
                "(admission.cold_start); ask as many"
            )
        found |= served(arguments.questions)
        print(json.dumps(found, indent=1))
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
