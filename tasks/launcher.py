"""How a stage's processes start: a stage and `launch` in, the exact command out; and jobs of Slurm or Ray run
to their end."""

from __future__ import annotations

import base64
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path

from ans_core.config import Config, ConfigError, Launch
from ans_core.processes import shared_words
from tasks import slurm
from tasks.process import leave_note
from tasks.slurm import IN_JOB, LOCAL_ONLY
from tasks.stages import Stage

PASSED = (
    "ANS_PIPELINE",
    "ANS_PIPELINE_PID",
    "ANS_STORE_AWAY",
    "MLFLOW_TRACKING_URI",
    "OMP_NUM_THREADS",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)
"""What a Ray job gets of the environment; its dashboard shows them, so no keys."""


def check_sharding(stage: Stage, config: Config) -> None:
    """Raise ConfigError for a stage that can't train with its weights divided among the processes
    (ZeRO-3)."""
    if (
        config.launch.deepspeed_stage != 3
        or stage.task not in {"rl", "memory"}
        or (stage.task == "memory" and not config.memory.train)
    ):
        return
    reason = {
        "rl": (
            "its processes generate answers of unlike lengths, and every layer of every word would wait for "
            "all of them"
        ),
        "memory": "it trains and saves SAM2 whole, which is small",
    }[stage.task]
    raise ConfigError(
        f"launch.deepspeed_stage is 3, which divides the weights, and the stage {stage.task} needs them "
        f"whole: {reason}. Train sft alone with it (`dvc repro sft`), and set 2 (or 0) for the others"
    )


def check_shares(stage: Stage, config: Config) -> None:
    """Raise ValueError for a stage of the agent whose step has not a row for each micro-batch of each
    process. (Not among the checks of all settings: whoever trains no agent need not care.)"""
    if stage.task == "agent_sft":
        config.agent.sft.check_shares(processes=config.launch.of("agent_sft").processes)
    if stage.task == "rft":
        config.agent.rft.check_shares(processes=config.launch.of("rft").processes)


def stage_words(stage: Stage) -> list[str]:
    return ["-m", f"tasks.{stage.task}", *([stage.row] if stage.row else [])]


def ranks_command(
    stage: Stage, launch: Launch, environment: Mapping[str, str], *, port: int
) -> list[str] | None:
    """Return the command that starts the stage once per process; None if this process is the only one.
    DeepSpeed wants a launcher of one process, too: without its variables it looks for MPI. Raises ConfigError
    for settings that can't be started."""
    if stage.one_node:
        return (
            [sys.executable, *words, *stage_words(stage)]
            if (words := one_node_words(launch, environment))
            else None
        )
    if not stage.distributed or (launch.processes == 1 and launch.deepspeed_stage == 0):
        return None
    if launch.launcher != "deepspeed" or IN_JOB in environment:
        options = torchrun_options(launch.processes, environment)
        return [sys.executable, "-m", "torch.distributed.run", *options, *stage_words(stage)]
    if launch.hostfile:
        started = ["--module", *stage_words(stage)[1:]]
        return [
            sys.executable,
            "-m",
            "deepspeed.launcher.runner",
            f"--hostfile={launch.hostfile}",
            "--no_local_rank",
            *started,
        ]
    slots = base64.urlsafe_b64encode(
        json.dumps({"localhost": list(range(launch.processes))}).encode()
    ).decode()
    place = [
        f"--world_info={slots}",
        "--node_rank=0",
        "--master_addr=127.0.0.1",
        f"--master_port={port}",
        "--no_local_rank",
    ]
    return [sys.executable, "-m", "deepspeed.launcher.launch", *place, "--module", *stage_words(stage)[1:]]


def one_node_words(launch: Launch, environment: Mapping[str, str]) -> list[str]:
    """Return what comes between Python and a module that this node's processes share; nothing for one
    process."""
    here = inference_processes_here(launch, environment)
    return shared_words(here) if here > 1 else []


def processes_here(launch: Launch, environment: Mapping[str, str]) -> int:
    """Return how many of the processes are this node's. How many of a hostfile's, or of a job that is yet to
    be submitted, is not known: one."""
    nodes = int(environment.get("PET_NNODES") or environment.get("SLURM_NNODES", "1"))
    return 1 if launch.hostfile or _awaits_job(launch, environment) else launch.processes // nodes


def inference_processes_here(launch: Launch, environment: Mapping[str, str]) -> int:
    """Return how many processes of this node share a stage that trains nothing; of a job that is yet to be
    submitted, one."""
    if launch.inference_processes and not _awaits_job(launch, environment):
        return launch.inference_processes
    return processes_here(launch, environment)


def _awaits_job(launch: Launch, environment: Mapping[str, str]) -> bool:
    return launch.launcher in {"slurm", "ray"} and IN_JOB not in environment


def torchrun_options(processes: int, environment: Mapping[str, str]) -> list[str]:
    """Return torchrun's options for this node. torchrun's own variables PET_NNODES, PET_NODE_RANK,
    PET_MASTER_ADDR and PET_MASTER_PORT say that there are several; `processes` counts those of all. Raises
    ConfigError if they can't be divided."""
    nodes = int(environment.get("PET_NNODES", "1"))
    if processes % nodes:
        raise ConfigError(
            f"launch.processes is {processes}, on PET_NNODES={nodes} nodes: give a multiple of the nodes"
        )
    return [*(["--standalone"] if nodes == 1 else []), f"--nproc-per-node={processes // nodes}"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_job(stage: Stage, launch: Launch, environment: Mapping[str, str]) -> bool:
    """Tell whether the stage is to be submitted: those that want no GPU stay here."""
    return _awaits_job(launch, environment) and stage.gpu


def run_job(stage: Stage, launch: Launch, root: Path, *, key: str) -> int:
    """Submit the stage and return the job's exit status. A TERM to this process cancels the job. key: of the
    states that it resumes."""
    name = f"ans-{stage.name.replace('@', '-')}-{key}"
    if launch.launcher == "ray":
        return _ray_job(stage, launch, root.resolve(), name=f"{name}-{uuid.uuid4().hex[:8]}")
    wanted = slurm.options(launch, stage.task, several=stage.distributed)
    return slurm.run(
        slurm.Job(name=name, words=tuple(stage_words(stage)), options=wanted, root=root.resolve())
    )


def is_submitted(launch: Launch, environment: Mapping[str, str]) -> bool:
    """Tell whether an evaluation outside of the pipeline is to be a job of Slurm."""
    return launch.launcher == "slurm" and IN_JOB not in environment


def submit_words(name: str, task: str, words: Sequence[str]) -> list[str]:
    """Return what follows Python to run a module's words as a job with the resources of a stage."""
    return ["-m", "tasks.slurm", name, task, *words]


def ray_command(
    stage: Stage, launch: Launch, environment: Mapping[str, str], root: Path, *, name: str
) -> list[str]:
    """Return the command that submits the stage to Ray, waits for its end and has its exit status. `root` is
    a folder that all nodes share."""
    words = shlex.join([sys.executable, *stage_words(stage)])
    there = [f"--address={launch.ray_address}"] if launch.ray_address else []
    variables = {key: environment[key] for key in PASSED if key in environment} | {IN_JOB: "1"}
    wanted = launch.processes if stage.distributed or stage.one_node else 1
    if stage.one_node:
        wanted = launch.inference_processes or wanted
    gpus = [f"--entrypoint-num-gpus={wanted}"] if launch.device == "cuda" else []
    options = [f"--submission-id={name}", f"--runtime-env-json={json.dumps({'env_vars': variables})}", *gpus]
    return [
        "ray",
        "job",
        "submit",
        *there,
        *options,
        "--",
        "sh",
        "-c",
        f"cd {shlex.quote(str(root))} && exec {words}",
    ]


def _ray_job(stage: Stage, launch: Launch, root: Path, *, name: str) -> int:
    log = root / ".ans/logs" / f"{name}.log"  # stays empty: Ray shows the job's output as it grows
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    leave_note(log=str(log))
    environment = {key: value for key, value in os.environ.items() if key not in LOCAL_ONLY}
    command = ray_command(stage, launch, environment, root, name=name)
    print(f"{stage.name}: {shlex.join(command)}", file=sys.stderr, flush=True)
    try:
        process = subprocess.Popen(command, env=environment)
    except FileNotFoundError:
        raise ConfigError(
            f"launch.launcher is ray, and there is no `{command[0]}` on this machine's PATH"
        ) from None
    try:
        return process.wait()
    except SystemExit:
        there = [f"--address={launch.ray_address}"] if launch.ray_address else []
        subprocess.run(["ray", "job", "stop", *there, name], env=environment, check=False)
        process.send_signal(signal.SIGTERM)
        raise
