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

import re
import string
from collections.abc import Iterator, Mapping
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
    means_by_kind,
    percent,
)

TRUTH = ("annot_testmini.json", "testmini.json")
CHOICE = "multi_choice"
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
    truth, replies, extracted = _truth(inputs), _replies(inputs), _extracted(inputs)
    names, missing = inputs.pair(replies, truth, what="questions")
    samples: list[dict[str, Any]] = []
    for pid in names:
        problem = truth[pid]
        extraction = extraction_of(replies[pid], problem, extracted.get(pid)) if pid in replies else ""
        if extraction is None:
            raise ValueError(
                f"{inputs.predictions}, {pid}: no rule reads an answer in {replies[pid]['response'][:60]!r}; "
                "a language model does: --replay {pid: extraction}, or name a judge in params.yaml"
            )
        # the official script gives an empty reply the shortest option
        answer = normalised(extraction, problem) if extraction else None
        right = answer is not None and answer == str(problem["answer"])
        samples.append({"pid": pid, "answer": answer, "right": right, **_kinds(problem)})
    metrics, ratio = accuracy(("", s["right"]) for s in samples)
    for kind in (*KINDS, *META):
        metrics |= means_by_kind(((s[kind], s["right"]) for s in samples), f"accuracy/{kind}")
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


def _truth(inputs: Inputs) -> dict[str, files.Record]:
    return _problems(files.named(inputs.truth, *TRUTH))


def _problems(path: Path) -> dict[str, files.Record]:
    problems = files.records_by_name(path, "{pid: problem}")
    for problem in problems.values():
        _check(problem)
    return problems


def _check(problem: files.Record) -> None:
    """Raise ValueError for a problem that can't be asked or scored."""
    for key in ("question", "question_type", "answer_type", "answer"):
        problem.text(key)
    if problem.get("query") is not None:
        problem.text("query")
    choice = problem["question_type"] == CHOICE
    if choice or problem.get("choices") is not None:
        choices = problem.listed("choices", str)
        if choice and not choices:
            raise ValueError(f"{problem.where}: a {CHOICE} question without choices")
    if problem["answer_type"] == "float" and not choice:
        problem.number("precision")
    if problem.get("metadata"):
        problem.record("metadata")


def _replies(inputs: Inputs) -> dict[str, files.Record]:
    path = inputs.predictions
    if isinstance(files.load(path), dict):
        return files.records_by_name(path, "{pid: `response` or `extraction`}")
    return files.by_id(files.records(path), "pid", where=path)


def _extracted(inputs: Inputs) -> dict[str, str]:
    if inputs.replay is None:
        return {}
    extractions = files.load(inputs.replay)
    if not isinstance(extractions, dict) or not all(isinstance(text, str) for text in extractions.values()):
        raise ValueError(f"{inputs.replay}: expected {{pid: extraction}}, all texts")
    return extractions


def _kinds(problem: Mapping[str, Any]) -> dict[str, list[str]]:
    kinds = {kind: [str(problem[kind])] for kind in KINDS} | {key: [] for key in META}
    for key, entry in (problem.get("metadata") or {}).items():
        if key in META:
            kinds[key] = [str(one) for one in (entry if isinstance(entry, list) else [entry])]
    return kinds


def extraction_of(entry: files.Record, problem: Mapping[str, Any], replayed: str | None) -> str | None:
    """Return the answer within a reply, by rule or as it was extracted; None: a language model must read
    it."""
    if "extraction" in entry:
        return entry.text("extraction")
    response, choice = entry.text("response").strip(), problem["question_type"] == CHOICE
    if not response or (choice and response in (problem.get("choices") or ())):
        return response
    if choice and re.fullmatch(r"\(?[A-Z]\)?\.?", response):
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
    if problem["question_type"] == CHOICE:
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
    return inputs.replay is None and inputs.data is not None and bool(_unread(inputs, _truth(inputs)))


def _unread(inputs: Inputs, truth: Mapping[str, Any]) -> dict[str, files.Record]:
    """Return the replies that no rule reads."""
    replies = {pid: entry for pid, entry in _replies(inputs).items() if pid in truth}
    return {pid: entry for pid, entry in replies.items() if extraction_of(entry, truth[pid], None) is None}


def ask_judge(inputs: Inputs, judge: Judge) -> dict[str, str]:
    truth = _truth(inputs)
    unread = _unread(inputs, truth)
    requests = []
    for pid, entry in unread.items():
        user = PROMPT.format(query=_query(truth[pid]), response=entry["response"])
        requests.append(JudgeRequest(system=SYSTEM, user=user, max_tokens=REPLY_TOKENS))
    extractions = judge.ask(requests, desc=f"mathvista, answers extracted by {judge.name}")
    return {JUDGE: judge.name, **dict(zip(unread, extractions, strict=True))}


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
        replies=ask_judge,
        needed=needs_judge,
        replay="--replay EXTRACTIONS.json, or each answer's `extraction`",
    ),
)
