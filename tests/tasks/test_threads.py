"""Threads of a stage."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from ans_core import processes
from ans_core.processes import SPINS, core_quota, memory_limit, thread_variables


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


@pytest.mark.parametrize(
    ("files", "cores", "memory"),
    [
        ({}, sys.maxsize, sys.maxsize),
        ({"cpu.max": "max 100000\n", "memory.max": "max\n"}, sys.maxsize, sys.maxsize),
        ({"cpu.max": "150000 100000\n", "memory.max": "17179869184\n"}, 2, 2**34),
        (
            {
                "cpu/cpu.cfs_quota_us": "400000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "memory/memory.limit_in_bytes": "1024\n",
            },
            4,
            1024,
        ),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, sys.maxsize, sys.maxsize),
    ],
)
def test_a_container_may_have_less_than_the_machine(
    tmp_path: Path, files: dict[str, str], cores: int, memory: int
):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert (core_quota(tmp_path), memory_limit(tmp_path)) == (cores, memory)


def test_a_process_alone_takes_no_more_threads_than_its_container_has_cores(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)))
    monkeypatch.setattr(processes, "core_quota", lambda: 8)
    assert processes.cores() == 8
    assert thread_variables(0, processes=1, environment={})["OMP_NUM_THREADS"] == "8"
