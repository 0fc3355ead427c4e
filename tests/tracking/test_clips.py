from __future__ import annotations

import random
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch

from ans_core.config.memory import MemoryPrompts
from ans_core.pictures import media, rle, transforms
from ans_core.tracking.batch import make_batch
from ans_core.tracking.clips import Clip, Clips, choose_window, load_window, why_left_out
from ans_core.tracking.pseudo import PseudoClips, pseudo_clip
from ans_core.types import VideoFrames
from tests import tiny
from tests.data.clip_sets import write_video
from tests.tracking.conftest import batch_of, clip_tensors

GONE = rle.empty(64, 64)
HERE = tiny.square(8, 8, 24, 24)


def clip_with(*masklets: tuple[object, ...], name: str = "drawn/i0") -> Clip:
    return Clip(name=name, frames=tuple(tiny.picture(n) for n in range(len(masklets[0]))), masklets=masklets)  # type: ignore[arg-type]


def test_samples_about_one_video_become_one_clip_with_each_object_once():
    one = tiny.clip(1)
    other = replace(
        one, sample_id="other", text="the same square, and another", masks=(*one.masks, (HERE,) * 4)
    )
    nothing = replace(tiny.clip(2), masks=())
    found = Clips([[one, nothing], [], [tiny.sample(3), other]])
    expected = [("drawn/i1", 4, 2), ("drawn/i2", 4, 0), ("drawn/i3", 1, 1)]
    assert [(clip.name, len(clip.frames), len(clip.masklets)) for clip in found] == expected
    assert [clip.name for clip in found.at([2, 0])] == ["drawn/i3", "drawn/i1"]
    assert found.at([2, 0])[-1:] == [found[0]]
    assert list(Clips([])) == []


def test_masks_of_several_objects_are_no_objects_of_a_clip():
    """A mask that another sample names as an object is one."""
    crowd, pair = (tiny.square(0, 0, 64, 8),), (tiny.square(0, 8, 64, 16),)
    one = replace(tiny.sample(3), masks=(crowd, *tiny.sample(3).masks, pair), meta={"joined": [0, 2]})
    other = replace(tiny.sample(3), sample_id="other", masks=(pair,))
    alone = replace(tiny.clip(1), meta={"joined": [0]})
    still, clip = Clips([[one, other, alone]])
    assert (still.masklets, still.joined) == ((*tiny.sample(3).masks, pair), 1)
    assert (clip.masklets, clip.joined, clip.followed(range(4))) == ((), 1, [])
    assert why_left_out(clip, length=3).startswith(
        "drawn/i1: its masks stand for several objects each: crowds, or a category whose"
    )


def test_videos_that_are_too_short_or_show_nothing_to_follow_are_left_out_with_a_reason():
    good, late = clip_with((HERE, GONE, None)), clip_with((GONE, None, HERE), name="late")
    short = clip_with((HERE, HERE), name="short")
    assert why_left_out(good, length=3) == ""
    assert (
        why_left_out(late, length=3)
        == "late: in no 3 frames an object is seen that a later one has ground truth for"
    )
    assert why_left_out(short, length=3) == "short: 2 frames, fewer than memory.frames = 3"


def test_an_object_without_later_ground_truth_is_not_followed():
    clip = clip_with((HERE, None, None), (GONE, HERE, GONE), (HERE, None, HERE))
    assert clip.followed(range(3)) == [1, 2]
    assert clip.followed((0, 1)) == []
    assert why_left_out(clip, length=3) == ""
    assert why_left_out(clip_with((HERE, None, None)), length=3)
    assert len(load_window(clip, range(3), size=32, max_objects=1, rng=random.Random(0)).masks) == 1


def test_a_window_has_equal_gaps_and_shows_an_object_before_its_last_frame():
    clip = clip_with((*[GONE] * 6, HERE, *[GONE] * 3))  # seen in frame 6 of 10 alone
    windows = {
        tuple(choose_window(clip, length=3, max_gap=4, rng=random.Random(seed))) for seed in range(200)
    }
    # gap 1, 1, 2, 3; (2, 4, 6) shows it last alone, gap 4 has none inside
    assert windows == {(5, 6, 7), (6, 7, 8), (4, 6, 8), (3, 6, 9)}


def test_objects_enter_late_leave_and_are_unknown_in_some_frames():
    clip = clip_with((HERE, GONE, None, HERE), (GONE, GONE, HERE, HERE), (GONE, GONE, GONE, HERE))
    found = load_window(clip, range(4), size=32, max_objects=0, rng=random.Random(0))
    # half the size; the third is seen last alone
    assert found.masks.flatten(2).sum(2).tolist() == [[64, 0, 0, 64], [0, 0, 64, 64]]
    assert found.has_truth.tolist() == [[True, True, False, True], [True] * 4]
    plans: dict[int, set[tuple[int, ...]]] = {0: set(), 1: set()}
    for seed in range(30):
        batch = make_batch(
            [found],
            MemoryPrompts(kinds={"mask": 0.5, "box": 0.5}, second_frame=1.0),
            rngs=[random.Random(seed)],
        )
        for group in chain.from_iterable(batch.tracks):
            plans[int(group.objects)].add(tuple(group.frames))
    # frame 2 has no ground truth for the first object: it prompts nothing
    assert plans == {0: {(0, 1), (0,), (0, 3)}, 1: {(2,), (2, 3)}}


def test_more_objects_than_asked_for_are_drawn_at_random_and_a_tiny_one_keeps_a_pixel():
    small = [tiny.square(4 * n, 60, 4 * n + 1, 61) for n in range(6)]
    clip = clip_with(*[(mask, mask) for mask in small])
    assert (
        load_window(clip, (0, 1), size=16, max_objects=0, rng=random.Random(0))
        .masks.flatten(2)
        .sum(2)
        .tolist()
        == [[1, 1]] * 6
    )
    kept = [
        load_window(clip, (0, 1), size=16, max_objects=2, rng=random.Random(seed))
        .masks[:, 0, 15]
        .nonzero()[:, 1]
        for seed in range(30)
    ]
    assert {len(columns) for columns in kept} == {2}
    assert {int(c) for columns in kept for c in columns} == set(range(6))


def test_a_mask_of_another_size_than_its_frame_is_named():
    clip = clip_with((HERE, rle.empty(64, 48)))
    with pytest.raises(ValueError, match="drawn/i0, frame 1: the mask is 48 x 64, the frame 64 x 64"):
        load_window(clip, (0, 1), size=64, max_objects=0, rng=random.Random(0))


def test_an_object_looks_at_the_frames_of_its_own_clip_and_is_prompted_there():
    batch = batch_of("point", num_pos_points=2, include_center=True, count=3)
    assert batch.rows.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    [[group]] = batch.tracks
    assert group.labels.tolist() == [[[1, 1]]] * 3
    for n, points in zip(group.objects.tolist(), group.coordinates[:, 0], strict=True):
        assert all(batch.targets[n, 0, int(y), int(x)] for x, y in points)
    assert batch.to("cpu").tracks[0][0].frames == [0]


def test_objects_of_all_kinds_of_prompt_in_the_same_frames_share_tracks_of_no_more_than_fit():
    kinds = dict.fromkeys(("mask", "box", "point"), 1.0)
    clips = [clip_tensors(n) for n in range(9)]
    batch = make_batch(
        clips,
        MemoryPrompts(kinds=kinds, second_frame=0.5),
        at_once=4,
        rngs=[random.Random(n) for n in range(9)],
    )
    assert sorted(n for groups in batch.tracks for group in groups for n in group.objects.tolist()) == list(
        range(9)
    )
    assert all(len({tuple(group.frames) for group in groups}) == 1 for groups in batch.tracks)
    assert all(sum(len(group.objects) for group in groups) <= 4 for groups in batch.tracks)
    assert any(len({group.kind for group in groups}) > 1 for groups in batch.tracks)
    whole = make_batch(
        clips, MemoryPrompts(kinds=kinds, second_frame=0.5), rngs=[random.Random(n) for n in range(9)]
    )
    assert len(whole.tracks) == len({tuple(group.frames) for groups in batch.tracks for group in groups})


def test_a_still_becomes_a_clip_in_which_frames_and_masks_move_together():
    """The object is the only bright thing: wherever a mask says it is, the frame is bright, and nowhere else;
    occluders are dark."""
    pixels = np.full((64, 64, 3), 20, np.uint8)
    pixels[24:40, 20:44] = 255
    frame = media.reference(pixels)
    mask = np.zeros((64, 64), bool)
    mask[24:40, 20:44] = True
    still = Clip(name="still", frames=(frame,), masklets=((rle.encode(mask),),))
    areas = []
    for seed in range(12):
        made = pseudo_clip(still, length=4, size=64, max_objects=0, rng=random.Random(seed))
        assert torch.equal(made.masks[0, 0], torch.from_numpy(mask))
        assert made.has_truth.all()
        for f in range(4):
            inside = made.masks[0, f]
            areas.append(int(inside.sum()))
            if inside.any():
                assert (made.pixels[f, 0][inside] > 0).float().mean() > 0.93  # bilinear at the rim
    assert min(areas) < 300 < 384 < max(areas)  # covered or zoomed out, zoomed in
    again = pseudo_clip(still, length=4, size=64, max_objects=0, rng=random.Random(5))
    assert torch.equal(
        again.pixels, pseudo_clip(still, length=4, size=64, max_objects=0, rng=random.Random(5)).pixels
    )


def test_pseudo_clips_of_held_out_stills_are_the_same_bits_each_time_and_start_with_the_still():
    """The name decides, not the place: a still alone gives the clip that it gives among others."""
    stills = [clip_with((HERE,), (tiny.square(40, 30, 60, 50),), name=f"mine/{n}") for n in range(3)]
    made = PseudoClips(stills, length=5, size=64)
    assert (len(made), [clip.name for clip in made]) == (3, ["mine/0", "mine/1", "mine/2"])
    again = PseudoClips(stills[1:], length=5, size=64)[0]
    assert (made[1].frames, made[1].masklets) == (again.frames, again.masklets)
    assert made[0].masklets != made[1].masklets  # of the same picture: another name, another camera
    for clip in made[:2]:
        assert clip.followed(range(5)) == [0, 1]
        assert [masklet[0] for masklet in clip.masklets] == [HERE, tiny.square(40, 30, 60, 50)]
        first, still = (
            np.asarray(transforms.open_image(shown)) for shown in (clip.frames[0], tiny.picture(0))
        )
        assert (first == still).all()
        assert len(set(clip.frames)) == 5


@pytest.mark.slow
def test_frames_of_a_video_file_are_a_clip_too(tmp_path: Path):
    pixels = np.stack([np.asarray(transforms.open_image(frame)) for frame in tiny.clip(0, 4).frames])
    write_video(tmp_path / "v.mp4", pixels)
    sample = replace(tiny.clip(0, 4), frames=VideoFrames(tmp_path / "v.mp4", range(4)))
    [clip] = Clips([[sample]])
    found = load_window(clip, (1, 2, 3), size=64, max_objects=0, rng=random.Random(0))
    assert found.pixels.shape == (3, 3, 64, 64)
    assert found.masks.any(2).int().argmax(2).tolist() == [[8, 16, 24]]


def test_the_fixture_moves_its_square():
    assert clip_tensors(0, 3).masks[0].any(1).int().argmax(1).tolist() == [0, 8, 16]
