"""Pictures -> pixels for a vision tower, and the grids of image tokens that it makes of them.

InternVL sees an image as square tiles of one size and every frame of a clip as one tile; Qwen-VL sees each
picture whole, at about its own size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Literal, Protocol, get_args, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ans_core.data.tensor_batch import TensorBatch
from ans_core.pictures import transforms

Grid = tuple[int, int]
"""(rows, columns)."""

Preparation = Literal["training", "upstream"]
"""How a prompt is made of text and pictures. `training`: as in training. `upstream`: as upstream's inference
does it for Qwen-VL, which differs (docs/backbones.md); the two are the same for InternVL."""


def check_preparation(preparation: str) -> None:
    if preparation not in get_args(Preparation):
        raise ValueError(f"preparation {preparation!r}; there are {', '.join(get_args(Preparation))}")


@dataclass(frozen=True, kw_only=True)
class Views(TensorBatch):
    """One image, several of one question, or the frames of one clip, as V views. A view becomes a grid of
    image tokens; tokens run row by row, view after view."""

    pixels: Tensor
    """InternVL: (V, 3, S, S). Qwen-VL: (patches of all views, values of a patch)."""
    grids: tuple[Grid, ...]
    pictures: tuple[int, ...] = ()
    """Views of each picture, as it stands in the text: an image's stand together, frames one by one. Empty:
    all are of one image."""

    @property
    def tokens(self) -> list[int]:
        return token_counts(self.grids, self.pictures)

    @property
    def shown(self) -> Grid:
        return self.grids[shown_view(self.pictures)]


def token_counts(grids: Sequence[Grid], pictures: Sequence[int]) -> list[int]:
    """Return the number of image tokens of every picture in the text; `pictures`: as in `Views`."""
    counts = iter([rows * columns for rows, columns in grids])
    return [sum(islice(counts, views)) for views in pictures or (len(grids),)]


def shown_view(pictures: Sequence[int]) -> int:
    """Return the index of the view that shows the whole of an image (its last), the first one's of several,
    or the first frame of a clip. Visual prompts mark its cells."""
    return pictures[0] - 1 if pictures else -1


@runtime_checkable
class Cutter(Protocol):
    """How one kind of vision tower wants its pictures."""

    def views(
        self, pictures: Sequence[Image.Image], *, clip: bool, preparation: Preparation = "training"
    ) -> Views:
        """Cut an image, several of any sizes, or the frames of a clip."""
        ...

    def grids(self, width: int, height: int, *, frames: int = 1) -> tuple[Grid, ...]:
        """Return the grids of the `views` in training of an image, or a clip of so many frames, of this
        size."""
        ...

    @property
    def token_values(self) -> int:
        """Numbers in `Views.pixels` for each image token."""
        ...


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """InternVL: square tiles, the last one of the whole image."""

    size: int
    max_tiles: int
    grid: int
    """Image tokens on a side of a tile."""
    min_tiles: int = 1
    """Without the whole image, which comes last where there is more than one."""

    def views(
        self, pictures: Sequence[Image.Image], *, clip: bool, preparation: Preparation = "training"
    ) -> Views:
        tiles = [[picture] if clip else transforms.tiles(picture, **self._counts) for picture in pictures]
        pixels = transforms.normalise([*chain.from_iterable(tiles)], size=self.size)
        counts = tuple(map(len, tiles))
        return Views(pixels=pixels, grids=((self.grid, self.grid),) * sum(counts), pictures=counts)

    def grids(self, width: int, height: int, *, frames: int = 1) -> tuple[Grid, ...]:
        tiles = transforms.tile_count(width, height, **self._counts) if frames == 1 else frames
        return ((self.grid, self.grid),) * tiles

    @property
    def token_values(self) -> int:
        return 3 * (self.size // self.grid) ** 2

    @property
    def _counts(self) -> dict[str, int]:
        return {"size": self.size, "max_tiles": self.max_tiles, "min_tiles": self.min_tiles}


FRAME_SHARE = 4
"""A frame of a clip gets this part of an image's pixels: upstream trains on 512 to 2048 units of 784 pixels
per image, 128 to 512 per frame."""
OUTER_FACTOR, OUTER_MIN, OUTER_MAX = 28, 4 * 784, 16384 * 784
"""qwen-vl-utils' resize before the processor's own, as upstream's inference calls it for both generations of
Qwen-VL."""


@dataclass(frozen=True, kw_only=True)
class Patches:
    """Qwen-VL: each picture in patches, resized to whole blocks of patches and to between `min_pixels` and
    `max_pixels`."""

    patch: int
    merge: int
    """Patches on a side of one image token."""
    temporal: int
    """Equal time steps of a still picture."""
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    min_pixels: int
    max_pixels: int

    def views(
        self, pictures: Sequence[Image.Image], *, clip: bool, preparation: Preparation = "training"
    ) -> Views:
        """preparation `upstream`: pictures are resampled twice, and frames are as large as images."""
        upstream = preparation == "upstream"
        share = FRAME_SHARE if clip and not upstream else 1
        patches, grids = [], []
        for picture in pictures:
            if upstream:
                size = rounded_size(
                    *picture.size, factor=OUTER_FACTOR, min_pixels=OUTER_MIN, max_pixels=OUTER_MAX
                )
                picture = picture.resize(size, Image.Resampling.BICUBIC)
            width, height = self.size(*picture.size, share=share)
            patches.append(self._patches(resized(picture, width, height)))
            grids.append((height // self.unit, width // self.unit))
        return Views(pixels=torch.cat(patches), grids=tuple(grids), pictures=(1,) * len(grids))

    def grids(self, width: int, height: int, *, frames: int = 1) -> tuple[Grid, ...]:
        width, height = self.size(width, height, share=FRAME_SHARE if frames > 1 else 1)
        return ((height // self.unit, width // self.unit),) * frames

    @property
    def unit(self) -> int:
        """Pixels on a side of one image token."""
        return self.patch * self.merge

    @property
    def token_values(self) -> int:
        return 3 * self.temporal * self.unit**2

    def size(self, width: int, height: int, *, share: int = 1) -> tuple[int, int]:
        return rounded_size(
            width,
            height,
            factor=self.unit,
            min_pixels=self.min_pixels // share,
            max_pixels=self.max_pixels // share,
        )

    def _patches(self, pixels: UInt8[Tensor, "3 H W"]) -> Float[Tensor, "P values"]:
        """Normalise pixels and cut them: block by block of merged patches; values by channel, time step, row,
        column."""
        mean, std = (255 * torch.tensor(c).view(3, 1, 1) for c in (self.mean, self.std))
        values = (pixels.float() - mean) / std
        _, height, width = values.shape
        blocks = values.view(
            3, height // self.unit, self.merge, self.patch, width // self.unit, self.merge, self.patch
        )
        # (block rows, block columns, rows, columns of patches, 3, patch, patch)
        blocks = blocks.permute(1, 4, 2, 5, 0, 3, 6)
        return (
            blocks[..., None, :, :]
            .expand(*blocks.shape[:5], self.temporal, -1, -1)
            .flatten(5)
            .flatten(0, 3)
            .flatten(1)
        )


def rounded_size(
    width: int, height: int, *, factor: int, min_pixels: int, max_pixels: int
) -> tuple[int, int]:
    """Return Qwen-VL's (width, height): multiples of `factor` with nearly the same aspect ratio, within the
    limits.

    Raises ValueError for a picture more than 200 times as long as wide, which the published models were never
    shown.
    """
    if max(width, height) > 200 * min(width, height):
        raise ValueError(
            f"a picture of {width} x {height} pixels is more than 200 times as long as wide; cut it into "
            "pieces"
        )
    rows, columns = max(1, round(height / factor)), max(1, round(width / factor))
    if rows * columns * factor**2 > max_pixels:
        shrink = math.sqrt(height * width / max_pixels)
        rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
    elif rows * columns * factor**2 < min_pixels:
        grow = math.sqrt(min_pixels / (height * width))
        rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
    return columns * factor, rows * factor


def resized(picture: Image.Image, width: int, height: int) -> UInt8[Tensor, "3 H W"]:
    """Resize as torchvision does for uint8 tensors (bicubic, antialiased): Qwen's processor gives the same
    bits. PIL's differ by a grey level in some 0.3 % of the values."""
    pixels = torch.from_numpy(np.array(picture)).permute(2, 0, 1)
    return F.interpolate(
        pixels[None], size=(height, width), mode="bicubic", antialias=True, align_corners=False
    )[0]
