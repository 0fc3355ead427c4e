import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ans_core import precision
from ans_core.precision import autocast

CPU = torch.device("cpu")


def test_a_cpu_computes_attention_of_few_scores_as_products_in_bf16():
    torch.manual_seed(0)
    linear, x = nn.Linear(8, 8), torch.randn(2, 2, 5, 8, requires_grad=True)
    with autocast(CPU, torch.bfloat16):
        hidden = linear(x)
        attended = F.scaled_dot_product_attention(hidden, hidden, hidden)
    assert (hidden.dtype, attended.dtype) == (torch.bfloat16, torch.bfloat16)
    scores = (hidden * 8**-0.5) @ hidden.mT
    assert torch.equal(attended, scores.softmax(-1) @ hidden)
    attended.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32
    assert bool(x.grad.any())


@pytest.mark.parametrize(
    "options",
    [
        {"is_causal": True, "scale": 0.5},
        {"attn_mask": torch.rand(2, 1, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.5},
        {"attn_mask": torch.rand(1, 4, 6, 6, generator=torch.Generator().manual_seed(0))},
        {},
    ],
)
def test_products_give_what_the_fused_kernel_gives(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    """Within bf16's rounding; values and gradients, with heads that share keys and values."""
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 6, 8), torch.randn(2, 2, 6, 8), torch.randn(2, 2, 6, 5)
    if isinstance(mask := options.get("attn_mask"), Tensor) and mask.dtype == torch.bool:
        mask |= torch.eye(6, dtype=torch.bool)  # of a query that reads nothing the two say different things

    def found() -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with autocast(CPU, torch.bfloat16):
            attended = F.scaled_dot_product_attention(*leaves, enable_gqa=True, **options)
        attended.float().pow(2).sum().backward()
        return [attended.detach().float(), *(x.grad for x in leaves if x.grad is not None)]

    products = found()
    monkeypatch.setattr(precision, "FEW", 0)
    fused = found()
    # in fp32
    assert torch.equal(fused[0], F.scaled_dot_product_attention(q, k, v, enable_gqa=True, **options))
    assert len(products) == len(fused) == 4
    for one, other in zip(products, fused, strict=True):
        assert 0 < float((one - other).norm() / other.norm()) < 0.02


@pytest.mark.parametrize("lowest", [False, -torch.inf, torch.finfo(torch.float32).min])
def test_a_query_that_may_read_nothing_makes_no_nan(lowest: float):
    q = torch.randn(1, 1, 2, 4)
    mask = (
        torch.tensor([[True, True], [False, False]])
        if lowest is False
        else torch.tensor([[0.0, 0.0], [lowest, lowest]])
    )
    with autocast(CPU, torch.bfloat16):
        attended = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    assert bool(attended.isfinite().all())


def test_fp32_is_no_autocast():
    with autocast(CPU, torch.float32):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32


@pytest.fixture
def times(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """What this machine takes in each precision; a test may change it."""
    found = {"fp32": 2.0, "bf16": 1.0}
    monkeypatch.setattr(precision, "cpu_times", lambda: found)
    precision.warn_if_emulated.cache_clear()
    return found


def test_auto_is_the_faster_precision_and_a_setting_stays(
    times: dict[str, float], caplog: pytest.LogCaptureFixture
):
    assert [precision.resolved(dtype, CPU) for dtype in ("auto", "fp32", "bf16")] == ["bf16", "fp32", "bf16"]
    assert precision.inference_dtype(CPU) is None  # weights in half precision stay
    assert not caplog.records
    precision.warn_if_emulated.cache_clear()
    times["bf16"] = 60.0
    assert [precision.resolved(dtype, CPU) for dtype in ("auto", "fp32", "bf16", "bf16")] == [
        "fp32",
        "fp32",
        "bf16",
        "bf16",
    ]
    assert precision.inference_dtype(CPU) == torch.float32
    (warning,) = caplog.records  # once
    assert warning.levelno == logging.WARNING
    assert "bf16 takes 30 times as long" in warning.message


@pytest.mark.slow
def test_processes_of_a_machine_read_what_the_first_one_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    precision.cpu_times.cache_clear()
    try:
        first = precision.cpu_times()
        assert set(first) == {"fp32", "bf16"}
        assert all(value > 0 for value in first.values())
        (file,) = (tmp_path / "ans").iterdir()
        file.write_text(json.dumps({"fp32": 1.5, "bf16": 3.0}))
        assert precision.cpu_times() == first  # of this process
        precision.cpu_times.cache_clear()
        assert precision.cpu_times() == {"fp32": 1.5, "bf16": 3.0}
        file.write_text("")
        precision.cpu_times.cache_clear()
        assert json.loads(file.read_text() or "0") == 0
        assert precision.cpu_times() == json.loads(file.read_text())
        monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")  # other instructions: measured anew
        precision.cpu_times.cache_clear()
        precision.cpu_times()
        assert len(list((tmp_path / "ans").iterdir())) == 2
    finally:
        precision.cpu_times.cache_clear()


def test_without_a_home_that_can_be_written_temporary_files_keep_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    assert precision.cache_folder() == tmp_path / f"ans-{os.getuid()}"
    assert precision.cache_folder().is_dir()
