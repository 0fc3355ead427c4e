"""The whole pipeline on Qwen-VL from random weights, far too small to learn anything."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ans_core.checkpoints import trained as handed_on
from ans_core.config import Config
from ans_core.inference.sa2va import Sa2VA
from ans_core.stages import base, convert, evaluate, memory, prepare, rl, sft
from tests.stages.test_stages import CONFIG, run

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
def test_every_stage_runs_on_qwen_vl_and_trains_its_own_parts(tmp_path: Path, kind: str):
    values = CONFIG.model_dump(mode="json")
    values["base"] |= {"kind": kind}
    cfg, runs = Config.model_validate(values), tmp_path
    run(prepare, runs, "data", {}, cfg)
    run(base, runs, "base", {"data": runs / "data"}, cfg)
    run(memory, runs, "memory", {k: runs / k for k in ("data", "base")}, cfg)
    run(sft, runs, "sft", {k: runs / k for k in ("data", "base", "memory")}, cfg)
    run(rl, runs, "rl", {k: runs / k for k in ("data", "base", "sft")}, cfg)
    run(convert, runs, "model", {k: runs / k for k in ("data", "base", "sft", "rl")}, cfg)
    scores = run(
        evaluate, runs, "eval", {k: runs / k for k in ("data", "base", "sft", "model")}, cfg, row="rl"
    )
    assert scores
    moved = {stage: json.loads((runs / stage / "moved.json").read_text()) for stage in ("base", "sft", "rl")}
    trained = {
        phase: {k.removesuffix(" (trained)") for k, did in found.items() if did}
        for phase, found in moved["base"].items()
    }
    assert trained["vision_words"] == {"vision tower"}
    assert trained["alignment"] == {"vision tower", "embeddings"}  # of the tower, its merger
    assert trained["language"] == {"vision tower", "embeddings", "language model", "head", "text_hidden_fcs"}
    for stage in ("sft", "rl"):
        assert moved[stage]["vision tower (frozen)"] is False
        assert "vision tower (trained)" not in moved[stage]
        assert moved[stage]["language model (trained)"]
    merged, written = (
        handed_on.rl_model(runs / "base/base", runs / "sft", runs / "rl"),
        Sa2VA.from_pretrained(runs / "model"),
    )
    assert written.config.kind == kind
    assert all(
        torch.equal(a, b)
        for a, b in zip(merged.state_dict().values(), written.state_dict().values(), strict=True)
    )
