"""Questions about annotated photographs -> a folder of traces, made by the real operations, for `agent_sft`
(`agent.sft.traces`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from ans_core.agent.episode import Toolbox
from ans_core.agent.world.question import Question
from ans_core.agent.world.trace_file import (
    SHARES,
    Kind,
    Trace,
    check_mix,
    check_new,
    write_pictures,
    write_traces,
)
from ans_core.agent.world.traces import Written, trace
from ans_core.dist import seed_of


def kinds_of_questions(questions: Sequence[Question], *, seed: int) -> list[Kind]:
    """Return a kind for each question, in SHARES over all, by chance: a self-correction needs another thing
    in the picture that can be looked at first, a trap a call and a wrong choice. Raises ValueError where too
    few can be one."""
    rng = np.random.default_rng(seed_of(seed, "kinds of questions"))
    kinds: list[Kind] = ["golden"] * len(questions)
    able: dict[Kind, list[int]] = {
        "self_correction": [i for i, question in enumerate(questions) if question.distraction],
        "trap": [i for i, question in enumerate(questions) if question.plan and len(question.choices) > 1],
    }
    for kind, places in able.items():
        free = [place for place in places if kinds[place] == "golden"]
        wanted = round(SHARES[kind] * len(questions))
        if len(free) < wanted:
            raise ValueError(
                f"{wanted} of {len(questions)} questions are to be a {kind}, and {len(free)} can; take more "
                "pictures"
            )
        for place in rng.permutation(len(free))[:wanted]:
            kinds[free[place]] = kind
    return kinds


def write_annotated_traces(
    folder: Path, questions: Sequence[Question], *, seed: int, toolbox: Toolbox, provenance: dict[str, Any]
) -> Written:
    """Write a trace of each question; pictures of several questions are written once. `provenance`: what
    stands in every record beside the source and the question's id. Raises ValueError for a folder that holds
    traces, where nothing is left, and where the mix is off."""
    check_new(folder)
    dropped: Counter[str] = Counter()
    records: list[Trace] = []
    for question, kind in zip(questions, kinds_of_questions(questions, seed=seed), strict=True):
        made = trace(question, kind, toolbox, seed=seed, provenance=provenance)
        if isinstance(made, str):
            dropped[f"{question.family}/{made}"] += 1
            continue
        record, pictures = made
        (frame,) = record.frames
        picture_id = question.question_id.partition("/")[2].rpartition("/")[0]
        shared = f"pictures/{quote(picture_id, safe='')}.png"  # an id may be a path: `images/1.png`
        pictures = {(shared if name == frame else name): encoded for name, encoded in pictures.items()}
        first = record.turns[0].model_copy(update={"pictures": (shared,)})
        records.append(record.model_copy(update={"frames": (shared,), "turns": (first, *record.turns[1:])}))
        write_pictures(folder, pictures)
    if not records:
        raise ValueError(f"no trace is left of {len(questions)} questions; dropped: {dict(dropped)}")
    check_mix(records)
    write_traces(folder, records)
    return Written(kinds=Counter(record.kind for record in records), dropped=dropped)
