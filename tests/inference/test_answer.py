"""`ans predict`: what it writes, what it refuses, and how much it holds."""

from __future__ import annotations

import copy
import json
import os
import weakref
from pathlib import Path
from types import SimpleNamespace

import av
import numpy as np
import pytest
import torch
from PIL import Image

from ans_core.checkpoints import checkpoint
from ans_core.inference import answer
from ans_core.inference import predict as ask
from ans_core.inference.prefill import prompt
from ans_core.inference.sa2va import Sa2VA
from ans_core.inference.video import AHEAD
from ans_core.model.network import Network
from ans_core.pictures import media, overlay, rle, transforms, video_file
from ans_core.types import Request
from flows import cli
from tests import tiny
from tests.data.clip_sets import write_gif


@pytest.fixture
def model(tmp_path: Path, tiny_model: Network) -> Path:
    """A model that begins every answer with `[SEG]`: all other words have no weight, and after these words it
    is that token's."""
    talker = copy.deepcopy(tiny_model)
    talker.keep_original_decoder()
    with torch.no_grad():
        prompted = prompt(talker, [Request(frames=tiny.clip(0).frames, text="<image>\nthe square")])
        state = talker.internvl.model.language_model(
            inputs_embeds=tiny.embeds_of(prompted)[None]
        ).last_hidden_state[0, -1]
        talker.internvl.lm_head.weight.zero_()
        talker.internvl.lm_head.weight[talker.seg_token_id] = state
    checkpoint.save(talker, tmp_path / "model", metadata={})
    return tmp_path / "model"


@pytest.fixture
def clip(tmp_path: Path) -> Path:
    """A folder of four frames."""
    folder = tmp_path / "clip"
    folder.mkdir()
    for number, frame in enumerate(tiny.clip(0).frames):
        assert isinstance(frame, bytes)
        (folder / f"{number:03d}.png").write_bytes(frame)
    return folder


def predict(source: Path, model: Path, out: Path, *options: str) -> dict:
    """answer.json."""
    words = [
        "predict",
        str(source),
        "the square",
        "--model",
        str(model),
        "--max-tokens",
        "1",
        "--out",
        str(out),
        *options,
    ]
    arguments = cli.parse(words)
    assert arguments.function(arguments) == 0
    return json.loads((out / "answer.json").read_text())


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["picture", "video"])
def test_predict_writes_the_answer_its_masks_and_overlays(
    tmp_path: Path, model: Path, clip: Path, capsys: pytest.CaptureFixture[str], what: str
) -> None:
    out = tmp_path / "out"
    told = predict(clip / ("" if what == "video" else "000.png"), model, out)
    frames = 4 if what == "video" else 1
    said = told["text"].count("[SEG]")
    assert said == 1
    assert (len(told["masks"]), len(told["masks"][0])) == (said, frames)
    assert len(list((out / "masks").iterdir())) == said * frames
    mask = np.asarray(Image.open(out / f"masks/object{said}_frame{frames - 1:05d}.png"))
    assert (mask == rle.decode(told["masks"][-1][-1])).all()
    if what == "video":
        drawn = list(video_file.shots(out / "overlay.mp4"))
    else:
        drawn = [Image.open(out / "overlay.png")]
    assert [picture.size for picture in drawn] == [(64, 64)] * frames
    assert ("4 frames, video mode sa2va-i" in capsys.readouterr().out) == (what == "video")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sa2va", "sa2va-i", "keyframe"])
def test_a_clips_answer_is_that_of_the_model(tmp_path: Path, model: Path, clip: Path, mode: str) -> None:
    told = predict(clip, model, tmp_path / "out", "--video-mode", mode)
    (expected,) = ask.predict(
        Sa2VA.from_pretrained(model),
        [Request(frames=tuple(sorted(clip.iterdir())), text="<image>\nthe square")],
        max_tokens=1,
        batch=1,
        video_mode=mode,
    )
    assert told == {
        "source": str(clip), "asked": "<image>\nthe square", "text": expected.text,
        "masks": [list(masklet) for masklet in expected.masks], "video_mode": mode, "truncated": True,
    }  # fmt: skip


@pytest.mark.slow
def test_a_video_file_is_answered_as_its_frames_are_and_leaves_none_of_them(
    tmp_path: Path, model: Path
) -> None:
    """Lossless, so that the file's pixels are the frames'."""
    shots = [
        np.kron(np.random.default_rng(i).integers(0, 2, (8, 8, 1)), np.full((8, 8, 3), 255)).astype(np.uint8)
        for i in range(3)
    ]
    write_gif(tmp_path / "clip.gif", shots)
    (tmp_path / "frames").mkdir()
    for number, shot in enumerate(shots):
        Image.fromarray(shot).save(tmp_path / f"frames/{number}.png")
    of_file, of_frames = (
        predict(tmp_path / name, model, tmp_path / f"out-{name}") for name in ("clip.gif", "frames")
    )
    assert of_file["masks"] == of_frames["masks"]
    assert files(tmp_path / "out-clip.gif") == files(tmp_path / "out-frames")
    assert not list((tmp_path / "out-clip.gif").glob(f"{media.SCRATCH}*"))


def test_an_answer_without_masks_is_written_with_the_frames_as_they_are(
    tmp_path: Path, model: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = ask.ClipAnswer(text="There is none.", masks=iter(()), truncated=False)
    monkeypatch.setattr(Sa2VA, "follow", lambda self, **asked: followed)
    out = tmp_path / "out"
    assert predict(clip, model, out)["masks"] == []
    assert files(out) == {"answer.json", "overlay.mp4"}


@pytest.mark.slow
def test_a_long_clip_is_never_held(
    tmp_path: Path, model: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 60 frames at most as many are held as the model encodes at a time, and the two it sees."""
    for number in range(4, 60):
        os.link(clip / f"{number % 4:03d}.png", clip / f"{number:03d}.png")
    opened: list[weakref.ref[Image.Image]] = []
    most = 0

    def watched(ref: Path) -> Image.Image:
        nonlocal most
        found = open_image(ref)
        opened.append(weakref.ref(found))
        most = max(most, sum(one() is not None for one in opened))
        return found

    open_image = transforms.open_image
    monkeypatch.setattr(transforms, "open_image", watched)
    told = predict(clip, model, tmp_path / "out")
    assert len(told["masks"][0]) == 60
    assert len(opened) >= 120  # followed and drawn
    assert most <= 2 * AHEAD + 2


@pytest.mark.parametrize("fps", ["0", "-8", "nan", "inf", "0.0009"])
def test_an_impossible_frame_rate_is_refused_before_the_model_is_loaded(
    tmp_path: Path, clip: Path, fps: str
) -> None:
    with pytest.raises(ValueError, match=r"an overlay shows 0\.001 to 1000 frames a second"):
        predict(clip, tmp_path / "no-model", tmp_path / "out", "--fps", fps)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("text", ["", "  ", "<image>\n"])
def test_an_empty_question_is_refused_before_the_model_is_loaded(
    tmp_path: Path, clip: Path, text: str
) -> None:
    arguments = cli.parse(
        ["predict", str(clip), text, "--model", str(tmp_path / "none"), "--out", str(tmp_path / "out")]
    )
    with pytest.raises(ValueError, match="the question is empty"):
        arguments.function(arguments)


def test_a_region_that_is_not_given_is_named_before_the_model_is_loaded(tmp_path: Path, clip: Path) -> None:
    box = ["--box", "1,1,9,9"]
    for question, options, told in (
        ("What is region1?", [], "asks about region1, and 0 are given"),
        ("What is region2?", box, "asks about region2, and 1 are given"),
        ("And now?", ["--past", "What is region3?", "A dog.", *box], "asks about region3, and 1 are given"),
    ):
        words = ["predict", str(clip), question, "--model", "none", "--out", str(tmp_path / "out"), *options]
        arguments = cli.parse(words)
        with pytest.raises(ValueError, match=rf"{told}: give --mask, --point or --box"):
            arguments.function(arguments)


@pytest.mark.slow
def test_a_cut_answer_is_told(tmp_path: Path, model: Path, clip: Path, capsys: pytest.CaptureFixture) -> None:
    assert predict(clip / "000.png", model, tmp_path / "out")["truncated"] is True
    assert "the answer is cut after 1 tokens; more: --max-tokens" in capsys.readouterr().out


@pytest.mark.slow
def test_an_earlier_answer_in_the_folder_is_removed_and_nothing_else(
    tmp_path: Path, model: Path, clip: Path
) -> None:
    out = tmp_path / "out"
    (out / "masks").mkdir(parents=True)
    own = {
        "notes.txt",
        "overlay.jpg",
        "masks/object1.png",
        "masks/truth_frame00000.png",
        "masks/object1_frame00009.txt",
        "frames-1/a.png",
    }
    of_killed = f"{media.SCRATCH}abc/000000.png"
    for name in (
        *own,
        "overlay.mp4",
        "masks/object3_frame00000.png",
        "masks/object1_frame00123.png",
        of_killed,
    ):
        (out / name).parent.mkdir(exist_ok=True)
        (out / name).write_text("earlier")
    with pytest.raises(
        ValueError, match=r"overlay\.mp4 is not what an earlier question left there, and would be replaced"
    ):
        predict(clip / "000.png", model, out)  # nothing says whose it is
    (out / "answer.json").write_text(json.dumps({"asked": "?", "text": "", "masks": []}))
    predict(clip / "000.png", model, out)
    assert files(out) == own | {"answer.json", "overlay.png", "masks/object1_frame00000.png"}
    assert all((out / name).read_text() == "earlier" for name in own)


def test_an_earlier_answer_stays_while_the_new_one_fails(tmp_path: Path, model: Path, clip: Path) -> None:
    out = tmp_path / "out"
    predict(clip, model, out)
    before = files(out)
    with pytest.raises(ValueError, match="no-model"):
        predict(clip, tmp_path / "no-model", out)
    assert files(out) == before


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["overlay.mp4", "masks", "masks/object1_frame00000.png"])
def test_a_question_about_an_earlier_answers_own_files_is_refused(
    tmp_path: Path, model: Path, clip: Path, asked: str
) -> None:
    """They would be removed before they are read."""
    out = tmp_path / "out"
    predict(clip, model, out)
    before = files(out)
    with pytest.raises(
        ValueError, match="what an earlier question left there, and would be removed; give another --out"
    ):
        predict(out / asked, model, out)
    assert files(out) == before
    assert predict(out / asked, model, tmp_path / "other")["masks"]


def test_frames_of_different_sizes_are_named_before_the_model_is_loaded(tmp_path: Path, clip: Path) -> None:
    Image.new("RGB", (32, 64)).save(clip / "002.png")
    with pytest.raises(
        ValueError, match=r"002\.png is 32 x 64, .*000\.png 64 x 64; bring the frames to one size"
    ):
        predict(clip, tmp_path / "no-model", tmp_path / "out")


def test_the_masks_of_the_video_are_those_of_the_answer(
    tmp_path: Path, model: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shots: list[Image.Image] = []
    monkeypatch.setattr(answer, "save_video", lambda frames, path, *, fps: shots.extend(frames))
    told = predict(clip, model, tmp_path / "out")
    for i, (path, shot) in enumerate(zip(sorted(clip.iterdir()), shots, strict=True)):
        expected = overlay.draw(transforms.open_image(path), [masklet[i] for masklet in told["masks"]])
        assert np.array_equal(shot, expected)


@pytest.mark.parametrize("size", [(64, 48), (63, 47)], ids=["even", "odd"])
def test_the_mp4_has_the_frames_in_their_colours_at_the_rate_that_was_asked(
    tmp_path: Path, size: tuple[int, int]
) -> None:
    colours = [(200, 30, 30), (30, 200, 30), (30, 30, 200), (128, 128, 128), (10, 10, 10)]
    answer.save_video((Image.new("RGB", size, colour) for colour in colours), tmp_path / "x.mp4", fps=2.5)
    shown = np.stack([np.asarray(shot) for shot in video_file.shots(tmp_path / "x.mp4")])
    assert shown.shape == (5, 48, 64, 3)
    # of 255, as chroma is stored in a narrower range
    assert np.abs(shown.astype(int) - np.array(colours)[:, None, None]).max() <= 8
    with av.open(str(tmp_path / "x.mp4")) as file:
        assert file.streams.video[0].average_rate == 2.5


def test_earlier_turns_masks_device_and_dtype_reach_the_model(
    tmp_path: Path, model: Path, clip: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, box in enumerate([(slice(0, 8), slice(4, 12)), (slice(60, 64), slice(0, 64))]):
        pixels = np.zeros((64, 64), np.uint8)
        pixels[box] = 1 + 254 * number  # anything but black
        Image.fromarray(pixels).save(tmp_path / f"mask{number}.png")
    asked: dict = {}
    load = Sa2VA.from_pretrained
    monkeypatch.setattr(Sa2VA, "from_pretrained", lambda path, **how: asked.update(how) or load(path))
    monkeypatch.setattr(
        Sa2VA,
        "predict",
        lambda self, **what: asked.update(what) or SimpleNamespace(text="yes", masks=[], truncated=False),
    )
    told = predict(
        clip / "000.png", model, tmp_path / "out", "--past", "What is region1?", "A wheel.", "--past", "And region2?", "The road.",
        "--mask", str(tmp_path / "mask0.png"), "--mask", str(tmp_path / "mask1.png"), "--device", "cpu", "--dtype", "float32",
        "--box", "1,2,30,40.5", "--point", "8,9", "--point", "50,60",
    )  # fmt: skip
    assert (asked["device_map"], asked["dtype"]) == ("cpu", "float32")
    assert asked["text"] == "the square"
    assert asked["past"] == [("<image>\nWhat is region1?", "A wheel."), ("And region2?", "The road.")]
    assert told["past"] == [list(turn) for turn in asked["past"]]
    assert asked["mask_prompts"].shape == (2, 64, 64)
    assert asked["mask_prompts"].sum((1, 2)).tolist() == [64, 256]
    assert (asked["point_prompts"], asked["box_prompts"]) == (
        [(8.0, 9.0), (50.0, 60.0)],
        [(1.0, 2.0, 30.0, 40.5)],
    )
    with pytest.raises(ValueError, match="--box 1,2,3: give 4 numbers with commas between them"):
        predict(clip / "000.png", tmp_path / "no-model", tmp_path / "out", "--box", "1,2,3")


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (np.zeros((64, 64), np.uint8), "black all over"),
        (np.ones((64, 32), np.uint8), "is 32 x 64, the first frame 64 x 64"),
        (None, "no picture"),
    ],
    ids=["black", "another size", "no picture"],
)
def test_a_mask_that_does_not_fit_is_named_before_the_model_is_loaded(
    tmp_path: Path, clip: Path, mask: np.ndarray | None, said: str
) -> None:
    path = tmp_path / "mask.png"
    path.write_text("?") if mask is None else Image.fromarray(mask).save(path)
    with pytest.raises(ValueError, match=rf"--mask .*mask\.png.*{said}"):
        predict(clip / "000.png", tmp_path / "no-model", tmp_path / "out", "--mask", str(path))


def test_counts_below_one_are_refused_before_a_picture_is_read(tmp_path: Path) -> None:
    model = Sa2VA.__new__(Sa2VA)
    for count in (0, -1):
        with pytest.raises(ValueError, match=f"max_tokens is {count}"):
            model.predict_many([], max_tokens=count)
        with pytest.raises(ValueError, match=f"max_tokens is {count}"):
            model.follow(text="<image>\nWhat?", video=tmp_path / "none.mp4", max_tokens=count)
    with pytest.raises(ValueError, match="and batch 0"):
        model.predict_many([], batch=0)
