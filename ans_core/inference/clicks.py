"""Points and boxes in a picture -> masks by the model's own SAM2, and with them the regions that a question
names."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import torch
from jaxtyping import Bool
from PIL import Image

from ans_core.inference.options import PredictOptions
from ans_core.model.masks import upsample
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.types import RLE, ImageRef, Request

Point = tuple[float, float]
"""(x, y) in pixels of the picture."""
Box = tuple[float, float, float, float]
"""(x1, y1, x2, y2) in pixels of the picture."""
INSIDE, TOP_LEFT, BOTTOM_RIGHT = 1, 2, 3
"""SAM2's labels of points."""


def with_clicks(
    model: Network,
    request: Request,
    frames: Sequence[ImageRef],
    *,
    points: Sequence[Point] = (),
    boxes: Sequence[Box] = (),
) -> Request:
    """Add a region per point, then per box, to a request's mask prompts; they count on from these: region1,
    region2, ...

    frames: the picture, or a clip, of which the first frame is clicked. Raises ValueError where there are
    none, for a click outside of the picture, and where SAM2 finds no object.
    """
    if not (points or boxes):
        return request
    if not frames:
        raise ValueError("point and box prompts without a picture; give the picture they are in")
    picture = transforms.open_image(frames[0])
    click_groups = [[(*point, INSIDE)] for point in points]
    click_groups += [[(x1, y1, TOP_LEFT), (x2, y2, BOTTOM_RIGHT)] for x1, y1, x2, y2 in boxes]
    return replace(
        request,
        mask_prompts=(*request.mask_prompts, *(_region(model, picture, clicks) for clicks in click_groups)),
    )


def _region(model: Network, picture: Image.Image, clicks: Sequence[tuple[float, float, int]]) -> RLE:
    where = ", ".join(f"{x:g}, {y:g}" for x, y, _ in clicks)
    if any(not (0 <= x <= picture.width and 0 <= y <= picture.height) for x, y, _ in clicks):
        raise ValueError(
            f"the point or box ({where}) is not in the picture of {picture.width} x {picture.height} pixels; "
            "give (x, y) in pixels"
        )
    if len(clicks) == 2 and not (clicks[0][0] < clicks[1][0] and clicks[0][1] < clicks[1][1]):
        raise ValueError(f"the box ({where}) is empty; give (x1, y1, x2, y2) with x1 < x2 and y1 < y2")
    mask, _ = mask_by_points(
        model, picture, [(x / picture.width, y / picture.height, label) for x, y, label in clicks]
    )
    if not mask.any():
        raise ValueError(f"SAM2 finds no object at ({where}); move the point or box, or give a mask")
    return rle.encode(mask)


@torch.no_grad()
def mask_by_points(
    model: Network, picture: Image.Image, points: list[tuple[float, float, int]]
) -> tuple[Bool[np.ndarray, "H W"], float]:
    """Mask and predicted IoU; an empty mask where SAM2's object score is negative. points: (x, y, SAM2's
    label), shares of the picture. By SAM2's original mask decoder where the model keeps it: Sa2VA's training
    fits the other one to `[SEG]`."""
    side = model.sam2.image_size
    coords = torch.tensor([[(x * side, y * side) for x, y, _ in points]], device=model.device)
    labels = torch.tensor([[label for _, _, label in points]], dtype=torch.int32, device=model.device)
    with (
        model.inference_autocast(),
        model.sam2.original() if model.sam2.config.original_decoder else nullcontext(),
    ):
        features = model.sam2.encode(PredictOptions().pixels(model, [picture]))
        first = torch.zeros(1, dtype=torch.long, device=model.device)
        # SAM2's own rule: several masks for one click, which may mean a part or the whole; one mask for a box
        out = model.sam2.decode(features, first, points=(coords, labels), multimask=len(points) == 1)
    if float(out.object_score[0]) < 0:
        return np.zeros((picture.height, picture.width), bool), 0.0
    return upsample(out.logits[0], size=side, height=picture.height, width=picture.width), float(
        out.ious[0].max()
    )
