from __future__ import annotations

import json
from pathlib import Path

import pytest

from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.public.export import PNG, write_questions
from ans_core.types import Request
from tests.benchmarks.public.drawn import coded, score, write


def test_questions_become_a_file_that_is_scored_once_the_replies_are_added(tmp_path: Path):
    rotations = [("cat", "dog", "A"), ("dog", "cat", "B")]
    request = Request(frames=(PNG + b"...",), text="<image>\nWhat is it?")
    items = [
        Item(name=str(n), request=request, facts={"index": n, "A": a, "B": b, "answer": answer})
        for n, (a, b, answer) in zip((7, 1_000_007), rotations, strict=True)
    ]
    assert write_questions(iter(items), tmp_path / "out") == 2
    asked = [json.loads(line) for line in (tmp_path / "out/questions.jsonl").read_text().splitlines()]
    assert [record["text"] for record in asked] == ["What is it?"] * 2
    (picture,) = (tmp_path / "out/pictures").iterdir()  # of both
    assert asked[0]["pictures"] == asked[1]["pictures"] == [str(picture)]
    assert picture.read_bytes() == PNG + b"..."
    assert write_questions(iter(items), tmp_path / "out") == 2
    with pytest.raises(ValueError, match=r"pictures holds files and no questions\.jsonl of an earlier run"):
        write_questions(iter(items), tmp_path / "out/pictures")
    told = write(tmp_path / "told.jsonl", [record | {"prediction": "a cat"} for record in asked])
    assert score("mmbench", told).metrics["accuracy"] == 1.0


def test_a_picture_that_is_a_file_stays_where_it_is_and_must_be_there(tmp_path: Path):
    picture = write(tmp_path / "1.jpg", "a picture")
    item = Item(name="q", request=Request(frames=(picture,), text="region1?", mask_prompts=(coded(0, 2),)))
    write_questions([item], tmp_path / "out")
    assert json.loads((tmp_path / "out/questions.jsonl").read_text()) == {
        "id": "q", "pictures": [str(picture)], "text": "region1?", "regions": [coded(0, 2)],
    }  # fmt: skip
    picture.unlink()
    with pytest.raises(ValueError, match=r"question q: no picture .*1\.jpg"):
        write_questions([item], tmp_path / "out")
