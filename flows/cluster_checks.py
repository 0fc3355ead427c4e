"""Check what a cluster and several people need (docs/cluster.md): launcher, file system, shared servers,
DVC's cache, network."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from ans_core import stop
from ans_core.config import Config, ConfigError
from flows.preflight import Finding, fault, fine
from tasks import kubernetes_jobs, ray_jobs, slurm
from tasks.launcher import CLUSTERS
from tasks.process import holder_of

SHARED = {"nfs4", "lustre", "gpfs", "wekafs", "beegfs", "ceph"}
BUCKETS = ("fuse.s3fs", "fuse.gcsfuse", "fuse.goofys", "fuse.mount-s3", "fuse.rclone", "fuse.geesefs")
Mounts = Sequence[tuple[str, str]]
"""(place, type) of file systems; None: those of this machine."""
DEAD = re.compile(r"down|drain|drng|fail|inval|unk|boot|.*\*$")
"""States of Slurm's nodes, as sinfo shortens them, that take no job; `*`: the node does not answer."""
CACHE_MODE = 0o2070
"""Of a shared cache's folders: the group writes, and new folders are the group's."""


def launcher(config: Config, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look at what submits stages, and whether its nodes have what `launch.resources` asks for."""
    name = config.launch.launcher
    if name == "ray":  # what its nodes have, a stage's job finds out before it waits
        try:
            ray_jobs.ask("", waits=False)
        except ConfigError as error:
            return [fault(str(error), "export RAY_ADDRESS=http://HEAD:8265, and RAY_AUTH_TOKEN")]
        return [fine(f"launcher ray: {environment.get('RAY_ADDRESS')} lists jobs")]
    if name == "kubernetes":
        try:
            kubernetes_jobs.ask("list", waits=False)
        except ConfigError as error:
            return [fault(str(error), "docs/cluster.md, Kubernetes")]
        return [fine("launcher kubernetes: the API server lists TrainJobs")]
    if name != "slurm":
        nodes = environment.get("PET_NNODES", "1")
        return [fine(f"launcher {name}: stages start on this machine (PET_NNODES={nodes})")]
    if (program := shutil.which("scontrol")) is None:
        return [
            fault(
                "launcher slurm, and there is no `scontrol` on PATH",
                "work on a login node, or `module load slurm`",
            )
        ]
    ping = subprocess.run([program, "ping"], capture_output=True, text=True, check=False)
    if ping.returncode:
        return [
            fault(
                f"Slurm's controller does not answer ({(ping.stdout + ping.stderr).strip()})",
                "`sinfo` and SLURM_CONF; stages wait until it answers",
            )
        ]
    return [*slurm_resources(config), slurm_patience()]


def slurm_resources(config: Config) -> list[Finding]:
    """Compare nodes, GPUs and cores of each stage's job with those of its partition that work."""
    listed = slurm.ask(["sinfo", "--noheader", "--Node", "--format=%R|%N|%G|%c|%t"])
    partitions: dict[str, dict[str, tuple[int, int]]] = {}
    for line in listed.splitlines():
        partition, node, resources, cores, state = line.strip().split("|")
        if DEAD.match(state):
            continue
        gpus = sum(int(count) for count in re.findall(r"gpu(?::[^:,()]+)?:(\d+)", resources))
        partitions.setdefault(partition, {})[node] = gpus, int(cores.rstrip("+"))
    default = slurm.ask(["sinfo", "--noheader", "--format=%P"]).split()
    first = next((name[:-1] for name in default if name.endswith("*")), "")
    findings = []
    for task, wanted in config.launch.resources.items():
        partition = _partition((*config.launch.slurm, *wanted.options)) or first
        nodes = partitions.get(partition, {})
        able = [node for node, (gpus, cores) in nodes.items() if gpus >= wanted.gpus and cores >= wanted.cpus]
        of_node = f"{wanted.gpus} GPUs" + (f" and {wanted.cpus} cores" if wanted.cpus else "")
        request = f"{task}: {wanted.nodes} x {of_node} in partition {partition or '?'}"
        findings.append(
            Finding(
                ok=len(able) >= wanted.nodes,
                what=f"{request}, which has {len(able)} nodes with as many ({len(nodes)} that work)",
                remedy=f"launch.resources.{task} or --partition in launch.slurm; partitions: {', '.join(partitions)}",
            )
        )
    return findings or [
        fine(f"Slurm answers; partitions: {', '.join(partitions)} (launch.resources is empty)")
    ]


def _partition(options: tuple[str, ...]) -> str:
    """Return the partition that sbatch's options name; of several Slurm takes the last."""
    named = re.findall(r"(?:--partition[= ]|-p ?)(\S+)", " ".join(options))
    return named[-1] if named else ""


def slurm_patience() -> Finding:
    """Compare the time that Slurm gives a job after TERM with what a step and its state may take."""
    found = re.search(r"^KillWait\s*=\s*(\d+)", slurm.ask(["scontrol", "show", "config"]), flags=re.MULTILINE)
    seconds = int(found[1]) if found else 0
    return Finding(
        ok=seconds >= stop.LONGEST_S,
        what=f"Slurm kills {seconds} s after TERM (KillWait); a step and its state may take {stop.LONGEST_S} s",
        remedy=f"KillWait={stop.LONGEST_S} in slurm.conf, and GraceTime where jobs are preempted; else up to "
        "save_every steps are lost",
    )


def file_system(config: Config, root: Path, mounts: Mounts | None = None) -> list[Finding]:
    """Try what the checkout's folder has to do, and name its file system."""
    kind = kind_of(root, mounts)
    if kind in BUCKETS:
        return [
            fault(
                f"{root} is a bucket mounted as a folder ({kind})",
                "keep the checkout, `runs`, `.ans` and DVC's cache on a file system with rename, fsync and flock",
            )
        ]
    several = config.launch.launcher in CLUSTERS
    alone = several and kind not in SHARED
    findings = [
        fine(
            f"{root} is on {kind}"
            + ("; every node must see it under this path, by NFS for instance" if alone else "")
        )
    ]
    lacking = broken_operations(root / ".ans")
    findings.append(
        Finding(
            ok=not lacking,
            what=f"{kind} lacks {', '.join(lacking)}" if lacking else "rename, fsync and locks work there",
            remedy="NFS from version 4, Lustre with `-o flock`, or a local disk",
        )
    )
    return findings


def kind_of(folder: Path, mounts: Mounts | None = None) -> str:
    """Return the type of the file system that a folder is on."""
    if mounts is None:
        mounts = [(one.mountpoint, one.fstype) for one in psutil.disk_partitions(all=True)]
    resolved = folder.resolve()
    holding = [(len(place), kind) for place, kind in mounts if resolved.is_relative_to(place)]
    return max(holding)[1] if holding else "unknown"


def broken_operations(folder: Path) -> list[str]:
    """Return which of rename over a file, fsync and flock between processes don't work in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    old, new = folder / f".check-{os.getpid()}", folder / f".check-{os.getpid()}.new"
    lacking = []
    try:
        for path in (old, new):
            with path.open("w") as file:
                file.write(path.name)
                try:
                    os.fsync(file.fileno())
                except OSError:
                    lacking.append("fsync")
        try:
            new.replace(old)
            renamed = old.read_text(encoding="utf-8") == new.name
        except OSError:
            renamed = False
        if not renamed:
            lacking.append("rename")
        with old.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                with multiprocessing.get_context("spawn").Pool(1) as pool:
                    excluded = bool(pool.apply(holder_of, (old,)))
            except OSError:
                excluded = False
        if not excluded:
            lacking.append("flock")
    finally:
        for path in (old, new):
            path.unlink(missing_ok=True)
    return list(dict.fromkeys(lacking))


def servers(config: Config, root: Path, environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """Look for the shared servers of MLflow and Prefect, and ask each."""
    findings = []
    for look in (lambda: _mlflow(config, root, environment), lambda: _prefect(environment)):
        try:
            findings.append(look())
        except (ValueError, OSError) as error:  # TrackingError, and what check_server raises
            findings.append(fault(str(error), "docs/cluster.md, Several people"))
    return findings


def _mlflow(config: Config, root: Path, environment: Mapping[str, str]) -> Finding:
    from tasks.tracking import client, experiment_id, without_password

    if uri := environment.get("MLFLOW_TRACKING_URI"):
        experiment_id(client(root), root)  # raises TrackingError, which says what to do
        return fine(f"MLflow answers at {without_password(uri)}")
    return Finding(
        ok=config.launch.launcher not in CLUSTERS,
        what="runs are logged to this checkout's .ans/mlflow.db (SQLite)",
        remedy="jobs on other nodes would write SQLite over the network: start one MLflow server and set "
        "MLFLOW_TRACKING_URI",
    )


def _prefect(environment: Mapping[str, str]) -> Finding:
    if url := environment.get("PREFECT_API_URL"):
        from flows.launch import check_server

        check_server(f"PREFECT_API_URL names {url}", "start it, or unset PREFECT_API_URL")
        return fine(f"Prefect answers at {url}")
    return fine("Prefect: a server of this checkout alone; PREFECT_API_URL names a shared one")


def dvc_cache(root: Path, mounts: Mounts | None = None) -> list[Finding]:
    """Look at a cache that several people share: settings, the folder's mode, links."""
    from dvc.config import Config as DvcConfig

    settings = DvcConfig(str(root / ".dvc"))
    named = settings["cache"].get("dir")
    if not named:
        return [fine("DVC's cache is this checkout's own; `dvc cache dir FOLDER` shares one")]
    folder, findings = (root / ".dvc" / named).resolve(), []
    if not os.access(folder, os.W_OK):
        return [
            fault(
                f"DVC's cache {folder} is not there, or this user can't write in it",
                f"install -d -m 2775 -g GROUP {folder}",
            )
        ]
    mode = folder.stat().st_mode
    grouped = settings["cache"].get("shared") == "group"
    findings.append(
        Finding(
            ok=grouped and mode & CACHE_MODE == CACHE_MODE,
            what=f"DVC's cache {folder}: mode {mode & 0o7777:o}, cache.shared {'group' if grouped else 'not set'}",
            remedy=f"chgrp -R GROUP {folder}; chmod -R g+rwX {folder}; find {folder} -type d -exec chmod g+s {{}} +; "
            "dvc config cache.shared group",
        )
    )
    kind = kind_of(folder, mounts)
    if kind.startswith("nfs"):
        findings.append(
            Finding(
                ok=bool(settings["core"].get("hardlink_lock")),
                what=f"DVC's cache is on {kind}, core.hardlink_lock {settings['core'].get('hardlink_lock')}",
                remedy="dvc config core.hardlink_lock true",
            )
        )
    other_disk = folder.stat().st_dev != root.stat().st_dev
    types = settings["cache"].get("type") or ["reflink", "copy"]
    findings.append(
        Finding(
            ok=not other_disk or "symlink" in types,
            what=f"outputs reach the checkout by {', '.join(types)}"
            + ("; the cache is on another disk, so all of them are copies" if other_disk else ""),
            remedy='dvc config cache.type "reflink,hardlink,symlink,copy"',
        )
    )
    return findings


def network(environment: Mapping[str, str] = os.environ) -> Finding:
    """Compare the interfaces that NCCL and gloo are told to use with those of this machine."""
    there = psutil.net_if_addrs()
    named = {name: environment.get(name, "") for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")}
    wrong = {
        name: value
        for name, value in named.items()
        if value
        and not value.startswith(("^", "="))
        and not any(one.startswith(prefix) for prefix in value.split(",") for one in there)
    }
    if wrong:
        return fault(
            "; ".join(f"{name}={value}: no such network here" for name, value in wrong.items()),
            f"this machine has {', '.join(there)}; nodes may differ",
        )
    chosen = ", ".join(f"{name}={value}" for name, value in named.items() if value)
    return fine(f"network of the processes: {chosen or 'chosen by NCCL and gloo'}")
