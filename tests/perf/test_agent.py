"""The agent's table: what a second call with other rows makes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ans_core.config import load
from perf import agent
from tests.workspace import ROOT


def test_a_call_with_more_rows_goes_on_and_tells_of_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stages that write their name; the report lists what it was given."""
    ran: list[str] = []

    def stage(module: str) -> Any:
        task = module.rpartition(".")[2]

        def run(cfg: object, *, inputs: dict[str, Path], out: Path, row: str = "", **others: object) -> None:
            ran.append(f"{task}@{row}" if row else task)
            (out / "agent.json").write_text(json.dumps(sorted(inputs)))

        return SimpleNamespace(run=run)

    shutil.copyfile(ROOT / "params.yaml", tmp_path / "params.yaml")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(agent.importlib, "import_module", stage)
    profile = load(Path("params.yaml")).profile
    for rows in (["sft"], ["sft", "oracle"]):
        agent.run_on(profile, 5, tmp_path, rows)
    assert ran == [
        "cota",
        "agent_sft@tools",
        "agent_evaluate@sft",
        "agent_report",
        "agent_evaluate@oracle",
        "agent_report",
    ]
    told = json.loads((agent.RESULTS / f"agent-{profile}-on-seed5.json").read_text())
    assert "agent/evaluate/oracle" in told
