"""Threads and processes of a stage."""

from __future__ import annotations

import os

import pytest

from ans_core.config import Config, ConfigError, Launch
from tasks import runner
from tasks.stages import stage_named


@pytest.mark.parametrize(("own", "spins"), [({}, runner.SPINS), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)])
def test_idle_threads_sleep_soon_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch, own: dict[str, str], spins: str | None):
    ours = {name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    monkeypatch.setattr(os, "environ", ours | own)
    runner.use_threads(Config.model_construct(launch=Launch(threads=3)))
    assert os.environ.get("GOMP_SPINCOUNT") == spins
    assert os.environ["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(
    ("stage", "processes", "deepspeed_stage", "torchrun"),
    [("memory", 2, 0, True), ("sft", 1, 0, False), ("sft", 2, 0, True), ("rl", 1, 2, True), ("base", 2, 2, False)],
)
def test_torchrun_starts_training_of_several_processes_or_with_deepspeed(stage: str, processes: int, deepspeed_stage: int, torchrun: bool):
    launch = Launch(processes=processes, deepspeed_stage=deepspeed_stage)
    assert runner.starts_under_torchrun(stage_named(stage), Config.model_construct(launch=launch)) == torchrun


def test_torchrun_starts_all_processes_here_or_this_nodes_share():
    assert runner.torchrun_options(8, {}) == ["--standalone", "--nproc-per-node=8"]
    several = {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "29500"}
    assert runner.torchrun_options(32, several) == ["--nproc-per-node=8"]
    with pytest.raises(ConfigError, match=r"launch.processes is 6, on PET_NNODES=4 nodes: give a multiple"):
        runner.torchrun_options(6, several)
