"""What an episode works on: a picture, several, or a clip, and immutable handles (image_n, mask_n, track_n) on its
native pixels.

A box is x1, y1, x2, y2 (x to the right, y down, x2 and y2 exclusive): of native pixels in a handle, of
thousandths (0..1000) of the named image in what a model says and reads, as InternVL writes boxes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Bool
from PIL import Image

from ans_core.agent.refusal import Refused
from ans_core.pictures import media, rle, transforms
from ans_core.types import RLE, FilePart, ImageRef, VideoFrame

Box = tuple[int, int, int, int]
Kind = Literal["image", "mask", "track"]
THOUSAND = 1000
FIRST = "image_1"
"""The picture asked about, the first of several, or the first frame of the clip."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageHandle:
    """A part of a frame."""

    frame: int
    box: Box


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskHandle:
    """Pixels of a frame, as COCO's run-length text."""

    frame: int
    counts: str
    predicted_iou: float | None = None
    """SAM2's own estimate; None where the mask was given."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackHandle:
    """One object's mask in every frame."""

    mask: str
    """What it was followed from."""
    counts: tuple[str, ...]


Handle = ImageHandle | MaskHandle | TrackHandle
KINDS: dict[type, Kind] = {ImageHandle: "image", MaskHandle: "mask", TrackHandle: "track"}
HandleT = TypeVar("HandleT", ImageHandle, MaskHandle, TrackHandle)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workspace:
    """F frames of a clip, or pictures, and the handles made on them so far. It holds no decoded pixels, so it
    is cheap to copy and to send."""

    frames: tuple[ImageRef, ...]
    sizes: tuple[tuple[int, int], ...]
    """Width and height of every picture, or the one of all frames of a clip."""
    clip: bool
    handles: tuple[tuple[str, Handle], ...]

    @classmethod
    def of(
        cls,
        frames: Sequence[media.Picture | ImageRef],
        *,
        clip: bool = False,
        stills: bool = False,
        masks: Sequence[Bool[np.ndarray, "H W"]] = (),
    ) -> Workspace:
        """Several frames are a clip, or, with `stills`, pictures of any sizes: image_1, image_2, ... `masks`: of
        the first frame, known beforehand; they become mask_1, mask_2, ...

        Raises ValueError without a frame, for a clip's frames that differ in size, and for masks of another
        size than the first.
        """
        refs = tuple(
            frame if isinstance(frame, (FilePart, VideoFrame)) else media.reference(frame) for frame in frames
        )
        sizes = tuple(transforms.image_size(ref) for ref in refs)
        if not stills and len(set(sizes)) != 1:
            raise ValueError(
                f"{len(refs)} frames of sizes {sorted(set(sizes))}; give at least one, and all of one size"
            )
        width, height = sizes[0]
        shown = sizes if stills else sizes[:1]
        full_images = [ImageHandle(frame=frame, box=(0, 0, *size)) for frame, size in enumerate(shown)]
        made = cls(frames=refs, sizes=shown, clip=clip or len(refs) > len(shown), handles=()).add(full_images)
        for mask in masks:
            if mask.shape != (height, width):
                raise ValueError(
                    f"a mask of {mask.shape[1]} x {mask.shape[0]} on a picture of {width} x {height}; give "
                    "masks of its size"
                )
            if not mask.any():
                raise ValueError("a mask without a pixel; leave it out")
            made = made.add((mask_handle(mask, frame=0),))
        return made

    @property
    def overviews(self) -> tuple[str, ...]:
        """Names of the images that are shown with the question."""
        return tuple(f"image_{number}" for number in range(1, len(self.sizes) + 1))

    def size(self, frame: int) -> tuple[int, int]:
        """Width and height of a frame."""
        return self.sizes[0 if self.clip else frame]

    def add(self, handles: Sequence[Handle]) -> Workspace:
        """With these under the names that `next_names` tells."""
        return replace(self, handles=(*self.handles, *zip(self.next_names(handles), handles, strict=True)))

    def next_names(self, handles: Sequence[Handle]) -> list[str]:
        count = {kind: sum(name.startswith(kind) for name, _ in self.handles) for kind in KINDS.values()}
        names = []
        for handle in handles:
            kind = KINDS[type(handle)]
            count[kind] += 1
            names.append(f"{kind}_{count[kind]}")
        return names

    def names(self, kind: Kind) -> list[str]:
        return [name for name, handle in self.handles if KINDS[type(handle)] == kind]

    def image(self, name: str) -> ImageHandle:
        return self._find(name, ImageHandle)

    def mask(self, name: str) -> MaskHandle:
        return self._find(name, MaskHandle)

    def track(self, name: str) -> TrackHandle:
        return self._find(name, TrackHandle)

    def _find(self, name: str, kind: type[HandleT]) -> HandleT:
        """Raises Refused for a name that is none of this kind."""
        handle = dict(self.handles).get(name)
        if not isinstance(handle, kind):
            available = self.names(KINDS[kind])
            raise Refused(
                "unknown_handle",
                f"there is no {KINDS[kind]} {name[:40]!r}; there is {', '.join(available) or 'none'}",
            )
        return handle

    def picture(self, name: str, *, least: int = 0) -> Image.Image:
        """An image's pixels, enlarged (bicubic, aspect kept) until its longer side has `least`."""
        handle = self.image(name)
        return cut(self.frames[handle.frame], handle.box, least=least)

    def rle(self, name: str) -> RLE:
        mask = self.mask(name)
        return {"size": [*self.size(mask.frame)[::-1]], "counts": mask.counts}

    def pixels(self, name: str) -> Bool[np.ndarray, "H W"]:
        """Of a mask, on its whole frame."""
        return rle.decode(self.rle(name))

    def masklet(self, name: str) -> list[RLE]:
        """A track's mask in every frame."""
        size = [*self.size(0)[::-1]]
        return [{"size": size, "counts": counts} for counts in self.track(name).counts]

    def thousandths(self, box: Box, *, frame: int = 0) -> list[int]:
        """Of the whole frame."""
        return [round(THOUSAND * v / side) for v, side in zip(box, self.size(frame) * 2, strict=True)]

    def fingerprint(self) -> str:
        """SHA-256 of everything that an operation can depend on: what the frames are, and the handles with
        their names. Files are known by their names, sizes and times: to read a long video would take longer
        than most operations."""
        parts = [
            [_identity(ref) for ref in self.frames],
            self.clip,
            [(name, asdict(handle)) for name, handle in self.handles],
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def digest(self, name: str) -> str:
        """SHA-256 of what a handle shows: equal for equal content, whatever its name."""
        handle = dict(self.handles)[name]
        frames = self.frames if isinstance(handle, TrackHandle) else (self.frames[handle.frame],)
        hashes = [hashlib.sha256(content(ref)).hexdigest() for ref in frames]
        parts = [
            KINDS[type(handle)],
            hashes,
            {k: v for k, v in asdict(handle).items() if k not in ("frame", "mask", "predicted_iou")},
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def mask_handle(
    mask: Bool[np.ndarray, "H W"], *, frame: int, predicted_iou: float | None = None
) -> MaskHandle:
    return MaskHandle(frame=frame, counts=rle.encode(mask)["counts"], predicted_iou=predicted_iou)


def box_of(mask: Bool[np.ndarray, "H W"]) -> Box:
    """Of a mask that is not empty."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1


def cut(frame: ImageRef, box: Box, *, least: int = 0) -> Image.Image:
    """A part of a frame, enlarged as `Workspace.picture` says."""
    part, size = opened(frame).crop(box), enlarged(box, least=least)
    return part if part.size == size else part.resize(size, Image.Resampling.BICUBIC)


def enlarged(box: Box, *, least: int) -> tuple[int, int]:
    """Width and height of a box enlarged until its longer side has `least`."""
    width, height = box[2] - box[0], box[3] - box[1]
    scale = max(1.0, least / max(width, height))
    return max(1, round(width * scale)), max(1, round(height * scale))


def content(ref: ImageRef) -> bytes:
    """What tells frames apart: a file's bytes, a video frame's pixels."""
    if isinstance(ref, VideoFrame):
        return transforms.open_image(ref).tobytes()
    return ref if isinstance(ref, bytes) else ref.read_bytes()


def _identity(ref: ImageRef) -> str:
    if isinstance(ref, bytes):
        return hashlib.sha256(ref).hexdigest()
    try:
        stat = Path(ref if isinstance(ref, Path) else ref.file).stat()
    except OSError:
        return repr(ref)  # a URL; of a missing file, whoever opens it says what is wrong
    return f"{ref!r} {stat.st_size} {stat.st_mtime_ns}"


def opened(ref: ImageRef) -> Image.Image:
    """Pixels of a frame. A file is opened each time (it may change); encoded bytes are decoded once while
    they are in use."""
    return _decoded(ref) if isinstance(ref, bytes) else transforms.open_image(ref)


@lru_cache(maxsize=8)
def _decoded(encoded: bytes) -> Image.Image:
    return transforms.open_image(encoded)
