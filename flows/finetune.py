"""`ans finetune FOLDER --model M`: labelled pictures and a checkpoint in; a fine-tuned checkpoint, evaluated
before and after, and a report out. It is the pipeline without DVC and without RL, in a folder of its own:
params.yaml and runs/ stay as they are."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path

from ans_core.config import PROFILES, Config, DataSource, resolve
from ans_core.fingerprint import fingerprint
from flows.paths import root
from flows.short_training import (
    CHUNK,
    FEW,
    IMPORTED,
    SMALL,
    Request,
    Training,
    Work,
    accumulated,
    base_of,
    benchmarks_of,
    launch_words,
    length,
    refuse_another,
    set_names,
    stage_work,
    train,
)

EPOCHS = 10


def finetune(arguments: argparse.Namespace) -> int:
    """Fine-tune as the command line says; a killed run goes on where it stopped."""
    return train(arguments, FINETUNE, checked)


def checked(arguments: argparse.Namespace, scratch: Path) -> Request:
    """Read and check the data set, the start model's tensors and the settings. Raises ValueError, and writes
    to `scratch` alone, for what does not fit, and for a folder that holds another fine-tuning."""
    from ans_core import data
    from ans_core.checkpoints import conversion
    from ans_core.checkpoints.folder import local_folder
    from ans_core.data.exports import EXPORTS
    from ans_core.data.formats import SPLITS, infer
    from ans_core.data.formats.checks import NoSplit
    from ans_core.data.mixture import paired

    source = Path(arguments.folder).resolve()
    (name,) = set_names([source])
    out = (
        scratch / "out"
        if arguments.estimate
        else Path(arguments.out or root() / "runs" / f"finetune-{source.name}").resolve()
    )
    folder, form, imported = source, arguments.format or infer(source), None
    identity = {
        "source": str(source), "files": fingerprint(source), "model": arguments.model,
        "profile": arguments.profile, "settings": list(arguments.settings), "steps": arguments.steps,
    }  # fmt: skip
    refuse_another(out / "finetune.json", identity, FINETUNE.noun)
    if form in EXPORTS and (form not in SPLITS or not {"train", "val"} <= {*SPLITS[form](source)}):
        imported, form = scratch / IMPORTED, "annotations"
        folder = (
            out / IMPORTED
            if (out / IMPORTED).exists()
            else import_held_out(source, imported, arguments.format)
        )
    read = data.read_samples(format=form, path=folder, name=name, split="train")
    train = list(compress(read, paired(read)))
    if not train:
        raise ValueError(
            f"{source}: no record of its split 'train' has both a text and what it is about: there is "
            "nothing to fine-tune on"
        )
    more = how_to_hold_out(source, form, imported)
    try:
        held_out = data.read_samples(format=form, path=folder, name=name, split="val")
    except NoSplit:
        raise ValueError(
            f"{source} has no split 'val'\nwithout held-out pictures nothing tells what was learned: {more}"
        ) from None
    benchmarks = benchmarks_of(held_out)
    if not benchmarks:
        raise ValueError(
            f"{source}: its held-out samples are questions and answers, or half of a pair, which no "
            "benchmark compares: give it records"
            ' of objects or regions with "split": "val", or run the pipeline on it (`ans run --add-data`)'
        )
    start = out / "base/base" if (out / "base/base").exists() else local_folder(arguments.model)
    config = settings(
        DataSource(name=name, format=form, path=str(out / IMPORTED if imported else source)),
        arguments,
        pictures=len({sample.image_id for sample in train}),
        benchmarks=benchmarks,
        parameters=conversion.parameters(base_of(start)[1]),
    )
    optim = config.sft.optim
    print(
        f"{source}: {len(train)} samples to train on, {len(held_out)} held out; {optim.steps} steps of "
        f"{optim.batch}",
        flush=True,
    )
    if len({sample.image_id for sample in held_out}) < FEW:
        print(
            f"fewer than {FEW} pictures are held out: the report will hardly tell a gain from chance; {more}",
            flush=True,
        )
    return Request(
        training=FINETUNE,
        data=name,
        model=arguments.model,
        out=out,
        config=config,
        identity=identity,
        imported=imported,
    )


def import_held_out(source: Path, into: Path, form: str | None) -> Path:
    """Import an export, which holds out one picture in five where there is no "val"; where all is "val", so
    does this. "test" stays."""
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
        print(
            f"{source.name} has nothing to train on but what it holds out: one picture in five is held out, "
            "by a hash of its name"
        )
    return into


def how_to_hold_out(source: Path, form: str, imported: Path | None) -> str:
    """Return what the user can do for more held-out pictures."""
    if imported:
        return f'`ans data import {source} --out DIR`, give some records of DIR/annotations.json "split": "val", and fine-tune on DIR'
    if form == "annotations":
        return 'give some records "split": "val"'
    return (
        f"put pictures of a split 'val' beside the others, as the format {form!r} has them "
        "(docs/your-data.md)"
    )


def settings(
    source: DataSource,
    arguments: argparse.Namespace,
    *,
    pictures: int,
    benchmarks: Sequence[str],
    parameters: int,
) -> Config:
    """Return the settings: those of a profile for a model of this size, with this data set alone, and a
    number of steps that shows every picture about EPOCHS times."""
    profile = arguments.profile or ("tiny" if parameters < SMALL else "sa2va-4b")
    file = root() / PROFILES / f"{profile}.yaml"
    defaults = Config.model_validate(resolve(file))
    of_profile = defaults.sft.optim
    epochs, user_settings, user_words = length(arguments.settings, section="sft", steps=arguments.steps)
    batch = user_settings.get("sft.optim.batch", min(of_profile.batch, max(1, pictures)))
    steps = arguments.steps or (
        math.ceil(epochs * pictures / batch) if epochs else max(20, math.ceil(EPOCHS * pictures / batch))
    )
    of_machine = launch_words(batch, user_settings, command="finetune")
    count = int(user_settings.get("launch.processes", of_machine["launch.processes"]))
    accumulate = accumulated(batch, count, of_profile, processes=defaults.launch.processes)
    words = [
        f"prepare.sources=[{json.dumps(source.model_dump(mode='json', include={'name', 'format', 'path'}))}]",
        *(f"prepare.{name}=0" for name in ("scenes", "clips", "val_scenes", "test_scenes", "val_clips", "test_clips")),
        f"sft.optim.steps={steps}", f"sft.optim.batch={batch}", f"sft.optim.accumulate={accumulate}",
        f"sft.optim.save_every={min(CHUNK, steps)}",
        "memory.train=false", *(f"{key}={value}" for key, value in of_machine.items()),
        "evaluate.sources=[]", f"evaluate.benchmarks={json.dumps(benchmarks)}", "evaluate.optional=[]",
        "evaluate.split=val",
        *user_words,
    ]  # fmt: skip
    return Config.model_validate(resolve(file, tuple(words)))


def works(request: Request) -> Iterator[tuple[str, Work]]:
    """Yield (folder of its output, what writes it) in order."""
    out = request.out
    yield "data", stage_work(request, "prepare")
    yield "memory", stage_work(request, "memory", "data", "base")
    yield "evaluate/base", stage_work(request, "evaluate@base", "data", "base")
    yield "sft", stage_work(request, "sft", "data", "base", "memory")
    yield "evaluate/sft", stage_work(request, "evaluate@sft", "data", "base", "sft")
    yield "model", lambda model: merge(out / "base/base", out / "sft", model)
    yield "report", stage_work(request, "report", "data", "base", "sft", "evaluate/base", "evaluate/sft")


def merge(base: Path, sft: Path, out: Path) -> None:
    from ans_core.checkpoints import checkpoint
    from ans_core.checkpoints.trained import sft_model

    checkpoint.save(sft_model(base, sft), out, metadata={"stage": "finetune"})


FINETUNE = Training(
    name="finetune",
    noun="fine-tuning",
    stage="sft",
    rows=("base", "sft"),
    works=works,
    before_estimate=("data", "memory"),
)
