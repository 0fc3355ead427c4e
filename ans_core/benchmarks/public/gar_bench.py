"""GAR-Bench (Grasp-Any-Region): replies to region questions, judged captions -> accuracies of VQA,
Caption-Simple, Caption-Detailed.

--predictions: one of the public files (the questions + `model_output`, captions also `eval_result`, the
judge's reply), or a folder of several. --data: the questions, against which they are checked; a judge that is
asked about captions is shown their pictures (gar_judge.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files, gar_judge
from ans_core.benchmarks.public.asked import Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Judge, Judging, Scored, Scorer, accuracy, percent
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.grounding import plain_caption
from ans_core.types import Prediction, Request

TRUTH = {
    "vqa": "GAR-Bench-VQA.json",
    "caption_simple": "GAR-Bench-Caption-Simple.json",
    "caption_detailed": "GAR-Bench-Caption-Detailed.json",
}
LETTER = "Answer with the correct option's letter directly."


def score(inputs: Inputs) -> Scored:
    paths = (
        [inputs.predictions] if inputs.predictions.is_file() else sorted(inputs.predictions.glob("*.json*"))
    )
    metrics: dict[str, float] = {}
    published: dict[str, str] = {}
    ratios: dict[str, Ratio] = {}
    samples: list[dict[str, Any]] = []
    missing = 0
    seen: dict[str, Path] = {}
    judges: dict[str, str] = {}
    for path in paths:
        loaded = files.load(path)
        if not (
            isinstance(loaded, list)
            and loaded
            and isinstance(loaded[0], dict)
            and "model_output" in loaded[0]
        ):
            continue  # the folder's questions and expected numbers
        part = _part(files.records(path), path)
        if part in seen:
            raise ValueError(
                f"{path} and {seen[part]} are both of {part}; leave one model's files in the folder"
            )
        seen[part] = path
        if part != "vqa":
            judges[part] = (
                f"judge: {loaded[0]['judge']}"
                if "judge" in loaded[0]
                else f"judge: the one whose eval_result {path.name} holds"
            )
        records, lacking = _checked(
            part, files.records(path), None if inputs.predicted_only else inputs.data, path
        )
        figures, ratio = accuracy(
            (r.get("type", part), _right(part, r, f"{path}, {r['image']}")) for r in records
        )
        shown = figures if part == "vqa" else {key: value for key, value in figures.items() if "/" not in key}
        metrics |= {f"{part}/{key}": value for key, value in shown.items()}
        published |= {
            f"{part}/{key}": percent(value) if part == "vqa" else f"{value:.4f}"
            for key, value in shown.items()
            if key.startswith("accuracy")
        }
        ratios[f"{part}/accuracy"] = ratio
        samples += [
            {"part": part, "image": r["image"], "right": right}
            for r, right in zip(records, ratio.numerators, strict=True)
        ]
        missing += lacking
    if not seen:
        raise ValueError(f"{inputs.predictions}: no file of records with model_output")
    notes = ["VQA: the whole reply must be the letter; a reply like `A.` is wrong, as in the public scorer"]
    notes += [f"{part}: {judge} (published with GPT-4o 2024-11-20)" for part, judge in judges.items()]
    return Scored(
        metrics=metrics, published=published, ratios=ratios, samples=samples, missing=missing, notes=notes
    )


def _part(records: list[dict[str, Any]], path: Path) -> str:
    first = records[0]
    if "choices" in first:
        return "vqa"
    if "predicate_name" in first:
        return "caption_detailed"
    if "answer" in first:
        return "caption_simple"
    raise ValueError(f"{path}: records of none of {', '.join(TRUTH)}; they have {sorted(first)}")


def _checked(
    part: str, records: list[dict[str, Any]], data: Path | None, path: Path
) -> tuple[list[dict[str, Any]], int]:
    """The records in the questions' order, with the questions' own answers; what is missing has no reply."""
    replies = files.by_id(records, "image", where=str(path))
    if data is None:
        return records, sum("model_output" not in record for record in records)
    files.refuse_same(path, files.named(data, TRUTH[part]))
    truth = files.by_id(files.records(files.named(data, TRUTH[part])), "image", where=str(data))
    missing = files.refuse_unknown(replies, truth, where=path, what="questions")
    questions = [
        {key: value for key, value in question.items() if key != "mask_rles"} for question in truth.values()
    ]
    for question in questions:
        reply = replies.get(question["image"], {})
        for key in ("answer", "choices", "predicate_name", "type"):
            if reply and question.get(key) != reply.get(key):
                raise ValueError(
                    f"{path}, {question['image']}: {key} {reply.get(key)!r} is not the question's "
                    f"{question.get(key)!r}"
                )
    return [
        q | {k: v for k, v in replies.get(q["image"], {}).items() if k in ("model_output", "eval_result")}
        for q in questions
    ], len(missing)


def _right(part: str, record: dict[str, Any], where: str) -> bool:
    if "model_output" not in record:
        return False  # missing
    if part == "vqa":
        return (
            files.text(record, "model_output", where=where).lower()
            == files.text(record, "answer", where=where).lower()
        )
    return files.text(record, "eval_result", where=where) == "True"


def items(folder: Path, split: str) -> Iterator[Item]:
    """The questions of a part, which the benchmark calls <Prompt0>, <Prompt1> what are region1, region2
    here."""
    path = files.named(folder, TRUTH[split])
    for question in files.records(path):
        where = f"{path}, {question.get('image')}"
        masks = files.value(question, "mask_rles", where=where)
        regions = [files.mask(m, height=m["size"][0], width=m["size"][1], where=where) for m in masks]
        facts = {key: value for key, value in question.items() if key not in ("mask_rles", "image_path")}
        request = Request(
            frames=(path.parent / files.text(question, "image", where=where),),
            text="<image>\n"
            + re.sub(r"<Prompt(\d+)>", lambda match: f"region{int(match[1]) + 1}", _question(question)),
            mask_prompts=tuple(regions),
        )
        yield Item(
            name=question["image"],
            request=request,
            facts=facts,
            truth=Prediction(text=str(question.get("answer", ""))),
        )


def _question(record: dict[str, Any]) -> str:
    """The benchmark's own words."""
    if "choices" in record:
        return "\n".join([f"Question: {record['question']}", "Options:", *record["choices"], LETTER])
    return record.get("question", "Describe <Prompt0> in detail, including the relationship with <Prompt1>.")


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    """Captions go to the judge with the benchmark's names of the regions."""
    reply = plain_caption(prediction.text).strip()
    if "choices" not in item.facts:
        reply = re.sub(r"\bregion(\d+)\b", lambda match: f"<Prompt{int(match[1]) - 1}>", reply)
    return item.facts | {"model_output": reply}


def needs_judge(inputs: Inputs) -> bool:
    if inputs.predictions.is_dir():
        return False
    first = files.records(inputs.predictions)[0]
    return (
        "model_output" in first and _part([first], inputs.predictions) != "vqa" and "eval_result" not in first
    )


def ask_judge(inputs: Inputs, judge: Judge, out: Path) -> Inputs:
    if inputs.data is None:
        raise ValueError(
            "gar_bench: to ask a judge, --data must be the folder with the questions and `images`"
        )
    records = files.records(inputs.predictions)
    return gar_judge.ask(
        inputs,
        judge,
        out,
        records=records,
        questions=files.named(inputs.data, TRUTH[_part(records, inputs.predictions)]),
    )


def right(item: Item, prediction: Prediction) -> float:
    return float(plain_caption(prediction.text).strip().lower() == str(item.facts.get("answer")).lower())


SCORER = Scorer(
    score=score,
    data="the questions, GAR-Bench-VQA.json and so on, or the folder of them",
    needs_data=False,
    options=frozenset({"predicted_only"}),
    sample_id=("image",),
    runner=Runner(items=items, record=record, splits=tuple(TRUTH), running=("accuracy", right)),
    judging=Judging(
        needed=needs_judge,
        ask=ask_judge,
        suffix=".json",
        replay="files whose records have the judge's `eval_result`",
    ),
)
