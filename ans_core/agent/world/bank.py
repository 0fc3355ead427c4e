"""Where an agent's questions come from: the drawn world, and annotated pictures (`agent.sources`), about which
the stage `cota` wrote them down."""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from urllib.parse import quote

from PIL import Image
from pydantic import TypeAdapter

from ans_core import dist
from ans_core.agent.world import FAMILIES, annotated, draw_question
from ans_core.agent.world.question import Question
from ans_core.agent.world.question_sets import QuestionedPicture
from ans_core.agent.world.things import AnnotatedPicture, name_of_file
from ans_core.dist import rng_of
from ans_core.pictures import media, orientation, transforms
from ans_core.types import Frames
from ans_core.written import write_atomically

FILE = "questions.jsonl"
"""A record a line, in order of pictures."""
RECORD = TypeAdapter(Question)
Reword = Callable[[Sequence[Question]], list[Question]]
MOST_READ = 2000
"""Photographs of a split that are read for text, half a second each: all of COCO would take a day of a core."""


def write_questions(
    pictures: Sequence[AnnotatedPicture | QuestionedPicture],
    folder: Path,
    *,
    seed: int,
    reader: str | None = None,
    reword: Reword | None = None,
) -> Counter[str]:
    """Write the questions about pictures, and the pictures that have some, into a folder; return how many
    there are of each family. Nothing is written where there is none. `reader`: of text on photographs, which
    is looked for on MOST_READ of them, evenly spread. `reword`: gives the questions
    other thoughts. Several processes take pictures in turn, and the first one rewords and writes the
    questions; all must call it."""
    photographs = [n for n, picture in enumerate(pictures) if isinstance(picture, AnnotatedPicture)]
    step = -(-len(photographs) // MOST_READ) or 1
    read = set(photographs[::step])
    readers = [reader if number in read else None for number in range(len(pictures))]

    def made(
        some: Sequence[tuple[AnnotatedPicture | QuestionedPicture, str | None]],
    ) -> Iterator[list[Question]]:
        for picture, reader in some:
            if isinstance(picture, QuestionedPicture):
                frames, asked = picture.frames, list(picture.questions)
            else:
                frames = (picture.frame,)
                asked = annotated.questions([picture], seed=seed, reader=reader)
            file = _copied(frames, picture.picture_id, folder / "pictures") if asked else ""
            yield [replace(question, picture=file) for question in asked]

    of_pictures = dist.by_turns(
        list(zip(pictures, readers, strict=True)), 16, made, desc=f"questions of {folder.name}"
    )
    asked = [question for questions in of_pictures for question in questions]
    if dist.rank() == 0 and asked:
        asked = reword(asked) if reword else asked
        write_atomically(folder / FILE, "".join(json.dumps(asdict(question)) + "\n" for question in asked))
    dist.wait_for_all()
    return Counter(question.family for question in asked)


def file_of_frame(picture: str, number: int) -> str:
    """Return the file of a frame in the folder of a clip."""
    return f"{picture}/{number:05d}.png"


def _copied(frames: Frames, picture_id: str, folder: Path) -> str:
    """Copy a picture as it is stored, where that is a file of an upright JPEG or PNG, else as PNG; a clip, or
    several pictures, into a folder, a PNG a frame. Return the file or folder, from the folder above."""
    name = name_of_file(quote(picture_id, safe=""))
    if len(frames) > 1:
        (folder / name).mkdir(parents=True, exist_ok=True)
        for place, one in enumerate(frames):
            file = folder.parent / file_of_frame(f"{folder.name}/{name}", place)
            file.write_bytes(media.png(transforms.open_image(one)))
        return f"{folder.name}/{name}"
    folder.mkdir(parents=True, exist_ok=True)
    frame = frames[0]
    pixels = transforms.open_image(frame)  # names a damaged file
    if isinstance(frame, Path) and (suffix := frame.suffix.lower()) in (".jpg", ".jpeg", ".png"):
        with Image.open(frame) as stored:
            upright = orientation.of_picture(stored) == orientation.UPRIGHT
        if upright:
            shutil.copyfile(frame, folder / f"{name}{suffix}")
            return f"{folder.name}/{name}{suffix}"
    (folder / f"{name}.png").write_bytes(media.png(pixels))
    return f"{folder.name}/{name}.png"


class WrittenQuestions:
    """The questions about pictures of one folder. Of each only its place in the file is held, so a million of
    them cost some 200 MB."""

    def __init__(self, folder: Path, *, seed: int) -> None:
        self.folder = folder
        self.start: dict[str, int] = {}
        """Question id -> first byte of its record."""
        self.of_family: dict[str, list[str]] = defaultdict(list)
        """Ids by family, in an order that the seed decides."""
        place = 0
        with (folder / FILE).open("rb") as file:
            for line in file:
                record = json.loads(line)
                self.start[record["question_id"]] = place
                self.of_family[record["family"]].append(record["question_id"])
                place += len(line)
        for family, ids in self.of_family.items():
            rng_of(seed, "written questions", family).shuffle(ids)

    def plain(self, question_id: str) -> Question:
        """Return a question without its picture."""
        with (self.folder / FILE).open("rb") as file:
            file.seek(self.start[question_id])
            return RECORD.validate_json(file.readline())

    def question(self, question_id: str) -> Question:
        question = self.plain(question_id)
        place = self.folder / question.picture
        files = sorted(place.iterdir()) if place.is_dir() else [place]
        return replace(question, frames=tuple(file.read_bytes() for file in files))


class QuestionBank:
    """(family, split, index) -> a question. Drawn ones have no end; those about pictures begin again."""

    def __init__(
        self,
        drawn: Sequence[str],
        folders: Mapping[str, Path] | None = None,
        *,
        seed: int,
        tile: int,
        remembered: int | None = 256,
    ) -> None:
        """drawn: families of the drawn world. folders: split -> folder that may hold written questions.
        remembered: drawn questions that are not drawn again (None: all)."""
        self.drawn, self.seed = tuple(drawn), seed
        self._draw = lru_cache(remembered)(partial(draw_question, seed=seed, tile=tile))
        self.written = {
            split: WrittenQuestions(folder, seed=seed)
            for split, folder in (folders or {}).items()
            if (folder / FILE).is_file()
        }

    @classmethod
    def of_cota(
        cls, drawn: Sequence[str], cota: Path, *, seed: int, tile: int, remembered: int | None = 256
    ) -> QuestionBank:
        """Return the bank of the drawn world and of what the stage `cota` wrote into this folder."""
        folders = {folder.name: folder for folder in sorted(cota.iterdir()) if folder.is_dir()}
        return cls(drawn, folders, seed=seed, tile=tile, remembered=remembered)

    def of_pictures(self, split: str) -> tuple[str, ...]:
        """Return the families that have questions about pictures."""
        return tuple(self.written[split].of_family) if split in self.written else ()

    def families(self, split: str) -> tuple[str, ...]:
        return (*self.drawn, *self.of_pictures(split))

    def at_most(self, wanted: int, family: str, split: str) -> int:
        """Return how many of so many questions there are."""
        return wanted if family in FAMILIES else min(wanted, len(self.written[split].of_family[family]))

    def question(self, family: str, split: str, index: int) -> Question:
        return self.named(self.id_of(family, split, index), split)

    def plain(self, family: str, split: str, index: int) -> Question:
        """Return a question about a picture without the picture."""
        return self.written[split].plain(self.id_of(family, split, index))

    def named(self, question_id: str, split: str) -> Question:
        family = question_id.partition("/")[0]
        if family in FAMILIES:
            index = int(question_id.rpartition("/")[2])
            return self._draw(family, split=split, index=index)
        return self.written[split].question(question_id)

    def id_of(self, family: str, split: str, index: int) -> str:
        """Return the question's id."""
        if family in FAMILIES:
            return f"{family}/{split}/{index}"
        ids = self.written[split].of_family[family]
        return ids[index % len(ids)]


def picture_share(share: float, *, pictures: bool, others: bool) -> float:
    """Return the share of a sequence that is about pictures, where there may be only one kind."""
    return (share if others else 1.0) if pictures else 0.0


def divided(number: int, share: float) -> tuple[bool, int]:
    """Return whether number `number` of a sequence belongs to the `share` of it that is about pictures, which
    is spread evenly, and its number among its own kind."""
    before, after = (math.floor(n * share + 1e-9) for n in (number, number + 1))
    return (True, before) if after > before else (False, number - before)
