"""What a flow refuses before its first stage runs."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from ans_core.config import Config
from flows.child import StageFailedError
from flows.pipeline import PlainErrors, check_agent_sources, check_base, check_sam2_alone, check_traces
from tasks.stages import AGENT, MEMORY, STAGES, needed_for
from tests.agent.test_annotated import five_photographs


def settings(**changes: object) -> Config:
    return Config.model_validate({"profile": "mine", **changes})


def test_a_sam2_alone_goes_as_far_as_its_memory():
    alone = settings(base={"source": "sam2", "sam2": "weights"}, memory={"validate_only": True})
    check_sam2_alone(needed_for(MEMORY, alone), alone)
    with pytest.raises(
        ValueError,
        match=r"base\.source is sam2, a SAM2 without a language model, which sft needs; run `ans run`",
    ):
        check_sam2_alone(STAGES, alone)
    check_sam2_alone(STAGES, settings())


@pytest.mark.slow
def test_an_agents_base_is_there_or_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)  # as flows do
    check_base(needed_for(AGENT, settings()), settings(), tmp_path)
    other = settings(agent={"base": "models/mine"})
    with pytest.raises(
        ValueError, match=r"agent\.base = 'models/mine' is no folder; name one that holds a Sa2VA"
    ):
        check_base(needed_for(AGENT, other), other, tmp_path)
    check_base(STAGES, other, tmp_path)
    drawing = settings(agent={"segmenter": "models/strong"})
    with pytest.raises(ValueError, match=r"agent\.segmenter = 'models/strong' is no folder"):
        check_base(needed_for(AGENT, drawing), drawing, tmp_path)
    (tmp_path / "models/mine").mkdir(parents=True)
    check_base(needed_for(AGENT, other), other, tmp_path)


def test_own_traces_are_read_before_the_first_stage(tmp_path: Path):
    mine = settings(agent={"sft": {"traces": "mine"}})
    check_traces(needed_for(AGENT, settings()), settings(), tmp_path)
    check_traces(STAGES, mine, tmp_path)
    with pytest.raises(ValueError, match=r"agent\.sft\.traces = 'mine' has no traces\.jsonl; name a folder"):
        check_traces(needed_for(AGENT, mine), mine, tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/traces.jsonl").write_text('{"kind": "golden"}\n')
    with pytest.raises(ValueError, match=r"line 1: trace_id: Field required"):
        check_traces(needed_for(AGENT, mine), mine, tmp_path)


@pytest.mark.slow
def test_an_agents_pictures_are_read_before_the_first_stage(tmp_path: Path):
    source = {"name": "mine", "format": "annotations", "path": "mine"}
    mine = settings(agent={"sources": [source]})
    check_agent_sources(STAGES, mine, tmp_path)
    with pytest.raises(ValueError, match=r"mine does not exist"):
        check_agent_sources(needed_for(AGENT, mine), mine, tmp_path)
    (tmp_path / "mine").mkdir()
    five_photographs(tmp_path / "mine")
    check_agent_sources(needed_for(AGENT, mine), mine, tmp_path)
    file = tmp_path / "mine/annotations.json"
    records = json.loads(file.read_text())
    captions = [
        {"image": record["image"], "masks": [mask], "text": "a cat", "task": "region_caption"}
        for record in records
        for mask in record["masks"]
    ]
    file.write_text(json.dumps(captions))
    with pytest.raises(
        ValueError, match=r"agent\.sources: 'mine' has no picture with words and masks, and no"
    ):
        check_agent_sources(needed_for(AGENT, mine), mine, tmp_path)
    file.write_text(json.dumps([*records, {"image": "none.png", "text": "a cat", "masks": []}]))
    with pytest.raises(ValueError, match=r"none\.png"):
        check_agent_sources(needed_for(AGENT, mine), mine, tmp_path)


@pytest.mark.parametrize(
    ("error", "plain"),
    [(ValueError("rl.kl"), True), (StageFailedError("rl.kl"), True), (KeyError("kl"), False)],
)
def test_a_users_mistake_is_logged_as_its_sentence(
    error: Exception, plain: bool, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("ANS_TRACEBACK", raising=False)

    def record() -> logging.LogRecord:
        return logging.LogRecord(
            "prefect.flow_runs", logging.ERROR, "", 0, "Encountered %r", (error,), (type(error), error, None)
        )

    shown = record()
    assert PlainErrors().filter(shown)
    assert (shown.getMessage() == "rl.kl", shown.exc_info is None) == (plain, plain)
    monkeypatch.setenv("ANS_TRACEBACK", "1")
    shown = record()
    assert PlainErrors().filter(shown)
    assert shown.exc_info
