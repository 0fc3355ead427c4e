"""The agent's episodes on the page of `ans demo`: what is read of a run, and what each turn shows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests import tiny

pytest.importorskip("gradio", reason="gradio is missing: pip install -c requirements/demo.txt -e '.[demo]'")
from ans_core.demo import episodes


def write_run(run: Path) -> Path:
    """Two rows of a run's agent, as `agent_evaluate` writes them."""
    for row, right in (("sft", False), ("rft", True)):
        folder = run / "agent/evaluate" / row / "episodes"
        folder.mkdir(parents=True)
        for name in ("000.png", "000-0-0.png", "001.png"):
            (folder / name).write_bytes(tiny.picture(len(name)))
        looked = {
            "said": '{"name": "zoom_in"} <b>', "given": False, "shown": "image_2: the part", "error": None,
            "pictures": ["000-0-0.png"], "masks": [{"label": "mask_1", "picture": "001.png"}],
        }  # fmt: skip
        told: dict[str, Any] = {
            "question_id": "q0",
            "family": "detail",
            "question": f"Which <digit> does {row} see?",
            "truth": "7",
        }
        ended: dict[str, Any] = {
            "answer": "7" if right else None,
            "right": right,
            "evidence": not right,
            "ended": "turns",
        }
        first = (
            told
            | ended
            | {"picture": "000.png", "turns": [looked, {"said": "<answer>7</answer>", "given": False}]}
        )
        (folder / "episodes.json").write_text(
            json.dumps([first, first | {"picture": "001.png", "turns": [], "question": "Another?"}])
        )
    return run


def test_a_runs_episodes_are_read_by_row_the_most_trained_first(tmp_path: Path):
    albums = episodes.albums_of(write_run(tmp_path) / "model")
    assert list(albums) == ["rft", "sft"]
    assert episodes.labels(albums["sft"]) == [
        ("✗ detail: Which <digit> does sft see?", 0),
        ("✗ detail: Another?", 1),
    ]
    assert albums["rft"][0]["turns"][0]["pictures"][0].startswith("data:image/png;base64,")
    assert episodes.albums_of(tmp_path / "elsewhere/model") == {}


def test_an_episode_is_shown_turn_by_turn_and_the_answer_last(tmp_path: Path):
    albums = episodes.albums_of(write_run(tmp_path) / "model")
    right, wrong = albums["rft"][0], albums["sft"][0]
    assert [episodes.episode_html(right, turns).count('class="turn"') for turns in (0, 1, 2)] == [0, 1, 2]
    before, after = (episodes.episode_html(right, turns) for turns in (1, 2))
    assert "image_2: the part" in before
    assert before.count("<img") == 3
    assert "<figcaption>mask_1</figcaption>" in before
    assert "<b>truth</b>" not in before
    assert "<b>answer</b> 7" in after
    assert "right without having looked" in after
    assert "Which &lt;digit&gt; does rft see?" in after
    assert "zoom_in&quot;} &lt;b&gt;" in after
    assert "<i>none: turns</i>" in episodes.episode_html(wrong, 2)
