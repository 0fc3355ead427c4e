"""Settings of the stage `convert`."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from ans_core.config.section import Section


def _size(text: str) -> str:
    if not re.fullmatch(r"0*[1-9][0-9]*(\.[0-9]+)? *[KMGT]B", text, re.ASCII):
        raise ValueError("no size: write a number and KB, MB, GB or TB, as in 5GB")
    return text


class Convert(Section):
    max_shard: Annotated[str, AfterValidator(_size)] = "5GB"
    """Largest weights file."""
