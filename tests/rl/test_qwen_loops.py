"""Both loops of RL on Qwen2.5-VL and Qwen3-VL."""

from __future__ import annotations

import pytest
import torch

from ans_core.inference.sa2va import Sa2VA
from tests.golden import GOLDEN, needs_golden
from tests.rl.test_dual_loop import batch, compute, gradients, loops

pytestmark = needs_golden


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_both_loops_learn_from_what_was_sampled_and_leave_the_vision_tower(kind: str):
    """Log-probabilities of packed answers are those noted while sampling from cached prefixes: region cells,
    deepstack and rotary positions agree on both ways. The pictures are seen once."""
    model, calls = Sa2VA.from_pretrained(GOLDEN / kind).requires_grad_(False), []
    module = loops(model, temperature=1.5)
    model.backbone.vision_tower.register_forward_hook(lambda m, i, o: calls.append(1))
    torch.manual_seed(0)
    loss, found = compute(module, batch(model))
    loss.backward()
    assert found["loop1/sampling_gap"] < 1e-4
    assert found["loop1/distinct"] > 0.3
    assert len(calls) == 1
    learned = gradients(module)
    assert any("language_model" in name for name in learned)
    assert any("text_hidden_fcs" in name for name in learned)
    assert not any("visual" in name or ".teacher." in name for name in learned)
