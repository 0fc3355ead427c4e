"""Run a stage: settings, locks, disk, progress, logs and exit codes around ans_core; a name in, an output
folder out."""

from __future__ import annotations

import functools
import hashlib
import importlib
import json
import logging
import operator
import os
import shutil
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ans_core import stop
from ans_core.config import Config, ConfigError, load
from ans_core.fingerprint import fingerprint
from ans_core.processes import thread_variables
from ans_core.types import Log
from tasks import lock_file, provenance
from tasks.code import Code
from tasks.jobs import FAILED, USER_ERROR
from tasks.launcher import (
    check_sharding,
    inference_processes_here,
    is_job,
    processes_here,
    ranks_command,
    run_job,
)
from tasks.process import (
    die_with_parent,
    held,
    imports_without_collector,
    leave_note,
    outlive_readers,
    own_note,
)
from tasks.stages import STAGES, TABLE, Stage
from tasks.tracker import facts, stage_run

DONE = "done"
STAGE_LOCK = Path(".ans/stage.lock")
"""Held by the one stage that runs in a workspace."""
TORCHRUN = {
    "PET_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1",
    "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(stop.LONGEST_S + 30),
}
"""What makes torchrun hand every signal to its processes, and wait until they have written a state."""
FLIGHT_RECORDER = {"TORCH_FR_BUFFER_SIZE": "2000", "TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}
"""What makes each process write its last collectives when one hangs; what the user has set goes before."""
LOST = ("connection closed by peer", "connection reset by peer", "remote process exited")
"""What gloo and NCCL say of a process that has ended."""
REASON_S = 5.0
"""Most that another process takes to say why it failed."""
MIN_FREE_BYTES = 500_000_000


def inputs_md5(stage: Stage, config: Config, root: Path, *, leave_out: str = "") -> dict[str, str]:
    """Return the hash that DVC recorded for each input folder, but for the one named `leave_out`, when the
    stage before wrote it; of a folder that no stage writes its fingerprint."""
    recorded = lock_file.all_outputs(root)
    outs = {made.out_path(config.profile).as_posix() for made in TABLE}
    paths = {name: path.as_posix() for name, path in stage.input_paths(config).items() if name != leave_out}
    recorded |= {path: fingerprint(root / path) for path in paths.values() if path not in outs}
    if missing := [path for path in paths.values() if path not in recorded]:
        raise ConfigError(
            f"dvc.lock has no record of {missing}: run `dvc repro {stage.target}`, which makes what "
            f"{stage.name} needs first"
        )
    return {name: recorded[path] for name, path in paths.items()}


def state_key(stage: Stage, config: Config, root: Path) -> str:
    """Return a key of the killed attempts that may be resumed: same settings, same inputs, same code."""
    parts = [settings_of(stage, config), inputs_md5(stage, config, root), Code(root).version_of(stage)]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def settings_of(stage: Stage, config: Config) -> dict[str, Any]:
    """Return the settings that decide the stage's result, by the (dotted) names of the table."""
    values = config.model_dump(mode="json")
    return {name: functools.reduce(operator.getitem, name.split("."), values) for name in stage.sections}


def check_disk(stage: Stage, config: Config, root: Path) -> None:
    """Check for room for a resumable state, the output and DVC's copy of it, each about as large as the
    largest input model."""
    models = [path for name, path in stage.input_paths(config, root).items() if name in {"base", "model"}]
    sizes = [sum(file.stat().st_size for file in path.rglob("*") if file.is_file()) for path in models]
    need = MIN_FREE_BYTES + 3 * max(sizes, default=0)
    free = shutil.disk_usage(root).free
    if free < need:
        raise ConfigError(
            f"{stage.name} needs about {need / 1e9:.1f} GB in {root.resolve()}, {free / 1e9:.1f} GB are "
            "free: `dvc gc -w --all-commits`, or a larger disk"
        )


def start_log_file(stage: Stage, profile: str, root: Path, *, process: str | None = None) -> Path:
    """Start the log file. `process`: rank of a process that is not the first, which logs to a file beside
    it."""
    suffix = f"-process{process}" if process else ""
    path = root / ".ans/logs" / f"{profile}-{stage.name}-{time.strftime('%Y%m%d-%H%M%S')}{suffix}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(
        filename=path,
        level=logging.INFO,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
        force=True,
    )
    logging.info("process %s of stage %s on %s", process or "0", stage.name, socket.gethostname())
    return path


def stage_function(stage: Stage) -> Callable[..., dict[str, float]]:
    with imports_without_collector():
        function: Callable[..., dict[str, float]] = importlib.import_module(
            f"ans_core.stages.{stage.task}"
        ).run
    return function


def call_function(
    stage: Stage,
    config: Config,
    *,
    inputs: Mapping[str, Path],
    out: Path,
    scratch: Path,
    log: Log = lambda metrics, step: None,
    **more: Any,
) -> dict[str, float]:
    """Run a stage's function on any folders, and return its metrics."""
    scratch.mkdir(parents=True, exist_ok=True)
    more |= {"row": stage.row} if stage.row else {}
    return stage_function(stage)(config, inputs=inputs, out=out, scratch=scratch, log=log, **more)


def call_stage(stage: Stage, config: Config, root: Path, key: str, **log: Log) -> dict[str, float]:
    """Run the function into `<out>.partial` and rename it. `scratch` stays, marked done: DVC still has to
    record the output.

    With several processes only the first writes to `out` (and of `cota` all write pictures); the others wait
    inside the stage's function.
    """
    out = stage.out_path(config.profile, root)
    scratch = root / ".ans/scratch" / config.profile / stage.name / key
    scratch.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(out.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    inputs = stage.input_paths(config, root)
    if stage.task == "report":
        keys = {other.name: state_key(other, config, root) for other in STAGES if other.name != stage.name}
        inputs["versions"] = provenance.write(scratch / "versions.json", config, facts(keys, root), root)
    try:
        metrics = call_function(stage, config, inputs=inputs, out=partial, scratch=scratch, **log)
    except Exception as error:  # at once: it takes a while to close the tracked run
        note_failure(stage, error)
        raise
    if int(os.environ.get("RANK", "0")) == 0:
        check_unchanged(stage, config, root)
        if out.exists():
            shutil.rmtree(out)
        partial.rename(out)
        for name, place in (*stage.copies, *stage.in_git):
            (root / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(out / name, root / place)
        (scratch / DONE).touch()
    return metrics


def note_failure(stage: Stage, error: Exception) -> int:
    """Leave a note of why this process failed, and return its exit status. Of several processes the first reason
    counts: the others lose their connection, and wait for it."""
    is_mistake = isinstance(error, ConfigError) or (not stage.retries and isinstance(error, ValueError))
    status = USER_ERROR if is_mistake else FAILED
    lost_another = "ANS_NOTE" in os.environ and any(words in str(error).lower() for words in LOST)
    deadline_s = time.monotonic() + REASON_S * lost_another
    while "status" not in own_note() and time.monotonic() < deadline_s:
        time.sleep(0.1)
    if "status" not in own_note():
        leave_note(status=status, message=f"{type(error).__name__}: {error}")
    return status


def check_unchanged(stage: Stage, config: Config, root: Path) -> None:
    """Raise ConfigError if params.yaml has other settings for the stage than when it began: DVC reads them
    at its end, and would take its result for one of these."""
    before, now = (settings_of(stage, one) for one in (config, load(root / "params.yaml")))
    if names := [name for name in before if before[name] != now[name]]:
        raise ConfigError(
            f"params.yaml was changed while {stage.name} was at work ({', '.join(names)}): its result belongs to the "
            "old settings and is dropped, its states stay. Put those back and start it again to go on from the "
            "last state, or go on with the new ones. Prepare other runs in a clone"
        )


def drop_done_scratch(root: Path, keep: str) -> None:
    """Remove training states of finished attempts, which DVC has recorded by the time another stage
    starts."""
    for mark in (root / ".ans/scratch").glob(f"*/*/*/{DONE}"):
        if mark.parent.name != keep:
            shutil.rmtree(mark.parent)


def drop_partial_outputs(root: Path, *, keep: Path | None = None) -> None:
    """Remove what killed stages had written of their outputs, of any profile, but for `keep`; no attempt goes
    on with it. To be called under STAGE_LOCK."""
    for stage in TABLE:
        for folder in (root / "runs").glob(f"*/{stage.out}.partial"):
            if folder != keep:
                shutil.rmtree(folder)


def run_tracked(stage: Stage, config: Config, root: Path) -> None:
    key = state_key(stage, config, root)
    drop_done_scratch(root, keep=key)
    out = stage.out_path(config.profile, root)
    drop_partial_outputs(root, keep=out.with_name(out.name + ".partial"))
    params = {
        "profile": config.profile,
        **settings_of(stage, config),
        "launch": config.launch.model_dump(mode="json"),
    }
    sources = [*config.prepare.sources, *config.evaluate.sources]
    data = (
        {source.name: source.files for source in sources if source.files} if stage.name == "prepare" else {}
    )
    with stage_run(
        root, stage=stage.name, version=Code(root).version_of(stage), profile=config.profile, state_key=key,
        params=params, settings=config.model_dump(mode="json"), data=data | inputs_md5(stage, config, root),
    ) as run:  # fmt: skip

        def progress(metrics: dict[str, float], step: int) -> None:
            shown = {name: round(float(value), 6) for name, value in metrics.items()}
            logging.info("step %d %s", step, json.dumps(shown))
            run.log(metrics, step)

        stage_function(stage)  # its imports count not as its duration
        start_s = time.monotonic()
        metrics = call_stage(stage, config, root, key, log=progress)
        prefix = "eval/" if stage.task == "evaluate" else ""
        figures = {f"{prefix}{name}": value for name, value in metrics.items()}
        figures["duration_s"] = time.monotonic() - start_s
        run.log_result(figures, stage.out_path(config.profile, root))
        leave_note(metrics=figures)


def main(root: Path = Path()) -> None:
    """Run the stage that the command line names. Exit codes: 0 done, 1 failed (a retry resumes it), 2 a
    mistake in the settings."""
    stages = {stage.name: stage for stage in TABLE}
    name = " ".join(sys.argv[1:])
    if name not in stages:
        sys.exit(f"usage: python -m tasks STAGE, with STAGE one of {', '.join(stages)}")
    run(stages[name], root)


def run(stage: Stage, root: Path) -> None:
    """Run a stage in this process, in several, or as a job."""
    name = stage.name
    die_with_parent()
    outlive_readers()
    stop.exit_on_signals()
    try:
        config = load(root / "params.yaml")
        check_disk(stage, config, root)
        check_sharding(stage, config)
        launch = config.launch.of(stage.task)
        ranks = ranks_command(stage, launch, os.environ)
        if is_job(stage, launch, os.environ):
            sys.exit(run_job(stage, launch, root, key=state_key(stage, config, root)))
    except ConfigError as error:
        leave_note(status=USER_ERROR, message=str(error))
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    counted = inference_processes_here if stage.inference else processes_here
    many = counted(launch, os.environ) if ranks else 1
    os.environ |= thread_variables(launch.threads, processes=many, environment=os.environ)
    dumps = {"TORCH_FR_DUMP_TEMP_FILE": str((root / ".ans/logs").resolve() / f"{name}-nccl-")}
    os.environ |= {**FLIGHT_RECORDER, **dumps, **os.environ}
    rank = os.environ.get("RANK")
    partial = stage.out_path(config.profile, root).with_name(Path(stage.out).name + ".partial")
    by_ray = rank == "0" and "TORCHELASTIC_RUN_ID" not in os.environ
    if (rank is None and os.environ.get("PET_NODE_RANK", "0") == "0") or by_ray:  # the nodes share the folder
        shutil.rmtree(partial, ignore_errors=True)
    if rank is None and ranks:
        os.environ |= TORCHRUN | {"ANS_PARENT_PID": str(os.getpid())}
        os.execv(ranks[0], ranks)
    first = rank in {None, "0"}
    log_file = start_log_file(stage, config.profile, root, process=None if first else rank)
    if first:
        leave_note(log=str(log_file.resolve()))
    try:
        if first:
            with held(root / STAGE_LOCK, f"stage {name}"):
                run_tracked(stage, config, root)
        else:
            call_stage(stage, config, root, state_key(stage, config, root))
    except stop.Stopped as stopped:
        if first and "status" not in own_note():  # a process that failed has ended this one
            leave_note(message=str(stopped), **({} if stopped.step is None else {"step": stopped.step}))
        logging.warning("%s", stopped)
        raise
    except Exception as error:  # noqa: BLE001  the boundary to the user: traceback into the log file, the message on the screen
        logging.error("%s", traceback.format_exc())
        status = note_failure(stage, error)
        where = name if first else f"{name}, process {rank},"
        print(
            f"\n{where} failed: {type(error).__name__}: {error}\n(traceback in {log_file})", file=sys.stderr
        )
        sys.exit(status)
