"""MathVista (`annot_testmini.json` or `testmini.json`, pictures in `images/`) -> a conversation a problem:
its query and its answer.

It is a benchmark (`ans eval mathvista`): a model that was trained on it can't be measured with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ans_core.data.formats import checks
from ans_core.data.formats.files import ImageFolders
from ans_core.types import Sample

FILES = ("annot_testmini.json", "testmini.json")
SPLIT = "testmini"


class Problem(checks.Record):
    question: str
    image: str
    answer: str
    query: str | None = None
    question_type: str = ""
    answer_type: str = ""
    metadata: dict[str, Any] = {}


def read(path: Path, *, split: str) -> Iterator[Sample]:
    file = _file(path)
    images, faults = ImageFolders(file.parent, [".", "images"]), checks.Faults(file)
    for pid, where, problem in faults.records(Problem, checks.load_object(file), noun="problem"):
        with faults:
            yield images.find(problem.image, where=where).sample(
                sample_id=pid,
                image_id=problem.image,
                task="conversation",
                question=checks.text(problem.query or problem.question, where),
                text=checks.text(problem.answer, where),
                meta={"kind": problem.question_type, "category": str(problem.metadata.get("task", ""))},
            )


def splits(path: Path) -> list[str]:
    _file(path)
    return [SPLIT]


def _file(path: Path) -> Path:
    file = path if path.is_file() else next((path / name for name in FILES if (path / name).is_file()), None)
    if file is None:
        raise checks.DataError(
            f"{path} holds none of {', '.join(FILES)}; the test split's answers are not public"
        )
    return file
