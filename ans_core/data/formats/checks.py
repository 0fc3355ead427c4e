"""Checks that every reader makes before it returns a sample: files exist and are readable, records are
well-formed, text is not empty, ids are unique. (media.py has those of masks.)"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from types import TracebackType
from typing import Annotated, Any, BinaryIO, TypeVar

import jiter
import numpy as np
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from ans_core import prompts
from ans_core.pictures import rle, transforms
from ans_core.types import ImageRef

TOLD = 20
"""Number of a file's faults that are listed one by one."""
RESERVED = ("<image>", prompts.INTERNVL_IMAGE.slot, prompts.QWEN_IMAGE.slot, prompts.SEG)
"""Tokens that a text must not hold: they would stand for pixels or masks that don't exist."""
NUMBER = re.compile(r"0|-?[1-9][0-9]{0,17}")
"""A whole number as text, as it would be written again."""
CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class DataError(ValueError):
    """Annotations or pictures that can't be used. The message names the file, the record and the remedy."""

    def __init__(self, message: str, faults: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.faults = tuple(faults) or (message,)
        """The message, or each of the faults that it lists."""


class NoPixelError(DataError):
    """An object without a mask, or with an empty one: left out of published sets and exports, a fault
    elsewhere."""


class Unusable(Exception):
    """A record from which nothing can be learned, as published sets are known to hold some; the message is
    the reason. It is left out and counted: no fault."""


class NoSplit(DataError):
    """The data set does not have the split that was asked for."""


class Record(BaseModel):
    """Base of all records: types are strict (no "1" for 1); unknown keys are ignored."""

    model_config = ConfigDict(strict=True)


R = TypeVar("R", bound=Record)
T = TypeVar("T")
Filled = Annotated[list[T], Field(min_length=1)]
Pair = Annotated[list[T], Field(min_length=2, max_length=2)]


_count: ContextVar[Callable[[], object]] = ContextVar("count", default=lambda: None)


@contextmanager
def counting(count: Callable[[], object]) -> Iterator[None]:
    """Call `count` for every record that readers look at, to show progress."""
    token = _count.set(count)
    try:
        yield
    finally:
        _count.reset(token)


PARTS = 16
"""In which keys are sorted, by their first byte: all at once would take twice their memory."""


class Keys:
    """Keys of numbered records, of which the same may come twice, in 16 bytes each (texts in a dict: 170)."""

    def __init__(self) -> None:
        self._packed = bytearray()

    def add(self, number: int, key: tuple[object, ...]) -> None:
        digest = hashlib.blake2b(repr(key).encode("utf-8", "surrogatepass"), digest_size=12).digest()
        self._packed += digest + number.to_bytes(4, "little")

    def twins(self) -> dict[int, int]:
        """Return the number of every key that was there before -> that of the first one, in order."""
        packed = np.frombuffer(self._packed, [("digest", "S12"), ("number", "<u4")])
        leading = np.frombuffer(self._packed, np.uint8)[:: packed.itemsize]
        first: dict[int, int] = {}
        for part in range(PARTS):
            some = packed[leading % PARTS == part]
            some = some[np.argsort(some["digest"], kind="stable")]
            for place in np.flatnonzero(some["digest"][1:] == some["digest"][:-1]):
                before, number = (int(some["number"][n]) for n in (place, place + 1))
                first[number] = first.get(before, before)
        return dict(sorted(first.items()))


class Faults:
    """Collect the faults of single records (`with faults: ...` skips the rest of a wrong record) and raise
    them together at the end; count what is left out (Unusable) or read otherwise than it is written."""

    def __init__(self, file: Path | str) -> None:
        self.file, self.count, self.usable = file, 0, 0
        self.first: dict[str, None] = {}
        self.notes: Counter[str] = Counter()
        """What was left out of records or mended, by kind."""
        self.unusable: Counter[str] = Counter()
        """Records that are left out, by reason."""
        self._innermost = True
        self._names = set[str]()

    def once(self, name: str, *, where: str) -> None:
        """Refuse a second record of a name, as `picture 7`."""
        if name in self._names:
            raise DataError(f"{where}: {name} comes twice; ids must be unique")
        self._names.add(name)

    def __enter__(self) -> None:
        _count.get()()
        self._innermost = True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        self.usable += self._innermost and error is None
        self._innermost = False
        if isinstance(error, Unusable):
            self.unusable[str(error)] += 1
        elif isinstance(error, DataError):
            self.add(error)
        return isinstance(error, (Unusable, DataError))

    def add(self, fault: DataError) -> None:
        if (message := str(fault)) not in self.first:
            self.count += 1
            if len(self.first) < TOLD:
                self.first[message] = None

    def records(
        self, form: type[R], values: list[Any] | dict[str, Any] | None = None, *, noun: str = "record"
    ) -> Iterator[tuple[Any, str, R]]:
        """Yield (number or key, place, record) of the well-formed values (None: of the file's list); then raise
        what was wrong with any, as `tell` does."""
        if values is None:
            values = load_list(Path(self.file))
        for key, value in values.items() if isinstance(values, dict) else enumerate(values):
            where = f"{self.file}: {noun} {rle.short(key)}"
            try:
                well_formed = record(form, value, where)
            except DataError as fault:
                self.add(fault)
            else:
                yield key, where, well_formed
        self.tell()

    def tell(self, part: str = "") -> None:
        """Log the notes and what is left out. Raise DataError if anything was wrong, or no record is left (`part`:
        of what)."""
        if notes := [f"{count:,} {what}" for what, count in self.notes.most_common() if count]:
            logging.warning("%s: %s", self.file, "; ".join(notes))
        if self.count == 1:
            raise DataError(*self.first)
        if self.count:
            more = [f"... and {self.count - TOLD} more"] if self.count > TOLD else []
            raise DataError(
                "\n  ".join([f"{self.file}: {self.count} faults", *self.first, *more]), [*self.first, *more]
            )
        if self.unusable:
            why = "; ".join(f"{count:,} with {reason}" for reason, count in self.unusable.most_common())
            if not self.usable:
                raise DataError(f"{self.file}: no record{part} can be used: {why}")
            logging.warning("%s: %s records are left out: %s", self.file, f"{self.unusable.total():,}", why)


def as_integer(value: object) -> object:
    """Make 1.0 and "1" the number 1: tools that keep their tables in floating point (pandas) or as text (XML,
    CSV) write whole numbers so. Anything else, as "007", stays."""
    if isinstance(value, str):
        return int(value) if NUMBER.fullmatch(value) else value
    return int(value) if isinstance(value, float) and value.is_integer() else value


def as_id(value: object) -> object:
    """7, 7.0 and "7" are one id; "007" is another."""
    value = as_integer(value)
    if isinstance(value, str):
        return value
    if type(value) is int and value.bit_length() < 64:
        return value
    raise ValueError("expected a whole number or a text")


Id = Annotated[Any, AfterValidator(as_id)]
Integer = Annotated[int, BeforeValidator(as_integer)]


def record(form: type[R], value: object, where: str) -> R:
    try:
        return form.model_validate(value)
    except ValidationError as error:
        faults = error.errors(include_url=False)
    raise DataError(
        f"{where}: {'; '.join(dict.fromkeys(_explain(fault, form, value) for fault in faults[:3]))}"
    )


def load(form: type[R], file: Path, *, encoding: str = "utf-8") -> R:
    """Load a JSON file that is one record."""
    return record(form, load_json(file, encoding=encoding), str(file))


def _explain(fault: Any, form: type[Record], value: object) -> str:
    kind, shown, key = fault["type"], rle.short(fault["input"]), ".".join(str(part) for part in fault["loc"])
    if kind in ("model_type", "model_attributes_type"):
        return (
            f"{f'{key} is' if key else 'expected an object, found'} {shown}; its keys are "
            f"{_keys(form) if not key else 'missing'}"
        )
    if kind == "missing":
        return (
            f"key {key!r} is missing; the record has {rle.short(sorted(map(str, value)))}"
            if isinstance(value, dict)
            else key
        )
    if kind == "extra_forbidden":
        assert isinstance(value, dict)
        return (
            f"unknown keys {[k for k in map(str, value) if k not in _keys(form)][:5]}; known are "
            f"{_keys(form)}"
        )
    if kind == "literal_error":
        return f"{key} {shown} is not one of {fault['ctx']['expected']}"
    return f"{key} is {shown}: {fault['msg'].removeprefix('Value error, ')}"


def _keys(form: type[Record]) -> list[str]:
    return sorted(field.alias or name for name, field in form.model_fields.items())


def shown_size(image: ImageRef, where: str) -> tuple[int, int]:
    """Read (height, width) of the upright picture from the file's header."""
    try:
        width, height = transforms.image_size(image)
    except ValueError as error:
        raise DataError(f"{where}: {error}") from None
    return height, width


def inside(folder: Path, name: str, *, where: str) -> Path:
    """Return the path of a file in a folder; refuse a name that leads out of the folder."""
    leaves = name.startswith("/") or (".." in name and os.path.normpath(name).split("/")[0] == "..")
    if not name or "\0" in name or leaves or max(map(len, name.encode().split(b"/"))) > 255:
        raise DataError(
            f"{where}: {rle.short(name)} is no file inside {folder}; put the file there (a link will do) "
            "and name it from there"
        )
    return folder / name


def text(value: object, where: str) -> str:
    """Strip white space. Raises DataError for a text without visible characters, or with a token that stands
    for pixels."""
    if not isinstance(value, str) or not visible(value):
        raise DataError(
            f"{where}: the text is {rle.short(value)}; write what the mask shows or leave the record out"
        )
    if CONTROL.search(value):
        raise DataError(
            f"{where}: the text {rle.short(value)} holds control characters; write the file again as UTF-8 "
            "without them"
        )
    without_reserved(value, where=where)
    return value.strip()


def named_pictures(texts: Sequence[str], pictures: int) -> list[str]:
    """Return texts as `prompts.name_pictures` writes them. Raises Unusable."""
    try:
        return prompts.name_pictures(texts, pictures)
    except ValueError as error:
        raise Unusable(f"a conversation with {error}") from None


def text_key(text: str) -> str:
    """Return what two spellings of one text have in common: blanks and the Unicode form of letters don't
    count."""
    return " ".join(unicodedata.normalize("NFC", text).split())


def without_reserved(text: str, *, where: str) -> None:
    """Raise DataError for a text with a token of RESERVED."""
    for token in RESERVED:
        if token in text:
            raise DataError(
                f"{where}: the text holds {token!r}, which has a meaning of its own to the model; take it out"
            )


def visible(text: str) -> bool:
    return any(unicodedata.category(c)[0] in "LNPS" for c in text)


def by_id(values: Iterable[Any], where: str) -> dict[Any, Any]:
    """Index objects by their `id`; refuse a repeated one. `where` names the list."""
    indexed: dict[Any, Any] = {}
    for number, value in enumerate(values):
        try:
            name = as_id(value["id"])
        except (TypeError, LookupError):
            raise DataError(
                f"{where} {number} is {rle.short(value)}, not an object with the key 'id'"
            ) from None
        except ValueError as error:
            raise DataError(f"{where} {number}: id is {rle.short(value['id'])}: {error}") from None
        if name in indexed:
            raise DataError(f"{where} {number}: id {rle.short(name)} comes twice; ids must be unique")
        indexed[name] = value
    return indexed


def once(ids: Iterable[tuple[str, Any]]) -> None:
    """Check (place, id) pairs; refuse a repeated id."""
    seen = set()
    for where, name in ids:
        if name in seen:
            raise DataError(f"{where}: this id comes twice; ids must be unique")
        seen.add(name)


def load_json(path: Path, *, encoding: str = "utf-8") -> Any:
    """Load JSON. Raises DataError for invalid JSON, a repeated key in an object, and nesting that is too
    deep. `encoding` is tried on what is not UTF-8."""
    content = _content(path)
    try:
        return jiter.from_json(
            content if encoding == "utf-8" else _as_utf8(content, encoding), catch_duplicate_keys=True
        )
    except ValueError as error:
        lines = (
            "; one record per line (JSON Lines) belongs into a file *.jsonl"
            if "trailing characters" in str(error)
            else ""
        )
        raise DataError(
            f"{path} is not JSON in UTF-8 ({error}); correct it or write the file again{lines}"
        ) from None


def _as_utf8(content: bytes, encoding: str) -> bytes:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return content.decode(encoding).encode("utf-8")
    return content


def starts_with(path: Path, mark: bytes) -> bool:
    """Tell whether a file starts so, but for a byte order mark and white space."""
    with _opened(path) as file:
        return file.read(100).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(mark)


def load_list(path: Path) -> list[Any]:
    """Load a list of at least one record."""
    return filled(load_json(path), list, path)


def load_object(path: Path) -> dict[str, Any]:
    """Load an object of at least one record."""
    return filled(load_json(path), dict, path)


def filled(records: Any, kind: type, path: Path) -> Any:
    """Refuse records that are no list (`kind`) or no object, and none."""
    if not isinstance(records, kind) or not records:
        noun = "a list" if kind is list else "an object"
        raise DataError(f"{path}: expected {noun} with at least one record, found {rle.short(records)}")
    return records


def load_json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield (line number from 1, record) of every line that is not blank, at least one. Raises DataError for
    the others at the end."""
    faults, empty = Faults(path), True
    with _opened(path) as file:
        for number, line in enumerate(file, start=1):
            text = _utf8(line, path) if number == 1 else line
            if text.strip():
                empty = False
                with faults:
                    yield number, _line(text, f"{path}: line {number}")
    faults.tell()
    if empty:
        raise DataError(f"{path} holds no record; write one JSON object per line")


def _line(line: bytes, where: str) -> Any:
    try:
        return jiter.from_json(line, catch_duplicate_keys=True)
    except ValueError as error:
        reason = str(error).replace(" at line 1 column", " at column")
        raise DataError(f"{where} is not JSON in UTF-8 ({reason}); correct or remove this line") from None


def load_text(path: Path, *, encoding: str = "utf-8") -> str:
    try:
        return _content(path).decode(encoding)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not text in {encoding} ({error}); save it as {encoding}") from None


def _content(path: Path) -> bytes:
    with _opened(path) as file:
        return _utf8(file.read(), path)


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with path.open("rb") as file:
            yield file
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise DataError(
            f"{path} does not exist; see docs/your-data.md for the files that each format has"
        ) from None
    except OSError as error:
        raise DataError(f"{path} can't be read: {error}") from None


def _utf8(start: bytes, path: Path) -> bytes:
    """Drop UTF-8's byte order mark from the start of a file; refuse UTF-16's."""
    if start.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise DataError(f"{path} is UTF-16; save it as UTF-8")
    return start.removeprefix(b"\xef\xbb\xbf")


def check_split(split: str, splits: Iterable[str], *, path: Path) -> None:
    names = sorted(set(splits))
    if split not in names:
        raise NoSplit(f"{path} has no split {split!r}; it has {names}")
