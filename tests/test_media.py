from __future__ import annotations

import struct
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import Image

from ans_core import media, transforms, video_file
from tests.data.clip_sets import write_gif, write_video


@pytest.fixture
def shots() -> list[np.ndarray]:
    """Six frames, each of one colour."""
    return [np.full((48, 64, 3), (30 * i, 200 - 30 * i, 90), np.uint8) for i in range(6)]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.gif"])
def test_a_video_is_its_frames_in_order(tmp_path: Path, shots: list[np.ndarray], name: str) -> None:
    if name.endswith("mp4"):
        write_video(tmp_path / name, np.stack(shots))
    else:
        write_gif(tmp_path / name, shots)
    with media.frames(tmp_path / name, scratch=tmp_path / "scratch") as frames:
        found = [np.asarray(transforms.open_image(f)) for f in frames]
    assert [f.shape for f in found] == [(48, 64, 3)] * 6
    assert all(abs(f.astype(int).mean((0, 1)) - shot.mean((0, 1))).max() < 8 for f, shot in zip(found, shots, strict=True))


def test_a_videos_frames_are_files_and_gone_afterwards(tmp_path: Path, shots: list[np.ndarray]) -> None:
    write_video(tmp_path / "clip.mp4", np.stack(shots))
    scratch = tmp_path / "scratch"
    with media.frames(tmp_path / "clip.mp4", scratch=scratch) as frames:
        assert all(frame.is_file() and scratch in frame.parents for frame in frames)
        assert [folder.name.startswith(media.SCRATCH) for folder in scratch.iterdir()] == [True]
    assert list(scratch.iterdir()) == []


def test_a_folder_is_its_pictures_by_name_and_a_picture_is_itself(tmp_path: Path, shots: list[np.ndarray]) -> None:
    scratch = tmp_path / "scratch"
    for name in ("00002.jpg", "00010.jpg", "00001.PNG", "notes.txt"):
        (tmp_path / name).touch()
    with media.frames(tmp_path, scratch=scratch) as frames:
        assert frames == (tmp_path / "00001.PNG", tmp_path / "00002.jpg", tmp_path / "00010.jpg")
    Image.fromarray(shots[0]).save(tmp_path / "one.png")
    with media.frames(tmp_path / "one.png", scratch=scratch) as frames:
        assert frames == (tmp_path / "one.png",)
    assert not scratch.exists()


def test_a_picture_of_16_bits_of_grey_keeps_its_greys() -> None:
    """25000 = 97 * 256 + 168; -1 and 70000 are outside of 16 bits. Pillow's mode "I" holds 8 bits as often."""
    for values, greys in (([0, 25000, 65535], [0, 97, 255]), ([-1, 25000, 70000], [0, 97, 255]), ([-1, 97, 255], [0, 97, 255])):
        picture = Image.fromarray(np.array([values], np.uint16 if min(values) >= 0 else np.int32))
        assert np.asarray(transforms.open_image(media.reference(picture)))[0, :, 0].tolist() == greys


def test_what_is_no_video_is_named(tmp_path: Path, shots: list[np.ndarray]) -> None:
    write_video(tmp_path / "cut.mp4", np.stack(shots))
    whole = (tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.gif").touch()
    scratch = tmp_path / "scratch"
    for name in ("cut.mp4", "empty.gif"):
        with pytest.raises(ValueError, match=f"cannot read the video .*{name}"), media.frames(tmp_path / name, scratch=scratch):
            pass
        assert list(scratch.iterdir()) == []
    (tmp_path / "nothing").mkdir()
    for name, kind, said in (
        ("absent.mp4", FileNotFoundError, "no picture, video or folder of frames"),
        ("nothing", ValueError, "holds no pictures"),
    ):
        with pytest.raises(kind, match=said), media.frames(tmp_path / name, scratch=scratch):
            pass


def test_a_gif_of_too_many_pixels_is_named(tmp_path: Path, shots: list[np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    write_gif(tmp_path / "clip.gif", shots)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with pytest.raises(ValueError, match=r"cannot read the video .*clip\.gif"), media.frames(tmp_path / "clip.gif", scratch=tmp_path):
        pass


def test_the_frames_of_a_video_file_are_decoded_when_they_are_asked_for(tmp_path: Path, shots: list[np.ndarray]) -> None:
    write_video(tmp_path / "clip.mp4", np.stack(shots))
    with media.frames(tmp_path / "clip.mp4", scratch=tmp_path / "scratch") as files:
        expected = [file.read_bytes() for file in files]
    video = media.clip(tmp_path / "clip.mp4")
    assert len(video) == len(expected) > 2
    for index in (2, 0, 1, 1, -1):
        assert video[index] == expected[index]
    assert list(video) == list(video[:]) == expected
    with pytest.raises(IndexError):
        video[len(expected)]


def test_a_video_that_lies_on_its_side_stands_upright(tmp_path: Path) -> None:
    """As phones store it: the track's header holds the matrix of a turn by 90 degrees clockwise."""
    shot = np.zeros((48, 64, 3), np.uint8)
    shot[:24, :32] = 255  # the upper left becomes the upper right
    write_video(tmp_path / "clip.mp4", np.stack([shot] * 2))
    content = bytearray((tmp_path / "clip.mp4").read_bytes())
    matrix = content.index(b"tkhd") + 44
    content[matrix : matrix + 36] = struct.pack(">9i", 0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30)
    (tmp_path / "clip.mp4").write_bytes(content)
    upright = np.asarray(transforms.open_image(media.clip(tmp_path / "clip.mp4")[1]))
    assert upright.shape == (64, 48, 3)
    assert [upright[y, x].mean() > 128 for y, x in ((16, 36), (16, 12), (48, 36), (48, 12))] == [True, False, False, False]


def test_frames_are_in_order_of_time_with_zeros_before_their_numbers_or_without(tmp_path: Path) -> None:
    for name in ("10.jpg", "2.JPG", "1.png", "011.jpg", "cat_10.png", "cat_9.png"):
        (tmp_path / name).touch()
    with media.frames(tmp_path, scratch=tmp_path / "scratch") as frames:
        assert [path.name for path in frames] == ["1.png", "2.JPG", "10.jpg", "011.jpg", "cat_9.png", "cat_10.png"]


@pytest.mark.parametrize("name", ["clip.mp4", "clip.avi", "clip.mkv", "clip.webm"])
def test_a_video_that_is_cut_short_is_refused_and_not_followed_to_where_it_ends(tmp_path: Path, name: str) -> None:
    """The index stands first, as in files for the web, so that what is left of the pictures can be decoded."""
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 64, 3), np.uint8)
    codec, options = ("libvpx", {}) if name.endswith("webm") else ("libx264", {})
    with av.open(str(tmp_path / name), "w", options={"movflags": "faststart"} if name.endswith("mp4") else options) as file:
        stream = file.add_stream(codec, rate=8)
        stream.width = stream.height = 64
        for picture in noise:
            file.mux(stream.encode(av.VideoFrame.from_ndarray(picture)))
        file.mux(stream.encode())
    assert len(media.clip(tmp_path / name)) == 48
    whole = (tmp_path / name).read_bytes()
    (tmp_path / name).write_bytes(whole[: len(whole) * 6 // 10])
    with pytest.raises(ValueError, match=rf"cannot read the video .*{name}: .*; is it cut short\?"):
        media.clip(tmp_path / name)


def write_moving(file: Path, codec: str, **options: str) -> None:
    """40 frames of a texture that moves to the left."""
    texture = np.random.default_rng(0).integers(0, 256, (128, 168, 3), np.uint8)
    with av.open(str(file), "w") as container:
        stream = container.add_stream(codec, rate=10, options=options)
        stream.width = stream.height = 128
        for n in range(40):
            container.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(texture[:, n : n + 128]))))
        container.mux(stream.encode())


@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_a_video_with_damaged_bytes_inside_is_refused_where_its_decoder_sees_them(tmp_path: Path, codec: str) -> None:
    file = tmp_path / "clip.mkv"
    write_moving(file, codec)
    video_file.check(video_file.frames_of(file))
    assert len(list(video_file.shots(file))) == 40
    content = bytearray(file.read_bytes())
    at = len(content) * 5 // 8
    content[at : at + 60] = np.random.default_rng(1).bytes(60)
    file.write_bytes(content)
    with pytest.raises(ValueError, match=r"frame \d+ is damaged"):
        list(video_file.shots(file))
    with pytest.raises(ValueError, match=r"cannot read frame \d+ of the video .*clip\.mkv: the file is damaged"):
        video_file.check(video_file.frames_of(file))


@pytest.mark.parametrize(
    ("codec", "options"),
    [("libx264", {"x264-params": "open-gop=1:keyint=8:bframes=3"}), ("libx265", {"x265-params": "keyint=8:log-level=none"})],
)
def test_frames_that_are_sought_from_a_key_frame_inside_an_open_group_are_not_taken_for_damaged(
    tmp_path: Path, codec: str, options: dict[str, str]
) -> None:
    file = tmp_path / "clip.mkv"
    write_moving(file, codec, **options)
    whole = [np.asarray(shot) for shot in video_file.shots(file)]
    frames = video_file.frames_of(file)
    for index in np.random.default_rng(0).permutation(40).tolist():
        np.testing.assert_array_equal(np.asarray(video_file.read(frames[index])), whole[index])
