from __future__ import annotations

import pytest
import torch

from ans_core.model import adapters
from ans_core.model.lora_ranks import rank_of, rank_pattern
from ans_core.model.network import Network
from tests import tiny


def of_singular_values(values: list[float], rows: int = 40, columns: int = 30) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    left = torch.linalg.qr(torch.randn(rows, len(values), generator=generator)).Q
    right = torch.linalg.qr(torch.randn(columns, len(values), generator=generator)).Q
    return left @ torch.diag(torch.tensor(values)) @ right.T


def test_a_rank_holds_the_energy_that_is_asked_for():
    """Squares 9 x 4 of twelve values and 12 x 1: nine of them are 36 / 48 = 75 %, 90 % need 43.2 = nine and
    eight of the ones."""
    values = [2.0] * 9 + [1.0] * 12
    assert rank_of(of_singular_values(values), energy=0.74) == 9
    assert rank_of(of_singular_values(values), energy=0.89) == 16
    assert rank_of(of_singular_values(values, rows=30, columns=40), energy=0.89) == 16
    assert rank_of(of_singular_values([1.0] * 2), energy=0.9) == 4  # the smallest
    assert rank_of(torch.zeros(5, 7), energy=0.9) == 4
    assert rank_of(torch.eye(200), energy=0.9) == 128  # the largest


@pytest.mark.slow
def test_every_layer_gets_its_own_rank_and_the_same_factor(own_model: Network):
    tuned = tiny.build()
    layers = tuned.internvl.model.language_model.layers
    with torch.no_grad():
        layers[1].mlp.down_proj.weight += of_singular_values(
            [1.0] * 20, *layers[1].mlp.down_proj.weight.shape
        )
    ranks = rank_pattern(own_model, dict(tuned.named_parameters()), energy=0.88)
    name = "internvl.model.language_model.layers.1.mlp.down_proj"
    assert len(ranks) == 14
    assert ranks.pop(name) == 18
    assert set(ranks.values()) == {4}
    adapters.prepare_sft(
        own_model,
        adapters.lora_config(rank=8, alpha=16, dropout=0.0, rank_pattern={**ranks, name: 18}),
        seed=0,
    )
    changed, other = (own_model.get_submodule(n) for n in (name, name.replace("down", "up")))
    assert (changed.lora_A["default"].weight.shape[0], other.lora_A["default"].weight.shape[0]) == (18, 4)
    assert changed.scaling["default"] == pytest.approx(2.0)
    assert other.scaling["default"] == pytest.approx(2.0)
    del tuned.internvl.model.language_model.layers[1]
    with pytest.raises(
        ValueError, match=r"lora_ranks_from is another model: it has no internvl.*layers.1.* of \("
    ):
        rank_pattern(tiny.build(), dict(tuned.named_parameters()), energy=0.88)
    with pytest.raises(ValueError, match="lora_ranks_from has the base's own layers"):
        rank_pattern(tiny.build(), dict(tiny.build().named_parameters()), energy=0.88)
