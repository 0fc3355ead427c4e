import tracemalloc
import weakref
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ans_core.pictures import rle
from ans_core.pictures.overlay import COLOURS, draw, save_animation, side_by_side

GREY = Image.new("RGB", (12, 10), (100, 100, 100))


def block() -> dict:
    mask = np.zeros((10, 12), bool)
    mask[3:7, 3:8] = True
    return rle.encode(mask)


def test_a_mask_is_filled_translucently_inside_a_contour_with_a_white_rim():
    drawn = np.asarray(draw(GREY, [block()]))
    assert tuple(drawn[4, 4]) == tuple(round(0.75 * 100 + 0.25 * c) for c in COLOURS[0])
    assert tuple(drawn[3, 3]) == COLOURS[0]
    assert tuple(drawn[2, 4]) == (255, 255, 255)
    assert tuple(drawn[0, 0]) == tuple(drawn[2, 2]) == (100, 100, 100)
    assert np.asarray(GREY).max() == 100  # the given picture is left alone


def test_empty_and_missing_masks_draw_nothing_and_keep_their_colour():
    assert np.array_equal(draw(GREY, [None, rle.empty(10, 12)]), GREY)
    assert tuple(np.asarray(draw(GREY, [None, block()]))[3, 3]) == COLOURS[1]


def test_a_mask_of_another_size_is_refused():
    with pytest.raises(ValueError, match=r"mask 0 of size \[3, 3\].*\[10, 12\]"):
        draw(GREY, [rle.empty(3, 3)])


def test_truth_stands_left_and_prediction_right():
    sheet = np.asarray(
        side_by_side(
            GREY, truth=[block()], prediction=[], question="q", truth_text="t", prediction_text="a " * 200
        )
    )
    half = sheet.shape[1] // 2
    assert (sheet[:, :half] == COLOURS[0]).all(-1).any()
    assert not (sheet[:, half:] == COLOURS[0]).all(-1).any()


def read(path: Path) -> list[tuple[int, np.ndarray]]:
    """(milliseconds, pixels) of every frame of an endless GIF."""
    found = []
    with Image.open(path) as gif:
        assert gif.info["loop"] == 0
        for i in range(gif.n_frames):
            gif.seek(i)
            found.append((gif.info["duration"], np.asarray(gif.convert("RGB")).astype(int)))
    return found


def test_an_animation_has_all_frames_and_their_colours(tmp_path: Path):
    frames = [Image.new("RGB", (8, 8), c) for c in [(255, 0, 0), (0, 255, 0), (0, 0, 255)]]
    save_animation(frames, tmp_path / "a.gif", sample=frames, fps=5.0)
    shown = read(tmp_path / "a.gif")
    assert [ms for ms, _ in shown] == [200] * 3
    assert all(
        np.abs(pixels - np.asarray(frame)).max() <= 8
        for (_, pixels), frame in zip(shown, frames, strict=True)
    )


def test_an_animation_changes_where_the_frames_do_and_holds_the_last_where_they_do_not(tmp_path: Path):
    """Noise of 64 colours, in which a square moves, twice not at all: frames 1 and 2 are frame 0, which lasts
    thrice as long."""
    noise = np.random.default_rng(0).integers(0, 4, (20, 30, 3)).astype(np.uint8) * 80
    frames = []
    for x in (0, 0, 0, 5, 10, 26):
        frames.append(noise.copy())
        frames[-1][4:8, x : x + 4] = COLOURS[0]
    pictures = [Image.fromarray(frame) for frame in frames]
    save_animation(pictures, tmp_path / "a.gif", sample=pictures, fps=10.0)
    shown = read(tmp_path / "a.gif")
    assert [ms for ms, _ in shown] == [300, 100, 100, 100]
    for (_, pixels), frame in zip(shown, frames[2:], strict=True):
        assert np.abs(pixels - frame).max() <= 8


def test_colours_of_objects_that_the_sample_misses_are_drawn_all_the_same(tmp_path: Path):
    frames = [GREY, draw(GREY, [None, block()])]
    save_animation(frames, tmp_path / "a.gif", sample=frames[:1], fps=5.0)
    assert tuple(read(tmp_path / "a.gif")[1][1][3, 3]) == COLOURS[1]


def test_frames_that_stay_the_same_for_longer_than_a_gif_can_say_are_shown_again(tmp_path: Path):
    """At one frame in 500 s, two of them exceed 655.35 s."""
    save_animation([GREY, GREY], tmp_path / "a.gif", sample=[GREY], fps=0.002)
    shown = read(tmp_path / "a.gif")
    assert [ms for ms, _ in shown] == [500_000] * 2
    assert np.array_equal(shown[0][1], shown[1][1])


def test_an_animation_holds_few_frames_at_a_time(tmp_path: Path):
    made: list[weakref.ref[Image.Image]] = []
    most = 0

    def frames() -> Iterator[Image.Image]:
        nonlocal most
        for i in range(50):
            frame = Image.new("RGB", (8, 8), (5 * i, 0, 0))
            made.append(weakref.ref(frame))
            most = max(most, sum(one() is not None for one in made))
            yield frame

    save_animation(frames(), tmp_path / "a.gif", sample=[Image.new("RGB", (8, 8))], fps=5.0)
    assert (len(made), most <= 2) == (50, True)


def test_a_palette_holds_few_pixels_of_its_sample(tmp_path: Path):
    """Pictures of 3 MB: one is held at a time, of which numpy may make two more arrays, and 32,768 pixels or
    fewer of each."""
    sample = (Image.new("RGB", (1000, 1000), (5 * i, 0, 0)) for i in range(20))
    tracemalloc.start()
    save_animation([GREY], tmp_path / "a.gif", sample=sample, fps=5.0)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20e6


@pytest.mark.parametrize("fps", [0.0, -1.0, 0.001, 101.0, float("inf"), float("nan")])
def test_a_rate_that_a_gif_cannot_have_is_refused(tmp_path: Path, fps: float):
    with pytest.raises(ValueError, match=r"fps .*: a GIF shows 0\.002 to 100 frames a second"):
        save_animation([GREY], tmp_path / "a.gif", sample=[GREY], fps=fps)
    assert not (tmp_path / "a.gif").exists()
