from __future__ import annotations

import io
import json
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ans_core.checkpoints import sam2 as sam2_files
from ans_core.model.masks import upsample_logits
from ans_core.pictures import media, overlay, video_file
from ans_core.tracking import track
from ans_core.tracking.follow import follow, label_map
from flows import cli
from tests import tiny
from tests.checkpoints.test_sam2 import drawn


@pytest.fixture
def video(tmp_path: Path) -> Path:
    folder = tmp_path / "video"
    folder.mkdir()
    for index, frame in enumerate(tiny.clip(0, 4).frames):
        Image.open(io.BytesIO(frame)).save(folder / f"{index}.png")
    return folder


def test_frame_belongs_to_the_prompt_before_it() -> None:
    words = ["track", "v.mp4", "--point", "3,4", "--box", "1,2,3,4", "--frame", "7", "--mask", "m.png"]
    assert cli.parse(words).prompts == [("point", "3,4", 0), ("box", "1,2,3,4", 7), ("mask", "m.png", 0)]
    for wrong in (["--frame", "3"], ["--point", "3,4", "--frame", "two"], ["--image-size", "0"]):
        with pytest.raises(SystemExit):
            cli.parse(["track", "v.mp4", *wrong])


@pytest.mark.slow
def test_objects_are_written_as_palette_pngs_with_their_numbers(tmp_path: Path, video: Path) -> None:
    sam2_files.save(drawn(temporal=True), tmp_path / "sam2", metadata={})
    mask = np.zeros((64, 64), np.uint8)
    mask[16:32, 0:16] = 255
    Image.fromarray(mask).save(tmp_path / "mask.png")
    given = [("mask", str(tmp_path / "mask.png"), 0), ("box", "30,30,64,64", 2)]
    options = {"checkpoint": str(tmp_path / "sam2"), "image_size": 0, "device": "cpu", "fps": 8.0}
    track.write_track(video, given, out=tmp_path / "out", **options)
    labels = [np.asarray(Image.open(tmp_path / f"out/masks/{index:05d}.png")) for index in range(4)]
    assert Image.open(tmp_path / "out/masks/00000.png").mode == "P"
    assert (labels[0] == 1).sum() == pytest.approx(256, abs=40)
    assert not any((labels[index] == 2).any() for index in (0, 1))  # prompted in frame 2
    assert json.loads((tmp_path / "out/track.json").read_text())["pixels"] == [
        sum(int((a == n).sum()) for a in labels) for n in (1, 2)
    ]
    assert len(list(video_file.shots(tmp_path / "out/overlay.mp4"))) == 4


@pytest.mark.slow
def test_many_objects_are_drawn_one_at_a_time(tmp_path: Path, video: Path) -> None:
    width, height, count = 480, 320, 33
    for path in sorted(video.iterdir())[:2]:
        Image.open(path).resize((width, height)).save(path)
    for path in sorted(video.iterdir())[2:]:
        path.unlink()
    sam2_files.save(drawn(temporal=True), tmp_path / "sam2", metadata={})
    given = [("box", f"{10 * n},{8 * n},{10 * n + 90},{8 * n + 60}", 0) for n in range(count)]
    options = {
        "checkpoint": str(tmp_path / "sam2"),
        "image_size": 0,
        "device": "cpu",
        "fps": 8.0,
    }
    track.write_track(video, given, out=tmp_path / "out", **options)
    sam2, pictures = (
        sam2_files.load(tmp_path / "sam2"),
        [Image.open(path).convert("RGB") for path in sorted(video.iterdir())],
    )
    size = {"size": sam2.image_size, "height": height, "width": width}
    for index, low in follow(sam2, pictures, track.read_prompts(given), frames=2):
        stacked = np.stack([upsample_logits(z, **size) for z in low])
        labels = np.where(stacked.max(0) > 0, stacked.argmax(0) + 1, 0)
        assert (np.asarray(Image.open(tmp_path / f"out/masks/{index:05d}.png")) == labels).all()
    tracemalloc.start()
    track.write_track(video, given, out=tmp_path / "out", **options)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < stacked.nbytes / 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ([], "nothing to follow: give --point"),
        ([("point", "3", 0)], "--point 3: give 2 numbers with commas"),
        ([("box", "1,2,x,4", 0)], "--box 1,2,x,4: give 4 numbers"),
        ([("point", "nan,3", 0)], "--point nan,3: give 2 numbers"),
        (
            [("point", "3,99", 0)],
            r"object 1 \(--point 3,99\): the point 3,99 lies outside of the picture of 64 x 64",
        ),
        ([("point", "3,3", 9)], "there is no frame 9; the video has 4"),
        ([("point", "3,3", 0)] * 256, "256 objects are more than the 255"),
    ],
)
def test_prompts_are_checked_before_a_model_is_loaded(
    tmp_path: Path, video: Path, given: list[track.PromptArgument], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        track.write_track(
            video, given, checkpoint="none", out=tmp_path / "out", image_size=0, device="cpu",
            fps=8.0,
        )  # fmt: skip


def test_a_video_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.mp4").write_bytes(b"no video")
    with pytest.raises(ValueError, match=r"cannot read the video .*broken.mp4"):
        track.write_track(
            tmp_path / "broken.mp4", [("point", "3,3", 0)], checkpoint="none", out=tmp_path / "out", image_size=0, device="cpu",
            fps=8.0,
        )  # fmt: skip


def test_the_surest_object_gets_a_pixel() -> None:
    logits = np.array([[[2.0, -1.0, 1.0]], [[1.0, -2.0, 3.0]]])
    assert label_map(logits).tolist() == [[1, 0, 2]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"image_size": 100}, "--image-size 100: give a multiple of 32"),
        ({"image_size": -64}, "--image-size -64: give a multiple of 32"),
        ({"fps": 0.0}, "fps"),
        ({"device": "foo"}, "device_map 'foo' is no device"),
        ({"device": "cuda:99"}, "device_map 'cuda:99': torch .* sees .* GPUs here"),
    ],
)
def test_sizes_are_checked_before_a_model_is_loaded(
    tmp_path: Path, video: Path, change: dict[str, object], told: str
) -> None:
    options: dict[str, Any] = {
        "checkpoint": "none",
        "out": tmp_path / "out",
        "image_size": 0,
        "device": "cpu",
        "fps": 8.0,
    }
    with pytest.raises(ValueError, match=told):
        track.write_track(video, [("point", "3,3", 0)], **options | change)


def test_frames_of_unequal_size_are_named_before_a_model_is_loaded(tmp_path: Path, video: Path) -> None:
    Image.new("RGB", (32, 64)).save(video / "2.png")
    with pytest.raises(
        ValueError, match=r"2\.png is 32 x 64, .*0\.png 64 x 64; bring the frames to one size"
    ):
        track.write_track(
            video, [("point", "3,3", 0)], checkpoint="none", out=tmp_path / "out", image_size=0, device="cpu",
            fps=8.0,
        )  # fmt: skip


@pytest.mark.slow
def test_masks_of_others_and_what_is_read_stay_where_they_are(tmp_path: Path, video: Path) -> None:
    sam2_files.save(drawn(temporal=True), tmp_path / "sam2", metadata={})
    options = {
        "checkpoint": str(tmp_path / "sam2"),
        "image_size": 0,
        "device": "cpu",
        "fps": 8.0,
    }
    own = tmp_path / "dog/masks/00001.png"
    own.parent.mkdir(parents=True)
    Image.new("L", (64, 64), 255).save(own)
    before = own.read_bytes()
    with pytest.raises(ValueError, match=r"00001\.png is not what an earlier `ans track` wrote"):
        track.write_track(video, [("mask", str(own), 0)], out=tmp_path / "dog", **options)
    assert own.read_bytes() == before
    other = own.rename(own.with_name("0001.png"))
    track.write_track(video, [("mask", str(other), 0)], out=tmp_path / "dog", **options)
    assert other.read_bytes() == before
    written = tmp_path / "dog/masks/00000.png"
    assert sorted(path.name for path in written.parent.iterdir()) == [
        "00000.png",
        "00001.png",
        "00002.png",
        "00003.png",
        "0001.png",
    ]
    with pytest.raises(ValueError, match=r"00000\.png is what an earlier `ans track` left there"):
        track.write_track(video, [("mask", str(written), 0)], out=tmp_path / "dog", **options)
    shown = tmp_path / "dog/overlay.mp4"
    before = shown.read_bytes()
    with pytest.raises(ValueError, match=r"overlay\.mp4 is what an earlier `ans track` left there"):
        track.write_track(shown, [("point", "3,3", 0)], out=tmp_path / "dog", **options)
    assert shown.read_bytes() == before
    # its own are replaced
    track.write_track(video, [("point", "3,3", 0)], out=tmp_path / "dog", **options | {"fps": 4.0})
    assert shown.read_bytes() != before
    for name in ("overlay.mp4", "track.json"):
        folder = tmp_path / f"beside {name}"
        folder.mkdir()
        (folder / name).write_text("[1]")
        with pytest.raises(ValueError, match=f"{name} is not what an earlier `ans track` wrote"):
            track.write_track(video, [("point", "3,3", 0)], out=folder, **options)
        assert (folder / name).read_text() == "[1]"


def test_a_palette_picture_of_several_objects_is_refused_and_a_dark_one_is_read(tmp_path: Path) -> None:
    labels = np.zeros((8, 8), np.uint8)
    labels[2:4, 2:4] = 1
    picture = Image.fromarray(labels, "P")
    picture.putpalette([0, 0, 0, 0, 0, 1])
    picture.save(tmp_path / "one.png")
    (prompt,) = track.read_prompts([("mask", str(tmp_path / "one.png"), 0)])
    assert prompt.mask is not None
    assert prompt.mask.sum() == 4
    grey = Image.fromarray(labels, "P")
    grey.putpalette([255, 255, 255, 0, 0, 0])  # a picture saved with few colours, whose first one is white
    grey.save(tmp_path / "grey.png")
    (prompt,) = track.read_prompts([("mask", str(tmp_path / "grey.png"), 0)])
    assert prompt.mask is not None
    assert prompt.mask.sum() == 60
    labels[6, 6] = 2
    overlay.index_picture(labels).save(tmp_path / "two.png")
    Image.fromarray(labels, "L").save(tmp_path / "two of grey.png")
    Image.fromarray(labels.astype(np.uint16)).save(tmp_path / "two of 16 bits.png")
    Image.fromarray(labels.astype(np.float32)).save(tmp_path / "fractions.tif")
    with pytest.raises(ValueError, match="floating-point numbers; save it with 8 or 16 bits"):
        track.read_prompts([("mask", str(tmp_path / "fractions.tif"), 0)])
    for name in ("two.png", "two of grey.png", "two of 16 bits.png"):
        with pytest.raises(ValueError, match="holds the objects 1, 2; give one file an object"):
            track.read_prompts([("mask", str(tmp_path / name), 0)])
    shades = Image.fromarray(np.linspace(0, 255, 64).astype(np.uint8).reshape(8, 8))
    shades.save(tmp_path / "shades.png")
    assert track.read_prompts([("mask", str(tmp_path / "shades.png"), 0)])[0].mask is not None
    shades.putalpha(Image.fromarray(255 * labels))
    shades.save(tmp_path / "clear.png")
    with pytest.raises(ValueError, match=r"clear\.png has transparent parts; save it in black and white"):
        track.read_prompts([("mask", str(tmp_path / "clear.png"), 0)])


@pytest.mark.slow
def test_a_video_file_is_decoded_once_and_not_once_a_frame(
    tmp_path: Path, video: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sam2_files.save(drawn(temporal=True), tmp_path / "sam2", metadata={})
    options = {"checkpoint": str(tmp_path / "sam2"), "image_size": 0, "device": "cpu", "fps": 8.0}
    track.write_track(video, [("point", "3,3", 0)], out=tmp_path / "first", **options)
    opened = []
    shots = media._shots
    monkeypatch.setattr(media, "_shots", lambda source: opened.append(source) or shots(source))
    track.write_track(
        tmp_path / "first/overlay.mp4", [("point", "3,3", 0)], out=tmp_path / "second", **options
    )
    assert len(opened) <= 3  # it is counted, and its first frame looked at
