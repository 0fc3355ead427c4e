"""Turn PIL pictures into normalised tensors, exactly as the reference prepares them (bicubic PIL resize, no
torchvision)."""

from __future__ import annotations

import io
import math
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from PIL import Image
from torch import Tensor

from ans_core import nearest_file
from ans_core.pictures import orientation, video_file
from ans_core.types import FilePart, ImageRef, VideoFrame

CODEC_ERRORS = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    LookupError,
    TypeError,
    ArithmeticError,
    struct.error,
    zlib.error,
)
"""Errors that Pillow's decoders raise for a broken file."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def open_image(ref: ImageRef) -> Image.Image:
    """Return the RGB picture of a file or of encoded bytes, upright: an EXIF tag turns or mirrors it, as in
    viewers. Raises ValueError naming the file if it is missing, truncated, no picture, too large or in
    floating point.

    Deviation on purpose: 16-bit grey (0..65535) becomes 8-bit, the high byte, as Pillow reads 16-bit colour.
    Upstream's `convert("RGB")` clips it at 255, which leaves white.
    """
    with _opened(ref) as image:
        turn = orientation.of_picture(image)  # before Pillow reads the pixels, and a tag after them
        if image.mode == "F":  # Pillow would take them for 0 to 255: what lies in [0, 1] would be black
            raise ValueError(
                "its values are floating-point numbers of unknown range (save it with 8 or 16 bits)"
            )
        if not image.mode.startswith("I"):  # "I", "I;16", "I;16B"
            return orientation.upright(image.convert("RGB"), turn)
        grey = Image.fromarray((np.asarray(image).clip(0, 65535) >> 8).astype(np.uint8))
        return orientation.upright(grey.convert("RGB"), turn)


def image_size(ref: ImageRef) -> tuple[int, int]:
    """Return (width, height) of the upright picture without reading the pixels. Raises ValueError as
    `open_image` does."""
    (width, height), turn = stored(ref)
    return (height, width) if orientation.swaps_sides(turn) else (width, height)


def stored(ref: ImageRef) -> tuple[tuple[int, int], int]:
    """Return (width, height) of the stored pixels, and EXIF's orientation, 1 to 8, by which they are shown.
    Raises ValueError as `open_image` does."""
    if isinstance(ref, VideoFrame):
        return video_file.size(ref.file), orientation.UPRIGHT
    if isinstance(ref, bytes):
        return _header(ref)
    file = ref.file if isinstance(ref, FilePart) else Path(ref)
    changed = 0
    if isinstance(file, Path):
        with suppress(OSError, ValueError):  # the message is that of opening it
            changed = file.stat().st_mtime_ns
    return _header_of_file(ref, changed)


def stored_pixels(ref: ImageRef) -> ImageRef:
    """Return a picture that opens as its stored pixels, whatever an EXIF tag says. Raises ValueError as
    `open_image` does."""
    turn = stored(ref)[1]
    if turn == orientation.UPRIGHT:
        return ref
    file = io.BytesIO()
    orientation.stored(open_image(ref), turn).save(file, "PNG", compress_level=1)
    return file.getvalue()


@lru_cache(maxsize=65536)
def _header_of_file(ref: Path | FilePart, changed: int) -> tuple[tuple[int, int], int]:
    return _header(ref)


def _header(ref: Path | bytes | FilePart) -> tuple[tuple[int, int], int]:
    with _opened(ref) as image:
        return image.size, orientation.of_picture(image)


def check_image(ref: ImageRef) -> None:
    """Decode all pixels, and check a PNG's checksums, which decoding skips. Raises ValueError as `open_image`
    does."""
    if not isinstance(ref, VideoFrame):
        with _opened(ref) as image:
            image.verify()
    open_image(ref)


@contextmanager
def _opened(ref: ImageRef) -> Iterator[Image.Image]:
    if isinstance(ref, VideoFrame):
        yield video_file.read(ref)
        return
    if isinstance(ref, FilePart):
        where = str(ref.file) if ref.length is None else f"at byte {ref.start} of {ref.file}"
    else:
        where = f"of {len(ref)} embedded bytes" if isinstance(ref, bytes) else str(Path(ref))
    try:
        content = ref.read_bytes() if isinstance(ref, FilePart) else ref
        with Image.open(io.BytesIO(content) if isinstance(content, bytes) else content) as image:
            if not image.width * image.height:
                raise ValueError("it has no pixel")
            yield image
    except FileNotFoundError as error:
        nearest = nearest_file.hint(ref) if isinstance(ref, Path) else ""
        raise ValueError(
            f"the image {where} does not exist; put the file there, or correct the path{nearest}"
        ) from error
    except Image.DecompressionBombError as error:
        assert Image.MAX_IMAGE_PIXELS, "Pillow raises this only where there is a limit"
        limit = 2 * Image.MAX_IMAGE_PIXELS
        raise ValueError(
            f"the image {where} has more than {limit:,} pixels, the most that are read; scale it down"
        ) from error
    except CODEC_ERRORS as error:
        raise ValueError(
            f"cannot read the image {where}: {error}; replace the file or drop its record"
        ) from error


def normalise(
    images: Sequence[Image.Image], *, size: int, constants: torch.dtype = torch.float32
) -> Float[Tensor, "B 3 S S"]:
    """Resize each picture to size x size (bicubic, aspect not kept), scale to [0, 1], subtract mean, divide
    by std.

    `constants` = torch.bfloat16 rounds mean and std first, as the reference's inference does by accident (up
    to 0.0081 off).
    """
    arrays = np.stack([np.asarray(im.resize((size, size), Image.Resampling.BICUBIC)) for im in images])
    pixels = torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 255
    mean, std = (torch.tensor(c).to(constants).float().view(1, 3, 1, 1) for c in (MEAN, STD))
    return (pixels - mean) / std


def denormalise(pixels: Float[Tensor, "B 3 S S"]) -> UInt8[np.ndarray, "B S S 3"]:
    """Undo `normalise`, but for the sizes."""
    mean, std = (torch.tensor(c).view(1, 3, 1, 1) for c in (MEAN, STD))
    return ((pixels * std + mean) * 255).round().clamp(0, 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()


@lru_cache
def tiling_ratios(max_tiles: int, min_tiles: int = 1) -> tuple[tuple[int, int], ...]:
    """Return all (columns, rows) of min_tiles..max_tiles tiles by area, in the reference's order.

    The reference sorts a Python set, so equal areas keep the set's iteration order; ties between equal aspect
    differences depend on it.
    """
    counts = range(min_tiles, max_tiles + 1)
    ratios = {
        (i, j)
        for n in counts
        for i in range(1, n + 1)
        for j in range(1, n + 1)
        if min_tiles <= i * j <= max_tiles
    }
    return tuple(sorted(ratios, key=lambda r: r[0] * r[1]))


def tiling(width: int, height: int, *, size: int, max_tiles: int, min_tiles: int = 1) -> tuple[int, int]:
    """Return (columns, rows) of InternVL's dynamic tiling: the nearest aspect ratio; on a tie the larger one
    if the picture has enough pixels."""
    aspect, best, best_difference = width / height, (1, 1), math.inf
    for columns, rows in tiling_ratios(max_tiles, min_tiles):
        difference = abs(aspect - columns / rows)
        if difference < best_difference:
            best, best_difference = (columns, rows), difference
        elif difference == best_difference and width * height > 0.5 * size * size * columns * rows:
            best = (columns, rows)
    return best


def tile_count(width: int, height: int, *, size: int, max_tiles: int, min_tiles: int = 1) -> int:
    """Return the number of `tiles` of a picture of this size, the thumbnail included."""
    columns, rows = tiling(width, height, size=size, max_tiles=max_tiles, min_tiles=min_tiles)
    return 1 if columns * rows == 1 else columns * rows + 1


def tiles(image: Image.Image, *, size: int, max_tiles: int, min_tiles: int = 1) -> list[Image.Image]:
    """Return row-major tiles of size x size; if there is more than one, the whole image as a thumbnail comes
    last."""
    columns, rows = tiling(*image.size, size=size, max_tiles=max_tiles, min_tiles=min_tiles)
    if columns * rows == 1:
        return [image.resize((size, size), Image.Resampling.BICUBIC)]
    whole = image.resize((size * columns, size * rows), Image.Resampling.BICUBIC)
    boxes = [
        (c * size, r * size, (c + 1) * size, (r + 1) * size) for r in range(rows) for c in range(columns)
    ]
    return [*(whole.crop(b) for b in boxes), image.resize((size, size), Image.Resampling.BICUBIC)]


def coverage(mask: Bool[np.ndarray, "H W"], *, grid: int | tuple[int, int]) -> Float[Tensor, "h w"]:
    """Return the share, 0..1, of every cell of a feature map that a mask covers. `grid`: its side, or its
    rows and columns."""
    return torch.nn.functional.adaptive_avg_pool2d(torch.from_numpy(mask)[None, None].float(), grid)[0, 0]


def grid_cells(
    mask: Bool[np.ndarray, "H W"], *, grid: int | tuple[int, int], largest: bool = True
) -> Bool[Tensor, "h w"]:
    """Return the cells of the feature map that a visual prompt covers (nearest sampling, as upstream).
    `grid`: as in `coverage`.

    A region that nearest sampling misses completely gets the cell it covers most, unless `largest` is False:
    upstream then shows the model no region at all.
    """
    cells = (
        torch.nn.functional.interpolate(
            torch.from_numpy(mask)[None, None].float(), size=grid, mode="nearest"
        )[0, 0]
        > 0.5
    )
    if largest and not cells.any():
        cells.view(-1)[coverage(mask, grid=grid).argmax()] = True
    return cells
