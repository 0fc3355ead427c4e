"""Traces -> rows of a supervised batch: the turns of an episode as segments, of which only what should be
said is learned."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ans_core.agent import tokens
from ans_core.agent.crops import Crop
from ans_core.agent.world import bank
from ans_core.agent.world.annotated_clips import FAMILIES_OF_PICTURES
from ans_core.agent.world.trace_file import Trace, Turn
from ans_core.config.agent import Episode as EpisodeSettings
from ans_core.data.collate import PackedRow, ReadRow, Row, pack_row
from ans_core.data.views import Views
from ans_core.dist import in_epochs
from ans_core.model.network import Network

SHOWN = 3
"""Faulty traces that an error names."""


def direct(trace: Trace) -> Trace:
    """Return the same question, answered at once: what the row `direct` is taught."""
    return trace.model_copy(
        update={"turns": (trace.turns[0], Turn(role="assistant", text=trace.answer, trainable=True))}
    )


def lessons(traces: Sequence[Trace]) -> list[Trace]:
    """Return the traces that teach something. Traps do not: they end in a wrong answer. Raises ValueError if
    none does."""
    selected = [trace for trace in traces if trace.kind != "trap"]
    if not selected:
        raise ValueError(
            f"all of {len(traces)} traces are traps, of which nothing is learned; add golden ones"
        )
    return selected


def check_lengths(
    model: Network,
    traces: Sequence[Trace],
    folder: Path,
    *,
    question: Callable[[Trace], str],
    max_length: int,
) -> None:
    """Raise ValueError where a trace is longer than the context, or lacks a picture; only the sizes of
    pictures are read. `question`: see `read_trace`."""
    too_long = []
    for trace in traces:
        grids = [
            Crop.full_frame(folder / name).grids(model) for turn in trace.turns for name in turn.pictures
        ]
        length = len(packed(model, trace, question(trace), grids).ids)
        if length > max_length:
            too_long.append(f"{trace.trace_id} ({length} tokens)")
    if too_long:
        raise ValueError(
            f"{folder}: {len(too_long)} of {len(traces)} traces are longer than agent.episode.tokens, "
            f"{max_length}: {_some(too_long)}; raise it, or leave them out, or use fewer tiles"
        )


def warn_of_limits(model: Network, traces: Sequence[Trace], folder: Path, limits: EpisodeSettings) -> None:
    """Warn of traces that no episode can repeat to their end: what is learned of them runs into a limit when
    it is played."""
    too_much = []
    for trace in traces:
        if (why := beyond(model, trace, limits)) is not None:
            too_much.append(f"{trace.trace_id} ({why})")
    if too_much:
        logging.warning(
            "%s: no episode can repeat %d of %d traces within the limits of agent.episode: %s; raise "
            "these, or leave the traces out",
            folder, len(too_much), len(traces), _some(too_much),
        )  # fmt: skip


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", ..." if len(names) > SHOWN else "")


def beyond(model: Network, trace: Trace, limits: EpisodeSettings) -> str | None:
    """Return which limit of an episode a trace is beyond, or None. Only what is learned is held against
    `turn_tokens`."""
    calls, pictures = len(trace.turns) // 2 - 1, sum(len(turn.pictures) for turn in trace.turns)
    if calls > limits.calls:
        return f"{calls} calls, of {limits.calls}"
    if pictures > limits.pictures:
        return f"{pictures} pictures, of {limits.pictures}"
    for number, turn in enumerate(trace.turns):
        if turn.trainable and (length := len(tokens.turn_ids(model, turn.text))) > limits.turn_tokens:
            return f"turn {number} has {length} tokens, of {limits.turn_tokens}"
    return None


def read_trace(model: Network, trace: Trace, folder: Path, *, question: str, max_length: int) -> ReadRow:
    """Open the pictures that are shown and tokenize the turns. `question`: the first turn's text
    (`tokens.first_question`).

    Raises ValueError for a trace that is longer than the context."""
    crops = [Crop.full_frame(folder / name) for turn in trace.turns for name in turn.pictures]
    views = [crop.views(model) for crop in crops]
    row = packed(model, trace, question, [view.grids for view in views])
    if len(row.ids) > max_length:
        raise ValueError(
            f"{folder}: trace {trace.trace_id} of {len(row.ids)} tokens > max_length {max_length}; use "
            "fewer tiles or calls"
        )
    shown = Views(
        pixels=torch.cat([view.pixels for view in views]),
        grids=tuple(grid for view in views for grid in view.grids),
    )
    return ReadRow(
        row=Row(name=f"cota/{trace.trace_id}", frames=(), turns=()), images=[], views=shown, packed=row
    )


def packed(
    model: Network, trace: Trace, question: str, grids: Sequence[Sequence[tuple[int, int]]]
) -> PackedRow:
    """Return the tokens of a trace, as those of a played episode: the first user's turn, and what was said and what
    came back after it. `grids` of its pictures in the order of the text."""
    overview, *later = grids
    opening = tokens.opening_ids(model, question, [overview])
    ids, learned = opening[-1:], [False] * len(opening)
    for turn in trace.turns[1:]:
        if turn.role == "assistant":
            new = tokens.turn_ids(model, turn.text)
        else:
            shown, later = later[: len(turn.pictures)], later[len(turn.pictures) :]
            new = tokens.observed_ids(model, turn.text, shown)
        ids += new
        learned += [turn.trainable] * len(new)
    return replace(pack_row(opening[:-1], [([], ids)]), learned=learned)


class TraceOrder:
    """Traces in shuffled epochs, decided by the seed alone."""

    def __init__(self, traces: Sequence[Trace], *, picture_share: float | None = None, seed: int) -> None:
        """picture_share: of the traces about annotated pictures, where there are others, too; both have epochs
        of their own then. None: all traces are alike."""
        apart = FAMILIES_OF_PICTURES if picture_share is not None else ()
        of_pictures = [trace for trace in traces if trace.family in apart]
        others = [trace for trace in traces if trace.family not in apart]
        self.share = bank.picture_share(picture_share or 0.0, pictures=bool(of_pictures), others=bool(others))
        self.seed = seed
        self._traces = {True: of_pictures, False: others}

    def number(self, number: int) -> Trace:
        """Return trace `number` of the run."""
        about_picture, number = bank.divided(number, self.share)
        traces = self._traces[about_picture]
        order = self.seed, "picture traces" if about_picture else "traces"
        return traces[in_epochs(number, len(traces), *order)]
