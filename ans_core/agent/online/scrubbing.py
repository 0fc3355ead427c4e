"""A question's text -> the same without what tells who somebody is: addresses, telephone and card numbers."""

from __future__ import annotations

import re

REMOVED = "[removed]"
PRIVATE = (
    re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),  # e-mail
    re.compile(r"https?://\S+"),
    re.compile(r"(?<![\w-])\+?\d(?:[ ()./-]{0,2}\d){8,}(?!\w)"),  # nine digits or more: telephone, card, account
)


def scrub(text: str) -> str:
    for pattern in PRIVATE:
        text = pattern.sub(REMOVED, text)
    return text
