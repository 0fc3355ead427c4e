"""Which samples are regions with a caption: the RL loops train on them, and the judge asks about them."""

from __future__ import annotations

from ans_core.types import Sample


def is_region(sample: Sample) -> bool:
    """Tell whether a sample is one mask in the first frame with its caption; the data set doesn't matter."""
    return sample.task == "region_caption" and len(sample.masks) == 1 and sample.masks[0][0] is not None
