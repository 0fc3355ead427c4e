"""Count what a reader leaves out of a published data set, by reason. Faults (checks.py) end a reading; these
don't."""

from __future__ import annotations

import logging
from collections import Counter
from pathlib import Path
from types import TracebackType

from ans_core.data.formats import checks
from ans_core.pictures import rle
from ans_core.types import RLE


class Unusable(Exception):
    """A record from which nothing can be learned, as published sets are known to hold some; the message is
    the reason."""


class Skipped:
    """Count the unusable records of a published data set by reason (`with skipped: ...` skips the rest of
    one)."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.records = 0
        self.reasons: Counter[str] = Counter()

    def __enter__(self) -> None:
        self.records += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Unusable):
            self.reasons[str(error)] += 1
        return isinstance(error, Unusable)

    def tell(self) -> None:
        """Log how many were skipped and why. Raises DataError if no record is left."""
        if self.reasons:
            why = "; ".join(f"{count:,} with {reason}" for reason, count in self.reasons.most_common())
            if self.reasons.total() == self.records:
                raise checks.DataError(f"{self.file}: no record can be used: {why}")
            logging.warning("%s: %s records are left out: %s", self.file, f"{self.reasons.total():,}", why)


def usable_mask(segmentation: object, *, height: int, width: int, where: str, faults: checks.Faults) -> RLE:
    """Decode a mask as `mask` does, but raise Unusable for an empty one and for none: published sets have
    objects smaller than a pixel."""
    try:
        made = checks.some_mask(segmentation, height=height, width=width, where=where, faults=faults)
    except checks.NoPixelError:
        raise Unusable("no mask: no polygon [x1, y1, x2, y2, ...] of at least 3 points") from None
    if rle.area(made) == 0:
        raise Unusable("a mask without a pixel")
    return made
