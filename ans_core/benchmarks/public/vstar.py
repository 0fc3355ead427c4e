"""V*Bench with free-text replies (DeepEyes' protocol, where option A is always right) -> accuracy per question type and over all.

--predictions: records {"test_type", "question", "options", "answer", "pred_ans", "judged"}.
"""

from __future__ import annotations

import re
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Given, Scored, Scorer, accuracy, percent

_BOXED = re.compile(r"\\boxed\{(.*)\}", re.DOTALL)


def score(given: Given) -> Scored:
    records = files.records(given.predictions)
    files.by_id(records, "image", where=str(given.predictions))  # a question a picture
    verdicts, judged = [], 0
    for number, record in enumerate(records):
        where = f"{given.predictions}, record {number}"
        for key in ("test_type", "image", "question", "answer"):
            files.text(record, key, where=where)
        if files.listed(record, "options", where=where, of=str)[:1] != [record["answer"]]:
            raise ValueError(f"{where}: the first option is not the answer; this protocol's options are not shuffled")
        ruled = by_rule(files.text(record, "pred_ans", where=where), record["answer"])
        judged += ruled is None
        verdicts.append(bool(files.value(record, "judged", where=where)) if ruled is None else ruled)
    found, ratio = accuracy((r["test_type"], right) for r, right in zip(records, verdicts, strict=True))
    return Scored(
        metrics=found | {"decided_by_judge": judged},
        published={key: percent(value, 2) for key, value in found.items() if key.startswith("accuracy")},
        ratios={"accuracy": ratio},
        samples=[_sample(r, right) for r, right in zip(records, verdicts, strict=True)],
        notes=[
            "options are not shuffled: A is always right. The official V* score (lowest loss of the options' texts) is another protocol",
            f"{judged} replies that no rule decides: as the text judge of that run decided (`judged`)",
        ],
    )


def by_rule(reply: str, answer: str) -> bool | None:
    """None: a judge must decide."""
    boxed = _BOXED.search(reply)
    said = (boxed[1] if boxed else reply).strip()
    if len(said) == 1:
        return said == "A"
    if len(said) == 2 and "." in said:
        return "A" in said
    return True if f"A. {answer}".lower() in said.lower() else None


def _sample(record: dict[str, Any], right: bool) -> dict[str, Any]:
    return {"image": record["image"], "test_type": record["test_type"], "question": record["question"], "right": right}


SCORER = Scorer(score=score, data="", needs_data=False, sample_id=("image",))
