from __future__ import annotations

import pytest
import torch

from ans_core.data import conversation
from ans_core.data.collate import collate
from ans_core.data.mixture import Mixture, Source
from ans_core.dist import read_together
from ans_core.model import adapters
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised
from ans_core.model.validation import ValidationSlice
from tests import tiny

SAMPLES = [*(tiny.sample(i) for i in range(3)), *(tiny.region(i) for i in range(3, 5))]


@pytest.mark.slow
def test_a_slice_is_measured_without_dropout_the_same_in_parts(own_model: Network):
    """Five rows, three of them with a mask: means over tokens and masks are those of one batch of all,
    whatever the parts' sizes."""
    adapters.prepare_sft(own_model, adapters.lora_config(rank=4, alpha=8, dropout=0.5), seed=0)
    module = Supervised(own_model, mask_weight=2.0, dice_weight=0.5, points=64)
    modes = [m.training for m in module.modules()]
    layout = tiny.layout(own_model)
    mixture = Mixture(
        [Source(name="held out", kind="extra", samples=SAMPLES)],
        {"extra": 1.0},
        questions=2,
        frames=1,
        seed=0,
        turn=conversation.turn,
    )

    def measured(batch: int) -> dict[str, float]:
        none = torch.autocast("cpu", enabled=False)
        return ValidationSlice(module, mixture, layout, rows=5, batch=batch, autocast=none).measure()

    found = measured(2)
    assert measured(5) == pytest.approx(found, rel=1e-4)
    assert [m.training for m in module.modules()] == modes
    assert any(modes)
    whole = collate([mixture.row(i) for i in range(5)], own_model.tokenizer, layout)
    own_model.eval()
    with torch.no_grad():
        loss, read = module(whole)
        (wanted,) = read_together([read])
    assert len(whole.pair_seg) == 3
    assert found == pytest.approx({"loss": float(loss), **wanted}, rel=1e-4)
