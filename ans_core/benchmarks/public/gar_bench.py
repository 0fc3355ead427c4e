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
    scored = Scored(
        metrics={},
        notes=[
            "VQA: the whole reply must be the letter; a reply like `A.` is wrong, as in the public scorer"
        ],
    )
    seen: dict[str, Path] = {}
    for path in paths:
        loaded = files.load(path)
        if not (
            isinstance(loaded, list)
            and loaded
            and isinstance(loaded[0], dict)
            and "model_output" in loaded[0]
        ):
            continue  # the folder's questions and expected numbers
        records = files.records(path)
        part = _part(records[0])
        if part in seen:
            raise ValueError(
                f"{path} and {seen[part]} are both of {part}; leave one model's files in the folder"
            )
        seen[part] = path
        scored = _with_part(scored, part, records, None if inputs.predicted_only else inputs.data, path)
    if not seen:
        raise ValueError(f"{inputs.predictions}: no file of records with model_output")
    return scored


def _with_part(
    scored: Scored, part: str, records: list[files.Record], data: Path | None, path: Path
) -> Scored:
    """Add the figures of one part's file."""
    checked, missing = _checked(part, records, data, path)
    samples = [{"part": part, "image": r["image"], "right": float(_right(part, r))} for r in checked]
    vqa = part == "vqa"
    figures, ratio = accuracy(
        (r.get("type", part) if vqa else "", bool(s["right"])) for r, s in zip(checked, samples, strict=True)
    )
    shown = {key: percent(v) if vqa else f"{v:.4f}" for key, v in figures.items() if key.startswith("acc")}
    judge = records[0].get("judge", f"the one whose eval_result {path.name} holds")
    return Scored(
        metrics=scored.metrics | {f"{part}/{key}": value for key, value in figures.items()},
        published=scored.published | {f"{part}/{key}": text for key, text in shown.items()},
        ratios=scored.ratios | {f"{part}/accuracy": ratio},
        samples=scored.samples + samples,
        missing=scored.missing + missing,
        notes=scored.notes + ([] if vqa else [f"{part}: judge: {judge} (published with GPT-4o 2024-11-20)"]),
    )


def _part(first: files.Record) -> str:
    if "choices" in first:
        return "vqa"
    if "predicate_name" in first:
        return "caption_detailed"
    if "answer" in first:
        return "caption_simple"
    raise ValueError(f"{first.where}: a record of none of {', '.join(TRUTH)}; it has {sorted(first)}")


def _checked(
    part: str, records: list[files.Record], data: Path | None, path: Path
) -> tuple[list[files.Record], int]:
    """The records in the questions' order, with the questions' own answers; what is missing has no reply."""
    replies = files.by_id(records, "image", where=path)
    if data is None:
        return list(replies.values()), sum("model_output" not in record for record in records)
    questions = files.named(data, TRUTH[part])
    files.refuse_same(path, questions)
    truth = files.by_id(files.records(questions), "image", where=questions)
    missing = files.refuse_unknown(replies, truth, where=path, what="questions")
    for name, reply in replies.items():
        for key in ("answer", "choices", "predicate_name", "type"):
            if truth[name].get(key) != reply.get(key):
                raise ValueError(
                    f"{reply.where}: {key} {reply.get(key)!r} is not the question's {truth[name].get(key)!r}"
                )
    checked = []
    for name, question in truth.items():
        told = {key: v for key, v in replies.get(name, {}).items() if key in ("model_output", "eval_result")}
        checked.append(files.Record(question | told, f"{path}, {name}"))
    return checked, len(missing)


def _right(part: str, record: files.Record) -> bool:
    if "model_output" not in record:
        return False  # missing
    if part == "vqa":
        return record.text("model_output").lower() == record.text("answer").lower()
    return record.text("eval_result") == "True"


def items(folder: Path, split: str) -> Iterator[Item]:
    """The questions of a part, which the benchmark calls <Prompt0>, <Prompt1> what are region1, region2
    here."""
    path = files.named(folder, TRUTH[split])
    for question in files.records(path):
        masks = question.listed("mask_rles")
        regions = [files.mask(m, m["size"], where=question.where) for m in masks]
        facts = {key: value for key, value in question.items() if key not in ("mask_rles", "image_path")}
        asked = re.sub(r"<Prompt(\d+)>", lambda match: f"region{int(match[1]) + 1}", _question(question))
        request = Request(
            frames=(path.parent / question.text("image"),),
            text=f"<image>\n{asked}",
            mask_prompts=tuple(regions),
        )
        truth = Prediction(text=str(question.get("answer", "")))
        yield Item(name=question["image"], request=request, facts=facts, truth=truth)


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
    return "model_output" in first and _part(first) != "vqa" and "eval_result" not in first


def ask_judge(inputs: Inputs, judge: Judge) -> list[dict[str, Any]]:
    if inputs.data is None:
        raise ValueError(
            "gar_bench: to ask a judge, --data must be the folder with the questions and `images`"
        )
    records = files.records(inputs.predictions)
    questions = files.named(inputs.data, TRUTH[_part(records[0])])
    return gar_judge.ask(records, judge, questions=questions, predictions=inputs.predictions)


def right(item: Item, prediction: Prediction) -> float:
    return float(plain_caption(prediction.text).strip().lower() == str(item.facts.get("answer")).lower())


SCORER = Scorer(
    score=score,
    data="the questions, GAR-Bench-VQA.json and so on, or the folder of them",
    data_optional=True,
    options=frozenset({"predicted_only"}),
    sample_id=("image",),
    runner=Runner(items=items, record=record, splits=tuple(TRUTH), running=("accuracy", right)),
    judging=Judging(
        replies=ask_judge,
        needed=needs_judge,
        into="predictions",
        replay="files whose records have the judge's `eval_result`",
    ),
)
