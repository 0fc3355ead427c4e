"""Masks without captions: what RL on masks alone gives a model that has seen captions of a part of the
training pictures; Markdown tables.

    python perf/wordless.py                              # of perf/results/tiny-wordless-fifth-seed<N>.json
    python perf/wordless.py --name tiny-wordless-tenth
    python perf/wordless.py --add tiny-wordless-fifth --row sft metrics/summary.json               # after `ans run`
    python perf/wordless.py --add tiny-wordless-fifth --row "rl, kl 0.2" metrics/summary.json      # its row `rl`
    python perf/wordless.py --add tiny-wordless-fifth --row "further sft" perf/results/wordless-fifth-test-further-seed0.json

The gap is the way from SFT to SFT with all captions of the same seed; for loop 1 also the way to what the
frozen inverse draws from true captions in the same run (IoU_of_truth). A row's name begins with its name in
the summary; settings follow after a comma.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ans_core.config import load
from perf.bar import RESULTS, spread

LOOP1, CEILING = "loop1/test/IoU", "loop1/test/IoU_of_truth"
METRICS = (
    LOOP1, CEILING, "region_caption/test/METEOR", "region_caption/test/exact_match",
    "region_caption/test/attribute_accuracy",
    "region_caption/test/attribute_accuracy/colour", "region_caption/test/attribute_accuracy/shape",
    "loop2/test/METEOR", "referring/test/gIoU", "referring/test/gIoU_all",
    "grounded_caption/test/mIoU_all_objects",
)  # fmt: skip
GAPS = (
    LOOP1, "region_caption/test/METEOR", "region_caption/test/exact_match",
    "region_caption/test/attribute_accuracy", "region_caption/test/attribute_accuracy/shape",
)  # fmt: skip
START, FULL = "sft", "sft, all captions"

Rows = dict[str, dict[str, float]]
"""Row -> metric -> value, of one seed."""


def table(seeds: dict[int, Rows]) -> str:
    """Return tables of the rows that every seed has: mean +- deviation over seeds, and by seed gains over SFT
    and shares of the gap."""
    names = sorted(
        set.intersection(*(set(rows) for rows in seeds.values())), key=lambda name: (order(name), name)
    )
    trained = [name for name in names if name not in (START, FULL)]
    lines = [f"seeds {list(seeds)}", "", *header("metric", names)]
    for metric in METRICS:
        lines.append(
            line(metric, [spread([rows[name].get(metric) for rows in seeds.values()]) for name in names])
        )
    lines += ["", *header("gain over SFT, by seed", trained)]
    for metric in (m for m in METRICS if m != CEILING):
        lines.append(line(metric, [gains(seeds, name, metric) for name in trained]))
    lines += ["", *header("share of the gap closed, by seed", trained)]
    for metric in GAPS:
        lines.append(line(metric, [shares(seeds, name, metric, full=(FULL, metric)) for name in trained]))
    lines.append(
        line(
            f"{LOOP1}, gap to IoU_of_truth",
            [shares(seeds, name, LOOP1, full=(START, CEILING)) for name in trained],
        )
    )
    return "\n".join(lines)


def order(name: str) -> int:
    """SFT, RL, further SFT, SFT with all captions."""
    return (START, "rl", "further sft", FULL).index(name if name == FULL else name.split(",")[0])


def gains(seeds: dict[int, Rows], name: str, metric: str) -> str:
    return " / ".join(f"{rows[name][metric] - rows[START][metric]:+.3f}" for rows in seeds.values())


def shares(seeds: dict[int, Rows], name: str, metric: str, *, full: tuple[str, str]) -> str:
    """Return each seed's share of the way from SFT to the row and metric `full`, and their mean."""
    found = [
        share(rows[START][metric], rows[name][metric], rows[full[0]][full[1]]) for rows in seeds.values()
    ]
    known = [value for value in found if value is not None]
    mean = f" (mean {statistics.fmean(known):.2f})" if len(known) == len(found) > 1 else ""
    return " / ".join("-" if value is None else f"{value:.2f}" for value in found) + mean


def share(start: float, reached: float, full: float) -> float | None:
    """Return the closed share of the gap, below 0 for a loss; None where there is no gap."""
    return (reached - start) / (full - start) if full > start else None


def header(first: str, names: Sequence[str]) -> list[str]:
    return [line(first, names), "|-" * (len(names) + 1) + "|"]


def line(first: str, cells: Sequence[str]) -> str:
    return f"| {first} | {' | '.join(cells)} |"


def seeds_of(name: str) -> dict[int, Rows]:
    """Read a name's seeds. A file that has no row with all captions of its own gets it from perf/bar.py's
    file of the same seed. Raises SystemExit where a file is missing."""
    seeds: dict[int, Rows] = {}
    for path in sorted(RESULTS.glob(f"{name}-seed*.json")):
        rows: Rows = json.loads(path.read_text())
        seed = int(path.stem.rpartition("seed")[2])
        whole = RESULTS / f"tiny-test-seed{seed}.json"
        if START not in rows:
            raise SystemExit(
                f"{path}: no row {START!r}; it has {sorted(rows)}. Add it with --add {name} --row {START}"
            )
        if FULL not in rows and not whole.exists():
            raise SystemExit(
                f"{whole} is missing, the result with all captions: python perf/bar.py --seeds {seed}"
            )
        seeds[seed] = {FULL: json.loads(whole.read_text())[START]} | rows if FULL not in rows else rows
    if not seeds:
        raise SystemExit(f"{RESULTS}/{name}-seed*.json: no such file; make one with --add {name}")
    return seeds


def add(name: str, row: str, file: Path, seed: int) -> Path:
    """Copy a row of a run's summary, or a file of perf/further_sft.py, into the name's file of this seed. A
    row of that name is replaced. Raises SystemExit where the source has no such row, or lacks metrics of the
    table."""
    metrics = row_of(json.loads(file.read_text()), row, file)
    if lacking := [metric for metric in METRICS if metric != CEILING and metric not in metrics]:
        raise SystemExit(
            f"{file}: the row for {row!r} has no {lacking}; evaluate on test: ans profile ... "
            "evaluate.split=test"
        )
    path = RESULTS / f"{name}-seed{seed}.json"
    rows = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(rows | {row: metrics}, indent=1, sort_keys=True))
    return path


def row_of(content: dict[str, Any], row: str, file: Path) -> dict[str, float]:
    """Return the metrics that a row's name means. A file of perf/further_sft.py holds nothing but them."""
    source = row.split(",")[0]
    held = {name: value for name, value in content.items() if isinstance(value, dict)} or {
        "further sft": content
    }
    if source not in held:
        raise SystemExit(f"{file}: no row {source!r}; it has {sorted(held)}")
    return held[source]


def seed_of(file: Path) -> int:
    """Return the seed in a file's name; metrics/summary.json has that of params.yaml."""
    _, marked, seed = file.stem.rpartition("seed")
    return int(seed) if marked and seed.isdecimal() else load(Path("params.yaml")).seed


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="tiny-wordless-fifth", help="of the files whose tables are printed")
    parser.add_argument("--add", metavar="NAME", help="of the file that gets a row")
    parser.add_argument("--row", help='with --add: sft, "rl, kl 0.2", "further sft", "sft, all captions"')
    parser.add_argument(
        "file",
        nargs="?",
        type=Path,
        help="with --add: metrics/summary.json, or a file of perf/further_sft.py",
    )
    arguments = parser.parse_args()
    if arguments.add:
        if not (arguments.row and arguments.file):
            parser.error("--add needs --row and a file")
        if arguments.row.split(",")[0] not in (START, "rl", "further sft"):
            parser.error(
                f"--row {arguments.row!r}: a row is sft, rl or further sft, with settings after a comma"
            )
        print(add(arguments.add, arguments.row, arguments.file, seed_of(arguments.file)))
    else:
        print(table(seeds_of(arguments.name)))
