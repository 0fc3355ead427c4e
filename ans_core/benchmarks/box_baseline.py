"""The baseline that no training has touched: the box that a vision-language model gives for an expression, as
a prompt for SAM2.

It tells what fine-tuning brought. The box is asked for in InternVL's grounding format; a clip's object is
boxed in its first frame and propagated by SAM2. What names no object (questions about pictures, descriptions)
the model answers in words alone.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core import prompts
from ans_core.benchmarks.public.asked import Answerer, Item
from ans_core.checkpoints import folder as folders
from ans_core.inference.options import PredictOptions
from ans_core.inference.predict import predict
from ans_core.model.grounding import FrameFeatures
from ans_core.model.masks import upsample
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.types import RLE, ImageRef, Prediction, Request

QUESTION = (
    "<image>\nPlease provide the bounding box coordinate of the region this sentence describes: "
    "<ref>{text}</ref>"
)
"""InternVL's own."""
_NUMBER = r"\s*(\d+(?:\.\d+)?)\s*"
_BOX = re.compile(rf"\[{_NUMBER},{_NUMBER},{_NUMBER},{_NUMBER}\]")
CORNERS = (2, 3)
"""SAM2's labels of a box's two points."""
Box = tuple[float, float, float, float]


def question_of(base: Path) -> str:
    """Return how a base is asked for a box: one that `ans run` has pre-trained from random weights was taught
    to answer the question for a mask with a box."""
    manifest = folders.read_manifest(base)
    made = manifest["metadata"] if manifest else {}
    return prompts.REFERRING_EVAL if "seed" in made else QUESTION


def answerer(model: Network, *, question: str, max_tokens: int) -> Answerer:
    def ask(items: Sequence[Item]) -> list[Prediction]:
        for item in items:
            if item.request.mask_prompts:
                raise ValueError(
                    f"{item.name}: box: answers no questions about regions; a base has not learned what "
                    "they are"
                )
        predictions = predict(
            model, [_request(item, question) for item in items], max_tokens=max_tokens, batch=len(items)
        )
        boxes = [
            box_of(p.text, sides=_sides(model, item, question)) if item.expression is not None else None
            for item, p in zip(items, predictions, strict=True)
        ]
        masks = _masks(model, items, boxes)
        return [
            Prediction(text=p.text, masks=(masks[i],) if i in masks else ())
            for i, p in enumerate(predictions)
        ]

    return ask


def _request(item: Item, question: str) -> Request:
    if item.expression is None:
        return item.request
    return Request(
        frames=item.request.frames[:1], text=question.format(text=item.expression.strip().rstrip("."))
    )


def _sides(model: Network, item: Item, question: str) -> tuple[int, int]:
    """Return the picture's width and height in the unit of the boxes: a base of ours was taught
    thousandths."""
    if question != QUESTION:
        return 1000, 1000
    return model.backbone.box_sides(*transforms.image_size(item.request.frames[0]))


def box_of(reply: str, *, sides: tuple[int, int] = (1000, 1000)) -> Box | None:
    """Return the first [x1, y1, x2, y2] of a reply as shares of the picture; None: no box with an area.
    sides: the picture's width and height in the reply's unit."""
    for match in _BOX.finditer(reply):
        x1, y1, x2, y2 = (
            min(float(number) / side, 1.0) for number, side in zip(match.groups(), 2 * sides, strict=True)
        )
        if x1 < x2 and y1 < y2:
            return x1, y1, x2, y2
    return None


@torch.no_grad()
def _masks(model: Network, items: Sequence[Item], boxes: Sequence[Box | None]) -> dict[int, tuple[RLE, ...]]:
    """Return the masklet of every item with a box. Boxes in one picture or clip share its encoding."""
    shown: dict[Sequence[ImageRef], list[int]] = defaultdict(list)
    for i, item in enumerate(items):
        if boxes[i] is not None:
            shown[item.request.frames].append(i)
    masklets: dict[int, list[RLE]] = defaultdict(list)
    for frames, numbers in shown.items():
        corners = (
            torch.tensor([boxes[i] for i in numbers], device=model.device).view(-1, 2, 2)
            * model.sam2.image_size
        )
        width, height = transforms.image_size(frames[0])
        with model.inference_autocast(), _untrained(model):
            for logits in _through(model, frames, corners):
                for i, one in zip(numbers, logits, strict=True):
                    masklets[i].append(
                        rle.encode(upsample(one, size=model.sam2.image_size, height=height, width=width))
                    )
    return {i: tuple(masks) for i, masks in masklets.items()}


def _untrained(model: Network) -> AbstractContextManager[None]:
    """Return the context of SAM2's own mask decoder, if the model has been trained and keeps it."""
    return model.sam2.original() if model.sam2.config.original_decoder else nullcontext()


def _through(
    model: Network, frames: Sequence[ImageRef], corners: Float[Tensor, "N 2 2"]
) -> Iterator[Float[Tensor, "N h4 w4"]]:
    """Yield the mask logits of every frame, prompted in the first."""
    labels = torch.tensor([CORNERS] * len(corners), dtype=torch.int32, device=model.device)
    if len(frames) == 1:
        first = torch.zeros(len(corners), dtype=torch.long, device=model.device)
        yield model.sam2.decode(
            _encoded(model, frames[0]), first, points=(corners, labels), multimask=False
        ).logits
        return
    prompted = {0: {"prompt": {"point_coords": corners, "point_labels": labels}}}
    shown = ((index, _encoded(model, frame)) for index, frame in enumerate(frames))
    for _, logits in model.sam2.propagate(shown, prompted, objects=len(corners), frames=len(frames)):
        yield logits


def _encoded(model: Network, frame: ImageRef) -> FrameFeatures:
    return model.sam2.encode(PredictOptions().pixels(model, [transforms.open_image(frame)]))
