"""SFT without steps: the base, a Sa2VA, goes on to RL and evaluation as it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ans_core.checkpoints import adapter, checkpoint
from ans_core.checkpoints.sam2 import keeps_no_original
from ans_core.checkpoints.trained import is_passed_through, refuse_untaught, sft_model
from ans_core.config import Config
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from ans_core.stages import evaluate, memory, sft
from ans_core.stages.launch import lasting
from ans_core.stages.report import _learned
from ans_core.stages.rl_batches import rows_of
from flows import cli

RELEASE = {"source": "published", "internvl": "owner/a-release"}


def nothing(metrics: dict[str, float], step: int) -> None:
    pass


def config(**changes: Any) -> Config:
    return Config.model_validate(
        {"profile": "p", "base": RELEASE, "sft": {"optim": {"steps": 0, "batch": 2, "lr": 1e-3}}} | changes
    )


def run(stage: Any, folder: Path, name: str, inputs: tuple[str, ...], **words: str) -> dict[str, float]:
    out = folder / name
    out.mkdir(parents=True)
    ran: dict[str, float] = stage.run(
        config(),
        inputs={key: folder / key for key in inputs},
        out=out,
        scratch=folder / "scratch",
        log=nothing,
        **words,
    )
    return ran


@pytest.fixture
def passed(tmp_path: Path, tiny_model: Network) -> Path:
    """A run's folder up to `sft`. No data: none are read."""
    checkpoint.save(
        tiny_model, tmp_path / "base/base", metadata={"stage": "base", "source": ["owner/a-release", ""]}
    )
    run(memory, tmp_path, "memory", ("data", "base"))
    assert run(sft, tmp_path, "sft", ("data", "base", "memory")) == {"trained": 0.0}
    return tmp_path


def test_a_base_that_passes_through_is_the_model_that_rl_starts_from(
    passed: Path, tiny_model: Network
) -> None:
    assert is_passed_through(passed / "sft")
    found = sft_model(passed / "base/base", passed / "sft").state_dict()
    assert found.keys() == tiny_model.state_dict().keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in tiny_model.state_dict().items())


def test_the_base_is_not_evaluated_twice_and_has_no_curves(passed: Path) -> None:
    assert run(evaluate, passed, "evaluate/base", ("data", "base", "sft"), row="base") == {}
    assert json.loads((passed / "evaluate/base/metrics.json").read_text()) == {}
    assert "it is the row sft" in json.loads((passed / "evaluate/base/skipped.json").read_text())["base"]
    assert _learned(("base", "sft", "rl"), {name: passed / name for name in ("memory", "sft", "rl")}) == [
        "rl"
    ]
    assert _learned(("base", "sft", "rl"), {}) == ["sft", "rl"]


@pytest.mark.slow
def test_a_stages_folder_loads_as_the_model_that_it_makes(passed: Path, tiny_model: Network) -> None:
    for name in ("memory", "sft"):
        found = Sa2VA.from_pretrained(passed / name).state_dict()
        assert all(torch.equal(found[key], tensor) for key, tensor in tiny_model.state_dict().items())
    arguments = cli.parse(["convert", str(passed / "sft"), str(passed / "again")])
    assert arguments.function(arguments) == 0
    assert checkpoint.weights_hash(passed / "again") == checkpoint.weights_hash(passed / "base/base")
    arguments = cli.parse(["convert", str(passed / "base/base"), str(passed / "alone"), "--to", "sam2"])
    assert arguments.function(arguments) == 0
    sam2 = str(passed / "alone/sam2")
    arguments = cli.parse(["convert", str(passed / "sft"), str(passed / "new/folder/both"), "--sam2", sam2])
    assert arguments.function(arguments) == 0
    assert not keeps_no_original(passed / "new/folder/both")
    for words, message in (
        (("--check",), "is what a stage trained: `ans convert .*sft DST` makes a model of it"),
        ((str(passed / "none"), "--to", "adapter", "--sam2", sam2), "an adapter has none"),
    ):
        arguments = cli.parse(["convert", str(passed / "sft"), *words])
        with pytest.raises(ValueError, match=message):
            arguments.function(arguments)
    checkpoint.save_delta({}, passed / "agent/rft", base_hash="", config={"stage": "rft"})
    with pytest.raises(
        ValueError, match="is of the stage 'rft', whose output is no model; those of memory, sft and rl are"
    ):
        checkpoint.load(passed / "agent/rft")
    with pytest.raises(ValueError, match="of which layers are not loaded one by one: make a model of it"):
        checkpoint.load(passed / "sft", divide=lambda layer: None)
    (passed / "base").rename(passed / "gone")
    with pytest.raises(
        ValueError,
        match=r"sft is what the stage sft changed, and .*base/base, on which it was trained, is not there",
    ):
        checkpoint.load(passed / "sft")


def test_no_adapter_is_made_of_nothing(passed: Path) -> None:
    with pytest.raises(ValueError, match="trained nothing"):
        adapter.write_adapter(passed / "sft", passed / "adapter", base=passed / "base/base", sft=None)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("metadata", "what"),
    [
        (
            {"stage": "base", "source": ["OpenGVLab/InternVL2_5-1B", "facebook/sam2-hiera-large"]},
            "whose text_hidden_fcs are random",
        ),
        ({"stage": "base", "seed": 0}, "pre-trained from random weights"),
        ({"stage": "untrained", "seed": 0}, "pre-trained from random weights"),
    ],
)
def test_a_base_that_has_not_learned_seg_is_refused(
    tmp_path: Path, tiny_model: Network, metadata: dict[str, Any], what: str
) -> None:
    checkpoint.save(tiny_model, tmp_path / "base/base", metadata=metadata)
    run(memory, tmp_path, "memory", ("data", "base"))
    with pytest.raises(ValueError, match=what):
        run(sft, tmp_path, "sft", ("data", "base", "memory"))
    for name, taught in {
        "finetune": {"stage": "base", "source": "runs/a/model"},
        "convert": {"stage": "convert", "seed": 0},
    }.items():
        checkpoint.save(tiny_model, tmp_path / name, metadata=taught)
        refuse_untaught(tmp_path / name)


def test_epochs_become_steps_and_the_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    optim = config(rl={"optim": {"steps": 0, "epochs": 1.5, "batch": 4, "lr": 1e-3}}).rl.optim
    # 16.5 samples, 4 a rollout: 5 rollouts, each learned from twice
    assert lasting(optim, "rl", samples=11, inner_steps=2).steps == 10
    assert capsys.readouterr().out == "rl.optim.epochs 1.5: 11 samples, 4 a step: 10 steps\n"
    assert lasting(config().sft.optim, "sft", samples=11).steps == 0


def test_an_epoch_of_rl_is_a_pass_over_the_samples_that_are_rolled_out() -> None:
    """Of 80 samples, 12 a step: after 7 steps 4 are rolled out again."""
    optim = {"steps": 0, "epochs": 1.0, "batch": 8, "lr": 1e-3}
    settings = config(rl={"optim": optim, "oversample": 0.5}).rl
    steps = lasting(settings.optim, "rl", samples=80, batch=settings.rolled_out).steps
    seen = [i for step in range(steps) for i in rows_of(80, step, batch=settings.rolled_out, seed=0)]
    assert sorted(seen[:80]) == [*range(80)]
    assert len(seen) == 84
