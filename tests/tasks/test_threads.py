"""Threads of a stage."""

from __future__ import annotations

import os

import pytest

from ans_core.processes import SPINS, thread_variables


@pytest.mark.parametrize(
    ("own", "spins"), [({}, SPINS), ({"GOMP_SPINCOUNT": "7"}, None), ({"OMP_WAIT_POLICY": "active"}, None)]
)
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(own: dict[str, str], spins: str | None):
    found = thread_variables(3, processes=2, environment=own)
    assert found.get("GOMP_SPINCOUNT") == spins
    assert found["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("own", "many", "threads"),
    [({}, 1, None), ({}, 2, "3"), ({}, 8, "1"), ({"OMP_NUM_THREADS": "2"}, 2, None)],
)
def test_processes_of_one_machine_share_its_cores(
    monkeypatch: pytest.MonkeyPatch, own: dict[str, str], many: int, threads: str | None
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(6)))
    assert thread_variables(0, processes=many, environment=own).get("OMP_NUM_THREADS") == threads
