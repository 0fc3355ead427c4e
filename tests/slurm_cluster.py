"""A real Slurm of two nodes on this machine, from Debian's packages, which are unpacked and not installed.

python -m tests.slurm_cluster      # fetches them (4 MB) into ~/.cache/ans-slurm, or the folder that ANS_SLURM names
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from tests.ports import free_ports
from tests.workspace import words_of

ROOT = Path(os.environ.get("ANS_SLURM", "~/.cache/ans-slurm")).expanduser()
PACKAGES = (
    "slurm-client",
    "slurmctld",
    "slurmd",
    "slurm-wlm-basic-plugins",
    "libmunge2",
    "libhwloc15",
    "libjwt0",
    "liblua5.1-0",
)
PROGRAMS = ("sbin/slurmctld", "sbin/slurmd", "sbin/slurmstepd")
NODES = ("n1", "n2")
# AuthInfo: a job that is queued again waits for as long as a credential lives, by default two minutes.
CONF = """
ClusterName=lab
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/none
AuthInfo=cred_expire=5
CredType=cred/none
SlurmctldPort={ports[0]}
SlurmctldPidFile={home}/slurmctld.pid
SlurmdPidFile={home}/slurmd-%n.pid
SlurmdParameters=config_overrides
PluginDir={plugins}
StateSaveLocation={home}/state
SlurmdSpoolDir={home}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
KillWait=30
SlurmdTimeout=20
NodeName=n1 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[1]} CPUs=8 RealMemory=2000
NodeName=n2 NodeHostname=localhost NodeAddr=127.0.0.1 Port={ports[2]} CPUs=8 RealMemory=2000
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=gpu Nodes=n1,n2 Default=YES PriorityTier=1 GraceTime=60 MaxTime=60
PartitionName=urgent Nodes=n1,n2 PriorityTier=10 PreemptMode=OFF
"""
SCONTROL = """#!/bin/sh
if [ "$1 $2" = "show hostnames" ]; then echo localhost; else exec {program} "$@"; fi
"""
"""Both nodes are this machine, which no name service calls n1."""


def missing() -> str:
    """Return why no Slurm can be started here; nothing if one can."""
    if os.getuid():
        return "Slurm's daemons want to be root"
    return (
        ""
        if (ROOT / "usr/sbin/slurmctld").exists()
        else f"no Slurm in {ROOT}: `python -m tests.slurm_cluster` fetches one (Debian)"
    )


def fetch(root: Path = ROOT) -> None:
    """Fetch and unpack the packages."""
    root.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["apt-get", "download", "-q", *PACKAGES], cwd=folder, check=True)
        for package in Path(folder).glob("*.deb"):
            subprocess.run(["dpkg", "-x", str(package), str(root)], check=True)
    for program in PROGRAMS:
        (root / "usr" / program).unlink(missing_ok=True)
        (root / "usr" / program).symlink_to(f"{Path(program).name}-wlm")


@contextmanager
def cluster(home: Path) -> Iterator[dict[str, str]]:
    """Start the controller and two nodes; yield the variables by which Slurm's commands find them. Ends them,
    and what they started."""
    libraries = ROOT / "usr/lib/x86_64-linux-gnu"
    (home / "state").mkdir(parents=True)
    (home / "bin").mkdir()
    conf = home / "slurm.conf"
    conf.write_text(CONF.format(ports=free_ports(3), home=home, plugins=libraries / "slurm-wlm").lstrip())
    (home / "bin/scontrol").write_text(SCONTROL.format(program=ROOT / "usr/bin/scontrol"))
    (home / "bin/scontrol").chmod(0o755)
    variables = {
        "SLURM_CONF": str(conf),
        "LD_LIBRARY_PATH": f"{libraries}:{libraries / 'slurm-wlm'}",
        "PATH": f"{home / 'bin'}:{ROOT / 'usr/bin'}:{ROOT / 'usr/sbin'}:{os.environ['PATH']}",
    }
    try:
        start(variables, "slurmctld", "-c")
        for node in NODES:
            start_node(variables, node)
        wait_for_nodes(home, variables)
        yield variables
    finally:
        slurm(variables, "scancel", "--user=root", "--full", "--signal=KILL", status=None)
        slurm(variables, "scancel", "--user=root", status=None)
        time.sleep(1)
        for program in ("slurmd", "slurmctld"):
            daemons = processes(variables, program)
            for daemon in daemons:
                daemon.terminate()
            psutil.wait_procs(daemons, 30)


def start(variables: dict[str, str], program: str, *options: str) -> None:
    path = Path(variables["SLURM_CONF"]).with_name(f"daemon-{program}{options[1:2]}.log")
    words = [ROOT / "usr/sbin" / program, "-D", *options]
    with path.open("ab") as log:
        subprocess.Popen(words, env={**os.environ, **variables}, stdout=log, stderr=log)


def start_node(variables: dict[str, str], node: str) -> None:
    start(variables, "slurmd", "-N", node, "-d", str(ROOT / "usr/sbin/slurmstepd"))


def processes(variables: dict[str, str], name: str = "", node: str | None = None) -> list[psutil.Process]:
    """Return the processes of this name that belong to this cluster, and to a node's jobs."""
    place = {"SLURM_CONF": variables["SLURM_CONF"]} | ({"SLURMD_NODENAME": node} if node else {})
    return [
        process
        for process in psutil.process_iter(["name", "environ"])
        if name in ("", process.info["name"]) and place.items() <= (process.info["environ"] or {}).items()
    ]


def processes_on(variables: dict[str, str], node: str) -> list[psutil.Process]:
    """Return a node's daemon and, after it, all that it runs."""
    parts = [process for process in processes(variables, "slurmd") if node in words_of(process)]
    for process in processes(variables, node=node):
        parent = process.parent()
        parts += [parent, process] if parent and parent.name() == "slurmstepd" else [process]
    return parts


def wait_for_nodes(home: Path, variables: dict[str, str]) -> None:
    deadline_s = time.monotonic() + 60
    while {*slurm(variables, "sinfo", "--noheader", "--Node", "--format=%T", status=None).split()} != {
        "idle"
    }:
        logs = "".join(path.read_text()[-2000:] for path in home.glob("daemon*.log"))
        assert time.monotonic() < deadline_s, f"Slurm's nodes don't come up: {logs}"
        time.sleep(0.5)


def slurm(variables: dict[str, str], *words: str, status: int | None = 0) -> str:
    """Run one of Slurm's commands and return what it prints."""
    program = shutil.which(words[0], path=variables["PATH"])
    assert program is not None, words
    done = subprocess.run(
        [program, *words[1:]], env={**os.environ, **variables}, capture_output=True, text=True, check=False
    )
    assert status is None or done.returncode == status, done.stderr
    return done.stdout


if __name__ == "__main__":
    fetch()
    sys.exit(missing())
