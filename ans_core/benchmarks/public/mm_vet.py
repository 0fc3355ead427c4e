"""MM-Vet: a judge's score of every reply, from 0 to 1 in tenths -> means over all, per capability, and per
set of capabilities.

--predictions: {id: reply}, the file that the benchmark's own evaluator reads, or records {"id",
"prediction"}. --data mm-vet.json or its folder. --replay: its evaluator's grades ({id: {"model", "content",
"score"}}, a score a run), or those that a judge wrote here.

A judge that is asked sees question, true answer and reply, in other words than the benchmark's: the figures
carry a note. It is not asked about an empty reply (of an agent that ran into a limit), which counts 0. In a
true answer `<AND>` joins what all must be there, `<OR>` what may stand for each other. A model is run on
mm-vet.json with the folder `images`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner, picture_item, recorded
from ans_core.benchmarks.public.scored import Inputs, Judge, JudgeRequest, Judging, Scored, Scorer
from ans_core.metrics.bootstrap import Ratio

QUESTIONS = "mm-vet.json"
CAPABILITIES = ("rec", "ocr", "know", "gen", "spat", "math")
REPLY_TOKENS = 3
SYSTEM = "You grade answers to questions about pictures. You reply with one number and nothing else."
PROMPT = """\
Grade how far the given answer agrees with the true one: 0.0 where nothing of it is right, 1.0 where all of it is, and tenths between. \
Where parts of the true answer are joined by <AND>, the full grade needs every part; where they are joined by <OR>, one part is enough. \
Wording does not matter.

Question: Which fruits are on the table? | True answer: apple <AND> pear | Given answer: An apple and a pear. | Grade: 1.0
Question: Which fruits are on the table? | True answer: apple <AND> pear | Given answer: There is an apple. | Grade: 0.5
Question: Which fruits are on the table? | True answer: apple <AND> pear | Given answer: bananas | Grade: 0.0
Question: What is 3 + 4? | True answer: 7 <OR> seven | Given answer: It is seven. | Grade: 1.0
Question: Why do people laugh at the sign? | True answer: It forbids reading the sign, which one must read to know it. | Given answer: \
Because the sign says something about reading. | Grade: 0.3
Question: {question} | True answer: {truth} | Given answer: {reply} | Grade:"""


def score(inputs: Inputs) -> Scored:
    if inputs.replay is None:
        raise ValueError(
            "mm_vet is scored by a judge: --replay with its recorded grades, or name a judge in params.yaml"
        )
    truth, replies = _truth(inputs), _replies(inputs)
    names, missing = inputs.pair(replies, truth, what="questions")
    grades = files.load(inputs.replay)
    if not isinstance(grades, dict):
        raise ValueError(f"{inputs.replay}: expected {{id: grade}}")
    samples: list[dict[str, Any]] = []
    for name in names:
        capability, graded = sorted(truth[name]["capability"]), [0.0]
        if name in replies:
            grade = files.value(grades, name, where=str(inputs.replay))
            graded = _grades(grade, replies[name], f"{inputs.replay}, {name}")
        samples.append(
            {"id": name, "capability": capability, "score": sum(graded) / len(graded), "runs": len(graded)}
        )
    metrics = {"score": _mean(samples), "questions": len(samples)}
    named = sorted(
        {one for s in samples for one in s["capability"]}, key=lambda one: (*CAPABILITIES, one).index(one)
    )
    metrics |= {f"score/{one}": _mean([s for s in samples if one in s["capability"]]) for one in named}
    for mix in sorted({"_".join(s["capability"]) for s in samples}):
        metrics[f"score/only/{mix}"] = _mean([s for s in samples if "_".join(s["capability"]) == mix])
    return Scored(
        metrics=metrics,
        published={key: f"{100 * metrics[key]:.1f}" for key in ("score", *(f"score/{one}" for one in named))},
        ratios={"score": Ratio(numerators=[s["score"] for s in samples])},
        samples=samples,
        missing=missing,
        notes=_notes(grades, replies, inputs.replay),
    )


def _truth(inputs: Inputs) -> dict[str, Any]:
    assert inputs.data is not None, "needs_data"
    return _questions(files.named(inputs.data, QUESTIONS))


def _questions(path: Path) -> dict[str, Any]:
    questions = files.load(path)
    if not isinstance(questions, dict) or not questions:
        raise ValueError(f"{path}: expected {{id: question}}")
    for name, question in questions.items():
        files.listed(question, "capability", where=f"{path}, {name}", of=str)
    return questions


def _replies(inputs: Inputs) -> dict[str, str]:
    """Return reply by id."""
    loaded = files.load(inputs.predictions)
    if isinstance(loaded, dict):
        return {name: files.text(loaded, name, where=str(inputs.predictions)) for name in loaded}
    records = files.by_id(files.records(inputs.predictions), "id", where=str(inputs.predictions))
    return {
        name: files.text(record, "prediction", where=f"{inputs.predictions}, {name}")
        for name, record in records.items()
    }


def _grades(grade: Any, reply: str, where: str) -> list[float]:
    """Return a question's scores, one a run of the judge."""
    scores: list[Any] = files.listed(grade, "score", where=where)
    if not scores or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1 for x in scores
    ):
        raise ValueError(f"{where}: score {str(scores)[:60]} is no list of numbers from 0 to 1")
    for key in ("model", "content"):
        if key in grade:
            files.listed(grade, key, where=where, of=str)
    if grade.get("prediction", reply) != reply:
        raise ValueError(f"{where}: the judge saw another reply than the predicted one")
    return [float(x) for x in scores]


def _mean(samples: list[dict[str, Any]]) -> float:
    return float(sum(s["score"] for s in samples) / len(samples))


def _notes(grades: Mapping[str, Any], names: Iterable[str], path: Path) -> list[str]:
    graded = [grades[name] for name in names]
    judges = sorted({judge for grade in graded for judge in grade.get("model", ())})
    ours = any("prediction" in grade for grade in graded)
    unread = sum(number_of(content) is None for grade in graded for content in grade.get("content", ()))
    notes = [
        f"judge: {', '.join(judges) or f'the one that wrote {path.name}'} (published with gpt-4-0613); "
        "another judge moves the figure"
    ]
    notes += ["the judge was asked in other words than the benchmark's, once"] if ours else []
    return notes + ([f"{unread} replies of the judge are no grade and count 0"] if unread else [])


def number_of(reply: str) -> float | None:
    """Return the grade that a judge's reply begins with; None: it is none from 0 to 1."""
    try:
        grade = float(reply.strip().split(" ")[0])
    except ValueError:
        return None
    return grade if 0 <= grade <= 1 else None


def ask_judge(inputs: Inputs, judge: Judge, out: Path) -> Inputs:
    truth, replies = _truth(inputs), _replies(inputs)
    files.refuse_unknown(replies, truth, where=inputs.predictions, what="questions")
    replied = {name: reply for name, reply in replies.items() if reply.strip()}
    requests = []
    for name, reply in replied.items():
        asked, answer = (
            files.text(truth[name], key, where=f"{inputs.data}, {name}") for key in ("question", "answer")
        )
        spaced = answer.replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
        user = PROMPT.format(question=asked, truth=" ".join(spaced.split()), reply=reply)
        requests.append(JudgeRequest(system=SYSTEM, user=user, schema=None, max_tokens=REPLY_TOKENS))
    verdicts = judge.ask(requests, desc=f"mm_vet, judged by {judge.name}")
    grades = {
        name: {
            "model": [judge.name],
            "content": [content],
            "score": [number_of(content) or 0.0],
            "prediction": reply,
        }
        for (name, reply), content in zip(replied.items(), verdicts, strict=True)
    }
    grades |= {
        name: {"content": [], "score": [0.0], "prediction": replies[name]}
        for name in replies
        if name not in replied
    }
    out.write_text(json.dumps(grades, indent=1) + "\n", encoding="utf-8")
    return replace(inputs, replay=out)


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, QUESTIONS)
    pictures = files.pictures(folder, "images")
    for name, entry, picture in files.with_pictures(_questions(path), "imagename", pictures, where=path):
        text, answer = (files.text(entry, key, where=f"{path}, {name}") for key in ("question", "answer"))
        facts = {"id": name, "question": text}
        yield picture_item(name, picture, f"<image>\n{text}", answer=answer, facts=facts)


SCORER = Scorer(
    score=score,
    data=f"{QUESTIONS}, or its folder",
    options=frozenset({"replay", "predicted_only"}),
    runner=Runner(items=items, record=recorded("prediction")),
    judging=Judging(
        needed=lambda inputs: inputs.replay is None,
        ask=ask_judge,
        suffix=".json",
        replay="--replay GRADES.json",
    ),
)
