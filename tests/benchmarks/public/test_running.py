"""Models run on benchmarks in their real layouts: what is asked, what is written, that it scores as a
predictions file does."""

from __future__ import annotations

import base64
import csv
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet as parquet
import pytest
from PIL import ExifTags, Image

from ans_core.benchmarks.public.asked import Item, Runner, UnscoredError
from ans_core.benchmarks.public.scored import Inputs, Scored
from ans_core.benchmarks.registry import SCORERS
from ans_core.data.formats import refcoco as refcoco_reader
from ans_core.data.scene_write import write_clips, write_scenes
from ans_core.pictures import rle, transforms
from ans_core.types import Prediction, Request
from flows import cli
from tests import tiny
from tests.benchmarks.public import drawn as drawn_sets
from tests.benchmarks.public.drawn import write


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("drawn")
    write_scenes(folder, seed=0, counts={"train": 1, "val": 4, "test": 1}, image_size=64)
    write_clips(folder, seed=0, counts={"train": 1, "val": 2}, image_size=64, frames=3)
    return folder


def truth_of(items: Sequence[Item]) -> list[Prediction]:
    """A model that knows the answers."""
    assert all(item.truth for item in items)
    return [item.truth for item in items if item.truth]


def predict(
    name: str, data: Path, out: Path, *, split: str = "", ask: Any = truth_of, limit: int = 0
) -> Path:
    runner = SCORERS[name].runner
    assert runner is not None
    return drawn_sets.predicted(runner, data, split, ask, out, limit=limit, batch=4)


def evaluate(
    name: str, data: Path, out: Path, *, split: str = "", ask: Any = truth_of, limit: int = 0
) -> Scored:
    path, runner = predict(name, data, out, split=split, ask=ask, limit=limit), SCORERS[name].runner
    assert runner is not None
    return SCORERS[name].score(
        Inputs(predictions=path, data=runner.truth(data, split), predicted_only=bool(limit))
    )


def words(text: str) -> Callable[[Sequence[Item]], list[Prediction]]:
    return lambda items: [Prediction(text=text) for _ in items]


@pytest.mark.parametrize("name", ["refcoco", "grefcoco"])
def test_expressions_about_pictures(tmp_path: Path, drawn: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    runner = SCORERS[name].runner
    assert runner is not None
    items = list(runner.items(drawn / name, "val"))
    assert items[0].request.text == f"<image>\n Please segment {items[0].expression} in this image."
    # picture by picture
    assert [i.name for i in items] == [i.name for i in sorted(items, key=lambda i: str(i.request.frames))]
    assert evaluate(name, drawn / name, tmp_path / "all", split="val").metrics["gIoU"] == 1.0
    silent = evaluate(name, drawn / name, tmp_path / "silent", split="val", ask=words("Sorry."))
    assert silent.missing == 0
    assert silent.metrics["gIoU"] == sum(not rle.area(i.truth.masks[0][0]) for i in items if i.truth) / len(
        items
    )
    some = evaluate(name, drawn / name, tmp_path / "some", split="val", limit=3)
    read: list[str] = []
    whole = refcoco_reader.read
    monkeypatch.setattr(
        refcoco_reader,
        "read",
        lambda *words, split, **more: read.append(split) or whole(*words, split=split, **more),
    )
    predictions = predict(name, drawn / name, tmp_path / "again", split="val")
    read.clear()
    assert (
        SCORERS[name].score(Inputs(predictions=predictions, data=drawn / name, split="val")).metrics["gIoU"]
        == 1.0
    )
    assert read == ["val"]  # train is a hundred times as large
    with pytest.raises(ValueError, match="is this another split's file"):
        SCORERS[name].score(Inputs(predictions=predictions, data=drawn / name, split="test"))
    assert (some.metrics["expressions"], some.missing, some.metrics["gIoU"]) == (3, 0, 1.0)


def test_the_folder_of_grefcoco_gets_no_figures_of_refcoco(tmp_path: Path, drawn: Path):
    with pytest.raises(
        ValueError,
        match=r"val: \d+ of \d+ expressions mean several objects or none .*its figures are `grefcoco`'s",
    ):
        evaluate("refcoco", drawn / "grefcoco", tmp_path / "run", split="val")
    path = predict("grefcoco", drawn / "grefcoco", tmp_path / "other", split="val")
    with pytest.raises(ValueError, match="this is gRefCOCO"):
        SCORERS["refcoco"].score(Inputs(predictions=path, data=drawn / "grefcoco"))


def test_a_folder_of_clips_is_named_by_the_split_that_it_holds(tmp_path: Path, drawn: Path):
    (data,) = (path.parent.parent for path in drawn.rglob("val/meta_expressions.json"))
    runner = SCORERS["mevis"].runner
    assert runner is not None
    assert runner.split_of is not None
    assert [runner.split_of(folder) for folder in (data, data / "val", tmp_path / "mine")] == [
        "val",
        "val",
        "mine",
    ]


@pytest.mark.parametrize("name", ["mevis", "ref_youtube_vos", "ref_davis17"])
def test_expressions_about_clips(tmp_path: Path, drawn: Path, name: str):
    (data,) = (path.parent.parent for path in drawn.rglob("val/meta_expressions.json"))
    found = evaluate(name, data, tmp_path / "whole", split="val")
    assert found.metrics["J&F"] == 1.0
    inner = evaluate(name, data / "val", tmp_path / "inner", split="val", limit=1)  # the split's own folder
    assert (inner.metrics["expressions"], inner.metrics["J&F"]) == (1, 1.0)
    assert evaluate(name, data, tmp_path / "silent", split="val", ask=words("No.")).metrics["J"] < 1.0
    with pytest.raises(ValueError, match="val has no folder of split 'vla'; the benchmark's splits are val"):
        evaluate(name, data / "val", tmp_path / "typo", split="vla")


def test_a_split_without_public_masks_is_predicted_but_not_scored(tmp_path: Path):
    folder = tmp_path / "valid"
    meta = {
        "videos": {
            "dog": {
                "frames": ["0", "1"],
                "expressions": {"0": {"exp": "the dog"}, "1": {"exp": "why is it?"}},
            }
        }
    }
    write(folder / "meta_expressions.json", meta)
    for frame in "01":
        (folder / "JPEGImages/dog").mkdir(parents=True, exist_ok=True)
        (folder / "JPEGImages/dog" / f"{frame}.png").write_bytes(tiny.picture(int(frame)))
    runner = SCORERS["revos"].runner
    assert runner is not None
    asked = [item.request.text for item in runner.items(tmp_path, "valid")]
    assert asked == [
        "<image>\nPlease segment the dog.",
        "<image>\n why is it? Please respond with a segmentation mask.",
    ]
    with pytest.raises(UnscoredError, match=r"valid/mask_dict\.json is not there .*ans eval submit"):
        evaluate("revos", tmp_path, tmp_path / "out", split="valid", ask=words("No."))
    lines = (tmp_path / "out/predictions.jsonl").read_text().splitlines()
    assert [json.loads(line)["prediction_masks"] for line in lines] == [[None, None]] * 2


def test_a_turned_picture_with_masks_is_asked_about_as_it_is_stored_and_without_masks_upright(tmp_path: Path):
    """Truth and answers are of the stored pixels then, as upstream's figures are."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    Image.new("RGB", (8, 6)).save(tmp_path / "a.jpg", exif=exif)
    asked = Request(frames=(tmp_path / "a.jpg",), text="<image>\nWhat is it?")
    region = Item(name="region", request=replace(asked, mask_prompts=(rle.encode(np.ones((6, 8), bool)),)))
    runner = Runner(items=lambda *_: iter([region, Item(name="words", request=asked)]), record=lambda *_: {})
    sizes = [transforms.open_image(item.request.frames[0]).size for item in runner.questions(tmp_path, "")]
    assert sizes == [(8, 6), (6, 8)]


@pytest.mark.parametrize(
    "damage", [b"\0\0\0\n", b'\xff"\n', b'{"text": "no name"}\n{"item": "2", "text": "2"}\n', b"7\n"]
)
def test_a_damaged_part_is_kept_aside_and_what_stood_there_is_asked_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: bytes
):
    items = [Item(name=str(n), request=Request(frames=(tiny.picture(0),), text=str(n))) for n in range(6)]
    runner, asked = (
        Runner(items=lambda *_: iter(items), record=lambda item, answer: {"text": answer.text}),
        [],
    )

    def ask(some: Sequence[Item]) -> list[Prediction]:
        asked.extend(item.name for item in some)
        return [Prediction(text=item.name) for item in some]

    def run(out: Path) -> bytes:
        return drawn_sets.predicted(runner, tmp_path, "", ask, out).read_bytes()

    whole = run(tmp_path / "whole")
    asked.clear()
    part = tmp_path / "cut/parts/0.jsonl"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"".join(whole.splitlines(keepends=True)[:2]) + damage)
    assert run(tmp_path / "cut") == whole
    assert asked == ["2", "3", "4", "5"]
    assert f"{part} is damaged from byte" in caplog.text
    assert (tmp_path / "cut/0.jsonl.damaged").read_bytes().endswith(damage)


def pictures(folder: Path, *names: str) -> None:
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        (folder / name).write_bytes(tiny.picture(number))


def test_grounded_conversation(tmp_path: Path):
    pictures(tmp_path / "images", "7.png", "8.png")
    masks = [tiny.square(0, 0, 8, 8), tiny.square(20, 20, 40, 40), tiny.square(8, 8, 16, 16)]
    images = [{"id": i, "file_name": f"{i}.png", "height": 64, "width": 64} for i in (7, 8)]
    owned = [{"id": n, "image_id": image, "category_id": 1, "segmentation": m, "iscrowd": 0, "area": rle.area(m), "bbox": [0, 0, 9, 9]}
             for n, (image, m) in enumerate(zip((7, 7, 8), masks, strict=True), start=1)]  # fmt: skip
    write(
        tmp_path / "val_gcg_coco_mask_gt.json",
        {"images": images, "annotations": owned, "categories": [{"id": 1, "name": "o"}]},
    )
    told = [
        {
            "image_id": i,
            "id": i,
            "caption": "<p> a cat </p> [SEG] on <p> a mat </p> [SEG].",
            "labels": ["a cat"],
        }
        for i in (7, 8)
    ]
    write(tmp_path / "val_gcg_coco_caption_gt.json", {"images": images, "annotations": told})
    other = {"images": [{"id": 9}], "annotations": [], "categories": []}
    # the split that is predicted is the one that is scored
    write(tmp_path / "test_gcg_coco_mask_gt.json", other)
    found = evaluate("gcg", tmp_path, tmp_path / "out", split="val")
    assert found.metrics["mIoU"] == found.metrics["AP50"] == 1.0
    line = json.loads((tmp_path / "out/predictions.jsonl").read_text().splitlines()[0])
    assert (line["caption"], line["phrases"], line["pred_masks"]) == (
        "a cat on a mat.",
        ["a cat", "a mat"],
        masks[:2],
    )
    assert evaluate("gcg", tmp_path, tmp_path / "some", split="val", limit=1).metrics["images"] == 1


def test_region_captions(tmp_path: Path):
    pictures(tmp_path / "images", "a.png", "b.png")
    images = [
        {"id": i, "file_name": name, "height": 64, "width": 64, "caption": f"thing {i}"}
        for i, name in enumerate(("a.png", "b.png", "a.png"))
    ]
    masks = [{"image_id": i, "segmentation": tiny.square(0, 0, 8 + i, 8)} for i in range(3)]
    write(tmp_path / "finetune_refcocog_val_with_mask.json", {"images": images, "annotations": masks})
    runner = SCORERS["refcocog_captions"].runner
    assert runner is not None
    items = list(runner.items(tmp_path, ""))
    assert [item.name for item in items] == ["0", "2", "1"]  # of one picture, one after the other
    assert items[1].request.mask_prompts == (masks[2]["segmentation"],)
    found = evaluate("refcocog_captions", tmp_path, tmp_path / "out")
    assert (found.metrics["captions"], found.metrics["ROUGE_L"]) == (3, 1.0)
    detailed = [
        {"image_path": "images/a.png", "mask_rle": tiny.square(0, 0, 9, 9), "caption": "a red square on grey"}
    ]
    write(tmp_path / "mdvp_caption_mask.json", detailed)
    assert evaluate("detailed_captions", tmp_path, tmp_path / "detailed").metrics["ROUGE_L"] == 1.0


def test_benchmarks_with_a_judge_write_what_the_judge_reads(tmp_path: Path):
    pictures(tmp_path / "images", "a.png")
    square = tiny.square(0, 0, 9, 9)
    image = {"id": 5, "file_name": "a.png", "height": 64, "width": 64}
    write(
        tmp_path / "annotations.json",
        {"images": [image], "annotations": [{"id": 3, "image_id": 5, "segmentation": square}]},
    )
    polygon = {"segmentation": [[1.0, 1.0, 9.0, 1.0, 9.0, 9.0]]}
    region = {"question_id": 0, "image": "a.png", "text": "What is <region> doing?", "annotation": polygon}
    write(tmp_path / "box_refer_caption.json", [region])
    simple = {
        "image": "images/a.png",
        "mask_rles": [square, square],
        "question": "Where is <Prompt1>?",
        "answer": "near <Prompt0>.",
    }
    write(tmp_path / "GAR-Bench-Caption-Simple.json", [simple])
    for name, split, line in (
        ("dlc_bench", "", {"id": "3", "caption": "near region1."}),
        ("ferret_bench", "", {"question_id": 0, "text": "near region1."}),
        ("gar_bench", "caption_simple", {"image": "images/a.png", "model_output": "near <Prompt0>."}),
    ):
        path = predict(name, tmp_path, tmp_path / name, split=split, ask=words("near region1. [SEG]"))
        judging = SCORERS[name].judging
        assert judging is not None
        assert judging.needed(Inputs(predictions=path, data=tmp_path))
        (told,) = path.read_text().splitlines()
        assert line.items() <= json.loads(told).items()
    choices = simple | {"choices": ["A. <Prompt0>", "B. <Prompt1>"], "answer": "B", "type": "mirror"}
    write(tmp_path / "GAR-Bench-VQA.json", [choices])
    runner = SCORERS["gar_bench"].runner
    assert runner is not None
    (item,) = runner.items(tmp_path, "vqa")
    assert item.request.text.splitlines()[1:5] == [
        "Question: Where is region2?",
        "Options:",
        "A. region1",
        "B. region2",
    ]
    assert (
        evaluate("gar_bench", tmp_path, tmp_path / "vqa", split="vqa", ask=words("b")).metrics["vqa/accuracy"]
        == 1.0
    )


def test_questions_about_pictures(tmp_path: Path):
    coded = base64.b64encode(tiny.picture(0)).decode()
    rows = [
        {
            "index": "4",
            "question": "Which?",
            "hint": "Look.",
            "A": "one",
            "B": "two",
            "C": "three",
            "answer": "B",
            "category": "x",
            "image": coded,
        },
        {
            "index": "5",
            "question": "Who?",
            "hint": "",
            "A": "me",
            "B": "you",
            "C": "",
            "answer": "A",
            "category": "y",
            "image": "4",
        },
    ]
    with (tmp_path / "mmbench_dev_en.tsv").open("w") as file:
        table = csv.DictWriter(file, list(rows[0]), delimiter="\t")
        table.writeheader()
        table.writerows(rows)
    runner = SCORERS["mmbench"].runner
    assert runner is not None
    items = list(runner.items(tmp_path, ""))
    assert [(item.name, item.facts["answer"]) for item in items] == [
        ("4", "B"),
        ("1000004", "A"),
        ("2000004", "C"),
        ("5", "A"),
        ("1000005", "B"),
    ]
    assert items[1].request.text.splitlines()[1:6] == ["Look.", "Which?", "A. two", "B. three", "C. one"]
    assert items[3].request.frames == items[0].request.frames
    assert evaluate("mmbench", tmp_path, tmp_path / "mmbench").metrics["accuracy"] == 1.0
    assert evaluate("mmbench", tmp_path, tmp_path / "always a", ask=words("A")).metrics == pytest.approx(
        {"accuracy": 0, "accuracy_first_pass": 0.5, "unparsed": 0} | {f"{k}{g}": v for g, n in (("", 2), ("/x", 1), ("/y", 1))
         for k, v in (("accuracy", 0), ("correct", 0), ("count", n))})  # fmt: skip


def test_mmbench_of_a_table_that_holds_the_rotations_and_a_limit_takes_whole_questions(tmp_path: Path):
    """The published table has the copies after all questions, and their pictures by the first one's index."""
    coded = base64.b64encode(tiny.picture(0)).decode()
    lines = ["index\tquestion\thint\tA\tB\tC\tanswer\tcategory\timage"]
    lines += [f"{n}\tWhich?\t\ta{n}\tb{n}\t\tA\tx\t{coded}" for n in range(4)]
    lines += [f"{1_000_000 + n}\tWhich?\t\tb{n}\ta{n}\t\tB\tx\t{n}" for n in range(4)]
    (tmp_path / "MMBench_DEV_EN.tsv").write_text("\n".join(lines) + "\n")
    found = evaluate("mmbench", tmp_path, tmp_path / "all")
    assert (found.metrics["accuracy"], found.metrics["count"]) == (1.0, 4)
    predictions = predict("mmbench", tmp_path, tmp_path / "some", limit=3)
    asked = [json.loads(line)["index"] for line in predictions.read_text().splitlines()]
    assert asked == [0, 2, 1_000_000, 1_000_002]
    assert SCORERS["mmbench"].score(Inputs(predictions=predictions)).metrics["accuracy"] == 1.0


def test_seed_bench_and_mmmu(tmp_path: Path):
    pictures(tmp_path / "SEED-Bench-image", "p1", "p2")
    question = {"question": "How many?", "data_type": "image", "question_type_id": 5, "answer": "C"}
    question |= {
        f"choice_{letter}": text for letter, text in zip("abcd", ("one", "two", "three", "four"), strict=True)
    }
    listed = [question | {"question_id": f"{n}", "data_id": f"p{n}"} for n in (1, 2)] + [
        question | {"data_type": "video", "question_id": "9"}
    ]
    write(tmp_path / "SEED-Bench.json", {"questions": listed})
    assert evaluate("seed_bench", tmp_path, tmp_path / "seed").metrics["accuracy/5"] == 1.0
    assert (
        evaluate("seed_bench", tmp_path, tmp_path / "silent", ask=words("Well.")).metrics["accuracy"] == 0.0
    )
    write(tmp_path / "SEED-Bench.json", {"questions": [listed[0], listed[1] | {"question_id": "1"}]})
    twice = evaluate("seed_bench", tmp_path, tmp_path / "twice")
    assert [sample["question_id"] for sample in twice.samples] == ["5_1", "5_1"]
    assert [line["sample"] for line in SCORERS["seed_bench"].table(twice)] == ["5_1", "5_1/2"]
    write(
        tmp_path / "first.json",
        [{"question_id": name, "prediction": "A", "gt_answer": "A"} for name in ("101669", "103960")],
    )
    first = SCORERS["seed_bench"].score(Inputs(predictions=tmp_path / "first.json")).metrics
    assert first == {
        "accuracy": 1.0,
        "correct": 2,
        "count": 2,
        "correct_with_blanks": 2,
        "accuracy_with_blanks": 1.0,
    }

    picture = {"bytes": tiny.picture(0), "path": "x.png"}
    rows = [
        {
            "id": "validation_Art_1",
            "question": "<image 1> Which?",
            "options": "['me', 'you']",
            "answer": "B",
            "question_type": "multiple-choice",
        },
        {
            "id": "validation_Art_2",
            "question": "How far?",
            "options": "[]",
            "answer": "['7 m', '7']",
            "question_type": "open",
        },
    ]
    (tmp_path / "mmmu/Art").mkdir(parents=True)
    parquet.write_table(
        pyarrow.Table.from_pylist([row | {"image_1": picture} for row in rows]),
        tmp_path / "mmmu/Art/validation-00000-of-00001.parquet",
    )

    def ask(items: Sequence[Item]) -> list[Prediction]:
        assert items[0].request.text.splitlines()[1:4] == ["Which?", "A. me", "B. you"]
        return [Prediction(text="(B)"), Prediction(text="It is 7.")]

    found = evaluate("mmmu_val", tmp_path / "mmmu", tmp_path / "out", split="validation", ask=ask)
    assert (found.metrics["accuracy"], found.metrics["count/Art"]) == (1.0, 2)


def test_mme_and_a_plain_file_of_its_questions(tmp_path: Path):
    pictures(tmp_path / "count", "a.png")
    (tmp_path / "count/a.txt").write_text(
        "Is there one? Please answer yes or no.\tYes\nAre there two? Please answer yes or no.\tNo\n"
    )
    found = evaluate("mme", tmp_path, tmp_path / "out")
    assert (found.metrics["accuracy/count"], found.metrics["accuracy_plus/count"]) == (1.0, 1.0)
    assert evaluate("mme", tmp_path, tmp_path / "yes", ask=words("Yes.")).metrics["score/count"] == 50.0
    arguments = cli.parse(
        ["eval", "export", "mme", "--data", str(tmp_path), "--out", str(tmp_path / "plain")]
    )
    assert arguments.function(arguments) == 0
    first, _ = map(json.loads, (tmp_path / "plain/questions.jsonl").read_text().splitlines())
    assert (first["text"], first["pictures"]) == (
        "Is there one? Please answer yes or no.",
        [str(tmp_path / "count/a.png")],
    )


def test_a_limit_of_mme_takes_both_questions_of_a_picture(tmp_path: Path):
    pictures(tmp_path / "count", "a.png", "b.png", "c.png")
    for name in "abc":
        (tmp_path / f"count/{name}.txt").write_text("Is there one?\tYes\nAre there two?\tNo\n")
    found = evaluate("mme", tmp_path, tmp_path / "out", limit=3)
    assert (found.metrics["accuracy_plus/count"], found.metrics["questions"]) == (1.0, 4)


def test_reasonseg_asks_a_sentence_as_it_is_and_scores_short_and_long_queries(tmp_path: Path):
    """b: 10 x 10 pixels of which 5 columns are to be ignored: what is drawn there does not count."""
    pictures(tmp_path / "val", "a.jpg", "b.jpg")
    square = {"label": "target", "points": [[2, 2], [11, 2], [11, 11], [2, 11]]}
    hidden = {"label": "Ignore", "points": [[2, 2], [6, 2], [6, 11], [2, 11]]}
    for name, text, sentence, shapes in (
        ("a", "Who is it?", True, [square]),
        ("b", "the cat", False, [hidden, square]),
    ):
        write(
            tmp_path / "val" / f"{name}.json",
            {"text": [text, "other"], "is_sentence": sentence, "shapes": shapes},
        )
    runner = SCORERS["reasonseg"].runner
    assert runner is not None
    assert [item.request.text for item in runner.items(tmp_path, "val")] == [
        "<image>\n Who is it? Please respond with a segmentation mask.",
        "<image>\n Please segment the cat in this image.",
    ]  # fmt: skip
    assert runner.split_of is not None
    assert [runner.split_of(folder) for folder in (tmp_path, tmp_path / "val")] == ["val", "val"]

    def ask(items: Sequence[Item]) -> list[Prediction]:
        return [
            Prediction(text="", masks=((tiny.square(2, 2, 12, 12 if item.name == "b" else 7),),))
            for item in items
        ]

    found = evaluate("reasonseg", tmp_path / "val", tmp_path / "run", ask=ask)
    assert found.metrics["short/gIoU"] == pytest.approx(1.0, abs=2e-5)
    assert found.metrics["long/gIoU"] == pytest.approx(0.5, abs=2e-5)
    assert found.metrics["cIoU"] == pytest.approx(100 / 150, abs=1e-6)
    assert (found.metrics["questions"], found.metrics["long/questions"]) == (2, 1)
    assert found.ratios["long/gIoU"].value == 0.5
    masks = [{"id": name, "mask": tiny.square(2, 2, 12, 12)} for name in "ab"]
    masks[1] |= {"mask": tiny.square(2, 7, 12, 12), "ignore": tiny.square(2, 2, 12, 7), "is_sentence": False}
    again = SCORERS["reasonseg"].score(
        Inputs(predictions=tmp_path / "run/predictions.jsonl", data=write(tmp_path / "truth.jsonl", masks))
    )
    assert again.metrics == {
        key: value for key, value in found.metrics.items() if not key.startswith("long/")
    }
