"""Video mode keyframe: every object is followed from the seen frame whose track agrees best with the
others."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import Tensor

from ans_core.inference.keyframe import track_from_key_frame, track_iou
from ans_core.inference.options import PredictOptions
from ans_core.inference.video import track, track_frames
from ans_core.model.network import Network
from ans_core.pictures import transforms
from tests import tiny, tracks

MODE = PredictOptions(mode="keyframe", frames=3)
"""Of five frames it sees 0, 2 and 4."""


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def pictures() -> list[Image.Image]:
    return [transforms.open_image(f) for number in (0, 2) for f in tiny.clip(number).frames][:5]


def embeddings(model: Network, count: int = 5) -> Tensor:
    return torch.randn(count, model.config.grounding.width, generator=torch.Generator().manual_seed(1)) * 10


def one_by_one(model: Network, pictures: list[Image.Image], embedding: Tensor, start: int) -> Tensor:
    """Follow one object from one frame to both ends of the clip, as two clips that begin there."""
    features = model.sam2.encode(MODE.pixels(model, pictures))
    back = tracks.track(model.sam2, features[list(range(start, -1, -1))], embedding, conditioning=[0])
    on = tracks.track(model.sam2, features[list(range(start, len(pictures)))], embedding, conditioning=[0])
    return torch.cat([back[0].flip(0), on[0, 1:]])


def iou(one: Tensor, other: Tensor) -> float:
    return float((one & other).sum() / (one | other).sum())


def test_tracks_are_compared_over_all_frames_and_lost_ones_agree_with_none():
    """Frames of 2 x 2: the first track has 4 and 2 pixels, the second 2 and 2 of them; the third and fourth
    have lost the object."""
    tracks = torch.zeros(1, 4, 2, 2, 2, dtype=torch.bool)
    tracks[0, 0, 0], tracks[0, 0, 1, 0] = True, True
    tracks[0, 1, :, 0] = True
    expected = torch.tensor([[1, 4 / 6, 0, 0], [4 / 6, 1, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]])
    assert torch.allclose(track_iou(tracks)[0], expected)


@pytest.mark.slow
def test_every_object_has_the_track_that_agrees_best_with_its_others(
    tiny_model: Network, pictures: list[Image.Image]
):
    found, chosen = track(tiny_model, pictures, embeddings(tiny_model), MODE), []
    for masks, embedding in zip(found, embeddings(tiny_model).split(1), strict=True):
        tracks = [one_by_one(tiny_model, pictures, embedding, start) for start in (0, 2, 4)]
        agreement = [sum(iou(one > 0, other > 0) for other in tracks) for one in tracks]
        chosen.append(agreement.index(max(agreement)))
        assert torch.allclose(masks, tracks[chosen[-1]], atol=1e-4)
        assert all(
            not torch.allclose(one, other, atol=1e-2) for one, other in itertools.combinations(tracks, 2)
        )
    assert set(chosen) == {0, 1, 2}  # objects of one clip have frames of their own


@pytest.mark.slow
def test_it_makes_no_difference_how_many_frames_are_encoded_together(
    tiny_model: Network, pictures: list[Image.Image]
):
    found = [
        track_from_key_frame(tiny_model, pictures, embeddings(tiny_model), MODE, ahead=ahead)
        for ahead in (1, 2, 8)
    ]
    assert all(torch.allclose(one, found[0], atol=1e-4) for one in found)


def test_one_seen_frame_is_followed_as_in_mode_sa2va(tiny_model: Network, pictures: list[Image.Image]):
    one = replace(MODE, frames=1)
    assert torch.allclose(
        track(tiny_model, pictures, embeddings(tiny_model), one),
        track(tiny_model, pictures, embeddings(tiny_model), replace(one, mode="sa2va")),
        atol=1e-4,
    )


def test_a_clip_of_one_frame_has_the_masks_of_a_picture(tiny_model: Network, pictures: list[Image.Image]):
    still = track(tiny_model, pictures[:1], embeddings(tiny_model), MODE)
    features = tiny_model.sam2.encode(MODE.pixels(tiny_model, pictures[:1]))
    alone = tiny_model.sam2.decode(features, torch.zeros(5, dtype=torch.long), embeddings(tiny_model)).logits
    assert torch.allclose(still[:, 0], alone, atol=1e-4)


@pytest.mark.slow
def test_frames_come_in_order_of_time_and_each_is_opened_once(
    tiny_model: Network, pictures: list[Image.Image]
):
    opened: list[int] = []

    def picture(index: int) -> Image.Image:
        opened.append(index)
        return pictures[index]

    found = list(track_frames(tiny_model, 5, picture, embeddings(tiny_model), MODE))
    assert [index for index, _ in found] == opened == [0, 1, 2, 3, 4]
    assert torch.equal(
        torch.stack([masks for _, masks in found], dim=1),
        track(tiny_model, pictures, embeddings(tiny_model), MODE),
    )
