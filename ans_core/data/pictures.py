"""Check that all pictures of samples can be decoded; DataError names those that can't."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tqdm import tqdm

from ans_core import transforms
from ans_core.data.formats.checks import DataError, Faults
from ans_core.types import ImageRef, Sample

CHUNK = 1024
"""Pictures handed to the threads at a time; Pillow decodes outside of Python's lock."""


def check_pictures(samples: Sequence[Sample], *, where: str) -> None:
    """Decode every picture once, completely. An error names a picture with the first sample that shows it."""
    shown: dict[ImageRef, str] = {}
    for sample in samples:
        for ref in sample.frames:
            shown.setdefault(ref, sample.sample_id)
    refs, faults = list(shown), Faults(where)
    with ThreadPoolExecutor() as threads, tqdm(total=len(refs), desc="decode pictures", mininterval=1) as bar:
        for start in range(0, len(refs), CHUNK):
            chunk = refs[start : start + CHUNK]
            for ref, reason in zip(chunk, threads.map(_fault, chunk), strict=True):
                with faults:
                    if reason is not None:
                        raise DataError(f"{where}, sample {shown[ref]}: {reason}")
            bar.update(len(chunk))
    faults.tell()


def _fault(ref: Path | bytes) -> str | None:
    try:
        transforms.check_image(ref)
    except ValueError as error:
        return str(error)
    return None
