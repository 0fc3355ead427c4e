"""MMMU validation: free replies -> letters and numbers by the official rules -> accuracy over all, per domain
and subject.

--predictions: {subject: [{"id", "question_type", "answer", "all_choices", "index2ans", "response"}]} (the
official output.json files in one), or such records with "subject", one a line; or {id: final answer}, already
parsed, with --data answer_dict_val.json. A model is run on the released folders
`<subject>/validation-*.parquet`.

A multiple-choice reply that names no option gets a random one from the official script. Here it is wrong;
`accuracy_with_guesses` is the official number, drawn as there (seed 42, subjects in the file's order).
"""

from __future__ import annotations

import random
import re
import string
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files, questions
from ans_core.benchmarks.public.asked import Item, Runner, in_records, pictures_item, recorded
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracy, percent
from ans_core.pictures import rle
from ans_core.types import Prediction

DOMAINS = {
    "Art and Design": ("Art", "Art_Theory", "Design", "Music"),
    "Business": ("Accounting", "Economics", "Finance", "Manage", "Marketing"),
    "Science": ("Biology", "Chemistry", "Geography", "Math", "Physics"),
    "Health and Medicine": (
        "Basic_Medical_Science", "Clinical_Medicine", "Diagnostics_and_Laboratory_Medicine", "Pharmacy",
        "Public_Health",
    ),
    "Humanities and Social Science": ("History", "Literature", "Sociology", "Psychology"),
    "Tech and Engineering": (
        "Agriculture", "Architecture_and_Engineering", "Computer_Science", "Electronics", "Energy_and_Power",
        "Materials", "Mechanical_Engineering",
    ),
}  # fmt: skip
_DOMAIN_OF = {subject: domain for domain, subjects in DOMAINS.items() for subject in subjects}
_INDICATORS = ("could be ", "so ", "is ", "thus ", "therefore ", "final ", "answer ", "result ")
_NUMBERS = (
    r"-?\b\d{1,3}(?:,\d{3})+\b",
    r"-?\d+(?:\.\d+)?[eE][+-]?\d+",
    r"-?(?:\d+\.\d+|\.\d+|\d+\b)(?![eE][+-]?\d+)(?![,\d])",
)
"""With thousands commas, scientific, plain."""
MARKS = (("({})", "({})"), (" {} ", " {} "))
"""A letter as (A), else as a word A."""
TRUTH = "answer_dict_val.json"
CHOICE = "multiple-choice"
"""`question_type` of questions with options; others are open."""
PICTURES = tuple(f"image_{number}" for number in range(1, 8))
"""Columns; a question without a picture in the first is at fault."""


def score(inputs: Inputs) -> Scored:
    path = inputs.predictions
    loaded = files.load(path)
    groups = _by_subject(path) if isinstance(loaded, list) else loaded
    if not isinstance(groups, dict) or not groups:
        raise ValueError(f"{path}: expected {{subject: records}} or {{id: answer}}")
    if not isinstance(next(iter(groups.values())), list):
        return _parsed(groups, inputs)
    rng = random.Random(42)
    samples: list[dict[str, Any]] = []
    for subject, records in groups.items():
        if not isinstance(records, list):
            raise ValueError(f"{path}: {subject} holds {rle.short(records)}, not a list of records")
        by_id = files.by_id(records, "id", where=f"{path}, {subject}")
        samples += [_judged(name, record, subject, rng) for name, record in by_id.items()]
    if not samples:
        raise ValueError(f"{path}: no records")
    return _scored(samples, _check_truth(samples, inputs))


def _by_subject(path: Path) -> dict[str, list[files.Record]]:
    groups: dict[str, list[files.Record]] = defaultdict(list)
    for record in files.records(path):
        groups[record.text("subject")].append(record)
    return dict(groups)


def _judged(name: str, record: files.Record, subject: str, rng: random.Random) -> dict[str, Any]:
    reply, truth = record.text("response"), _answer(record, "answer")
    sample = {"id": name, "subject": subject, "truth": truth}
    if record.text("question_type") != CHOICE:
        right = open_right(truth, reply)
        return sample | {"parsed": None, "right": right, "right_with_guess": right, "open": True}
    letters, texts = record.listed("all_choices", str), record.record("index2ans")
    if not letters:
        raise ValueError(f"{record.where}: 'all_choices' is empty, of a {CHOICE} question")
    letter = letter_of(reply, letters, {one: texts.text(one) for one in letters})
    guess = rng.choice(letters) if letter is None else letter
    verdicts = {"right": letter == truth, "right_with_guess": guess == truth, "open": False}
    return sample | {"parsed": letter, **verdicts}


def _answer(record: files.Record, key: str) -> str | list[str]:
    answer: str | list[str] = record.value(key)
    if not all(isinstance(text, str) for text in (answer if isinstance(answer, list) else [answer])):
        raise ValueError(f"{record.where}: {key!r} is {rle.short(answer)}, neither text nor a list of texts")
    return answer


def _official(data: Path) -> dict[str, files.Record]:
    """Return {id: its question_type and ground_truth}."""
    truth = files.records_by_name(files.named(data, TRUTH), "{id: question_type and ground_truth}")
    for entry in truth.values():
        entry.text("question_type")
        _answer(entry, "ground_truth")
    return truth


def _check_truth(samples: list[dict[str, Any]], inputs: Inputs) -> int:
    """That the file's answers are the official ones; returns how many questions it lacks."""
    if inputs.data is None:
        return 0
    truth = _official(inputs.data)
    missing = files.refuse_unknown(
        [s["id"] for s in samples], truth, where=inputs.predictions, what="questions"
    )
    for sample in samples:
        if sample["truth"] != truth[sample["id"]]["ground_truth"]:
            raise ValueError(
                f"{inputs.predictions}, {sample['id']}: answer {sample['truth']!r} is not the official one "
                f"in {TRUTH}"
            )
    samples += [_wrong(name, truth[name]) for name in missing]
    return len(missing)


def _parsed(answers: Mapping[str, Any], inputs: Inputs) -> Scored:
    if inputs.data is None:
        raise ValueError(f"{inputs.predictions} holds final answers only: --data {TRUTH} has the truth")
    truth = _official(inputs.data)
    missing = files.refuse_unknown(answers, truth, where=inputs.predictions, what="questions")
    samples = []
    for name, entry in truth.items():
        sample = _wrong(name, entry)
        if name in answers:
            answer, real = answers[name], entry["ground_truth"]
            right = (
                _open_match(real, _candidates(answer, f"{inputs.predictions}, {name}"))
                if sample["open"]
                else answer == real
            )
            sample |= {"parsed": answer, "right": right, "right_with_guess": right}
        samples.append(sample)
    return _scored(samples, len(missing))


def _candidates(answer: Any, where: str) -> list[str | float]:
    """Return what a final answer to an open question may mean, which other scripts write as a list."""
    listed = open_candidates(answer) if isinstance(answer, str) else answer
    if not isinstance(listed, list) or not all(isinstance(one, str | int | float) for one in listed):
        raise ValueError(
            f"{where}: answer {rle.short(answer)} is neither text nor a list of texts and numbers"
        )
    return [one if isinstance(one, str) else float(one) for one in listed]


def _wrong(name: str, entry: Mapping[str, Any]) -> dict[str, Any]:
    subject = name.removeprefix("validation_").rsplit("_", 1)[0]
    verdicts = {"right": False, "right_with_guess": False, "open": entry["question_type"] != CHOICE}
    return {"id": name, "subject": subject, "parsed": "", "truth": entry["ground_truth"], **verdicts}


def _scored(samples: list[dict[str, Any]], missing: int) -> Scored:
    metrics, ratio = accuracy((s["subject"], s["right"]) for s in samples)
    by_domain, _ = accuracy((f"domain/{_DOMAIN_OF.get(s['subject'], 'other')}", s["right"]) for s in samples)
    metrics |= {key: value for key, value in by_domain.items() if "/domain/" in key}
    with_guesses, guessed = accuracy((s["subject"], s["right_with_guess"]) for s in samples)
    metrics |= {key.replace("accuracy", "accuracy_with_guesses").replace("correct", "correct_with_guesses"): value
                for key, value in with_guesses.items() if not key.startswith("count")}  # fmt: skip
    metrics["unparsed"] = sum(s["parsed"] is None and not s["open"] for s in samples)
    return Scored(
        metrics=metrics,
        published={
            "accuracy_with_guesses": f"{metrics['accuracy_with_guesses']:.3f}",
            "accuracy": percent(metrics["accuracy"], 2),
        },
        ratios={"accuracy": ratio, "accuracy_with_guesses": guessed},
        samples=samples,
        missing=missing,
        notes=[
            "accuracy counts replies without a letter as wrong; accuracy_with_guesses draws one for them, "
            "as the official script (seed 42)"
        ],
    )


def letter_of(
    reply: str, letters: Sequence[str], texts: Mapping[str, str], marks: Sequence[tuple[str, str]] = MARKS
) -> str | None:
    """The option a reply names: by the first of `marks` that it holds, else by its text; of several the one
    named last; None: none. marks: pairs of how a letter is named, and what decides which came last."""
    for sign in (",", ".", "!", "?", ";", ":", "'"):
        reply = reply.strip(sign)
    padded = f" {reply} "
    for mark, last in marks:
        if named := [letter for letter in letters if mark.format(letter) in padded]:
            return max(named, key=lambda letter: padded.rfind(last.format(letter)))
    if len(padded.split()) <= 5:
        return None
    lowered = padded.lower()
    named = [letter for letter in letters if texts[letter].lower() in lowered]
    return max(named, key=lambda letter: lowered.rfind(texts[letter].lower()), default=None)


def open_right(truth: str | list[str], reply: str) -> bool:
    return _open_match(truth, open_candidates(reply))


def _open_match(truth: str | list[str], candidates: Sequence[str | float]) -> bool:
    answers = [n for t in (truth if isinstance(truth, list) else [truth]) for n in _normalised(t)]
    texts = [a for a in answers if isinstance(a, str)]
    return any(c in answers if isinstance(c, float) else any(text in c for text in texts) for c in candidates)


def open_candidates(reply: str) -> list[str | float]:
    """What an open reply may mean: the tails behind its indicator words, and every number in them; without a
    tail the whole reply.

    As in the official script, an empty tail counts for nothing and gives way to the next word's, even a
    longer one.
    """
    plain = reply.strip().strip(".").lower()
    sentences = re.split(r"\.\s(?=[A-Z])|\n", plain)
    tails: list[str] = []
    for i, sentence in enumerate(sentences):
        indicators = (*_INDICATORS, "=") if i == len(sentences) - 1 else _INDICATORS
        shortest = ""
        for tail in (sentence.split(word)[-1].strip() for word in indicators if word in sentence):
            if not shortest or len(tail) < len(shortest):
                shortest = tail
        if shortest not in ("", ":", ",", ".", "!", "?", ";", "'"):
            tails.append(shortest)
    parts = tails or [plain]
    numbers = [number for tail in parts for pattern in _NUMBERS for number in re.findall(pattern, tail)]
    return list(dict.fromkeys(n for text in (*parts, *numbers) for n in _normalised(text)))


def _normalised(text: str) -> list[str | float]:
    """A number rounded to 2 decimals, else lower case; one letter with a blank on either side, so that it is
    no part of a word."""
    text = text.strip()
    try:
        return [round(float(text.replace(",", "")), 2)]
    except ValueError:
        lowered = text.lower()
        return [" " + lowered, lowered + " "] if len(lowered) == 1 else [lowered]


def items(folder: Path, split: str) -> Iterator[Item]:
    """Questions of several pictures show all, in the order of their numbers, as VLMEvalKit asks InternVL; each
    once, also where the text names it twice."""
    import pyarrow.parquet as parquet

    paths = sorted(folder.glob(f"*/{split}-*.parquet"))
    if not paths:
        raise ValueError(f"{folder}: no <subject>/{split}-*.parquet; give the folder of MMMU's release")
    for path in paths:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=8):
            for row in batch.to_pylist():
                yield _item(files.Record(row, f"{path}, {row.get('id')}"), path.parent.name)


def _item(row: files.Record, subject: str) -> Item:
    name, kind, answer = row.id_of("id"), row.text("question_type"), row.text("answer")
    facts: dict[str, Any] = {
        "id": name,
        "subject": subject,
        "question_type": kind,
        "answer": row.literal("answer") if answer.startswith("[") else answer,
    }
    options: dict[str, str] = {}
    if kind == CHOICE:
        texts = row.literal("options") if row.text("options") else []
        if not texts:
            raise ValueError(f"{row.where}: a {CHOICE} question without options")
        options = dict(zip(string.ascii_uppercase, texts, strict=False))
        facts |= {"all_choices": list(options), "index2ans": options}
    asked = row.text("question")
    columns = [name for name in PICTURES if name == PICTURES[0] or row.get(name) is not None]
    pictures = tuple(_picture(row.record(column)) for column in columns)
    if len(columns) == 1:
        asked = re.sub(r"\s*<image \d>\s*", " ", asked)
    else:
        places = {column: place for place, column in enumerate(columns, start=1)}
        asked = _named(asked, places, row.where)
        options = {letter: _named(text, places, row.where) for letter, text in options.items()}
    text = questions.ask(asked.strip(), options, pictures=len(pictures))
    return pictures_item(name, pictures, text, answer=str(facts["answer"]), facts=facts)


def _picture(column: files.Record) -> bytes:
    picture = column.value("bytes")
    if not isinstance(picture, bytes):
        raise ValueError(f"{column.where} holds {rle.short(picture)}, not the bytes of a picture")
    return picture


def _named(text: str, places: Mapping[str, int], where: str) -> str:
    """Write `<Image-k>` in place of the release's `<image n>`, by the pictures' places."""
    if lost := [n for n in re.findall(r"<image (\d)>", text) if f"image_{n}" not in places]:
        raise ValueError(f"{where}: the text names <image {lost[0]}>, and column image_{lost[0]} is empty")
    return re.sub(r"<image (\d)>", lambda mark: f"<Image-{places[f'image_{mark[1]}']}>", text)


def right(item: Item, prediction: Prediction) -> float:
    facts = item.facts
    if facts["question_type"] == CHOICE:
        return float(letter_of(prediction.text, facts["all_choices"], facts["index2ans"]) == facts["answer"])
    return float(open_right(facts["answer"], prediction.text))


SCORER = Scorer(
    score=score,
    data=f"{TRUTH}, or its folder",
    data_optional=True,
    runner=Runner(
        items=items,
        record=recorded("response"),
        splits=("validation",),
        truth=in_records,
        running=("accuracy", right),
    ),
)
