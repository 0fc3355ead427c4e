"""`ans ask`: what it prints, writes and refuses."""

from __future__ import annotations

import json
import shutil
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ans_core.agent import ask, ocr
from ans_core.agent.episode import Toolbox
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.policy import AgentPolicy, add_call_tokens
from ans_core.agent.protocol import Call, call_text
from ans_core.checkpoints import checkpoint
from flows import cli
from tests import tiny

LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    """params.yaml, a base, and an agent on it that learned nothing."""
    (tmp_path / "params.yaml").write_text("profile: drawn\nagent: {episode: {calls: 2, turn_tokens: 4}}\n")
    run = tmp_path / "runs/drawn"
    model = tiny.build()
    checkpoint.save(model, run / "model", metadata={})
    policy = AgentPolicy(model, lora=LORA, rows=add_call_tokens(model, OPERATIONS), seed=1)
    policy.save(
        run / "agent/sft/tools",
        base_hash=checkpoint.weights_hash(run / "model"),
        about={"stage": "agent_sft"},
    )
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (60, 80, 3), dtype=np.uint8)).save(
        tmp_path / "photo.png"
    )
    return tmp_path


def asked(root: Path, *words: str) -> int:
    return ask.ask(
        cli.parse(
            ["ask", str(root / "photo.png"), "What is written there?", "--out", str(root / "out"), *words]
        ),
        root,
    )


def zoom(box: list[int]) -> str:
    return call_text(Call(name="zoom_in", arguments={"bbox_2d": box}))


@pytest.mark.slow
def test_an_episode_is_told_turn_by_turn_and_its_pictures_are_written(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = [zoom([0, 0, 500, 500]), zoom([500, 500, 400, 900])]
    monkeypatch.setattr(ask, "play", partial(play, plans=[[*plan, "18"]]))
    assert asked(workspace) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[0] == f"turn 1: {plan[0]}"
    assert shown[1] == "  image_2: [0, 0, 500, 500]"
    assert "turn_1/image_2.png" in "".join(shown[2:4])
    second = shown.index(f"turn 2: {plan[1]}")
    assert shown[second + 1].startswith("  Error: bbox_2d [500, 500, 400, 900] is empty")
    assert shown[-2] == "answer: 18"
    with Image.open(workspace / "out/turn_1/image_2.png") as crop:
        assert crop.size == (64, 48)  # 40 x 30 pixels, enlarged to the tile
    told = json.loads((workspace / "out/episode.json").read_text())
    assert (told["ended"], told["turns"][1]["error"], told["turns"][1]["files"]) == ("answer", "bad_box", [])
    assert told["answer"] == told["turns"][2]["said"].strip()
    monkeypatch.setattr(ask, "play", play)
    assert asked(workspace) == 1  # this model ends no turn by itself
    assert "no answer: its answer came to no end within a turn's tokens" in capsys.readouterr().out
    assert not (workspace / "out/turn_1/image_2.png").exists()


def test_an_episode_that_runs_into_a_limit_says_so(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ask, "play", partial(play, plans=[[zoom([0, 0, 500, 500])] * 4]))
    assert asked(workspace) == 1
    assert "no answer: it went on calling after its last call" in capsys.readouterr().out


def test_what_cannot_be_asked_is_refused_before_a_model_is_loaded(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*args: object, **kwargs: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(ask, "load_policy", loaded)
    with pytest.raises(ValueError, match="the question is empty; ask something"):
        ask.ask(cli.parse(["ask", str(workspace / "photo.png"), "  "]), workspace)
    with pytest.raises(
        ValueError, match="the question is no text: character 1 is half of one, or a byte that is not UTF-8"
    ):
        ask.ask(cli.parse(["ask", str(workspace / "photo.png"), "\udcff red?"]), workspace)
    with pytest.raises(ValueError, match="the question holds <image>; leave it out"):
        ask.ask(cli.parse(["ask", str(workspace / "photo.png"), "<image> What?"]), workspace)
    with pytest.raises(FileNotFoundError, match=r"gone\.png"):
        ask.ask(cli.parse(["ask", str(workspace / "gone.png"), "What?"]), workspace)
    with pytest.raises(ValueError, match=r"no folder '.*nowhere'"):
        asked(workspace, "--model", str(workspace / "nowhere"))
    (workspace / "out").mkdir()
    (workspace / "out/episode.json").write_text("[]")
    with pytest.raises(ValueError, match=r"episode\.json is no earlier episode's; give another --out"):
        asked(workspace)
    (workspace / "runs/drawn/agent/sft/tools/delta.json").unlink()
    with pytest.raises(ValueError, match="holds no trained agent; `ans run --agent` trains one"):
        asked(workspace)
    shutil.rmtree(workspace / "runs")  # nothing was run
    with pytest.raises(ValueError, match="holds no trained agent; `ans run --agent` trains one"):
        asked(workspace)


@pytest.mark.slow
def test_the_agents_own_reader_reads_and_another_one_only_with_a_warning(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = workspace / "runs/drawn/agent/sft/tools"
    values = json.loads((trained / "delta.json").read_text())
    base_hash = checkpoint.weights_hash(workspace / "runs/drawn/model")
    tensors, _ = checkpoint.load_delta(trained, base_hash=base_hash)
    checkpoint.save_delta(
        tensors, workspace / "template", base_hash=base_hash, config=values["config"] | {"ocr": "template"}
    )
    readers: list[str] = []

    def noted(model: Any, toolbox: Toolbox, *given: Any, **words: Any) -> list[PlayedEpisode]:
        readers.append(toolbox.reader)
        return play(model, toolbox, *given, **words, plans=[["18"]])

    monkeypatch.setattr(ask, "play", noted)
    monkeypatch.setattr(ocr, "find_spec", lambda name: object())  # nothing is read
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*READ_TEXT.*")
        assert asked(workspace, "--agent", str(workspace / "template")) == 0
        assert asked(workspace) == 0  # it is not known
    with pytest.warns(match="READ_TEXT read by template; now it reads by rapidocr"):
        assert asked(workspace, "--agent", str(workspace / "template"), "--reader", "rapidocr") == 0
    assert readers == ["template", "rapidocr", "rapidocr"]


def test_a_folder_of_another_stage_is_no_agent(workspace: Path) -> None:
    model = tiny.build()
    policy = AgentPolicy(model, lora=LORA, rows=[1], seed=1)
    base_hash = checkpoint.weights_hash(workspace / "runs/drawn/model")
    checkpoint.save_delta(
        policy.adapters.tensors("agent"), workspace / "other", base_hash=base_hash, config={"stage": "sft"}
    )
    with pytest.raises(ValueError, match="is of stage 'sft', not an agent's"):
        asked(workspace, "--agent", str(workspace / "other"))


def test_a_clip_is_asked_about_and_its_frames_are_written(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip = workspace / "clip"
    clip.mkdir()
    for number, frame in enumerate(tiny.clip(0).frames):
        assert isinstance(frame, bytes)
        (clip / f"{number}.png").write_bytes(frame)
    plan = [call_text(Call(name="select_frames", arguments={"frames": [1, 3]}))]
    monkeypatch.setattr(ask, "play", partial(play, plans=[[*plan, "left"]]))
    assert (
        ask.ask(
            cli.parse(["ask", str(clip), "Where does it go?", "--out", str(workspace / "out")]), workspace
        )
        == 0
    )
    told = json.loads((workspace / "out/episode.json").read_text())
    assert [Path(name).name for name in told["turns"][0]["files"]] == [
        "observation.json",
        "image_2.png",
        "image_3.png",
    ]
    with Image.open(workspace / "out/turn_1/image_3.png") as shown, Image.open(clip / "3.png") as frame:
        assert np.array_equal(np.asarray(shown), np.asarray(frame))
