"""Which samples are regions with a caption: what the RL loops practise on, and what the judge is asked about."""

from __future__ import annotations

from ans_core.types import Sample


def is_region(sample: Sample) -> bool:
    """One mask, in the first frame, and its caption; of whichever data set."""
    return sample.task == "region_caption" and len(sample.masks) == 1 and sample.masks[0][0] is not None
