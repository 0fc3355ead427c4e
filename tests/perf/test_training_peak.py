from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from accelerate import init_empty_weights
from torch import Tensor, nn

from ans_core.config.memory import MemoryLoss
from ans_core.model.grounding import Grounding
from ans_core.tracking.training import UNREAD, Tracking, open_modules
from ans_core.train.optim import optimizer_of
from perf.training_peak import LiveBytes, StepPeak, as_on_gpu, faked, fakes, step_peak
from tests import tiny
from tests.tracking.conftest import batch_of


class Exponentials(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(10_000))

    def forward(self, batch: list[Tensor]) -> tuple[Tensor, dict[str, float]]:
        return (self.weight + batch[0]).exp().exp().sum(), {}


def test_the_peak_of_a_step_worked_out_by_hand():
    """Weights and input 40 kB each, Adam's moments 80. The backward pass begins with the two results, 40
    each, that it reads; the gradient of the outer one makes 120. Single numbers (a step's count, the loss)
    take 4 bytes each.
    """
    module = Exponentials()
    found = step_peak(
        module, optimizer_of(module, lr=1e-3, weight_decay=0.0, scales={}), [torch.zeros(10_000)], half=False
    )
    assert (found.weights, found.optimizer, found.inputs, found.gradients) == (40_000, 80_004, 40_000, 0)
    assert found.activations == pytest.approx(120_000, abs=20)
    assert found.phase == "backward"


@pytest.mark.slow
@pytest.mark.parametrize("recompute", [True, False])
def test_fake_tensors_take_what_the_same_step_takes(recompute: bool):
    """All of SAM2 trained, in bf16, with dropout: forward, backward, update."""
    batch = batch_of("mask", frames=3)

    def peak(*, fake: bool) -> StepPeak:
        with init_empty_weights() if fake else nullcontext():
            sam2 = Grounding(replace(tiny.GROUNDING, temporal_pointers=True)).train()
        with fakes() if fake else nullcontext() as mode:
            sam2 = sam2.to_empty(device="cpu") if fake else sam2
            open_modules(sam2, {name.split(".")[0] for name, _ in sam2.named_parameters()} - set(UNREAD))
            module = Tracking(sam2, MemoryLoss(), recompute=recompute)
            optimizer = optimizer_of(module, lr=1e-4, weight_decay=0.01, scales={})
            return step_peak(module, optimizer, faked(batch, mode) if fake else batch, half=True)

    fake, real = peak(fake=True), peak(fake=False)
    assert (fake.weights, fake.optimizer, fake.inputs, fake.phase) == (
        real.weights,
        real.optimizer,
        real.inputs,
        real.phase,
    )
    assert fake.total == pytest.approx(real.total, rel=1e-3)


def test_attention_as_on_a_gpu_holds_no_matrix_with_dropout_either():
    """Query, key and value of 256 x 32 in bf16 are 16,384 bytes each, so is the result; a matrix would be
    131,072. Norms give fp32."""
    with fakes(), as_on_gpu(), LiveBytes() as live:
        query, key, value = (
            torch.zeros(1, 1, 256, 32, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)
        )
        before = live.now
        result = F.scaled_dot_product_attention(query, key, value, dropout_p=0.1)
        assert 16_384 + 256 * 4 <= live.most - before < 20_000
        with torch.autocast("cpu", torch.bfloat16):
            assert F.layer_norm(result, (32,)).dtype == torch.float32
