"""What people get wrong, and what damage does: refused by file and record, never a traceback."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ans_core.data import is_held_out, pictures, shard
from ans_core.data.exports import cvat, import_export
from ans_core.data.formats import FORMATS, SPLITS, infer, shards
from ans_core.data.formats.checks import DataError
from ans_core.data.formats.plain import split_by_image
from ans_core.data.pictures import check_pictures
from ans_core.data.scene_write import write_clips, write_scenes
from ans_core.nearest_file import hint
from ans_core.pictures import rle
from ans_core.stages.sources import source_entries
from tests import picture_sets, tiny
from tests.data.test_formats import GOOD, block, png, region, write_annotations, write_refs, write_regions
from tests.data.test_prepare import own_data

POLYGON = [2, 1, 5, 1, 5, 3, 2, 3]


def read(root: Path, *records: Any, split: str = "train") -> list[Any]:
    return list(FORMATS["annotations"](write_annotations(root, *records), name="mine", split=split))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"masks": [[1e308, *POLYGON[1:]]]},
            r"record 0, mask 0: a polygon reaches 1e\+308, far outside of the picture of 8 x 6",
        ),
        ({"masks": [[10**400, *POLYGON[1:]]]}, "record 0, mask 0: a polygon reaches a number of 1329 bits"),
        ({"masks": [[*POLYGON[:-1], "3"]]}, "record 0, mask 0: a polygon holds '3', which is no number"),
        (
            {"masks": [[0.1, 0.2, 0.9, 0.2, 0.9, 0.8]]},
            r"coordinates lie in \[0, 1\], .* multiply x by its width \(8\) and y by its height \(6\)",
        ),
        (
            {"masks": [{"size": [6.0, 8], "counts": "=24000a0"}]},
            r"record 0, mask 0: RLE size is \[6.0, 8\], not two whole numbers",
        ),
        (
            {"masks": [{"size": [6, 8], "counts": "=24000a"}]},
            "record 0, mask 0: RLE counts '=24000a' have an end in the middle of a number",
        ),
        ({"masks": None}, "record 0: masks is None: Input should be a valid list"),
        ({"image": "../a.png"}, "record 0: '../a.png' is no file inside"),
        ({"image": "/etc/passwd"}, "record 0: '/etc/passwd' is no file inside"),
        ({"image": "a\0.png"}, "record 0: .* is no file inside"),
        (
            {"split": "validation"},
            "record 0: split is 'validation': splits are train, val and test; write 'val'",
        ),
        ({"split": "vall"}, "record 0: split 'vall' is not one of 'train', 'val' or 'test'"),
        ({"text": "\u200b\u200b"}, "record 0: the text is "),
        ({"text": "the\0dog"}, "record 0: the text .* holds control characters"),
        ({"text": "the dog [SEG]"}, r"record 0: the text holds '\[SEG\]'"),
        ({"text": 7}, "record 0: text is 7: Input should be a valid string"),
    ],
)
def test_a_wrong_value_is_named_with_its_record(tmp_path, change, message):
    with pytest.raises(DataError, match=message) as caught:
        read(tmp_path, GOOD | change)
    assert str(tmp_path / "annotations.json") in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[" * 100_000, "recursion limit"),
        (b"[" + b"1" * 5000 + b"]", "number out of range"),
        (json.dumps([GOOD]).encode("utf-16"), "is UTF-16; save it as UTF-8"),
        ('[{"image": "é"}]'.encode("latin-1"), "is not JSON in UTF-8"),
        (b'[{"text": "a\0b"}]', "control character"),
        (b'[{"text": "a", "text": "b"}]', 'duplicate key "text"'),
        (b"", "EOF while parsing"),
        (b"[]", "expected a list with at least one record"),
        (
            b'{"image": "a.png"}\n{"image": "a.png"}',
            r"one record per line \(JSON Lines\) belongs into a file \*\.jsonl",
        ),
        (
            b'{"images": [], "annotations": [], "categories": []}',
            "is a COCO file .* the format coco.* For other texts, write one record for each",
        ),
    ],
)
def test_a_file_that_is_not_a_list_of_records_is_named(tmp_path, content, message):
    (tmp_path / "annotations.json").write_bytes(content)
    for reader in (
        lambda: list(FORMATS["annotations"](tmp_path, name="mine", split="train")),
        lambda: SPLITS["annotations"](tmp_path),
    ):
        with pytest.raises(DataError, match=message) as caught:
            reader()
        assert str(tmp_path / "annotations.json") in str(caught.value)


def test_samples_come_one_by_one_and_a_fault_is_told_at_the_end(tmp_path):
    records = [GOOD, GOOD | {"text": 7}, GOOD | {"text": "a cat"}]
    write_annotations(tmp_path, *records)
    (tmp_path / "annotations.json").unlink()
    (tmp_path / "annotations.jsonl").write_text("\n".join(map(json.dumps, records)))
    samples = FORMATS["annotations"](tmp_path, name="mine", split="train")
    assert next(samples).text == GOOD["text"]
    assert next(samples).text == "a cat"
    with pytest.raises(DataError, match="line 2: text is 7"):
        next(samples)


def test_a_byte_order_mark_and_json_lines_are_read(tmp_path):
    # U+2028 ends a line for str.splitlines
    text = json.dumps(GOOD | {"text": "a dog\u2028asleep"}, ensure_ascii=False)
    (tmp_path / "annotations.json").write_bytes(b"\xef\xbb\xbf" + f"[{text}]".encode())
    png(tmp_path / "a.png")
    (whole,) = FORMATS["annotations"](tmp_path, name="mine", split="train")
    (tmp_path / "annotations.json").unlink()
    (tmp_path / "annotations.jsonl").write_text(f"{text}\n\n", encoding="utf-8")
    (line,) = FORMATS["annotations"](tmp_path, name="mine", split="train")
    assert (whole.text, whole.masks) == (line.text, line.masks)


def test_up_to_20_faults_are_told_and_the_rest_counted(tmp_path):
    with pytest.raises(DataError) as caught:
        read(tmp_path, GOOD, *(GOOD | {"text": f"t{n}", "masks": [[*POLYGON, 0, "0"]]} for n in range(25)))
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("annotations.json: 25 faults")
    assert len(lines) == 1 + 20 + 1
    assert "record 20, mask 0: a polygon holds '0'" in lines[20]
    assert lines[21].strip() == "... and 5 more"


def test_a_folder_with_two_files_of_records_is_refused(tmp_path):
    (tmp_path / "annotations.jsonl").write_text(json.dumps(GOOD))
    with pytest.raises(
        DataError, match=r"has annotations.json and annotations.jsonl, and one would not be read"
    ):
        read(tmp_path, GOOD)


def test_spellings_of_a_path_and_blanks_at_the_end_of_a_text_are_one(tmp_path):
    names = [f"pictures/{n}.png" for n in range(12)]
    assert {split_by_image(name) for name in names} == {"train", "val"}
    (tmp_path / "pictures").mkdir()
    for name in names:
        png(tmp_path / name)
    records = [
        {"image": form.format(name), "text": f"dog {form}", "masks": [POLYGON]}
        for name in names
        for form in ("{}", ".//{}")
    ]
    for split in ("train", "val"):
        found = Counter(sample.image_id for sample in read(tmp_path, *records, split=split))
        assert found == {name: 2 for name in names if split_by_image(name) == split}
    same = GOOD | {"text": GOOD["text"] + " ", "image": f"./{GOOD['image']}"}
    with pytest.raises(DataError, match="record 1: same image and text as record 0"):
        read(tmp_path, GOOD, same)


def test_a_question_and_its_answer_are_a_conversation_about_regions(tmp_path):
    asked = {
        "image": "a.png",
        "question": "Is region1 larger than region2?",
        "answer": "Yes.",
        "regions": [POLYGON, block()],
        "split": "train",
    }
    plain = {"image": "a.png", "question": "What is in the picture?", "answer": "A dog.", "split": "train"}
    first, second = read(tmp_path, asked, plain)
    assert (first.task, first.question, first.text, len(first.masks)) == (
        "conversation",
        asked["question"],
        "Yes.",
        2,
    )
    assert (second.task, second.question, second.text, second.masks) == (
        "conversation",
        plain["question"],
        "A dog.",
        (),
    )
    for change, message in (
        ({"question": "Is region3 red?"}, "the question asks about region3, and regions has 2"),
        ({"answer": " "}, "record 0, answer: the text is ' '"),
        (
            {"masks": [POLYGON]},
            r"unknown keys \['masks'\]; known are \['answer', 'image', 'question', 'regions', 'split', 'task'\]",
        ),
        ({"question": "<image>What?"}, "holds '<image>'"),
    ):
        with pytest.raises(DataError, match=message):
            read(tmp_path, asked | change)


def test_two_regions_of_one_caption_are_two_samples(tmp_path):
    other = {"size": [6, 8], "counts": [0, 1, 47]}
    region = GOOD | {"task": "region_caption"}
    assert len(read(tmp_path, region, region | {"masks": [other]})) == 2
    with pytest.raises(DataError, match="record 1: same image and text as record 0"):
        read(tmp_path, region, region)


def test_every_twin_of_a_record_is_named_with_the_first_and_counted_once(tmp_path):
    other = GOOD | {"text": "another"}
    with pytest.raises(DataError) as refused:
        read(tmp_path, GOOD, other, GOOD, GOOD, other)
    lines = re.findall(r"record (\d): same image and text as record (\d)", str(refused.value))
    assert lines == [("2", "0"), ("3", "0"), ("4", "1")]
    assert ": 3 faults" in str(refused.value)


def test_pictures_of_another_size_and_masks_of_another_picture_are_named(tmp_path):
    write_refs(tmp_path)
    instances = json.loads((tmp_path / "instances.json").read_text())
    (tmp_path / "instances.json").write_text(
        json.dumps(instances | {"images": [{"id": 1, "file_name": "a.png", "height": 12, "width": 16}]})
    )
    with pytest.raises(
        DataError,
        match=r"image 1: the annotations are of a picture of \[height, width\] = \[12, 16\], the file has \[6, 8\]",
    ):
        list(FORMATS["refcoco"](tmp_path, name="d", split="train"))
    instances["annotations"][0]["image_id"] = 2
    (tmp_path / "instances.json").write_text(json.dumps(instances))
    with pytest.raises(DataError, match="ref_id 0: image_id is 1, and ann_id 7 belongs to image 2"):
        list(FORMATS["refcoco"](tmp_path, name="d", split="train"))


def test_a_pickle_of_deep_or_damaged_content_is_named(tmp_path):
    write_refs(tmp_path)
    whole = (tmp_path / "refs(unc).p").read_bytes()
    nested = b"(" * 20_000 + b"l" * 20_000 + b"."  # lists in lists
    for content in (nested, whole[: len(whole) // 2], whole.replace(b"sentences", b"\xff" * 9), b"2" * 40):
        (tmp_path / "refs(unc).p").write_bytes(content)
        with pytest.raises(DataError, match=r"refs\(unc\).p"):
            list(FORMATS["refcoco"](tmp_path, name="d", split="train"))


def test_an_empty_manifest_is_named(tmp_path):
    for form in ("regions", "videos"):
        with pytest.raises(DataError, match=r"manifest\.jsonl holds no record"):
            list(FORMATS[form](write_regions(tmp_path, "", " "), name="d", split="val"))


@pytest.mark.parametrize("kind", ["cut", "flipped", "huge", "text"])
def test_a_picture_that_cannot_be_decoded_is_named_with_its_sample(tmp_path, kind):
    noise = np.random.default_rng(0).integers(0, 255, (64, 64, 3), dtype=np.uint8)
    folder = write_annotations(tmp_path, GOOD | {"masks": []})
    Image.fromarray(noise).save(tmp_path / "a.png")
    content = (tmp_path / "a.png").read_bytes()
    damaged = {
        "cut": content[: len(content) // 2],
        # pixels that Pillow decodes without a word
        "flipped": content[:5000] + bytes([content[5000] ^ 1]) + content[5001:],
        "huge": content[:16] + (30_000).to_bytes(4) * 2 + content[24:],
        "text": b"no picture",
    }
    (tmp_path / "a.png").write_bytes(damaged[kind])
    with pytest.raises(DataError, match=r"(record|sample) 0: .*a\.png"):
        check_pictures(list(FORMATS["annotations"](folder, name="mine", split="train")), where=str(folder))


@pytest.mark.slow
def test_processes_check_many_pictures_and_a_share_of_them_is_the_same_every_time(tmp_path, monkeypatch):
    samples = []
    for number in range(60):
        (tmp_path / f"{number}.jpg").write_bytes(b"no picture")
        samples.append(replace(tiny.sample(number), frames=(tmp_path / f"{number}.jpg",)))
    told = []
    for many in (100, 2):  # threads, then processes
        monkeypatch.setattr(pictures, "MANY", many)
        for share in (1.0, 0.3):
            with pytest.raises(DataError) as raised:
                check_pictures(samples, where="set", share=share)
            told.append(str(raised.value))
    assert told[:2] == told[2:]
    assert "set: 60 faults" in told[0]
    count = int(re.search(r"set: (\d+) faults", told[1])[1])
    assert 6 < count < 30
    assert check_pictures(samples, where="set", share=0.0) == []
    trained = [sample for sample in samples if not is_held_out(sample.image_id, share=0.3)]
    with pytest.raises(DataError, match="faults"):  # the share is not the one that is held out
        check_pictures(trained, where="set", share=0.3)


@pytest.mark.slow
def test_processes_parse_many_shards_and_name_every_damaged_one(tmp_path, monkeypatch):
    monkeypatch.setattr(shard, "SHARD_BYTES", 1)
    for number in range(6):
        Image.new("RGB", (40, 20), (40 * number, 0, 0)).save(tmp_path / f"{number}.png")
    records = [
        {"image": f"{number}.png", "masks": [POLYGON], "text": f"thing {number}", "split": "train"}
        for number in range(6)
    ]
    (tmp_path / "annotations.json").write_text(json.dumps(records))
    shard.shard(tmp_path, "annotations", tmp_path / "shards")
    read_shards = partial(FORMATS["shards"], tmp_path / "shards", name="mine", split="train")
    expected = list(read_shards())
    assert [sample.text for sample in expected] == [f"thing {number}" for number in range(6)]
    monkeypatch.setattr(shards, "MANY", 1)
    assert list(read_shards()) == expected
    damaged = sorted((tmp_path / "shards/train").iterdir())[::2]
    for file in damaged:
        file.write_bytes(file.read_bytes().replace(b'"sample_id"', b'"sample_ID"'))
    with pytest.raises(DataError, match="3 faults") as raised:
        list(read_shards())
    assert all(f"{file}: " in str(raised.value) for file in damaged)


def test_a_long_and_narrow_picture_is_in_the_report(tmp_path):
    from ans_core.data import DatasetEntry
    from ans_core.data.report import write_report

    Image.new("RGB", (1, 900)).save(tmp_path / "thin.png")
    asked = {"image": "thin.png", "question": "What is it?", "answer": "A line.", "split": "train"}
    entry = DatasetEntry(name="mine", format="annotations", path=str(tmp_path), split="train", kind="extra")
    write_report(tmp_path / "report.html", {entry: read(tmp_path, asked)})
    assert "What is it? A line." in (tmp_path / "report.html").read_text()


def test_data_without_val_is_warned_of(tmp_path, caplog):
    source = own_data(tmp_path)
    records = json.loads((tmp_path / "annotations.json").read_text())
    assert source_entries((source,))[1].split == "val"
    assert not caplog.records
    (tmp_path / "annotations.json").write_text(json.dumps(records[:1]))
    with caplog.at_level(logging.WARNING):
        source_entries((source,))
    assert 'a split "train" and none "val"' in caplog.text


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drawn")
    write_scenes(root, seed=0, counts={"train": 2, "val": 0, "test": 0}, image_size=32)
    write_clips(root, seed=0, counts={"train": 1}, image_size=32, frames=2)
    shutil.copytree(root / "images", root / "regions/images")
    shutil.copytree(root / "images", root / "plain/images")
    captions = json.loads((root / "grounded/train.json").read_text())
    masks = [
        mask
        for caption in captions
        for grounding in caption["groundings"].values()
        for mask in grounding["rle_masks"]
    ][:2]
    line = json.loads(region(image="images/train_000000.png", segmentation=masks[0], caption="a dog"))
    (root / "regions/manifest.jsonl").write_text(json.dumps(line))
    own = [
        GOOD | {"image": line["image"], "masks": masks},
        {"image": line["image"], "question": "What?", "answer": "It.", "split": "train"},
    ]
    (root / "plain/annotations.json").write_text(json.dumps(own))
    picture_sets.write(root, picture_sets.draw(1, image_size=32))
    return root


def test_every_layout_is_told_by_its_files(drawn):
    folders = {
        "annotations": "plain",
        "refcoco": "refcoco",
        "grefcoco": "grefcoco",
        "region_arrow": "region_captions",
        "grandf": "grounded",
    }
    folders |= {"mevis": "mevis", "regions": "regions"}
    assert {infer(drawn / folder): folder for folder in folders.values()} == folders


NFC, NFD = "caf\u00e9.png", "cafe\u0301.png"


@pytest.mark.parametrize(
    ("there", "name", "difference"),
    [
        ("images/a.png", "images\\a.png", "backslashes"),
        ("images/a.png", "D:\\set\\images\\a.png", "backslashes"),
        (f"images/{NFD}", f"images/{NFC}", r"Unicode form of its letters \(NFC"),
        (f"images/{NFC}", f"images/{NFD.upper()}", "upper and lower case, the Unicode form"),
        ("images/A.PNG", "Images/a.png", "upper and lower case"),
        ("images/a.png", "images/a.jpg", r"suffix \(\.jpg and \.png\)"),
        ("images/a b.png", "images/a b .png", "blanks"),
    ],
)
def test_a_picture_that_is_named_otherwise_is_told_with_the_difference(tmp_path, there, name, difference):
    """The remedy is tried: with the file's own name the set is read. Exports are read with backslashes,
    too."""
    (tmp_path / "images").mkdir()
    png(tmp_path / there)
    (tmp_path / "images/a.txt").touch()  # never offered
    if "\\" in name:
        read_cvat(tmp_path, name)
    for read_set in (read_plain, read_coco) if "\\" in name else (read_plain, read_coco, read_cvat):
        with pytest.raises(
            DataError,
            match=rf"; {re.escape(str(tmp_path / there))} is there, .*differs in .*{difference}.*: correct",
        ):
            read_set(tmp_path, name)
        read_set(tmp_path, there)


def test_thousands_of_missing_pictures_read_a_folder_once(tmp_path, monkeypatch):
    for n in range(3):
        png(tmp_path / f"{n}.png")
    listed = []
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: listed.append(self) or iterdir(self))
    assert all(hint(tmp_path / f"{n}.jpg") for n in range(3))
    assert hint(tmp_path / "other.jpg") == ""
    assert len(listed) == 1


OTHER = [4, 3, 7, 3, 7, 5, 4, 5]


def of(image: Any, category: Any, shape: Any = POLYGON, **more: Any) -> dict[str, Any]:
    return {
        "image_id": image,
        "category_id": category,
        "segmentation": [shape] if shape and type(shape[0]) is int else shape,
        **more,
    }


@pytest.mark.parametrize(
    ("names", "categories", "annotations"),
    [
        (["a.png"], ("dog", "dog"), [of(0, 0), of(0, 1, OTHER)]),
        (["a.png"], ("hot dog", " hot  dog "), [of(0, 0), of(0, 1, OTHER)]),
        (["a.png"], ("caf\u00e9", "cafe\u0301"), [of(0, 0), of(0, 1, OTHER)]),
        (["a.png", "a.png"], ("dog",), [of(0, 0), of(1, 0, OTHER)]),
        (["a.png", "./a.png"], ("dog",), [of(0, 0), of(1, 0, OTHER)]),
    ],
)
def test_what_has_two_numbers_in_coco_is_one_sample_with_all_objects(
    tmp_path, caplog, names, categories, annotations
):
    png(tmp_path / "images/a.png")
    (sample,) = FORMATS["coco"](
        write_coco(tmp_path, names, annotations, categories), name="mine", split="train"
    )
    assert [rle.area(mask) for (mask,) in sample.masks] == [6, 6]
    assert (sample.sample_id, sample.image_id) == ("0_0", "0")
    assert "1 categories have the name" in caplog.text or "1 images have the file" in caplog.text
    lines = import_export(tmp_path, tmp_path / "imported")
    assert "1 pictures, 1 referring records, 2 masks" in lines[0]
    assert not any("left out" in line for line in lines)
    (again,) = FORMATS["annotations"](tmp_path / "imported", name="mine", split="train")
    assert again.masks == sample.masks


def test_one_picture_twice_in_an_export_is_one_record_of_each_text(tmp_path):
    """Projects of CVAT hold a picture in two tasks."""
    png(tmp_path / "images/a.png")
    box = '<box label="dog" xtl="{0}" ytl="1" xbr="{1}" ybr="4"/>'
    image = '<image id="{2}" name="a.png" width="8" height="6" subset="{3}">' + box + "</image>"

    def export(*images: tuple[Any, ...]) -> Path:
        text = "".join(image.format(*values) for values in images)
        (tmp_path / "a.xml").write_text(f"<annotations>{text}</annotations>")
        return tmp_path / "a.xml"

    import_export(export((1, 3, 0, "train"), (5, 8, 1, "train"), (5, 8, 2, "train")), tmp_path / "one")
    (sample,) = FORMATS["annotations"](tmp_path / "one", name="mine", split="train")
    assert [rle.area(mask) for (mask,) in sample.masks] == [6, 9]
    with pytest.raises(DataError, match=r"a\.png with 'dog' is in the splits train and val; leave it in one"):
        import_export(export((1, 3, 0, "train"), (5, 8, 1, "val")), tmp_path / "two")
    import_export(export((1, 3, 0, "train"), (2, 2, 1, "train")), tmp_path / "three")  # a box without a pixel


def test_polygons_of_fewer_than_3_points_are_left_out_and_counted(tmp_path, caplog):
    png(tmp_path / "a.png")
    annotations = [
        of(0, 0, [[4, 3], POLYGON]),
        of(0, 0, [[4, 3]]),
        of(0, 0, [[1, 1, 5, float("nan"), 5, 4]]),
        of(0, 0, None),
        of(0, 0, []),
    ]
    (sample,) = FORMATS["coco"](write_coco(tmp_path, ["a.png"], annotations), name="mine", split="train")
    assert [rle.area(mask) for (mask,) in sample.masks] == [6]
    assert "1 polygons of fewer than 3 points are left out" in caplog.text
    assert "4 records are left out: 4 with no mask" in caplog.text
    caplog.clear()
    (plain,) = read(tmp_path, GOOD | {"masks": [[[4, 3], POLYGON]]})
    assert (plain.masks, "1 polygons of fewer" in caplog.text) == (sample.masks, True)
    with pytest.raises(
        DataError,
        match=r"instances_train\.json: no record can be used: 1 with no mask: no polygon \[x1, y1, x2, y2",
    ):
        list(
            FORMATS["coco"](
                write_coco(tmp_path, ["a.png"], [of(0, 0, [[[2, 1], [5, 1]]])]),
                name="mine",
                split="train",
            )
        )


def test_a_box_is_the_mask_of_an_object_without_an_outline_in_all_commands(tmp_path, caplog):
    png(tmp_path / "images/a.png")
    empty = [of(0, 0, shape, bbox=[2, 1, 3, high]) for high, shape in enumerate(([], [[]], None), start=1)]
    (sample,) = FORMATS["coco"](write_coco(tmp_path, ["a.png"], empty), name="mine", split="train")
    assert [rle.area(mask) for (mask,) in sample.masks] == [3, 6, 9]
    assert "3 objects have a box and no outline: the box is their mask" in caplog.text
    assert "3 masks" in import_export(tmp_path, tmp_path / "imported")[0]
    twice = [*empty, empty[0] | {"id": 9}]
    write_coco(tmp_path, ["a.png"], twice)
    lines = import_export(tmp_path, tmp_path / "once")
    assert "3 masks" in lines[0]
    assert not any(line.startswith("left out") for line in lines)


@pytest.mark.parametrize(("image", "category"), [("0", "0"), (0.0, 0.0), ("0", 0)])
def test_ids_as_texts_and_in_floating_point_and_unknown_sizes_are_read(tmp_path, image, category):
    png(tmp_path / "a.png")
    write_coco(tmp_path, ["a.png"], [of(image, category, iscrowd=0.0)])
    content = json.loads((tmp_path / "instances_train.json").read_text())
    for width, height in ((-1, -1), (8.0, 6.0), (0, 0)):
        content["images"][0] |= {"width": width, "height": height}
        (tmp_path / "instances_train.json").write_text(json.dumps(content))
        (sample,) = FORMATS["coco"](tmp_path, name="mine", split="train")
        assert (sample.sample_id, sample.width, sample.height) == ("0_0", 8, 6)
    content["images"][0]["id"] = 0.5
    (tmp_path / "instances_train.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"image 0: id is 0\.5: expected a whole number or a text"):
        list(FORMATS["coco"](tmp_path, name="mine", split="train"))


def read_plain(root: Path, name: str) -> None:
    (root / "annotations.json").write_text(json.dumps([GOOD | {"image": name, "split": "train"}]))
    list(FORMATS["annotations"](root, name="mine", split="train"))


def read_coco(root: Path, name: str) -> None:
    write_coco(root, [name], [{"image_id": 0, "category_id": 0, "segmentation": [POLYGON]}])
    list(FORMATS["coco"](root, name="mine", split="train"))


def read_cvat(root: Path, name: str) -> None:
    box = '<box label="dog" xtl="1" ytl="1" xbr="4" ybr="4"/>'
    (root / "a.xml").write_text(
        f'<annotations><image id="0" name="{name}" width="8" height="6">{box}</image></annotations>'
    )
    cvat.read(root, root / "a.xml")


def write_coco(
    root: Path, names: list[str], annotations: list[dict[str, Any]], categories: tuple[str, ...] = ("dog",)
) -> Path:
    """Pictures and categories are numbered from 0."""
    images = [{"id": n, "file_name": name} for n, name in enumerate(names)]
    content = {
        "images": images,
        "annotations": annotations,
        "categories": [{"id": n, "name": c} for n, c in enumerate(categories)],
    }
    (root / "instances_train.json").write_text(json.dumps(content))
    return root
