"""Base of the settings' sections: its class, the ranges of numbers, and the errors of invalid values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LARGEST = 10**9
"""Upper limit of every whole number: more steps, pixels or samples than this are a typing error."""

Positive = Annotated[int, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
SAME = {"gpu": "cuda", "float32": "fp32", "bfloat16": "bf16"}
"""Words for settings that people know from elsewhere -> the name here, where spelling alone would suggest another."""

Listed = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Added to a tuple type: YAML has lists only."""


class Section(BaseModel):
    """`strict`: `true` is no number, 3.0 no count and "3" neither. Infinite numbers and NaN are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False)


class ConfigError(ValueError):
    """A setting that is unknown, mistyped or impossible. The message names the file, the line, the key and the remedy."""


class Impossible(ValueError):
    """Raised by a section's validator about one of its keys (dotted from the section), so that the error can name its line."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(why)
        self.keys = key.split(".")


def divides(part: int, whole: int, *, key: str, why: str) -> None:
    if whole % part:
        raise Impossible(key, f"{whole} is no multiple of {part}: {why}")


def some_weight(weights: Iterable[float], *, key: str, why: str) -> None:
    if not any(weights):
        raise Impossible(key, f"{key}: all weights are 0, so {why}")


def nearest(word: str, known: Iterable[str]) -> str:
    """Return ` (did you mean 'this'?)`, or nothing if no known name is near."""
    names = list(known)
    close = [SAME[word]] if SAME.get(word) in names else difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
