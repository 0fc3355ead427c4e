"""MMMU-Pro, vision setting: free replies -> letters by the official rules -> accuracy over all and per
subject.

--predictions: records {"id", "subject", "options", "answer", "response"} (options: the text of a Python
list), with `pred_indexs` and `if_right` where the official script has run.

A reply that names no option gets a random one from the official script, not seeded: its number moves by run.
Here it is wrong; `accuracy_stored` is what that run drew.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.mmmu_val import letter_of as mmmu_letter_of
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracy, percent
from ans_core.metrics.bootstrap import Ratio

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


def score(inputs: Inputs) -> Scored:
    records = files.records(inputs.predictions)
    files.by_id(records, "id", where=str(inputs.predictions))
    letters = [letter_of(*_reply(record, inputs.predictions)) for record in records]
    right = [
        letter is not None and letter == record["answer"]
        for letter, record in zip(letters, records, strict=True)
    ]
    metrics, ratio = accuracy((str(r["subject"]), ok) for r, ok in zip(records, right, strict=True))
    metrics["unparsed"] = sum(letter is None for letter in letters)
    ratios = {"accuracy": ratio}
    if all("if_right" in record for record in records):
        stored = [
            float(files.verdict(record, "if_right", where=f"{inputs.predictions}, {record['id']}"))
            for record in records
        ]
        metrics |= {"accuracy_stored": sum(stored) / len(stored), "correct_stored": int(sum(stored))}
        ratios["accuracy_stored"] = Ratio(numerators=stored)
    return Scored(
        metrics=metrics,
        published={key: percent(metrics[key], 2) for key in ratios},
        ratios=ratios,
        samples=[
            {"id": r["id"], "parsed": p, "right": ok}
            for r, p, ok in zip(records, letters, right, strict=True)
        ],
        notes=[
            "accuracy counts replies without a letter as wrong; accuracy_stored holds the official script's "
            "random letters for them"
        ],
    )


def _reply(record: dict[str, Any], path: Path) -> tuple[str, list[str]]:
    where = f"{path}, {record['id']}"
    for key in ("subject", "answer"):
        files.text(record, key, where=where)
    options = files.value(record, "options", where=where)
    listed = (
        [str(option) for option in options]
        if isinstance(options, list)
        else files.literal(record, "options", where=where)
    )
    return files.text(record, "response", where=where), listed


def letter_of(reply: str, options: list[str]) -> str | None:
    """Behind the last "Answer:" the only option letter there is; else as MMMU, but for a letter followed by a
    blank, or by a dot."""
    letters = LETTERS[: len(options)]
    behind = reply.rsplit("Answer:", 1)[1].strip() if "Answer:" in reply else ""
    if len(named := [letter for letter in letters if letter in behind]) == 1:
        return named[0]
    for sign in (",", ".", "!", "?", ";", ":", "'"):
        reply = reply.strip(sign)
    padded = f" {reply} "
    for pattern, tie_break in (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} ")):
        if matches := [letter for letter in letters if pattern.format(letter) in padded]:
            return max(matches, key=lambda letter: padded.rfind(tie_break.format(letter)))
    return mmmu_letter_of(reply, letters, dict(zip(letters, options, strict=True)))


SCORER = Scorer(score=score, data="", needs_data=False)
