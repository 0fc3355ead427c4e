"""An answer's text -> 1 if it has the requested format, else 0."""

from __future__ import annotations

import re

from ans_core.prompts import P_END, P_START, SEG
from ans_core.types import Prediction

_TAGS = re.compile(f"{re.escape(P_START)}|{re.escape(P_END)}")


def well_formed(answer: Prediction, truth: Prediction) -> float:
    """Require as many `[SEG]` and masks as the truth has, and every `<p>` closed before the next one
    opens."""
    segs = answer.text.count(SEG)
    tags = _TAGS.findall(answer.text)
    paired = tags == [P_START, P_END] * (len(tags) // 2)
    return float(segs == truth.text.count(SEG) and len(answer.masks) == len(truth.masks) and paired)
