"""What `ans finetune` and `ans rl` share: a checked request in; its stages run without DVC in a folder of
their own, an estimate first, a table of before and after last. params.yaml and runs/ stay as they are.

    python -m flows.short_training FOLDER STAGE [--measure]     # one stage, or its first steps, in each of several processes
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

import yaml

from ans_core import dist, stop
from ans_core.config import Config, setting
from ans_core.config.names import DATA_KINDS
from ans_core.config.training import DataOptim
from ans_core.processes import shared_words, thread_variables
from ans_core.types import Sample
from ans_core.written import atomic_folder
from flows.child import LAUNCH
from flows.paths import root
from tasks import provenance
from tasks.process import die_with_parent, held, holder_of, outlive_readers
from tasks.runner import TORCHRUN, stage_function
from tasks.stages import Stage, stage_named

SMALL = 100_000_000
"""Parameters of a model that gets the settings of the profile `tiny`."""
MEASURED_STEPS = 3
"""The first one is not counted: it allocates."""
FEW = 4
"""Held-out pictures from which on a comparison is worth more than a glance."""
CHUNK = 25
"""Steps between resumable states."""
IMPORTED = "imported"
"""Folder of what an export became that holds nothing out itself."""
Work = Callable[[Path], None]


@dataclass(frozen=True, kw_only=True)
class Training:
    """A command that trains."""

    name: str
    """`ans NAME`; its file is NAME.json."""
    noun: str
    """What one run of it is called."""
    stage: Literal["sft", "rl"]
    """The stage that learns, and the section of its settings."""
    rows: tuple[str, str]
    """Rows of `evaluate` before and after."""
    works: Callable[[Request], Iterator[tuple[str, Work]]]
    """(folder of its output, what writes it) in order."""
    before_estimate: tuple[str, ...]
    """Works that a step of training needs."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A training whose data, model and settings are checked."""

    training: Training
    data: str
    """Names of the data sets, for the report's title."""
    model: str
    out: Path
    config: Config
    identity: dict[str, Any]
    """What <name>.json holds: a folder is of one training."""
    imported: Path | None = None
    """Where the data were imported to, if their own files hold nothing out."""


def train(
    arguments: argparse.Namespace, training: Training, checked: Callable[[argparse.Namespace, Path], Request]
) -> int:
    """Train as the command line says; a killed run goes on where it stopped. An estimate waits for nobody and
    leaves nothing behind. TERM and USR1 end it after the step at work, with a state."""
    stop.exit_on_signals()
    try:
        return _train(arguments, training, checked)
    except stop.Stopped as stopped:
        print(f"ans {training.name}: {stopped}", file=sys.stderr)
        raise


def _train(
    arguments: argparse.Namespace, training: Training, checked: Callable[[argparse.Namespace, Path], Request]
) -> int:
    lock = root() / ".ans/stage.lock"
    lock.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"{training.name}-", dir=lock.parent) as scratch:
        request = checked(arguments, Path(scratch))
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
            for name, work in training.works(request):
                begin_s = time.monotonic()
                ran = done(request.out / name, work)
                print(f"{name}: {f'{time.monotonic() - begin_s:.0f} s' if ran else 'was there'}", flush=True)
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
    (out / "params.yaml").write_text(
        yaml.safe_dump(request.config.model_dump(mode="json"), sort_keys=False), encoding="utf-8"
    )


def refuse_another(file: Path, identity: Mapping[str, Any], noun: str) -> None:
    """Raise ValueError if the folder holds a training with other data, model or settings, or anything
    else."""
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8"))) != identity:
        changed = [
            f"{key} {before.get(key)!r}, now {value!r}"
            for key, value in identity.items()
            if before.get(key) != value
        ]
        raise ValueError(
            f"{file.parent} holds another {noun} ({'; '.join(changed)}); give another --out, or remove it"
        )
    if not file.exists() and file.parent.exists() and any(file.parent.iterdir()):
        raise ValueError(f"{file.parent} is not empty and holds no {noun}; give another --out")


def benchmarks_of(samples: Iterable[Sample]) -> list[str]:
    """Return the benchmarks that compare answers to these samples; there may be none."""
    from ans_core.benchmarks import BENCHMARKS
    from ans_core.benchmarks.score import benchmark_of

    return sorted({benchmark_of(sample) for sample in samples} & BENCHMARKS.keys())


def length(
    settings: Sequence[str], *, section: str, steps: int | None
) -> tuple[float | None, dict[str, Any], tuple[str, ...]]:
    """Return (epochs that the settings ask for, all settings by key, the words without the epochs), for a
    command that counts steps itself. Raises ValueError where --steps or the settings name steps too."""
    key, user_settings = f"{section}.optim.epochs", dict(setting(word) for word in settings)
    for counted in (f"{section}.optim.batch", "launch.processes"):
        if not isinstance(user_settings.get(counted, 1), int) or user_settings.get(counted, 1) < 1:
            raise ValueError(f"{counted} = {user_settings[counted]!r}: give a whole number above 0")
    epochs = user_settings.get(key)
    if epochs is None:
        return None, user_settings, tuple(settings)
    if steps or f"{section}.optim.steps" in user_settings:
        raise ValueError(f"{key} and a number of steps are both given: leave one of them out")
    if not isinstance(epochs, int | float) or epochs <= 0:
        raise ValueError(f"{key} = {epochs!r}: give a number above 0")
    return float(epochs), user_settings, tuple(word for word in settings if setting(word)[0] != key)


def launch_words(batch: int, user_settings: Collection[str], *, command: str) -> dict[str, str]:
    """Return the settings of a process for each GPU of this machine, as far as a step has a sample for each;
    one without a GPU. None of a cluster's jobs. `user_settings`: keys of the user's settings. Raises
    ValueError if these ask for jobs."""
    import torch

    if jobs := [
        key for key in user_settings if key == "launch.launcher" or key.startswith("launch.resources")
    ]:
        raise ValueError(
            f"{', '.join(jobs)}: ans {command} trains on this machine; use the profile and `ans run` for jobs"
        )
    processes = max(1, min(torch.cuda.device_count(), batch))
    words = {
        "launcher": "torchrun",
        "resources": "{}",
        "processes": str(processes),
        "inference_processes": str(processes),
    }
    return {
        f"launch.{key}": value
        for key, value in (words | ({"deepspeed_stage": "0"} if processes == 1 else {})).items()
    }


def accumulated(batch: int, count: int, of_profile: DataOptim, *, processes: int) -> int:
    """Return into how many micro-batches `count` processes divide a step, so that each computes as many
    samples at once as on the `processes` of the profile, which fit its memory."""
    at_once = math.ceil(of_profile.batch / of_profile.accumulate / processes)
    return max(1, math.ceil(batch / count) // at_once)


def set_names(paths: Sequence[Path]) -> list[str]:
    """Return a name for each data set: its folder's or file's, with the parent's before it where that is
    another set's or a kind of data's. Raises ValueError for a set that comes twice."""
    names: list[str] = []
    for place, path in enumerate(paths):
        if path in paths[:place]:
            raise ValueError(f"--data {path} is given twice; leave one out")
        name = path.stem if path.is_file() else path.name
        numbered = (f"{name}-{number}" for number in count(2))
        names.append(
            next(
                one
                for one in chain([name, f"{path.parent.name}-{name}"], numbered)
                if one not in {*names, *DATA_KINDS}
            )
        )
    return names


def base_of(start: Path) -> tuple[str, Path]:
    """Return (stage, folder of all tensors) of a start model: of what a stage trained (runs/<profile>/sft,
    rl, rl/teacher) the base beside it, of any other no stage and its own. Raises ValueError where the base is
    missing."""
    from ans_core.checkpoints.checkpoint import DELTA
    from ans_core.checkpoints.trained import trained_on

    return trained_on(start)[:2] if (start / DELTA).is_file() else ("", start)


def stage_work(request: Request, name: str, *inputs: str) -> Work:
    """Return what runs a stage; `inputs`: folders of what was written before."""
    return lambda out: run_stage(request, name, inputs, out)


def run_stage(request: Request, name: str, inputs: tuple[str, ...], out: Path) -> None:
    """Run a stage, in as many processes as the settings say."""
    stage = stage_named(name)
    if command := ranks_command(stage, request.config, request.out, "--inputs", *inputs, "--out", str(out)):
        status, _, _ = run_ranks(command, ranks_environment(stage, request.config))
        if status:
            raise ValueError(
                f"{name} failed in one of its processes; what it says stands above. The same command goes "
                "on from here"
            )
        return
    more: dict[str, Any] = {}
    if name == "report":
        scratch = request.out / ".scratch"
        scratch.mkdir(parents=True, exist_ok=True)
        more = {
            "versions": provenance.write(scratch / "versions.json", request.config, {}, root()),
            "rows": request.training.rows, "title": f"{request.training.noun} on {request.data}",
        }  # fmt: skip
    call(stage, request.config, request.out, inputs, out, **more)


def call(
    stage: Stage,
    config: Config,
    folder: Path,
    inputs: tuple[str, ...],
    out: Path,
    *,
    versions: Path | None = None,
    **more: Any,
) -> None:
    """Run a stage's function in this process."""
    scratch = folder / ".scratch" / stage.name
    scratch.mkdir(parents=True, exist_ok=True)
    of = {name: folder / name for name in inputs} | ({"versions": versions} if versions else {})
    more |= {"row": stage.row} if stage.row else {}
    stage_function(stage)(config, inputs=of, out=out, scratch=scratch, log=lambda metrics, step: None, **more)


def ranks_command(stage: Stage, config: Config, folder: Path, *words: str) -> list[str] | None:
    """Return the command that starts the stage in several processes; None if this one is enough."""
    count = processes_of(stage, config)
    if count == 1 and not (stage.distributed and config.launch.deepspeed_stage):
        return None
    return [
        sys.executable,
        *shared_words(count),
        "-m",
        "flows.short_training",
        str(folder),
        stage.name,
        *words,
    ]


def ranks_environment(stage: Stage, config: Config) -> dict[str, str]:
    threads = thread_variables(
        config.launch.threads, processes=processes_of(stage, config), environment=os.environ
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


def processes_of(stage: Stage, config: Config) -> int:
    if stage.one_node:
        return config.launch.inference_processes or config.launch.processes
    return config.launch.processes if stage.distributed else 1


def done(out: Path, work: Work) -> bool:
    """Do the work if its output is not there; it appears whole or not at all. Tell whether anything was
    done."""
    if out.exists():
        return False
    with atomic_folder(out) as partial:
        work(partial)
    return True


def gains(evaluated: Path, rows: tuple[str, str]) -> list[str]:
    """Return the table of what training changed on the held-out pictures."""
    from ans_core.report.changes import changes, read_answers
    from ans_core.report.files import read_json
    from ans_core.report.page import change_table

    titles = dict(zip(rows, ("before", "after"), strict=True))
    summary = {title: read_json(evaluated / row / "metrics.json") for row, title in titles.items()}
    answers = {title: read_answers(evaluated / row) for row, title in titles.items()}
    return [
        "held-out pictures, before and after",
        *change_table(changes(summary, answers, "before", "after")),
    ]


def estimate(request: Request) -> str:
    """Return what training will take, measured on MEASURED_STEPS steps in a process of its own. Raises
    ValueError if they fail."""
    training, stage = request.training, stage_named(request.training.stage)
    for name, work in training.works(request):
        if name in training.before_estimate:
            done(request.out / name, work)
    command = ranks_command(stage, request.config, request.out, "--measure")
    command = command or [
        sys.executable,
        "-m",
        "flows.short_training",
        str(request.out),
        stage.name,
        "--measure",
    ]
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
    for name in ("out", "scratch"):
        (trial / name).mkdir(parents=True, exist_ok=True)
    inputs = {name: folder / name for name in stage.inputs}
    more = {"must_learn": False} if stage.name == "rl" else {}
    with redirect_stdout(sys.stderr):  # the last line of stdout is the result
        stage_function(stage)(
            short, inputs=inputs, out=trial / "out", scratch=trial / "scratch", log=log, **more
        )
    if dist.rank() > 0:
        return {}
    gpu = torch.cuda.is_available()
    used = (
        torch.cuda.max_memory_allocated()
        if gpu
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    total = torch.cuda.get_device_properties(0).total_memory if gpu else psutil.virtual_memory().total
    return {"step_s": (times[-1] - times[0]) / (len(times) - 1), "bytes": used, "total": total, "gpu": gpu}


def main() -> None:
    """Run a stage in this process, one of several."""
    if "RANK" in os.environ:  # torchrun started it; LAUNCH has done so for one that `run_ranks` started
        die_with_parent()
        outlive_readers()
    stop.exit_on_signals()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("stage")
    parser.add_argument("--inputs", nargs="*", default=[])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", action="store_true")
    arguments = parser.parse_args()
    stage = stage_named(arguments.stage)
    config = Config.model_validate(
        yaml.safe_load((arguments.folder / "params.yaml").read_text(encoding="utf-8"))
    )
    if not arguments.measure:
        call(stage, config, arguments.folder, tuple(arguments.inputs), arguments.out)
    elif measured := measure(arguments.folder, stage, config):
        print(json.dumps(measured))


if __name__ == "__main__":
    main()
