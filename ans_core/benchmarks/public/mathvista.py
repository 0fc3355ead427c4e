"""MathVista: replies -> extracted answers -> accuracy over all, and per kind of question, answer, source,
task and skill.

--predictions: the benchmark's output file {pid: {"response" or "extraction", ...}}, or records {"pid",
"response"}. --data annot_testmini.json (or testmini.json) or its folder. A model is run on that folder with
the pictures in `images`, by the official `query`.

The answer is extracted by rule where the reply is an option or a number, and otherwise by a language model,
as in the benchmark: the judge of params.yaml (asked in other words), --replay {pid: extraction}, or the
file's own `extraction`. Then: a letter or the option with the smallest edit distance; int(x); round(x,
precision); or the text as it is.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner, picture_item, recorded
from ans_core.benchmarks.public.scored import (
    Inputs,
    Judge,
    JudgeRequest,
    Judging,
    Scored,
    Scorer,
    accuracy,
    percent,
)
from ans_core.pictures import rle

TRUTH = ("annot_testmini.json", "testmini.json")
KINDS = ("question_type", "answer_type")
META = ("source", "category", "task", "context", "grade", "skills")
REPLY_TOKENS = 64
JUDGE = "judge"
"""Key of a replay file with the name of the model that extracted."""
SYSTEM = (
    "You copy the final answer out of a reply to a question. You write the answer alone, without a word "
    "around it."
)
PROMPT = """\
Question: {query}

Reply: {response}

Write the final answer that this reply gives: the option's letter where options are listed, the bare number where a number is asked for, a \
list as [a, b] where a list is asked for. If it gives none, write nothing."""


def score(inputs: Inputs) -> Scored:
    truth, replies = _truth(inputs), _replies(inputs)
    names, missing = inputs.pair(replies, truth, what="questions")
    extracted = _extracted(inputs)
    samples: list[dict[str, Any]] = []
    extraction: str | None
    for pid in names:
        problem, extraction = truth[pid], ""
        if pid in replies:
            extraction = extraction_of(
                replies[pid], problem, extracted.get(pid), f"{inputs.predictions}, {pid}"
            )
        if extraction is None:
            raise ValueError(
                f"{inputs.predictions}, {pid}: no rule reads an answer in {replies[pid]['response'][:60]!r}; "
                "a language model does:"
                " --replay {pid: extraction}, or name a judge in params.yaml"
            )
        # the official script gives an empty reply the shortest option
        answer = normalised(extraction, problem) if extraction else None
        samples.append(
            {
                "pid": pid,
                "answer": answer,
                "right": answer is not None and answer == str(problem["answer"]),
                **_kinds(problem),
            }
        )
    metrics, ratio = accuracy(("", s["right"]) for s in samples)
    for kind in (*KINDS, *META):
        for value in sorted({value for s in samples for value in s[kind]}):
            verdicts = [s["right"] for s in samples if value in s[kind]]
            metrics[f"accuracy/{kind}/{value}"] = sum(verdicts) / len(verdicts)
    judge = extracted.get(JUDGE)
    return Scored(
        metrics=metrics,
        published={"accuracy": percent(metrics["accuracy"], 2)},
        ratios={"accuracy": ratio},
        samples=samples,
        missing=missing,
        notes=[f"judge: {judge} extracted answers, asked in other words than the benchmark's"]
        if judge
        else [],
    )


def _truth(inputs: Inputs) -> dict[str, Any]:
    assert inputs.data is not None, "needs_data"
    return _problems(files.named(inputs.data, *TRUTH))


def _problems(path: Path) -> dict[str, Any]:
    problems = files.load(path)
    if not isinstance(problems, dict) or not problems:
        raise ValueError(f"{path}: expected {{pid: problem}}")
    for pid, problem in problems.items():
        _check(problem, f"{path}, {pid}")
    return problems


def _check(problem: Any, where: str) -> None:
    """Raise ValueError for a problem that can't be asked or scored."""
    for key in ("question", "question_type", "answer_type", "answer"):
        files.text(problem, key, where=where)
    if problem.get("query") is not None:
        files.text(problem, "query", where=where)
    choice = problem["question_type"] == "multi_choice"
    if choice or problem.get("choices") is not None:
        choices = files.listed(problem, "choices", where=where, of=str)
        if choice and not choices:
            raise ValueError(f"{where}: a multi_choice question without choices")
    if problem["answer_type"] == "float" and not choice:
        files.number(problem, "precision", where=where)
    if not isinstance(problem.get("metadata") or {}, dict):
        raise ValueError(f"{where}: 'metadata' is {rle.short(problem['metadata'])}, not an object")


def _replies(inputs: Inputs) -> dict[str, dict[str, Any]]:
    loaded = files.load(inputs.predictions)
    if isinstance(loaded, dict):
        wrong = [pid for pid, entry in loaded.items() if not isinstance(entry, dict)]
        if wrong:
            raise ValueError(
                f"{inputs.predictions}, {wrong[0]}: expected an object with `response` or `extraction`"
            )
        return loaded
    return files.by_id(files.records(inputs.predictions), "pid", where=str(inputs.predictions))


def _extracted(inputs: Inputs) -> dict[str, str]:
    if inputs.replay is None:
        return {}
    extractions = files.load(inputs.replay)
    if not isinstance(extractions, dict) or not all(isinstance(text, str) for text in extractions.values()):
        raise ValueError(f"{inputs.replay}: expected {{pid: extraction}}, all texts")
    return extractions


def _kinds(problem: Mapping[str, Any]) -> dict[str, list[str]]:
    meta = problem.get("metadata") or {}
    kinds = {kind: [str(problem[kind])] for kind in KINDS}
    return kinds | {
        k: [str(v) for v in (meta[k] if isinstance(meta.get(k), list) else [meta[k]])] if k in meta else []
        for k in META
    }


def extraction_of(
    entry: Mapping[str, Any], problem: Mapping[str, Any], replayed: str | None, where: str
) -> str | None:
    """Return the answer within a reply, by rule or as it was extracted; None: a language model must read
    it."""
    if "extraction" in entry:
        return files.text(entry, "extraction", where=where)
    response = files.text(entry, "response", where=where).strip()
    if not response or (
        problem["question_type"] == "multi_choice" and response in (problem.get("choices") or ())
    ):
        return response
    if problem["question_type"] == "multi_choice" and re.fullmatch(r"\(?[A-Z]\)?\.?", response):
        return response.strip("().")
    number = {"integer": int, "float": float}.get(problem["answer_type"])
    if number is not None:
        try:
            return str(number(response))
        except ValueError:
            pass
    return replayed


def normalised(extraction: str, problem: Mapping[str, Any]) -> str | None:
    """Return the answer in the form of the true one; None: it has not that form."""
    text = extraction.strip()
    if problem["question_type"] == "multi_choice":
        return _option(text, problem["choices"])
    try:
        if problem["answer_type"] == "integer":
            return str(int(float(text)))
        if problem["answer_type"] == "float":
            return str(round(float(text), int(problem["precision"])))
    except (ValueError, OverflowError):
        return None
    return extraction


def _option(text: str, choices: list[str]) -> str:
    from nltk import edit_distance

    letters = re.findall(r"\(([a-zA-Z])\)", text)
    letter = letters[0].upper() if letters else text
    place = string.ascii_uppercase.find(letter) if len(letter) == 1 else -1
    return (
        choices[place]
        if 0 <= place < len(choices)
        else min(choices, key=lambda choice: int(edit_distance(letter, choice)))
    )


def needs_judge(inputs: Inputs) -> bool:
    if inputs.replay is not None or inputs.data is None:
        return False
    return bool(_unread(inputs, _truth(inputs)))


def _unread(inputs: Inputs, truth: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the replies that no rule reads."""
    replies = {pid: entry for pid, entry in _replies(inputs).items() if pid in truth}
    return {
        pid: entry
        for pid, entry in replies.items()
        if extraction_of(entry, truth[pid], None, str(inputs.predictions)) is None
    }


def ask_judge(inputs: Inputs, judge: Judge, out: Path) -> Inputs:
    truth = _truth(inputs)
    open_ = _unread(inputs, truth)
    requests = [
        JudgeRequest(
            system=SYSTEM,
            user=PROMPT.format(query=_query(truth[pid]), response=entry["response"]),
            schema=None,
            max_tokens=REPLY_TOKENS,
        )
        for pid, entry in open_.items()
    ]
    extractions = judge.ask(requests, desc=f"mathvista, answers extracted by {judge.name}")
    recorded = {JUDGE: judge.name, **dict(zip(open_, extractions, strict=True))}
    out.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    return replace(inputs, replay=out)


def _query(problem: Mapping[str, Any]) -> str:
    """The benchmark's own, which tells the form of the answer; without one, question and options."""
    if problem.get("query"):
        return str(problem["query"])
    options = [
        f"({letter}) {text}"
        for letter, text in zip(string.ascii_uppercase, problem.get("choices") or (), strict=False)
    ]
    return "\n".join([f"Question: {problem['question']}", *(["Choices:", *options] if options else [])])


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, *TRUTH)
    pictures = files.pictures(folder, "images")
    listed = files.with_pictures(_problems(path), "image", pictures, where=path, inside="images/")
    for pid, problem, picture in listed:
        text = f"<image>\n{_query(problem)}"
        yield picture_item(pid, picture, text, answer=problem["answer"], facts={"pid": pid})


SCORER = Scorer(
    score=score,
    data=f"{TRUTH[0]}, or its folder",
    options=frozenset({"replay", "predicted_only"}),
    sample_id=("pid",),
    runner=Runner(items=items, record=recorded("response"), splits=("testmini",)),
    judging=Judging(
        needed=needs_judge,
        ask=ask_judge,
        suffix=".json",
        replay="--replay EXTRACTIONS.json, or each answer's `extraction`",
    ),
)
