"""Every operation against truth: drawn scenes, photographs and clips with known masks, and masks worked out
by hand.

How good masks and tracks of a trained model are is a question to its checkpoint; here, what is done with
them.
"""

from __future__ import annotations

import io
import json

import numpy as np
import pytest
from PIL import Image

from ans_core.agent import frozen
from ans_core.agent.episode import Episode, Toolbox
from ans_core.agent.frozen import Clip, follow
from ans_core.agent.operations.track_object import describe
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.workspace import Workspace, box_of, opened
from ans_core.agent.world import draw_question
from ans_core.agent.world.drawing import PATTERNS
from ans_core.data.clips import draw_clip
from ans_core.data.formats import regions, videos
from ans_core.metrics.mask import counts
from ans_core.metrics.video import j_and_f
from ans_core.model.network import Network
from ans_core.pictures import rle
from tests import tiny
from tests.golden import REFERENCE

DATA = REFERENCE / "data"
real = pytest.mark.skipif(not DATA.is_dir(), reason=f"no reference data at {DATA} (set ANS_REFERENCE)")
FIRST_BOX = [0, 0, 1000, 1000]


def call(toolbox: Toolbox, workspace: Workspace, name: str, **arguments: object):  # type: ignore[no-untyped-def]
    return toolbox.call(workspace, Call(name=name, arguments=arguments))


def noise(width: int = 384, height: int = 200) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (height, width, 3), dtype=np.uint8)


def test_the_process_of_operations_starts_without_the_data_sets_and_all_that_reads_them(
    toolbox: Toolbox,
) -> None:
    loaded = toolbox._worker.call(eval, "set(__import__('sys').modules)", seconds=60.0)
    assert "ans_core.agent.operations" in loaded
    assert not {"ans_core.data", "datasets", "pandas", "transformers"} & loaded  # 2 of 4 s


def test_zoom_shows_the_native_pixels_of_its_box_and_crops_chain(toolbox: Toolbox) -> None:
    pixels = noise(400, 200)
    workspace = Workspace.of([pixels])
    seen, workspace = call(toolbox, workspace, "zoom_in", bbox_2d=[250, 500, 500, 1000])
    assert (seen.text, seen.turn()) == (
        "image_2: [250, 500, 500, 1000]",
        "<image>\nimage_2: [250, 500, 500, 1000]",
    )
    assert (np.asarray(workspace.picture("image_2")) == pixels[100:200, 100:200]).all()
    seen, workspace = call(toolbox, workspace, "zoom_in", image="image_2", bbox_2d=[100, 0, 600, 200])
    # thousandths of the crop
    assert (np.asarray(workspace.picture("image_3")) == pixels[100:120, 110:160]).all()
    assert workspace.picture("image_3", least=96).size == (96, 38)
    assert workspace.picture("image_2", least=96).size == (100, 100)


def test_zoom_on_a_mask_shows_its_surroundings_and_a_tiny_mask_as_much_as_a_box_needs(
    toolbox: Toolbox,
) -> None:
    masks = np.zeros((2, 200, 400), bool)
    masks[0, 50:100, 100:200] = masks[1, 0, 399] = True
    _, workspace = call(toolbox, Workspace.of([noise(400, 200)], masks=list(masks)), "zoom_in", mask="mask_1")
    assert workspace.image("image_2").box == (90, 40, 210, 110)  # a tenth of the longer side on every side
    _, workspace = call(toolbox, workspace, "zoom_in", mask="mask_2")
    assert workspace.image("image_3").box == (392, 0, 400, 8)  # in the corner, moved into the picture
    flat = Workspace.of([noise(400, 6)], masks=[np.ones((6, 400), bool)])
    assert call(toolbox, flat, "zoom_in", mask="mask_1")[0].error == "bad_box"


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"bbox_2d": [0, 0, 1001, 500]}, "bad_box"),
        ({"bbox_2d": [-1, 0, 500, 500]}, "bad_box"),
        ({"bbox_2d": [500, 0, 500, 500]}, "bad_box"),
        ({"bbox_2d": [600, 0, 500, 500]}, "bad_box"),
        ({"bbox_2d": [0, 0, 17, 500]}, "bad_box"),  # 7 pixels
        ({"bbox_2d": [0, 0, 500, 500], "image": "image_2"}, "unknown_handle"),
        ({"bbox_2d": [0, 0, 500, 500], "image": "mask_1"}, "unknown_handle"),
        ({"mask": "mask_9"}, "unknown_handle"),
        ({"mask": "mask_1", "image": "image_1"}, "wrong_type"),
        ({}, "wrong_type"),
    ],
)
def test_zoom_refuses(toolbox: Toolbox, arguments: dict[str, object], kind: str) -> None:
    workspace = Workspace.of([noise(400, 200)], masks=[np.ones((200, 400), bool)])
    observation, after = call(toolbox, workspace, "zoom_in", **arguments)
    assert (observation.error, after) == (kind, workspace)


def test_a_box_of_8_pixels_is_enough_and_one_a_hundred_times_as_long_as_wide_is_the_longest(
    toolbox: Toolbox,
) -> None:
    workspace = Workspace.of([noise(900, 100)])
    assert call(toolbox, workspace, "zoom_in", bbox_2d=[0, 0, 1000, 90])[0].ok  # 900 x 9
    assert (
        call(toolbox, Workspace.of([noise(1000, 100)]), "zoom_in", bbox_2d=[0, 0, 1000, 90])[0].error
        == "bad_box"
    )
    assert call(toolbox, workspace, "zoom_in", bbox_2d=[0, 0, 8, 80])[0].ok  # 8 x 8


def test_select_frames_shows_frames_and_refuses_those_that_are_not_there(toolbox: Toolbox) -> None:
    frames = [tiny.picture(number) for number in range(3)]
    seen, workspace = call(toolbox, Workspace.of(frames), "select_frames", frames=[2, 0])
    assert seen.pictures == ("image_2", "image_3")
    assert (np.asarray(workspace.picture("image_2")) == np.asarray(Image.open(io.BytesIO(frames[2])))).all()
    assert call(toolbox, workspace, "select_frames", frames=[3])[0].error == "bad_box"
    assert call(toolbox, Workspace.of(frames[:1]), "select_frames", frames=[0])[0].error == "not_a_clip"


def test_properties_tell_place_rank_and_colour(toolbox: Toolbox) -> None:
    pixels = np.full((100, 200, 3), 128, np.uint8)
    masks = np.zeros((2, 100, 200), bool)
    masks[0, 20:40, 100:150] = masks[1, 50:100, 0:60] = True
    pixels[masks[1]] = (38, 70, 220)
    seen, _ = call(
        toolbox, Workspace.of([pixels], masks=list(masks)), "get_properties", masks=["mask_1", "mask_2"]
    )
    one, two = seen.values["mask_1"], seen.values["mask_2"]
    assert (one["area"], one["rank"], one["box"], one["centroid"]) == (
        5.0,
        2,
        [500, 200, 750, 400],
        [625, 300],
    )
    assert (two["area"], two["rank"], two["colour"], two["texture"]) == (15.0, 1, "blue", "plain")
    assert (one["colour"], one["extent"], one["solidity"], one["parts"]) == ("grey", 1.0, 1.0, 1)
    seen, _ = call(
        toolbox,
        Workspace.of([pixels], masks=list(masks)),
        "get_properties",
        masks=["mask_2"],
        properties=["area", "rank"],
    )
    assert seen.text == "mask_2: area 15.0, rank 1"


@pytest.mark.slow
def test_the_patterns_of_drawn_scenes_are_measured_right(toolbox: Toolbox) -> None:
    """The independent way to what a zoom shows."""
    right = 0
    for index in range(20):
        question = draw_question("pattern", seed=3, split="val", index=index)
        mask = rle.decode(question.targets[0].masks[0])
        seen, _ = call(
            toolbox,
            Workspace.of(question.frames, masks=[mask]),
            "get_properties",
            masks=["mask_1"],
            properties=["texture"],
        )
        right += seen.values["mask_1"]["texture"] == question.answer
        assert question.answer in PATTERNS
    assert right >= 19


def edits(one: list[str] | str, other: list[str] | str) -> int:
    """Levenshtein's distance."""
    row = list(range(len(other) + 1))
    for i, a in enumerate(one, start=1):
        row, before = [i], row
        for j, b in enumerate(other, start=1):
            row.append(min(before[j] + 1, row[-1] + 1, before[j - 1] + (a != b)))
    return row[-1]


@pytest.mark.slow
def test_text_of_drawn_scenes_is_read_by_templates() -> None:
    """Digits of 10 pixels on things of every colour. (The font is one of the reader's own: an upper
    bound.)"""
    from ans_core.agent import ocr

    wrong_characters = wrong_words = 0
    count = 20
    for index in range(count):
        question = draw_question("text", seed=5, split="val", index=index)
        picture = Image.open(io.BytesIO(question.frames[0]))
        lines = ocr.read_lines(picture.crop(box_of(rle.decode(question.targets[0].masks[0]))), by="template")
        said = max(lines, key=lambda line: line.confidence).text if lines else ""
        wrong_characters += edits(said, question.answer)
        wrong_words += said != question.answer
    assert wrong_characters / (2 * count) <= 0.06  # CER
    assert wrong_words / count <= 0.10  # WER


def test_text_has_its_place_in_the_native_picture_and_none_is_an_observation(toolbox: Toolbox) -> None:
    from PIL import ImageDraw, ImageFont

    canvas = Image.new("RGB", (400, 400), (200, 200, 90))
    ImageDraw.Draw(canvas).text(
        (300, 100), "47", fill=(0, 0, 0), font=ImageFont.load_default(size=20), anchor="mm"
    )
    workspace = Workspace.of([canvas])
    _, workspace = call(toolbox, workspace, "zoom_in", bbox_2d=[500, 0, 1000, 500])
    seen, _ = call(toolbox, workspace, "read_text", image="image_2")
    (line,) = seen.values["lines"]
    assert line["text"] == "47"
    # at its end: copied from a fixed distance
    assert seen.text == f"{line['bbox_2d']}, confidence {line['confidence']}: '47'"
    x1, y1, x2, y2 = line["bbox_2d"]
    assert 700 < x1 < 750 < x2 < 800
    assert 200 < y1 < 250 < y2 < 300
    _, workspace = call(toolbox, workspace, "zoom_in", bbox_2d=[0, 500, 500, 1000])
    assert call(toolbox, workspace, "read_text", image="image_3")[0].error == "nothing_found"


@pytest.mark.parametrize("how", ["point_2d", "bbox_2d"])
def test_segments_of_a_crop_lie_on_the_native_picture(tiny_model: Network, how: str) -> None:
    """An untrained model's mask: where it lies, not what it shows."""
    with Toolbox(tiny_model) as toolbox:
        _, workspace = call(toolbox, Workspace.of([noise(400, 200)]), "zoom_in", bbox_2d=[500, 0, 1000, 500])
        where = [500, 500] if how == "point_2d" else [200, 200, 800, 800]
        seen, after = call(toolbox, workspace, "segment_object_at", image="image_2", **{how: where})
        outside, _ = call(
            toolbox, workspace, "segment_object_at", image="image_2", **{how: [1100] * len(where)}
        )
        still, _ = call(toolbox, after, "track_object", mask="mask_1")
    assert outside.error == "bad_box"
    if seen.ok:
        x1, y1, x2, y2 = box_of(after.pixels("mask_1"))
        assert (x1 >= 200, x2 <= 400, y1 >= 0, y2 <= 100) == (True,) * 4
        assert seen.values["area"] == round(100 * float(after.pixels("mask_1").mean()), 2)
        assert still.error == "not_a_clip"
    else:
        assert (seen.error, still.error) == ("nothing_found", "unknown_handle")


@pytest.mark.parametrize("start", [0, 2])
def test_a_track_goes_both_ways_from_its_mask_and_says_how_things_move(
    tiny_model: Network, colour_sam: None, start: int
) -> None:
    """A red square 8 pixels further to the right in every frame; from frame 3 on, a blue one at the top."""
    frames, truth = np.full((5, 64, 64, 3), 90, np.uint8), np.zeros((5, 64, 64), bool)
    for f in range(5):
        truth[f, 20:36, 8 * f : 8 * f + 16] = True
        frames[f][truth[f]] = (200, 30, 30)
    frames[3:, 0:10, 0:10] = (30, 30, 200)
    with Toolbox(tiny_model) as toolbox:
        workspace = Workspace.of(list(frames))
        _, workspace = call(toolbox, workspace, "select_frames", frames=[start])
        _, workspace = call(
            toolbox,
            workspace,
            "segment_object_at",
            image="image_2",
            point_2d=[1000 * (8 * start + 8) // 64, 430],
        )
        seen, workspace = call(toolbox, workspace, "track_object", mask="mask_1")
    masks = np.stack([rle.decode(one) for one in workspace.masklet("track_1")])
    assert np.mean([j_and_f(a, b) for a, b in zip(masks, truth, strict=True)]) == 1.0  # J&F
    assert (seen.values["direction"], seen.values["visible"], seen.values["forward_backward_iou"]) == (
        "right",
        5,
        1.0,
    )
    assert seen.values["boxes"]["4"] == [500, 312, 750, 562]
    assert workspace.digest("track_1") != workspace.digest("mask_1")


def test_the_way_of_true_masks_is_told_right() -> None:
    clips = [draw_clip(seed=9, split="val", index=index, image_size=96, frames=8) for index in range(30)]
    told = [
        (thing, describe(masks))
        for clip in clips
        for thing, masks in zip(clip.things, clip.masks, strict=True)
    ]
    straight = [(thing, said) for thing, said in told if thing.motion == "straight"]
    # the others are hidden in part
    assert np.mean([said["direction"] == thing.direction for thing, said in straight]) > 0.9
    assert all(said["left"] for thing, said in told if thing.motion == "leaving")
    assert all(said["entered"] for thing, said in told if thing.motion == "entering")


@pytest.mark.parametrize("frames", [1, 3])
def test_an_untrained_models_masks_and_tracks_go_through(tiny_model: Network, frames: int) -> None:
    """The real SAM2, from a mask that is given: its masks have the clip's size, and the given one stays as it
    is."""
    mask = rle.decode(tiny.square(8, 16, 24, 32))
    workspace = Workspace.of([tiny.picture(n) for n in range(frames)], masks=[mask])
    with Toolbox(tiny_model) as toolbox:
        seen, after = call(toolbox, workspace, "track_object", mask="mask_1")
    if frames == 1:
        assert seen.error == "not_a_clip"
    else:
        masks = [rle.decode(one) for one in after.masklet("track_1")]
        assert len(masks) == frames
        assert (masks[0] == mask).all()


@pytest.mark.slow
@pytest.mark.parametrize("count", [5, 20])
def test_following_forth_and_back_encodes_few_frames_twice_and_gives_what_fresh_clips_give(
    tiny_model: Network, monkeypatch: pytest.MonkeyPatch, count: int
) -> None:
    pictures = [opened(tiny.picture(n)) for n in range(count)]
    mask = rle.decode(tiny.square(8, 16, 24, 32))
    orders = [range(2, -1, -1), range(2, count), range(count - 1, 1, -1)]
    fresh = [follow(Clip(tiny_model, pictures), order, mask) for order in orders]
    encoded: list[int] = []
    encode = tiny_model.sam2.encode
    monkeypatch.setattr(
        tiny_model.sam2, "encode", lambda pixels: encoded.append(len(pixels)) or encode(pixels)
    )
    clip = Clip(tiny_model, pictures)
    for order, expected in zip(orders, fresh, strict=True):
        assert (follow(clip, order, mask) == expected).all()
    assert sum(encoded) == (count if count == 5 else 3 + (count - 3) + (count - 10))


@pytest.mark.slow
@real
def test_properties_of_photographs_are_those_of_their_annotation(toolbox: Toolbox) -> None:
    """Area and box against COCO's own code, and a zoom on the box holds the whole mask."""
    samples = list(regions.read(DATA / "regions", split="val"))[:25]
    assert len(samples) == 25
    for sample in samples:
        coded = sample.masks[0][0]
        assert coded is not None
        workspace = Workspace.of(sample.frames, masks=[rle.decode(coded)])
        seen, workspace = call(toolbox, workspace, "get_properties", masks=["mask_1"])
        told = seen.values["mask_1"]
        assert told["area"] == pytest.approx(
            100 * rle.area(coded) / (sample.width * sample.height), abs=0.005
        )
        np.testing.assert_allclose(np.array(told["box"]) / 1000, rle.box(coded), atol=6e-4)
        assert 0 < told["solidity"] <= 1
        zoomed, workspace = call(toolbox, workspace, "zoom_in", mask="mask_1")
        if zoomed.ok:
            x1, y1, x2, y2 = workspace.image("image_2").box
            inside = np.zeros_like(rle.decode(coded))
            inside[y1:y2, x1:x2] = rle.decode(coded)[y1:y2, x1:x2]
            assert counts(rle.encode(inside), coded).iou == 1.0
        else:
            assert zoomed.error == "bad_box"


@real
@pytest.mark.slow
def test_true_tracks_of_real_clips_are_described_within_the_picture() -> None:
    for sample in videos.read(DATA / "videos", split="val"):
        masks = np.stack(
            [rle.decode(m) if m else np.zeros((sample.height, sample.width), bool) for m in sample.masks[0]]
        )
        told = describe(masks)
        assert told["visible"] <= len(masks)
        assert told["entered"] == (not masks[0].any()) or masks[0].sum() < 0.05 * masks.sum((1, 2)).max()


def test_a_handle_is_known_by_its_content_and_never_changes(toolbox: Toolbox) -> None:
    workspace = Workspace.of([noise()])
    episode = Episode(toolbox, workspace)
    for box in (FIRST_BOX, [0, 0, 500, 500], FIRST_BOX):
        episode.turn(call_text(Call(name="zoom_in", arguments={"bbox_2d": box})))
    known = episode.workspace
    assert (
        known.digest("image_1")
        == known.digest("image_2")
        == known.digest("image_4")
        != known.digest("image_3")
    )
    assert known.digest("image_1") == workspace.digest("image_1")
    assert known.digest("image_1") != Workspace.of([noise(300)]).digest("image_1")
    assert json.dumps(known.thousandths(known.image("image_3").box)) == "[0, 0, 500, 500]"


def test_locate_shows_the_crop_around_the_mask_of_words_which_the_segmenter_draws(
    own_model: Network, tiny_model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call gives what segmenting by words and zooming on the mask give; words that mean nothing show
    nothing."""
    asked: list[object] = []

    def by_words(model: Network, picture: Image.Image, words: str) -> tuple[np.ndarray, float]:
        asked.append(model)
        mask = np.zeros((picture.height, picture.width), bool)
        mask[50:100, 100:200] = words == "the cat"
        return mask, 0.9

    monkeypatch.setattr(frozen, "mask_by_words", by_words)
    with Toolbox(own_model, segmenter=tiny_model) as toolbox:
        start = Workspace.of([noise(400, 200)])
        seen, located = call(toolbox, start, "locate", text="the cat")
        _, segmented = call(toolbox, start, "segment_object_at", text="the cat")
        _, segmented = call(toolbox, segmented, "zoom_in", mask="mask_1")
        nothing, _ = call(toolbox, start, "locate", text="a dog")
    assert (
        seen.turn()
        == "<image>\nmask_1: [250, 250, 500, 500], area 6.25 %, predicted IoU 0.9; image_2: [225, 200, 525, 550]"
    )
    assert (seen.pictures, seen.values["image"]) == (("image_2",), "image_2")
    assert dict(located.handles) == dict(segmented.handles)
    assert nothing.error == "nothing_found"
    assert asked == [tiny_model] * 3
