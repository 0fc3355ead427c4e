"""A chat about one picture or clip: questions, regions and clicks in; texts and masks of one or two
checkpoints out."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from PIL import Image, ImageDraw

from ans_core import prompts
from ans_core.demo.sources import Source
from ans_core.inference.answer import with_image
from ans_core.inference.clicks import with_clicks
from ans_core.inference.options import PredictOptions
from ans_core.inference.predict import answers, follow
from ans_core.metrics.grounding import phrases
from ans_core.model.config import VideoMode
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.types import RLE, Request

Kind = Literal["click", "box", "brush"]
Point = tuple[float, float]
"""(x, y) in pixels of the picture."""
MAX_TOKENS = 256
BRUSH_WIDTH = 0.04
"""Of a stroke, as a share of the picture's longer side."""


@dataclass(kw_only=True)
class Answer:
    """One checkpoint's answer. Its masks grow while a clip is followed."""

    text: str
    masks: list[list[RLE]] = field(default_factory=list)
    """By object and frame, as far as the clip was followed."""
    hidden: set[int] = field(default_factory=set)
    """Objects that are switched off."""

    @property
    def followed(self) -> int:
        return len(self.masks[0]) if self.masks else 0

    @property
    def names(self) -> list[str]:
        """Name every object: its phrase, else `mask`."""
        return [phrase or "mask" for phrase in phrases(self.text)]

    def shown(self, frame: int) -> list[RLE | None]:
        """Return the masks of one frame that are switched on, by object; None for the others."""
        return [
            None if n in self.hidden or frame >= len(masklet) else masklet[frame]
            for n, masklet in enumerate(self.masks)
        ]


@dataclass(kw_only=True)
class Turn:
    question: str
    answers: dict[str, Answer] = field(default_factory=dict)
    """By checkpoint."""


@dataclass(kw_only=True)
class Chat:
    source: Source
    regions: list[RLE] = field(default_factory=list)
    """Visual prompts on the first frame: region1, region2, ... in questions."""
    turns: list[Turn] = field(default_factory=list)
    stop: threading.Event = field(default_factory=threading.Event)
    """Set by another thread to end `ask` after the frame at hand."""

    def last(self, name: str) -> Answer | None:
        return self.turns[-1].answers.get(name) if self.turns else None

    def past(self, name: str) -> list[tuple[str, str]]:
        """Return the turns that a checkpoint has answered; another one's answers are not put into its
        mouth."""
        return [(turn.question, turn.answers[name].text) for turn in self.turns if name in turn.answers]

    def ask(
        self,
        models: dict[str, Network],
        question: str,
        *,
        video_mode: Literal[VideoMode, "auto"] = "auto",
        max_tokens: int = MAX_TOKENS,
    ) -> Iterator[tuple[str, Answer]]:
        """Ask every model in turn; yield (its name, its answer): once with the text, and again after every
        frame with masks.

        The answers become a turn of the chat as they arrive. Ends early, with what there is, once `stop` is
        set. Raises ValueError for an empty question, and for one that makes no sense to a model, whose answer
        is then missing.
        """
        if not question.strip():
            raise ValueError(
                "the question is empty: write one, as in: Please segment the red circle in this image."
            )
        self.stop.clear()
        turn = Turn(question=question.strip())
        pasts = {name: self.past(name) for name in models}
        for name, model in models.items():
            text, masks_by_frame = self._ask_one(
                model, turn.question, past=pasts[name], video_mode=video_mode, max_tokens=max_tokens
            )
            if not turn.answers:
                self.turns.append(turn)
            answer = turn.answers[name] = Answer(text=text)
            yield name, answer
            if self.stop.is_set():
                return
            for _, masks in masks_by_frame:
                answer.masks = answer.masks or [[] for _ in masks]
                for mask, of_object in zip(masks, answer.masks, strict=True):
                    of_object.append(rle.encode(mask))
                yield name, answer
                if self.stop.is_set():
                    return

    def _ask_one(
        self,
        model: Network,
        question: str,
        *,
        past: Sequence[tuple[str, str]],
        video_mode: Literal[VideoMode, "auto"],
        max_tokens: int,
    ) -> tuple[str, Iterator[tuple[int, np.ndarray]]]:
        """Return the text and an iterator of (frame, masks (N, H, W)); a picture has one frame, or none
        without `[SEG]`."""
        text, turns = with_image(question, past)
        request = Request(frames=(), text=text, mask_prompts=tuple(self.regions), past=tuple(turns))
        if self.source.is_clip:
            of_clip = follow(
                model,
                request,
                self.source.frames,
                PredictOptions(mode=model.video_mode(video_mode)),
                max_tokens=max_tokens,
            )
            return of_clip.text, of_clip.masks
        options = PredictOptions(mode=model.video_mode("auto"))
        (answer,) = answers(
            model, [replace(request, frames=(self.source.frames[0],))], options, max_tokens=max_tokens
        )
        return answer.text, iter(
            [(0, np.stack([masklet[0] for masklet in answer.masks]))] if answer.masks else []
        )

    def mark(self, model: Network, kind: Kind, points: Sequence[Point]) -> None:
        """Add a region of the first frame: the object at a click or in a box as SAM2 finds it, or what a
        brush painted.

        points: of a click the last one counts, a box lies between the first and the last. Raises ValueError
        where there is no object.
        """
        if kind == "brush":
            self.regions.append(_stroke(points, self.source.size))
            return
        nothing, frame = Request(frames=(), text=""), self.source.frames[:1]
        (x1, y1), (x2, y2) = points[0], points[-1]
        box = (min(x1, x2), min(y1, y2), max(x1, x2), max(y1, y2))
        wanted: dict[str, Any] = {"points": [points[-1]]} if kind == "click" else {"boxes": [box]}
        self.regions.extend(with_clicks(model, nothing, frame, **wanted).mask_prompts)

    def region_question(self) -> str:
        """Ask for a description of all regions. Raises ValueError without any."""
        if not self.regions:
            raise ValueError(
                "no region is marked: click an object in the picture, draw a box around it or paint it, "
                "then ask again"
            )
        return prompts.region_question(len(self.regions), prompts.REGION_QUESTIONS[0])


def _stroke(points: Sequence[Point], size: tuple[int, int]) -> RLE:
    """Paint a line with round ends."""
    radius = max(1.0, BRUSH_WIDTH * max(size) / 2)
    canvas = Image.new("1", size)
    pen = ImageDraw.Draw(canvas)
    pen.line([tuple(point) for point in points], fill=1, width=max(1, round(2 * radius)), joint="curve")
    for x, y in points:
        pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=1)
    return rle.encode(np.asarray(canvas))
