"""Rows of a mixture regrouped by their length in tokens: less padding in a batch, the same number of tokens
on every process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain

from transformers import PreTrainedTokenizerBase

from ans_core.data.collate import Layout, Row, TooLong, encode_row
from ans_core.data.mixture import Mixture
from ans_core.data.views import Grid
from ans_core.dist import rank, rng_of, world_size
from ans_core.pictures import transforms

Measured = tuple[int, int]
"""(length of a row, its number)."""


class LengthGroups:
    """The rows of every `window` steps of a mixture, sorted by length and cut into those steps anew, in
    shuffled order.

    The step with the longest rows of a window comes first: a batch that does not fit into memory shows at
    once. Which rows a step has does not depend on the number of processes. Every process measures all rows of
    a window before its first step (about 1 ms each).
    """

    def __init__(self, mixture: Mixture, length: Callable[[Row], int], *, window: int) -> None:
        self.mixture, self.length, self.window = mixture, length, window
        self._steps: tuple[tuple[int, int], list[list[Measured]]] = ((-1, 0), [])

    def rows(self, step: int, micro: int, *, batch: int, micros: int) -> list[Row]:
        """Return this process's rows, as `Mixture.rows` does."""
        number, place = divmod(step, self.window)
        if self._steps[0] != (number, batch):
            self._steps = (number, batch), self._grouped(number, batch)
        step_rows = self._steps[1][place]
        part = step_rows[micro * len(step_rows) // micros : (micro + 1) * len(step_rows) // micros]
        return [self.mixture.row(row) for row in balanced(part, world_size())[rank()]]

    def _grouped(self, number: int, batch: int) -> list[list[Measured]]:
        first = number * self.window * batch
        measured = [
            (self.length(self.mixture.row(row)), row) for row in range(first, first + self.window * batch)
        ]
        measured.sort(reverse=True)
        longest, *others = [measured[i : i + batch] for i in range(0, len(measured), batch)]
        rng_of(self.mixture.seed, "length groups", number).shuffle(others)
        return [longest, *others]


def balanced(rows: Sequence[Measured], parts: int) -> list[list[int]]:
    """Deal rows, longest first, to the part with the fewest tokens of those that lack a row. Parts differ by
    at most one row."""
    places = [len(range(part, len(rows), parts)) for part in range(parts)]
    tokens = [0] * parts
    dealt: list[list[int]] = [[] for _ in range(parts)]
    for length, row in rows:
        part = min((p for p in range(parts) if len(dealt[p]) < places[p]), key=lambda p: tokens[p])
        dealt[part].append(row)
        tokens[part] += length
    return dealt


def row_length(row: Row, tokenizer: PreTrainedTokenizerBase, layout: Layout) -> int:
    """Return the tokens of a row as `collate_readable` packs it, without reading a picture's pixels: turns
    that are too long count nothing, and nothing does in a row that will be left out."""
    assert row.size is not None, f"{row.name}: a mixture's rows have a size"
    grids: list[tuple[Grid, ...]]
    try:
        if row.is_clip:
            grids = [(grid,) for grid in layout.cutter.grids(*row.size[::-1], frames=len(row.frames))]
        else:
            sizes = map(transforms.image_size, row.frames) if row.stills else [row.size[::-1]]
            grids = [layout.cutter.grids(*size) for size in sizes]
    except ValueError:
        return 0
    encoded = partial(
        encode_row,
        tokenizer=tokenizer,
        layout=layout,
        grids=[*chain.from_iterable(grids)],
        pictures=[*map(len, grids)],
    )
    try:
        return len(encoded(row).ids)
    except TooLong as error:
        return len(encoded(replace(row, turns=error.fitting)).ids) if error.fitting else 0
