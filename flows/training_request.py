"""What `ans finetune` and `ans rl` share before they train: command line, data and start model in, a checked
request with complete settings out."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any, Literal

from ans_core.config import PROFILES, Config, DataSource, resolve, setting
from ans_core.config.names import DATA_KINDS
from ans_core.report.files import read_json
from ans_core.types import Sample
from flows.paths import root

SMALL = 100_000_000
"""Parameters of a model that gets the settings of the profile `tiny`."""
FEW = 4
"""Held-out pictures from which on a comparison is worth more than a glance."""
CHUNK = 25
"""Steps between resumable states."""
IMPORTED = "imported"
"""Folder of what an export became that holds nothing out itself."""
MERGED = "model"
"""In place of a stage: SFT's tensors merged into the base, and the folder of that."""
DRAWN = ("scenes", "clips", "val_scenes", "test_scenes", "val_clips", "test_clips")


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
    stages: tuple[str, ...]
    """In order; MERGED is one of them where `convert` is not."""
    before_estimate: tuple[str, ...]
    """Those that a step of training needs."""
    checked: Callable[[argparse.Namespace, Path], Request]
    """Reads and checks what the command line names; it writes to the folder alone. Raises ValueError for what does
    not fit, and for an --out that holds another training."""


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


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The profile of a training, what the command line says of its steps, and its share of this machine."""

    stage: Literal["sft", "rl"]
    profile: Path
    defaults: Config
    """Those of the profile."""
    epochs: float | None
    """That the settings ask for."""
    user_settings: dict[str, Any]
    words: tuple[str, ...]
    """The user's settings without the epochs."""
    batch: int
    launch: dict[str, str]

    @property
    def processes(self) -> int:
        return int(self.user_settings.get("launch.processes", self.launch["launch.processes"]))


def planned(
    arguments: argparse.Namespace, training: Training, *, full_size: str, parameters: int, samples: int
) -> Plan:
    """Plan the training of a model of this size on so many samples. full_size: the profile of a model that is
    not small. Raises ValueError for settings that the command can't have."""
    profile = arguments.profile or ("tiny" if parameters < SMALL else full_size)
    file = root() / PROFILES / f"{profile}.yaml"
    defaults = Config.model_validate(resolve(file))
    epochs, user_settings, words = length(arguments.settings, section=training.stage, steps=arguments.steps)
    usual = min(getattr(defaults, training.stage).optim.batch, samples)
    batch = user_settings.get(f"{training.stage}.optim.batch", usual)
    return Plan(
        stage=training.stage, profile=file, defaults=defaults, epochs=epochs, user_settings=user_settings,
        words=words, batch=batch, launch=launch_words(batch, user_settings, command=training.name),
    )  # fmt: skip


def complete_settings(
    plan: Plan, sources: Sequence[DataSource], benchmarks: Sequence[str], own: Sequence[str], *, steps: int
) -> Config:
    """Return the profile's settings with these data sets alone, so many steps, the command's `own` words, and
    the user's over all of them."""
    optim = getattr(plan.defaults, plan.stage).optim
    # each process computes as many samples at once as one of the profile's, which fit its memory
    at_once = math.ceil(optim.batch / optim.accumulate / plan.defaults.launch.processes)
    accumulate = max(1, math.ceil(plan.batch / plan.processes) // at_once)
    shown = {"name", "format", "path", "split", "hold_out"}
    listed = [source.model_dump(mode="json", include=shown) for source in sources]
    words = [
        f"prepare.sources={json.dumps(listed)}", *(f"prepare.{name}=0" for name in DRAWN), "memory.train=false",
        f"{plan.stage}.optim.steps={steps}", f"{plan.stage}.optim.batch={plan.batch}",
        f"{plan.stage}.optim.accumulate={accumulate}", "evaluate.sources=[]", "evaluate.optional=[]",
        f"evaluate.benchmarks={json.dumps(benchmarks)}", "evaluate.split=val",
        *(f"{key}={value}" for key, value in plan.launch.items()), *own, *plan.words,
    ]  # fmt: skip
    return Config.model_validate(resolve(plan.profile, tuple(words)))


def out_folder(arguments: argparse.Namespace, scratch: Path, name: str) -> Path:
    """Return where the results go; those of an estimate are not kept."""
    if arguments.estimate:
        return scratch / "out"
    return Path(arguments.out or root() / "runs" / name).resolve()


def identity_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what of the command line tells a training from others on the same data."""
    names = ("model", "profile", "settings", "steps", "format")
    return {name: getattr(arguments, name) for name in names}


def start_folder(out: Path, model: str) -> Path:
    """Return the start model's folder: a copy in `out` of an earlier start goes before."""
    from ans_core.checkpoints.folder import local_folder

    return out / "base/base" if (out / "base/base").exists() else local_folder(model)


def warn_of_few(held_out: Iterable[Sample], remedy: str = "") -> None:
    if len({sample.image_id for sample in held_out}) < FEW:
        print(
            f"fewer than {FEW} pictures are held out: the report will hardly tell a gain from chance{remedy}",
            flush=True,
        )


def refuse_another(file: Path, identity: Mapping[str, Any], noun: str) -> None:
    """Raise ValueError if the folder holds a training with other data, model or settings, or anything
    else."""
    before = read_json(file) if file.exists() else identity
    if changed := [
        f"{key} {before.get(key)!r}, now {value!r}"
        for key, value in identity.items()
        if before.get(key) != value
    ]:
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
