from __future__ import annotations

import numpy as np
import pytest

from ans_core.agent.episode import Toolbox
from perf.agent_operations import KINDS, Clip, drawn_things, point_in, properties, track_figures, zooms

JF = "J&F, J, F"


def two_squares() -> Clip:
    """Two of 8 pixels that stay where they are for 5 frames; the second is not there in the first one, and
    frame 3 is not annotated."""
    masks = np.zeros((2, 5, 40, 40), bool)
    masks[0, :, 2:10, 2:10] = masks[1, 1:, 22:30, 22:30] = True
    return Clip(frames=[b""] * 5, masks=masks, annotated=np.array([True, True, True, False, True]))


def test_true_tracks_have_the_best_figures() -> None:
    clip = two_squares()
    assert track_figures([clip], [clip.masks]) == {JF: [1, 1, 1]}


def test_frames_that_a_track_starts_from_and_frames_without_annotation_count_nowhere() -> None:
    clip = two_squares()
    tracks = clip.masks.copy()
    tracks[0, 0] = tracks[1, 1] = False  # where they start
    tracks[:, 3] = True
    assert track_figures([clip], [tracks]) == {JF: [1, 1, 1]}


def test_tracks_that_change_places_are_wrong_from_there_on() -> None:
    clip = two_squares()
    changed = clip.masks.copy()
    changed[:, 4] = clip.masks[::-1, 4]
    # right in 2 of frames 1, 2, 4 and in 2 of 0, 2, 4
    assert track_figures([clip], [changed])[JF] == pytest.approx([(2 / 3 + 2 / 3) / 2] * 3)


def test_the_point_in_a_mask_is_far_from_its_edge_and_from_the_pictures() -> None:
    mask = np.zeros((50, 100), bool)
    mask[:, 0:11] = True
    x, y = point_in(mask)
    assert x == 55  # the middle of column 5
    assert 110 <= y <= 890


@pytest.mark.slow
def test_shapes_are_measured_as_their_closed_forms_say_and_crops_show_whole_things() -> None:
    with Toolbox() as toolbox:
        errors = properties(toolbox, seed=0, each=3 * len(KINDS))
        assert zooms(drawn_things(seed=0, each=1, tile=toolbox.tile), toolbox) == {
            "zoom_in: share of crops with the whole thing": [1.0]
        }
    most = {name.split(", ")[1].split(":")[0]: largest for name, (_, largest) in errors.items()}
    assert most.keys() == {
        "area (%)",
        "centroid (pixels)",
        "eccentricity",
        "solidity",
        "orientation (degrees)",
    }
    assert most["area (%)"] < 1
    assert most["centroid (pixels)"] < 0.5
    assert most["orientation (degrees)"] < 1.5
    assert most["eccentricity"] < 0.142  # that of an axis ratio of .99, for a disc
    assert most["solidity"] < 0.05
