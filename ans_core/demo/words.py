"""An answer's text -> HTML in which every phrase has the colour of its mask."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from ans_core.demo.chat import Turn
from ans_core.metrics.grounding import PIECE
from ans_core.pictures.overlay import COLOURS


def colour(number: int) -> str:
    """Return object `number`'s colour as CSS writes it."""
    return "rgb({}, {}, {})".format(*COLOURS[number % len(COLOURS)])


def pieces(text: str) -> list[tuple[str, int | None]]:
    """Split an answer into (words, number of the mask they name, None for plain words). A `[SEG]` without a
    phrase has the words "mask N", counted from 1. A `[SEG]` takes the last `<p> .. </p>` before it, as
    `metrics.grounding.phrases` has it."""
    parts: list[tuple[str, int | None]] = []
    waiting: int | None = None
    masks = end = 0
    for piece in PIECE.finditer(text):
        gap, end = text[end : piece.start()], piece.end()
        takes = piece[2] and waiting is not None
        if gap.strip() or not takes:
            parts.append((gap, None))
        if not piece[2]:
            waiting = len(parts)
            parts.append((piece[1].strip(), None))
            continue
        if waiting is None:
            parts.append((f"mask {masks + 1}", masks))
        else:
            parts[waiting] = (parts[waiting][0] or f"mask {masks + 1}", masks)
        waiting, masks = None, masks + 1
    return [(words, number) for words, number in [*parts, (text[end:], None)] if words]


def answer_html(text: str) -> str:
    """Everything is escaped but the marks of this function: an answer may hold any text."""
    parts = [escape(words) if number is None else _marked(words, number) for words, number in pieces(text)]
    return "".join(parts)


def _marked(words: str, number: int) -> str:
    return f'<mark data-mask="{number + 1}" style="--object: {colour(number)}">{escape(words)}</mark>'


def chat_html(turns: Sequence[Turn]) -> str:
    """All turns; the answers are named where a turn has several."""
    if not turns:
        return '<div class="chat empty">Ask about the picture. Phrases of the answer get the colours of their masks.</div>'
    rows = []
    for turn in turns:
        rows.append(f'<div class="question">{escape(turn.question)}</div>')
        for name, answer in turn.answers.items():
            label = f'<span class="who">{escape(name)}</span>' if len(turn.answers) > 1 else ""
            rows.append(
                f'<div class="answer">{label}{answer_html(answer.text) or "<i>an empty answer</i>"}</div>'
            )
    return f'<div class="chat">{"".join(rows)}</div>'


def progress_html(done: int, total: int, *, name: str) -> str:
    bar = f'<progress value="{done}" max="{total}"></progress>'
    return f'<div class="note" role="status">{bar}{escape(name)}: frame {done} of {total}</div>'


def note_html(note: str, *, is_error: bool) -> str:
    """Return nothing for an empty note."""
    kind, role = ("note error", "alert") if is_error else ("note", "status")
    return f'<div class="{kind}" role="{role}">{escape(note)}</div>' if note else ""
