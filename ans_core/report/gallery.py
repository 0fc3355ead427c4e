"""Select samples that tell two models apart, or right answers from wrong ones, and draw them for the page
with what its filters need."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from ans_core.benchmarks import BENCHMARKS
from ans_core.metrics.caption import same_text
from ans_core.report import panels
from ans_core.report.changes import Answer, Answers, Key, keyed_lines, paired
from ans_core.report.files import data_uri, read_json
from ans_core.report.lookup import Wanted
from ans_core.report.metrics import parse
from ans_core.types import Prediction, Sample

RIGHT = 0.5
"""Scores from here on count as right in `evaluate`, except for captions of regions, which are right word for
word: METEOR gives 0.47 to one of which every attribute is wrong."""
DRAWN_TASKS = ("referring", "video")
"""Tasks whose answer is masks; none if nothing is meant."""
UNCHECKED = (
    "No mask was due and none was drawn, which counts as right. The words are not the denial that was "
    "trained; no score reads them."
)
ROLLOUTS_PER_LOOP = 5

Chosen = tuple[str, Key]
"""A benchmark, and a sample of it."""


def choose(before: Answers, after: Answers, limit: int) -> list[Chosen]:
    """Return about `limit` samples, as many of each benchmark: half are those that changed most, those whose
    verdict changed first; the others are right and wrong ones, evenly from best to worst."""
    benchmarks = [benchmark for benchmark in after if parse(benchmark).task in BENCHMARKS]
    selected: list[Chosen] = []
    for benchmark in benchmarks:
        share = max(2, limit // len(benchmarks))
        new = {key: answer.score for key, answer in after[benchmark].items()}
        then = before.get(benchmark, {})
        old = {key: then[key].score for key in paired(then, after[benchmark])}
        right, was = (
            {key: is_right(benchmark, a) for key, a in some.items()} for some in (after[benchmark], then)
        )
        changed = sorted(
            (key for key in old if old[key] != new[key]),
            key=lambda key: (right[key] == was[key], -abs(new[key] - old[key]), key),
        )
        chosen = changed[: share // 2]
        order = sorted(new.keys() - set(chosen), key=lambda key: (-new[key], key))
        verdicts = [[key for key in order if right[key] is verdict] for verdict in (True, False)]
        rest = share - len(chosen)
        chosen += spread(verdicts[0], rest - min(rest // 2, len(verdicts[1])))
        chosen += spread(verdicts[1], share - len(chosen))
        selected += [(benchmark, key) for key in chosen]
    return selected


def is_right(benchmark: str, answer: Answer) -> bool:
    """Tell whether an answer counts as right. What was asked about a region is its caption."""
    return (
        same_text(answer.text, answer.question)
        if parse(benchmark).task == "region_caption"
        else answer.score >= RIGHT
    )


def spread(items: Sequence[Any], count: int) -> list[Any]:
    """Return `count` of the items, evenly spread from the first on."""
    count = min(count, len(items))
    return [items[i * len(items) // count] for i in range(count)]


def wanted(chosen: Collection[Chosen], answers: Answers) -> set[Wanted]:
    return {(key[0], key[1], answers[benchmark][key].question) for benchmark, key in chosen}


def pictures(
    columns: Mapping[str, Path | None], chosen: Sequence[Chosen], samples: Mapping[Wanted, Sample]
) -> list[dict[str, Any]]:
    """Return a picture a sample: truth, then the answer of every column that has one. `columns`: folders of
    predictions; the last one's answer decides the verdict. A sample that is not in `samples` is left out."""
    records = {name: read_records(folder, set(chosen)) for name, folder in columns.items() if folder}
    shown = []
    for benchmark, key in chosen:
        answers = {
            name: column[benchmark, key] for name, column in records.items() if (benchmark, key) in column
        }
        sample = samples.get((key[0], key[1], list(answers.values())[-1]["asked"]))
        if sample is not None:
            shown.append(picture(benchmark, sample, answers))
    return shown


def picture(benchmark: str, sample: Sample, records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Draw a sample and return it with what the page says of it."""
    truth = BENCHMARKS[parse(benchmark).task].truth(sample)
    scores = [float(record["score"]) for record in records.values()]
    texts = [str(record["text"]) for record in records.values()]
    rights = [
        is_right(benchmark, Answer(score=s, question=truth.text, text=text))
        for s, text in zip(scores, texts, strict=True)
    ]
    unchecked = text_unchecked(benchmark, truth, texts[-1]) and rights[-1]
    return {
        "benchmark": benchmark,
        "title": parse(benchmark).title,
        "sample_id": sample.sample_id,
        "asked": "" if sample.task == "region_caption" else sample.text,
        "truth": truth.text,
        "answers": [
            {"name": name, "score": float(record["score"]), "text": record["text"]}
            for name, record in records.items()
        ],
        "verdict": "unchecked" if unchecked else "right" if rights[-1] else "wrong",
        "flipped": "" if len(rights) < 2 or rights[-1] == rights[-2] else "better" if rights[-1] else "worse",
        "gain": scores[-1] - scores[-2] if len(scores) > 1 else None,
        "note": UNCHECKED if unchecked else "",
        **panels.draw(
            sample.frames,
            truth.masks,
            [record["masks"] for record in records.values()],
            regions=sample.masks if sample.task == "region_caption" else (),
        ),
    }


def read_records(folder: Path, chosen: Collection[Chosen]) -> dict[Chosen, dict[str, Any]]:
    """Return the lines of predictions.jsonl of these samples."""
    return {
        (benchmark, key): record
        for benchmark, key, record in keyed_lines(folder / "predictions.jsonl")
        if (benchmark, key) in chosen
    }


def text_unchecked(benchmark: str, truth: Prediction, text: str) -> bool:
    """Tell whether nothing is meant and an answer, which draws nothing, says something else than that."""
    nothing_meant = parse(benchmark).task in DRAWN_TASKS and "[SEG]" not in truth.text
    return nothing_meant and _words(text) != _words(truth.text)


def _words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def rollouts(folder: Path | None) -> list[dict[str, Any]]:
    """Return rollouts in the order of training; of each loop at most as many as fit on a page: first, last,
    and evenly between."""
    shown = []
    paths = sorted((folder / "samples").glob("*.png")) if folder else []
    for loop in sorted({path.stem.partition("-")[2] for path in paths}):
        of_loop = [path for path in paths if path.stem.partition("-")[2] == loop]
        count = min(len(of_loop), ROLLOUTS_PER_LOOP)
        for path in (of_loop[i * (len(of_loop) - 1) // max(count - 1, 1)] for i in range(count)):
            record = read_json(path.with_suffix(".json"))
            step = path.stem.partition("-")[0].lstrip("0") or "0"
            shown.append(record | {"loop": loop, "step": step, "source": data_uri(path)})
    return shown
