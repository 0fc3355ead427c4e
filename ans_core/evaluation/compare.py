"""`ans eval compare A B`: two evaluations of one benchmark, sample by sample."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public.files import Lines
from ans_core.benchmarks.registry import runnable
from ans_core.evaluation.predictions import PREDICTIONS, name_of
from ans_core.places import root
from ans_core.report import comparison
from ans_core.report.page import change_table
from ans_core.written import refuse_foreign


def compare(names: Sequence[str], out: Path | None) -> None:
    """Print the changes with intervals and write the page. `names`: folders of `ans eval`, or --out of `ans
    eval score`."""
    if len(names) != 2:
        raise ValueError(
            f"ans eval compare takes two evaluations, not {len(names)}: the one before and the one after"
        )
    before, after = (comparison.read(Path(name).resolve()) for name in names)
    changes = comparison.changes(before, after)
    out = out or root() / ".ans/eval" / f"compare-{before.name}-{after.name}"
    refuse_foreign(out, "comparison.json", {"before", "after", "changes"})
    page = comparison.write(out, before, after, **pictures(before.path, after.path))
    print("\n".join([*change_table(changes), *(f"note: {line}" for line in comparison.notes(before, after))]))
    print("samples that changed most, with pictures:", page)


def pictures(*folders: Path) -> dict[str, Any]:
    """Return the items and both predictions, if both folders are runs on one benchmark whose data are still
    there."""
    files = [folder / "settings.json" for folder in folders]
    if not all(file.is_file() and (file.parent / PREDICTIONS).is_file() for file in files):
        return {}
    one, other = (json.loads(file.read_text(encoding="utf-8")) for file in files)
    if (
        any(one[key] != other[key] for key in ("benchmark", "split", "data"))
        or not Path(one["data"]).exists()
    ):
        return {}
    _, runner = runnable(one["benchmark"])
    items = runner.questions(Path(one["data"]), one["split"])
    return {"items": items, "predictions": tuple(Lines(folder / PREDICTIONS, name_of) for folder in folders)}
