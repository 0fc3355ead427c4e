"""The shared data types: what travels from an annotation file to a model and back to a report.

Dimension letters, everywhere: B samples, F frames, N objects, H W pixels, h w feature grid, L text tokens, D
hidden, V vocabulary, G rollouts.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, overload

from ans_core import storage

RLE = dict[str, Any]
"""COCO compressed run-length encoding: {"size": [H, W], "counts": str}."""

Masklet = tuple[RLE | None, ...]
"""One object's mask in every frame (length F). None = not annotated; an RLE of area 0 = absent."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FilePart:
    """An encoded image behind a URL (`file` is a text), or inside a larger file (an Arrow table, a tar):
    `length` bytes from byte `start` on, all if None, perhaps as text `data:...,<base64>`."""

    file: Path | str
    start: int = 0
    length: int | None = None

    @property
    def stem(self) -> str:
        return Path(self.file).stem

    def read_bytes(self) -> bytes:
        if isinstance(self.file, str):
            return storage.read(self.file, self.start, self.length)
        with self.file.open("rb") as opened:
            opened.seek(self.start)
            content = opened.read(self.length)
        return b64decode(content.partition(b",")[2]) if content.startswith(b"data:") else content


@dataclass(frozen=True, slots=True)
class VideoFrame:
    """One frame of a video file, decoded when it is opened."""

    file: Path
    index: int


ImageFile = Path | FilePart
ImageRef = ImageFile | bytes | VideoFrame
"""Where a frame's pixels are: a file, the encoded image itself, or a place in a larger file or a video
file."""


@dataclass(frozen=True, slots=True)
class VideoFrames(Sequence[VideoFrame]):
    """Some frames of a video file, in order. It holds no list of them, so that a long video costs no
    memory."""

    file: Path
    indices: range

    def __len__(self) -> int:
        return len(self.indices)

    @overload
    def __getitem__(self, place: int) -> VideoFrame: ...
    @overload
    def __getitem__(self, place: slice) -> VideoFrames: ...
    def __getitem__(self, place: int | slice) -> VideoFrame | VideoFrames:
        chosen = self.indices[place]
        return VideoFrames(self.file, chosen) if isinstance(chosen, range) else VideoFrame(self.file, chosen)


Frames = tuple[ImageRef, ...] | VideoFrames
"""The frames of a picture or clip, hashable: pictures, or frames of one video file."""

Task = Literal["referring", "region_caption", "grounded_caption", "conversation", "tracking", "phrase"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """One question about one image or video, with its ground truth. An image is a video with F = 1."""

    sample_id: str
    """Unique within its dataset; names the sample in errors and predictions."""
    dataset: str = ""
    image_id: str
    """Samples of one dataset with the same image_id show the same frames, which are then encoded once."""
    frames: Frames
    stills: bool = False
    """Whether several frames are pictures by themselves, of any sizes, and no clip; nothing of them is masked.
    A conversation names them `<Image-1>`, `<Image-2>`, ..."""
    height: int
    """Of the first frame."""
    width: int
    task: Task
    text: str
    """referring: the expression as the annotator wrote it. region_caption: the caption. grounded_caption: the
    plain caption. conversation: the answer. tracking: empty; clicks, boxes or masks name the objects (DAVIS,
    MOSE, SA-V). phrase: words for one thing of the picture whose mask is not known."""
    masks: tuple[Masklet, ...] = ()
    """N masklets of F entries. referring: the objects meant (0 = nothing fits the expression);
    region_caption: the regions asked about (visual prompts); tracking: all objects of the clip;
    grounded_caption: all the objects of phrase i together, so N = number of phrases."""
    phrases: tuple[tuple[int, int], ...] = ()
    """grounded_caption: [start, end) character spans of `text`, one per masklet, in order, not
    overlapping."""
    question: str | None = None
    """conversation: the user's words. Otherwise None and a template asks."""
    past: tuple[tuple[str, str], ...] = ()
    """conversation: the turns before the question, (question, answer), about the same pictures and
    regions."""
    detail: bool = False
    """region_caption, grounded_caption: whether the caption is a long one; the question then asks for
    details. referring: whether the expression describes its object at length, in sentences."""
    meta: dict[str, Any] = field(default_factory=dict)
    """Keys by which a report may split (`kind`, `category`, ...), never read by training, and `joined`: the
    places in `masks` of masklets that are no single object (a crowd; all of a category whose annotation has
    no identities). The stage `memory` follows none of these."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What a model is asked: upstream's `predict_forward` arguments. `text` holds `<image>` at the frames'
    place; of `stills`, one at the place of each."""

    frames: Frames
    text: str
    stills: bool = False
    """Whether several frames are pictures by themselves, of any sizes, and no clip: questions in words."""
    mask_prompts: tuple[RLE, ...] = ()
    """Regions of the first frame, named region1, region2, ... in the text."""
    past: tuple[tuple[str, str], ...] = ()
    """Turns before this one: (question, answer). The first question then holds `<image>`."""
    clip: bool = False
    """Whether a single frame is a clip of one frame, which is not tiled as a picture is. Several frames are
    a clip but for `stills`."""

    @property
    def is_clip(self) -> bool:
        return self.clip or (len(self.frames) > 1 and not self.stills)


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What a model answered."""

    text: str
    """Special tokens kept; the end-of-turn token cut."""
    masks: tuple[Masklet, ...] = ()
    """One masklet (F entries, none of them None) per `[SEG]` in the text, in order. None in `stills`."""


Predict = Callable[[Sequence[Request]], list[Prediction]]
"""A model as benchmarks see it: batched, answers in the order of the requests."""

Log = Callable[[dict[str, float], int], None]
"""log(metrics, step): records a training stage's curves."""
