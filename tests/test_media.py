from __future__ import annotations

from pathlib import Path

import imageio.v3 as iio
import numpy as np
import pytest
from PIL import Image

from ans_core import media, transforms


@pytest.fixture
def shots() -> list[np.ndarray]:
    """Six frames, each of one colour."""
    return [np.full((48, 64, 3), (30 * i, 200 - 30 * i, 90), np.uint8) for i in range(6)]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif"])
def test_a_video_is_its_frames_in_order(tmp_path: Path, shots: list[np.ndarray], name: str) -> None:
    if name.endswith("mp4"):
        iio.imwrite(tmp_path / name, np.stack(shots), plugin="pyav", codec="mpeg4", fps=8)
    else:
        iio.imwrite(tmp_path / name, np.stack(shots), plugin="pillow")
    found = [np.asarray(transforms.open_image(f)) for f in media.frames(tmp_path / name)]
    assert [f.shape for f in found] == [(48, 64, 3)] * 6
    assert all(abs(f.astype(int).mean((0, 1)) - shot.mean((0, 1))).max() < 8 for f, shot in zip(found, shots, strict=True))


def test_a_folder_is_its_pictures_by_name_and_a_picture_is_itself(tmp_path: Path, shots: list[np.ndarray]) -> None:
    for name in ("00002.jpg", "00010.jpg", "00001.PNG", "notes.txt"):
        (tmp_path / name).touch()
    assert media.frames(tmp_path) == (tmp_path / "00001.PNG", tmp_path / "00002.jpg", tmp_path / "00010.jpg")
    Image.fromarray(shots[0]).save(tmp_path / "one.png")
    assert media.frames(tmp_path / "one.png") == (tmp_path / "one.png",)


def test_what_is_no_video_is_named(tmp_path: Path, shots: list[np.ndarray]) -> None:
    iio.imwrite(tmp_path / "cut.mp4", np.stack(shots), plugin="pyav", codec="mpeg4", fps=8)
    whole = (tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.gif").touch()
    for name in ("cut.mp4", "empty.gif"):
        with pytest.raises(ValueError, match=f"cannot read the video .*{name}"):
            media.frames(tmp_path / name)
    with pytest.raises(FileNotFoundError, match="no picture, video or folder of frames"):
        media.frames(tmp_path / "absent.mp4")
    (tmp_path / "nothing").mkdir()
    with pytest.raises(ValueError, match="holds no pictures"):
        media.frames(tmp_path / "nothing")
