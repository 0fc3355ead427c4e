"""Turns of an episode as token ids, the same for playing and for training."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ans_core import prompts
from ans_core.agent import protocol
from ans_core.agent.operations import Operation
from ans_core.agent.protocol import IMAGE
from ans_core.data.collate import prefix_ids, question_ids
from ans_core.data.views import Grid
from ans_core.model.network import Network


def first_question(text: str, operations: Mapping[str, Operation] | None = None) -> str:
    """Return the first user's turn, with what operations there are if they are given."""
    return f"{IMAGE}\n{protocol.tools_text(operations)}\n{text}" if operations else f"{IMAGE}\n{text}"


def opening_ids(model: Network, text: str, grids: Sequence[Grid]) -> list[int]:
    """Return the first user's turn, which begins with the picture, up to the start of what is said."""
    question, marks = text.removeprefix(IMAGE).strip(), model.backbone.marks
    begin = prefix_ids(
        model.tokenizer, template=model.config.template, frame_tokens=[_cells(grids)], marks=marks
    )
    return begin + question_ids(
        model.tokenizer, question, template=model.config.template, cells=[], marks=marks
    )


def turn_ids(model: Network, text: str) -> list[int]:
    """Return a turn of the model's, with the token that ends it."""
    return _ids(model, text + prompts.TEMPLATES[model.config.template].suffix)


def observed_ids(
    model: Network, text: str, grids: Sequence[Sequence[Grid]], *, complete: bool = True
) -> list[int]:
    """Return a user's turn after the first one, up to the start of what is said; `grids` of the picture of
    every `<image>`. `complete`: whether the turn before it has its end."""
    template = prompts.TEMPLATES[model.config.template]
    first, *rest = text.split(IMAGE)
    shown = [prompts.image_text([_cells(picture_grids)], model.backbone.marks) for picture_grids in grids]
    user_text = first + "".join(picture + after for picture, after in zip(shown, rest, strict=True))
    return _ids(
        model,
        ("" if complete else template.suffix) + template.separator + template.user.format(input=user_text),
    )


def call_openers(model: Network) -> list[int]:
    """Return the tokens that begin a call: without them none can be said, but letter by letter."""
    vocabulary = model.tokenizer.get_vocab()
    return sorted(number for token, number in vocabulary.items() if token.startswith(protocol.OPEN))


def all_but(model: Network, texts: Iterable[str]) -> list[int]:
    """Return the tokens that none of these turns is said with. Without them nothing but their words is
    said."""
    used = {number for text in texts for number in turn_ids(model, text)}
    return [number for number in range(model.vocabulary) if number not in used]


def _cells(grids: Sequence[Grid]) -> int:
    return sum(rows * columns for rows, columns in grids)


def _ids(model: Network, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False)
    return ids
