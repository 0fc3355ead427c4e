from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from ans_core.agent import frozen
from ans_core.agent.episode import Toolbox
from ans_core.inference import clicks


@pytest.fixture(scope="session")
def toolbox() -> Iterator[Toolbox]:
    """Operations without a model; READ_TEXT reads by templates, the drawn world's reader."""
    with Toolbox(reader="template") as made:
        yield made


ALIKE = 40.0
"""Distance of colours (RGB) within a plain thing, its antialiased edge left out."""


def _same_colour(picture: Image.Image, colour: np.ndarray) -> np.ndarray:
    return np.linalg.norm(np.asarray(picture, float) - colour, axis=2) < ALIKE


def colour_at(
    model: object, picture: Image.Image, points: list[tuple[float, float, int]]
) -> tuple[np.ndarray, float]:
    """All that hangs together with a point and has its colour: the true mask of a plain drawn thing, but for
    its edge."""
    x, y = (
        min(int(points[0][0] * picture.width), picture.width - 1),
        min(int(points[0][1] * picture.height), picture.height - 1),
    )
    labels, _ = ndimage.label(_same_colour(picture, np.asarray(picture, float)[y, x]))
    return labels == labels[y, x], 1.0


def follow_colour(clip: frozen.Clip, frames: Sequence[int], mask: np.ndarray) -> np.ndarray:
    """The piece of the mask's colour that overlaps most with the frame before."""
    pictures = [clip.pictures[frame] for frame in frames]
    colour = np.median(np.asarray(pictures[0], float)[mask], axis=0)
    masks = [mask]
    for picture in pictures[1:]:
        labels, pieces = ndimage.label(_same_colour(picture, colour))
        common = [int((masks[-1] & (labels == piece)).sum()) for piece in range(1, pieces + 1)]
        masks.append(labels == 1 + int(np.argmax(common)) if max(common, default=0) else np.zeros_like(mask))
    return np.stack(masks)


@pytest.fixture
def colour_sam(monkeypatch: pytest.MonkeyPatch) -> None:
    """SAM2's place taken by colours, which tell plain drawn things apart: what is built on masks can be
    tested without training."""
    monkeypatch.setattr(clicks, "mask_by_points", colour_at)
    monkeypatch.setattr(frozen, "follow", follow_colour)
