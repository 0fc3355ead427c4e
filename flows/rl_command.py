"""`ans rl --model M --data PATH`: a Sa2VA and regions with captions in; the model after RL in two loops,
evaluated before and after, and a report out. It is the pipeline without DVC and with no step of SFT, in a
folder of its own."""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ans_core.config import Config, DataSource, LoopName, Rl
from ans_core.fingerprint import fingerprint
from ans_core.types import Sample
from flows.training_request import (
    CHUNK,
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


def checked(arguments: argparse.Namespace, scratch: Path) -> Request:
    """Read and check the data, the start model and the settings. Raises ValueError for what does not fit, and
    for a folder that holds another run."""
    from ans_core.checkpoints import conversion
    from ans_core.checkpoints.trained import refuse_untaught

    paths = [Path(path).resolve() for path in arguments.data]
    names = set_names(paths)
    title = "-".join(names)
    out = out_folder(arguments, scratch, f"rl-{title}")
    identity = {
        "data": [str(path) for path in paths], "files": [fingerprint(path) for path in paths],
        "judge": arguments.judge, **identity_of(arguments),
    }  # fmt: skip
    refuse_another(out / "rl.json", identity, RL.noun)
    sets = [read_set(path, arguments.format, name=name) for path, name in zip(paths, names, strict=True)]
    stage, base = base_of(start_folder(out, arguments.model))
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
    warn_of_few(held_out)
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
    counts = loop_counts([sample for one in sets for sample in one.train])
    samples = max(counts.values())
    plan = planned(arguments, RL, full_size="sa2va-4b-rl", parameters=parameters, samples=samples)
    profile = plan.defaults.rl
    inner = plan.user_settings.get("rl.inner_steps", profile.inner_steps)
    if not isinstance(inner, int) or inner < 1:
        raise ValueError(f"rl.inner_steps = {inner!r}: give a whole number above 0")
    more = plan.user_settings.get("rl.oversample", profile.oversample)
    if not isinstance(more, int | float) or more < 0:
        raise ValueError(f"rl.oversample = {more!r}: give a number, at least 0")
    optim = profile.optim.model_copy(update={"batch": plan.batch})
    seen = profile.model_copy(update={"optim": optim, "oversample": more}).rolled_out
    # as `launch.lasting` counts them
    passes = max(1, math.ceil((plan.epochs or EPOCHS) * samples / seen)) * inner
    steps = arguments.steps or (passes if plan.epochs else min(profile.optim.steps or passes, passes))
    benchmarks = benchmarks_of(sample for one in sets for sample in one.held_out)
    benchmarks += ["loops"] if "region_caption" in benchmarks else []
    if not benchmarks:
        raise ValueError(
            "the held-out samples are none that a benchmark compares: give regions with captions, or "
            "expressions with masks"
        )
    weights = Rl().loops | profile.loops
    loops = {name: weights[name] for name in counts}
    own = [
        "base.source=published", f"base.internvl={json.dumps(arguments.model)}", "base.sam2=", "sft.optim.steps=0",
        f"sft.optim.batch={max(plan.batch, plan.processes)}", "sft.optim.accumulate=1", "sft.mixture={extra: 1.0}",
        f"rl.loops={json.dumps(loops)}", f"rl.rows={plan.batch if profile.rows else 0}",
        f"rl.optim.save_every={math.ceil(min(CHUNK, steps) / inner) * inner}",
        "rl.use_llm_judge=false", "rl.use_llm_judge_loop2=false",
        *judge_words(arguments.judge, plan.user_settings),
    ]  # fmt: skip
    return complete_settings(plan, [one.source for one in sets], benchmarks, own, steps=steps)


def loop_counts(samples: Sequence[Sample]) -> dict[LoopName, int]:
    """Return the loops `caption`, `mask` and `refer` that the data have samples for, with their numbers.
    Raises ValueError if there is none."""
    from ans_core.rl.dual_loop import LOOPS

    names: tuple[LoopName, ...] = ("caption", "mask", "refer")
    counts = {name: sum(map(LOOPS[name].takes, samples)) for name in names}
    if not any(counts.values()):
        raise ValueError(
            f"the data have no samples for a loop of RL: caption and mask want {LOOPS['caption'].wants}, "
            f"refer wants {LOOPS['refer'].wants}"
        )
    return {name: count for name, count in counts.items() if count}


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


RL = Training(
    name="rl",
    noun="RL",
    stage="rl",
    rows=("sft", "rl"),
    stages=(
        "prepare",
        "memory",
        "sft",
        "judge_questions",
        "evaluate@sft",
        "rl",
        "convert",
        "evaluate@rl",
        "report",
    ),
    before_estimate=("prepare", "memory", "sft"),
    checked=checked,
)  # fmt: skip
