"""`ans finetune FOLDER --model M`: labelled pictures and a checkpoint in; a fine-tuned checkpoint, evaluated before and after, and a report
out. It is the pipeline without DVC and without RL, in a folder of its own: params.yaml and runs/ stay as they are."""

from __future__ import annotations

import argparse
import json
import math
import resource
import shutil
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
from ans_core.config import PROFILES, Config, DataSource, resolve
from ans_core.fingerprint import fingerprint
from ans_core.types import Sample
from ans_core.written import written_whole
from flows.paths import root
from tasks import provenance
from tasks.process import held, holder_of
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
IMPORTED = "imported"
"""Folder of what an export became that holds nothing out itself."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A fine-tuning whose data, model and settings are checked."""

    source: Path
    model: str
    out: Path
    config: Config
    identity: dict[str, Any]
    """What finetune.json holds: a folder is of one fine-tuning."""
    imported: Path | None
    """Where `source` was imported to, if its own files hold nothing out."""


def finetune(arguments: argparse.Namespace) -> int:
    """Fine-tune as the command line says; a killed run goes on where it stopped. An estimate waits for nobody and leaves nothing behind."""
    lock = root() / ".ans/stage.lock"
    lock.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="finetune-", dir=lock.parent) as scratch:
        request = checked(arguments, Path(scratch))
        if arguments.estimate:
            if holder := holder_of(lock):
                print(f"{holder} is at work here: the estimate is of a machine that both share")
            begin(request)
            print(estimate(request))
            return 0
        with held(lock, "ans finetune"):
            begin(request)
            if not (request.out / "sft").exists():
                print(estimate(request), flush=True)
            for name, work in works(request):
                begin_s = time.monotonic()
                ran = done(request.out / name, work)
                print(f"{name}: {f'{time.monotonic() - begin_s:.0f} s' if ran else 'was there'}", flush=True)
    print("\n".join(["", *gains(request.out / "evaluate"), ""]))
    print(f"model:  {request.out / 'model'}\nreport: {request.out / 'report/report.html'}")
    print(f'try it: ans predict PICTURE "Please segment the ... in this image." --model {request.out / "model"}')
    return 0


def checked(arguments: argparse.Namespace, scratch: Path) -> Request:
    """Read and check the data set, the start model's tensors and the settings. Raises ValueError, and writes to `scratch` alone, for what
    does not fit, and for a folder that holds another fine-tuning."""
    from ans_core import data
    from ans_core.checkpoints import conversion
    from ans_core.checkpoints.folder import local_folder
    from ans_core.data.exports import EXPORTS
    from ans_core.data.formats import SPLITS, infer
    from ans_core.data.formats.checks import NoSplit
    from ans_core.data.mixture import paired

    source = Path(arguments.folder).resolve()
    out = scratch / "out" if arguments.estimate else Path(arguments.out or root() / "runs" / f"finetune-{source.name}").resolve()
    folder, form, imported = source, arguments.format or infer(source), None
    identity = {
        "source": str(source), "files": fingerprint(source), "model": arguments.model, "profile": arguments.profile,
        "settings": list(arguments.settings), "steps": arguments.steps,
    }  # fmt: skip
    refuse_another(out / "finetune.json", identity)
    if form in EXPORTS and (form not in SPLITS or not {"train", "val"} <= {*SPLITS[form](source)}):
        imported, form = scratch / IMPORTED, "annotations"
        folder = out / IMPORTED if (out / IMPORTED).exists() else import_held_out(source, imported, arguments.format)
    read = data.read_samples(format=form, path=folder, name=source.name, split="train")
    train = list(compress(read, paired(read)))
    if not train:
        raise ValueError(f"{source}: no record of its split 'train' has both a text and what it is about: there is nothing to fine-tune on")
    more = how_to_hold_out(source, form, imported)
    try:
        held_out = data.read_samples(format=form, path=folder, name=source.name, split="val")
    except NoSplit:
        raise ValueError(f"{source} has no split 'val'\nwithout held-out pictures nothing tells what was learned: {more}") from None
    benchmarks = sorted({benchmark_of(sample) for sample in held_out} & BENCHMARKS.keys())
    if not benchmarks:
        raise ValueError(
            f"{source}: its held-out samples are questions and answers, or half of a pair, which no benchmark compares: give it records"
            ' of objects or regions with "split": "val", or run the pipeline on it (`ans run --add-data`)'
        )
    start = out / "base/base" if (out / "base/base").exists() else local_folder(arguments.model)
    config = settings(
        DataSource(name=source.name, format=form, path=str(out / IMPORTED if imported else source)),
        arguments,
        pictures=len({sample.image_id for sample in train}),
        benchmarks=benchmarks,
        parameters=conversion.parameters(start),
    )
    optim = config.sft.optim
    print(f"{source}: {len(train)} samples to train on, {len(held_out)} held out; {optim.steps} steps of {optim.batch}", flush=True)
    if len({sample.image_id for sample in held_out}) < FEW:
        print(f"fewer than {FEW} pictures are held out: the report will hardly tell a gain from chance; {more}", flush=True)
    return Request(source=source, model=arguments.model, out=out, config=config, identity=identity, imported=imported)


def import_held_out(source: Path, into: Path, form: str | None) -> Path:
    """Import an export, which holds out one picture in five where there is no "val"; where all is "val", so does this. "test" stays."""
    from ans_core.data.exports import import_export

    lines = import_export(source, into, form=form)
    print("\n".join(line for line in lines if not line.startswith("wrote")))
    file = into / "annotations.json"
    records = json.loads(file.read_text(encoding="utf-8"))
    splits = {record.get("split") for record in records}
    if "val" in splits and "train" not in splits:
        for record in records:
            if record.get("split") == "val":
                del record["split"]
        file.write_text(json.dumps(records, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
        print(f"{source.name} has nothing to train on but what it holds out: one picture in five is held out, by a hash of its name")
    return into


def how_to_hold_out(source: Path, form: str, imported: Path | None) -> str:
    """Return what the user can do for more held-out pictures."""
    if imported:
        return f'`ans data import {source} --out DIR`, give some records of DIR/annotations.json "split": "val", and fine-tune on DIR'
    if form == "annotations":
        return 'give some records "split": "val"'
    return f"put pictures of a split 'val' beside the others, as the format {form!r} has them (docs/your-data.md)"


def begin(request: Request) -> None:
    """Make the folder this fine-tuning's: its identity, start model, imported data and settings. Raises ValueError if it is another's, and
    writes nothing for a model that can't be loaded."""
    from ans_core.checkpoints import checkpoint
    from ans_core.checkpoints.folder import local_folder

    out, base = request.out, request.out / "base/base"
    refuse_another(out / "finetune.json", request.identity)  # another one may have begun while this one waited
    model = None if base.exists() else checkpoint.load(local_folder(request.model))
    out.mkdir(parents=True, exist_ok=True)
    (out / "finetune.json").write_text(json.dumps(request.identity, indent=1) + "\n", encoding="utf-8")
    if request.imported and not (out / IMPORTED).exists():
        with written_whole(out / IMPORTED) as partial:
            for part in request.imported.iterdir():
                shutil.move(part, partial)
    if model is not None:
        checkpoint.save(model, base, metadata={"stage": "base", "source": request.model})
    (out / "params.yaml").write_text(yaml.safe_dump(request.config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")


def refuse_another(file: Path, identity: dict[str, Any]) -> None:
    """Raise ValueError if the folder holds a fine-tuning with other data, model or settings, or anything else."""
    if file.exists() and (before := json.loads(file.read_text(encoding="utf-8"))) != identity:
        changed = [f"{key} {before.get(key)!r}, now {value!r}" for key, value in identity.items() if before.get(key) != value]
        raise ValueError(f"{file.parent} holds another fine-tuning ({'; '.join(changed)}); give another --out, or remove it")
    if not file.exists() and file.parent.exists() and any(file.parent.iterdir()):
        raise ValueError(f"{file.parent} is not empty and holds no fine-tuning; give another --out")


def benchmark_of(sample: Sample) -> str:
    """Return the benchmark's name, which a data set's samples of this kind have in common; it may be none."""
    return "video" if sample.task == "referring" and len(sample.frames) > 1 else sample.task


def settings(source: DataSource, arguments: argparse.Namespace, *, pictures: int, benchmarks: Sequence[str], parameters: int) -> Config:
    """Return the settings: those of a profile for a model of this size, with this data set alone, and a number of steps that shows every
    picture about EPOCHS times."""
    profile = arguments.profile or ("tiny" if parameters < SMALL else "sa2va-4b")
    file = root() / PROFILES / f"{profile}.yaml"
    batch = min(resolve(file)["sft"]["optim"]["batch"], max(1, pictures))
    steps = arguments.steps or max(20, math.ceil(EPOCHS * pictures / batch))
    words = [
        f"prepare.sources=[{json.dumps(source.model_dump(mode='json', include={'name', 'format', 'path'}))}]",
        *(f"prepare.{name}=0" for name in ("scenes", "clips", "val_scenes", "test_scenes", "val_clips", "test_clips")),
        f"sft.optim.steps={steps}", f"sft.optim.batch={batch}", "sft.optim.accumulate=1", f"sft.optim.save_every={min(CHUNK, steps)}",
        "memory.train=false",
        "evaluate.sources=[]", f"evaluate.benchmarks={json.dumps(benchmarks)}", "evaluate.optional=[]", "evaluate.split=val",
        *arguments.settings,
    ]  # fmt: skip
    return Config.model_validate(resolve(file, tuple(words)))


def works(request: Request) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Yield (folder of its output, what writes it) in order."""
    folder = {name: request.out / name for name in ("data", "base", "memory", "sft", "model", "evaluate/base", "evaluate/sft")}

    def stage(name: str, *inputs: str) -> Callable[[Path], None]:
        return lambda out: run_stage(name, request, {key: folder[key] for key in inputs}, out)

    yield "data", stage("prepare")
    yield "memory", stage("memory", "data", "base")
    yield "evaluate/base", stage("evaluate@base", "data", "base")
    yield "sft", stage("sft", "data", "base", "memory")
    yield "evaluate/sft", stage("evaluate@sft", "data", "base", "sft")
    yield "model", lambda out: merge(folder["base"] / "base", folder["sft"], out)
    yield "report", stage("report", "data", "base", "sft", "evaluate/base", "evaluate/sft")


def run_stage(name: str, request: Request, inputs: dict[str, Path], out: Path) -> None:
    stage, scratch = stage_named(name), request.out / ".scratch" / name
    scratch.mkdir(parents=True, exist_ok=True)
    more: dict[str, Any] = {"row": stage.row} if stage.row else {}
    if name == "report":
        inputs = inputs | {"versions": provenance.write(scratch / "versions.json", request.config, {}, root())}
        more = {"rows": ("base", "sft"), "title": f"fine-tuning on {request.source.name}"}
    stage_function(stage)(request.config, inputs=inputs, out=out, scratch=scratch, log=lambda metrics, step: None, **more)


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


def gains(evaluated: Path) -> list[str]:
    """Return the table of what fine-tuning changed on the held-out pictures."""
    from ans_core.report.changes import changes, read_answers
    from ans_core.report.files import read_json
    from flows.compare import change_table

    rows = {"base": "before", "sft": "after"}
    summary = {name: read_json(evaluated / row / "metrics.json") for row, name in rows.items()}
    answers = {name: read_answers(evaluated / row) for row, name in rows.items()}
    return ["held-out pictures, before and after", *change_table(changes(summary, answers, "before", "after"))]


def estimate(request: Request) -> str:
    """Return what training will take, measured on MEASURED_STEPS steps in a process of its own. Raises ValueError if they fail."""
    for name, work in works(request):
        if name in ("data", "memory"):  # a step needs them
            done(request.out / name, work)
    command = [sys.executable, "-m", "flows.finetune", str(request.out)]
    trial = subprocess.run(command, cwd=root(), capture_output=True, text=True, check=False)
    if trial.returncode:
        raise ValueError(f"a step of training failed, so nothing was trained:\n{trial.stderr.strip()[-2000:]}")
    measured = json.loads(trial.stdout.splitlines()[-1])
    steps = request.config.sft.optim.steps
    minutes = measured["step_s"] * steps / 60
    where = "GPU memory" if measured["gpu"] else "memory"
    return (
        f"estimate, from {MEASURED_STEPS} steps: {measured['step_s']:.2f} s a step, {minutes:.1f} minutes of training; "
        f"{measured['bytes'] / 1e9:.1f} GB of {where} ({measured['total'] / 1e9:.0f} GB here). Evaluation comes before and after."
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
