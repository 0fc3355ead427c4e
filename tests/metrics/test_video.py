import itertools
import json
import math

import jaxtyping
import numpy as np
import pytest
from scipy.ndimage import distance_transform_edt

from ans_core.metrics.mask import counts
from ans_core.metrics.video import j_and_f, statistics
from ans_core.pictures import rle
from tests.golden import REFERENCE


def davis_boundary(mask: np.ndarray) -> np.ndarray:
    """DAVIS 2017's seg2bmap, written out again from its definition."""
    right, below, diagonal = np.zeros_like(mask), np.zeros_like(mask), np.zeros_like(mask)
    right[:, :-1], below[:-1], diagonal[:-1, :-1] = mask[:, 1:], mask[1:], mask[1:, 1:]
    edge = mask ^ right | mask ^ below | mask ^ diagonal
    edge[-1], edge[:, -1], edge[-1, -1] = mask[-1] ^ right[-1], mask[:, -1] ^ below[:, -1], False
    return edge


def disk(mask: np.ndarray, radius: int) -> np.ndarray:
    """The mask grown by a disk: every pixel at most `radius` away (a root of a whole number, so exact at the
    edge)."""
    return distance_transform_edt(~mask) <= radius


def davis_f(prediction: np.ndarray, truth: np.ndarray) -> float:
    radius = math.ceil(0.008 * np.linalg.norm(truth.shape))
    drawn, real = davis_boundary(prediction), davis_boundary(truth)
    if not drawn.any() or not real.any():
        return float(drawn.any() == real.any())
    precision, recall = (
        (drawn & disk(real, radius)).sum() / drawn.sum(),
        (real & disk(drawn, radius)).sum() / real.sum(),
    )
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def random_mask(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    mask = np.zeros(shape, bool)
    for _ in range(rng.integers(0, 4)):
        top, left = rng.integers(0, shape[0]), rng.integers(0, shape[1])
        mask[top : top + rng.integers(1, shape[0] + 1), left : left + rng.integers(1, shape[1] + 1)] ^= True
    return mask


def test_f_equals_the_uncropped_davis_arithmetic_on_random_masks_of_all_shapes():
    rng = np.random.default_rng(0)
    for _ in range(60):
        shape = tuple(rng.integers(1, 130, 2).tolist())
        prediction, truth = random_mask(rng, shape), random_mask(rng, shape)
        coded = rle.encode(prediction), rle.encode(truth)
        expected = counts(*coded).iou, davis_f(prediction, truth)
        assert j_and_f(prediction, truth) == expected, shape
        assert j_and_f(*coded) == expected, shape


VIDEOS = REFERENCE / "data/videos"


@pytest.mark.skipif(
    not VIDEOS.is_dir(), reason="no real clips: ANS_REFERENCE names no folder with data/videos"
)
def test_f_of_real_masks_equals_the_davis_arithmetic():
    """An object's mask against that of the frame twelve later, also touching the border, and in the corner of
    a smaller picture."""
    pairs, touching = [], 0
    for path in sorted(VIDEOS.glob("*/masks.json")):
        for masklet in json.loads(path.read_text())["masks"].values():
            shown = [rle.decode(mask) for mask in masklet[::12] if mask]
            pairs += [
                *itertools.pairwise(shown),
                *((a[60:, 90:], b[60:, 90:]) for a, b in itertools.pairwise(shown)),
            ]
    for one, other in pairs:
        touching += bool(one[0].any() or one[-1].any() or one[:, 0].any() or one[:, -1].any())
        j = counts(rle.encode(one), rle.encode(other)).iou
        assert j_and_f(one, other) == (j, davis_f(one, other))
    assert len(pairs) > 40
    assert touching > 5


def test_a_mask_shifted_within_the_band_has_f_one_and_beyond_it_less():
    truth = np.zeros((100, 100), bool)  # diagonal 141.4, band ceil(1.13) = 2
    truth[30:60, 30:60] = True
    assert j_and_f(np.roll(truth, 2, axis=1), truth)[1] == 1.0
    assert j_and_f(np.roll(truth, 3, axis=1), truth)[1] < 1.0


def test_empty_masks():
    nothing, something = np.zeros((8, 8), bool), np.eye(8, dtype=bool)
    assert j_and_f(nothing, nothing) == (1.0, 1.0)
    assert j_and_f(nothing, something) == j_and_f(something, nothing) == (0.0, 0.0)


def test_masks_of_different_sizes_are_refused(monkeypatch):
    # on in tests, it would be the first to object
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(ValueError, match=r"\(2, 3\)"):
        j_and_f(np.zeros((2, 3), bool), np.zeros((3, 2), bool))


def test_statistics_of_frames_by_hand():
    found = statistics([1.0, 1.0, 0.5, 0.4, 0.6, 0.1, 0.0, 0.2])
    assert found.mean == pytest.approx(3.8 / 8)
    assert found.recall == 3 / 8  # above .5, not at it
    # quarter marks at round(1, 2.75, 4.5, 6.25, 8) - 1 = 0, 2, 4, 5, 7, both ends included
    assert found.decay == pytest.approx((1 + 1 + 0.5) / 3 - (0.1 + 0 + 0.2) / 3)


def test_decay_of_long_clips_does_not_wrap_as_davis_own_does():
    assert statistics(np.linspace(1, 0, 400).tolist()).decay == pytest.approx(0.75, abs=0.01)
