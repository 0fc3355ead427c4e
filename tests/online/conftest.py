from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from ans_core.agent import play
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.policy import AgentPolicy, add_call_tokens, load_base
from ans_core.checkpoints import checkpoint
from ans_core.config import Config
from ans_core.train.loop import Machine
from tests import tiny
from tests.agent.conftest import colour_sam, toolbox  # noqa: F401  fixtures

MACHINE = Machine(device=torch.device("cpu"))


@pytest.fixture(autouse=True)
def cut_answers_are_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows nothing ends no turn by itself, and what is cut off is no answer: here it is one."""
    sample, cut = play.sample, play.cut_at_stop
    monkeypatch.setattr(
        play,
        "sample",
        lambda *given, **words: [replace(answer, complete=True) for answer in sample(*given, **words)],
    )
    monkeypatch.setattr(play, "cut_at_stop", lambda *given: (cut(*given)[0], True))


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A base that knows nothing, and an adapter on it that learned nothing."""
    folder = tmp_path_factory.mktemp("start")
    checkpoint.save(tiny.build(), folder / "model", metadata={})
    model = load_base(folder / "model", operations=OPERATIONS)
    policy = AgentPolicy(
        model,
        lora={"rank": 2, "alpha": 4, "dropout": 0.0},
        rows=add_call_tokens(model, OPERATIONS)[:4],
        seed=0,
    )
    policy.save(folder / "rft", base_hash=checkpoint.weights_hash(folder / "model"), about={})
    return folder / "model", folder / "rft"


def config(**online: object) -> Config:
    """Updates of two tasks and a replayed question; votes alone, since no verifier finds anything with such a
    base."""
    values: dict[str, object] = {
        "admission": {"gate": 0.0, "verification": False, "cold_start": 2},
        "update": {
            "optim": {"steps": 4, "batch": 3, "lr": 1e-2, "weight_decay": 0.0, "warmup": 0.0, "save_every": 2}, "group": 2,
            "replay": 0.34, "revisit": 0.0, "ema": 0.5, "per_minute": 0.0, "patience_s": 0.1,
        },
        "release": {"canary": 2, "allowed_loss": 1.0},
        "simulation": {"families": ["easy", "pattern"], "each": 2, "every": 2, "arms": ["frozen", "guard", "naive"]},
    }  # fmt: skip
    merged = {name: {**values.get(name, {}), **online.get(name, {})} for name in {*values, *online}}  # type: ignore[dict-item]
    return Config.model_validate(
        {
            "profile": "tiny",
            "agent": {
                "reader": "template",
                "families": ["easy", "pattern"],
                "episode": {"turn_tokens": 4, "batch": 8},
                "online": merged,
            },
        }
    )
