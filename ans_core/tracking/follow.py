"""A video and one prompt for each of N objects in, their masks frame by frame out, in memory that does not
grow with the video.

All objects that are prompted in the same way in the same frame go through SAM2 as one batch, and every frame
is encoded once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from sam2.modeling.sam2_base import NO_OBJ_SCORE
from torch import Tensor

from ans_core.model.grounding import FrameFeatures, Grounding
from ans_core.model.masks import upsample_logits
from ans_core.pictures import transforms
from ans_core.tracking.simulator import BOTTOM_RIGHT, TOP_LEFT, center_at
from ans_core.types import ImageRef

AT_ONCE = 32
"""Most objects of one pass: the memory of a frame is a few megabytes an object."""


@dataclass(frozen=True, kw_only=True)
class ObjectPrompt:
    """Where an object is in one frame: points with SAM2's labels, or a mask that is not empty."""

    frame: int = 0
    points: tuple[tuple[float, float], ...] = ()
    """(x, y) in pixels of the picture."""
    labels: tuple[int, ...] = ()
    mask: Bool[np.ndarray, "H W"] | None = None

    @staticmethod
    def box(corners: Iterable[Any], *, frame: int = 0) -> ObjectPrompt:
        """Prompt with a box x0, y0, x1, y1."""
        x0, y0, x1, y1 = map(float, corners)
        return ObjectPrompt(frame=frame, points=((x0, y0), (x1, y1)), labels=(TOP_LEFT, BOTTOM_RIGHT))

    @staticmethod
    def around(mask: Bool[np.ndarray, "H W"], *, frame: int = 0) -> ObjectPrompt:
        """Prompt with the box around a mask that is not empty."""
        ys, xs = np.nonzero(mask)
        return ObjectPrompt.box((xs.min(), ys.min(), xs.max() + 1, ys.max() + 1), frame=frame)

    def check(self, *, width: int, height: int, frames: int, where: str) -> None:
        """Raise ValueError for a frame that the video lacks, a point outside of the picture, a box without an
        inside, and a mask that is empty or of another size."""
        if not 0 <= self.frame < frames:
            raise ValueError(
                f"{where}: there is no frame {self.frame}; the video has {frames}, counted from 0"
            )
        box = self.labels == (TOP_LEFT, BOTTOM_RIGHT)
        for x, y in self.points:
            if not (0 <= x < width + box and 0 <= y < height + box):  # a box may end at the picture's edge
                raise ValueError(
                    f"{where}: the point {x:g},{y:g} lies outside of the picture of {width} x {height} pixels"
                )
        if box:
            (x0, y0), (x1, y1) = self.points
            if x0 >= x1 or y0 >= y1:
                raise ValueError(
                    f"{where}: the box {x0:g},{y0:g},{x1:g},{y1:g} has no inside; give its left, upper, "
                    "right and lower edge"
                )
        if self.mask is None:
            return
        if self.mask.shape != (height, width):
            raise ValueError(
                f"{where}: the mask is {self.mask.shape[1]} x {self.mask.shape[0]}, the frames {width} x "
                f"{height}"
            )
        if not self.mask.any():
            raise ValueError(f"{where}: the mask is empty; prompt in a frame that shows the object")


def follow(
    sam2: Grounding,
    pictures: Sequence[Image.Image] | Callable[[int], Image.Image],
    prompts: Sequence[ObjectPrompt],
    *,
    frames: int,
    memory: bool = True,
) -> Iterator[tuple[int, Float[Tensor, "N h4 w4"]]]:
    """Yield (frame, low-resolution mask logits of the N objects) in order of time, as the stock predictor
    computes them.

    Before the frame of its prompt an object is not looked for: its logits are NO_OBJ_SCORE. Raises ValueError
    for frames of unequal size. Without `memory`, every frame from there on is decoded from its own features
    by the same prompt, to tell what the memory is worth. Of a mask that is its box: SAM2 gives a mask back as
    it is.
    """
    if not memory:
        prompts = [
            prompt if prompt.mask is None else ObjectPrompt.around(prompt.mask, frame=prompt.frame)
            for prompt in prompts
        ]
    picture = pictures if callable(pictures) else pictures.__getitem__
    size = picture(0).size
    tracks: list[tuple[int, list[int], Iterator[tuple[int, Tensor]]]] = []
    current: list[tuple[int, FrameFeatures]] = []
    for (frame, _), objects in _alike(prompts).items():
        for first in range(0, len(objects), AT_ONCE):
            chosen = objects[first : first + AT_ONCE]
            shown = iter(lambda: current[0], None)
            inputs = _inputs(sam2, [prompts[n] for n in chosen], size)
            # a prompted frame reads no memory
            prompted = dict.fromkeys([frame] if memory else range(frames), inputs)
            tracks.append(
                (frame, chosen, sam2.propagate(shown, prompted, objects=len(chosen), frames=frames))
            )
    side = sam2.image_size // 4
    with stock_rules(sam2):
        for index in range(frames):
            shot = picture(index)
            if shot.size != size:
                raise ValueError(
                    f"frame {index} is {shot.width} x {shot.height}, the first {size[0]} x {size[1]}; bring "
                    "them to one size"
                )
            logits = torch.full((len(prompts), side, side), NO_OBJ_SCORE, device=sam2.device)
            running = [(chosen, outputs) for frame, chosen, outputs in tracks if frame <= index]
            with torch.no_grad():  # not around the `yield`: the caller has a mode of its own
                if running:
                    current[:] = [
                        (
                            index,
                            sam2.encode(transforms.normalise([shot], size=sam2.image_size).to(sam2.device)),
                        )
                    ]
                for chosen, outputs in running:
                    logits[chosen] = next(outputs)[1].float()
            yield index, logits


def check_prompts(
    prompts: Sequence[ObjectPrompt], frames: Sequence[ImageRef], *, where: Sequence[str]
) -> None:
    """Raise ValueError, as `ObjectPrompt.check`, for a prompt that its video can't have; `where`: of each prompt."""
    width, height = transforms.image_size(frames[0])
    for prompt, place in zip(prompts, where, strict=True):
        prompt.check(width=width, height=height, frames=len(frames), where=place)


def frame_logits(
    sam2: Grounding, frames: Sequence[ImageRef], prompts: Sequence[ObjectPrompt], *, memory: bool = True
) -> Iterator[Iterator[Float[np.ndarray, "H W"]]]:
    """Yield the mask logits of `follow` for every frame, at its size, one object at a time."""
    width, height = transforms.image_size(frames[0])
    followed = follow(
        sam2, lambda index: transforms.open_image(frames[index]), prompts, frames=len(frames), memory=memory
    )
    for _, logits in followed:
        yield (upsample_logits(z, size=sam2.image_size, height=height, width=width) for z in logits)


def _alike(prompts: Sequence[ObjectPrompt]) -> dict[tuple[int, int], list[int]]:
    """Group objects by the frame and the number of points of their prompt (0: a mask)."""
    groups: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, prompt in enumerate(prompts):
        groups[prompt.frame, len(prompt.points)].append(number)
    return groups


def _inputs(sam2: Grounding, prompts: Sequence[ObjectPrompt], size: tuple[int, int]) -> dict[str, Any]:
    """Return the arguments of `Grounding.step` for prompts of one kind in one frame."""
    if prompts[0].mask is not None:
        prompt_masks = [prompt.mask for prompt in prompts if prompt.mask is not None]
        masks = sam2.mask_prompts(torch.from_numpy(np.stack(prompt_masks))[:, None].to(sam2.device), [0])[0][
            "masks"
        ]
        for mask, shown in zip(prompt_masks, masks[:, 0], strict=True):
            if not shown.any():  # too small for SAM2's size, as in training (clips.py)
                shown[center_at(mask, sam2.image_size)] = 1
        return {"masks": masks}
    scale = torch.tensor(sam2.image_size) / torch.tensor(size)
    points = torch.tensor([prompt.points for prompt in prompts]) * scale
    labels = torch.tensor([prompt.labels for prompt in prompts], dtype=torch.int32)
    return {"prompt": {"point_coords": points.to(sam2.device), "point_labels": labels.to(sam2.device)}}


def label_map(logits: Iterable[Float[np.ndarray, "H W"]]) -> UInt8[np.ndarray, "H W"]:
    """Return each pixel's object, from 1; 0 where no object's logit is positive. The highest logit counts, of
    equal ones the first.

    Of an iterator, one object's logits are held at a time: those of 255 objects at 1080p would be 2.1 GB.
    """
    each = iter(logits)
    highest = next(each).copy()
    labels = (highest > 0).astype(np.uint8)
    for number, object_logits in enumerate(each, start=2):
        labels[(object_logits > highest) & (object_logits > 0)] = number
        np.maximum(highest, object_logits, out=highest)
    return labels


@contextmanager
def stock_rules(sam2: Grounding) -> Iterator[None]:
    """Let SAM2 work as published: in eval mode, with masks blank where the object is absent, by its mask
    decoder from before Sa2VA's training where that was kept."""
    training, blank, decoder = sam2.training, sam2.blank_absent, sam2.sam_mask_decoder
    sam2.eval()
    sam2.blank_absent = True
    if sam2.config.original_decoder:
        sam2.sam_mask_decoder = sam2.original_mask_decoder
    try:
        yield
    finally:
        sam2.sam_mask_decoder, sam2.blank_absent = decoder, blank
        sam2.train(training)
