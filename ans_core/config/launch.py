"""Settings of where training stages run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ans_core.config.names import GPU_STAGES, SEVERAL_NODES, JobStage
from ans_core.config.section import Count, Impossible, Listed, Positive, Section


class Resources(Section):
    """What the job of one stage asks the cluster for."""

    nodes: Positive = 1
    gpus: Count = 0
    """Of each node. Not 0: a training stage has nodes x gpus processes, whatever launch.processes says; an
    evaluation one on each GPU."""
    cpus: Count = 0
    """Cores of each node, which the job's processes there share, loader workers among them; 0 = one for each
    process; of `prepare`, all that the system lets it use."""
    options: Listed[str] = ()
    """Options of sbatch for this stage alone, as --time=2:00:00."""


class Launch(Section):
    """How training stages start. No stage depends on it: it changes where things run, not what is
    computed."""

    processes: Positive = 1
    inference_processes: Count = 0
    """Processes on one node of stages that divide their samples and train nothing (evaluate, cota,
    agent_evaluate), or whose arms each train by themselves (online); 0 = as many as `processes` has there. A
    CPU answers fastest with one for each core, and trains a small model fastest with one alone."""
    launcher: Literal["torchrun", "slurm", "ray", "kubernetes"] = "torchrun"
    """torchrun: this machine, or several by torchrun's own PET_NNODES ...; one process needs none. slurm, ray,
    kubernetes: each stage that wants a GPU is a job (docs/cluster.md)."""
    slurm: Listed[str] = ()
    """slurm: options of sbatch for all stages, as --partition=gpu, --account=lab, --time=48:00:00. A stage of
    one process gets one node."""
    resources: dict[JobStage, Resources] = {}
    """Of jobs: nodes, GPUs, cores and (slurm) further options by stage, as {prepare: {cpus: 32}, sft: {nodes: 4, gpus: 8}}.
    `prepare` needs no GPU and is a job only if it is named here; shards and pictures are shared among its nodes."""
    ray_python: str = "python"
    """ray: the Python of Ray on its head node, as /shared/ray-env/bin/python. RAY_ADDRESS names the cluster."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deepspeed_stage: Annotated[int, Field(ge=0, le=3)] = 0
    deterministic: Literal["auto"] | bool = "auto"
    """Use kernels that give the same bits every time. auto: on a CPU, where they cost nothing; not on GPUs,
    where they are slower."""
    threads: Count = 0
    """CPU threads of each process; 0 = all cores, shared among the processes."""
    workers: Count = 0
    """Processes that prepare batches ahead for each training process, at most as many as its share of the
    cores: a row at full size costs some 150 ms of a core."""
    compile: Literal["auto", "none", "layers"] = "auto"
    """layers: `sft` and `rl` read their rows through layers of the language model that torch.compile has
    compiled: faster once the first steps have made a few graphs, with other rounding. auto: on GPUs, but with
    deepspeed_stage 3."""
    checked_pictures: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Share of every real data set's pictures that `prepare` decodes, chosen by their names. Training leaves out
    and names a picture that it can't decode."""
    keep_states: Annotated[int, Field(ge=2)] = 2
    """Newest training states of a stage at work that are kept; a damaged one is passed over."""
    halt_on_nan: bool = False
    """Stop at the first loss or gradient that is not finite. Without it the step is skipped, and more than 10
    in a row stop the stage."""
    profile_steps: Count = 0
    """Steps of which each process writes a torch.profiler trace, profile-N.json beside its training states; 0
    = none."""

    def wanted(self, task: str) -> Resources:
        """Return what the jobs of one stage ask for."""
        return self.resources.get(task, Resources())

    def of(self, task: str) -> Launch:
        """Return the settings with the processes of one stage."""
        wanted = self.wanted(task)
        if task == "prepare":  # a process of each node, which starts one for each core
            return self.model_copy(update={"processes": wanted.nodes, "inference_processes": 1})
        if not wanted.gpus:
            return self
        return self.model_copy(
            update={"processes": wanted.nodes * wanted.gpus, "inference_processes": wanted.gpus}
        )

    @model_validator(mode="after")
    def _possible(self) -> Launch:
        for task, wanted in self.resources.items():
            if wanted.gpus and task not in GPU_STAGES:
                raise Impossible("resources", f"{task}: gpus is {wanted.gpus}, and it uses none; give cpus")
            if wanted.nodes > 1 and task not in SEVERAL_NODES:
                raise Impossible(
                    "resources",
                    f"{task}: nodes is {wanted.nodes}, and only {', '.join(SEVERAL_NODES)} run on several "
                    "nodes",
                )
        if self.compile == "layers" and self.deepspeed_stage == 3:
            raise Impossible(
                "compile",
                "ZeRO-3 gathers a layer's weights while it runs, which breaks its graph; leave one of the "
                "two out",
            )
        return self
