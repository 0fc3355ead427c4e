"""How a stage's processes start: a stage and `launch` in, the exact command out; and jobs of Slurm or Ray run to their end."""

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
from collections.abc import Mapping
from pathlib import Path

from ans_core.config import Config, ConfigError, Launch
from ans_core.processes import shared_words
from tasks.process import leave_note
from tasks.stages import Stage

IN_JOB = "ANS_JOB"
"""Set in a job of Slurm or Ray: the stage in there starts its processes itself."""
PASSED = ("ANS_PIPELINE", "ANS_PIPELINE_PID", "ANS_STORE_AWAY", "MLFLOW_TRACKING_URI", "OMP_NUM_THREADS", "HF_HOME", "HF_HUB_OFFLINE")
"""What a Ray job gets of the environment; its dashboard shows them, so no keys."""
LOCAL_ONLY = ("ANS_NOTE", "ANS_PARENT_PID", "ANS_TRACKER")
"""Variables about this machine's files and processes."""
NODES = (
    'export PET_NNODES=$SLURM_NNODES PET_MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) PET_MASTER_PORT=29500;'
    " exec srun --ntasks-per-node=1 --kill-on-bad-exit=1 sh -c "
)


def check_sharding(stage: Stage, config: Config) -> None:
    """Raise ConfigError for a stage that can't train with its weights divided among the processes (ZeRO-3)."""
    if config.launch.deepspeed_stage != 3 or stage.task not in {"rl", "memory"} or (stage.task == "memory" and not config.memory.train):
        return
    reason = {
        "rl": "its processes generate answers of unlike lengths, and every layer of every word would wait for all of them",
        "memory": "it trains and saves SAM2 whole, which is small",
    }[stage.task]
    raise ConfigError(
        f"launch.deepspeed_stage is 3, which divides the weights, and the stage {stage.task} needs them whole: {reason}."
        " Train sft alone with it (`dvc repro sft`), and set 2 (or 0) for the others"
    )


def check_shares(stage: Stage, config: Config) -> None:
    """Raise ValueError for a stage of the agent whose step has not a row for each micro-batch of each process. (Not among the checks of all
    settings: whoever trains no agent need not care.)"""
    if stage.task == "agent_sft":
        config.agent.sft.check_shares(processes=config.launch.processes)
    if stage.task == "rft":
        config.agent.rft.check_shares(processes=config.launch.processes)


def stage_words(stage: Stage) -> list[str]:
    return ["-m", f"tasks.{stage.task}", *([stage.row] if stage.row else [])]


def ranks_command(stage: Stage, launch: Launch, environment: Mapping[str, str], *, port: int) -> list[str] | None:
    """Return the command that starts the stage once per process; None if this process is the only one. DeepSpeed wants a launcher of one
    process, too: without its variables it looks for MPI. Raises ConfigError for settings that can't be started."""
    if stage.one_node:
        return [sys.executable, *words, *stage_words(stage)] if (words := one_node_words(launch, environment)) else None
    if not stage.distributed or (launch.processes == 1 and launch.deepspeed_stage == 0):
        return None
    if launch.launcher != "deepspeed" or IN_JOB in environment:
        options = torchrun_options(launch.processes, environment)
        return [sys.executable, "-m", "torch.distributed.run", *options, *stage_words(stage)]
    if launch.hostfile:
        started = ["--module", *stage_words(stage)[1:]]
        return [sys.executable, "-m", "deepspeed.launcher.runner", f"--hostfile={launch.hostfile}", "--no_local_rank", *started]
    slots = base64.urlsafe_b64encode(json.dumps({"localhost": list(range(launch.processes))}).encode()).decode()
    place = [f"--world_info={slots}", "--node_rank=0", "--master_addr=127.0.0.1", f"--master_port={port}", "--no_local_rank"]
    return [sys.executable, "-m", "deepspeed.launcher.launch", *place, "--module", *stage_words(stage)[1:]]


def one_node_words(launch: Launch, environment: Mapping[str, str]) -> list[str]:
    """Return what comes between Python and a module that this node's processes share; nothing for one process."""
    here = inference_processes_here(launch, environment)
    return shared_words(here) if here > 1 else []


def processes_here(launch: Launch, environment: Mapping[str, str]) -> int:
    """Return how many of the processes are this node's. How many of a hostfile's, or of a job that is yet to be submitted, is not known:
    one."""
    nodes = int(environment.get("PET_NNODES") or environment.get("SLURM_NNODES", "1"))
    return 1 if launch.hostfile or _awaits_job(launch, environment) else launch.processes // nodes


def inference_processes_here(launch: Launch, environment: Mapping[str, str]) -> int:
    """Return how many processes of this node share a stage that trains nothing; of a job that is yet to be submitted, one."""
    if launch.inference_processes and not _awaits_job(launch, environment):
        return launch.inference_processes
    return processes_here(launch, environment)


def _awaits_job(launch: Launch, environment: Mapping[str, str]) -> bool:
    return launch.launcher in {"slurm", "ray"} and IN_JOB not in environment


def torchrun_options(processes: int, environment: Mapping[str, str]) -> list[str]:
    """Return torchrun's options for this node. torchrun's own variables PET_NNODES, PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT say
    that there are several; `processes` counts those of all. Raises ConfigError if they can't be divided."""
    nodes = int(environment.get("PET_NNODES", "1"))
    if processes % nodes:
        raise ConfigError(f"launch.processes is {processes}, on PET_NNODES={nodes} nodes: give a multiple of the nodes")
    return [*(["--standalone"] if nodes == 1 else []), f"--nproc-per-node={processes // nodes}"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def is_job(stage: Stage, launch: Launch, environment: Mapping[str, str]) -> bool:
    """Tell whether the stage is to be submitted: those that want no GPU stay here."""
    return _awaits_job(launch, environment) and stage.gpu


def job_command(stage: Stage, launch: Launch, environment: Mapping[str, str], root: Path, *, name: str) -> list[str]:
    """Return the command that submits the stage, waits for its end and has its exit status. `root` is a folder that all nodes share."""
    words = shlex.join([sys.executable, *stage_words(stage)])
    if launch.launcher == "ray":
        there = [f"--address={launch.ray_address}"] if launch.ray_address else []
        variables = {key: environment[key] for key in PASSED if key in environment} | {IN_JOB: "1"}
        wanted = launch.processes if stage.distributed or stage.one_node else 1
        if stage.one_node:
            wanted = launch.inference_processes or wanted
        gpus = [f"--entrypoint-num-gpus={wanted}"] if launch.device == "cuda" else []
        told = [f"--submission-id={name}", f"--runtime-env-json={json.dumps({'env_vars': variables})}", *gpus]
        return ["ray", "job", "submit", *there, *told, "--", "sh", "-c", f"cd {shlex.quote(str(root))} && exec {words}"]
    script = NODES + shlex.quote(f"PET_NODE_RANK=$SLURM_NODEID exec {words}") if stage.distributed else f"exec {words}"
    about = ["--parsable", f"--job-name={name}", f"--chdir={root}", f"--output={log_file(root, name)}", f"--export=ALL,{IN_JOB}=1"]
    return ["sbatch", "--wait", *about, *launch.slurm, f"--wrap={script}"]


def log_file(root: Path, name: str) -> Path:
    """Return where a Slurm job writes. Ray's is shown as it grows."""
    return root / ".ans/logs" / f"{name}.log"


def run_job(stage: Stage, launch: Launch, root: Path) -> int:
    """Submit the stage and return the job's exit status. A TERM to this process cancels the job."""
    name = f"ans-{stage.name.replace('@', '-')}-{uuid.uuid4().hex[:8]}"
    log = log_file(root.resolve(), name)
    log.parent.mkdir(parents=True, exist_ok=True)
    log.touch()
    leave_note(log=str(log))
    environment = {key: value for key, value in os.environ.items() if key not in LOCAL_ONLY}
    command = job_command(stage, launch, environment, root.resolve(), name=name)
    print(f"{stage.name}: {shlex.join(command)}", file=sys.stderr, flush=True)
    try:
        process = subprocess.Popen(command, env=environment)
    except FileNotFoundError:
        raise ConfigError(f"launch.launcher is {launch.launcher}, and there is no `{command[0]}` on this machine's PATH") from None
    try:
        return process.wait()
    except SystemExit:
        there = [f"--address={launch.ray_address}"] if launch.ray_address else []
        cancel = ["ray", "job", "stop", *there, name] if launch.launcher == "ray" else ["scancel", f"--name={name}"]
        subprocess.run(cancel, env=environment, check=False)
        process.send_signal(signal.SIGTERM)
        raise
