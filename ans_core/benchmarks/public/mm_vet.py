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

from collections.abc import Iterator, Mapping, Sequence
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
    mean,
    means_by_kind,
    percent,
)
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
    grades = files.records_by_name(inputs.replay, "{id: grade}")
    samples: list[dict[str, Any]] = []
    for name in names:
        capability, graded = sorted(truth[name]["capability"]), [0.0]
        if name in replies:
            if name not in grades:
                raise ValueError(f"{inputs.replay}: no grade of {name!r}, which is answered")
            graded = _grades(grades[name], replies[name])
        samples.append({"id": name, "capability": capability, "score": mean(graded), "runs": len(graded)})
    metrics = {"score": mean(s["score"] for s in samples), "questions": len(samples)}
    of_one = means_by_kind(((s["capability"], s["score"]) for s in samples), "score")
    order = [f"score/{one}" for one in CAPABILITIES]
    metrics |= {key: of_one[key] for key in dict.fromkeys([*order, *of_one]) if key in of_one}
    metrics |= means_by_kind(((["_".join(s["capability"])], s["score"]) for s in samples), "score/only")
    return Scored(
        metrics=metrics,
        published={key: percent(metrics[key]) for key in metrics if key == "score" or key in of_one},
        ratios={"score": Ratio(numerators=[s["score"] for s in samples])},
        samples=samples,
        missing=missing,
        notes=_notes([grades[name] for name in replies], inputs.replay),
    )


def _truth(inputs: Inputs) -> dict[str, files.Record]:
    return _questions(files.named(inputs.truth, QUESTIONS))


def _questions(path: Path) -> dict[str, files.Record]:
    questions = files.records_by_name(path, "{id: question}")
    for question in questions.values():
        question.listed("capability", str)
    return questions


def _replies(inputs: Inputs) -> dict[str, str]:
    """Return reply by id."""
    path = inputs.predictions
    loaded = files.load(path)
    if isinstance(loaded, dict):
        replies = files.Record(loaded, str(path))
        return {name: replies.text(name) for name in replies}
    records = files.by_id(files.records(path), "id", where=path)
    return {name: record.text("prediction") for name, record in records.items()}


def _grades(grade: files.Record, reply: str) -> list[float]:
    """Return a question's scores, one a run of the judge."""
    scores: list[Any] = grade.listed("score")
    if not scores or not all(
        isinstance(x, int | float) and not isinstance(x, bool) and 0 <= x <= 1 for x in scores
    ):
        raise ValueError(f"{grade.where}: score {str(scores)[:60]} is no list of numbers from 0 to 1")
    for key in ("model", "content"):
        if key in grade:
            grade.listed(key, str)
    if grade.get("prediction", reply) != reply:
        raise ValueError(f"{grade.where}: the judge saw another reply than the predicted one")
    return [float(x) for x in scores]


def _notes(graded: Sequence[Mapping[str, Any]], path: Path) -> list[str]:
    judges = sorted({judge for grade in graded for judge in grade.get("model", ())})
    notes = [
        f"judge: {', '.join(judges) or f'the one that wrote {path.name}'} (published with gpt-4-0613); "
        "another judge moves the figure"
    ]
    if any("prediction" in grade for grade in graded):
        notes.append("the judge was asked in other words than the benchmark's, once")
    unread = sum(number_of(content) is None for grade in graded for content in grade.get("content", ()))
    return notes + ([f"{unread} replies of the judge are no grade and count 0"] if unread else [])


def number_of(reply: str) -> float | None:
    """Return the grade that a judge's reply begins with; None: it is none from 0 to 1."""
    try:
        grade = float(reply.strip().split(" ")[0])
    except ValueError:
        return None
    return grade if 0 <= grade <= 1 else None


def ask_judge(inputs: Inputs, judge: Judge) -> dict[str, Any]:
    truth, replies = _truth(inputs), _replies(inputs)
    files.refuse_unknown(replies, truth, where=inputs.predictions, what="questions")
    replied = [name for name, reply in replies.items() if reply.strip()]
    requests = []
    for name in replied:
        asked, answer = truth[name].text("question"), truth[name].text("answer")
        spaced = answer.replace("<AND>", " <AND> ").replace("<OR>", " <OR> ")
        user = PROMPT.format(question=asked, truth=" ".join(spaced.split()), reply=replies[name])
        requests.append(JudgeRequest(system=SYSTEM, user=user, max_tokens=REPLY_TOKENS))
    verdicts = judge.ask(requests, desc=f"mm_vet, judged by {judge.name}")
    grades: dict[str, Any] = {
        name: {"model": [judge.name], "content": [content], "score": [number_of(content) or 0.0]}
        for name, content in zip(replied, verdicts, strict=True)
    }
    silent = {name: {"content": [], "score": [0.0]} for name in replies if name not in grades}
    return {name: grade | {"prediction": replies[name]} for name, grade in (grades | silent).items()}


def items(folder: Path, split: str) -> Iterator[Item]:
    path = files.named(folder, QUESTIONS)
    pictures = files.pictures(folder, "images")
    for name, entry, picture in files.with_pictures(_questions(path), "imagename", pictures, where=path):
        text, answer = entry.text("question"), entry.text("answer")
        facts = {"id": name, "question": text}
        yield picture_item(name, picture, f"<image>\n{text}", answer=answer, facts=facts)


SCORER = Scorer(
    score=score,
    data=f"{QUESTIONS}, or its folder",
    options=frozenset({"replay", "predicted_only"}),
    runner=Runner(items=items, record=recorded("prediction")),
    judging=Judging(replies=ask_judge, replay="--replay GRADES.json"),
)
