"""What `ans finetune` and `ans rl` share: a checked request in; its stages run without DVC in a folder of
their own, an estimate first, a table of before and after last. params.yaml and runs/ stay as they are.

    python -m flows.short_training FOLDER STAGE [OUT]     # one stage, or without OUT its first steps, in each of several processes
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

from ans_core import dist, stop
from ans_core.config import Config, dump, load
from ans_core.processes import memory_limit, shared_words, thread_variables
from ans_core.written import atomic_folder
from flows.child import LAUNCH
from flows.paths import root
from flows.training_request import IMPORTED, MERGED, Request, Training, refuse_another
from tasks import provenance
from tasks.launcher import processes_of
from tasks.process import die_with_parent, held, holder_of, outlive_readers
from tasks.runner import STAGE_LOCK, TORCHRUN, call_function
from tasks.stages import Stage, stage_named

MEASURED_STEPS = 3
"""The first one is not counted: it allocates."""


def train(arguments: argparse.Namespace, training: Training) -> int:
    """Train as the command line says; a killed run goes on where it stopped. An estimate waits for nobody and
    leaves nothing behind. TERM and USR1 end it after the step at work, with a state."""
    stop.exit_on_signals()
    try:
        return _train(arguments, training)
    except stop.Stopped as stopped:
        print(f"ans {training.name}: {stopped}", file=sys.stderr)
        raise


def _train(arguments: argparse.Namespace, training: Training) -> int:
    lock = root() / STAGE_LOCK
    lock.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{training.name}-", dir=lock.parent) as scratch:
        request = training.checked(arguments, Path(scratch))
        if arguments.estimate:
            if holder := holder_of(lock):
                print(f"{holder} is at work here: the estimate is of a machine that both share")
            begin(request)
            print(estimate(request))
            return 0
        with held(lock, f"ans {training.name}") as file:
            # if this process is killed, its children keep the lock until their state is written
            os.set_inheritable(file, True)
            begin(request)
            if not (request.out / training.stage).exists():
                print(estimate(request), flush=True)
            for name in training.stages:
                begin_s = time.monotonic()
                ran = make(request, name)
                how = f"{time.monotonic() - begin_s:.0f} s" if ran else "was there"
                print(f"{folder_of(name)}: {how}", flush=True)
    print("\n".join(["", *gains(request.out / "evaluate", training.rows), ""]))
    print(f"model:  {request.out / 'model'}\nreport: {request.out / 'report/report.html'}")
    print(
        f'try it: ans predict PICTURE "Please segment the ... in this image." --model {request.out / "model"}'
    )
    return 0


def begin(request: Request) -> None:
    """Make the folder this training's: its identity, start model, imported data and settings. Raises
    ValueError if it is another's, and writes nothing for a model that can't be loaded."""
    from ans_core.checkpoints import checkpoint
    from ans_core.checkpoints.folder import local_folder

    out, base, file = request.out, request.out / "base/base", request.out / f"{request.training.name}.json"
    # another one may have begun while this one waited
    refuse_another(file, request.identity, request.training.noun)
    model = None if base.exists() else checkpoint.load(local_folder(request.model))
    out.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(request.identity, indent=1) + "\n", encoding="utf-8")
    if request.imported and not (out / IMPORTED).exists():
        with atomic_folder(out / IMPORTED) as partial:
            for part in request.imported.iterdir():
                shutil.move(part, partial)
    if model is not None:
        checkpoint.save(model, base, metadata={"stage": "base", "source": request.model})
    (out / "params.yaml").write_text(dump(request.config.model_dump(mode="json")), encoding="utf-8")


def folder_of(name: str) -> str:
    """Return the folder that a stage's output has in the training's."""
    return MERGED if name == MERGED else stage_named(name).out


def make(request: Request, name: str) -> bool:
    """Run a stage if its output is not there; it appears whole or not at all. Tell whether it ran."""
    out = request.out / folder_of(name)
    if out.exists():
        return False
    with atomic_folder(out) as partial:
        if name == MERGED:
            merge(request.out, partial)
        else:
            run_stage(request, stage_named(name), partial)
    return True


def merge(folder: Path, out: Path) -> None:
    from ans_core.checkpoints import checkpoint
    from ans_core.checkpoints.trained import sft_model

    model = sft_model(folder / "base/base", folder / "sft")
    checkpoint.save(model, out, metadata={"stage": "finetune"})


def run_stage(request: Request, stage: Stage, out: Path) -> None:
    """Run a stage, in as many processes as the settings say."""
    config, folder = request.config, request.out
    if starts_processes(stage, config):
        status, _, _ = run_ranks(
            ranks_command(stage, config, folder, str(out)), ranks_environment(stage, config)
        )
        if status:
            raise ValueError(
                f"{stage.name} failed in one of its processes; what it says stands above. The same command goes "
                "on from here"
            )
        return
    training = request.training
    about: dict[str, Any] = {"rows": training.rows, "title": f"{training.noun} on {request.data}"}
    call(stage, config, folder, out, **(about if stage.name == "report" else {}))


def call(
    stage: Stage,
    config: Config,
    folder: Path,
    out: Path,
    *,
    scratch: Path | None = None,
    **more: Any,
) -> None:
    """Run a stage's function in this process, on what was made before in the training's folder."""
    (folder / ".scratch").mkdir(exist_ok=True)
    inputs = {name: folder / name for name in stage.inputs if (folder / name).exists()}
    if stage.name == "report":
        inputs["versions"] = provenance.write(folder / ".scratch/versions.json", config, {}, root())
    scratch = scratch or folder / ".scratch" / stage.name
    call_function(stage, config, inputs=inputs, out=out, scratch=scratch, **more)


def starts_processes(stage: Stage, config: Config) -> bool:
    """Tell whether a stage needs more than this process. DeepSpeed wants a launcher of one process, too."""
    return processes_of(stage, config.launch) > 1 or bool(stage.distributed and config.launch.deepspeed_stage)


def ranks_command(stage: Stage, config: Config, folder: Path, *out: str) -> list[str]:
    """Return the command that runs a stage into `out`, or without it measures its first steps."""
    shared = shared_words(processes_of(stage, config.launch)) if starts_processes(stage, config) else []
    return [sys.executable, *shared, "-m", "flows.short_training", str(folder), stage.name, *out]


def ranks_environment(stage: Stage, config: Config) -> dict[str, str]:
    threads = thread_variables(
        config.launch.threads, processes=processes_of(stage, config.launch), environment=os.environ
    )
    return os.environ | TORCHRUN | threads


def run_ranks(
    command: list[str], environment: Mapping[str, str], *, capture: bool = False
) -> tuple[int, str, str]:
    """Run a command of one or several processes and return (exit status, stdout, stderr), both empty unless
    `capture`. Its processes get TERM when this one ends, in whatever way: they end after the step at work,
    with a state. In a session of their own, so that Ctrl-C is TERM to them."""
    pipe = subprocess.PIPE if capture else None
    process = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, *command], cwd=root(),
        env={**environment, "ANS_PARENT_PID": str(os.getpid())}, stdout=pipe, stderr=pipe, text=True,
        start_new_session=True, close_fds=False,
    )  # fmt: skip
    try:
        stdout, stderr = process.communicate()
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.communicate(timeout=stop.LONGEST_S + 60)
            finally:
                process.kill()
    return process.returncode, stdout or "", stderr or ""


def gains(evaluated: Path, rows: tuple[str, str]) -> list[str]:
    """Return the table of what training changed on the held-out pictures."""
    from ans_core.report.page import change_table
    from flows.compare import folder_changes

    before, after = (evaluated / row for row in rows)
    return ["held-out pictures, before and after", *change_table(folder_changes(before, after))]


def estimate(request: Request) -> str:
    """Return what training will take, measured on MEASURED_STEPS steps in a process of its own. Raises
    ValueError if they fail."""
    training, stage = request.training, stage_named(request.training.stage)
    for name in training.before_estimate:
        make(request, name)
    command = ranks_command(stage, request.config, request.out)
    trial_folder = request.out / ".scratch/measured"
    # a killed trial's states: it would go on from them, and measure nothing
    shutil.rmtree(trial_folder, ignore_errors=True)
    try:
        status, stdout, stderr = run_ranks(command, ranks_environment(stage, request.config), capture=True)
    finally:
        shutil.rmtree(trial_folder, ignore_errors=True)
    if status:
        raise ValueError(f"a step of training failed, so nothing was trained:\n{stderr.strip()[-2000:]}")
    measured = json.loads(stdout.splitlines()[-1])
    section = getattr(request.config, training.stage)
    minutes = measured["step_s"] * section.optim.steps / 60
    where = "GPU memory" if measured["gpu"] else "memory"
    beside = f" Validation comes every {section.val_every} steps." if section.val_every else ""
    most = f" {longest_rows(request, measured['total'])}" if measured["gpu"] else ""
    return (
        f"estimate, from {MEASURED_STEPS} steps: {measured['step_s']:.2f} s a step, {minutes:.1f} minutes "
        f"of training; {measured['bytes'] / 1e9:.1f} GB of {where} ({measured['total'] / 1e9:.0f} GB "
        f"here).{most}{beside} Evaluation comes before and after."
    )


def longest_rows(request: Request, gpu_bytes: int) -> str:
    """Return what the longest rows take of a GPU by formula, as a sentence: those of the measured steps may
    be shorter."""
    from ans_core.checkpoints import checkpoint
    from ans_core.stages.gpu_memory import stage_memory

    config, tokenizer, _ = checkpoint.opened(request.out / "base/base")
    memory = stage_memory(
        request.config, checkpoint.empty(config, tokenizer), request.training.stage, gpu_bytes=gpu_bytes
    )
    remedy = (
        f": raise {request.training.stage}.optim.accumulate, or lower sft.max_length"
        if not memory.fits(gpu_bytes)
        else ""
    )
    return f"By formula the longest rows take {memory}{', which may not fit' if remedy else ''}{remedy}."


def measure(folder: Path, stage: Stage, config: Config) -> dict[str, float | bool]:
    """Train a few steps into a folder that the caller removes, and return seconds a step and the peak of
    memory, of one process. A judge is not asked, nothing is validated, and answers that are all alike are no
    failure."""
    import psutil
    import torch

    section = getattr(config, stage.name)
    optim = section.optim.model_copy(update={"steps": MEASURED_STEPS, "save_every": MEASURED_STEPS})
    quiet: dict[str, bool | int] = {"val_every": 0}
    if stage.name == "rl":
        quiet |= {"use_llm_judge": False, "use_llm_judge_loop2": False, "inner_steps": 1}
    short = config.model_copy(update={stage.name: section.model_copy(update={"optim": optim, **quiet})})
    times: list[float] = []

    def log(metrics: dict[str, float], step: int) -> None:
        if f"{stage.name}/loss" in metrics:
            times.append(time.monotonic())

    trial = folder / ".scratch/measured"
    (trial / "out").mkdir(parents=True, exist_ok=True)
    more = {"must_learn": False} if stage.name == "rl" else {}
    with redirect_stdout(sys.stderr):  # the last line of stdout is the result
        call(stage, short, folder, trial / "out", scratch=trial / "scratch", log=log, **more)
    if dist.rank() > 0:
        return {}
    gpu = torch.cuda.is_available()
    used = (
        torch.cuda.max_memory_allocated()
        if gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    total = (
        torch.cuda.get_device_properties(0).total_memory
        if gpu
        else min(psutil.virtual_memory().total, memory_limit())
    )
    return {"step_s": (times[-1] - times[0]) / (len(times) - 1), "bytes": used, "total": total, "gpu": gpu}


def main(folder: str, name: str, *out: str) -> None:
    """Run a stage in this process, one of several."""
    if "RANK" in os.environ:  # torchrun started it; LAUNCH has done so for one that `run_ranks` started
        die_with_parent()
        outlive_readers()
    stop.exit_on_signals()
    stage, config = stage_named(name), load(Path(folder, "params.yaml"))
    if out:
        call(stage, config, Path(folder), Path(*out))
    elif measured := measure(Path(folder), stage, config):
        print(json.dumps(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
