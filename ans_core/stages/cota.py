"""cota: the model that the agent starts from, and annotated pictures (`agent.sources`), in; traces of
thoughts, calls and observations out, made by its own operations, and the questions about the pictures.

    dvc repro agent/dvc.yaml:cota

Writes `train` and `val`, each a folder of traces (traces.jsonl + pictures). Drawn questions are functions of
(seed, family, split, index), so none are stored: stages draw them again. Those about pictures are
(questions.jsonl; also of `test`, where a set has it). Several processes make the trace of a question each in
turn; the files are those of one process. With `agent.cota.reword` a language model says the thoughts in other
words (docs/agent.md); the first process asks it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

from ans_core import data, dist
from ans_core.agent.ocr import check_reader
from ans_core.agent.world import annotated_clips, bank, question_sets, things
from ans_core.agent.world.question_sets import QuestionedPicture, is_question_set
from ans_core.agent.world.rewording import CHUNK_DEADLINE_S, reworded
from ans_core.agent.world.things import AnnotatedPicture
from ans_core.agent.world.traces import Written, write_synthetic_traces
from ans_core.checkpoints import checkpoint
from ans_core.config import Config, DataSource
from ans_core.data import DatasetEntry
from ans_core.precision import inference_dtype
from ans_core.stages.launch import machine_of, show_precision
from ans_core.stages.operations import base_of, toolbox_of
from ans_core.stages.sources import agent_entries
from ans_core.types import Log

if TYPE_CHECKING:
    from ans_core.judge.endpoint import EndpointJudge


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: model. Raises ValueError where the mix of golden, trap and self-correction is
    off after the filter, RuntimeError where the judge's endpoint answers nothing."""
    with language_model(cfg) as endpoint:
        counts = write(cfg, inputs["model"], out, endpoint, log)
    log({f"cota/{name}": value for name, value in counts.items()}, 0)
    return counts


@contextmanager
def language_model(cfg: Config) -> Iterator[EndpointJudge | None]:
    """Yield what rewords thoughts; None where the settings don't want it."""
    if not cfg.agent.cota.reword:
        yield None
        return
    from ans_core.judge.choose import endpoint_of  # takes a second

    with closing(endpoint_of(cfg, deadline_s=CHUNK_DEADLINE_S)) as endpoint:
        yield endpoint


def write(cfg: Config, path: Path, out: Path, endpoint: EndpointJudge | None, log: Log) -> dict[str, float]:
    """Write the traces of both splits, made with the model at `path`; return their numbers."""
    check_reader(cfg.agent.reader)
    device = machine_of(cfg.launch).device
    model = base_of(cfg, path, device=device, dtype=inference_dtype(device))
    show_precision(model, log)
    about = {"base": checkpoint.weights_hash(path), "ocr": cfg.agent.reader}
    counts: dict[str, float] = {}
    settings = cfg.agent.cota
    with dist.process_group():
        counts |= write_questions(
            cfg.agent.sources,
            out,
            seed=cfg.seed,
            reader=cfg.agent.reader,
            reword=partial(reworded, endpoint) if endpoint else None,
            alone=not cfg.agent.families,
        )
        for split in ("train", "val"):
            with toolbox_of(cfg, model) as toolbox:
                questions = bank.QuestionBank.of_cota(
                    cfg.agent.families, out, seed=cfg.seed, tile=toolbox.tile
                )
                wanted = {
                    family: settings.questions(family) if split == "train" else settings.val
                    for family in questions.families(split)
                    if not is_question_set(family)
                }
                if not wanted:
                    raise ValueError(
                        f"agent.sources: no trace can be made of the questions of {split!r}, since nobody knows "
                        "what they need; name drawn families (agent.families), or add a set with words and masks"
                    )
                numbers = {
                    family: questions.at_most(number, family, split) for family, number in wanted.items()
                }
                written = write_synthetic_traces(
                    out / split,
                    questions,
                    numbers,
                    split=split,
                    toolbox=toolbox,
                    provenance=about,
                )
                warn_of_lost(written.dropped, numbers)
            counts |= {f"{split}/{name}": value for name, value in counted(written).items()}
    return counts


def warn_of_lost(dropped: Mapping[str, int], asked: Mapping[str, int]) -> None:
    """Warn of families most of whose questions gave no trace: the agent will hardly learn them."""
    for family, number in asked.items():
        reasons = {name: n for name, n in dropped.items() if name.startswith(f"{family}/")}
        if 2 * sum(reasons.values()) > number:
            logging.warning(
                "%d of %d questions of %s gave no trace: %s; are the base's operations good enough?",
                sum(reasons.values()), number, family,
                ", ".join(f"{name.removeprefix(f'{family}/')} {n}" for name, n in reasons.items()),
            )  # fmt: skip


def write_questions(
    sources: tuple[DataSource, ...],
    out: Path,
    *,
    seed: int,
    reader: str,
    reword: bank.Reword | None,
    alone: bool,
) -> dict[str, float]:
    """Write the questions about pictures, made of annotations or given with their answers, a folder for each
    split; return how many there are. Raises ValueError where nothing can be asked about the training pictures;
    of held-out ones it warns, but where these questions are `alone`."""
    entries = agent_entries(sources, alone=alone)
    counts: dict[str, float] = {}
    for split in dict.fromkeys(entry.split for entry in entries):
        pictures = [
            replace(picture, picture_id=f"{quote(entry.name, safe='')}/{picture.picture_id}")
            for entry in entries
            if entry.split == split
            for picture in pictures_of(entry, seed=seed)
        ]
        families = bank.write_questions(pictures, out / split, seed=seed, reader=reader, reword=reword)
        if not families:
            nothing = (
                f"agent.sources: nothing can be asked about the {len(pictures)} pictures with words and masks, "
                f"or with short answers, of {split!r}; docs/agent.md says what each family needs"
            )
            if split == "train" or (alone and split == "val"):
                raise ValueError(nothing)
            logging.warning("%s", nothing)
        counts |= {f"{split}/questions/{family}": float(number) for family, number in families.items()}
    return counts


def pictures_of(entry: DatasetEntry, *, seed: int) -> list[AnnotatedPicture | QuestionedPicture]:
    """Return a split's annotated pictures and clips, and those with questions and short answers."""
    samples = list(data.samples_of(entry))
    left_out = sum(sample.task == "conversation" and not question_sets.askable(sample) for sample in samples)
    if left_out:
        logging.warning(
            "agent.sources: %d conversations of %r (%s) are not asked: only questions without earlier turns and "
            "regions, with an answer of at most %d characters, can be checked",
            left_out, entry.name, entry.split, question_sets.LONGEST_ANSWER,
        )  # fmt: skip
    return [
        *things.pictures(samples),
        *annotated_clips.clips(samples, name=entry.name, seed=seed),
        *question_sets.pictures(samples, name=entry.name),
    ]


def counted(written: Written) -> dict[str, float]:
    """Return how many traces there are of every kind, and how many questions gave none, by family and
    reason."""
    kinds, dropped = written.kinds, written.dropped
    numbers = {
        "traces": kinds.total(),
        **kinds,
        "dropped": dropped.total(),
        **{f"dropped/{name}": n for name, n in dropped.items()},
    }
    return {name: float(value) for name, value in numbers.items()}
