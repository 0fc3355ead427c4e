"""Check that all pictures of samples can be decoded; DataError names those that can't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

from tqdm import tqdm

from ans_core import transforms, video_file
from ans_core.data.formats.checks import DataError, Faults
from ans_core.types import ImageRef, Sample, VideoFrames

CHUNK = 1024
"""Pictures handed to the threads at a time; Pillow decodes outside of Python's lock."""


def check_pictures(samples: Sequence[Sample], *, where: str) -> list[ImageRef]:
    """Decode every picture once, completely, and every video in one pass. An error names a picture with the first sample that shows it.
    Return the pictures that are shown turned (`transforms.is_turned`): whoever annotated them saw other coordinates, as a rule."""
    shown: dict[ImageRef | VideoFrames, str] = {}
    for sample in samples:
        for ref in (sample.frames,) if isinstance(sample.frames, VideoFrames) else sample.frames:
            shown.setdefault(ref, f"sample {sample.sample_id}")
    return check_decoding(shown, where=where)


def check_decoding(shown: Mapping[ImageRef | VideoFrames, str], *, where: str) -> list[ImageRef]:
    """As `check_pictures`, of pictures and videos with what shows each."""
    refs, faults = list(shown), Faults(where)
    turned: list[ImageRef] = []
    with ThreadPoolExecutor() as threads, tqdm(total=len(refs), desc="decode pictures", mininterval=1) as bar:
        for start in range(0, len(refs), CHUNK):
            chunk = refs[start : start + CHUNK]
            for ref, reason in zip(chunk, threads.map(_fault, chunk), strict=True):
                with faults:
                    if reason is not None:
                        raise DataError(f"{where}, {shown[ref]}: {reason}")
                    if not isinstance(ref, VideoFrames) and transforms.is_turned(ref):
                        turned.append(ref)
            bar.update(len(chunk))
    faults.tell()
    return turned


def _fault(ref: ImageRef | VideoFrames) -> str | None:
    try:
        if isinstance(ref, VideoFrames):
            video_file.check(ref)
        else:
            transforms.check_image(ref)
    except ValueError as error:
        return str(error)
    return None
