"""The registry of checkpoints, in MLflow's SQLite store."""

from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.server.handlers import _validate_source_run

from tasks import registry
from tasks.tracking import TrackingError, client, experiment_id, log_finished, warn, without_password

pytestmark = pytest.mark.slow


def test_a_version_names_the_run_that_made_it_and_is_found_by_alias_and_number(tmp_path: Path) -> None:
    assert registry.version_of(tmp_path, "tiny", "champion") is None
    for key in ("a", "b"):
        tags = {"ans.kind": "stage", "ans.stage": "convert", "ans.profile": "tiny", "ans.key": key}
        log_finished(tmp_path, key, tags=tags, params={}, metrics={})
    mlflow, made = client(tmp_path), {}
    for md5, key in (("1.dir", "a"), ("2.dir", "b"), ("3.dir", "none")):
        version = registry.register(tmp_path, "tiny", md5, key)
        found = mlflow.get_model_version(registry.model_name("tiny"), version.number)
        _validate_source_run(found.source, found.run_id)  # a server does
        made[key] = mlflow.get_run(found.run_id).info.run_name if found.run_id else None
    assert made == {"a": "a", "b": "b", "none": None}
    third = registry.Version(number="3", md5="3.dir")
    assert registry.register(tmp_path, "tiny", "3.dir", "a") == third
    for wanted in ("challenger", "3"):
        assert registry.version_of(tmp_path, "tiny", wanted) == third
    for wanted in ("champion", "4", "runs/no/folder", "it's"):
        assert registry.version_of(tmp_path, "tiny", wanted) is None
    registry.promote(tmp_path, "tiny", third)
    assert registry.version_of(tmp_path, "tiny", "champion") == third


def test_a_store_that_does_not_answer_is_no_lack_of_a_version_and_its_password_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://me:s%2Fcret@127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(MlflowException) as away:
        registry.version_of(tmp_path, "tiny", "champion")
    assert "s%2Fcret" in str(away.value)
    warn(f"away: {away.value}")
    with pytest.raises(TrackingError, match=r"MLflow at http://127\.0\.0\.1:9 does not answer") as told:
        experiment_id(client(tmp_path), tmp_path)
    assert "cret" not in str(told.value) + capsys.readouterr().err
    assert without_password("postgresql://a:b@c@h/db?x=y@z or a@b") == "postgresql://h/db?x=y@z or a@b"
