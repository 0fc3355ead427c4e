"""Find encoded pictures in the Arrow files of a Hugging Face `datasets` folder: where each lies, so that none
is held in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow

from ans_core.data.formats.checks import DataError
from ans_core.types import FilePart

BYTES = (
    pyarrow.types.is_binary,
    pyarrow.types.is_large_binary,
    pyarrow.types.is_string,
    pyarrow.types.is_large_string,
)


def embedded(folder: Path, column: str) -> Iterator[FilePart | None]:
    """Yield for every row of the folder the place of its picture's bytes; None where it has none. The place
    of a text (a path, or a picture in base64) is yielded too."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    for data_file in state["_data_files"]:
        file = folder / data_file["filename"]
        with pyarrow.memory_map(str(file)) as mapped:
            buffer = mapped.read_buffer()
            for batch in pyarrow.ipc.open_stream(buffer):
                yield from _parts(file.resolve(), buffer, batch.column(column))


def _parts(file: Path, buffer: pyarrow.Buffer, values: pyarrow.Array) -> Iterator[FilePart | None]:
    content = values
    if pyarrow.types.is_struct(values.type):  # the feature Image: bytes and path
        content = values.flatten()[values.type.get_field_index("bytes")]
    if not any(is_type(content.type) for is_type in BYTES):
        yield from [None] * len(values)
        return
    _, ends, data = content.buffers()
    if data is None:  # no row of this batch has bytes
        yield from [None] * len(values)
        return
    if not buffer.address <= data.address <= data.address + data.size <= buffer.address + buffer.size:
        raise DataError(
            f"{file}: its pictures are compressed once more by Arrow; write the set again with "
            "save_to_disk, which does not"
        )
    width = np.int64 if content.type in (pyarrow.large_binary(), pyarrow.large_string()) else np.int32
    bounds = np.frombuffer(ends, dtype=width)[content.offset : content.offset + len(content) + 1].tolist()
    first = data.address - buffer.address
    for start, end, valid in zip(bounds[:-1], bounds[1:], content.is_valid().to_pylist(), strict=True):
        yield FilePart(file=file, start=first + start, length=end - start) if valid and end > start else None
