"""Threads of a stage."""

from __future__ import annotations

import os

import pytest

from ans_core.config import Config, Launch
from tasks import runner


@pytest.mark.parametrize(("own", "spins"), [({}, runner.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)])
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch, own: dict[str, str], spins: str | None):
    ours = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    monkeypatch.setattr(os, "environ", ours | own)
    runner.use_threads(Config.model_construct(launch=Launch(threads=3)), processes=2)
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("own", "many", "threads"), [({}, 1, None), ({}, 2, "3"), ({}, 8, "1"), ({"OMP_NUM_THREADS": "2"}, 2, "2")])
def test_processes_of_one_machine_share_its_cores(monkeypatch: pytest.MonkeyPatch, own: dict[str, str], many: int, threads: str | None):
    ours = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    monkeypatch.setattr(os, "environ", ours | own)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    runner.use_threads(Config.model_construct(launch=Launch()), processes=many)
    assert os.environ.get("OMP_NUM_THREADS") == threads
