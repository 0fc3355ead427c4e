"""What MLflow keeps of a stage's output."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

from tasks.stage_run import log_files


def test_what_a_person_would_look_at_is_logged_and_weights_are_not(tmp_path: Path) -> None:
    for name in (
        "metrics.json",
        "episodes.html",
        "delta.safetensors",
        "episodes/000.webp",
        "samples/000000-agent.png",
        "a/b/deep.json",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"1")
    client = Mock()
    log_files(client, "run", tmp_path)
    logged = [(Path(call.args[1]).name, call.args[2]) for call in client.log_artifact.call_args_list]
    assert logged == [
        ("episodes.html", None),
        ("metrics.json", None),
        ("000.webp", "episodes"),
        ("000000-agent.png", "samples"),
    ]
