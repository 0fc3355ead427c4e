"""Readers of annotation files: what they give back, and what they refuse."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
from datasets import Dataset, Features, Image, Value
from PIL import Image as Pictures

from ans_core.data import read_samples
from ans_core.data.formats import FORMATS, SPLITS
from ans_core.data.formats.checks import DataError
from ans_core.data.formats.plain import split_by_image
from ans_core.data.scene_text import grounded_caption, region_caption
from ans_core.data.scene_write import write_clips, write_scenes
from ans_core.data.scenes import draw_scene
from ans_core.pictures import rle, transforms
from ans_core.types import FilePart

REFERENCE = Path(os.environ.get("ANS_REFERENCE", Path(__file__).resolve().parents[2] / "../shared"))
needs_reference = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason=f"no reference data at {REFERENCE} (set ANS_REFERENCE)"
)
COUNTS = {"train": 12, "val": 6, "test": 4}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("drawn")
    write_scenes(root, seed=0, counts=COUNTS, image_size=64)
    write_clips(root, seed=0, counts={"train": 2, "val": 3}, image_size=64, frames=4)
    return root


def png(path: Path, *, width: int = 8, height: int = 6) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Pictures.new("RGB", (width, height)).save(path)
    return path


def block(*, height: int = 6, width: int = 8) -> dict[str, object]:
    mask = np.zeros((height, width), bool)
    mask[1:3, 2:5] = True
    return rle.encode(mask)


@pytest.mark.parametrize("form", sorted(SPLITS))
def test_a_folder_without_a_data_set_is_refused_by_name(tmp_path: Path, form: str) -> None:
    if form == "starqa":
        (tmp_path / "STAR_test.json").write_text("[]")  # which has no answers
    with pytest.raises(DataError, match=str(tmp_path)):
        SPLITS[form](tmp_path)


def test_every_format_tells_its_splits():
    assert set(FORMATS) == set(SPLITS)


@pytest.mark.parametrize(
    ("form", "folder"),
    [
        ("refcoco", "refcoco"),
        ("grefcoco", "grefcoco"),
        ("region_arrow", "region_captions"),
        ("grandf", "grounded"),
    ],
)
def test_splits_share_no_scene(drawn, form, folder):
    images: dict[str, set[object]] = {
        s: {x.frames[0] for x in FORMATS[form](drawn / folder, name="d", split=s)} for s in COUNTS
    }
    assert all(images[s] and all(f.name.startswith(s) for f in images[s]) for s in COUNTS)
    with pytest.raises(ValueError, match=r"no split 'dev'; it has \['test', 'train', 'val'\]"):
        list(FORMATS[form](drawn / folder, name="d", split="dev"))


def test_what_was_drawn_is_read_back(drawn):
    scene = draw_scene(seed=0, split="val", index=2, image_size=64)
    regions = [
        s
        for s in FORMATS["region_arrow"](drawn / "region_captions", name="d", split="val")
        if s.frames[0].name == "val_000002.png"
    ]
    assert [s.text for s in regions] == [region_caption(t) for t in scene.things]
    assert (np.stack([rle.decode(s.masks[0][0]) for s in regions]) == scene.masks).all()
    assert [(s.meta["colour"], s.meta["shape"], s.meta["size"]) for s in regions] == [
        (t.colour, t.shape, t.size) for t in scene.things
    ]
    (grounded,) = [
        s for s in FORMATS["grandf"](drawn / "grounded", name="d", split="val") if s.image_id == "val_000002"
    ]
    text, spans = grounded_caption(scene.things)
    assert grounded.text == text
    assert grounded.phrases == tuple(span for span, _ in spans)
    assert [rle.area(m[0]) for m in grounded.masks] == [scene.masks[i].sum() for _, i in spans]
    single = [
        s
        for s in FORMATS["refcoco"](drawn / "refcoco", name="d", split="val")
        if s.frames[0].name == "val_000002.png"
    ]
    assert {s.meta["kind"] for s in single} <= {"attribute", "location", "relation"}
    assert all(
        len(s.masks) == 1 and rle.decode(s.masks[0][0]).tolist() in scene.masks.tolist() for s in single
    )


def test_grefcoco_holds_several_objects_and_none(drawn):
    for sample in FORMATS["grefcoco"](drawn / "grefcoco", name="d", split="train"):
        assert len(sample.masks) == 0 if sample.meta["kind"] == "none" else len(sample.masks) >= 2


def test_a_clip_has_a_mask_of_every_object_in_every_frame(drawn):
    for sample in FORMATS["mevis"](drawn / "mevis", name="d", split="val"):
        assert len(sample.frames) == 4
        assert all(len(masklet) == 4 and None not in masklet for masklet in sample.masks)


@pytest.mark.slow
def test_two_drawings_of_one_seed_are_the_same_bytes(drawn, tmp_path):
    write_scenes(tmp_path, seed=0, counts=COUNTS, image_size=64)
    files = [p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()]
    assert len(files) > 22
    assert all((tmp_path / f).read_bytes() == (drawn / f).read_bytes() for f in files)


def write_refs(root: Path, **changes: object) -> Path:
    png(root / "images" / "a.png")
    annotation = {"id": 7, "image_id": 1, "category_id": 1, "segmentation": [[2, 1, 5, 1, 5, 3, 2, 3]]}
    (root / "instances.json").write_text(
        json.dumps({"images": [{"id": 1, "file_name": "a.png"}], "annotations": [annotation]})
    )
    ref = {
        "ref_id": 0,
        "ann_id": 7,
        "image_id": 1,
        "split": "train",
        "sentences": [{"sent": "the lady", "sent_id": 5}],
    } | changes
    (root / "refs(unc).p").write_bytes(pickle.dumps([ref], protocol=2))
    return root


def test_a_public_refcoco_record_is_read(tmp_path):
    (sample,) = FORMATS["refcoco"](write_refs(tmp_path), name="refcoco", split="train")
    assert (sample.text, sample.sample_id, sample.height, sample.width, sample.meta) == (
        "the lady",
        "0_5",
        6,
        8,
        {},
    )
    assert rle.area(sample.masks[0][0]) == 6  # 3 x 2 pixels


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ann_id": 8}, "ref_id 0: ann_id 8 is not in instances.json"),
        ({"image_id": 2}, "ref_id 0: image_id 2 is not in instances.json"),
        ({"sentences": [{"sent": " "}]}, "ref_id 0, sentence 0: the text is ' '"),
    ],
)
def test_a_wrong_ref_is_named(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        list(FORMATS["refcoco"](write_refs(tmp_path, **changes), name="d", split="train"))


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    write_refs(tmp_path)
    (tmp_path / "refs(unc).p").write_bytes(
        b"cos\nsystem\n(S'touch " + str(tmp_path / "ran").encode() + b"'\ntR."
    )
    with pytest.raises(ValueError, match=r"not a plain pickle \(it wants to import os.system\)"):
        list(FORMATS["refcoco"](tmp_path, name="d", split="train"))
    assert not (tmp_path / "ran").exists()


def test_region_captions_may_embed_their_images_and_have_several_masks(tmp_path):
    turns = [
        {"from": "human", "value": "<image>\nWhat is <Prompt0>?"},
        {"from": "gpt", "value": "<Prompt0> a dog"},
    ]
    rows = {
        "image": [str(png(tmp_path / "a.png"))],
        "mask_rle": [[block(), block()]],
        "conversations": [turns],
    }
    mask = [{"size": [Value("int64")], "counts": Value("string")}]
    turn = [{"from": Value("string"), "value": Value("string")}]
    features = Features({"image": Image(), "mask_rle": mask, "conversations": turn})
    Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "set")
    (sample,) = FORMATS["region_arrow"](tmp_path / "set", name="d", split="train")
    part = sample.frames[0]
    assert isinstance(part, FilePart)  # the place in the Arrow file: the picture itself is not held
    assert part.read_bytes() == (tmp_path / "a.png").read_bytes()
    assert transforms.open_image(part).size == (8, 6)
    assert (sample.question, sample.text, len(sample.masks), sample.height) == (
        "What is region1?",
        "region1 a dog",
        1,
        6,
    )


def write_annotations(root: Path, *records: dict[str, object]) -> Path:
    png(root / "a.png")
    (root / "annotations.json").write_text(json.dumps(list(records)))
    return root


GOOD = {"image": "a.png", "masks": [[2, 1, 5, 1, 5, 3, 2, 3]], "text": "the dog", "split": "train"}


def test_plain_annotations_take_polygons_rle_and_no_object(tmp_path):
    records = (
        GOOD,
        GOOD | {"text": "both", "masks": [block(), [[2, 1, 5, 1, 5, 3, 2, 3]]]},
        GOOD | {"text": "a cat", "masks": []},
    )
    samples = list(FORMATS["annotations"](write_annotations(tmp_path, *records), name="mine", split="train"))
    assert [len(s.masks) for s in samples] == [1, 2, 0]
    assert all(rle.area(m[0]) == 6 for s in samples for m in s.masks)


def test_a_task_that_there_is_not_is_told_the_nearest(tmp_path: Path):
    with pytest.raises(
        ValueError,
        match=r"record 1: task 'phrases' is not one of .*'conversation'\] \(did you mean 'phrase'\?\)",
    ):
        list(
            FORMATS["annotations"](
                write_annotations(tmp_path, GOOD, GOOD | {"task": "phrases"}), name="mine", split="train"
            )
        )


def test_a_phrase_is_a_text_without_a_mask(tmp_path: Path):
    phrase = {"image": "a.png", "text": "the dog", "task": "phrase", "split": "train"}
    folder = write_annotations(tmp_path, GOOD, phrase)
    _, found = FORMATS["annotations"](folder, name="mine", split="train")
    assert (found.task, found.text, found.masks) == ("phrase", "the dog", ())
    with pytest.raises(ValueError, match=r"record 1: .*'masks'"):
        list(
            FORMATS["annotations"](
                write_annotations(tmp_path, GOOD, phrase | {"masks": []}), name="mine", split="train"
            )
        )
    with pytest.raises(ValueError, match="record 2: same image and text as record 1; leave one of them out"):
        list(
            FORMATS["annotations"](
                write_annotations(tmp_path, GOOD, phrase, phrase), name="mine", split="train"
            )
        )


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (GOOD | {"image": "b.png"}, r"record 1: the image .*b.png does not exist"),
        (GOOD | {"image": "broken.png"}, r"record 1: cannot read the image .*broken.png"),
        (
            GOOD | {"text": "t", "masks": [block(height=8)]},
            r"record 1, mask 0: RLE size \[8, 8\] is not the image's .* \[6, 8\]",
        ),
        (GOOD | {"text": ""}, "record 1: the text is ''"),
        (GOOD, "record 1: same image and text as record 0"),
        (GOOD | {"text": "t", "task": "caption"}, "record 1: task 'caption' is not one of"),
        (GOOD | {"text": "t", "mask": []}, r"record 1: unknown keys \['mask'\]"),
        ({"masks": [], "text": "t"}, "record 1: key 'image' is missing"),
    ],
)
def test_a_wrong_annotation_is_named(tmp_path, record, message):
    (tmp_path / "broken.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=message):
        list(FORMATS["annotations"](write_annotations(tmp_path, GOOD, record), name="mine", split="train"))


@pytest.mark.parametrize("bad", [rle.empty(6, 8), [1, 2, 3, 4], [math.nan, 2, 3, 4, 5, 6], None])
def test_a_mask_that_shows_nothing_is_left_out_and_counted(tmp_path, bad, caplog):
    """As in COCO: alone, its record goes with it."""
    records = GOOD | {"text": "two", "masks": [bad, *GOOD["masks"]]}, GOOD | {"text": "t", "masks": [bad]}
    root = write_annotations(tmp_path, GOOD, *records)
    read = list(FORMATS["annotations"](root, name="mine", split="train"))
    assert [(sample.text, len(sample.masks)) for sample in read] == [(GOOD["text"], 1), ("two", 1)]
    assert "1 masks without a pixel are left out of records with others" in caplog.text
    assert "1 records are left out: 1 with" in caplog.text
    root = write_annotations(tmp_path, GOOD, records[1] | {"split": "val"})
    assert len(list(FORMATS["annotations"](root, name="mine", split="train"))) == 1
    with pytest.raises(ValueError, match="no record of the split 'val' can be used: 1 with"):
        list(FORMATS["annotations"](root, name="mine", split="val"))


def write_regions(root: Path, *lines: str) -> Path:
    png(root / "images" / "a.png")
    (root / "manifest.jsonl").write_text("\n".join(lines))
    return root


def region(**changes: object) -> str:
    return json.dumps(
        {"id": "0", "image": "images/a.png", "segmentation": block(), "bbox": [6, 4, 2, 2], "category": "dog"}
        | changes
    )


def test_a_region_without_caption_is_called_by_category_and_place(tmp_path):
    folder = write_regions(tmp_path, region(), region(id="1"), region(id="2", caption="a brown dog"))
    (split,) = SPLITS["regions"](folder)
    samples = list(FORMATS["regions"](folder, name="photos", split=split))
    assert [(s.task, s.text, len(s.masks)) for s in samples] == [
        ("region_caption", "dog at the bottom right", 1),
        ("region_caption", "dog at the bottom right", 1),
        ("region_caption", "a brown dog", 1),
        ("referring", "dog at the bottom right", 2),
        ("referring", "a brown dog", 1),
    ]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((region(), '{"id": '), "manifest.jsonl: line 2 is not JSON"),
        ((region(), region()), "id 0 comes twice"),
        ((region(segmentation=block(height=5)),), r"line 1 \(id 0\): RLE size \[5, 8\]"),
        ((region(category=None),), r"line 1 \(id 0\): no caption, and as category: the text is None"),
    ],
)
def test_a_wrong_line_is_named(tmp_path, lines: tuple[str, ...], message):
    with pytest.raises(ValueError, match=message):
        list(
            FORMATS["regions"](
                write_regions(tmp_path, *lines), name="d", split=split_by_image("images/a.png")
            )
        )


def test_an_unknown_format_and_a_missing_folder_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"'mine': no format 'voc'; .* has \['annotations', "):
        read_samples(format="voc", path=tmp_path, name="mine", split="train")
    with pytest.raises(ValueError, match=r"'mine': .*nowhere does not exist"):
        read_samples(format="regions", path=tmp_path / "nowhere", name="mine", split="train")


@needs_reference
def test_real_photographs_are_split_by_image():
    train, val = (
        list(FORMATS["regions"](REFERENCE / "data/regions", name="photos", split=s)) for s in ("train", "val")
    )
    assert len([s for s in train + val if s.task == "region_caption"]) == 323
    assert not {s.image_id for s in train} & {s.image_id for s in val}
    assert 0.1 < len(val) / len(train + val) < 0.3


@needs_reference
def test_real_clips_are_read():
    samples = list(FORMATS["videos"](REFERENCE / "data/videos", name="clips", split="val"))
    assert {s.image_id for s in samples} == {
        "davis_schoolgirls",
        "davis_bmx_trees",
        "davis_tennis",
        "pumavos_chair",
    }
    assert all(len(s.masks[0]) == len(s.frames) >= 30 for s in samples)


@needs_reference
def test_the_first_record_of_the_public_refcoco_is_read(tmp_path):
    (ref,) = json.loads((REFERENCE / "data/eval_formats/refcoco/refs_unc_record0.json").read_text())
    write_refs(tmp_path)
    instances = {
        "images": [{"id": ref["image_id"], "file_name": "a.png"}],
        "annotations": [{"id": ref["ann_id"], "segmentation": block()}],
    }
    (tmp_path / "instances.json").write_text(json.dumps(instances))
    (tmp_path / "refs(unc).p").write_bytes(pickle.dumps([ref], protocol=0))
    samples = list(FORMATS["refcoco"](tmp_path, name="refcoco", split="train"))
    assert [s.text for s in samples] == ["the lady with the blue shirt", "lady with back to us", "blue shirt"]
