"""Settings of where training stages run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ans_core.config.section import Count, Impossible, Listed, Positive, Rate, Section


class Launch(Section):
    """How training stages start. No stage depends on it: it changes where things run, not what is computed."""

    processes: Positive = 1
    inference_processes: Count = 0
    """Processes on one node of stages that divide their samples and train nothing (evaluate, cota, agent_evaluate), or whose arms each
    train by themselves (online); 0 = as many as `processes` has there. A CPU answers fastest with one for each core, and trains a small
    model fastest with one alone."""
    launcher: Literal["torchrun", "deepspeed", "slurm", "ray"] = "torchrun"
    """torchrun: this machine, or several by torchrun's own PET_NNODES ...; one process needs none. deepspeed: the nodes of `hostfile`.
    slurm: each GPU stage is a job (`sbatch --wait`). ray: the same (`ray job submit`)."""
    hostfile: str = ""
    """deepspeed: its file of nodes and slots; empty = this machine."""
    slurm: Annotated[tuple[str, ...], Listed] = ()
    """slurm: options of sbatch, as --partition=gpu, --nodes=2, --gpus-per-node=8, --time=48:00:00."""
    ray_address: str = ""
    """ray: as http://head:8265; empty = what RAY_ADDRESS says."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    deepspeed_stage: Annotated[int, Field(ge=0, le=3)] = 0
    deterministic: bool = True
    threads: Count = 0
    """CPU threads of each process; 0 = all cores, shared among the processes."""
    workers: Count = 0
    """Processes that prepare batches ahead for each training process, at most as many as its share of the cores: a row at full size costs
    some 150 ms of a core."""
    compile: Literal["auto", "none", "layers"] = "auto"
    """layers: `sft` and `rl` read their rows through layers of the language model that torch.compile has compiled: faster once the first
    steps have made a few graphs, with other rounding. auto: on GPUs, but with deepspeed_stage 3."""
    feature_cache: str = ""
    """Folder in which SFT keeps what the frozen encoders gave for a picture; empty = none. Published sizes: 2 MB a tile, 90 MB a frame."""
    feature_cache_gb: Rate = 50.0
    """Most that the folder holds."""
    keep_states: Annotated[int, Field(ge=2)] = 2
    """Newest training states of a stage at work that are kept; a damaged one is passed over."""
    halt_on_nan: bool = False
    """Stop at the first loss or gradient that is not finite. Without it the step is skipped, and more than 10 in a row stop the stage."""
    profile_steps: Count = 0
    """Steps of which each process writes a torch.profiler trace, profile-N.json beside its training states; 0 = none."""

    @model_validator(mode="after")
    def _possible(self) -> Launch:
        if self.feature_cache and self.deepspeed_stage == 3:
            raise Impossible("feature_cache", "ZeRO-3 needs all processes to run the encoders equally often; leave one of the two out")
        if self.compile == "layers" and self.deepspeed_stage == 3:
            raise Impossible("compile", "ZeRO-3 gathers a layer's weights while it runs, which breaks its graph; leave one of the two out")
        return self
