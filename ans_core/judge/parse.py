"""Parse a judge's reply, in any form, into the option it chose for every question."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from ans_core.judge.questions import LETTERS, Questions

_THOUGHT = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_QUOTED = re.compile(r'"([^"\n]*)"')
_EDGES = " \t\r\n\"'`*_.,;:()[]{}"
_NAMED = re.compile(r"\b(?:answer|option|choice)\b\W*(?:is\W*)?([a-h])\b(?!')|\(([a-h])\)", re.IGNORECASE)


def choices(reply: str, questions: Questions) -> list[int | None]:
    """Return the chosen options; None where no option can be identified. Understands {"q1": "b", ...}, ["b",
    ...], broken JSON of either, numbered answers in prose, one answer per line; an answer is a letter, an
    option's text, or both."""
    text = _THOUGHT.sub(" ", reply)
    pieces = _pieces(text, len(questions))
    options = [[option.text for option in question.options] for question in questions]
    return [
        None if piece is None else choice(piece, texts) for piece, texts in zip(pieces, options, strict=True)
    ]


def choice(piece: str, options: Sequence[str]) -> int | None:
    """Identify an option, trying in this order: exact text, `a. text` or letter; a leading letter; the
    option's text inside the answer that ends last (the longest on a tie); the one text that contains the
    answer; a letter named as the answer. This is DLC-Bench's order, except that a leading letter, which is
    what is asked for, precedes a text inside (`c. It is not red`)."""
    answer, texts = _plain(piece), [_plain(option) for option in options]
    if not answer:
        return None
    for i, text in enumerate(texts):
        if answer in (text, LETTERS[i]) or re.fullmatch(rf"\(?{LETTERS[i]}\W+{re.escape(text)}", answer):
            return i
    leading = re.match(r"\W*([a-h])\s*[.):]", answer)
    if leading and LETTERS.index(leading[1]) < len(options):
        return LETTERS.index(leading[1])
    ends = {
        i: max(match.end() for match in matches)
        for i, text in enumerate(texts)
        if (matches := list(_inside(text, answer)))
    }
    if ends:
        return max(ends, key=lambda i: (ends[i], len(texts[i])))
    around = [i for i, text in enumerate(texts) if len(answer) > 1 and list(_inside(answer, text))]
    if len(around) == 1:
        return around[0]
    named = {(match[1] or match[2]).lower() for match in _NAMED.finditer(piece)} & set(
        LETTERS[: len(options)]
    )
    return LETTERS.index(named.pop()) if len(named) == 1 else None


def json_value(text: str) -> Any:
    """Return the first JSON object or array in a text (models introduce it, or fence it); None without any.
    Text that a model thought aloud before does not count."""
    decoder, text = json.JSONDecoder(), _THOUGHT.sub(" ", text)
    for start in re.finditer(r"[{\[]", text):
        try:
            return decoder.raw_decode(text, start.start())[0]
        except ValueError:
            continue
        except RecursionError:  # nested too deeply, also from any later bracket
            return None
    return None


def _plain(text: str) -> str:
    return " ".join(text.casefold().split()).strip(_EDGES)


def _inside(part: str, text: str) -> list[re.Match[str]]:
    return list(re.finditer(rf"(?<!\w){re.escape(part)}(?!\w)", text)) if part else []


def _pieces(text: str, count: int) -> list[str | None]:
    """Split the reply by question."""
    value = json_value(text)
    if isinstance(value, dict) and len(value) == 1 and isinstance(next(iter(value.values())), list | dict):
        value = next(iter(value.values()))  # {"answers": [...]}
    if isinstance(value, dict):
        numbered = {
            int(number[0]): _text(answer)
            for key, answer in value.items()
            if (number := re.findall(r"\d{1,4}", str(key)))
        }
        if numbered:
            return [numbered.get(i + 1) for i in range(count)]
    if isinstance(value, list) and len(value) == count:
        return [_text(answer) for answer in value]
    if any(pieces := _numbered(text, count)):
        return pieces
    for candidates in (_QUOTED.findall(text), text.strip().splitlines(), re.findall(r"\w+", text), [text]):
        filled: list[str | None] = [piece for piece in candidates if piece.strip(_EDGES)]
        if len(filled) == count:
            return filled
    return [None] * count


def _text(answer: Any) -> str | None:
    """Return an answer's text; {"question": ..., "answer": "b"} counts as "b"."""
    if isinstance(answer, dict):
        answer = next(
            (answer[key] for key in ("answer", "choice", "option", "letter") if key in answer), None
        )
    return answer if isinstance(answer, str) else None


def _numbered(text: str, count: int) -> list[str | None]:
    """Split `1. b 2) no ...`, `"q1": "b", "q2": "a` and the like: the text between a number and the next;
    numbers count up."""
    starts: list[re.Match[str] | None] = []
    at = 0
    for i in range(count):
        mark = re.compile(
            rf"(?<![\w.])(?:q|question|answer)?\s*#?{i + 1}[\"'*]*\s*[.):=\-]+(?!\d)", re.IGNORECASE
        ).search(text, at)
        starts.append(mark)
        at = mark.end() if mark else at
    pieces: list[str | None] = []
    for i, mark in enumerate(starts):
        later = next((other.start() for other in starts[i + 1 :] if other), len(text))
        pieces.append(text[mark.end() : later] if mark else None)
    return pieces
