"""MMMU-Pro, vision setting: free replies -> letters by the official rules -> accuracy over all and per
subject.

--predictions: records {"id", "subject", "options", "answer", "response"} (options: the text of a Python
list), with `pred_indexs` and `if_right` where the official script has run.

A reply that names no option gets a random one from the official script, not seeded: its number moves by run.
Here it is wrong; `accuracy_stored` is what that run drew.
"""

from __future__ import annotations

import string
from typing import Any

from ans_core.benchmarks.public import files, mmmu_val
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracy, percent

MARKS = (("({})", "({})"), ("{} ", " {} "), ("{}.", " {} "))
"""As MMMU's, but for a letter followed by a blank, or by a dot; the last one is taken as there."""


def score(inputs: Inputs) -> Scored:
    records = files.by_id(files.records(inputs.predictions), "id", where=inputs.predictions)
    samples: list[dict[str, Any]] = []
    for name, record in records.items():
        letter = letter_of(record.text("response"), _options(record))
        right = letter == record.text("answer")
        samples.append({"id": name, "parsed": letter, "right": right})
    subjects = [record.text("subject") for record in records.values()]
    metrics, ratio = accuracy((subject, s["right"]) for subject, s in zip(subjects, samples, strict=True))
    metrics["unparsed"] = sum(s["parsed"] is None for s in samples)
    ratios = {"accuracy": ratio}
    if all("if_right" in record for record in records.values()):
        stored, ratios["accuracy_stored"] = accuracy(("", r.verdict("if_right")) for r in records.values())
        metrics |= {f"{key}_stored": stored[key] for key in ("accuracy", "correct")}
    return Scored(
        metrics=metrics,
        published={key: percent(metrics[key], 2) for key in ratios},
        ratios=ratios,
        samples=samples,
        notes=[
            "accuracy counts replies without a letter as wrong; accuracy_stored holds the official script's "
            "random letters for them"
        ],
    )


def _options(record: files.Record) -> list[str]:
    options = record.value("options")
    return [str(one) for one in options] if isinstance(options, list) else record.literal("options")


def letter_of(reply: str, options: list[str]) -> str | None:
    """Behind the last "Answer:" the only option letter there is; else as MMMU, by MARKS."""
    letters = string.ascii_uppercase[: len(options)]
    behind = reply.rsplit("Answer:", 1)[1].strip() if "Answer:" in reply else ""
    if len(named := [letter for letter in letters if letter in behind]) == 1:
        return named[0]
    return mmmu_val.letter_of(reply, letters, dict(zip(letters, options, strict=True)), MARKS)


SCORER = Scorer(score=score)
