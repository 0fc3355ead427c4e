"""How a stage's processes start: a stage and `launch` in, the exact command out; and jobs of a cluster
run to their end."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from ans_core import stop
from ans_core.config import Config, ConfigError, Launch, load
from ans_core.processes import shared_words
from tasks import jobs, kubernetes_jobs, ray_jobs, slurm
from tasks.jobs import IN_JOB, Cluster, Job
from tasks.process import die_with_parent, leave_note
from tasks.stages import Stage

CLUSTERS: dict[str, Cluster] = {"slurm": slurm, "ray": ray_jobs, "kubernetes": kubernetes_jobs}


def check_sharding(stage: Stage, config: Config) -> None:
    """Raise ConfigError for a stage that can't train with its weights divided among the processes
    (ZeRO-3)."""
    reasons = {
        "rl": (
            "its processes generate answers of unlike lengths, and every layer of every word would wait for "
            "all of them"
        )
    }
    if config.memory.train:
        reasons["memory"] = "it trains and saves SAM2 whole, which is small"
    if config.launch.deepspeed_stage == 3 and stage.task in reasons:
        raise ConfigError(
            f"launch.deepspeed_stage is 3, which divides the weights, and the stage {stage.task} needs them "
            f"whole: {reasons[stage.task]}. Train sft alone with it (`dvc repro sft`), and set 2 (or 0) for the others"
        )


def check_shares(stage: Stage, config: Config) -> None:
    """Raise ValueError for a stage of the agent whose step has not a row for each micro-batch of each
    process. (Not among the checks of all settings: whoever trains no agent need not care.)"""
    processes = config.launch.of(stage.task).processes
    if stage.task == "agent_sft":
        config.agent.sft.check_shares(processes=processes)
    if stage.task == "rft":
        config.agent.rft.check_shares(processes=processes)


def processes_of(stage: Stage, launch: Launch) -> int:
    """Return how many processes share a stage, on all nodes."""
    if stage.inference:
        return launch.inference_processes * launch.wanted(stage.task).nodes or launch.processes
    return launch.processes if stage.distributed else 1


def stage_words(stage: Stage) -> list[str]:
    return ["-m", "tasks", stage.name]


def ranks_command(stage: Stage, launch: Launch, environment: Mapping[str, str]) -> list[str] | None:
    """Return the command that starts the stage once per process; None if this process is the only one.
    DeepSpeed wants a launcher of one process, too: without its variables it looks for MPI. Raises ConfigError
    for settings that can't be started."""
    if stage.inference:
        nodes = launch.wanted(stage.task).nodes if IN_JOB in environment else 1
        if nodes > 1:
            processes = inference_processes_here(launch, environment) * nodes
            words = ["-m", "torch.distributed.run", *torchrun_options(processes, environment)]
        else:
            words = one_node_words(launch, environment)
        return [sys.executable, *words, *stage_words(stage)] if words else None
    if not stage.distributed or (launch.processes == 1 and launch.deepspeed_stage == 0):
        return None
    options = torchrun_options(launch.processes, environment)
    return [sys.executable, "-m", "torch.distributed.run", *options, *stage_words(stage)]


def one_node_words(launch: Launch, environment: Mapping[str, str]) -> list[str]:
    """Return what comes between Python and a module that this node's processes share; nothing for one
    process."""
    here = inference_processes_here(launch, environment)
    return shared_words(here) if here > 1 else []


def processes_here(launch: Launch, environment: Mapping[str, str]) -> int:
    """Return how many of the processes are this node's. How many of a job that is yet to be submitted, is not
    known: one."""
    if "LOCAL_WORLD_SIZE" in environment:  # Ray started this process
        return int(environment["LOCAL_WORLD_SIZE"])
    nodes = int(environment.get("PET_NNODES") or environment.get("SLURM_NNODES", "1"))
    return 1 if awaits_job(launch, environment) else launch.processes // nodes


def inference_processes_here(launch: Launch, environment: Mapping[str, str]) -> int:
    """Return how many processes of this node share a stage that trains nothing; of a job that is yet to be
    submitted, one."""
    if launch.inference_processes and not awaits_job(launch, environment):
        return launch.inference_processes
    return processes_here(launch, environment)


def awaits_job(launch: Launch, environment: Mapping[str, str]) -> bool:
    """Tell whether what wants a GPU is to be submitted as a job."""
    return launch.launcher in CLUSTERS and IN_JOB not in environment


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


def is_job(stage: Stage, launch: Launch, environment: Mapping[str, str]) -> bool:
    """Tell whether the stage is to be submitted: those that want no GPU stay here, unless the settings name
    resources for them."""
    return awaits_job(launch, environment) and (stage.gpu or stage.task in launch.resources)


def run_job(stage: Stage, launch: Launch, root: Path, *, key: str) -> int:
    """Submit the stage and return the job's exit status. A TERM to this process cancels the job. launch: of
    the stage's task. key: of the states that it resumes."""
    job = Job(
        name=f"ans-{stage.name.replace('@', '-')}-{key}", task=stage.task, words=tuple(stage_words(stage)),
        launch=launch, processes=processes_of(stage, launch), distributed=stage.distributed,
        gpu=stage.gpu, root=root.resolve(),
    )  # fmt: skip
    return jobs.run(job, CLUSTERS[launch.launcher])


def submit_words(name: str, task: str, words: Sequence[str]) -> list[str]:
    """Return what follows Python to run a module's words as a job with the resources of a stage."""
    return ["-m", "tasks.launcher", name, task, *words]


def main(name: str, task: str, *words: str) -> int:
    """Run the words of one node's processes as a job."""
    die_with_parent()
    stop.exit_on_signals()
    root = Path.cwd()
    try:
        launch = load(root / "params.yaml").launch.of(task)
        if task in launch.resources:  # the words start the processes of one node
            one_node = {task: launch.wanted(task).model_copy(update={"nodes": 1})}
            launch = launch.model_copy(update={"resources": launch.resources | one_node})
        job = Job(
            name=name, task=task, words=words, launch=launch, root=root.resolve(), distributed=False,
            processes=launch.inference_processes or launch.processes,
        )  # fmt: skip
        return jobs.run(job, CLUSTERS[launch.launcher])
    except ConfigError as error:
        leave_note(status=jobs.USER_ERROR, message=str(error))
        print(f"{name}: {error}", file=sys.stderr)
        return jobs.USER_ERROR


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
