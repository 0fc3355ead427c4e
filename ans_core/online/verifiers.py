"""A question's words -> its answer by another path of operations than the shortest plan's, on the frozen
base: what votes are held against.

A verifier never sees an answer. It finds things by words (`[SEG]`); where the base finds none by words, it
measures where the episode looked, so that it tells wrong reading, but not looking at the wrong thing. What it
shares with the drawn world (READ_TEXT's templates know its font) makes it an upper bound there.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

from ans_core.agent.episode import Toolbox
from ans_core.agent.protocol import Call
from ans_core.agent.workspace import FIRST, Box, Workspace, box_of
from ans_core.agent.world.drawing import PATTERNS
from ans_core.data.clips import DIRECTIONS
from ans_core.pictures.colours import COLOURS


class _Path:
    """Calls one after the other on one workspace. Things are found by words, or where an episode looked."""

    def __init__(self, toolbox: Toolbox, workspace: Workspace, looked: Workspace | None) -> None:
        self.toolbox, self.workspace, self.looked = toolbox, workspace, looked

    def __call__(self, name: str, **arguments: Any) -> dict[str, Any] | None:
        """Return the call's values; None if it was refused."""
        observation, self.workspace = self.toolbox.call(self.workspace, Call(name=name, arguments=arguments))
        return observation.values if observation.ok else None

    def mask(self, words: str) -> dict[str, Any] | None:
        """Draw the mask of a thing in the first frame: of what words mean, or in the box of the episode's
        last look (an earlier one may have been a mistake)."""
        if self.looked is None:
            return self("segment_object_at", text=words)
        boxes = _boxes(self.looked)
        return self("segment_object_at", bbox_2d=self.workspace.thousandths(boxes[-1])) if boxes else None


def _boxes(looked: Workspace) -> list[Box]:
    """Return the boxes of the masks that an episode made in the first frame; without masks, of the crops that
    it saw there."""
    masks = [box_of(looked.pixels(name)) for name in looked.names("mask") if looked.mask(name).frame == 0]
    crops = [
        handle.box
        for name in looked.names("image")
        if name != FIRST and (handle := looked.image(name)).frame == 0
    ]
    return masks or crops


class Verifier(NamedTuple):
    """One form of question: `asks` matches its words, `confirm` answers it, or gives None."""

    asks: str
    confirm: Callable[[_Path, re.Match[str]], str | None]
    operations: tuple[str, ...] = ()
    """What it calls, beside segment_object_at."""


def _measured(path: _Path, words: str, wanted: str) -> str | None:
    """Return a property of the thing that words mean."""
    segment = path.mask(words)
    properties = path("get_properties", masks=[segment["mask"]], properties=[wanted]) if segment else None
    return None if properties is None or segment is None else str(properties[segment["mask"]][wanted])


def _pattern(path: _Path, match: re.Match[str]) -> str | None:
    """By the texture's direction, from a Fourier transform of the native pixels; the plan looks at a crop."""
    texture = _measured(path, match["thing"], "texture")
    return texture if texture in PATTERNS else None


def _colour(path: _Path, match: re.Match[str]) -> str | None:
    """By CIELAB; the plan looks at the overview."""
    colour = _measured(path, match["thing"], "colour")
    return colour if colour in COLOURS else None


def _text(path: _Path, match: re.Match[str]) -> str | None:
    """In another crop, at another scale: around the mask, where the plan reads the image that it zoomed
    to."""
    segment = path.mask(match["thing"])
    read = path("read_text", mask=segment["mask"]) if segment else None
    return str(max(read["lines"], key=lambda line: line["confidence"])["text"]) if read else None


def _larger(path: _Path, match: re.Match[str]) -> str | None:
    """By masks of words, and the areas told with them; the plan measures masks at points. Of two looks nobody
    knows which thing is which, so where words find nothing there is no answer."""
    sizes = {}
    for words in (match["thing"], match["other"]):
        segment = path.mask(words) if path.looked is None else None
        if segment is None:
            return None
        sizes[words] = segment["area"]
    return max(sizes, key=lambda words: sizes[words])


def _moves(path: _Path, match: re.Match[str]) -> str | None:
    """From the last frame backwards; the plan begins in the first one. Found by words alone."""
    last = len(path.workspace.frames) - 1
    shown = path("select_frames", frames=[last]) if last > 0 and path.looked is None else None
    image = path.workspace.names("image")[-1]
    segment = path("segment_object_at", text=match["thing"], image=image) if shown else None
    track = path("track_object", mask=segment["mask"]) if segment else None
    direction = None if track is None else track["direction"]
    return direction if direction in DIRECTIONS else None


VERIFIERS = {
    "pattern": Verifier(r"Which pattern is on (?P<thing>.+)\?", _pattern, ("get_properties",)),
    "text": Verifier(r"What is written on (?P<thing>.+)\?", _text, ("read_text",)),
    "larger": Verifier(r"Which is larger, (?P<thing>.+) or (?P<other>.+)\?", _larger),
    "moves": Verifier(r"Where does (?P<thing>.+) go\?", _moves, ("select_frames", "track_object")),
    "easy": Verifier(r"Which colour is (?P<thing>.+)\?", _colour, ("get_properties",)),
}


def form_of(question: str) -> str:
    """Return the name of the verifier that knows this form of question; empty if none does."""
    return next((name for name, verifier in VERIFIERS.items() if re.fullmatch(verifier.asks, question)), "")


def confirmed_answer(
    question: str, workspace: Workspace, toolbox: Toolbox, *, looked: Workspace | None = None
) -> str | None:
    """Return the answer of the verifier of this form; None without one, without its operations, and where its
    path leads to none.

    workspace: the picture alone. looked: an episode's workspace, where things are taken to be where it
    looked; None = found by words, which also tells an episode that looked elsewhere.
    """
    verifier = VERIFIERS.get(form_of(question))
    if verifier is None or not {"segment_object_at", *verifier.operations} <= toolbox.operations.keys():
        return None
    match = re.fullmatch(verifier.asks, question)
    assert match is not None, "form_of matched it"
    return verifier.confirm(_Path(toolbox, workspace, looked), match)
