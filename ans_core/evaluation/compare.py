"""`ans eval compare A B`: two evaluations of one benchmark, sample by sample."""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from ans_core.places import root


def compare(arguments: argparse.Namespace) -> int:
    from ans_core.report import comparison
    from ans_core.report.page import figure, interval

    if len(arguments.names) != 2:
        raise ValueError(f"ans eval compare takes two evaluations, not {len(arguments.names)}: the one before and the one after")
    before, after = (comparison.read(Path(name).resolve()) for name in arguments.names)
    found = comparison.changes(before, after)
    out = arguments.out or root() / ".ans/eval" / f"compare-{before.name}-{after.name}"
    page = comparison.write(out, before, after, **pictures(before.path, after.path))
    print(f"{'metric':<36} {'before':>8} {'after':>8} {'change':>8}  95 % interval")
    for change in found:
        cells = f"{figure(change.before):>8} {figure(change.after):>8} {figure(change.difference, True):>8}"
        print(f"{change.metric:<36} {cells}  {interval(change):<20} {change.verdict}")
    for line in comparison.limits(before, after):
        print("note:", line)
    print("samples that changed most, with pictures:", page)
    return 0


def pictures(*folders: Path) -> dict[str, Any]:
    """Return the items and both predictions, if both folders are runs on one benchmark whose data are still there."""
    from ans_core.benchmarks.public.files import Lines
    from ans_core.benchmarks.public_run import runner_of
    from ans_core.benchmarks.running import PREDICTIONS, name_of

    files = [folder / "settings.json" for folder in folders]
    if not all(file.is_file() and (file.parent / PREDICTIONS).is_file() for file in files):
        return {"items": None, "predictions": None}
    one, other = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    if any(one[key] != other[key] for key in ("benchmark", "split", "data")) or not Path(one["data"]).exists():
        return {"items": None, "predictions": None}
    items = partial(runner_of(one["benchmark"]).items, Path(one["data"]), one["split"])
    return {"items": items, "predictions": tuple(Lines(folder / PREDICTIONS, name_of) for folder in folders)}
