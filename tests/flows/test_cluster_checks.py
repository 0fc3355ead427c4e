"""`ans doctor --cluster`: what it finds on this machine, and with a real Slurm."""

from __future__ import annotations

import re
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ans_core import stop
from ans_core.config import Config, Launch, load
from flows import cluster_checks, doctor
from flows.preflight import Finding
from tests import slurm_cluster
from tests.workspace import ROOT

CONFIG = load(ROOT / "params.yaml")
LOCAL = [("/", "ext4")]


def settings(**launch: object) -> Config:
    return CONFIG.model_copy(update={"launch": Launch.model_validate(launch)})


def test_a_local_disk_does_all_that_a_checkout_needs(tmp_path: Path) -> None:
    findings = cluster_checks.file_system(settings(), tmp_path, LOCAL)
    assert [finding.ok for finding in findings] == [True, True]
    assert findings[0].what == f"{tmp_path} is on ext4"
    assert list((tmp_path / ".ans").iterdir()) == []


def test_jobs_on_other_nodes_need_a_folder_that_they_see(tmp_path: Path) -> None:
    local, _ = cluster_checks.file_system(settings(launcher="slurm"), tmp_path, LOCAL)
    assert "every node must see it" in local.what
    mounts = [*LOCAL, (str(tmp_path), "nfs4")]
    shared, _ = cluster_checks.file_system(settings(launcher="slurm"), tmp_path, mounts)
    assert shared.what == f"{tmp_path} is on nfs4"


def test_a_bucket_that_is_mounted_as_a_folder_is_refused(tmp_path: Path) -> None:
    mounts = [*LOCAL, (str(tmp_path), "fuse.s3fs")]
    (finding,) = cluster_checks.file_system(settings(), tmp_path / "checkout", mounts)
    assert (finding.ok, "fuse.s3fs" in finding.what) == (False, True)


@pytest.mark.parametrize(
    ("name", "lacks"), [("fsync", "fsync"), ("is_locked", "flock")], ids=["no fsync", "no flock"]
)
def test_an_operation_that_fails_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, lacks: str
) -> None:
    def refused(*_: object) -> None:
        raise OSError("not supported")

    if name == "fsync":
        monkeypatch.setattr(cluster_checks.os, "fsync", refused)
    else:
        monkeypatch.setattr(cluster_checks.fcntl, "flock", refused)
    assert cluster_checks.broken_operations(tmp_path) == [lacks]
    assert list(tmp_path.iterdir()) == []


def test_jobs_need_a_server_for_their_runs(tmp_path: Path) -> None:
    def mlflow(**launch: object) -> Finding:
        return cluster_checks.servers(settings(**launch), tmp_path, {})[0]

    assert mlflow().ok
    assert not mlflow(launcher="slurm").ok
    assert "MLFLOW_TRACKING_URI" in mlflow(launcher="slurm").remedy


@pytest.mark.slow
def test_a_server_that_does_not_answer_is_a_finding(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    finding, prefect = doctor.look(lambda: cluster_checks.servers(settings(), tmp_path))
    assert (finding.ok, "127.0.0.1:9" in finding.what) == (False, True)
    assert prefect.ok
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:9")
    (ray,) = cluster_checks.launcher(settings(launcher="ray"))
    assert (ray.ok, "nobody answers there" in ray.what) == (False, True)
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    (ray,) = cluster_checks.launcher(settings(launcher="ray"))
    assert not ray.ok


def cache_of(tmp_path: Path, *config: tuple[str, str]) -> Path:
    """Return a workspace whose cache is tmp_path/cache."""
    root = tmp_path / "checkout"
    root.mkdir()
    for words in (
        ("init", "--no-scm"),
        ("cache", "dir", str(tmp_path / "cache")),
        *(("config", *one) for one in config),
    ):
        subprocess.run([sys.executable, "-m", "dvc", *words, "-q"], cwd=root, check=True)
    return root


@pytest.mark.slow
def test_a_shared_cache_is_one_that_the_group_can_write(tmp_path: Path) -> None:
    root = cache_of(tmp_path)
    (missing,) = cluster_checks.dvc_cache(root, LOCAL)
    assert (missing.ok, "is not there" in missing.what) == (False, True)
    (tmp_path / "cache").mkdir(mode=0o755)
    closed, _ = cluster_checks.dvc_cache(root, LOCAL)
    assert not closed.ok
    (tmp_path / "cache").chmod(stat.S_ISGID | 0o775)
    assert not cluster_checks.dvc_cache(root, LOCAL)[0].ok  # DVC makes its own folders 0755
    subprocess.run([sys.executable, "-m", "dvc", "config", "cache.shared", "group"], cwd=root, check=True)
    assert [finding.ok for finding in cluster_checks.dvc_cache(root, LOCAL)] == [True, True]
    mounts = [*LOCAL, (str(tmp_path), "nfs4")]
    assert [finding.ok for finding in cluster_checks.dvc_cache(root, mounts)] == [True, False, True]


def test_a_network_that_is_not_there_is_named() -> None:
    assert cluster_checks.network({}).ok
    assert cluster_checks.network({"NCCL_SOCKET_IFNAME": "lo"}).ok
    assert cluster_checks.network({"NCCL_SOCKET_IFNAME": "^docker"}).ok
    wrong = cluster_checks.network({"NCCL_SOCKET_IFNAME": "ib7"})
    assert (wrong.ok, "NCCL_SOCKET_IFNAME=ib7" in wrong.what) == (False, True)


def test_without_a_kubernetes_the_doctor_says_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    (finding,) = cluster_checks.launcher(settings(launcher="kubernetes"))
    assert not finding.ok
    assert re.search("launch.launcher is kubernetes, (whose client|and no cluster)", finding.what)


def test_without_slurm_on_this_machine_the_login_node_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (finding,) = cluster_checks.launcher(settings(launcher="slurm"))
    assert (finding.ok, "scontrol" in finding.what) == (False, True)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm_cluster.cluster(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


@pytest.mark.slow
@pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "a Slurm is there")
def test_a_real_slurm_is_asked_what_it_has(cluster: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cluster.items():
        monkeypatch.setenv(name, value)
    sft, base, patience = cluster_checks.launcher(
        settings(launcher="slurm", resources={"sft": {"nodes": 3}, "base": {"nodes": 1}})
    )
    assert (sft.ok, base.ok) == (False, True)
    assert "sft: 3 x 0 GPUs in partition gpu, which has 2 nodes" in sft.what
    assert (patience.ok, f"state may take {stop.LONGEST_S} s" in patience.what) == (False, True)  # 30 s
    gpus, *_ = cluster_checks.launcher(settings(launcher="slurm", resources={"sft": {"nodes": 1, "gpus": 8}}))
    assert (gpus.ok, "0 nodes with as many (2 that work)" in gpus.what) == (False, True)
    cores, *_ = cluster_checks.launcher(settings(launcher="slurm", resources={"prepare": {"cpus": 999}}))
    assert (cores.ok, "prepare: 1 x 0 GPUs and 999 cores in partition gpu" in cores.what) == (False, True)
