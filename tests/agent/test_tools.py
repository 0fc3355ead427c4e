"""`ans tools`: what it lists, writes and refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ans_core.agent.operations import OPERATIONS
from ans_core.checkpoints import checkpoint
from ans_core.model.network import Network
from ans_core.pictures import video_file
from flows import cli
from tests import tiny


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    """80 x 60, noise."""
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(
        tmp_path / "picture.png"
    )
    return tmp_path / "picture.png"


def tools(*words: str) -> None:
    arguments = cli.parse(["tools", *words])
    assert arguments.function(arguments) == 0


def test_operations_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    tools()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(OPERATIONS)


def test_a_zoom_writes_its_crop_enlarged_to_the_tile(
    picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tools("zoom_in", str(picture), "--out", str(tmp_path / "out"), "bbox_2d=[250,500,500,1000]")
    assert capsys.readouterr().out.startswith("image_2: [250, 500, 500, 1000]\n")
    with Image.open(tmp_path / "out/image_2.png") as shown:
        assert shown.size == (64, 96)  # 20 x 30 pixels
    told = json.loads((tmp_path / "out/observation.json").read_text())
    assert (told["name"], told["values"]["bbox_2d"]) == ("zoom_in", [250, 500, 500, 1000])


def test_properties_of_a_mask_file(picture: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mask = np.zeros((60, 80), bool)
    mask[:30, :40] = True
    Image.fromarray(mask).save(tmp_path / "mask.png")
    tools(
        "get_properties",
        str(picture),
        "masks=[mask_1]",
        "properties=[area, box]",
        "--mask",
        str(tmp_path / "mask.png"),
        "--out",
        str(tmp_path),
    )
    assert capsys.readouterr().out.startswith("mask_1: area 25.0, box [0, 0, 500, 500]\n")


@pytest.mark.slow
def test_a_track_of_a_clip_is_written_as_a_video(tmp_path: Path, tiny_model: Network) -> None:
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    frames, mask = tmp_path / "clip", np.zeros((64, 64), bool)
    frames.mkdir()
    for number, frame in enumerate(tiny.clip(0).frames):
        assert isinstance(frame, bytes)
        (frames / f"{number}.png").write_bytes(frame)
    mask[16:32, 0:16] = True
    Image.fromarray(mask).save(tmp_path / "mask.png")
    out = tmp_path / "out"
    tools(
        "track_object",
        str(frames),
        "mask=mask_1",
        "--mask",
        str(tmp_path / "mask.png"),
        "--model",
        str(tmp_path / "model"),
        "--out",
        str(out),
    )
    assert len(list(video_file.shots(out / "overlay.mp4"))) == 4


def test_a_mask_that_is_cut_short_is_named(picture: Path, tmp_path: Path) -> None:
    (tmp_path / "cut.png").write_bytes(picture.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"cannot read the image .*cut\.png"):
        tools(
            "get_properties",
            str(picture),
            "masks=[mask_1]",
            "--mask",
            str(tmp_path / "cut.png"),
            "--out",
            str(tmp_path / "out"),
        )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["zom_in"], "no operation named 'zom_in' (did you mean 'zoom_in'?); there are zoom_in"),
        (["paint"], "no operation named 'paint'; there are zoom_in"),
        (["zoom_in"], "IMAGE is missing"),
        (["zoom_in", "PICTURE", "bbox_2d"], "'bbox_2d' is no key=value"),
        (["zoom_in", "PICTURE", "bbox_2d=[1,"], "can't be read"),
        (["zoom_in", "PICTURE", "box=[0,0,9,9]"], "zoom_in takes bbox_2d, image, mask"),
        (["zoom_in", "PICTURE", "bbox_2d=[0,0,9,9]"], "it needs 8 on each side"),
        (
            ["zoom_in", "nowhere.png", "bbox_2d=[0,0,900,900]"],
            "no picture, video or folder of frames nowhere.png",
        ),
        # before a model is looked for
        (["segment_object_at", "PICTURE", "point=[0,0]"], "segment_object_at takes point_2d"),
    ],
)
def test_what_is_wrong_is_said(picture: Path, tmp_path: Path, words: list[str], told: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError)) as error:
        tools(
            *(str(picture) if word == "PICTURE" else word for word in words), "--out", str(tmp_path / "out")
        )
    assert told in str(error.value)
