"""What ANS does on one GPU, with random weights of a published size (no download): JSON, and the Markdown
table of docs/full-size.md.

    python -m perf.gpu [--parts sft decode ...] [--size sa2va-4b] [--device cuda] [--quick] [--against FILE] [--out FILE]
    python -m perf.gpu --size tiny --device cpu --quick --out /tmp/gpu.json          # all of it on a CPU, to try it out

Each part is a process of its own with a time limit; one that fails or hangs says where, and does not stop the
others. The parts of an earlier run in --out stay unless they are measured again. ANS_REFERENCE=FOLDER gives
photographs (FOLDER/data/regions, in the format `regions`) and the releases of `parity` (FOLDER/golden);
without it, scenes are drawn.

sft: whole steps of rows of some 3,600 tokens, by what is compiled and recomputed; one micro-batch in parts,
and its longest kernels. decode: a token's time in `sample`, 8 answers a request, from the times of 8 and of
64 tokens. rl: a step of both loops, 8 samples x 8 rollouts x 64 tokens, in parts. trl: the same GRPO step of
a text model of 1.5 billion weights here and in TRL. parity: answers of the golden releases on the device
against the CPU's in fp32. state: what training waits for while a state is saved, and read again. resume: a
training of the 1B that goes on from its state, plain and with ZeRO-2 on one process. evaluate: questions about
pictures. track: objects through a clip. memory: a step of SAM2's memory training.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from ans_core.checkpoints import published
from ans_core.model import compiling
from perf.gpu_parts import KERNELS, PARTS, Figures, Job, Skip, shown

WORSE = 0.05
"""A figure that is worse by more than this share is marked."""
HIGHER, LOWER = ("_per_s", "mfu", "speedup", "iou", "equal"), ("_s", "_ms", "_gb", "graphs", "breaks")
"""Ends of the names of figures of which more is better, and less is; others are not compared."""
LAST = 25
"""Lines of a part that fails which are kept."""


# One process a part


def measure(name: str, size: str, device: str, figures: Path, *, quick: bool, until: float) -> None:
    """Measure a part in this process, which ends at the time `until`."""
    faulthandler.dump_traceback_later(max(1.0, until - time.time()), exit=True)  # says where it hangs
    torch.manual_seed(0)
    if device == "cpu":
        compiling.BACKEND = "aot_eager"  # the same graphs, without minutes of compiling C++
    job = Job(size=size, device=torch.device(device), quick=quick, figures=Figures(figures))
    try:
        PARTS[name].measure(job)
    except Skip as reason:
        job.figures.say(f"{SKIPPED}{reason}")


SKIPPED = "skipped: "


def measured(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """Measure a part in a process of its own; return its figures, and what it printed last if it failed."""
    with tempfile.TemporaryDirectory() as folder:
        figures = Path(folder) / "figures.json"
        command = [
            sys.executable,
            "-u",
            "-m",
            "perf.gpu",
            "--part",
            name,
            "--size",
            given.size,
            "--device",
            given.device,
        ]
        command += [
            "--figures",
            str(figures),
            "--until",
            str(time.time() + PARTS[name].limit_s),
            *(["--quick"] if given.quick else []),
        ]
        env = os.environ | {"TORCHINDUCTOR_CACHE_DIR": folder}  # so that a first step compiles everything
        begun = time.perf_counter()
        process = subprocess.Popen(
            command,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            errors="replace",
        )
        assert process.stdout is not None

        def stop() -> None:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

        # the process ends itself before, unless it can't
        timer = threading.Timer(PARTS[name].limit_s + 10, stop)
        timer.start()
        last: deque[str] = deque(maxlen=LAST)
        for line in process.stdout:
            if line.strip() and "%|" not in line:  # the training's bar
                last.append(line.rstrip())
                print(f"{name:8} {last[-1]}", flush=True)
        code = process.wait()
        timer.cancel()
        stop()  # what it started
        found: dict[str, Any] = {**facts(given), "seconds": round(time.perf_counter() - begun, 1)}
        found["cases"] = json.loads(figures.read_text()) if figures.exists() else {}
    if code:
        found["failed"] = [f"ended with {code}", *last]
    elif last and SKIPPED in last[-1]:
        found["skipped"] = last[-1].partition(SKIPPED)[2]
    return found


def facts(given: argparse.Namespace) -> dict[str, Any]:
    card = torch.cuda.get_device_name() if given.device.startswith("cuda") else "CPU"
    return {
        "card": card, "size": given.size, "quick": given.quick, "torch": torch.__version__,
        "transformers": transformers.__version__, "date": date.today().isoformat(), "commit": given.commit,
    }  # fmt: skip


def commit() -> str:
    """Return the checkout's commit; "" where there is no git."""
    if not shutil.which("git"):
        return ""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()


# The table


def is_worse(name: str, value: float, before: float) -> bool:
    """Tell whether a figure is worse than an earlier one by more than WORSE."""
    if name.endswith(HIGHER):
        return value < before * (1 - WORSE)
    return name.endswith(LOWER) and value > before * (1 + WORSE)


def table(found: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Return Markdown: a row a case, without kernels. Figures that are worse than before are bold, with the
    earlier ones."""
    lines = ["| part | case | figures |", "|-|-|-|"]
    for name, part in found.items():
        earlier = before.get(name, {}).get("cases", {})
        for case, figures in part["cases"].items():
            if case.startswith(KERNELS):
                continue
            cells = []
            for figure, value in figures.items():
                was = earlier.get(case, {}).get(figure)
                cell = shown({figure: value})
                cells.append(
                    f"**{cell} (was {was:,.4g})**"
                    if was is not None and is_worse(figure, value, was)
                    else cell
                )
            lines.append(f"| {name} | {case} | {'; '.join(cells)} |")
        if reason := part.get("skipped") or (part.get("failed") and "failed: " + part["failed"][-1]):
            lines.append(f"| {name} | | {reason} |")
    made = {
        (
            p["card"],
            p["size"],
            f"torch {p['torch']}",
            f"transformers {p['transformers']}",
            p["date"],
            p["commit"],
        )
        for p in found.values()
    }
    return "\n".join([*("*" + ", ".join(filter(None, one)) + "*" for one in sorted(made)), "", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--size", choices=["tiny", *published.PUBLISHED], default="sa2va-4b")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="fewer steps and repeats")
    parser.add_argument("--out", type=Path, default=Path("perf/results/gpu.json"))
    parser.add_argument(
        "--against", type=Path, help="an earlier --out: what is worse by more than 5 %% is marked"
    )
    parser.add_argument("--commit", default=commit(), help="of the code, where git does not say it")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--figures", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.part:
        measure(given.part, given.size, given.device, given.figures, quick=given.quick, until=given.until)
        return
    before = json.loads(given.against.read_text()) if given.against else {}
    found = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.parts:
        found[name] = measured(name, given)
        given.out.write_text(
            json.dumps({part: found[part] for part in PARTS if part in found}, indent=1) + "\n"
        )
    print(table({part: found[part] for part in PARTS if part in found}, before))
    if failed := [name for name in given.parts if "failed" in found[name]]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
