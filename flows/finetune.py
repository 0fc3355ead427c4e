"""`ans finetune FOLDER --model M`: labelled pictures and a checkpoint in; a fine-tuned checkpoint, evaluated
before and after, and a report out. It is the pipeline without DVC and without RL, in a folder of its own:
params.yaml and runs/ stay as they are."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from itertools import compress
from pathlib import Path

from ans_core.config import Config, DataSource
from ans_core.fingerprint import fingerprint
from ans_core.report.files import read_json
from ans_core.types import Sample
from flows.training_request import (
    CHUNK,
    IMPORTED,
    MERGED,
    Request,
    Training,
    base_of,
    benchmarks_of,
    complete_settings,
    identity_of,
    out_folder,
    planned,
    refuse_another,
    set_names,
    start_folder,
    warn_of_few,
)

EPOCHS = 10


def checked(arguments: argparse.Namespace, scratch: Path) -> Request:
    """Read and check the data set, the start model's tensors and the settings. Raises ValueError, and writes
    to `scratch` alone, for what does not fit, and for a folder that holds another fine-tuning."""
    from ans_core.checkpoints import conversion
    from ans_core.data.exports import EXPORTS
    from ans_core.data.formats import SPLITS, infer

    source = Path(arguments.folder).resolve()
    (name,) = set_names([source])
    out = out_folder(arguments, scratch, f"finetune-{source.name}")
    folder, form, imported = source, arguments.format or infer(source), None
    identity = {"source": str(source), "files": fingerprint(source), **identity_of(arguments)}
    refuse_another(out / "finetune.json", identity, FINETUNE.noun)
    if form in EXPORTS and (form not in SPLITS or not {"train", "val"} <= {*SPLITS[form](source)}):
        imported, form = scratch / IMPORTED, "annotations"
        folder = (
            out / IMPORTED
            if (out / IMPORTED).exists()
            else import_held_out(source, imported, arguments.format)
        )
    more = how_to_hold_out(source, form, imported)
    train, held_out = read_parts(folder, form, name=name, source=source, remedy=more)
    benchmarks = benchmarks_of(held_out)
    if not benchmarks:
        raise ValueError(
            f"{source}: its held-out samples are questions and answers, or half of a pair, which no "
            "benchmark compares: give it records"
            ' of objects or regions with "split": "val", or run the pipeline on it (`ans run --add-data`)'
        )
    config = settings(
        DataSource(name=name, format=form, path=str(out / IMPORTED if imported else source)),
        arguments,
        pictures=len({sample.image_id for sample in train}),
        benchmarks=benchmarks,
        parameters=conversion.parameters(base_of(start_folder(out, arguments.model))[1]),
    )
    optim = config.sft.optim
    print(
        f"{source}: {len(train)} samples to train on, {len(held_out)} held out; {optim.steps} steps of "
        f"{optim.batch}",
        flush=True,
    )
    warn_of_few(held_out, f"; {more}")
    return Request(
        training=FINETUNE,
        data=name,
        model=arguments.model,
        out=out,
        config=config,
        identity=identity,
        imported=imported,
    )


def read_parts(
    folder: Path, form: str, *, name: str, source: Path, remedy: str
) -> tuple[list[Sample], list[Sample]]:
    """Return the samples to train on and those held out. `source`: what the user named; `remedy`: how to hold
    out pictures. Raises ValueError where either are missing."""
    from ans_core import data
    from ans_core.data.formats.checks import NoSplit
    from ans_core.data.mixture import paired

    read = data.read_samples(format=form, path=folder, name=name, split="train")
    train = list(compress(read, paired(read)))
    if not train:
        raise ValueError(
            f"{source}: no record of its split 'train' has both a text and what it is about: there is "
            "nothing to fine-tune on"
        )
    try:
        return train, data.read_samples(format=form, path=folder, name=name, split="val")
    except NoSplit:
        raise ValueError(
            f"{source} has no split 'val'\nwithout held-out pictures nothing tells what was learned: {remedy}"
        ) from None


def import_held_out(source: Path, into: Path, form: str | None) -> Path:
    """Import an export, which holds out one picture in five where there is no "val"; where all is "val", so
    does this. "test" stays."""
    from ans_core.data.exports import import_export

    lines = import_export(source, into, form=form)
    print("\n".join(line for line in lines if not line.startswith("wrote")))
    file = into / "annotations.json"
    records = read_json(file)
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
    plan = planned(arguments, FINETUNE, full_size="sa2va-4b", parameters=parameters, samples=max(1, pictures))
    passes = math.ceil((plan.epochs or EPOCHS) * pictures / plan.batch)
    steps = arguments.steps or (passes if plan.epochs else max(20, passes))
    own = [f"sft.optim.save_every={min(CHUNK, steps)}"]
    return complete_settings(plan, [source], benchmarks, own, steps=steps)


FINETUNE = Training(
    name="finetune",
    noun="fine-tuning",
    stage="sft",
    rows=("base", "sft"),
    stages=("prepare", "memory", "evaluate@base", "sft", "evaluate@sft", MERGED, "report"),
    before_estimate=("prepare", "memory"),
    checked=checked,
)
