"""Readers of the published picture sets: drawn scenes in their layouts come back as they were drawn, and what
is wrong is named."""

from __future__ import annotations

import base64
import io
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset
from PIL import ExifTags, Image

from ans_core import prompts
from ans_core.data.conversation import turn
from ans_core.data.formats import FORMATS, SPLITS, clip_files, grounded, infer
from ans_core.data.formats.checks import DataError
from ans_core.data.formats.files import ImageFolders, find_file
from ans_core.data.formats.media import Media
from ans_core.data.formats.plain import split_by_image
from ans_core.data.scene_text import grounded_caption
from ans_core.pictures import rle, transforms
from ans_core.types import Sample
from tests import picture_sets, tiny
from tests.data.test_formats import REFERENCE, block, needs_reference, png, write_annotations
from tests.picture_sets import SETS, Drawn, said, store

BOX = [2, 1, 5, 1, 5, 3, 2, 3]
"""3 x 2 pixels."""


@pytest.fixture(scope="module")
def scenes() -> list[Drawn]:
    return picture_sets.draw(3, image_size=32)


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory, scenes: list[Drawn]) -> Path:
    root = tmp_path_factory.mktemp("data")
    picture_sets.write(root, scenes)
    return root


def read(tree: Path, name: str) -> list[Sample]:
    form, path = SETS[name]
    return list(FORMATS[form](tree / path, name=name, split="train"))


def areas(sample: Sample) -> list[int]:
    return [rle.area(mask) for masklet in sample.masks for mask in masklet if mask is not None]


@pytest.mark.parametrize("name", SETS)
def test_every_set_of_the_published_tree_is_found_and_read_in_place(tree, name):
    form, path = SETS[name]
    assert infer(tree / path) == form
    assert "train" in SPLITS[form](tree / path)
    for sample in read(tree, name):
        assert (sample.width, sample.height) == transforms.image_size(sample.frames[0]) == (32, 32)
        assert turn(sample, random.Random(0)).answer


@pytest.mark.parametrize("name", ["grandf", "openpsg", "refcocog_gcg", "flickr_gcg"])
def test_the_phrases_of_a_grounded_caption_have_the_masks_of_what_they_name(tree, scenes, name):
    for sample, drawn in zip(read(tree, name), scenes, strict=True):
        caption, spans = grounded_caption(drawn.scene.things)
        if name == "refcocog_gcg" and len({caption[a:b] for (a, b), _ in spans}) < len(spans):
            continue  # words that come twice are one phrase, at the first place
        assert sample.text.removesuffix(".") == caption
        assert sample.phrases == tuple(words for words, _ in spans)
        assert [rle.decode(m[0]).tolist() for m in sample.masks] == [
            drawn.scene.masks[i].tolist() for _, i in spans
        ]
        assert sample.detail
        made = turn(sample, random.Random(0))
        assert made.question in prompts.DETAILED_GROUNDED_QUESTIONS
        assert made.answer.endswith(".")
        assert not made.answer.endswith("..")


def test_ospreys_regions_are_numbered_and_its_descriptions_stand_alone(tree, scenes):
    first = scenes[0]
    chat = read(tree, "osprey_conversation")[0]
    assert chat.past == (("What is the colour of region1?", f"It is {first.scene.things[0].colour}."),)
    assert (chat.question, chat.text) == ("And its shape?", f"region1 is a {first.scene.things[0].shape}.")
    assert areas(chat) == [mask.sum() for mask in first.scene.masks]
    told = read(tree, "osprey_detail_description")[: len(first.names)]
    assert [s.text for s in told] == first.names
    assert [areas(s) for s in told] == [[mask.sum()] for mask in first.scene.masks]
    assert {turn(s, random.Random(0)).question for s in told} <= {
        q.format(region="region1") for q in prompts.DETAILED_REGION_QUESTIONS
    }
    assert (
        read(tree, "osprey_short_form")[0].question
        == "What is the shape of region2? Answer the question using a single word or phrase."
    )
    assert read(tree, "osprey_part_level")[0].question == "What is region1?"
    assert len(read(tree, "osprey_lvis_positive_negative")[0].past) == len(first.names) - 1


def test_gars_relations_are_questions_about_its_masks(tree, scenes):
    assert {s.task for s in read(tree, "gar_seed")} == {"region_caption"}
    for sample, drawn in zip(read(tree, "gar_relation"), scenes, strict=True):
        assert (sample.task, sample.question) == ("conversation", "Is region1 left of region2?")
        # the masks that nobody names are not shown
        assert areas(sample) == [drawn.scene.masks[0].sum(), drawn.scene.masks[1].sum()]


def test_a_category_means_all_its_objects_and_its_crowds(tree, scenes, tmp_path):
    found = {(s.image_id, s.text): sum(areas(s)) for s in read(tree, "coco")}
    drawn = [
        (str(d.number), t.shape, int(m.sum()))
        for d in scenes
        for t, m in zip(d.scene.things, d.scene.masks, strict=True)
    ]
    assert found == {
        (i, shape): sum(n for j, other, n in drawn if (j, other) == (i, shape)) for i, shape, _ in drawn
    }
    png(tmp_path / "val2017/a.png")
    crowd = {"size": [6, 8], "counts": [0, 4, 44]}
    annotations: list[dict[str, Any]] = [
        # overlapping polygons are one mask
        {"id": 1, "image_id": 1, "category_id": 1, "segmentation": [BOX, BOX], "iscrowd": 0},
        {"id": 2, "image_id": 1, "category_id": 1, "segmentation": crowd, "iscrowd": 1},
    ]
    whole = {
        "images": [{"id": 1, "file_name": "a.png"}],
        "categories": [{"id": 1, "name": "person"}],
        "annotations": annotations,
    }
    store(tmp_path / "annotations/instances_val2017.json", whole)
    (sample,) = FORMATS["coco"](tmp_path, name="coco", split="val")
    assert (sample.text, areas(sample), sample.meta["kind"], sample.meta["joined"]) == (
        "person",
        [6, 4],
        "crowd",
        [1],
    )
    annotations[1]["category_id"] = 7
    store(tmp_path / "annotations/instances_val2017.json", whole)
    with pytest.raises(DataError, match="annotation 1: category_id 7 is in no list of the file"):
        list(FORMATS["coco"](tmp_path, name="coco", split="val"))


def test_objects_of_a_picture_are_found_wherever_they_stand_in_the_file(tmp_path):
    for name in ("a", "b"):
        png(tmp_path / f"val2017/{name}.png")
    other = [0, 0, 8, 0, 8, 1, 0, 1]
    annotations = [
        # the last is there twice
        {"id": n, "image_id": n % 2, "category_id": 1, "segmentation": [outline]}
        for n, outline in enumerate([BOX, BOX, other, other, other])
    ]
    images = [{"id": n, "file_name": f"{name}.png"} for n, name in enumerate("ab")]
    whole = {"images": images, "categories": [{"id": 1, "name": "person"}], "annotations": annotations}
    store(tmp_path / "annotations/instances_val2017.json", whole)
    samples = list(FORMATS["coco"](tmp_path, name="coco", split="val"))
    assert [(s.sample_id, s.frames[0].name, len(s.masks)) for s in samples] == [
        ("0_1", "a.png", 2),
        ("1_1", "b.png", 2),
    ]
    assert all("joined" not in sample.meta for sample in samples)


def write_osprey(root: Path, *records: dict[str, Any], name: str = "osprey_conversation.json") -> Path:
    png(root / "images/a.png")
    store(
        root / name,
        [
            {"file_name": "a.png", "height": 6, "width": 8, "annotation": [{"segmentation": block()}]} | r
            for r in records
        ],
    )
    return root


def test_what_published_sets_have_wrong_is_left_out_and_counted(tmp_path, caplog):
    records = [
        {"conversations": said(("What is <region1]?", "A < b."))},
        {"conversations": said(("What is <region2>?", "A cat."))},
        {"conversations": said(("What is <region1>?", f"A cat, not <region{'9' * 5000}>."))},
        {"conversations": []},
        {"conversations": said(("What is <region1>?", " "))},
        {
            "conversations": said(("What is <region1>?", "A cat.")),
            "annotation": [{"segmentation": rle.empty(6, 8)}],
        },
    ]
    with caplog.at_level(logging.WARNING):
        (kept,) = FORMATS["osprey"](write_osprey(tmp_path, *records), name="osprey", split="train")
    assert (kept.question, kept.text) == ("What is region1?", "A  b.")
    assert "5 records are left out: 2 with words about a region that is not there; " in caplog.text
    with pytest.raises(DataError, match="no record can be used: 1 with no question with an answer"):
        list(FORMATS["osprey"](write_osprey(tmp_path, records[3]), name="osprey", split="train"))


def test_a_picture_of_the_full_name_in_any_folder_comes_before_one_of_a_shorter_name(tmp_path):
    for file in ("images/1.jpg", "images/0001.jpg", "others/coco/1.jpg"):
        png(tmp_path / file)
    images = ImageFolders(tmp_path, ("images", "others"))
    for name, file in (
        ("coco/1.jpg", "others/coco/1.jpg"),
        ("train2017/1.jpg", "images/1.jpg"),
        ("COCO_val2014_0001.jpg", "images/0001.jpg"),
    ):
        assert images.find(name, where="record 0").frames == (tmp_path / file,)
    folders = [tmp_path / "images", tmp_path / "others"]
    assert find_file(folders, ["coco/1.jpg", "1.jpg"], where="", noun="picture") == folders[1] / "coco/1.jpg"
    with pytest.raises(DataError, match=r"record 0: the image 'cam_0001\.jpg' is in none of"):
        images.find("cam_0001.jpg", where="record 0")


def test_a_row_of_llava_without_a_picture_is_left_out_and_counted(tmp_path, caplog):
    png(tmp_path / "llava_images/coco/a.png")
    rows: list[dict[str, Any]] = [
        {
            "image": "coco/a.png",
            "conversations": [
                {"from": "gpt", "value": "Hello."},
                *said(("What?\n<image>", "A\x00 cat."), ("Why?", "It is.")),
            ],
        },
        {"conversations": said(("Write a poem.", "Roses."))},
    ]
    store(tmp_path / "chat/llava_v1_5_mix665k.json", rows)
    with caplog.at_level(logging.WARNING):
        (kept,) = FORMATS["llava"](tmp_path / "chat", name="llava", split="train")
    assert (kept.past, kept.question, kept.text) == ((("What?", "A cat."),), "Why?", "It is.")
    assert "1 records are left out: 1 with text alone, without a picture" in caplog.text
    rows[0]["image"] = "coco/b.png"
    store(tmp_path / "chat/llava_v1_5_mix665k.json", rows)
    with pytest.raises(
        DataError,
        match=r"llava_v1_5_mix665k.json: record 0: the image 'coco/b.png' is in none of .*llava_images",
    ):
        list(FORMATS["llava"](tmp_path / "chat", name="llava", split="train"))


def test_phrases_that_share_words_are_merged_trimmed_or_left_out():
    def phrase(start: int, end: int, x: int) -> grounded.Phrase:
        return start, end, [tiny.square(x, 0, x + 4, 4)]

    caption = "two men in red and a dog"
    found = [phrase(0, 7, 0), phrase(0, 7, 8), phrase(4, 7, 16), phrase(8, 18, 24), phrase(15, 24, 32)]
    picture = Media(frames=(Path("a.png"),), height=64, width=64)
    made = grounded.sample(caption, found, image=picture, sample_id="0")
    assert [caption[a:b] for a, b in made.phrases] == ["two men", "in red", "and a dog"]
    assert areas(made) == [32, 16, 16]
    bare = grounded.sample(caption, [], image=picture, sample_id="0")
    assert (bare.text, bare.phrases, bare.masks) == (caption, (), ())


def test_words_are_looked_for_in_lower_case_and_a_caption_without_any_is_left_out(tmp_path, caplog):
    png(tmp_path / "images/a.png")
    refs = [{"sentence": "Red Dog", "segmentation": [BOX, BOX]}, {"sentence": "a cow", "segmentation": [BOX]}]
    records = [
        {"7": {"img_file_name": "a.png", "caption": text, "refs": refs}}
        for text in ('"A red dog sits."', "A horse.")
    ]
    store(tmp_path / "RefCOCOg_GCG_val.json", records)
    with caplog.at_level(logging.WARNING):
        (sample,) = FORMATS["refcocog_gcg"](tmp_path, name="gcg", split="val")
    assert (sample.text, sample.phrases, areas(sample)) == ("a red dog sits.", ((2, 9),), [6])
    assert "1 with a caption that holds the words of no expression" in caplog.text


def write_query(
    root: Path,
    *shapes: tuple[str, int],
    text: str = "Who barks.",
    sentence: bool = True,
    encoding: str = "utf-8",
) -> Path:
    """Squares of a side from the top left corner, on a picture of 16 x 16."""
    png(root / "val/a.jpg", width=16, height=16)
    drawn = [
        {"label": label, "points": [[0, 0], [side, 0], [side, side], [0, side]]} for label, side in shapes
    ]
    query = {"text": [text], "is_sentence": sentence, "shapes": drawn}
    (root / "val/a.json").write_bytes(json.dumps(query, ensure_ascii=False).encode(encoding))
    return root


def test_reasonsegs_pictures_without_annotation_are_counted(tmp_path, caplog):
    write_query(tmp_path, ("target", 4))
    png(tmp_path / "val/b.jpg", width=16, height=16)
    assert len(list(FORMATS["reasonseg"](tmp_path, name="r", split="val"))) == 1
    assert "1 pictures have no .json and are left out, as b.jpg" in caplog.text


def test_reasonseg_paints_the_smaller_shape_over_the_larger(tmp_path):
    write_query(tmp_path, ("target", 4), ("ignore", 8), ("target", 12), ("flag", 16))
    (sample,) = FORMATS["reasonseg"](tmp_path, name="r", split="val")
    assert areas(sample) == [4 * 4 + 12 * 12 - 8 * 8]
    assert turn(sample, random.Random(0)).question == "Who barks. Please respond with segmentation mask."
    write_query(tmp_path, ("target", 4), text="the dog’s tail", sentence=False, encoding="cp1252")
    (sample,) = FORMATS["reasonseg"](tmp_path, name="r", split="val")
    assert sample.text == "the dog’s tail"
    write_query(tmp_path, ("ignore", 4), ("target", 6), ("ignore", 5))
    assert areas(next(FORMATS["reasonseg"](tmp_path, name="r", split="val"))) == [6 * 6 - 5 * 5]
    with pytest.raises(DataError, match=r"a\.json: no pixel is labelled as target"):
        list(FORMATS["reasonseg"](write_query(tmp_path, ("ignore", 4)), name="r", split="val"))


def test_upstreams_finetuning_file_is_told_by_its_keys_and_read_beside_ours(tmp_path):
    ours = {"image": "a.png", "text": "a dog", "masks": [BOX], "split": "train"}
    theirs: dict[str, Any] = {
        "image": "a.png",
        "mask": [[BOX, BOX], BOX, [[0, 0, 8, 0, 8, 1, 0, 1]]],
        "text": ["Dog.", "cat", "Dog."],
    }
    samples = list(
        FORMATS["annotations"](write_annotations(tmp_path, ours, theirs), name="mine", split="train")
    )
    assert [(s.sample_id, s.text, areas(s)) for s in samples] == [
        ("0", "a dog", [6]),
        ("1_0", "Dog.", [6, 8]),
        ("1_1", "cat", [6]),
    ]
    png(tmp_path / "images/a.png")
    (split,) = SPLITS["annotations"](write_annotations(tmp_path, theirs))
    assert split == split_by_image("images/a.png")
    assert next(FORMATS["annotations"](tmp_path, name="mine", split=split)).frames == (
        tmp_path / "images/a.png",
    )
    for change, message in (
        ({"text": ["dog"]}, "record 0: mask has 3 entries and text 1; every mask needs its text"),
        ({"mask": [[BOX], [[*BOX, 0, "0"]], BOX]}, "record 0, text 1, mask 0: a polygon holds '0'"),
    ):
        with pytest.raises(DataError, match=message):
            list(
                FORMATS["annotations"](write_annotations(tmp_path, theirs | change), name="mine", split=split)
            )


def write_rows(folder: Path, *rows: dict[str, Any]) -> Path:
    Dataset.from_list(list(rows)).save_to_disk(str(folder))
    return folder


def test_gars_rows_have_a_caption_for_each_mask_or_name_them(tmp_path):
    encoded = io.BytesIO()
    Image.new("RGB", (8, 6)).save(encoded, "PNG")
    picture = "data:base64," + base64.b64encode(encoded.getvalue()).decode()
    each = {
        "image": picture,
        "mask_rle": [block(), block()],
        "conversations": said(("Describe.", "a dog"), ("Describe.", "a cat")),
    }
    first, second = FORMATS["region_arrow"](write_rows(tmp_path / "each", each), name="gar", split="train")
    assert first.frames[0].read_bytes() == encoded.getvalue()  # decoded from its place in the Arrow file
    assert [(s.sample_id, s.text, len(s.masks)) for s in (first, second)] == [
        ("0", "a dog", 1),
        ("0_1", "a cat", 1),
    ]
    asked = each | {"conversations": said(("Is <Prompt1> red?", "Yes."), ("And <Prompt2>?", "No."))}
    with pytest.raises(
        DataError,
        match=r"row 0: the conversation names the prompts \[1, 2\], and mask_rle has 2 masks, from 0 on",
    ):
        list(FORMATS["region_arrow"](write_rows(tmp_path / "asked", asked), name="gar", split="train"))
    with pytest.raises(DataError, match="row 0: the image is not base64"):
        list(
            FORMATS["region_arrow"](
                write_rows(tmp_path / "broken", each | {"image": "data:base64,%%%"}),
                name="gar",
                split="train",
            )
        )


def test_splits_lie_beside_each_other_and_two_sets_in_one_folder_are_told_apart_by_the_path(tree, tmp_path):
    folder = tree / "glamm_data/annotations"
    with pytest.raises(
        DataError, match=r"GranDf_HA_GCG_train\.json and OpenPsgGCG_train\.json are both of split 'train'"
    ):
        SPLITS["grandf"](folder)
    for name in ("OpenPsgGCG_train.json", "OpenPsgGCG_val.json", "GranDf_HA_GCG_val.json"):
        (tmp_path / name).write_text("[]")
    assert SPLITS["grandf"](tmp_path / "OpenPsgGCG_train.json") == ["train", "val"]


def write_turned(file: Path, orientation: int) -> None:
    """Write 8 x 6 stored pixels, white where `block` is, with an EXIF orientation."""
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    Image.fromarray(rle.decode(block()).astype(np.uint8) * 255).save(file, exif=exif)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_masks_of_stored_pixels_are_turned_with_their_picture(tmp_path, orientation):
    """COCO's annotations are of stored pixels; those of the upright picture are known by its size, where a
    quarter turn changes it."""
    write_annotations(tmp_path, {"image": "a.png", "text": "a dog", "masks": [block()], "split": "train"})
    write_turned(tmp_path / "a.png", orientation)
    (tmp_path / "images").symlink_to(tmp_path)
    white = np.asarray(transforms.open_image(tmp_path / "a.png"))[..., 0] > 0

    def osprey(mask: np.ndarray) -> Sample:
        height, width = mask.shape
        row = {
            "file_name": "a.png",
            "height": height,
            "width": width,
            "annotation": [{"segmentation": rle.encode(mask)}],
        }
        store(tmp_path / "osprey_conversation.json", [row | {"conversations": said(("What?", "It."))}])
        (sample,) = FORMATS["osprey"](tmp_path, name="mine", split="train")
        return sample

    samples = [*FORMATS["annotations"](tmp_path, name="mine", split="train"), osprey(rle.decode(block()))]
    for sample in samples + [osprey(white)] * (orientation >= 5):
        ((mask,),) = sample.masks
        assert np.array_equal(rle.decode(mask), white)
        assert (sample.height, sample.width) == white.shape


def test_frames_of_a_clip_are_turned_alike_and_places_are_not_told_of_a_turned_picture(tmp_path):
    for name, orientation in (("1.png", 3), ("2.png", 3), ("3.png", 1)):
        write_turned(tmp_path / name, orientation)
    frames = tuple(tmp_path / f"{n}.png" for n in (1, 2, 3))
    clip = clip_files.clip_of(frames[:2], where="here")
    assert (clip.height, clip.width) == (6, 8)
    with pytest.raises(DataError, match=r"the EXIF tag of .*3\.png.* turns it, unlike the first frame"):
        clip_files.clip_of(frames, where="here")
    region = {"id": 1, "image": "1.png", "segmentation": block(), "category": "dog", "bbox": [2, 1, 3, 2]}
    (tmp_path / "manifest.jsonl").write_text(json.dumps(region))
    split = split_by_image("1.png")
    with pytest.raises(DataError, match="so that its bbox tells no place; write a caption"):
        list(FORMATS["regions"](tmp_path, name="mine", split=split))
    (tmp_path / "manifest.jsonl").write_text(json.dumps(region | {"caption": "a dog"}))
    assert len(list(FORMATS["regions"](tmp_path, name="mine", split=split))) == 2


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "I;16", "CMYK"])
def test_a_picture_of_any_kind_is_read_as_rgb(tmp_path, mode):
    folder = write_annotations(
        tmp_path, {"image": "a.tif", "text": "a dog", "masks": [block()], "split": "train"}
    )
    grey = Image.new("RGB", (8, 6), (156, 156, 156))
    special = {"I;16": Image.fromarray(np.full((6, 8), 40_000, np.uint16)), "P": grey.quantize()}
    picture = special.get(mode) or grey.convert(mode)
    picture.save(tmp_path / "a.tif")
    (sample,) = FORMATS["annotations"](folder, name="mine", split="train")
    opened = transforms.open_image(sample.frames[0])
    assert (opened.mode, opened.size) == ("RGB", (8, 6))
    assert np.abs(np.asarray(opened).astype(int) - 156).max() <= 1


@needs_reference
def test_real_regions_of_osprey_are_read(tmp_path):
    """Its evaluation excerpt has real polygons and descriptions; the training set's layout is put around
    them."""
    asked, told = (
        json.loads((REFERENCE / f"data/eval_formats/osprey/{name}.head.json").read_text())
        for name in ("questions", "answers")
    )
    for question in asked:
        png(tmp_path / "coco/train2014" / question["image"], width=640, height=480)
    records = [
        {
            "file_name": q["image"],
            "height": 480,
            "width": 640,
            "annotation": [q["annotation"]],
            "description": [f"<region1>: {a['text']}"],
        }
        for q, a in zip(asked, told, strict=True)
    ]
    store(tmp_path / "Osprey-724K/osprey_detail_description.json", records)
    chair, woman = FORMATS["osprey"](tmp_path / "Osprey-724K", name="osprey", split="train")
    assert chair.text.startswith("There is a wooden chair with its back facing towards us.")
    boxes = [np.multiply(rle.box(s.masks[0][0]), (640, 480, 640, 480)) for s in (chair, woman)]  # type: ignore[arg-type]
    for found, question in zip(boxes, asked, strict=True):
        x, y, width, height = question["annotation"]["bbox"]
        assert np.abs(found - (x, y, x + width, y + height)).max() <= 1
