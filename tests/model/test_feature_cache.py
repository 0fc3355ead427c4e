from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.model.feature_cache import FeatureCache
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised
from tests import tiny

SEGMENT = Turn(
    question="Please segment the red square.", answer="It is [SEG].", masks=((tiny.square(8, 8, 24, 24),),)
)


@pytest.mark.slow
def test_known_features_are_read_the_rest_is_computed_and_the_loss_is_the_same(
    own_model: Network, tmp_path: Path
):
    """Rows 0 and 1 are known when rows 1 and 2 come: one of two tiles and one of two frames are computed."""
    cache = FeatureCache(tmp_path, limit=10**9, salt="weights")
    plain = Supervised(own_model, mask_weight=2.0, dice_weight=0.5, points=64)
    cached = Supervised(own_model, mask_weight=2.0, dice_weight=0.5, points=64, features=cache)
    counted: list[int] = []
    tower = own_model.backbone.vision_tower
    tower.register_forward_pre_hook(
        lambda module, args, given: counted.append(len(given["pixel_values"])), with_kwargs=True
    )
    own_model.sam2.image_encoder.register_forward_pre_hook(
        lambda module, given: counted.append(len(given[0]))
    )
    for numbers, computed in (((0, 1), [2, 2]), ((1, 2), [1, 1]), ((0, 2), [])):
        batch = collate(
            [tiny.row(SEGMENT, number=i) for i in numbers], own_model.tokenizer, tiny.layout(own_model)
        )
        counted.clear()
        loss = float(cached(batch)[0])
        assert counted == computed
        assert loss == pytest.approx(float(plain(batch)[0]), rel=1e-5)
    assert (cache.hits, cache.misses) == (6, 6)


def doubled(items: list[Tensor]) -> Callable[[list[int]], list[tuple[Tensor, ...]]]:
    return lambda lacking: [(2 * items[i],) for i in lacking]


def test_the_folder_is_bounded_and_what_was_read_last_stays(tmp_path: Path):
    """A file of 16 fp32 values takes some 140 bytes; of seven, the limit of 800 bytes leaves 5."""
    items = [torch.full((16,), float(i)) for i in range(7)]

    def ask(cache: FeatureCache, *numbers: int) -> list[tuple[Tensor, ...]]:
        some = [items[i] for i in numbers]
        return cache.features(some, doubled(some), names=["a"] * len(some))

    cache = FeatureCache(tmp_path, limit=800, salt="a")
    for age in range(5):
        ask(cache, age)
        newest = max(tmp_path.glob("*/*.safetensors"), key=lambda path: path.stat().st_ctime_ns)
        os.utime(newest, (age, age))
    ask(cache, 0)  # read again: now it is the newest
    assert [float(parts[0][0]) for parts in ask(cache, 5, 6)] == [10.0, 12.0]
    assert sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 800
    again = FeatureCache(tmp_path, limit=800, salt="a")
    ask(again, 0, 6)
    assert (again.hits, again.misses) == (2, 0)
    other = FeatureCache(tmp_path, limit=800, salt="b")
    ask(other, 0, 6)
    assert (other.hits, other.misses) == (0, 2)


def test_the_folder_is_bounded_where_several_processes_write_to_it(tmp_path: Path):
    """Each writes 10 files of some 4 kB, for a limit of 50 kB."""
    caches = [FeatureCache(tmp_path, limit=50_000, salt="a") for _ in range(4)]
    for number in range(40):
        item = torch.full((1000,), float(number))
        caches[number % 4].features([item], doubled([item]), names=["a"])
    assert 40_000 < sum(path.stat().st_size for path in tmp_path.glob("*/*")) <= 52_000


def test_a_damaged_file_is_computed_anew(tmp_path: Path):
    cache, item = FeatureCache(tmp_path, limit=10**6, salt="a"), torch.ones(12)
    for _ in range(2):
        ((found,),) = cache.features([item], doubled([item]), names=["a"])
        assert torch.equal(found, 2 * item)
        (path,) = tmp_path.glob("*/*")
        path.write_bytes(path.read_bytes()[:20])
    assert cache.misses == 2
