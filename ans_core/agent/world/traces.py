"""Questions -> chain-of-thought-action traces: golden, trap and self-correction, with what the real
operations gave.

A golden trace is the shortest plan. A trap is a golden one with a wrong answer. A self-correction begins with
a call about another thing.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from ans_core import dist
from ans_core.agent.episode import Episode, Toolbox
from ans_core.agent.protocol import Call, call_text
from ans_core.agent.world import FAMILIES, OPERATED, Question, conclusion, evidence, is_right
from ans_core.agent.world.annotated import MOST_COUNTED
from ans_core.agent.world.bank import QuestionBank, file_of_frame
from ans_core.agent.world.trace_file import (
    SHARES,
    Difficulty,
    Fault,
    Kind,
    Trace,
    Turn,
    check_mix,
    check_new,
    write_pictures,
    write_traces,
)
from ans_core.pictures import media

Dropped = Literal["call_failed", "wrong_conclusion", "no_evidence", "repeated_call"]
"""Rules of the filter: a call of the plan failed, its observations don't give the answer, a thing asked about
was not looked at, the distraction is the plan's own first call."""
DIFFICULTIES: tuple[Difficulty, ...] = ("simple", "simple", "medium", "hard")
"""By the number of calls of the shortest plan; longer ones are hard, too."""
CORRECTION = "That is not {phrase}."
MEASURES = ("get_properties", "track_object")
"""Operations whose numbers a trap concludes wrongly from; what others show, it misreads."""


@dataclass(frozen=True, kw_only=True)
class Written:
    """What became of the questions: traces by kind, dropped ones by family and reason."""

    kinds: Counter[str] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)


def write_synthetic_traces(
    folder: Path,
    bank: QuestionBank,
    numbers: Mapping[str, int],
    *,
    split: str,
    toolbox: Toolbox,
    provenance: dict[str, Any],
) -> Written:
    """Write questions as traces, so many of every family, into a folder: of pictures, the one that holds
    them. `provenance`: what stands beside the source and the question's id in every record (the weights'
    hash, the reader of READ_TEXT). Several processes make the trace of a question each in turn and write its
    pictures; the first one writes the records. None takes the place of a dropped one.

    Raises ValueError where the mix of the drawn ones that need an operation is off after the filter, or
    nothing is left."""
    check_new(folder)
    drawn = [(family, index) for family, n in numbers.items() for index in range(n) if family in FAMILIES]
    of_pictures = [
        (family, index) for family, n in numbers.items() for index in range(n) if family not in FAMILIES
    ]
    names = [*drawn, *of_pictures]
    kinds = [
        *kinds_of([family for family, _ in drawn]),
        *kinds_of_questions([bank.plain(name, split, i) for name, i in of_pictures], seed=bank.seed),
    ]

    def made(some: Sequence[tuple[tuple[str, int], Kind]]) -> Iterator[Trace | Dropped]:
        for (family, index), kind in some:
            question = bank.question(family, split, index)
            outcome = trace(question, kind, toolbox, seed=bank.seed, provenance=provenance)
            if isinstance(outcome, str):
                yield outcome
            else:
                # at once: pictures of all questions would not fit into memory
                write_pictures(folder, outcome[1])
                yield outcome[0]

    made_of_all = dist.by_turns(list(zip(names, kinds, strict=True)), 1, made, desc=f"traces of {split}")
    dropped = Counter(
        f"{family}/{outcome}"
        for (family, _), outcome in zip(names, made_of_all, strict=True)
        if isinstance(outcome, str)
    )
    records = [outcome for outcome in made_of_all if not isinstance(outcome, str)]
    if not records:
        raise ValueError(f"no trace is left of {len(kinds)} questions; dropped: {dict(dropped)}")
    if wanted := [kind for (family, _), kind in zip(names, kinds, strict=True) if family in OPERATED]:
        # before the file has its name
        check_mix([record for record in records if record.family in OPERATED], wanted)
    if dist.rank() == 0:
        write_traces(folder, records)
    return Written(kinds=Counter(trace.kind for trace in records), dropped=dropped)


def kinds_of(families: Sequence[str]) -> list[Kind]:
    """A kind for each question: in SHARES over those that need an operation, spread evenly over them; the
    others can only be golden."""
    able = [i for i, family in enumerate(families) if family in OPERATED]
    special = round(SHARES["trap"] * len(able))  # of either
    kinds: list[Kind] = ["golden"] * len(families)
    for number in range(2 * special):
        kinds[able[number * len(able) // (2 * special)]] = "self_correction" if number % 2 else "trap"
    return kinds


def kinds_of_questions(questions: Sequence[Question], *, seed: int) -> list[Kind]:
    """Return a kind for each question about a picture, in SHARES over all, by chance, as far as the pictures
    allow it: a self-correction needs another thing that can be looked at first, and a call left for that; a
    trap a call and a wrong choice."""
    rng = np.random.default_rng(dist.seed_of(seed, "kinds of questions"))
    kinds: list[Kind] = ["golden"] * len(questions)
    able: dict[Kind, list[int]] = {
        "self_correction": [
            i
            for i, question in enumerate(questions)
            if question.distraction and len(question.plan) < MOST_COUNTED
        ],
        "trap": [i for i, question in enumerate(questions) if question.plan and len(question.choices) > 1],
    }
    for kind, places in able.items():
        free = [place for place in places if kinds[place] == "golden"]
        for place in rng.permutation(len(free))[: round(SHARES[kind] * len(questions))]:
            kinds[free[place]] = kind
    return kinds


def trace(
    question: Question, kind: Kind, toolbox: Toolbox, *, seed: int, provenance: dict[str, Any]
) -> tuple[Trace, dict[str, bytes]] | Dropped:
    """The record and its pictures, or why there is none."""
    distraction = question.distraction if kind == "self_correction" else ()
    calls = [*distraction, *question.plan]
    episode = Episode(toolbox, question.workspace(), max_calls=len(calls))
    if distraction and distraction[0] == question.plan[0]:
        return "repeated_call"
    turns = [
        Turn(
            role="user",
            text=f"<image>\n{question.text}",
            pictures=_frames(question)[:1],
        )
    ]
    for number, planned in enumerate(calls):
        first = number == len(distraction)
        call = _after(planned, episode.observations[0].values) if distraction and number else planned
        thought = (
            question.thoughts[number - len(distraction)]
            if question.thoughts and number >= len(distraction)
            else ""
        )
        corrected = CORRECTION.format(phrase=question.targets[0].phrase) if distraction and first else ""
        text = " ".join(part for part in (corrected, thought, call_text(call)) if part)
        observation = episode.turn(text)
        assert observation is not None
        if not observation.ok:
            return "call_failed"
        target = kind == "golden" or (kind == "self_correction" and number == len(calls) - 1)
        pictures = tuple(f"pictures/{question.question_id}/{name}.png" for name in observation.pictures)
        turns += [
            Turn(role="assistant", text=text, trainable=target),
            Turn(role="user", text=observation.turn(), pictures=pictures),
        ]
    concluded = conclusion(question, episode.observations)
    if concluded is None or not is_right(concluded, question):
        return "wrong_conclusion"
    if not evidence(question, episode.workspace, episode.observations):
        return "no_evidence"
    answer = wrong_answer(question, seed=seed) if kind == "trap" else question.answer
    turns.append(Turn(role="assistant", text=answer, trainable=kind != "trap"))
    return _record(question, kind, turns, provenance), _pictures(question, episode)


def _record(question: Question, kind: Kind, turns: Sequence[Turn], provenance: dict[str, Any]) -> Trace:
    fault: Fault | None = None
    if kind == "trap":
        fault = "logical" if question.plan[-1].name in MEASURES else "perceptual"
    return Trace(
        trace_id=question.question_id,
        kind=kind,
        fault=fault,
        question=question.text,
        answer=question.answer,
        frames=_frames(question),
        turns=tuple(turns),
        provenance={
            "source": "drawn" if question.family in FAMILIES else "annotated",
            "id": question.question_id,
            **provenance,
        },
        family=question.family,
        difficulty=DIFFICULTIES[min(len(question.plan), len(DIFFICULTIES) - 1)],
    )


def _pictures(question: Question, episode: Episode) -> dict[str, bytes]:
    """The frames (but a picture that questions share, which is there), and the crops as the model is shown
    them."""
    files = {} if question.picture else dict(zip(_frames(question), question.frames, strict=True))
    for observation in episode.observations:
        for name in observation.pictures:
            shown = media.reference(episode.workspace.picture(name, least=episode.toolbox.tile))
            assert isinstance(shown, bytes)
            files[f"pictures/{question.question_id}/{name}.png"] = shown
    return files


def _frames(question: Question) -> tuple[str, ...]:
    """Return the files of the native picture, or of a clip's frames."""
    if question.picture and len(question.frames) > 1:
        return tuple(file_of_frame(question.picture, number) for number in range(len(question.frames)))
    if question.picture:
        return (question.picture,)
    return tuple(f"pictures/{question.question_id}/frame_{i}.png" for i in range(len(question.frames)))


def _after(call: Call, distraction: dict[str, Any]) -> Call:
    """A planned call after one more handle was made: `image_2` is then `image_3`, or `mask_1` `mask_2`."""
    (kind,) = distraction.keys() & {"image", "mask"}

    def next_one(match: re.Match[str]) -> str:
        return f'"{kind}_{int(match[1]) + 1}"'

    return Call(
        name=call.name, arguments=json.loads(re.sub(rf'"{kind}_(\d+)"', next_one, json.dumps(call.arguments)))
    )


def wrong_answer(question: Question, *, seed: int) -> str:
    """What the question alone suggests, where that is wrong; else another choice, or another number."""
    if question.prior is not None and question.prior != question.answer:
        return question.prior
    rng = np.random.default_rng(dist.seed_of(seed, "wrong answer", question.question_id))
    choices = question.choices or tuple(str(n) for n in range(10, 100))
    return str(rng.choice([choice for choice in choices if choice != question.answer]))
