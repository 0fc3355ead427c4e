from __future__ import annotations

import struct
import subprocess
import sys
from pathlib import Path

import av
import numpy as np
import pytest
from PIL import ExifTags, Image

from ans_core.pictures import media, transforms, video_file
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
    assert all(
        abs(f.astype(int).mean((0, 1)) - shot.mean((0, 1))).max() < 8
        for f, shot in zip(found, shots, strict=True)
    )


def test_a_videos_frames_are_files_and_gone_afterwards(tmp_path: Path, shots: list[np.ndarray]) -> None:
    write_video(tmp_path / "clip.mp4", np.stack(shots))
    scratch = tmp_path / "scratch"
    with media.frames(tmp_path / "clip.mp4", scratch=scratch) as frames:
        assert all(frame.is_file() and scratch in frame.parents for frame in frames)
        assert [folder.name.startswith(media.SCRATCH) for folder in scratch.iterdir()] == [True]
    assert list(scratch.iterdir()) == []


def test_a_folder_is_its_pictures_by_name_and_a_picture_is_itself(
    tmp_path: Path, shots: list[np.ndarray]
) -> None:
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
    """25000 = 97 * 256 + 168; -1 and 70000 are outside of 16 bits. Pillow's mode "I" holds 8 bits as
    often."""
    for values, greys in (
        ([0, 25000, 65535], [0, 97, 255]),
        ([-1, 25000, 70000], [0, 97, 255]),
        ([-1, 97, 255], [0, 97, 255]),
    ):
        picture = Image.fromarray(np.array([values], np.uint16 if min(values) >= 0 else np.int32))
        assert np.asarray(transforms.open_image(media.reference(picture)))[0, :, 0].tolist() == greys


def test_what_is_no_video_is_named(tmp_path: Path, shots: list[np.ndarray]) -> None:
    write_video(tmp_path / "cut.mp4", np.stack(shots))
    whole = (tmp_path / "cut.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "empty.gif").touch()
    scratch = tmp_path / "scratch"
    for name in ("cut.mp4", "empty.gif"):
        with (
            pytest.raises(ValueError, match=f"cannot read the video .*{name}"),
            media.frames(tmp_path / name, scratch=scratch),
        ):
            pass
        assert list(scratch.iterdir()) == []
    (tmp_path / "nothing").mkdir()
    for name, kind, said in (
        ("absent.mp4", FileNotFoundError, "no picture, video or folder of frames"),
        ("nothing", ValueError, "holds no pictures"),
    ):
        with pytest.raises(kind, match=said), media.frames(tmp_path / name, scratch=scratch):
            pass


def test_a_gif_of_too_many_pixels_is_named(
    tmp_path: Path, shots: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gif(tmp_path / "clip.gif", shots)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    with (
        pytest.raises(ValueError, match=r"cannot read the video .*clip\.gif"),
        media.frames(tmp_path / "clip.gif", scratch=tmp_path),
    ):
        pass


def test_the_frames_of_a_video_file_are_decoded_when_they_are_asked_for(
    tmp_path: Path, shots: list[np.ndarray]
) -> None:
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


def test_the_frames_times_of_two_files_read_in_turn_are_read_once(
    tmp_path: Path, shots: list[np.ndarray], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read them is to read the whole file, gigabytes of an hour."""
    clips = [tmp_path / "a.mp4", tmp_path / "b.mp4"]
    for clip in clips:
        write_video(clip, np.stack(shots))
    opened = []
    open_file = av.open
    monkeypatch.setattr(av, "open", lambda file: opened.append(file) or open_file(file))
    for clip in clips * 3:
        video_file.read(video_file.frames_of(clip)[1])
    assert len(opened) == 2 + 2 + 6  # the headers, the times, and the files


@pytest.mark.parametrize(
    ("matrix", "height", "corner"),
    [
        ((1, 0, 0, 1), 48, "upper left"),
        ((-1, 0, 0, 1), 48, "upper right"),  # front cameras
        ((-1, 0, 0, -1), 48, "lower right"),
        ((1, 0, 0, -1), 48, "lower left"),
        ((0, 1, 1, 0), 64, "upper left"),
        ((0, 1, -1, 0), 64, "upper right"),  # a phone that was held upright: 90 degrees clockwise
        ((0, -1, -1, 0), 64, "lower right"),
        ((0, -1, 1, 0), 64, "lower left"),
    ],
)
def test_a_video_that_says_it_is_turned_or_mirrored_stands_upright(
    tmp_path: Path, matrix: tuple[int, ...], height: int, corner: str
) -> None:
    """The track's header says that (x, y) is shown at (a x + c y, b x + d y); the stored upper left corner is
    white."""
    shot = np.zeros((48, 64, 3), np.uint8)
    shot[:24, :32] = 255
    write_video(tmp_path / "clip.mp4", np.stack([shot] * 2))
    content = bytearray((tmp_path / "clip.mp4").read_bytes())
    a, b, c, d = (number << 16 for number in matrix)
    place = content.index(b"tkhd") + 44
    content[place : place + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    (tmp_path / "clip.mp4").write_bytes(content)
    upright = np.asarray(transforms.open_image(media.clip(tmp_path / "clip.mp4")[1]))
    assert upright.shape == (height, 112 - height, 3)
    assert video_file.size(tmp_path / "clip.mp4") == (112 - height, height)
    assert np.array_equal(
        np.asarray(transforms.open_image(video_file.frames_of(tmp_path / "clip.mp4")[1])), upright
    )
    white = {
        f"{down} {across}": upright[y, x].mean() > 128
        for down, y in (("upper", 12), ("lower", height - 12))
        for across, x in (("left", 12), ("right", 100 - height))
    }
    assert [name for name, is_white in white.items() if is_white] == [corner]


@pytest.mark.slow
@pytest.mark.parametrize(("hidden_after", "frames"), [(0, range(7, 40)), (10, range(7, 30))])
def test_a_clip_that_was_cut_without_encoding_has_the_frames_that_are_shown(
    tmp_path: Path, hidden_after: int, frames: range
) -> None:
    """As `ffmpeg -ss .7 -c copy` and editors of phones cut: all 40 frames are stored, and the edit list hides
    some before and after."""
    write_moving(tmp_path / "whole.mp4", "libx264")
    with av.open(str(tmp_path / "whole.mp4")) as source, av.open(str(tmp_path / "cut.mp4"), "w") as target:
        stream = target.add_stream_from_template(source.streams.video[0])
        for packet in source.demux(source.streams.video[0]):
            if packet.dts is not None and packet.pts is not None and packet.duration is not None:
                packet.pts, packet.dts = packet.pts - 7 * packet.duration, packet.dts - 7 * packet.duration
                packet.stream = stream
                target.mux(packet)
    content = bytearray((tmp_path / "cut.mp4").read_bytes())
    place = content.index(b"elst") + 12
    (length,) = struct.unpack_from(">I", content, place)
    struct.pack_into(">I", content, place, length - 100 * hidden_after)  # in ms; 10 frames a second
    (tmp_path / "cut.mp4").write_bytes(content)
    whole = [np.asarray(shot) for shot in video_file.shots(tmp_path / "whole.mp4")]
    shown = video_file.frames_of(tmp_path / "cut.mp4")
    assert (
        len(shown)
        == len(list(video_file.shots(tmp_path / "cut.mp4")))
        == len(media.clip(tmp_path / "cut.mp4"))
        == len(frames)
    )
    for place in (len(frames) - 1, 3, 0):
        np.testing.assert_array_equal(np.asarray(video_file.read(shown[place])), whole[frames[place]])


def test_a_photo_of_a_phone_is_upright_however_it_is_given(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    stored = np.random.default_rng(0).integers(0, 256, (6, 8, 3), np.uint8)
    Image.fromarray(stored).save(tmp_path / "a.png", exif=exif)
    encoded = (tmp_path / "a.png").read_bytes()
    with Image.open(tmp_path / "a.png") as opened:
        given = [tmp_path / "a.png", encoded, opened, media.clip(tmp_path)[0]]
        for ref in map(media.reference, given):
            assert np.array_equal(np.asarray(transforms.open_image(ref)), np.rot90(stored, -1))
            again = media.reference(transforms.open_image(ref))
            assert np.array_equal(np.asarray(transforms.open_image(again)), np.rot90(stored, -1))


def test_frames_are_in_order_of_time_with_zeros_before_their_numbers_or_without(tmp_path: Path) -> None:
    for name in ("10.jpg", "2.JPG", "1.png", "011.jpg", "cat_10.png", "cat_9.png"):
        (tmp_path / name).touch()
    with media.frames(tmp_path, scratch=tmp_path / "scratch") as frames:
        assert [path.name for path in frames] == [
            "1.png",
            "2.JPG",
            "10.jpg",
            "011.jpg",
            "cat_9.png",
            "cat_10.png",
        ]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip.mp4", "clip.avi", "clip.mkv", "clip.webm"])
def test_a_video_that_is_cut_short_is_refused_and_not_followed_to_where_it_ends(
    tmp_path: Path, name: str
) -> None:
    """The index stands first, as in files for the web, so that what is left of the pictures can be
    decoded."""
    noise = np.random.default_rng(0).integers(0, 256, (48, 64, 64, 3), np.uint8)
    codec, options = ("libvpx", {}) if name.endswith("webm") else ("libx264", {})
    with av.open(
        str(tmp_path / name), "w", options={"movflags": "faststart"} if name.endswith("mp4") else options
    ) as file:
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
            container.mux(
                stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(texture[:, n : n + 128])))
            )
        container.mux(stream.encode())


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["libx264", "mpeg4"])
def test_a_video_with_damaged_bytes_inside_is_refused_where_its_decoder_sees_them(
    tmp_path: Path, codec: str
) -> None:
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
    with pytest.raises(
        ValueError, match=r"cannot read frame \d+ of the video .*clip\.mkv: the file is damaged"
    ):
        video_file.check(video_file.frames_of(file))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "options"),
    [
        ("libx264", {"x264-params": "open-gop=1:keyint=8:bframes=3"}),
        ("libx265", {"x265-params": "keyint=8:log-level=none"}),
    ],
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


@pytest.mark.slow
def test_a_video_that_is_left_early_is_silent_as_python_ends(tmp_path: Path) -> None:
    """Modules are gone by then."""
    write_video(tmp_path / "clip.mp4", np.stack([np.full((16, 16, 3), shade, np.uint8) for shade in (0, 90)]))
    script = "from ans_core.pictures import media; clip = media.clip({!r}); print(len(clip[0]) > 0)"
    done = subprocess.run(
        [sys.executable, "-c", script.format(str(tmp_path / "clip.mp4"))], capture_output=True, text=True, check=True
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("True\n", "")
