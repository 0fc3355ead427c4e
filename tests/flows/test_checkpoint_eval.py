"""Evaluations of any checkpoint appear whole, and know nothing of a killed one but its answers."""

import json
from pathlib import Path
from typing import Any

import pytest

from ans_core.config import load
from flows import checkpoint_eval
from flows.child import StageFailedError
from tasks import runner
from tasks.process import held
from tests.workspace import tiny_params


def test_a_killed_evaluation_leaves_its_answers_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stage(
        config: Any, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Any, row: str
    ) -> dict[str, float]:
        index, answers = out / "index.json", scratch / "answers"
        pictures = json.loads(index.read_text()) if index.exists() else []
        index.write_text(json.dumps([*pictures, "a picture"]))
        if not answers.exists():
            answers.write_text("kept")
            raise KeyboardInterrupt
        (out / "metrics.json").write_text("{}")
        return {}

    monkeypatch.setattr(runner, "stage_function", lambda _: stage)
    out, config = tmp_path / ".ans/eval/model-1", load(tiny_params(tmp_path))
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


def make_inputs(folder: Path) -> None:
    for name in ("runs/tiny/data", "runs/tiny/base", "runs/tiny/sft", "model"):
        (folder / name).mkdir(parents=True)


def test_without_a_finished_pipeline_it_is_said_what_to_run(tmp_path: Path) -> None:
    config = load(tiny_params(tmp_path))
    (tmp_path / "model").mkdir()
    message = r"runs/tiny/data.*`ans run`.*`ans eval BENCHMARK --model .*model --data DIR`"
    with pytest.raises(ValueError, match=message):
        checkpoint_eval.check_inputs(tmp_path / "model", tmp_path, config)


def test_several_processes_share_an_evaluation_and_the_first_alone_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load(tiny_params(tmp_path))
    make_inputs(tmp_path)
    several = config.model_copy(update={"launch": config.launch.model_copy(update={"processes": 2})})
    started: list[str] = []
    monkeypatch.setattr(checkpoint_eval, "settings", lambda *_: several)
    out = tmp_path / ".ans/eval/model-1"
    monkeypatch.setattr(checkpoint_eval, "result_folder", lambda *_: out)
    monkeypatch.setattr(checkpoint_eval, "run_noted", lambda command, **_: (started.extend(command), {}))
    with pytest.raises(
        StageFailedError, match=r"the code changed while it waited, and its figures in .*eval"
    ):
        checkpoint_eval.in_child(tmp_path / "model", "hash", tmp_path, {})
    assert started[:5] == ["-m", "torch.distributed.run", "--nnodes=1", "--standalone", "--nproc-per-node=2"]
    assert started[5:7] == ["-m", "flows.checkpoint_eval"]

    shares: list[bool] = []

    def stage(*_: object, scratch: Path, **__: object) -> None:
        shares.append(scratch.is_dir())

    monkeypatch.setattr(runner, "stage_function", lambda _: stage)
    monkeypatch.setenv("RANK", "1")
    with held(tmp_path / ".ans/stage.lock", "the first"):
        checkpoint_eval.evaluate_into(tmp_path / ".ans/eval/model-1", tmp_path / "model", tmp_path, config)
    assert shares == [True]
    assert not (tmp_path / ".ans/eval").exists()


@pytest.mark.slow
def test_changed_evaluation_data_have_a_result_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By every entrance; the processes of one evaluation take the fingerprint that named its folder."""
    mine = {"name": "mine", "format": "annotations", "path": "mine", "split": "val"}
    public = {"name": "refcoco", "path": "refcoco"}
    for name in ("mine", "refcoco"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "annotations.json").write_text("[]")
    tiny_params(tmp_path)
    make_inputs(tmp_path)
    monkeypatch.setattr(checkpoint_eval, "inputs_md5", lambda *_, **__: {"data": "1"})
    monkeypatch.setattr(checkpoint_eval.Code, "version_of", lambda *_: "")
    commands: list[list[str]] = []

    def child(command: list[str], **_: object) -> tuple[int, dict[str, Any]]:
        commands.append(command)
        settings = checkpoint_eval.settings(tmp_path, json.loads(command[-1]))
        out = checkpoint_eval.result_folder(tmp_path / "model", "hash", tmp_path, settings)
        out.mkdir(parents=True)
        (out / "metrics.json").write_text("{}")
        return 0, {}

    monkeypatch.setattr(checkpoint_eval, "run_noted", child)

    def found() -> Path:
        return checkpoint_eval.in_child(
            tmp_path / "model", "hash", tmp_path, {"sources": [mine], "public": [public]}
        )

    before = found()
    assert found() == before
    for name in ("mine", "refcoco"):
        (tmp_path / name / "annotations.json").write_text(f'["{name}"]')
        assert found() != before
        before = found()


def test_the_content_of_a_checkpoint_is_its_tensors_and_its_configuration(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"tensors")
    (tmp_path / "config.json").write_text("{}")
    first = checkpoint_eval.content_of(tmp_path)
    (tmp_path / "config.json").write_text('{"template": "qwen_chat"}')
    second = checkpoint_eval.content_of(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"others")
    assert len({first, second, checkpoint_eval.content_of(tmp_path)}) == 3
