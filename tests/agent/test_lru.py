"""What is kept to be used again: bounded in entries and bytes, least recently used first out."""

from __future__ import annotations

from functools import partial

import pytest

from ans_core.agent.crops import Crop, CropFeatures
from ans_core.agent.lru import LruCache
from ans_core.model.network import Network
from tests import tiny


def test_what_was_least_recently_used_makes_room_within_entries_and_bytes() -> None:
    made: list[str] = []

    def make(text: str) -> str:
        made.append(text)
        return text

    def use(cache: LruCache[str], *texts: str) -> list[str]:
        made.clear()
        assert [cache.get(text, partial(make, text)) for text in texts] == list(texts)
        return list(made)

    cache = LruCache[str](most=2)
    assert use(cache, "a", "b", "a", "c") == ["a", "b", "c"]
    assert use(cache, "a", "b") == ["b"]  # b made room for c, for a was used after it
    cache = LruCache[str](most=9, most_bytes=5, size=len)
    assert use(cache, "aa", "bb", "c") == ["aa", "bb", "c"]
    assert (len(cache), cache.bytes) == (3, 5)
    assert use(cache, "aa", "ddd") == ["ddd"]
    assert (len(cache), cache.bytes) == (2, 5)  # aa, ddd
    assert use(cache, "too long", "aa", "ddd", "too long") == ["too long", "too long"]
    assert (len(cache), cache.bytes) == (2, 5)
    with pytest.raises(ZeroDivisionError):
        cache.get("e", lambda: str(1 // 0))
    assert use(cache, "e") == ["e"]


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
    assert bound._cache.bytes == 2 * each
