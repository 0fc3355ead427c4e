"""A language model in 8 bits: what changes, what stays, what it costs, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ans_core.checkpoints import checkpoint
from ans_core.inference.sa2va import Sa2VA
from ans_core.model import quantization
from ans_core.model.network import Network
from perf.quantize import stored_bytes
from tests.golden import GOLDEN, arrays, needs_golden

quantizes = pytest.mark.skipif(
    quantization.missing(), reason="torchao is not installed (the extra `quantize`)"
)


def test_what_can_not_be_quantized_is_refused_before_anything_is_read(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ValueError, match="quantize 'int4'; there are int8, fp8"):
        Sa2VA.from_pretrained("nothing/there", quantize="int4")
    monkeypatch.setattr(quantization, "missing", lambda: False)
    with pytest.raises(
        ValueError, match="quantize 'fp8' computes in 8-bit floats, which a CPU does not: use 'int8' here"
    ):
        Sa2VA.from_pretrained("nothing/there", quantize="fp8")
    monkeypatch.setattr(quantization, "missing", lambda: True)
    with pytest.raises(
        ValueError,
        match=r"needs torchao, which is an extra: pip install -c requirements/quantize\.txt -e '\.\[quantize\]'",
    ):
        Sa2VA.from_pretrained("nothing/there", quantize="int8")


@quantizes
def test_only_the_linear_layers_of_the_language_model_are_quantized(tmp_path: Path, tiny_model: Network):
    """Rounding to 255 steps of a row's largest weight: no weight moves by more than half a step."""
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    model = Sa2VA.from_pretrained(tmp_path / "model", quantize="int8")
    before, after = tiny_model.state_dict(), model.state_dict()
    changed = {name for name, tensor in after.items() if quantization.is_quantized(tensor)}
    layers = tiny_model.vlm.model.language_model.layers
    wanted = {
        f"internvl.model.language_model.layers.{name}.weight"
        for name, m in layers.named_modules()
        if isinstance(m, torch.nn.Linear)
    }
    assert changed == wanted
    assert len(wanted) == 14  # q, k, v, o, gate, up, down of two layers
    assert all(torch.equal(tensor, before[name]) for name, tensor in after.items() if name not in changed)
    for name in changed:
        step = before[name].abs().amax(1, keepdim=True) / 127
        assert ((after[name].dequantize() - before[name]).abs() <= 0.51 * step).all()
    weights = sum(before[name].numel() for name in changed)
    scales = sum(before[name].shape[0] for name in changed)
    saved = stored_bytes(tiny_model) - stored_bytes(model)
    # 4 bytes to 1; an fp32 scale and a zero point of a byte for every row
    assert saved == 3 * weights - 5 * scales
    with pytest.raises(ValueError, match="the model's weights are quantized, which is for inference"):
        checkpoint.save(model, tmp_path / "again", metadata={})


@pytest.mark.slow
@quantizes
@needs_golden
@pytest.mark.parametrize("name", ["qwen2", "qwen2_5_vl", "qwen3_vl"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_int8_says_what_the_model_says_and_masks_move_little(name: str, dtype: str):
    """Measured: 9 to 107 pixels of 34,500 differ."""
    picture = arrays(f"{name}/inputs")["pf_image_uint8"].numpy()
    whole, eighth = (
        Sa2VA.from_pretrained(GOLDEN / name, dtype=dtype, quantize=kind) for kind in (None, "int8")
    )
    one, other = (
        model.predict(image=picture, text="<image>Please segment the cat.", max_tokens=24)
        for model in (whole, eighth)
    )
    assert one.text == other.text
    assert 0 < (one.masks[0] != other.masks[0]).sum() < 0.01 * one.masks[0].size


@pytest.mark.gpu
@pytest.mark.slow
@quantizes
@needs_golden
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < quantization.FP8_CAPABILITY,
    reason="no GPU that computes in fp8",
)
def test_fp8_says_what_the_model_says_on_a_gpu():
    picture = arrays("qwen2/inputs")["pf_image_uint8"].numpy()
    answers = []
    for kind in (None, "fp8"):
        model = Sa2VA.from_pretrained(GOLDEN / "qwen2", dtype="bfloat16", device_map="cuda", quantize=kind)
        answers.append(model.predict(image=picture, text="<image>Please segment the cat.", max_tokens=24))
    assert answers[0].text == answers[1].text
    assert (answers[0].masks[0] != answers[1].masks[0]).mean() < 0.05
