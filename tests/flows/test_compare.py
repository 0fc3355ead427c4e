import json
from pathlib import Path

import pytest

from flows.compare import table
from tasks.tracking import client, experiment_id


def cells(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


def write(path: Path, values: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return str(path)


def test_folders_of_runs_are_compared_by_what_evaluate_wrote(tmp_path: Path):
    for name, value in (("one", 0.5), ("other", 0.75)):
        write(tmp_path / name / "evaluate/rl/metrics.json", {"video/val/J&F": value})
    shown = cells(table(str(tmp_path / "one"), str(tmp_path / "other"), tmp_path))
    assert shown == {"rl/video/val/J&F": ["0.5000", "0.7500", "+0.2500"]}
    with pytest.raises(FileNotFoundError, match=r"is no summary\.json, no folder like runs/<profile>.*it has no evaluate/"):
        table(str(tmp_path / "one"), str(tmp_path), tmp_path)


@pytest.mark.parametrize("before", [{"rl": {"referring/gIoU": 0.5}}, {"rl": {"referring/val/gIoU": 0.5, "referring/val/samples": 3}}])
def test_a_headline_or_another_split_is_compared_by_names_without_the_split(tmp_path: Path, before: dict):
    one = write(tmp_path / "one.json", before)
    other = write(tmp_path / "other.json", {"rl": {"referring/test/gIoU": 0.25, "referring/test/cIoU": 0.5}})
    assert cells(table(one, other, tmp_path)) == {"rl/referring/gIoU": ["0.5000", "0.2500", "-0.2500"]}


def test_results_without_a_common_metric_are_refused(tmp_path: Path):
    one, other = write(tmp_path / "one.json", {"rl": {"a/val/b": 1}}), write(tmp_path / "other.json", {"sft": {"a/val/b": 1}})
    with pytest.raises(ValueError, match=r"no metric in common: rl/a/val/b \.\.\. and sft/a/val/b"):
        table(one, other, tmp_path)


@pytest.mark.slow
def test_a_pipelines_run_has_the_metrics_of_its_stages_the_later_try_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path / 'mlflow.db'}")
    mlflow = client(tmp_path)
    experiment = experiment_id(mlflow, tmp_path)
    parent = mlflow.create_run(experiment).info.run_id
    tried = [("evaluate@rl", {"eval/video/val/J_F": 0.1}), ("evaluate@rl", {"eval/video/val/J_F": 0.5}), ("sft", {"loss": 2.0}),
             ("report", {"sft/video/val/J_F": 0.25})]  # fmt: skip
    for start_ms, (stage, metrics) in enumerate(tried, start=1):
        tags = {"mlflow.parentRunId": parent, "ans.stage": stage}
        run = mlflow.create_run(experiment, start_time=start_ms, tags=tags).info.run_id
        for name, value in metrics.items():
            mlflow.log_metric(run, name, value)
    other = write(tmp_path / "summary.json", {"rl": {"video/val/J&F": 0.75}, "sft": {"video/val/J&F": 0.5}})
    assert cells(table(parent, other, tmp_path)) == {
        "rl/video/val/J&F": ["0.5000", "0.7500", "+0.2500"],
        "sft/video/val/J&F": ["0.2500", "0.5000", "+0.2500"],
        "sft:": ["loss", "2.0000", "-", "-"],
    }
