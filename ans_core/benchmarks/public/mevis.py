"""MeViS (v1 valid_u, v2 in the same layout; any split whose masks are public): J, F, J&F. Formats:
clips_of_expressions.py."""

from __future__ import annotations

from ans_core.benchmarks.public import clips_of_expressions as video

SCORER = video.scorer(video.score, "valid_u", "valid", "val_u", "val")
