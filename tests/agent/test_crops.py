"""Features of crops: bounded in bytes, least recently used first out."""

from __future__ import annotations

from ans_core.agent.crops import Crop, CropFeatures
from ans_core.model.network import Network
from tests import tiny


def test_features_of_crops_are_bounded_in_bytes_and_are_the_same_when_made_again(tiny_model: Network) -> None:
    crops = [Crop.full_frame(tiny.picture(number)) for number in range(4)]
    free = CropFeatures(tiny_model)
    wanted = free.of(crops)
    each = wanted[0].values.nbytes
    assert each == wanted[0].values.numel() * 4
    bound = CropFeatures(tiny_model, most_bytes=2 * each + 1)
    for _ in range(2):
        assert all(
            own.values.equal(one.values)
            for own, one in zip(bound.of([*crops, *crops]), wanted + wanted, strict=True)
        )
    assert (free.encoded, bound.encoded) == (4, 8)  # equal ones of a call once, whatever is held
    assert bound._cache.currsize == 2 * each
