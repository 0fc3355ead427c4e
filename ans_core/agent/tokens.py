"""Turns of an episode as token ids, the same for playing and for training."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

from ans_core import prompts
from ans_core.agent import protocol
from ans_core.agent.operations import Operation
from ans_core.agent.protocol import IMAGE
from ans_core.data.views import Grid
from ans_core.model.network import Network


def first_question(text: str, operations: Mapping[str, Operation] | None = None, *, pictures: int = 1) -> str:
    """Return the first user's turn, with what operations there are if they are given. Several pictures are
    called as calls name them: image_1, image_2, ..."""
    tools = f"{protocol.tools_text(operations)}\n" if operations else ""
    first = prompts.picture_marks(pictures)
    if pictures > 1:
        first, text = first.replace("Image-", "image_"), re.sub(r"<Image-(\d+)>", r"image_\1", text)
    return first + tools + text


def opening_ids(model: Network, text: str, grids: Sequence[Sequence[Grid]]) -> list[int]:
    """Return the first user's turn up to the start of what is said; `grids` of the picture of every
    `<image>`."""
    template = prompts.TEMPLATES[model.config.template]
    ids: list[int] = model.tokenizer.encode(template.user.format(input=_with_pictures(model, text, grids)))
    return ids


def turn_ids(model: Network, text: str) -> list[int]:
    """Return a turn of the model's, with the token that ends it."""
    return _ids(model, text + prompts.TEMPLATES[model.config.template].suffix)


def observed_ids(
    model: Network, text: str, grids: Sequence[Sequence[Grid]], *, complete: bool = True
) -> list[int]:
    """Return a user's turn after the first one, up to the start of what is said; `grids` of the picture of
    every `<image>`. `complete`: whether the turn before it has its end."""
    template = prompts.TEMPLATES[model.config.template]
    user_text = _with_pictures(model, text, grids)
    return _ids(
        model,
        ("" if complete else template.suffix) + template.separator + template.user.format(input=user_text),
    )


def call_openers(model: Network) -> list[int]:
    """Return the tokens that begin a call: without them none can be said, but letter by letter."""
    vocabulary = model.tokenizer.get_vocab()
    return sorted(number for token, number in vocabulary.items() if token.startswith(protocol.OPEN))


def said_with(model: Network, texts: Iterable[str]) -> set[int]:
    """Return every token that these turns are said with."""
    return {number for text in set(texts) for number in turn_ids(model, text)}


def all_but(model: Network, texts: Iterable[str]) -> list[int]:
    """Return the tokens that none of these turns is said with. Without them nothing but their words is
    said."""
    return sorted(set(range(model.vocabulary)) - said_with(model, texts))


def _with_pictures(model: Network, text: str, grids: Sequence[Sequence[Grid]]) -> str:
    first, *rest = text.split(IMAGE)
    counts = [sum(rows * columns for rows, columns in picture_grids) for picture_grids in grids]
    shown = [prompts.image_text([count], model.backbone.marks) for count in counts]
    return first + "".join(picture + after for picture, after in zip(shown, rest, strict=True))


def _ids(model: Network, text: str) -> list[int]:
    ids: list[int] = model.tokenizer.encode(text, add_special_tokens=False)
    return ids
