"""Readers of video data sets: what they give back from drawn clips and real excerpts, and what they
refuse."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ans_core.data.conversation import turn
from ans_core.data.formats import FORMATS, SPLITS, checks, clip_files, infer
from ans_core.data.formats.checks import DataError
from ans_core.data.formats.media import Media
from ans_core.data.pictures import check_pictures
from ans_core.pictures import rle, transforms
from ans_core.types import Masklet, Sample, VideoFrames
from tests.data import clip_sets
from tests.data.clip_sets import HEIGHT, NAMES, WIDTH, draw
from tests.data.test_formats import REFERENCE, needs_reference

EXCERPTS = REFERENCE / "data/eval_formats"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Write a set once, however many tests copy it."""
    return lru_cache(lambda form: getattr(clip_sets, form)(tmp_path_factory.mktemp(form)))


def read(form: str, root: Path, split: str = "train") -> list[Sample]:
    samples = list(FORMATS[form](root, name="d", split=split))
    check_pictures(samples, where=str(root))
    return samples


def pixels(masklet: Masklet) -> list[int | None]:
    return [None if m is None else rle.area(m) for m in masklet]


def same(masklet: Masklet, masks: np.ndarray) -> bool:
    return all(
        m is not None and (rle.decode(m) == real).all() for m, real in zip(masklet, masks, strict=True)
    )


def test_davis_is_read_by_its_lists_and_mose_by_its_folders(tmp_path):
    drawn = draw()
    root = clip_sets.davis(tmp_path / "davis")
    assert (infer(root), SPLITS["davis"](root)) == ("davis", ["train", "val"])
    (bear,) = read("davis", root)
    assert (bear.sample_id, bear.task, bear.text, bear.meta) == (
        "bear",
        "tracking",
        "",
        {"object_ids": [1, 2]},
    )
    assert [f.name for f in bear.frames] == [f"{n}.jpg" for n in NAMES]
    assert all(same(masklet, drawn.masks[n]) for n, masklet in zip((1, 2), bear.masks, strict=True))
    assert pixels(bear.masks[0]) == [36, 36, 36, 0, 36, 36]  # hidden in one frame: absent, not unknown
    root = clip_sets.mose(tmp_path / "mose")
    assert (infer(root), SPLITS["davis"](root)) == ("davis", ["train", "valid"])
    (clip,) = read("davis", root, "valid")
    # only the first frame's truth is public
    assert [pixels(m) for m in clip.masks] == [[36, None, None, None, None, None]]
    shutil.rmtree(root / "train")
    shutil.rmtree(root / "valid")
    for number in range(9):
        clip_sets.write_frames(root / f"JPEGImages/clip{number}", draw())
        clip_sets.write_palettes(root / f"Annotations/clip{number}", draw())
    assert len(read("davis", root)) + len(read("davis", root, "val")) == 9


@needs_reference
def test_real_davis_pngs_are_read_and_void_is_background():
    root = EXCERPTS / "davis"
    clips = {s.sample_id: s for split in SPLITS["davis"](root) for s in read("davis", root, split)}
    assert {name: clip.meta["object_ids"] for name, clip in clips.items()} == {
        "bear": [1],
        "tennis": [1, 2],
    }  # 255, of some pixels of tennis, is no object


def test_davis_2016_is_0_and_255_with_a_list_of_frames(tmp_path):
    drawn = draw()
    for name in ("a", "b"):
        clip_sets.write_frames(tmp_path / f"JPEGImages/480p/{name}", drawn)
        (tmp_path / f"Annotations/480p/{name}").mkdir(parents=True)
        for frame, mask in zip(NAMES, drawn.masks[1], strict=True):
            Image.fromarray(mask.astype(np.uint8) * 255).save(
                tmp_path / f"Annotations/480p/{name}/{frame}.png"
            )
    lists = tmp_path / "ImageSets/480p"
    lists.mkdir(parents=True)
    lines = [f"/JPEGImages/480p/b/{n}.jpg /Annotations/480p/b/{n}.png" for n in NAMES]
    (lists / "val.txt").write_text("\n".join(lines))
    (clip,) = read("davis", tmp_path, "val")
    assert (clip.sample_id, clip.meta["object_ids"], pixels(clip.masks[0])) == (
        "b",
        [1],
        [36, 36, 36, 0, 36, 36],
    )


def test_numbers_that_can_be_no_objects_are_refused_with_what_to_write(tmp_path):
    """Grey levels of two objects; one object scaled with interpolation. Done as the messages say, both are
    read."""
    one, two = np.zeros((21, 33), np.uint8), np.zeros((21, 33), np.uint8)
    one[5:15, 5:15], two[5:15, 20:28] = 1, 1
    smooth = np.asarray(Image.fromarray(one * 200).resize((64, 48), Image.Resampling.BILINEAR))
    nearest = np.asarray(Image.fromarray(one * 200).resize((64, 48), Image.Resampling.NEAREST))

    def objects(labels: np.ndarray) -> list[int]:
        Image.fromarray(labels).save(tmp_path / "0.png")
        height, width = labels.shape
        clip = Media(frames=(), height=height, width=width)
        return list(clip_files.palette_masklets(tmp_path, ["0"], clip, where="here"))

    with pytest.raises(
        DataError, match=r"hold 127 and 255, which look like grey levels .* number the objects 1, 2"
    ):
        objects(one * 127 + two * 255)
    assert objects(one + two * 2) == [1, 2]
    with pytest.raises(
        DataError, match=r"object numbers, of which \d+ are nothing but edges .* nearest neighbour"
    ):
        objects(smooth)
    assert objects(nearest) == [200]
    assert objects(one * 5 + two * 255) == [5]  # void beside an object


def test_sav_has_every_fourth_frame_of_a_video_file(written):
    drawn, root = draw(), written("sav")
    assert (infer(root), SPLITS["sav"](root)) == ("sav", ["train"])
    (clip,) = read("sav", root)
    assert isinstance(clip.frames, VideoFrames)
    assert (clip.frames.indices, clip.height, clip.width) == (range(0, 21, 4), HEIGHT, WIDTH)
    assert all(same(masklet, drawn.masks[n]) for n, masklet in zip((1, 2), clip.masks, strict=True))
    for place in (5, 0, 3):
        shown = np.asarray(transforms.open_image(clip.frames[place])).astype(int)
        assert abs(shown - drawn.pictures[place]).mean() < 12  # lossy; a neighbour's frame is 20 off


def test_held_out_sav_is_unknown_between_annotated_frames(tmp_path):
    root = clip_sets.sav_held_out(tmp_path)
    assert (infer(root), SPLITS["sav"](root), SPLITS["sav"](root / "sav_val")) == ("sav", ["val"], ["val"])
    (clip,) = read("sav", root, "val")
    assert clip.meta["object_ids"] == ["000", "001"]
    assert [pixels(m) for m in clip.masks] == [
        [36, None, None, None, 36, None],
        [0, None, None, None, 36, None],
    ]


@needs_reference
def test_a_real_sav_annotation_is_read(tmp_path):
    record = json.loads((EXCERPTS / "sav/sav_000001_manual.first2frames.json").read_text())
    clip_sets.write_video(tmp_path / "sav_000001.mp4", np.zeros((5, 848, 480, 3), np.uint8))
    clip_sets.write_json(tmp_path / "sav_000001_manual.json", record)
    # it appears in frame 113
    with pytest.raises(DataError, match=r"sav_000001_manual.json: object 3: no pixel in any frame"):
        read("sav", tmp_path)
    record["masklet"] = [[mask for n, mask in enumerate(masks) if n != 3] for masks in record["masklet"]]
    record["masklet_id"].remove(3)
    clip_sets.write_json(tmp_path / "sav_000001_manual.json", record)
    (clip,) = read("sav", tmp_path)
    assert (len(clip.masks), len(clip.frames), clip.meta["object_ids"]) == (4, 2, [0, 1, 2, 4])
    auto = json.loads((EXCERPTS / "sav/sav_000001_auto.first2frames.json").read_text())
    seen = [n for n in range(9) if any(rle.area(masks[n]) for masks in auto["masklet"])]
    auto |= {"masklet": [[masks[n] for n in seen] for masks in auto["masklet"]], "masklet_id": seen}
    clip_sets.write_json(tmp_path / "sav_000001_auto.json", auto)
    (clip,) = read("sav", tmp_path, "auto")
    assert len(clip.masks) == len(seen) > 5


def test_youtube_vis_instances_of_a_category_are_one_expression(tmp_path):
    drawn = draw()
    root = clip_sets.youtube_vis(tmp_path)
    assert (infer(root), SPLITS["youtube_vis"](root)) == ("youtube_vis", ["train"])
    (sample,) = read("youtube_vis", root)
    assert (sample.text, sample.task, sample.image_id) == ("giant panda", "referring", "1")
    assert sample.meta == {"category": "giant panda", "object_ids": [1, 2]}
    assert all(same(masklet, drawn.masks[n]) for n, masklet in zip((1, 2), sample.masks, strict=True))


def test_coco_video_frames_are_ordered_and_those_without_annotation_unknown(tmp_path):
    root = clip_sets.coco_video(tmp_path)
    assert SPLITS["coco_video"](root) == ["train"]
    car, person = sorted(read("coco_video", root), key=lambda s: s.text)
    assert [f.stem for f in car.frames] == NAMES
    # frame 0 says that it is annotated
    assert (car.text, pixels(car.masks[0])) == ("car", [0, 36, 36, None, 36, 36])
    assert (person.text, pixels(person.masks[0])) == ("person", [0, 0, 36, None, 36, 36])
    assert person.meta == {"category": "person", "object_ids": [2]}
    file = root / "demo_train.json"
    content = json.loads(file.read_text())
    clip_sets.write_json(
        file, content | {"annotations": [a | {"category_id": 2} for a in content["annotations"]]}
    )
    (persons,) = read("coco_video", root)
    assert [pixels(m) for m in persons.masks] == [pixels(car.masks[0]), pixels(person.masks[0])]
    without = [
        {k: v for k, v in a.items() if k != "instance_id"} | {"category_id": 2}
        for a in content["annotations"]
    ]
    clip_sets.write_json(file, content | {"annotations": without})
    (persons,) = read("coco_video", root)  # no identities: the category is one object
    assert [pixels(m) for m in persons.masks] == [[0, 36, 72, None, 72, 72]]
    assert persons.meta["joined"] == [0]
    numbered = [a | {"id": 900 + a["id"]} for a in content["annotations"] if a["instance_id"] == 2]
    # instance 2 is not what has no identity, category 2
    clip_sets.write_json(file, content | {"annotations": [*numbered, *without]})
    (persons,) = read("coco_video", root)
    assert [pixels(m) for m in persons.masks] == [pixels(person.masks[0]), [0, 36, 72, None, 72, 72]]
    assert (persons.meta["object_ids"], persons.meta["joined"]) == ([2, "category 2"], [1])
    mixed = [a | {"instance_id": "2" if place % 2 else 2} for place, a in enumerate(numbered)]
    clip_sets.write_json(file, content | {"annotations": mixed})
    (persons,) = read("coco_video", root)  # 2 and "2" are one
    assert persons.meta["object_ids"] == [2]
    texts = [image | {"id": str(image["id"])} for image in content["images"]]
    clip_sets.write_json(file, content | {"annotations": mixed, "images": texts})
    (persons,) = read("coco_video", root)  # so are ids of images
    assert persons.meta["object_ids"] == [2]
    named = [
        category | {"name": "a  person" if place else "a person"}
        for place, category in enumerate(content["categories"])
    ]
    clip_sets.write_json(file, content | {"categories": named})
    (both,) = read("coco_video", root)  # two categories of one name
    assert [pixels(m) for m in both.masks] == [pixels(car.masks[0]), pixels(person.masks[0])]
    boxes = [a | {"segmentation": [], "bbox": [0, 0, 3, 2]} if a["instance_id"] == 2 else a for a in numbered]
    clip_sets.write_json(file, content | {"annotations": boxes})
    (persons,) = read("coco_video", root)
    assert {area for area in pixels(persons.masks[0]) if area} == {6}
    clip_sets.write_json(
        file,
        content | {"annotations": [a | {"segmentation": []} if n else a for n, a in enumerate(numbered)]},
    )
    (persons,) = read("coco_video", root)  # neither outline nor box: absent
    assert [area for area in pixels(persons.masks[0]) if area] == [36]


def test_a_clip_under_two_ids_is_refused_with_both(written, tmp_path):
    root = shutil.copytree(written("youtube_vis"), tmp_path / "set")
    file = root / "train/instances.json"
    content = json.loads(file.read_text())
    clip_sets.write_json(file, content | {"videos": [*content["videos"], content["videos"][0] | {"id": 77}]})
    with pytest.raises(
        checks.DataError,
        match="video 77 has the frames of video 1; give the annotations of both one video_id",
    ):
        read("youtube_vis", root)


def test_frames_of_a_folder_are_in_order_of_time_whatever_their_suffixes(tmp_path):
    """Numbers without zeros before them, and what a camera calls .JPG."""
    names = ["0.jpg", "1.JPG", "2.jpeg", "9.jpg", "10.jpg", "11.PNG"]
    for name in names:
        (tmp_path / name).touch()
    listed = clip_files.listed(tmp_path, where="here")
    assert listed == ["0", "1", "2", "9", "10", "11"]
    assert [path.name for path in clip_files.frames_of(tmp_path, listed, where="here")] == names
    labels = np.zeros((4, 4), np.uint8)
    labels[1, 1] = 1
    palettes = tmp_path / "palettes"
    palettes.mkdir()
    Image.fromarray(labels).save(palettes / "1.PNG", "PNG")
    clip = Media(frames=(), height=4, width=4)
    (masklet,) = clip_files.palette_masklets(palettes, listed, clip, where="here").values()
    assert pixels(masklet) == [None, 1, None, None, None, None]
    Image.fromarray(labels).save(palettes / "12.PNG", "PNG")
    with pytest.raises(checks.DataError, match=r"12\.PNG annotates a frame that the clip doesn't have"):
        clip_files.palette_masklets(palettes, listed, clip, where="here")


@needs_reference
def test_real_coco_video_files_are_read_or_refused_by_record(tmp_path):
    black = {"youtube_vis": ["0043f083b5/00000.jpg"], "coco_video": [f"image_{n}.jpg" for n in range(1, 9)]}
    sizes = {"youtube_vis": (1280, 720), "coco_video": (512, 256)}
    for folder, names in black.items():
        for name in names:
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", sizes[folder]).save(tmp_path / folder / name)
        shutil.copy(EXCERPTS / folder / "ann.json", tmp_path / folder)
    (sedan,) = read("youtube_vis", tmp_path / "youtube_vis", "ann")
    assert (sedan.text, sedan.image_id, pixels(sedan.masks[0]), sedan.meta["object_ids"]) == (
        "sedan",
        "0043f083b5",
        [6377],
        [1],
    )
    # boxes alone
    with pytest.raises(DataError, match=r"ann.json: annotation 1: key 'segmentation' is missing"):
        read("coco_video", tmp_path / "coco_video", "ann")
    for frame in range(3):
        Image.new("RGB", (1280, 1024)).save(tmp_path / f"seq_15_frame{frame:03d}.png")
    shutil.copy(EXCERPTS / "coco_video/endovis18_val.first3frames.json", tmp_path)
    samples = read("coco_video", tmp_path, "val")
    assert {s.text for s in samples} <= {
        "Bipolar Forceps",
        "Prograsp Forceps",
        "Large Needle Driver",
        "Monopolar Curved Scissors",
    }
    assert (len(samples), {len(s.masks) for s in samples}, samples[0].image_id) == (2, {1}, "seq_15_")
    assert pixels(samples[0].masks[0])[0] == 52038


def by_id(samples: list[Sample]) -> dict[str, Sample]:
    return {s.sample_id: s for s in samples}


def test_mevis_v2_has_expressions_without_target_and_v1_is_read_as_before(tmp_path):
    drawn = draw()
    root = clip_sets.mevis(tmp_path / "v2")
    assert (infer(root), SPLITS["mevis"](root)) == ("mevis", ["train"])
    found = by_id(read("mevis", root))
    assert {n: s.meta["kind"] for n, s in found.items()} == {
        "0ab4_0": "target",
        "0ab4_1": "target",
        "0ab4_2": "no_target",
    }
    assert (found["0ab4_2"].masks, found["0ab4_2"].text) == ((), "a circle")
    assert all(
        same(masklet, drawn.masks[n]) for n, masklet in zip((1, 2), found["0ab4_1"].masks, strict=True)
    )
    assert [s.meta for s in read("mevis", clip_sets.mevis(tmp_path / "v1", version=1))] == [{}, {}]
    shutil.copy(tmp_path / "v1/train/meta_expressions.json", root / "train")
    with pytest.raises(
        DataError, match=r"meta_expressions.json and meta_expressions_v2.json are two releases"
    ):
        read("mevis", root)


def test_revos_has_three_types_and_videos_as_files_or_folders(tmp_path):
    root = clip_sets.revos(tmp_path)
    assert (infer(root), SPLITS["revos"](root)) == ("revos", ["train"])
    found = by_id(read("revos", root))
    kinds = {"0": "referring", "1": "reasoning", "2": "no_object"}
    assert {n: s.meta["kind"] for n, s in found.items()} == {
        f"{v}_{n}": k for v in ("LVVIS/train/1", "MOSE/2") for n, k in kinds.items()
    }
    assert {n: len(s.masks) for n, s in found.items() if "MOSE" in n} == {
        "MOSE/2_0": 1,
        "MOSE/2_1": 2,
        "MOSE/2_2": 0,
    }
    assert isinstance(found["MOSE/2_0"].frames, VideoFrames)
    assert found["MOSE/2_0"].frames.indices == range(0, 26, 5)


def test_ref_youtube_vos_has_its_masks_in_pngs_or_in_upstreams_pickle(tmp_path):
    drawn = draw()
    for pickled in (False, True):
        root = clip_sets.ref_youtube_vos(tmp_path / str(pickled), pickled=pickled)
        assert (infer(root), SPLITS["ref_youtube_vos"](root)) == ("ref_youtube_vos", ["train"])
        found = by_id(read("ref_youtube_vos", root))
        assert {
            n: same(s.masks[0], drawn.masks[1 + (n == "0062_10")]) for n, s in found.items()
        } == dict.fromkeys(found, True)
        assert {n: s.text for n, s in found.items()} == {
            "0062_0": "a red square",
            "0062_10": "the blue one",
            "0062_2": "it moves",
        }
    (tmp_path / "False/train/Annotations/0062/00015.png").unlink()
    assert pixels(read("ref_youtube_vos", tmp_path / "False")[0].masks[0]) == [36, 36, 36, None, 36, 36]
    (tmp_path / "True/mask_dict.pkl").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(
        DataError, match=r"mask_dict.pkl is not a plain pickle \(it wants to import os.system\)"
    ):
        read("ref_youtube_vos", tmp_path / "True")


@needs_reference
def test_the_held_out_ref_youtube_vos_is_refused_for_its_missing_masks(tmp_path):
    """The file is real, the frames are black."""
    file = EXCERPTS / "ref_youtube_vos/meta_expressions_valid.head.json"
    (tmp_path / "meta_expressions/valid").mkdir(parents=True)
    (tmp_path / "valid/Annotations").mkdir(parents=True)
    shutil.copy(file, tmp_path / "meta_expressions/valid/meta_expressions.json")
    for video, record in json.loads(file.read_text())["videos"].items():
        (tmp_path / f"valid/JPEGImages/{video}").mkdir(parents=True)
        for frame in record["frames"]:
            Image.new("RGB", (8, 6)).save(tmp_path / f"valid/JPEGImages/{video}/{frame}.jpg")
    with pytest.raises(
        DataError,
        match=r"video '0062f687f1', expression '0': key 'obj_id' is missing; the masks of a held-out split",
    ):
        read("ref_youtube_vos", tmp_path, "valid")


def test_ref_davis17_has_four_annotations_of_every_object(tmp_path):
    root = clip_sets.ref_davis17(tmp_path / "texts")
    assert (infer(root), SPLITS["ref_davis17"](root)) == ("ref_davis17", ["train", "val"])
    found = by_id(read("ref_davis17", root, "val"))
    kinds = [
        "annotator1_first_frame",
        "annotator1_full_video",
        "annotator2_first_frame",
        "annotator2_full_video",
    ]
    assert {n: s.meta["kind"] for n, s in found.items()} == {f"dogs_{n}": kinds[n % 4] for n in range(8)}
    assert (found["dogs_1"].text, found["dogs_6"].text) == ("the red 1_full_video", "the café 2")
    assert same(found["dogs_6"].masks[0], draw().masks[2])
    converted = clip_sets.ref_youtube_vos(tmp_path / "converted")
    assert {s.sample_id: s.meta["kind"] for s in read("ref_davis17", converted)} == {
        f"0062_{n}": kinds[n % 4] for n in (0, 10, 2)
    }
    file = root / "davis_text_annotations/Davis17_annot2.txt"
    whole = file.read_bytes()
    for content, message in (
        (whole + b"\nbear 3", r"Davis17_annot2.txt: line 5 is 'bear 3', not <clip> <object>"),
        (
            whole.replace(b"dogs 2", b"dogs 3"),
            r"clip dogs: the four files describe .* \[\[1, 2\], \[1, 2\], \[1, 3\], \[1, 2\]\]",
        ),
    ):
        file.write_bytes(content)
        with pytest.raises(DataError, match=message):
            read("ref_davis17", root, "val")


def test_ref_sav_says_what_the_objects_of_a_video_file_do(tmp_path):
    root = clip_sets.ref_sav(tmp_path)
    assert (infer(root), SPLITS["ref_sav"](root)) == ("ref_sav", ["train"])
    red, blue = read("ref_sav", root)
    assert (red.text, blue.text, red.sample_id) == (
        "A red square slides right.",
        "A blue square appears.",
        "sav_000001_0",
    )
    assert same(blue.masks[0], draw().masks[2])
    assert red.frames == blue.frames
    asked = turn(red, Random(0))
    assert (
        asked.question == "Please segment the object according to the description: A red square slides right."
    )


def test_chat_univi_is_a_conversation_about_a_video_file(written):
    root = written("chat_univi")
    assert (infer(root), SPLITS["chat_univi"](root)) == ("chat_univi", ["train"])
    whole, first = read("chat_univi", root)
    assert (whole.past, whole.question, whole.text) == (
        (("What moves?", "A red square."),),
        "Where to?",
        "To the right.",
    )
    assert (first.past, first.question, first.text, first.task) == (
        (),
        "What moves?",
        "A red square.",
        "conversation",
    )
    assert (whole.frames, len(first.frames)) == (first.frames, 6)


@pytest.mark.parametrize("form", ["mevis", "revos", "ref_youtube_vos"])
def test_each_file_of_a_set_of_expressions_is_parsed_once(written, form, monkeypatch):
    parsed, load_json = [], checks.load_json
    monkeypatch.setattr(
        checks, "load_json", lambda file, **options: parsed.append(file) or load_json(file, **options)
    )
    assert read(form, written(form))
    assert len(set(parsed)) == len(parsed) > 0


def change_json(file: Path, at: tuple[Any, ...], value: Any) -> None:
    content = parent = json.loads(file.read_text())
    for key in at[:-1]:
        parent = parent[key]
    parent[at[-1]] = value
    file.write_text(json.dumps(content))


FAULTS = [
    ("youtube_vis", "train/instances.json", ("annotations", 0, "video_id"), 2, "annotation 1: video_id 2 is not in videos"),
    ("youtube_vis", "train/instances.json", ("annotations", 0, "category_id"), 8, "annotation 1: category_id 8 is not in categories"),
    ("youtube_vis", "train/instances.json", ("annotations", 1, "segmentations"), [None], "annotation 2: 1 segmentations for 6 frames"),
    ("youtube_vis", "train/instances.json", ("annotations", 1, "segmentations"), [None] * 6, "object 2: no pixel in any frame"),
    ("youtube_vis", "train/instances.json", ("annotations", 1, "id"), 1, "annotation 1: id 1 comes twice"),
    ("youtube_vis", "train/instances.json", ("videos", 0, "file_names", 5), "0043f/9.jpg", r"video 1: the image .*9.jpg does not exist"),
    ("youtube_vis", "train/instances.json", ("videos", 0, "height"), 25, r"video 1: .* \[height, width\] = \[25, 32\], the file has"),
    ("coco_video", "demo_train.json", ("annotations", 0, "image_id"), 7, "annotation 11: image_id 7 is not in images"),
    ("coco_video", "demo_train.json", ("annotations", 1, "image_id"), 49, "instance 1 comes twice in image 49"),
    ("coco_video", "demo_train.json", ("images", 1, "frame_id"), 5, "video 'v': frame_id .* comes twice"),
    ("coco_video", "demo_train.json", ("annotations", 0, "segmentation"), {"size": [9, 9], "counts": "0"}, r"annotation 11: RLE size"),
    ("mevis", "train/meta_expressions_v2.json", ("videos", "0ab4", "expressions", "0", "anno_id"), [9], "mask_dict.json: 9 is missing"),
    ("mevis", "train/mask_dict.json", ("2",), [None] * 5, "mask_dict.json: 2 is .* for each of the video's 6 frames"),
    ("mevis", "train/meta_expressions_v2.json", ("videos", "0ab4", "frames", 1), "00000", "a frame comes twice in the list"),
    ("mevis", "train/meta_expressions_v2.json", ("videos", "0ab4", "frames", 1), "00006", r"the image .*00006.jpg does not exist"),
    ("revos", "meta_expressions_train_.json", ("videos", "MOSE/2", "frames", 5), "00030", "don't number those of .*2.mp4, which has 30"),
    ("revos", "meta_expressions_train_.json", ("videos", "MOSE/2", "expressions", "2", "type_id"), 3, "'2': type_id 3 is none of"),
    ("revos", "meta_expressions_train_.json", ("videos", "MOSE/2", "expressions", "2", "type_id"), 0, r"and anno_id is \[\]"),
    ("ref_youtube_vos", "meta_expressions/train/meta_expressions.json", ("videos", "0062", "expressions", "2", "obj_id"), "3",
     r"expression '2': obj_id 3 is unknown: the PNGs of .*0062 show \[1, 2\]"),
    ("ref_sav", "Ref-SAV.json", ("sav_000001", "objects", "2"), {"formated": "x"}, "object '2' is unknown: .* has the objects 0 to 1"),
    ("ref_sav", "Ref-SAV.json", ("sav_000001", "video_path"), "sav_0.mp4", "'sav_000001': the file 'sav_0.mp4' is in none of"),
    ("chat_univi", "video_chat.json", (1, "video"), "v_2.mp4", "record 1: the video 'v_2.mp4' is in none of"),
    ("chat_univi", "video_chat.json", (1, "conversations", 0, "from"), "user", "record 1: conversations.0.from 'user' is not one of"),
    ("sav", "sav_000/sav_000001_manual.json", ("masklet", 2), [], r"frame 2: \[\] is no list of a mask for each of 2 objects"),
    ("sav", "sav_000/sav_000001_manual.json", ("masklet_id", 1), 0, "object 0: this id comes twice"),
    ("sav", "sav_000/sav_000001_manual.json", ("video_width", ), float("nan"), "video_width is nan: Input should be a finite number"),
    ("sav", "sav_000/sav_000001_manual.json", ("video_width", ), 48.0, r"\[height, width\] = \[24, 48\], the file has \[24, 32\]"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "name", "at", "value", "message"), FAULTS)
def test_a_wrong_record_is_named(tmp_path, written, form, name, at, value, message):
    root = shutil.copytree(written(form), tmp_path / form)
    change_json(root / name, at, value)
    with pytest.raises(DataError, match=message) as caught:
        read(form, root)
    assert str(tmp_path) in str(caught.value)


def test_wrong_palettes_and_videos_are_named(tmp_path, written):
    root = clip_sets.davis(tmp_path)
    file = root / "Annotations/480p/bear/00005.png"
    whole = file.read_bytes()
    Image.new("P", (WIDTH, HEIGHT - 1)).save(file)
    with pytest.raises(DataError, match=r"clip bear: .*00005.png is \(23, 32\), the frames \(24, 32\)"):
        read("davis", root)
    Image.new("RGB", (WIDTH, HEIGHT)).save(file)
    with pytest.raises(DataError, match=r"clip bear: .*00005.png has Pillow's mode RGB"):
        read("davis", root)
    file.write_bytes(whole[:-20])
    with pytest.raises(DataError, match=r"clip bear: .*00005.png can't be read"):
        read("davis", root)
    file.write_bytes(whole)
    (root / "JPEGImages/480p/bear/00010.jpg").unlink()
    with pytest.raises(
        DataError, match=r"clip bear: .*00010.png annotates a frame that the clip doesn't have"
    ):
        read("davis", root)
    root = shutil.copytree(written("sav"), tmp_path / "sav")
    video = root / "sav_000/sav_000001.mp4"
    short = draw().pictures
    clip_sets.write_video(video, short)
    with pytest.raises(
        DataError, match=r"6 annotated frames, one in 4, are more than .*sav_000001.mp4 has \(6 frames\)"
    ):
        read("sav", root)
    video.write_bytes(video.read_bytes()[:300])
    with pytest.raises(DataError, match=r"sav_000001_manual.json: .* cannot read the video .*sav_000001.mp4"):
        read("sav", root)
    video.unlink()
    with pytest.raises(DataError, match=r"the video .*sav_000001.mp4 does not exist"):
        read("sav", root)
