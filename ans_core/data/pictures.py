"""Check that all pictures of samples can be decoded; DataError names those that can't."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tqdm import tqdm

from ans_core.data import is_held_out
from ans_core.data.formats.checks import DataError, Faults
from ans_core.data.parallel import in_order
from ans_core.pictures import orientation, transforms, video_file
from ans_core.types import ImageRef, Sample, VideoFrames

CHUNK = 16
"""Pictures handed out at a time."""
MANY = 50_000
"""Pictures for which processes start. Below, threads do: Pillow decodes outside of Python's lock."""


def check_pictures(samples: Sequence[Sample], *, where: str, share: float = 1.0) -> list[ImageRef]:
    """Decode every picture once, completely, and every video in one pass. An error names a picture with the
    first sample that shows it. Return the pictures with masks that an EXIF tag turns: nothing but the sizes,
    where they differ, tells which way they were annotated. share: of the pictures, chosen by their names, and not as
    `hold_out` chooses."""
    shown: dict[ImageRef | VideoFrames, str] = {}
    masked: set[ImageRef | VideoFrames] = set()
    for sample in samples:
        if share < 1 and not is_held_out(f"checked {sample.image_id}", share=share):
            continue
        if sample.masks and not isinstance(sample.frames, VideoFrames):
            masked.update(sample.frames)
        for ref in (sample.frames,) if isinstance(sample.frames, VideoFrames) else sample.frames:
            shown.setdefault(ref, f"sample {sample.sample_id}")
    return [ref for ref in check_decoding(shown, where=where) if ref in masked]


def check_decoding(shown: Mapping[ImageRef | VideoFrames, str], *, where: str) -> list[ImageRef]:
    """As `check_pictures`, of pictures and videos with what shows each; return all pictures that an EXIF tag
    turns."""
    refs, faults = list(shown), Faults(where)
    chunks = [refs[start : start + CHUNK] for start in range(0, len(refs), CHUNK)]
    turned: list[ImageRef] = []
    with tqdm(total=len(refs), desc="decode pictures", mininterval=1) as bar:
        for chunk, decoded in zip(
            chunks, in_order(_decode, chunks, many=MANY // CHUNK, what=where), strict=True
        ):
            for ref, (reason, is_turned) in zip(chunk, decoded, strict=True):
                with faults:
                    if reason is not None:
                        raise DataError(f"{where}, {shown[ref]}: {reason}")
                    if is_turned and not isinstance(ref, VideoFrames):
                        turned.append(ref)
            bar.update(len(chunk))
    faults.tell()
    return turned


def _decode(refs: Sequence[ImageRef | VideoFrames]) -> list[tuple[str | None, bool]]:
    """Return of each why it can't be decoded, if so, and whether an EXIF tag turns it."""
    return [_check(ref) for ref in refs]


def _check(ref: ImageRef | VideoFrames) -> tuple[str | None, bool]:
    try:
        if isinstance(ref, VideoFrames):
            video_file.check(ref)
            return None, False
        transforms.check_image(ref)
        return None, transforms.stored(ref)[1] != orientation.UPRIGHT
    except ValueError as error:
        return str(error), False
