"""perf/gpu.py: its parts at the tiny size on a CPU, and its table."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from perf.gpu import table


def test_a_figure_that_is_worse_by_more_than_a_twentieth_is_marked():
    facts = {
        "card": "H100",
        "size": "sa2va-4b",
        "torch": "2",
        "transformers": "5",
        "date": "2026-11-27",
        "commit": "abc",
    }
    before = {
        "sft": {
            **facts,
            "cases": {"compiled": {"tokens_per_s": 100.0, "step_s": 1.0, "mfu": 0.4, "waiting": 0.1}},
        }
    }
    now = {
        "sft": {
            **facts,
            "cases": {"compiled": {"tokens_per_s": 94.0, "step_s": 1.06, "mfu": 0.39, "waiting": 0.2}},
        }
    }
    assert table(now, before).splitlines()[-1] == (
        "| sft | compiled | **tokens per s 94 (was 100)**; **step s 1.06 (was 1)**; mfu 0.39; waiting 0.2 |"
    )
    assert "**" not in table(before, now)


def run(*parts: str, out: str) -> subprocess.CompletedProcess[str]:
    words = ["--parts", *parts, "--size", "tiny", "--device", "cpu", "--quick", "--out", out]
    return subprocess.run(
        [sys.executable, "-m", "perf.gpu", *words], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_training_decoding_and_evaluation_are_measured_on_a_cpu_whatever_fails(tmp_path, monkeypatch):
    (tmp_path / "golden").mkdir()  # without a release
    monkeypatch.setenv("ANS_REFERENCE", str(tmp_path))  # and without photos: pictures are drawn
    done = run("parity", "sft", "decode", "resume", "evaluate", out=str(tmp_path / "gpu.json"))
    found = json.loads((tmp_path / "gpu.json").read_text())
    # a part that fails says why, and doesn't stop the next
    assert done.returncode
    assert any("qwen2" in line for line in found["parity"]["failed"])
    assert "failed" not in {*found["sft"], *found["decode"], *found["resume"], *found["evaluate"]}, (
        done.stdout[-2000:]
    )
    assert found["evaluate"]["cases"]["masks"]["questions_per_s"] > 0
    assert found["resume"]["cases"]["plain"]["resumed_step_s"] > 0
    compiled, eager = (
        found["sft"]["cases"]["compiled, checkpointing none"],
        found["sft"]["cases"]["eager, checkpointing layers"],
    )
    assert 1 <= compiled["graphs"] <= 4, "rows of unlike lengths share graphs"
    assert not compiled["breaks"]
    assert not eager["graphs"]
    assert min(compiled["tokens_per_s"], eager["tokens_per_s"], compiled["mfu"], compiled["peak_gb"]) > 0
    assert found["sft"]["cases"]["micro-batch, compiled"]["backward_s"] > 0
    assert len(found["sft"]["cases"]["kernels, compiled"]) > 2
    for case in ("16 rows, long prompts, eager", "16 rows, short prompts, eager"):
        assert found["decode"]["cases"][case]["all_ms"] > 0
    assert {part["size"] for part in found.values()} == {"tiny"}
    assert "| decode | 16 rows, long prompts, eager |" in done.stdout
