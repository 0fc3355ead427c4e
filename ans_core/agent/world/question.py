"""What a question is: what the model is shown and asked, the answer, and how the operations find it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from ans_core.agent.episode import Observation
from ans_core.agent.protocol import Call
from ans_core.agent.workspace import ImageHandle, MaskHandle, TrackHandle, Workspace, box_of
from ans_core.metrics.answers import final, plain, same
from ans_core.metrics.mask import counts
from ans_core.pictures import rle
from ans_core.types import RLE

COVERED = 0.95
"""Share of a thing's box that a crop must hold to show it."""
FILLED = 0.15
"""Share of a crop that the thing must fill: less is no closer look."""
MARKED = 0.5
"""Share of what a person has marked that a crop must hold; and share of a mask that must lie in it."""
PART = 0.35
"""Share of a crop that the thing must fill where a part of it is enough."""
Look = Literal["crop", "mask", "track"]
READERS = ("get_properties", "read_text")
"""Operations that look at a mask's pixels."""
HIT = 0.5
"""IoU from which a mask is that of a thing."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A thing that the question is about."""

    phrase: str
    """`the red square`."""
    masks: tuple[RLE, ...]
    """Of every frame."""
    part: bool = False
    """Whether a crop of a part of it is a look at it."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A picture (or several, or a clip, of which only the first frame is seen) and a question about it. `prior`
    is what the question alone suggests."""

    question_id: str = ""
    """family/split/index; filled in, as the family, by whoever draws one of a family."""
    family: str = ""
    frames: tuple[bytes, ...] = ()
    """PNG."""
    text: str
    """Several pictures are `<Image-1>`, `<Image-2>`, ... in it."""
    answer: str
    choices: tuple[str, ...] = ()
    """Answers of the family; empty where there are too many to list."""
    prior: str | None = None
    targets: tuple[Target, ...] = ()
    any_target: bool = False
    """Whether a look at one of the targets is enough; where there is none (is there a bear?), any look."""
    plan: tuple[Call, ...] = ()
    """The shortest one."""
    plan_known: bool = True
    """Whether `plan` is known: which looks a set's question needs, nobody wrote down (question_sets.py)."""
    look: Look = "crop"
    """What counts as having looked at a thing: a crop that shows it (or its mask, read or measured by an
    operation), its mask alone, or a track from it."""
    distraction: tuple[Call, ...] = ()
    """The plan's first call, about another thing. Empty where there is none."""
    thoughts: tuple[str, ...] = ()
    """What is thought before each call of the plan in a trace; empty = calls alone."""
    picture: str = ""
    """The file of its one picture in a folder of questions or traces, where several questions share it; empty
    = frames of its own."""

    stills: bool = False
    """Whether several frames are pictures by themselves, and no clip."""

    def workspace(self) -> Workspace:
        return Workspace.of(self.frames, stills=self.stills)

    @property
    def wanted_calls(self) -> int:
        """The calls of the shortest plan; 1 where it is not known, as Pixel-Reasoner wants of every
        question."""
        return len(self.plan) if self.plan_known else 1


@dataclass(frozen=True, kw_only=True)
class Family:
    """One kind of question."""

    draw: Callable[[np.random.Generator, int], Question]
    """draw(rng, pixels on a side)."""
    conclude: Callable[[Question, Sequence[Observation]], str | None]
    """Return the answer that a plan's observations give; None where they give none."""
    needs_operation: bool = True


def normal(answer: str) -> str:
    """Return an answer without what makes no difference: case, spaces around it and a full stop."""
    return answer.strip().removesuffix(".").strip().lower()


def same_answer(prediction: str, answer: str) -> bool:
    return normal(prediction) == normal(answer)


def is_right(prediction: str, question: Question) -> bool:
    """Compare an answer with the true one: as texts, and of a set's question also as numbers (whole ones
    exactly), or as the letter of a choice, unless choices are letters themselves."""
    if same_answer(prediction, question.answer):
        return True
    if question.plan_known:
        return False
    letters = {chr(ord("A") + i): choice for i, choice in enumerate(question.choices)}
    if not letters.keys().isdisjoint(plain(choice).upper() for choice in question.choices):
        letters = {}
    reply = letters.get(plain(final(prediction)).upper(), prediction)
    return same(reply, question.answer, whole_exactly=True)


def evidence(question: Question, workspace: Workspace, observations: Sequence[Observation]) -> bool:
    """Whether every target was looked at (or one: `any_target`), as the question wants it (`look`). True where
    no operation is needed."""
    read = {
        name
        for observation in observations
        if observation.ok and observation.call is not None and observation.call.name in READERS
        for name in (observation.call.arguments.get("mask"), *observation.call.arguments.get("masks", ()))
    }
    followed = {handle.mask for _, handle in workspace.handles if isinstance(handle, TrackHandle)}
    masks = {"crop": read, "mask": set(workspace.names("mask")), "track": followed}[question.look]
    crops = question.look == "crop"
    if question.any_target and not question.targets:
        return len(workspace.names("image")) > len(workspace.overviews) or bool(
            masks.intersection(workspace.names("mask"))
        )
    enough = any if question.any_target else all
    return not question.plan or enough(
        _looked_at(target, workspace, masks=masks, crops=crops) for target in question.targets
    )


def faithful_calls(question: Question, workspace: Workspace, observations: Sequence[Observation]) -> int:
    """Return how many successful calls are about a thing that the question is about: what they made, or were
    given, is a crop that shows one, its mask, or a track from that. (`evidence` wants all things, and of the
    right kind.) Of what is not there, all calls are."""
    if question.any_target and not question.targets:
        return sum(observation.ok for observation in observations)
    return sum(
        any(_shows(target, workspace, name) for name in _names_of(observation) for target in question.targets)
        for observation in observations
        if observation.ok
    )


def looked_at(mask: RLE, workspace: Workspace) -> bool:
    """Tell whether an episode looked at what a person has marked in the first frame, maybe by a loose box: a
    crop holds MARKED of it and is filled by it (FILLED), or a mask lies in it for the most part and is no small
    piece of it (FILLED)."""
    marked = rle.decode(mask)

    def shows(name: str, handle: ImageHandle | MaskHandle) -> bool:
        if isinstance(handle, MaskHandle):
            pixels = workspace.pixels(name)
        elif name in workspace.overviews:
            return False
        else:
            left, top, right, bottom = handle.box
            pixels = np.zeros_like(marked)
            pixels[top:bottom, left:right] = True
        common = int((pixels & marked).sum())
        held, filled = common / int(marked.sum()), common / max(1, int(pixels.sum()))
        if isinstance(handle, MaskHandle):
            return filled >= MARKED and held >= FILLED
        return held >= MARKED and filled >= FILLED

    return any(
        shows(name, handle)
        for name, handle in workspace.handles
        if not isinstance(handle, TrackHandle) and handle.frame == 0
    )


def _names_of(observation: Observation) -> set[str]:
    """Return the handles that a call made and was given."""
    arguments = observation.call.arguments if observation.call is not None else {}
    single = [
        source.get(kind) for source in (arguments, observation.values) for kind in ("image", "mask", "track")
    ]
    return {
        name
        for name in (*single, *(arguments.get("masks") or ()), *observation.pictures)
        if isinstance(name, str)
    }


def _looked_at(target: Target, workspace: Workspace, *, masks: Collection[str | None], crops: bool) -> bool:
    """Tell whether one of these masks is the target's, or a crop shows it."""
    handles = [*workspace.names("image"), *workspace.names("mask")]
    return any(
        _shows(target, workspace, name)
        for name in handles
        if (name in masks if name in workspace.names("mask") else crops)
    )


def _shows(target: Target, workspace: Workspace, name: str) -> bool:
    """Tell whether a handle is a crop that shows the target, its mask, or a track from that."""
    handle = dict(workspace.handles)[name]
    if isinstance(handle, TrackHandle):
        return _shows(target, workspace, handle.mask)
    if isinstance(handle, MaskHandle):
        return counts(workspace.rle(name), target.masks[handle.frame]).iou >= HIT
    mask = rle.decode(target.masks[handle.frame])
    if name in workspace.overviews or not mask.any():
        return False
    x1, y1, x2, y2 = box_of(mask)
    left, top, right, bottom = handle.box
    common = max(0, min(x2, right) - max(x1, left)) * max(0, min(y2, bottom) - max(y1, top))
    share = float(mask[top:bottom, left:right].mean())
    in_full = common >= COVERED * (x2 - x1) * (y2 - y1) and share >= FILLED
    return in_full or (target.part and share >= PART)
