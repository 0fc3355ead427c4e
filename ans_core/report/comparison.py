"""Two evaluations of one benchmark -> what changed, how certain that is, and the samples that changed most, as a page."""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import Item
from ans_core.benchmarks.public.scored import scores_of
from ans_core.metrics.bootstrap import Ratio, difference
from ans_core.report import evaluation, page
from ans_core.report.changes import VERDICTS, Change
from ans_core.report.files import data_uri, read_json

MOST_CHANGED = 12


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `ans eval` has written of one."""

    name: str
    path: Path
    head: Mapping[str, Any]
    """metrics.json."""
    table: Mapping[str, Mapping[str, Any]]
    """Records by sample."""


def read(path: Path) -> Evaluation:
    """Read a folder of `ans eval BENCHMARK`, or the --out of `ans eval score`. Raises ValueError for anything else."""
    file = path / "metrics.json" if path.is_dir() else path
    samples = file.with_suffix(".samples.jsonl")
    if path.is_dir() and file.is_file() and (reason := read_json(file).get("skipped") or read_json(file).get("unscored")):
        raise ValueError(f"{path} has no figures to compare: {reason}")
    if not file.is_file() or not samples.is_file():
        raise ValueError(f"{path}: no {file.name} with {samples.name} beside it; give a folder of `ans eval`, or --out of `ans eval score`")
    table: dict[str, Mapping[str, Any]] = {}
    with samples.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            record = json.loads(line)
            if "sample" not in record or "terms" not in record:
                raise ValueError(f"{samples}, line {number}: no sample with its terms; score the predictions again")
            if record["sample"] in table:
                raise ValueError(f"{samples}, line {number}: sample {record['sample']!r} comes twice, so samples can't be paired")
            table[record["sample"]] = record
    name = path.name if path.is_dir() else path.stem
    return Evaluation(name=name, path=file.parent, head=read_json(file), table=table)


def changes(before: Evaluation, after: Evaluation) -> list[Change]:
    """Return the change of every metric whose terms both have, over the samples that both have, with a paired bootstrap interval; and, if
    both have the same samples, the plain difference of the other metrics. In the order of VERDICTS."""
    if before.head.get("benchmark") != after.head.get("benchmark"):
        raise ValueError(
            f"{before.path} is of {before.head.get('benchmark')}, {after.path} of {after.head.get('benchmark')}; compare one benchmark"
        )
    common = [name for name in after.table if name in before.table]
    if len(common) < 2:
        raise ValueError(f"{before.path} and {after.path} have {len(common)} samples in common; at least two are needed")
    found = [_scored(metric, before, after, common) for metric in _metrics(before, after, common)]
    scored = {change.metric for change in found}
    old, new = before.head["metrics"], after.head["metrics"]
    title = str(after.head["benchmark"])
    found += [
        Change(title=title, metric=m, before=float(old[m]), after=float(new[m]))
        for m in new
        if m in old and m not in scored and old[m] != new[m] and before.table.keys() == after.table.keys()
    ]
    return sorted(found, key=lambda change: VERDICTS.index(change.verdict))


def limits(before: Evaluation, after: Evaluation) -> list[str]:
    """Return a line for each that asked only some of the benchmark's questions."""
    return [
        f"{key}: only {one.head['limit']} questions were asked: not the benchmark's figures"
        for key, one in (("before", before), ("after", after))
        if one.head.get("limit")
    ]


def _metrics(before: Evaluation, after: Evaluation, common: list[str]) -> list[str]:
    first = after.table[common[0]]["terms"]
    return [metric for metric in first if metric in before.table[common[0]]["terms"]]


def _scored(metric: str, before: Evaluation, after: Evaluation, common: list[str]) -> Change:
    old, new = (_ratio([one.table[name]["terms"][metric] for name in common]) for one in (before, after))
    return Change(
        title=str(after.head["benchmark"]),
        metric=metric,
        before=old.value,
        after=new.value,
        interval=difference(new, old, paired=True),
        pairs=len(common),
    )


def _ratio(terms: list[list[float]]) -> Ratio:
    return Ratio(numerators=[above for above, _ in terms], denominators=[below for _, below in terms])


def most_changed(before: Evaluation, after: Evaluation, items: Container[str] = ()) -> list[dict[str, Any]]:
    """Return the samples (of known items: the items) whose value of the main metric changed most, gains and losses alike."""
    old, new = (evaluation.by_item(scores_of(list(one.table.values())), items) for one in (before, after))
    common = [name for name in new if name in old and new[name] != old[name]]
    order = sorted(common, key=lambda name: (-abs(new[name] - old[name]), name))
    return [{"sample": name, "before": old[name], "after": new[name]} for name in order[:MOST_CHANGED]]


def write(
    out: Path,
    before: Evaluation,
    after: Evaluation,
    *,
    items: Callable[[], Iterator[Item]] | None,
    predictions: tuple[Mapping[str, Mapping[str, Any]], Mapping[str, Mapping[str, Any]]] | None,
) -> Path:
    """Return the page. Without items and predictions (their files are gone) it shows no pictures."""
    out.mkdir(parents=True, exist_ok=True)
    found, samples = changes(before, after), most_changed(before, after, predictions[1] if predictions else ())
    if items is not None and predictions is not None:
        for key, one, records in zip(("before", "after"), (before, after), predictions, strict=True):
            scores = {sample["sample"]: sample[key] for sample in samples}
            folder = out / key
            drawn = evaluation.draw_chosen(items, records, dict.fromkeys(scores, key), scores, folder)
            pictures = {picture["sample"]: picture for picture in drawn}
            for sample in samples:
                if sample["sample"] in pictures:
                    picture = pictures[sample["sample"]]
                    sample |= {"asked": picture["asked"], f"{key}_text": picture["text"], f"{key}_name": one.name}
                    sample |= {f"{key}_source": data_uri(folder / picture["file"])}
    record = [
        {"metric": c.metric, "before": c.before, "after": c.after, "interval": c.interval, "pairs": c.pairs, "verdict": c.verdict}
        for c in found
    ]
    whose = {"before": str(before.path), "after": str(after.path)}
    kept = [{key: value for key, value in sample.items() if not key.endswith("_source")} for sample in samples]
    (out / "comparison.json").write_text(json.dumps({**whose, "changes": record, "most_changed": kept}, indent=1) + "\n", encoding="utf-8")
    only = {"before": len(before.table.keys() - after.table.keys()), "after": len(after.table.keys() - before.table.keys())}
    text = page.render_page(
        "comparison.html.j2",
        before=before,
        after=after,
        changes=found,
        order=VERDICTS,
        samples=samples,
        only=only,
        limits=limits(before, after),
    )
    (out / "page.html").write_text(text, encoding="utf-8")
    return out / "page.html"
