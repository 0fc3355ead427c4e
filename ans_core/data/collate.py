"""Collate rows of turns into one Batch of tensors: packed tokens, pictures for both encoders, targets of
every mask."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, cycle, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from ans_core import prompts
from ans_core.data.branches import BranchPlaces, branch_places
from ans_core.data.conversation import Turn
from ans_core.data.tensor_batch import TensorBatch
from ans_core.data.views import Cutter, Grid, Views, shown_view, token_counts
from ans_core.dist import rng_of, seed_of
from ans_core.pictures import rle, transforms
from ans_core.types import RLE, ImageRef


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The sizes, pictures and template that a model expects of its inputs."""

    template: str
    cutter: Cutter
    """Cuts pictures for the vision tower."""
    marks: prompts.ImageMarks
    sam_size: int
    mask_size: int
    """Side of the mask targets."""
    max_length: int
    objects: int = 0
    """Masks of every row with any; 0 = as many as it has."""
    multiple: int = 1
    """Rows and branches are padded to lengths that are multiples of it."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One image, several (`stills`), or the chosen frames of one clip, and the questions about it."""

    name: str
    """Data set and image, for errors."""
    frames: tuple[ImageRef, ...]
    turns: tuple[Turn, ...]
    mask_frames: tuple[int, ...] = (0,)
    """Indices of these frames in the turns' masklets."""
    seed: int = 0
    """Seed of everything random that a loss does with this row."""
    size: tuple[int, int] | None = None
    """Height and width of the first frame, as its masks have them."""
    stills: bool = False

    @property
    def is_clip(self) -> bool:
        return len(self.frames) > 1 and not self.stills


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Samples of one row that training leaves out."""

    row: str
    samples: int
    reason: str
    unreadable: bool = False
    """Whether nothing of the row could be read."""


class TooLong(ValueError):
    """The turns of a row are longer than the context."""

    def __init__(self, message: str, fitting: tuple[Turn, ...]) -> None:
        super().__init__(message)
        self.fitting = fitting


@dataclass(frozen=True, kw_only=True)
class Batch(TensorBatch):
    """B rows, ready for the model.

    A row is its image prefix and its branches (question + answer); see `Packed` in model/packing.py for the
    fields that share its names.
    """

    ON_HOST = frozenset({"regions"})

    input_ids: Int[Tensor, "B L"]
    position_ids: Int[Tensor, "B L"]
    branch: Int[Tensor, "B L"]
    loss_mask: Bool[Tensor, "B L"]
    places: BranchPlaces
    learned: Int[Tensor, "2 T"]
    """Row and place of every token in `loss_mask`. Like all places here they are counted once, on the CPU: a
    GPU would wait for it."""
    segs: Int[Tensor, "2 G"]
    """Row and place of every learned `[SEG]`."""
    slots: tuple[int, ...]
    """Image tokens of every row."""
    regions: list[list[Bool[Tensor, "h w"]]]
    views: list[Views]
    """Every row's pictures, for the vision tower."""
    sam_frames: Float[Tensor, "Q 3 S S"]
    """Frames in which some mask is drawn; rows without masks add none, so nothing is encoded for them."""
    pair_seg: Int[Tensor, " P"]
    """First half of the (seg, frame) pairs to draw: index into the batch's `[SEG]` tokens in row-major
    order."""
    pair_frame: Int[Tensor, " P"]
    """Second half: index into sam_frames."""
    targets: Bool[Tensor, "P M M"]
    pair_seeds: list[int]
    """One per pair: a mask's random points depend on its row alone, not on the other rows."""
    totals: Mapping[str, float] = field(default_factory=dict)
    """What losses are divided by: learned `tokens` and `masks` of all micro-batches and processes of the
    step. Empty = counts of this batch."""
    looks: Int[Tensor, "K 3"]
    """(row, place, thing) of the tokens whose attention has a known target (`Turn.targets`), in order: the
    token before the answer and its `<box>` or, where nothing fits, its first; of an answer with several
    boxes, each `<box>`; if a region is described, all tokens that predict the answer."""
    things: Float[Tensor, "O cells"]
    """How each such thing spreads over the cells of the view that shows the whole picture; every row adds up
    to 1, or to 0 if the thing is not there."""
    boxes: Float[Tensor, "O 4"]
    """The things' boxes: x1, y1, x2, y2 as shares of the image; zeros if not there."""


@dataclass(frozen=True, kw_only=True)
class PackedRow:
    """One row's tokens: a prefix (branch 0), then branches of question and answer, each continuing the
    prefix's positions."""

    ids: list[int]
    positions: list[int]
    branches: list[int]
    learned: list[bool]

    def predicting(self, branch: int) -> list[int]:
        """Return the places of tokens that predict this branch's answer: the last of its question and all but
        the last of its answer."""
        return [
            i - 1
            for i, (b, learned) in enumerate(zip(self.branches, self.learned, strict=True))
            if b == branch and learned
        ]


def pack_row(prefix: list[int], branches: Sequence[Sequence[list[int]]]) -> PackedRow:
    """Pack a prefix and branches of question ids and answer ids in turns; only answers are learned."""
    ids, positions, numbers, learned = (
        list(prefix),
        list(range(len(prefix))),
        [0] * len(prefix),
        [False] * len(prefix),
    )
    for number, branch in enumerate(branches, start=1):
        length = sum(map(len, branch))
        ids += chain.from_iterable(branch)
        positions += range(len(prefix), len(prefix) + length)
        numbers += [number] * length
        for part, is_answer in zip(branch, cycle((False, True)), strict=False):
            learned += [is_answer] * len(part)
    return PackedRow(ids=ids, positions=positions, branches=numbers, learned=learned)


def prefix_ids(
    tokenizer: PreTrainedTokenizerBase,
    *,
    template: str,
    frame_tokens: Sequence[int],
    marks: prompts.ImageMarks = prompts.INTERNVL_IMAGE,
    numbered: bool = False,
) -> list[int]:
    """Return the start of the user's turn and its pictures: `frame_tokens[i]` image tokens for picture i.
    `numbered`: they are several pictures."""
    before = prompts.TEMPLATES[template].user.split("{input}")[0]
    start = [tokenizer.bos_token_id] if tokenizer.bos_token_id is not None else []
    return start + tokenizer.encode(
        before + prompts.image_text(frame_tokens, marks, numbered=numbered), add_special_tokens=False
    )


def question_ids(
    tokenizer: PreTrainedTokenizerBase,
    question: str,
    *,
    template: str,
    cells: Sequence[int],
    marks: prompts.ImageMarks = prompts.INTERNVL_IMAGE,
) -> list[int]:
    """Return the rest of the user's turn (regions of `cells` tokens, the question), up to the start of the
    answer."""
    after = prompts.TEMPLATES[template].user.split("{input}")[1]
    return tokenizer.encode(
        (prompts.region_text(cells, marks) or "\n") + question + after, add_special_tokens=False
    )


def encode_row(
    row: Row,
    tokenizer: PreTrainedTokenizerBase,
    layout: Layout,
    *,
    grids: Sequence[Grid],
    pictures: Sequence[int] = (),
) -> PackedRow:
    """Tokenize a row whose views (`Views.pictures`) give image tokens in these grids. Raises TooLong if its
    conversations, which share the image tokens, are longer than the context together: image tokens and `[SEG]`
    are never cut silently."""
    counts, grid = token_counts(grids, pictures), grids[shown_view(pictures)]
    prefix = prefix_ids(
        tokenizer, template=layout.template, frame_tokens=counts, marks=layout.marks, numbered=row.stills
    )
    branches = [
        conversation_ids(
            tokenizer,
            (*turn.past, (turn.question, turn.answer)),
            template=layout.template,
            cells=[int(cells.sum()) for cells in region_cells(turn, grid)],
            marks=layout.marks,
        )
        for turn in row.turns
    ]
    lengths, most = [sum(map(len, branch)) for branch in branches], layout.max_length
    if (total := len(prefix) + sum(lengths)) > most:
        longest = len(prefix) + max(lengths, default=0)
        reason = (
            f"a conversation of {longest} tokens > max_length {most}; use fewer tiles or frames, or shorter texts"
            if longest > most
            else f"{len(row.turns)} conversations of {total} tokens together > max_length {most}; ask fewer "
            "questions of a picture (sft.questions_per_image)"
        )
        raise TooLong(f"{row.name}: {reason}", _fitting(row.turns, lengths, most - len(prefix)))
    return pack_row(prefix, branches)


def _fitting(turns: Sequence[Turn], lengths: Sequence[int], room: int) -> tuple[Turn, ...]:
    """Return those turns, in order, that fit into so many tokens with those before them."""
    fitting = []
    for turn, length in zip(turns, lengths, strict=True):
        if length <= room:
            fitting.append(turn)
            room -= length
    return tuple(fitting)


def conversation_ids(
    tokenizer: PreTrainedTokenizerBase,
    turns: Sequence[tuple[str, str]],
    *,
    template: str,
    cells: Sequence[int],
    marks: prompts.ImageMarks = prompts.INTERNVL_IMAGE,
) -> list[list[int]]:
    """Tokenize (question, answer) pairs about what `prefix_ids` shows: question, answer, question, answer,
    ..."""
    form = prompts.TEMPLATES[template]
    (first, answer), *rest = turns
    parts = [
        question_ids(tokenizer, first, template=template, cells=cells, marks=marks),
        _ids(tokenizer, answer + form.suffix),
    ]
    for question, answer in rest:
        parts += [
            _ids(tokenizer, form.separator + form.user.format(input=question)),
            _ids(tokenizer, answer + form.suffix),
        ]
    return parts


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def pad_rows(rows: Sequence[PackedRow], *, pad_id: int, multiple: int = 1) -> dict[str, Tensor]:
    """Return input_ids, position_ids, branch (-1 = padding) and loss_mask of rows padded on the right, to a
    multiple of `multiple`."""
    length = -(-max(len(row.ids) for row in rows) // multiple) * multiple

    def padded(name: str, fill: int) -> Tensor:
        return torch.tensor([list(getattr(row, name)) + [fill] * (length - len(row.ids)) for row in rows])

    return {
        "input_ids": padded("ids", pad_id),
        "position_ids": padded("positions", 0),
        "branch": padded("branches", -1),
        "loss_mask": padded("learned", 0).bool(),
    }


def region_cells(turn: Turn, grid: Grid) -> list[Bool[Tensor, "h w"]]:
    return [transforms.grid_cells(rle.decode(r), grid=grid) for r in turn.regions]


def cell_shares(mask: RLE, grid: int | Grid) -> Float[Tensor, " cells"]:
    """Return how a mask spreads over the cells of a feature map; adds up to 1, or to 0 if the mask is
    empty."""
    covered = transforms.coverage(rle.decode(mask), grid=grid).flatten()
    return covered / covered.sum() if rle.area(mask) else covered


@dataclass(frozen=True, kw_only=True)
class ReadRow:
    """A row with its pictures and tokens."""

    row: Row
    images: list[Image.Image]
    views: Views
    packed: PackedRow


def read_row(
    row: Row, tokenizer: PreTrainedTokenizerBase, layout: Layout, *, images: list[Image.Image] | None = None
) -> ReadRow:
    """Open the row's pictures (unless given) and tokenize it. Raises ValueError for a picture that is
    unreadable or has another size than its masks, TooLong for a conversation."""
    images = [transforms.open_image(ref) for ref in row.frames] if images is None else images
    if row.size is not None and (images[0].height, images[0].width) != row.size:
        raise ValueError(
            f"{row.name}: the picture of {images[0].size} pixels was of {row.size[::-1]} when it was "
            "annotated; remove the folder `index` beside the prepared data, and it is read anew"
        )
    views = layout.cutter.views(images, clip=row.is_clip)
    packed = encode_row(row, tokenizer, layout, grids=views.grids, pictures=views.pictures)
    return ReadRow(row=row, images=images, views=views, packed=packed)


def collate(rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, layout: Layout) -> Batch:
    """Collate rows; raises ValueError as `read_row` does."""
    return batch_of([read_row(row, tokenizer, layout) for row in rows], tokenizer, layout)


def collate_readable(
    rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase, layout: Layout
) -> tuple[Batch, list[LeftOut]]:
    """Collate rows, leaving out and naming those that can't be read or are too long. Rows are functions of
    the step, so a run that raised here would raise again whenever it is resumed. If no row is left, the batch
    is one black picture without questions, so that this process still takes part in every collective
    operation."""
    read: list[ReadRow] = []
    left_out: list[LeftOut] = []
    for row in rows:
        try:
            read.append(read_row(row, tokenizer, layout))
        except TooLong as error:
            left_out.append(
                LeftOut(row=row.name, samples=len(row.turns) - len(error.fitting), reason=str(error))
            )
            if error.fitting:
                read.append(read_row(replace(row, turns=error.fitting), tokenizer, layout))
        except ValueError as error:
            left_out.append(LeftOut(row=row.name, samples=len(row.turns), reason=str(error), unreadable=True))
    if not read:
        black = Image.new("RGB", (28, 28))
        read = [read_row(Row(name="black", frames=(b"",), turns=()), tokenizer, layout, images=[black])]
    return batch_of(read, tokenizer, layout), left_out


def looks_of(
    turn: Turn, row: PackedRow, branch: int, tokenizer: PreTrainedTokenizerBase
) -> list[tuple[int, int]]:
    """Return the places of a turn's tokens whose attention has a target, each with its target's number."""
    if not turn.targets:
        return []
    places = row.predicting(branch)
    if turn.regions:
        return [(place, 0) for place in places]
    box = tokenizer.convert_tokens_to_ids(prompts.BOX_START)
    boxes = [place for place in places if row.ids[place] == box]
    if len(turn.targets) == 1:
        return [(places[0], 0), (boxes[0] if boxes else places[1], 0)]
    return list(zip(boxes, range(len(turn.targets)), strict=True))


class MaskPair(NamedTuple):
    """A `[SEG]` and a frame in which its mask is drawn."""

    seg: int
    frame: int
    target: Bool[Tensor, "M M"]
    seed: int


def mask_pairs(row: Row, layout: Layout, *, seg: int, frame: int) -> list[MaskPair]:
    """Return a row's pairs; `seg` and `frame` are the numbers of its first ones in the batch."""
    pairs = []
    masklets = [masklet for turn in row.turns for masklet in turn.masks]
    for number, masklet in enumerate(masklets):
        for place, mask_frame in enumerate(row.mask_frames):
            if (mask := masklet[mask_frame]) is not None:
                target = resize_mask(rle.decode(mask), layout.mask_size)
                pairs.append(MaskPair(seg + number, frame + place, target, seed_of(row.seed, number, place)))
    if not layout.objects:
        return pairs
    again = forced([pair.seg for pair in pairs], layout.objects, seed=row.seed)
    return [pairs[i]._replace(seed=seed_of(pairs[i].seed, copy)) if copy else pairs[i] for i, copy in again]


def batch_of(rows: Sequence[ReadRow], tokenizer: PreTrainedTokenizerBase, layout: Layout) -> Batch:
    """Make the tensors of rows that are read."""
    encoded: list[PackedRow] = []
    sam_frames: list[Image.Image] = []
    pairs: list[MaskPair] = []
    regions: list[list[Tensor]] = []
    looks: list[tuple[int, int, int]] = []
    things: list[Tensor] = []
    boxes: list[Tensor] = []
    segs = 0
    for read in rows:
        row = read.row
        encoded.append(read.packed)
        regions.append([cells for turn in row.turns for cells in region_cells(turn, read.views.shown)])
        for branch, turn in enumerate(row.turns, start=1):
            looks += [
                (len(encoded) - 1, place, len(things) + number)
                for place, number in looks_of(turn, encoded[-1], branch, tokenizer)
            ]
            things += [cell_shares(target, read.views.shown) for target in turn.targets]
            boxes += [
                torch.tensor(rle.box(target) if rle.area(target) else (0.0, 0.0, 0.0, 0.0))
                for target in turn.targets
            ]
        if row_segs := sum(len(turn.masks) for turn in row.turns):
            pairs += mask_pairs(row, layout, seg=segs, frame=len(sam_frames))
            sam_frames += read.images
            segs += row_segs
    size = layout.sam_size
    packed: dict[str, Any] = pad_rows(encoded, pad_id=tokenizer.pad_token_id or 0, multiple=layout.multiple)
    slot, seg = (tokenizer.convert_tokens_to_ids(token) for token in (layout.marks.slot, prompts.SEG))
    return Batch(
        **packed,
        places=branch_places(packed["branch"], multiple=layout.multiple),
        learned=torch.stack(packed["loss_mask"].nonzero(as_tuple=True)),
        segs=torch.stack(((packed["input_ids"] == seg) & packed["loss_mask"]).nonzero(as_tuple=True)),
        slots=tuple((packed["input_ids"] == slot).sum(1).tolist()),
        regions=regions,
        views=[read.views for read in rows],
        sam_frames=transforms.normalise(sam_frames, size=size)
        if sam_frames
        else torch.zeros(0, 3, size, size),
        pair_seg=torch.tensor([pair.seg for pair in pairs], dtype=torch.long),
        pair_frame=torch.tensor([pair.frame for pair in pairs], dtype=torch.long),
        targets=torch.stack([pair.target for pair in pairs])
        if pairs
        else torch.zeros(0, layout.mask_size, layout.mask_size, dtype=torch.bool),
        pair_seeds=[pair.seed for pair in pairs],
        looks=torch.tensor(looks, dtype=torch.long).view(-1, 3),
        things=torch.stack(things) if things else torch.zeros(0, 1),
        boxes=torch.stack(boxes) if boxes else torch.zeros(0, 4),
    )


def forced(segs: Sequence[int], objects: int, *, seed: int) -> list[tuple[int, int]]:
    """Return (pair, number of the copy) for exactly `objects` masks of a row, whose pairs belong to `segs`,
    as upstream trains: drawn from more, repeated in turn from fewer, each with all its frames."""
    distinct = sorted(set(segs))
    chosen = (
        rng_of(seed, "objects").sample(distinct, objects)
        if len(distinct) > objects
        else list(islice(cycle(distinct), objects))
    )
    places = enumerate(chosen)
    return [
        (i, chosen[:place].count(seg))
        for place, seg in places
        for i, other in enumerate(segs)
        if other == seg
    ]


def resize_mask(mask: Bool[np.ndarray, "H W"], size: int) -> Bool[Tensor, "S S"]:
    """Resize with nearest neighbour, as upstream resizes its ground truth."""
    return (
        F.interpolate(torch.from_numpy(mask)[None, None].float(), size=(size, size), mode="nearest")[0, 0]
        > 0.5
    )
