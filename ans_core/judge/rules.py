"""The judge without a model: writes questions from a caption's words, and answers them by looking for words
and their synonyms.

Deterministic. Made for the drawn world, whose captions it understands completely; of other English it knows
words, colours and places, no grammar.

Its options quote the deciding words: `It is "red".` is chosen if the caption says red. Of the options found a
wrong one wins (naming every colour must not be right), else the best; if none is found, the option that
quotes nothing.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from concurrent.futures import Future

from ans_core.data.scenes import SHAPES, SIZES, TEXTURES
from ans_core.judge.base import STATS, CaptionQuestions, Choice, finished
from ans_core.judge.questions import Question, Questions, question, reward, shuffled
from ans_core.metrics.grounding import plain_caption
from ans_core.metrics.meteor import synonyms, words
from ans_core.pictures.colours import COLOURS

SLOTS: dict[str, tuple[str, ...]] = {
    "colour": (*COLOURS, "black", "brown", "grey", "pink"),
    "texture": tuple(TEXTURES),
    "size": tuple(SIZES),
    "place": ("top", "bottom", "middle", "left", "right"),
    "shape": SHAPES,
}
"""What a detail is of -> values that exclude each other, in the order that details are asked about. The
shape, where it is what the caption is of, is asked by the recognition."""
PARTIAL = (
    dict.fromkeys(SLOTS["colour"], ("coloured", "colored", "colourful"))
    | dict.fromkeys(("striped", "dotted"), ("patterned",))
    | dict.fromkeys(SIZES, ("medium",))
)
"""Value -> words that say it half."""
FUNCTION_WORDS = frozenset(
    words(
        "a about above across after against all along also among an and another any are around as at back "
        "be been before behind being below beneath beside between both but by can could do does down each "
        "every few for from front had has have he her here him his how i if in inside into is it its just "
        "like many may more most much near next no not of off on one only onto or other out outside over "
        "own same several she so some such than that the their them then there these they this those "
        "through to together too toward towards under up upon very was we were what when where which while "
        "who whose will with within without would you your "
    )
)
_QUOTED = re.compile(r'"([^"]+)"')


class RuleJudge:
    """Costs nothing and never fails: its stats are zeros."""

    def submit(self, pairs: CaptionQuestions) -> Future[list[float | None]]:
        return finished([_reward(caption, questions) for caption, questions in pairs])

    def choose(self, pairs: CaptionQuestions) -> Future[list[Choice | None]]:
        return finished([answers(caption, questions) for caption, questions in pairs])

    def write(
        self, captions: Sequence[str], *, positives: int, negatives: int
    ) -> Future[list[Questions | None]]:
        return finished(
            [questions_of(caption, positives=positives, negatives=negatives) for caption in captions]
        )

    def stats(self) -> dict[str, float]:
        return dict.fromkeys(STATS, 0.0)

    def close(self) -> None:
        pass


def _reward(caption: str, questions: Questions) -> float | None:
    return reward(questions, answers(caption, questions)) if questions else None


def content_words(text: str) -> list[str]:
    """Return the words without markup, function words and hyphens."""
    return [word for word in words(plain_caption(text).replace("-", " ")) if word not in FUNCTION_WORDS]


def answers(caption: str, questions: Questions) -> Choice:
    caption_words = content_words(caption)
    return tuple(_answer(one, caption_words) for one in questions)


def questions_of(caption: str, *, positives: int, negatives: int) -> Questions:
    """Write a caption's questions; empty for a caption without content words."""
    caption_words, head = content_words(caption), _head(caption)
    if head is None:
        return ()
    details = _details(caption_words, head)
    questions = [_recognition(head), *details[:positives], *_negatives(caption_words, head, negatives)]
    return tuple(map(shuffled, questions))


def _head(caption: str) -> str | None:
    """Return the caption's subject: the last word of its first run of content words (`a large red CIRCLE at
    the top`)."""
    head = None
    for word in words(plain_caption(caption).replace("-", " ")):
        if word not in FUNCTION_WORDS:
            head = word
        elif head is not None:
            break
    return head


def _recognition(head: str) -> Question:
    options = {f'Yes, it is of "{head}".': 1.0, "It does not say so.": 0.0}
    if head in SHAPES:
        others = [shape for shape in SHAPES if shape != head]
        options[f"No, it is of something else: {_listed(others)}."] = -1.0
    return question("recognition", f'Is the description of "{head}" or something very similar?', options)


def _details(caption_words: Sequence[str], head: str) -> list[Question]:
    """Ask about slots with one value first, then the other content words in their order."""
    slots, rest = [], list(dict.fromkeys(word for word in caption_words if word != head))
    for slot in SLOTS:
        value = _value(caption_words, slot)
        if value is not None and value != head:
            slots.append(_slot_question(slot, value))
            rest = [word for word in rest if word not in value.split()]
    return slots + [_word_question(word) for word in rest]


def _value(caption_words: Sequence[str], slot: str) -> str | None:
    """Return the slot's value in a caption: one word, for a place also two side by side (`top left`); None if
    it has none or several."""
    at = [i for i, word in enumerate(caption_words) if word in SLOTS[slot]]
    side_by_side = slot == "place" and len(at) == 2 and at[1] == at[0] + 1
    return " ".join(caption_words[i] for i in at) if len(at) == 1 or side_by_side else None


def _slot_question(slot: str, value: str) -> Question:
    """Ask for a slot's value. For `top left`, top or left alone is partly right; for `top`, `top left` is
    wrong."""
    parts = value.split()
    partial = parts if len(parts) > 1 else PARTIAL.get(value, ())
    others = [other for other in SLOTS[slot] if other not in parts]
    options = {f'It is "{value}".': 1.0, f"The {slot} is not said.": 0.0, f"It is {_listed(others)}.": -1.0}
    if partial:
        options[f"It is only half said: {_listed(partial)}."] = 0.5
    return question("positive", f"What does the description say of the {slot}?", options)


def _word_question(word: str) -> Question:
    text = f'Does the description mention "{word}", in these or other words?'
    return question("positive", text, {f'Yes, "{word}".': 1.0, "It is not mentioned.": 0.0})


def _negatives(caption_words: Sequence[str], head: str, count: int) -> list[Question]:
    """Ask about values that no word of the caption means, over as many slots as possible, in an order that
    depends on the caption."""
    rng = random.Random(" ".join(caption_words))
    meant = {other for word in caption_words for other in synonyms(word)}
    free = {slot: [value for value in values if value not in meant] for slot, values in SLOTS.items()}
    turns = [
        (turn, slot)
        for turn in range(count)
        for slot in rng.sample(sorted(free), len(free))
        if turn < len(free[slot])
    ]
    mixed = {slot: rng.sample(values, len(values)) for slot, values in free.items()}
    return [_negative(slot, mixed[slot][turn], head) for turn, slot in turns[:count]]


def _negative(slot: str, value: str, head: str) -> Question:
    options = {
        f'Yes, it says "{value}".': -1.0,
        f'No, "{head}" is described without that.': 1.0,
        "Nothing of the kind is described at all.": 0.0,
    }
    return question("negative", f'Does the description give the {slot} as "{value}"?', options)


def _listed(phrases: Sequence[str]) -> str:
    return " or ".join(f'"{phrase}"' for phrase in phrases)


def _answer(asked: Question, caption_words: Sequence[str]) -> int:
    quoted = [_QUOTED.findall(option.text) for option in asked.options]
    mentioned = sorted(_mentioned(quoted, caption_words), key=lambda i: asked.options[i].score)
    if mentioned:
        return mentioned[0] if asked.options[mentioned[0]].score < 0 else mentioned[-1]
    return next(i for i, phrases in enumerate(quoted) if not phrases)


def _mentioned(quoted: Sequence[Sequence[str]], caption_words: Sequence[str]) -> set[int]:
    """Return the options with a phrase in the caption. Longer phrases go first, and no word is used twice:
    `top left` leaves no `left`."""
    vocabulary = {word for phrases in quoted for phrase in phrases for word in phrase.split()}
    meant = [{word} if word in vocabulary else vocabulary & synonyms(word) for word in caption_words]
    phrases = sorted(
        ((phrase.split(), i) for i, group in enumerate(quoted) for phrase in group),
        key=lambda row: -len(row[0]),
    )
    mentioned = set()
    for phrase, i in phrases:
        for start in range(len(caption_words) - len(phrase) + 1):
            if all(word in meant[start + offset] for offset, word in enumerate(phrase)):
                mentioned.add(i)
                meant[start : start + len(phrase)] = [set()] * len(phrase)
    return mentioned
