"""Short answers of mathematics and of pictures: a reply and the true answer -> whether they say the same.

Both are compared as texts without blanks, dollar, degree and percent signs and LaTeX's spacing, and as numbers
(fractions too) with a relative tolerance of 1e-4. Units are compared: `5 cm` is not `5`.
"""

from __future__ import annotations

import math
import re

TOLERANCE = 1e-4
BOXED = "\\boxed{"
_NOISE = re.compile(
    r"\\(?:left|right|,|;|!|:|quad|displaystyle)|\\text\s*\{\s*([^{}]*)\}|\^?\\circ|\^\{\\circ\}|°|[$\s]|\\%|%"
)
_FRACTION = re.compile(r"(-?)\\[dt]?frac\{(-?[\d.]+)\}\{(-?[\d.]+)\}|(-?)([\d.]+)/([\d.]+)")
_NUMBER = re.compile(r"[+-]?(?:\d{1,3}(?:,\d{3})+|\d+|(?=\.\d))(?:\.\d*)?(?:e[+-]?\d+)?")
"""Commas stand between thousands: `1,200` is a number, `1,2` is two."""
_WHOLE = re.compile(r"[+-]?[\d,]+")


def final(reply: str) -> str:
    """Return what stands in the last \\boxed{}, braces inside it balanced, or else the whole reply."""
    start = reply.rfind(BOXED)
    if start < 0:
        return reply.strip()
    start += len(BOXED)
    depth = 1
    for place in range(start, len(reply)):
        depth += {"{": 1, "}": -1}.get(reply[place], 0)
        if not depth:
            return reply[start:place].strip()
    return reply[start:].strip()


def same(reply: str, answer: str, *, whole_exactly: bool = False) -> bool:
    """whole_exactly: a true answer that is a whole number allows no tolerance."""
    one, other = plain(final(reply)), plain(final(answer))
    if one == other:
        return bool(one)
    tolerance = 0.0 if whole_exactly and _WHOLE.fullmatch(other) else TOLERANCE
    numbers = number_of(one), number_of(other)
    return None not in numbers and math.isclose(*numbers, rel_tol=tolerance)  # type: ignore[arg-type]


def plain(text: str) -> str:
    """In lower case, without blanks, dollar, degree and percent signs and LaTeX's spacing; `(A)`, `A.` and
    `A` are one."""
    bare = _NOISE.sub(lambda match: match[1] or "", text).strip().removesuffix(".").lower()
    return bare[1] if re.fullmatch(r"\([a-z]\)", bare) else bare


def number_of(text: str) -> float | None:
    fraction = _FRACTION.fullmatch(text)
    try:
        if fraction:
            sign, top, bottom = fraction.groups()[:3] if fraction[2] else fraction.groups()[3:]
            return float(f"{sign}1") * float(top) / float(bottom)
        return float(text.replace(",", "")) if _NUMBER.fullmatch(text) else None
    except (ValueError, ZeroDivisionError):
        return None
