"""The sets of questions that agents are measured on, drawn in the layouts of their releases: two or three
questions each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet

from ans_core.benchmarks.public import infographicsvqa, virl39k
from tests import tiny
from tests.benchmarks.public.drawn import write


def pictures(folder: Path, *names: str) -> None:
    for number, name in enumerate(names):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(tiny.picture(number))


def vstar(folder: Path) -> Path:
    for kind, options, count in (
        ("direct_attributes", ["red", "blue", "green", "white"], 2),
        ("relative_position", ["left", "right"], 1),
    ):
        for number in range(count):
            pictures(folder / kind, f"{number}.jpg")
            write(
                folder / kind / f"{number}.json",
                {"question": f"Which of {number}?", "options": options, "bbox": [[1, 2, 3, 4]]},
            )
    return folder


def tally(folder: Path) -> Path:
    """Two complex questions and a simple one."""
    pictures(folder, "VG_100K_2/1.jpg", "val2014/2.jpg")
    asked = [
        ("7", "VG_100K_2/1.jpg", 4, False),
        ("8", "val2014/2.jpg", 1, False),
        ("9", "val2014/2.jpg", 2, True),
    ]
    write(folder / "test.json", [
        {"question_id": int(name), "image": image, "answer": answer, "issimple": simple, "question": f"How many {name}?"}
        for name, image, answer, simple in asked
    ])  # fmt: skip
    return folder


def infographics(folder: Path) -> Path:
    pictures(folder / "images", "1.jpeg", "2.jpeg")
    kinds = [{"answer_type": ["single span"], "evidence": ["Text"], "operation/reasoning": []},
             {"answer_type": ["non-extractive"], "evidence": ["Text", "Figure"], "operation/reasoning": ["counting"]}]  # fmt: skip
    asked = [
        {
            "questionId": 71,
            "question": "What?",
            "image_local_name": "1.jpeg",
            "answers": ["Paris", "paris, France"],
            **kinds[0],
        },
        {
            "questionId": 72,
            "question": "How many?",
            "image_local_name": "2.jpeg",
            "answers": ["12"],
            **kinds[1],
        },
    ]
    write(folder / infographicsvqa.TRUTH, {"dataset_name": "infographicsVQA", "data": asked})
    return folder


def mmmu(folder: Path) -> Path:
    """A choice among texts, an open question, and a choice among pictures."""
    row: dict[str, Any] = {"options": "[]", "question_type": "multiple-choice", "image_2": None}
    picture = {
        name: {"bytes": tiny.picture(number), "path": f"{name}.png"}
        for number, name in enumerate(("image_1", "image_2"))
    }
    rows = [
        {"id": "validation_Art_1", "question": "<image 1> Which?", "options": "['me', 'you']", "answer": "B"},
        {"id": "validation_Art_2", "question": "How far?", "answer": "['7 m', '7']", "question_type": "open"},
        {
            "id": "validation_Art_3",
            "question": "Which is it?",
            "options": "['<image 1>', '<image 2>']",
            "answer": "A",
            **picture,
        },
    ]
    (folder / "Art").mkdir(parents=True)
    table = pyarrow.Table.from_pylist([row | {"image_1": picture["image_1"]} | own for own in rows])
    parquet.write_table(table, folder / "Art/validation-00000-of-00001.parquet")
    return folder


def vet(folder: Path) -> Path:
    pictures(folder / "images", "a.jpg", "b.jpg")
    write(folder / "mm-vet.json", {
        "v1_0": {"imagename": "a.jpg", "question": "x?", "answer": "-1<AND>-5", "capability": ["ocr", "math"]},
        "v1_1": {"imagename": "b.jpg", "question": "Who?", "answer": "Ann<OR>Anna", "capability": ["rec"]},
        "v1_2": {"imagename": "b.jpg", "question": "Why?", "answer": "It rains.", "capability": ["rec", "ocr"]},
    })  # fmt: skip
    return folder


def problem(**changes: Any) -> dict[str, Any]:
    """A problem of MathVista."""
    meta = {"task": "figure question answering", "skills": ["arithmetic", "geometry"]}
    known = {
        "question": "How many?",
        "image": "images/1.jpg",
        "choices": None,
        "precision": None,
        "answer": "4",
        "metadata": meta,
    }
    known |= {"question_type": "free_form", "answer_type": "integer"}
    return known | changes


CHOICE = {
    "question_type": "multi_choice",
    "answer_type": "text",
    "choices": ["two", "twenty", "none"],
    "answer": "twenty",
}


def mathvista(folder: Path) -> Path:
    pictures(folder / "images", "1.jpg")
    write(
        folder / "annot_testmini.json",
        {"1": problem(), "2": problem(**CHOICE), "3": problem(answer="7", question="How few?")},
    )
    return folder


def virl(folder: Path) -> Path:
    """Two questions of the hold-out (qid 0 and 2), one of the training set, and one about several pictures of
    both (qid 3)."""
    chosen = [f"images/{n}.png" for n in range(500) if virl39k.held_out([f"images/{n}.png"])]
    names = [chosen[0], "images/0.png", chosen[1]]
    pictures(folder, *names)
    rows = [
        {
            "qid": str(n),
            "question": f"<image>How many {n}?",
            "answer": r"\boxed{3}",
            "category": c,
            "image": image,
            "source": "x",
        }
        for n, (c, image) in enumerate(
            [("Math", names[:1]), ("Math", names[1:2]), ("Charts", names[2:]), ("Charts", names)]
        )
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "39Krelease.parquet")
    return folder


SETS: dict[str, Callable[[Path], Path]] = {
    "vstar": vstar,
    "tallyqa_complex": tally,
    "infographicsvqa": infographics,
    "mmmu_val": mmmu,
    "mm_vet": vet,
    "mathvista": mathvista,
    "virl39k": virl,
}
