"""What a benchmark asks a model, and the record of each answer in the form that its scorer reads."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from ans_core.pictures import transforms
from ans_core.types import ImageRef, Masklet, Prediction, Request, VideoFrames


class UnscoredError(ValueError):
    """The predictions can't be scored here: the truth is on a server, or a judge must read them. The message
    says what to do."""


@dataclass(frozen=True, kw_only=True)
class Objects:
    """The annotated objects of a clip, each of which is to be followed from the first frame that shows it."""

    names: tuple[str, ...]
    masklets: tuple[Masklet, ...]
    """None: the frame is not annotated."""
    overlap: bool
    """The benchmark lets a pixel be of several objects."""


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question of a benchmark."""

    name: str
    """Unique in the benchmark; as `Scorer.sample_id` names the sample in the scorer's table."""
    request: Request
    facts: dict[str, Any] = field(default_factory=dict)
    """What the record holds beside the answer: ids, the true answer."""
    truth: Prediction | None = None
    """The right answer, for pictures and the running metric; None: not public."""
    expression: str | None = None
    """What is to be segmented, for a model that is asked in another way."""
    objects: Callable[[], Objects] | None = None
    """Read the objects of a clip that a SAM2 follows; such an item asks nothing in words."""

    def right_answer(self) -> Prediction | None:
        """Return `truth`, or that of the objects, whose masks are read now."""
        return self.truth if self.objects is None else Prediction(text="", masks=self.objects().masklets)


def picture_item(name: str, picture: ImageRef, text: str, *, answer: str, facts: dict[str, Any]) -> Item:
    """Return a question about one picture, with its right answer in words."""
    return pictures_item(name, (picture,), text, answer=answer, facts=facts)


def pictures_item(
    name: str, pictures: tuple[ImageRef, ...], text: str, *, answer: str, facts: dict[str, Any]
) -> Item:
    """Return a question about one or several pictures; `text` begins with `prompts.picture_marks`."""
    request = Request(frames=pictures, text=text, stills=len(pictures) > 1)
    return Item(name=name, request=request, facts=facts, truth=Prediction(text=answer))


def recorded(key: str) -> Callable[[Item, Prediction], dict[str, Any]]:
    """Return what makes the record of an answer: the item's facts, with the reply under `key`."""
    return lambda item, prediction: item.facts | {key: prediction.text}


def in_records(folder: Path, split: str) -> None:
    """The truth of a benchmark whose records hold it (`Runner.truth`)."""


Running = tuple[str, Callable[[Item, Prediction], float]]
"""Name and value of a metric of one answer."""


@dataclass(frozen=True, kw_only=True)
class Runner:
    """How a model is run on a benchmark. Pictures stay in files, and one item at a time is made."""

    items: Callable[[Path, str], Iterator[Item]]
    """(folder of the benchmark, split) -> its questions, those about one picture in a row. Raises ValueError
    for missing files."""
    record: Callable[[Item, Prediction], dict[str, Any]]
    """A line of predictions.jsonl, which the scorer reads."""
    splits: tuple[str, ...] = ("",)
    """The first is the default; empty = the folder is the split."""
    truth: Callable[[Path, str], Path | None] = lambda folder, split: folder
    """The scorer's --data; None: the records hold the truth. Raises UnscoredError."""
    needs: Callable[[Path, str], object] = lambda truth, split: None
    """Raises ValueError where a file that the scorer reads from `truth`, beside those of the questions, is not
    there."""
    running: Running | None = None
    """The progress bar shows its mean."""
    notes: tuple[str, ...] = ()
    """Where the questions depart from the benchmark's own protocol."""
    follows: bool = False
    """The model is a SAM2 that follows objects, without words."""
    group: Callable[[Item], Hashable] = lambda item: item.name
    """The scorer needs all items of a group or none of them."""
    split_of: Callable[[Path], str] | None = None
    """The split of a folder, if none is asked for; None = the folder's name if that is one of `splits`, else
    the first of them."""

    def split_in(self, folder: Path) -> str:
        """Return the split of a folder for which none was asked."""
        if self.split_of is not None and folder.is_dir():
            return self.split_of(folder)
        return folder.name if folder.name in self.splits else self.splits[0]

    def missing(self, folder: Path, split: str) -> str | None:
        """Return what of the benchmark's files is not there or can't be read, before a model is asked."""
        if not folder.exists():
            return f"{folder} is not there; put the benchmark's files there, or give --data"
        try:
            next(iter(self.questions(folder, split)), None)
            with suppress(UnscoredError):
                if (truth := self.truth(folder, split)) is not None:
                    self.needs(truth, split)
        except (ValueError, OSError) as error:
            return str(error)
        return None

    def questions(self, folder: Path, split: str) -> Iterator[Item]:
        """Yield the items. Masks of published benchmarks are of the stored pixels, which upstream shows its
        models, too; so a picture with masks is asked about as it is stored, whatever its EXIF tag says."""
        for item in self.items(folder, split):
            masks = item.request.mask_prompts or item.objects or (item.truth and item.truth.masks)
            if masks or item.expression is not None:
                frames = item.request.frames
                if not isinstance(frames, VideoFrames):
                    frames = tuple(map(transforms.stored_pixels, frames))
                item = replace(item, request=replace(item.request, frames=frames))
            yield item


Answerer = Callable[[Sequence[Item]], list[Prediction]]
"""A model as a benchmark sees it: the items of one batch -> their predictions."""
