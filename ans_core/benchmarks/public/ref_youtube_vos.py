"""Ref-YouTube-VOS: J, F, J&F over expressions, of masks in MeViS' layout (the valid split's are on the server
alone). Formats: clips_of_expressions.py."""

from __future__ import annotations

from ans_core.benchmarks.public import clips_of_expressions as video

SCORER = video.scorer(video.score, "valid", "test")
