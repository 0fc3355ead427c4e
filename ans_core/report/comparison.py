"""Two evaluations of one benchmark -> what changed, how certain that is, and the samples that changed most,
as a page."""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.public.scored import scores_of
from ans_core.config.names import OTHER_NAMES
from ans_core.metrics.bootstrap import Ratio, difference
from ans_core.report import evaluation
from ans_core.report.changes import VERDICTS, Change, verdict
from ans_core.report.files import read_json, webp_uri
from ans_core.report.gallery import RIGHT
from ans_core.report.runs import Run, write_page

MOST_CHANGED = 12
DATA_SETS = ("gcg", "mevis", "refcoco", "vos")
"""Benchmarks whose other names are those of different data sets."""
Records = Mapping[str, Mapping[str, Any]]
"""Lines of predictions.jsonl by item."""


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
    """Read a folder of `ans eval BENCHMARK`, or the --out of `ans eval score`. Raises ValueError for anything
    else."""
    file = path / "metrics.json" if path.is_dir() else path
    samples = file.with_suffix(".samples.jsonl")
    if (
        path.is_dir()
        and file.is_file()
        and (reason := read_json(file).get("skipped") or read_json(file).get("unscored"))
    ):
        raise ValueError(f"{path} has no figures to compare: {reason}")
    if not file.is_file() or not samples.is_file():
        raise ValueError(
            f"{path}: no {file.name} with {samples.name} beside it; give a folder of `ans eval`, or --out "
            "of `ans eval score`"
        )
    table: dict[str, Mapping[str, Any]] = {}
    with samples.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            record = json.loads(line)
            if "sample" not in record or "terms" not in record:
                raise ValueError(
                    f"{samples}, line {number}: no sample with its terms; score the predictions again"
                )
            if record["sample"] in table:
                raise ValueError(
                    f"{samples}, line {number}: sample {record['sample']!r} comes twice, so samples can't "
                    "be paired"
                )
            table[record["sample"]] = record
    name = path.name if path.is_dir() else path.stem
    return Evaluation(name=name, path=file.parent, head=read_json(file), table=table)


def changes(before: Evaluation, after: Evaluation) -> list[Change]:
    """Return the change of every metric whose terms both have, over the samples that both have, with a paired
    bootstrap interval; and, if both have the same samples, the plain difference of the other metrics. In the
    order of VERDICTS."""
    if benchmark_of(before) != benchmark_of(after):
        raise ValueError(
            f"{before.name} is of {benchmark_of(before)}, {after.name} of {benchmark_of(after)}; compare one "
            "benchmark, on one data set"
        )
    common = [name for name in after.table if name in before.table]
    if len(common) < 2:
        raise ValueError(
            f"{before.path} and {after.path} have {len(common)} samples in common; at least two are needed"
        )
    compared = [_scored(metric, before, after, common) for metric in _metrics(before, after, common)]
    scored = {change.metric for change in compared}
    old, new = before.head["metrics"], after.head["metrics"]
    title = str(after.head["benchmark"])
    compared += [
        Change(title=title, metric=m, before=float(old[m]), after=float(new[m]))
        for m in new
        if m in old and m not in scored and old[m] != new[m] and before.table.keys() == after.table.keys()
    ]
    return sorted(compared, key=lambda change: VERDICTS.index(change.verdict))


def limits(before: Evaluation, after: Evaluation) -> list[str]:
    """Return a line for each that asked only some of the benchmark's questions."""
    return [
        f"{key}: only {one.head['limit']} questions were asked: not the benchmark's figures"
        for key, one in (("before", before), ("after", after))
        if one.head.get("limit")
    ]


def notes(before: Evaluation, after: Evaluation) -> list[str]:
    """Say of which samples the figures are, and what is noted of one evaluation alone: another judge, say."""
    lines = [*limits(before, after), *alone(before, after)]
    if left_out := scored_together(before, after):
        lines.append(
            f"{', '.join(left_out)}: not compared, for a sample's share depends on the others that were scored"
        )
    for key, one, other in (("before", before, after), ("after", after, before)):
        own, theirs = (evaluation.head.get("notes", []) for evaluation in (one, other))
        lines += [f"{key}: {note}" for note in own if note not in theirs]
    return lines


def benchmark_of(one: Evaluation) -> str:
    """Return the benchmark by its one name; of those that are several data sets (RefCOCO, MeViS, DAVIS and MOSE), the
    name of the data set."""
    called = str(one.head.get("benchmark"))
    meant = OTHER_NAMES.get(called, called)
    return called if meant in DATA_SETS else meant


def scored_together(before: Evaluation, after: Evaluation) -> list[str]:
    """Return the metrics that only evaluations of the same samples can be compared by; none if they are."""
    if before.table.keys() == after.table.keys():
        return []
    return sorted({name for one in (before, after) for name in one.head.get("scored_together", [])})


def _metrics(before: Evaluation, after: Evaluation, common: list[str]) -> list[str]:
    """Return the metrics that both have terms of, and samples that count for them."""
    first, left_out = after.table[common[0]]["terms"], scored_together(before, after)
    return [
        metric
        for metric in first
        if metric in before.table[common[0]]["terms"]
        and metric not in left_out
        and all(any(one.table[name]["terms"][metric][1] for name in common) for one in (before, after))
    ]


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
    """Return the samples (of known items: the items) whose value of the main metric changed most, gains and
    losses alike."""
    old, new = (evaluation.by_item(scores_of(list(one.table.values())), items) for one in (before, after))
    common = [name for name in new if name in old and new[name] != old[name]]
    order = sorted(common, key=lambda name: (-abs(new[name] - old[name]), name))
    return [{"sample": name, "before": old[name], "after": new[name]} for name in order[:MOST_CHANGED]]


def write(
    out: Path,
    before: Evaluation,
    after: Evaluation,
    *,
    items: Iterable[Item] = (),
    predictions: Sequence[Records] = (),
) -> Path:
    """Write the page, and comparison.json. items, predictions (of both, by item): those that pictures show;
    empty: their files are gone."""
    changed, samples = (
        changes(before, after),
        most_changed(before, after, predictions[1] if predictions else ()),
    )
    runs = [run_of(before), run_of(after, "" if after.name != before.name else " #2")]
    record = [
        {
            "metric": c.metric,
            "before": c.before,
            "after": c.after,
            "interval": c.interval,
            "pairs": c.pairs,
            "verdict": c.verdict,
        }
        for c in changed
    ]
    summary = {
        "before": str(before.path),
        "after": str(after.path),
        "changes": record,
        "most_changed": samples,
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "comparison.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    first, last = (run.name for run in runs)
    shown = {item.name: item for item in items if item.name in {sample["sample"] for sample in samples}}
    pictures = [
        picture(sample, title(after), (first, last), shown.get(sample["sample"]), predictions)
        for sample in samples
    ]
    return write_page(
        out,
        runs,
        [verdict(last, first, last, changed) | {"row": ""}],
        {first: named_metrics(before), last: named_metrics(after)},
        galleries={last: pictures},
        lost={}
        if shown or not samples
        else {last: "the benchmark's files, or the predictions, are not there"},
        notes=notes(before, after),
    )


def title(one: Evaluation) -> str:
    return "/".join(filter(None, (str(one.head["benchmark"]), one.head.get("split", ""))))


def named_metrics(one: Evaluation) -> dict[str, float]:
    """Name each metric <benchmark>/<split>/<metric>, as tables of metrics take them apart."""
    prefix = title(one) if one.head.get("split") else f"{one.head['benchmark']}/all"
    return {f"{prefix}/{key}": float(value) for key, value in one.head["metrics"].items()}


def run_of(one: Evaluation, number: str = "") -> Run:
    """Return it as the page shows any run; its settings are those that decided the predictions."""
    file = one.path / "settings.json"
    settings = {key: str(value) for key, value in read_json(file).items()} if file.is_file() else {}
    return Run(
        name=one.name + number,
        description=str(one.head.get("model") or one.path),
        folder=one.path,
        settings=settings,
    )


def alone(before: Evaluation, after: Evaluation) -> list[str]:
    """Say how many samples only one of them has, and of how many the figures are."""
    both = len(before.table.keys() & after.table.keys())
    only = {
        "before": before.table.keys() - after.table.keys(),
        "after": after.table.keys() - before.table.keys(),
    }
    return [
        f"{len(samples)} samples are in {name} alone and not compared; the figures are of the {both} that both have"
        for name, samples in only.items()
        if samples
    ]


def picture(
    sample: Mapping[str, Any],
    title: str,
    names: tuple[str, str],
    item: Item | None,
    predictions: Sequence[Records],
) -> dict[str, Any]:
    """Return a sample as the page's gallery shows it: truth, before, after; without its item, the scores
    alone."""
    scores = (sample["before"], sample["after"])
    records = [of_run[item.name] for of_run in predictions] if item is not None else [{}, {}]
    was, right = (score >= RIGHT for score in scores)
    shown: dict[str, Any] = {"source": ""}
    truth = item.right_answer() if item is not None else None
    if item is not None and item.request.frames:
        content, size = evaluation.picture(item, records)
        shown = {"source": webp_uri(content), **size}
    return {
        "title": title,
        "sample_id": sample["sample"],
        "asked": item.request.text.removeprefix("<image>").strip() if item is not None else "",
        "truth": truth.text if truth else "",
        "answers": [
            {"name": name, "score": score, "text": record.get("text", "")}
            for name, score, record in zip(names, scores, records, strict=True)
        ],
        "verdict": "right" if right else "wrong",
        "flipped": "" if was == right else "better" if right else "worse",
        "gain": scores[1] - scores[0],
        "note": "",
        **shown,
    }
