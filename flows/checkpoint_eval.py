"""Evaluate any checkpoint on the benchmarks of params.yaml, outside the pipeline. Results are kept by
checkpoint, settings, data and code."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ans_core import stop
from ans_core.config import Config, ConfigError, load
from ans_core.fingerprint import fingerprint
from ans_core.processes import thread_variables
from ans_core.report.files import read_json
from ans_core.written import atomic_folder
from flows.child import StageFailedError, run_noted
from flows.dvc_state import check_out
from tasks.code import Code
from tasks.jobs import IN_JOB
from tasks.launcher import awaits_job, inference_processes_here, one_node_words, submit_words
from tasks.process import held, leave_note
from tasks.registry import Version
from tasks.runner import STAGE_LOCK, call_function, inputs_md5, settings_of
from tasks.stages import stage_named

STAGE = "evaluate@rl"
"""The stage that evaluates a converted checkpoint."""
METRICS = "metrics.json"


def settings(here: Path, changes: dict[str, Any]) -> Config:
    """Return params.yaml with changes to the section `evaluate`. Raises ConfigError for one that is not
    possible."""
    values = load(here / "params.yaml").model_dump(mode="json")
    try:
        return Config.model_validate(values | {"evaluate": values["evaluate"] | changes})
    except ValidationError as error:
        raise ConfigError(
            "\n".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors())
        ) from None


def with_fingerprints(config: Config, here: Path) -> Config:
    """Return the settings with fingerprints of evaluate.sources and evaluate.public as their files are now.
    params.yaml has those that `ans run` saw last."""
    values = config.model_dump(mode="json")
    for source in (*values["evaluate"]["sources"], *values["evaluate"]["public"]):
        source["files"] = fingerprint(here / source["path"])
    return Config.model_validate(values)


def content_of(checkpoint: Path) -> str:
    """Return one hash of what in a model folder decides its answers: tensors, configuration, tokenizer."""
    from ans_core.checkpoints.checkpoint import config_hash, weights_hash

    return hashlib.sha256(f"{weights_hash(checkpoint)} {config_hash(checkpoint)}".encode()).hexdigest()


def result_folder(checkpoint: Path, content: str, here: Path, config: Config) -> Path:
    """Return where the evaluation of a checkpoint with this content hash is kept, or will be."""
    stage = stage_named(STAGE)
    data = inputs_md5(stage, config, here, leave_out="model")
    request = json.dumps([content, config.profile, settings_of(stage, config), data], sort_keys=True)
    return (
        here
        / ".ans/eval"
        / f"{checkpoint.name}-{hashlib.sha256(f'{request} {Code(here).version_of(stage)}'.encode()).hexdigest()[:12]}"
    )


def evaluated(checkpoint: Path, content: str, here: Path, config: Config, *, child: bool = False) -> Path:
    """Evaluate and return the folder with metrics.json, predictions and overlays. What an earlier night
    computed is kept, and a killed evaluation goes on where it stopped. child: in processes of its own, which
    give memory and GPUs back: as many as the settings have for this node. Raises ValueError without the run's
    data sets and, for the loops, its SFT model."""
    out = result_folder(checkpoint, content, here, config)
    if not (out / METRICS).exists():
        check_inputs(checkpoint, here, config)
        if child or awaits_job(config.launch, os.environ):
            run_in_child(out, checkpoint, content, here, config)
        else:
            evaluate_into(out, checkpoint, here, config)
    return out


def check_inputs(checkpoint: Path, here: Path, config: Config) -> None:
    inputs = stage_named(STAGE).input_paths(config, here) | {"model": checkpoint}
    if missing := [str(path) for path in inputs.values() if not path.is_dir()]:
        raise ValueError(
            f"no folder {', '.join(missing)}: the benchmarks of params.yaml need the data, base and SFT of a finished "
            f"pipeline (`ans run`); a public one needs none of them: `ans eval BENCHMARK --model {checkpoint} --data DIR`"
        )


def evaluate_into(out: Path, checkpoint: Path, here: Path, config: Config) -> None:
    """Evaluate a checkpoint. `out` appears whole or not at all; what it held before is replaced. A killed
    evaluation goes on from the answers it had, if `out` has the same name again."""
    stage = stage_named(STAGE)
    inputs = stage.input_paths(config, here) | {"model": checkpoint}
    scratch = here / ".ans/scratch" / config.profile / "eval" / out.name
    if os.environ.get("RANK", "0") != "0":  # it only answers its share
        call_function(stage, config, inputs=inputs, out=out, scratch=scratch)
        return
    with held(here / STAGE_LOCK, "ans eval"):
        with atomic_folder(out) as partial:
            call_function(stage, config, inputs=inputs, out=partial, scratch=scratch)
        shutil.rmtree(scratch)


def in_child(checkpoint: Path, content: str, here: Path, changes: dict[str, Any]) -> Path:
    """Evaluate with changes to the section `evaluate`, in processes of its own."""
    config = with_fingerprints(settings(here, changes), here)
    return evaluated(checkpoint, content, here, config, child=True)


def run_in_child(out: Path, checkpoint: Path, content: str, here: Path, config: Config) -> None:
    """Evaluate into `out` in processes of this node, or of a job. Raises StageFailedError."""
    section = json.dumps(config.model_dump(mode="json")["evaluate"])  # with the fingerprints that named `out`
    words = ["-m", "flows.checkpoint_eval", str(checkpoint), content, section]
    stage, submitted = stage_named(STAGE), awaits_job(config.launch, os.environ)
    launch = config.launch.of(stage.task)
    there = {**os.environ, IN_JOB: "1", "PET_NNODES": "1"} if submitted else os.environ
    command = [*one_node_words(launch, there), *words]
    variables = thread_variables(
        launch.threads, processes=inference_processes_here(launch, there), environment=os.environ
    )
    if submitted:
        command, variables = submit_words(f"ans-eval-{out.name}", stage.task, command), {}
    status, noted = run_noted(command, root=here, timeout_s=stage.timeout_s, extra_environment=variables)
    if status:
        message = noted.get("message", "its message is above")
        raise StageFailedError(f"the evaluation of {checkpoint} failed (status {status}); {message}")
    if not (out / METRICS).exists():
        raise StageFailedError(
            f"the evaluation of {checkpoint} has ended, but params.yaml, dvc.lock or the code changed while it "
            f"waited, and its figures in {out.parent} are those of the new ones: give the same command again"
        )


def metrics_of(folder: Path) -> dict[str, float]:
    """Return the metrics of an evaluation."""
    return dict(read_json(folder / METRICS))


def registered(version: Version, here: Path) -> Path:
    """Return the folder of a registered checkpoint, which comes from DVC's cache if it is not there yet."""
    folder = here / ".ans/registry" / version.md5.removesuffix(".dir")
    if not folder.exists():
        check_out(version.md5, folder, here)
    return folder


def main(checkpoint: str, content: str, changes: str) -> None:
    """Evaluate, as one of the processes of `in_child`, and print the folder."""
    from flows.paths import root
    from tasks.process import die_with_parent

    die_with_parent()
    stop.exit_on_signals()
    try:
        print(evaluated(Path(checkpoint), content, root(), settings(root(), json.loads(changes))))
    except stop.Stopped as stopped:
        leave_note(message=str(stopped))
        raise
    except (ValueError, OSError) as error:  # as of a command: a sentence
        leave_note(message=str(error))
        sys.exit(f"ans: {error}")


if __name__ == "__main__":
    main(*sys.argv[1:])
