"""`ans finetune FOLDER --model M`: labelled pictures and a checkpoint in; a fine-tuned checkpoint, evaluated before and after, and a report
out. It is the pipeline without DVC and without RL, in a folder of its own: params.yaml and runs/ stay as they are."""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from itertools import compress
from pathlib import Path
from typing import Any

import yaml

from ans_core.benchmarks import BENCHMARKS
from ans_core.config import PROFILES, Config, resolve
from ans_core.types import Sample
from ans_core.written import written_whole
from flows.paths import root
from tasks import provenance
from tasks.fingerprint import fingerprint
from tasks.process import held
from tasks.runner import stage_function
from tasks.stages import stage_named

SMALL = 100_000_000
"""Parameters of a model that gets the settings of the profile `tiny`."""
EPOCHS = 10
MEASURED_STEPS = 3
"""The first one is not counted: it allocates."""
FEW = 4
"""Held-out pictures from which on a comparison is worth more than a glance."""
CHUNK = 25
"""Steps between resumable states."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    source: Path
    model: str
    out: Path
    config: Config


def finetune(arguments: argparse.Namespace) -> int:
    """Fine-tune as the command line asks; a killed run goes on where it stopped."""
    with held(root() / ".ans/stage.lock", "ans finetune"):
        asked = prepared(arguments)
        if arguments.estimate or not (asked.out / "sft").exists():
            print(estimate(asked), flush=True)
        if arguments.estimate:
            return 0
        for name, work in works(asked):
            begin_s = time.monotonic()
            ran = done(asked.out / name, work)
            print(f"{name}: {f'{time.monotonic() - begin_s:.0f} s' if ran else 'was there'}", flush=True)
    page = asked.out / "report/report.html"
    print(f"model:  {asked.out / 'model'}\nreport: {page}")
    print(f'try it: ans predict PICTURE "Please segment the ... in this image." --model {asked.out / "model"}')
    return 0


def prepared(arguments: argparse.Namespace) -> Asked:
    """Read and check the data set, put the start model and the settings into the folder. Raises ValueError, and writes nothing, for data, a
    model or settings that do not fit, and for a folder that holds another fine-tuning."""
    from ans_core import data
    from ans_core.checkpoints import checkpoint, conversion
    from ans_core.checkpoints.folder import local_folder
    from ans_core.data.formats import infer
    from ans_core.data.formats.checks import DataError
    from ans_core.data.mixture import paired

    source = Path(arguments.folder).resolve()
    form = arguments.format or infer(source)
    read = data.read_samples(format=form, path=source, name=source.name, split="train")
    train = list(compress(read, paired(read)))
    if not train:
        raise ValueError(f"{source}: no record of its split 'train' has both a text and what it is about: there is nothing to fine-tune on")
    try:
        held_out = data.read_samples(format=form, path=source, name=source.name, split="val")
    except DataError as error:
        raise ValueError(f'{error}\nwithout held-out pictures nothing tells what was learned: give some records "split": "val"') from None
    benchmarks = sorted({benchmark_of(sample) for sample in held_out} & BENCHMARKS.keys())
    if not benchmarks:
        raise ValueError(
            f"{source}: its held-out samples are questions and answers, or half of a pair, which no benchmark compares: give it records"
            ' of objects or regions with "split": "val", or run the pipeline on it (`ans run --add-data`)'
        )
    out = Path(arguments.out or root() / "runs" / f"finetune-{source.name}").resolve()
    whole = {
        "source": str(source), "files": fingerprint(source), "model": arguments.model, "profile": arguments.profile,
        "settings": list(arguments.settings), "steps": arguments.steps,
    }  # fmt: skip
    refuse_another(out / "finetune.json", whole)
    base = out / "base/base"
    start = base if base.exists() else local_folder(arguments.model)
    told, pictures = conversion.account(start), len({sample.image_id for sample in train})
    config = settings(source, form, arguments, pictures=pictures, benchmarks=benchmarks, parameters=told.parameters)
    model = None if start == base else checkpoint.load(start)
    out.mkdir(parents=True, exist_ok=True)
    (out / "finetune.json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    if model is not None:
        checkpoint.save(model, base, metadata={"stage": "base", "source": arguments.model})
    (out / "params.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    print(
        f"{source}: {len(train)} samples to train on, {len(held_out)} held out; {config.sft.optim.steps} steps of {config.sft.optim.batch}"
    )
    if len({sample.image_id for sample in held_out}) < FEW:
        print(f'fewer than {FEW} pictures are held out: the report will hardly tell a gain from chance; give more records "split": "val"')
    return Asked(source=source, model=arguments.model, out=out, config=config)


def refuse_another(file: Path, asked: dict[str, Any]) -> None:
    """Raise ValueError if the folder holds a fine-tuning with other data, model or settings, or anything else."""
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8"))) != asked:
        changed = [f"{key} {before.get(key)!r}, now {asked[key]!r}" for key in asked if before.get(key) != asked[key]]
        raise ValueError(f"{file.parent} holds another fine-tuning ({'; '.join(changed)}); give another --out, or remove it")
    if not file.exists() and file.parent.exists() and any(file.parent.iterdir()):
        raise ValueError(f"{file.parent} is not empty and holds no fine-tuning; give another --out")


def benchmark_of(sample: Sample) -> str:
    """Return the benchmark's name, which a data set's samples of this kind have in common; it may be none."""
    return "video" if sample.task == "referring" and len(sample.frames) > 1 else sample.task


def settings(
    source: Path, form: str, arguments: argparse.Namespace, *, pictures: int, benchmarks: Sequence[str], parameters: int
) -> Config:
    """Return the settings: those of a profile for a model of this size, with this data set alone, and a number of steps that shows every
    picture about EPOCHS times."""
    profile = arguments.profile or ("tiny" if parameters < SMALL else "sa2va-4b")
    file = root() / PROFILES / f"{profile}.yaml"
    batch = min(resolve(file)["sft"]["optim"]["batch"], max(1, pictures))
    steps = arguments.steps or max(20, math.ceil(EPOCHS * pictures / batch))
    mine = {"name": source.name, "format": form, "path": str(source)}
    words = [
        f"prepare.sources=[{json.dumps(mine)}]",
        *(f"prepare.{name}=0" for name in ("scenes", "clips", "val_scenes", "test_scenes", "val_clips", "test_clips")),
        f"sft.optim.steps={steps}", f"sft.optim.batch={batch}", "sft.optim.accumulate=1", f"sft.optim.save_every={min(CHUNK, steps)}",
        "memory.train=false",
        "evaluate.sources=[]", f"evaluate.benchmarks={json.dumps(benchmarks)}", "evaluate.optional=[]", "evaluate.split=val",
        *arguments.settings,
    ]  # fmt: skip
    return Config.model_validate(resolve(file, tuple(words)))


def works(asked: Asked) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield (folder of its output, what writes it) in order."""
    folder = {name: asked.out / name for name in ("data", "base", "memory", "sft", "model", "evaluate/base", "evaluate/sft")}

    def stage(name: str, *inputs: str) -> Callable[[Path], None]:
        return lambda out: run_stage(name, asked, {key: folder[key] for key in inputs}, out)

    yield "data", stage("prepare")
    yield "memory", stage("memory", "data", "base")
    yield "evaluate/base", stage("evaluate@base", "data", "base")
    yield "sft", stage("sft", "data", "base", "memory")
    yield "evaluate/sft", stage("evaluate@sft", "data", "base", "sft")
    yield "model", lambda out: merge(folder["base"] / "base", folder["sft"], out)
    yield "report", stage("report", "data", "base", "sft", "evaluate/base", "evaluate/sft")


def run_stage(name: str, asked: Asked, inputs: dict[str, Path], out: Path) -> None:
    stage, scratch = stage_named(name), asked.out / ".scratch" / name
    scratch.mkdir(parents=True, exist_ok=True)
    more: dict[str, Any] = {"row": stage.row} if stage.row else {}
    if name == "report":
        inputs = inputs | {"versions": provenance.write(scratch / "versions.json", asked.config, {}, root())}
        more = {"rows": ("base", "sft"), "title": f"fine-tuning on {asked.source.name}"}
    stage_function(stage)(asked.config, inputs=inputs, out=out, scratch=scratch, log=lambda metrics, step: None, **more)


def merge(base: Path, sft: Path, out: Path) -> None:
    from ans_core.checkpoints import checkpoint
    from ans_core.checkpoints.trained import sft_model

    checkpoint.save(sft_model(base, sft), out, metadata={"stage": "finetune"})


def done(out: Path, work: Callable[[Path], None]) -> bool:
    """Do the work if its output is not there; it appears whole or not at all. Tell whether anything was done."""
    if out.exists():
        return False
    with written_whole(out) as partial:
        work(partial)
    return True


def estimate(asked: Asked) -> str:
    """Return what training will take, measured on MEASURED_STEPS steps in a process of its own. Raises ValueError if they fail."""
    for name, work in works(asked):
        if name in ("data", "memory"):  # a step needs them
            done(asked.out / name, work)
    command = [sys.executable, "-m", "flows.finetune", str(asked.out)]
    told = subprocess.run(command, cwd=root(), capture_output=True, text=True, check=False)
    if told.returncode:
        raise ValueError(f"a step of training failed, so nothing was begun:\n{told.stderr.strip()[-2000:]}")
    found = json.loads(told.stdout.splitlines()[-1])
    steps = asked.config.sft.optim.steps
    minutes = found["step_s"] * steps / 60
    where = "GPU memory" if found["gpu"] else "memory"
    return (
        f"estimate, from {MEASURED_STEPS} steps: {found['step_s']:.2f} s a step, {minutes:.1f} minutes of training; "
        f"{found['bytes'] / 1e9:.1f} GB of {where} ({found['total'] / 1e9:.0f} GB here). Evaluation comes before and after."
    )


def measure(out: Path) -> dict[str, float | bool]:
    """Train a few steps into a temporary folder and return seconds a step and the peak of memory."""
    import psutil
    import torch

    config = Config.model_validate(yaml.safe_load((out / "params.yaml").read_text(encoding="utf-8")))
    optim = config.sft.optim.model_copy(update={"steps": MEASURED_STEPS, "save_every": MEASURED_STEPS})
    short = config.model_copy(update={"sft": config.sft.model_copy(update={"optim": optim})})
    times: list[float] = []
    inputs = {name: out / name for name in ("data", "base", "memory")}

    def log(metrics: dict[str, float], step: int) -> None:
        if any(name.startswith("sft/") for name in metrics):
            times.append(time.monotonic())

    with tempfile.TemporaryDirectory(dir=out) as folder, redirect_stdout(sys.stderr):  # the last line of stdout is the result
        (Path(folder) / "out").mkdir()
        (Path(folder) / "scratch").mkdir()
        stage_function(stage_named("sft"))(short, inputs=inputs, out=Path(folder) / "out", scratch=Path(folder) / "scratch", log=log)
    gpu = torch.cuda.is_available()
    used = torch.cuda.max_memory_allocated() if gpu else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    total = torch.cuda.get_device_properties(0).total_memory if gpu else psutil.virtual_memory().total
    return {"step_s": (times[-1] - times[0]) / (len(times) - 1), "bytes": used, "total": total, "gpu": gpu}


if __name__ == "__main__":
    print(json.dumps(measure(Path(sys.argv[1]))))
