"""Captions against references (COCO captions, RefCOCOg's regions, nlg-eval's cases) -> BLEU, ROUGE-L, CIDEr,
METEOR as NLTK computes it.

Understands, as --predictions,
    records {"captions": [references], "prediction"}, or {"image_id", "caption"} with --data, COCO's caption annotations: tokenised as
        COCO's evaluation does;
    cases {"name", "hypotheses", "references"}: nlg-eval's, whose texts are taken as they are.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner, in_records
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.grounding import plain_caption
from ans_core.metrics.meteor import meteor_of_words
from ans_core.metrics.text import coco_tokens, text_scores
from ans_core.types import RLE, Prediction, Request

METEOR_NOTE = (
    "METEOR_nltk is NLTK's METEOR; the METEOR of COCO-style tables comes from a Java program with other "
    "weights and a paraphrase table, which is not run here. The two must not be compared"
)
"""The same pair can differ by .25."""


def score(inputs: Inputs) -> Scored:
    records = files.records(inputs.predictions)
    if "hypotheses" in records[0]:
        return _cases(records, inputs.predictions)
    names, captions, real, missing = _pairs(records, inputs)
    scored = scores_of(
        names, [coco_tokens(t) for t in captions], [[coco_tokens(t) for t in texts] for texts in real]
    )
    return replace(scored, missing=missing)


def scores_of(names: Sequence[str], captions: Sequence[str], real: Sequence[Sequence[str]]) -> Scored:
    """Of tokens between blanks."""
    scores = text_scores(captions, real)
    meteors = [
        max(meteor_of_words(t.lower().split(), r.lower().split()) for r in texts)
        for t, texts in zip(captions, real, strict=True)
    ]
    metrics = scores.corpus | {"METEOR_nltk": sum(meteors) / len(meteors), "captions": len(captions)}
    each = zip(names, captions, scores.cider, scores.rouge_l, meteors, strict=True)
    return Scored(
        metrics=metrics,
        published={key: f"{100 * metrics[key]:.1f}" for key in scores.corpus},
        scored_together=("CIDEr",),  # its words are weighed by how many references have them
        ratios={
            "CIDEr": Ratio(numerators=scores.cider),
            "ROUGE_L": Ratio(numerators=scores.rouge_l),
            "METEOR_nltk": Ratio(numerators=meteors),
        },
        samples=[
            {"id": i, "caption": t, "CIDEr": c, "ROUGE_L": r, "METEOR_nltk": m} for i, t, c, r, m in each
        ],
        notes=[METEOR_NOTE],
    )


def _pairs(records: list[files.Record], inputs: Inputs) -> tuple[list[str], list[str], list[list[str]], int]:
    """(ids, captions, references, how many captions were missing)"""
    if inputs.data is None:
        captions = [record.text("prediction") for record in records]
        named = [{"image_name": record.get("image_name", n)} for n, record in enumerate(records)]
        names = list(files.by_id(named, "image_name", where=inputs.predictions))
        return names, captions, list(map(_references, records)), 0
    truth = caption_truth(inputs.data)
    predicted = files.by_id(records, "image_id", where=inputs.predictions)
    missing = files.refuse_unknown(predicted, truth, where=inputs.predictions, what="images")
    captions = [predicted[i].text("caption") if i in predicted else "" for i in truth]
    return list(truth), captions, list(truth.values()), len(missing)


def caption_truth(path: Path) -> dict[str, list[str]]:
    """COCO's caption annotations: image id -> its captions."""
    truth: dict[str, list[str]] = defaultdict(list)
    for record in files.Record(files.load(path), str(path)).records("annotations"):
        truth[str(record.value("image_id"))].append(record.text("caption"))
    return dict(truth)


def _references(record: files.Record) -> list[str]:
    references = record.listed("captions", str)
    if not references:
        raise ValueError(f"{record.where}: captions must be a list of texts, at least one")
    return references


def _cases(records: list[files.Record], path: Path) -> Scored:
    metrics: dict[str, float] = {}
    samples: list[dict[str, Any]] = []
    for case in records:
        name, hypotheses = case.text("name"), case.listed("hypotheses", str)
        real = case.listed("references", list)
        if not hypotheses or not all(
            texts and all(isinstance(text, str) for text in texts) for texts in real
        ):
            raise ValueError(
                f"{case.where}: every hypothesis needs a list of references, which are texts; and there must "
                "be a hypothesis"
            )
        if len(hypotheses) != len(real):
            raise ValueError(
                f"{path}, case {name!r}: {len(hypotheses)} hypotheses and {len(real)} lists of references"
            )
        scored = scores_of([f"{name}/{n}" for n in range(len(hypotheses))], hypotheses, real)
        metrics |= {f"{name}/{key}": value for key, value in scored.metrics.items()}
        samples += scored.samples
    return Scored(
        metrics=metrics, samples=samples, notes=[METEOR_NOTE, "texts taken as they are, as nlg-eval does"]
    )


def region_item(name: str, picture: Path, region: RLE, *, question: str, caption: str) -> Item:
    """A question about a region, whose one reference is `caption`."""
    request = Request(frames=(picture,), text=question, mask_prompts=(region,))
    return Item(name=name, request=request, facts={"captions": [caption]}, truth=Prediction(text=caption))


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    """Of a benchmark whose facts are the references ("captions")."""
    return {
        "image_name": item.name,
        **item.facts,
        "prediction": plain_caption(prediction.text),
        "text": prediction.text,
    }


def meteor(item: Item, prediction: Prediction) -> float:
    words = coco_tokens(plain_caption(prediction.text)).lower().split()
    return max(meteor_of_words(words, coco_tokens(text).lower().split()) for text in item.facts["captions"])


def scorer(items: Callable[[Path, str], Iterator[Item]], *splits: str) -> Scorer:
    """Return a benchmark of regions, whose records hold the references."""
    runner = Runner(
        items=items, record=record, splits=splits or ("",), truth=in_records, running=("METEOR", meteor)
    )
    return Scorer(score=score, runner=runner)


SCORER = Scorer(
    score=score,
    data="COCO's caption annotations, unless the predictions hold their references",
    data_optional=True,
)
