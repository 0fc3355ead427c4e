"""`ans rl --model M --data PATH`: a Sa2VA and regions with captions in; the model after RL in two loops,
evaluated before and after, and a report out. It is the pipeline without DVC and with no step of SFT, in a
folder of its own."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ans_core.config import PROFILES, Config, DataSource, Rl, resolve
from ans_core.fingerprint import fingerprint
from ans_core.types import Sample
from flows.paths import root
from flows.short_training import (
    CHUNK,
    FEW,
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

EPOCHS = 3
"""Most passes over the data without --steps or epochs; the profile's steps may be fewer."""
HELD_OUT, MOST_HELD_OUT = 200, 0.2
"""Pictures that are held out of a set without a split `val`, and the most of its pictures that these may
be."""


@dataclass(frozen=True, kw_only=True)
class ReadSet:
    """A data set that was read and checked."""

    source: DataSource
    train: list[Sample]
    held_out: list[Sample]


def rl(arguments: argparse.Namespace) -> int:
    """Train as the command line says; a killed run goes on where it stopped."""
    return train(arguments, RL, checked)


def checked(arguments: argparse.Namespace, scratch: Path) -> Request:
    """Read and check the data, the start model and the settings. Raises ValueError for what does not fit, and
    for a folder that holds another run."""
    from ans_core.checkpoints import conversion
    from ans_core.checkpoints.folder import local_folder
    from ans_core.checkpoints.trained import refuse_untaught

    paths = [Path(path).resolve() for path in arguments.data]
    names = set_names(paths)
    title = "-".join(names)
    out = (
        scratch / "out"
        if arguments.estimate
        else Path(arguments.out or root() / "runs" / f"rl-{title}").resolve()
    )
    identity = {
        "data": [str(path) for path in paths], "files": [fingerprint(path) for path in paths],
        "model": arguments.model, "judge": arguments.judge, "profile": arguments.profile,
        "settings": list(arguments.settings), "steps": arguments.steps,
    }  # fmt: skip
    refuse_another(out / "rl.json", identity, RL.noun)
    sets = [read_set(path, arguments.format, name=name) for path, name in zip(paths, names, strict=True)]
    start = out / "base/base" if (out / "base/base").exists() else local_folder(arguments.model)
    stage, base = base_of(start)
    parameters = conversion.parameters(base)  # raises for what is no Sa2VA
    if stage not in {"sft", "rl"}:
        refuse_untaught(base)
    config = settings(sets, arguments, parameters=parameters)
    optim, held_out = config.rl.optim, [sample for one in sets for sample in one.held_out]
    counts = f"{sum(len(one.train) for one in sets)} samples to train on, {len(held_out)} held out"
    print(
        f"{', '.join(map(str, paths))}: {counts}; loops {', '.join(config.rl.loops)}; {optim.steps} steps "
        f"of {optim.batch}",
        flush=True,
    )
    if len({sample.image_id for sample in held_out}) < FEW:
        print(
            f"fewer than {FEW} pictures are held out: the report will hardly tell a gain from chance",
            flush=True,
        )
    return Request(training=RL, data=title, model=arguments.model, out=out, config=config, identity=identity)


def read_set(path: Path, form: str | None, *, name: str) -> ReadSet:
    """Read a data set: its split `train`, or, where it has none, all but `val` and `test`. A share of the
    pictures is held out of one without a split `val`. Raises ValueError for one that training does not read,
    and where nothing is held out."""
    from ans_core import data
    from ans_core.data.formats import SPLITS, training_format

    form = form or training_format(path)
    present = SPLITS[form](path) if form in SPLITS and path.exists() else []
    split: str | tuple[str, ...] = "train" if "train" in present or not present else ("*",)
    samples = data.read_samples(format=form, path=path, name=name, split=split)
    source = DataSource(name=name, format=form, path=str(path), split=split)
    if "val" in present:
        return ReadSet(
            source=source,
            train=samples,
            held_out=data.read_samples(format=form, path=path, name=name, split="val"),
        )
    pictures = len({sample.image_id for sample in samples})
    share = min(MOST_HELD_OUT, max(0.01, HELD_OUT / max(1, pictures)))
    parts: dict[bool, list[Sample]] = {False: [], True: []}
    for sample in samples:
        parts[data.is_held_out(sample.image_id, share=share)].append(sample)
    if not (parts[True] and parts[False]):
        raise ValueError(
            f"{path} has no split 'val', and {pictures} pictures are too few to hold some out: add some, or "
            "a split 'val'"
        )
    return ReadSet(
        source=source.model_copy(update={"hold_out": share}), train=parts[False], held_out=parts[True]
    )


def settings(sets: Sequence[ReadSet], arguments: argparse.Namespace, *, parameters: int) -> Config:
    """Return the settings: those of a profile for a model of this size, with these data sets alone, the loops
    that they have samples for, and as many steps as the profile says, or as EPOCHS take if these are
    fewer."""
    profile = arguments.profile or ("tiny" if parameters < SMALL else "sa2va-4b-rl")
    file = root() / PROFILES / f"{profile}.yaml"
    defaults = Config.model_validate(resolve(file))
    of_profile = defaults.rl
    train = [sample for one in sets for sample in one.train]
    loops, samples = loops_of(train, of_profile)
    epochs, user_settings, words = length(arguments.settings, section="rl", steps=arguments.steps)
    batch = user_settings.get("rl.optim.batch", min(of_profile.optim.batch, samples))
    inner = user_settings.get("rl.inner_steps", of_profile.inner_steps)
    if not isinstance(inner, int) or inner < 1:
        raise ValueError(f"rl.inner_steps = {inner!r}: give a whole number above 0")
    # as `launch.lasting` counts them
    passes = max(1, math.ceil((epochs or EPOCHS) * samples / batch)) * inner
    steps = arguments.steps or (passes if epochs else min(of_profile.optim.steps or passes, passes))
    sources = [
        one.source.model_dump(mode="json", include={"name", "format", "path", "split", "hold_out"})
        for one in sets
    ]
    benchmarks = benchmarks_of(sample for one in sets for sample in one.held_out)
    benchmarks += ["loops"] if "region_caption" in benchmarks else []
    if not benchmarks:
        raise ValueError(
            "the held-out samples are none that a benchmark compares: give regions with captions, or "
            "expressions with masks"
        )
    of_machine = launch_words(batch, user_settings, command="rl")
    count = int(user_settings.get("launch.processes", of_machine["launch.processes"]))
    accumulate = accumulated(batch, count, of_profile.optim, processes=defaults.launch.processes)
    ours = [
        f"prepare.sources={json.dumps(sources)}",
        *(f"prepare.{name}=0" for name in ("scenes", "clips", "val_scenes", "test_scenes", "val_clips", "test_clips")),
        "base.source=published", f"base.internvl={json.dumps(arguments.model)}", "base.sam2=",
        "memory.train=false", "sft.optim.steps=0",
        f"sft.optim.batch={max(batch, count)}", "sft.optim.accumulate=1", "sft.mixture={extra: 1.0}",
        f"rl.loops={json.dumps(loops)}", f"rl.optim.steps={steps}", f"rl.optim.batch={batch}",
        f"rl.optim.accumulate={accumulate}",
        f"rl.optim.save_every={math.ceil(min(CHUNK, steps) / inner) * inner}",
        f"rl.rows={batch if of_profile.rows else 0}",
        "rl.use_llm_judge=false", "rl.use_llm_judge_loop2=false", *judge_words(arguments.judge, user_settings),
        "evaluate.sources=[]", f"evaluate.benchmarks={json.dumps(benchmarks)}", "evaluate.optional=[]",
        "evaluate.split=val",
        *(f"{key}={value}" for key, value in of_machine.items()),
    ]  # fmt: skip
    return Config.model_validate(resolve(file, (*ours, *words)))


def loops_of(samples: Sequence[Sample], settings: Rl) -> tuple[dict[str, float], int]:
    """Return the loops `caption`, `mask` and `refer` that the data have samples for, with their weights, and
    the number of samples of the largest. Raises ValueError if there is none."""
    from ans_core.rl.dual_loop import LOOPS

    weights = Rl().loops | settings.loops
    counts = {name: sum(map(LOOPS[name].takes, samples)) for name in ("caption", "mask", "refer")}
    loops = {name: weights[name] for name, count in counts.items() if count}  # type: ignore[index]
    if not loops:
        raise ValueError(
            f"the data have no samples for a loop of RL: caption and mask want {LOOPS['caption'].wants}, "
            f"refer wants {LOOPS['refer'].wants}"
        )
    return loops, max(counts.values())


def judge_words(url: str | None, user_settings: dict[str, object]) -> list[str]:
    """Return the settings of a judge at an OpenAI-compatible endpoint, whose only model is taken where none
    is named; none without a `url`. Raises ValueError for an endpoint that does not answer or has several."""
    if not url:
        return []
    words = ["rl.use_llm_judge=true", f"judge.base_url={json.dumps(url)}"]
    if "judge.model" in user_settings:
        return words
    from openai import OpenAI, OpenAIError

    try:
        key = os.environ.get(str(user_settings.get("judge.api_key_env", "OPENAI_API_KEY"))) or "none"
        models = [
            model.id for model in OpenAI(base_url=url, api_key=key, timeout=30.0, max_retries=1).models.list()
        ]
    except OpenAIError as error:
        raise ValueError(
            f"--judge {url}: it does not tell its models ({error}); name one (judge.model=NAME), or correct "
            "the URL"
        ) from error
    if len(models) != 1:
        raise ValueError(
            f"--judge {url} has {len(models)} models {models[:5]}; name one of them: judge.model=NAME"
        )
    return [*words, f"judge.model={json.dumps(models[0])}"]


def works(request: Request) -> Iterator[tuple[str, Work]]:
    """Yield (folder of its output, what writes it) in order."""
    yield "data", stage_work(request, "prepare")
    yield "memory", stage_work(request, "memory", "data", "base")
    yield "sft", stage_work(request, "sft", "data", "base", "memory")
    yield "questions", stage_work(request, "judge_questions", "data")
    yield "evaluate/sft", stage_work(request, "evaluate@sft", "data", "base", "sft")
    yield "rl", stage_work(request, "rl", "data", "base", "sft", "questions")
    yield "model", stage_work(request, "convert", "data", "base", "sft", "rl")
    yield "evaluate/rl", stage_work(request, "evaluate@rl", "data", "base", "sft", "model")
    yield "report", stage_work(request, "report", "data", "base", "sft", "rl", "evaluate/sft", "evaluate/rl")


RL = Training(
    name="rl",
    noun="RL",
    stage="rl",
    rows=("sft", "rl"),
    works=works,
    before_estimate=("data", "memory", "sft"),
)
