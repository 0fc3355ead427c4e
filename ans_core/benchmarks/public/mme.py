"""MME: two yes-or-no questions a picture -> accuracy and accuracy+ (both questions right) of 14 tasks; their
sums are the benchmark's scores of perception (up to 2000) and cognition (up to 800).

--predictions: the folder of the official results, `<task>.txt` with lines
`image<TAB>question<TAB>answer<TAB>reply`; or records {"category", "image", "question", "answer",
"prediction"}. --data: the release's folder, against which they are checked.

As in the official program a reply means yes if its first four letters (lower case) hold "yes", else no if
they hold "no"; any other is wrong.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner, in_records, picture_item, recorded
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, mean
from ans_core.metrics.bootstrap import Ratio
from ans_core.types import Prediction

TASKS = {
    "perception": (
        "existence",
        "count",
        "position",
        "color",
        "posters",
        "celebrity",
        "scene",
        "landmark",
        "artwork",
        "OCR",
    ),
    "cognition": ("commonsense_reasoning", "numerical_calculation", "text_translation", "code_reasoning"),
}
NAME = ("category", "image", "question")
"""Keys that name a question."""


def score(inputs: Inputs) -> Scored:
    path = inputs.predictions
    samples = [_sample(record) for record in (_of_results(path) if path.is_dir() else files.records(path))]
    by_id = files.by_id(samples, "id", where=path)
    missing = 0
    if inputs.data is not None:
        samples, missing = _checked(by_id, inputs.data, path)
    pictures: dict[str, dict[str, list[bool]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples:
        pictures[sample["category"]][sample["image"]].append(sample["right"])
    for task, right in pictures.items():
        if uneven := [image for image, answers in right.items() if len(answers) != 2]:
            raise ValueError(
                f"{path}, {task}: not two questions about {files.shown(uneven)}; accuracy+ counts pairs"
            )
    metrics, ratios, notes = _scores(pictures)
    return Scored(
        metrics=metrics | {"questions": len(samples), "unparsed": sum(s["parsed"] is None for s in samples)},
        published={
            key: f"{value:.1f}" for key, value in metrics.items() if key in TASKS or key.startswith("score/")
        },
        ratios=ratios,
        samples=samples,
        missing=missing,
        notes=notes,
    )


def _scores(
    pictures: dict[str, dict[str, list[bool]]],
) -> tuple[dict[str, float], dict[str, Ratio], list[str]]:
    """{task: {image: the two answers right or not}} -> metrics, their ratios, notes."""
    metrics: dict[str, float] = {}
    ratios: dict[str, Ratio] = {}
    notes = []
    for group, tasks in TASKS.items():
        if lacking := [task for task in tasks if task not in pictures]:
            notes.append(f"{group} is left out: no question of {', '.join(lacking)}")
            continue
        points = {
            task: [50.0 * sum(answers) + 100 * all(answers) for answers in pictures[task].values()]
            for task in tasks
        }
        metrics[group] = sum(mean(values) for values in points.values())
        count = sum(map(len, points.values()))  # a mean over pictures, in which every task weighs the same
        ratios[group] = Ratio(
            numerators=[value * count / len(values) for values in points.values() for value in values]
        )
    for task, right in pictures.items():
        accuracy, both = mean(mean(answers) for answers in right.values()), mean(map(all, right.values()))
        metrics |= {
            f"accuracy/{task}": accuracy,
            f"accuracy_plus/{task}": both,
            f"score/{task}": 100 * (accuracy + both),
        }
    return metrics, ratios, notes


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """Yield (where it stands, the line), without its end."""
    for number, line in enumerate(path.read_text(encoding="utf-8-sig").rstrip("\n").split("\n"), start=1):
        yield f"{path}, line {number}", line


def _of_results(folder: Path) -> list[files.Record]:
    records = []
    for path in sorted(folder.glob("*.txt")):
        for where, line in _lines(path):
            parts = line.split("\t")
            if len(parts) != 4:
                raise ValueError(
                    f"{where}: {len(parts)} columns; it needs image, question, answer, reply, with tabs between"
                )
            keys = ("category", "image", "question", "answer", "prediction")
            records.append(files.Record(dict(zip(keys, (path.stem, *parts), strict=True)), where))
    if not records:
        raise ValueError(f"{folder}: no <task>.txt with replies")
    return records


def _sample(record: files.Record) -> dict[str, Any]:
    named = {key: record.text(key) for key in NAME}
    truth, parsed = record.text("answer"), yes_or_no(record.text("prediction"))
    if not any(named["category"] in tasks for tasks in TASKS.values()):
        raise ValueError(f"{record.where}: MME has no task {named['category']!r}")
    if truth.lower() not in ("yes", "no"):
        raise ValueError(f"{record.where}: the answer is {truth!r}, not Yes or No")
    right = parsed == truth.lower()
    return {"id": "/".join(named.values()), **named, "answer": truth, "parsed": parsed, "right": right}


def yes_or_no(reply: str) -> str | None:
    start = reply.lower()[:4]
    return "yes" if "yes" in start else "no" if "no" in start else None


def _checked(
    samples: Mapping[str, dict[str, Any]], data: Path, path: Path
) -> tuple[list[dict[str, Any]], int]:
    """The samples in the release's order, and how many are missing; those are wrong."""
    truth = {"/".join(facts[key] for key in NAME): facts for _, facts in questions(data)}
    missing = files.refuse_unknown(samples, truth, where=path, what="questions")
    for name, sample in samples.items():
        if sample["answer"].lower() != truth[name]["answer"].lower():
            raise ValueError(
                f"{path}, {name}: answer {sample['answer']!r} is not the question's {truth[name]['answer']!r}"
            )
    wrong = {"parsed": "", "right": False}
    return [samples.get(name, {"id": name, **facts, **wrong}) for name, facts in truth.items()], len(missing)


def questions(folder: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """Yield (picture, {"category", "image", "question", "answer"}) of the release: a folder for each task
    with `<name>.txt` (lines `question<TAB>answer`) beside the picture, or the two apart in
    `questions_answers_YN` and `images`."""
    has_questions = False
    for task in sorted(
        path for path in folder.iterdir() if path.name in (*TASKS["perception"], *TASKS["cognition"])
    ):
        apart = (task / "questions_answers_YN").is_dir()
        texts, pictures = (task / "questions_answers_YN", task / "images") if apart else (task, task)
        for path in sorted(texts.glob("*.txt")):
            picture = next((p for p in sorted(pictures.glob(f"{path.stem}.*")) if p.suffix != ".txt"), None)
            if picture is None:
                raise ValueError(f"{path}: no picture {path.stem}.* in {pictures}")
            for where, line in _lines(path):
                asked, _, answer = line.strip().rpartition("\t")
                if not asked or answer.lower() not in ("yes", "no"):
                    raise ValueError(f"{where}: not a question, a tab, and Yes or No")
                has_questions = True
                facts = {"category": task.name, "image": picture.name, "question": asked, "answer": answer}
                yield picture, facts
    if not has_questions:
        raise ValueError(f"{folder}: no <task>/<name>.txt with questions; give MME's release folder")


def items(folder: Path, split: str) -> Iterator[Item]:
    """The questions end with the benchmark's own "Please answer yes or no."."""
    for picture, facts in questions(folder):
        name, text = "/".join(facts[key] for key in NAME), "<image>\n" + facts["question"]
        yield picture_item(name, picture, text, answer=facts["answer"], facts=facts)


def right(item: Item, prediction: Prediction) -> float:
    return float(yes_or_no(prediction.text) == item.facts["answer"].lower())


SCORER = Scorer(
    score=score,
    data="MME's release folder",
    data_optional=True,
    runner=Runner(
        items=items,
        record=recorded("prediction"),
        truth=in_records,
        running=("accuracy", right),
        group=lambda item: (item.facts["category"], item.facts["image"]),
    ),
)
