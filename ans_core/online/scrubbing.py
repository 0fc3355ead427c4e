"""A question's text -> the same without what tells who somebody is: addresses, telephone and card numbers."""

from __future__ import annotations

import re

REMOVED = "[removed]"
PRIVATE = (
    re.compile(r"[\w.+-]+@[\w-]+(?:\.[\w-]+)+"),  # e-mail
    re.compile(r"(?:https?://|\bwww\.)\S+", re.IGNORECASE),
    # nine digits or more: telephone, card, account, also with letters before them (IBAN) or after them
    re.compile(r"\+?[^\W\d]{0,9}\d(?:[\s()./_\u2010-\u2015-]{0,3}\d){8,}\w*"),
)


def scrub(text: str) -> str:
    for pattern in PRIVATE:
        text = pattern.sub(REMOVED, text)
    return text
