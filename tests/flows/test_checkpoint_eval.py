"""Evaluations of any checkpoint appear whole, and know nothing of a killed one but its answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from ans_core.config import load
from flows import checkpoint_eval
from tests.workspace import ROOT


def test_a_killed_evaluation_leaves_its_answers_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stage(config: Any, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Any, row: str) -> dict[str, float]:
        index, answers = out / "index.json", scratch / "answers"
        pictures = json.loads(index.read_text()) if index.exists() else []
        index.write_text(json.dumps([*pictures, "a picture"]))
        if not answers.exists():
            answers.write_text("kept")
            raise KeyboardInterrupt
        (out / "metrics.json").write_text("{}")
        return {}

    monkeypatch.setattr(checkpoint_eval, "stage_function", lambda _: stage)
    out, config = tmp_path / ".ans/eval/model-1", load(ROOT / "params.yaml")
    with pytest.raises(KeyboardInterrupt):
        checkpoint_eval.evaluate_into(out, tmp_path / "model", tmp_path, config)
    assert not out.exists()
    for _ in range(2):  # the second replaces the first
        (tmp_path / ".ans/scratch/tiny/eval/model-1").mkdir(parents=True, exist_ok=True)
        (tmp_path / ".ans/scratch/tiny/eval/model-1/answers").write_text("kept")
        checkpoint_eval.evaluate_into(out, tmp_path / "model", tmp_path, config)
        assert json.loads((out / "index.json").read_text()) == ["a picture"]
    assert sorted(path.name for path in out.parent.iterdir()) == ["model-1"]
    assert not list((tmp_path / ".ans/scratch/tiny/eval").iterdir())
