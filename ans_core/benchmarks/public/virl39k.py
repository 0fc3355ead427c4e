"""ViRL39K's hold-out: replies -> final answers -> accuracy over all and per category.

ViRL39K is a training set. One picture in 50 is held out, chosen by a hash of its name. Questions that show it,
alone or among others, are asked, and may not be trained on (`held_out`).

--predictions: records {"qid", "prediction", "answer", "category"}. A model is run on the release: a *.parquet
with `qid`, `question`, `answer`, `category`, `image`, and the folder `images`.

The answer is what stands in the last \\boxed{} of a reply, or the whole reply. Both sides are compared as
texts without blanks, dollar, degree and percent signs and LaTeX's spacing, and as numbers (fractions too)
with a relative tolerance of 1e-4. Units are compared: `5 cm` is not `5`. The release recommends math-verify,
which drops units and knows more equal forms: here such an answer counts as wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from ans_core import prompts
from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.asked import Item, Runner, in_records, pictures_item, recorded
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracy, percent
from ans_core.data.formats.virl39k import HELD_OUT, held_out
from ans_core.metrics.answers import BOXED, final, same
from ans_core.types import Prediction

ASKED = "Give the final answer in \\boxed{}."
COLUMNS = ("qid", "question", "answer", "category", "image")


def score(inputs: Inputs) -> Scored:
    records = files.by_id(files.records(inputs.predictions), "qid", where=str(inputs.predictions))
    samples: list[dict[str, Any]] = []
    for name, record in records.items():
        where = f"{inputs.predictions}, {name}"
        reply, answer, category = (
            files.text(record, key, where=where) for key in ("prediction", "answer", "category")
        )
        samples.append(
            {
                "qid": name,
                "category": category,
                "said": final(reply),
                "right": same(reply, answer),
                "boxed": BOXED in reply,
            }
        )
    figures, ratio = accuracy((s["category"], s["right"]) for s in samples)
    return Scored(
        metrics=figures | {"boxed": sum(s["boxed"] for s in samples) / len(samples)},
        published={key: percent(value, 1) for key, value in figures.items() if key.startswith("accuracy")},
        ratios={"accuracy": ratio},
        samples=samples,
        notes=[
            f"a hold-out of a training set (one picture in {HELD_OUT}, by hash), about which nothing is "
            "published"
        ],
    )


def items(folder: Path, split: str) -> Iterator[Item]:
    """Questions without a picture are left out."""
    rows = list(_rows(folder))  # some 800 texts
    names = chain.from_iterable(row["image"] for row, _ in rows)
    pictures = files.pictures_named(names, folder, where=folder)
    for row, where in rows:
        yield _item(row, tuple(pictures[name] for name in row["image"]), where)


def _rows(folder: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield the rows that are asked about, and where each stands."""
    import pyarrow.parquet as parquet

    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise ValueError(f"{folder}: no *.parquet; give the folder of ViRL39K's release")
    for path in paths:
        table = parquet.ParquetFile(path)
        if absent := set(COLUMNS) - set(table.schema_arrow.names):
            raise ValueError(f"{path}: columns {', '.join(sorted(absent))} are missing")
        for batch in table.iter_batches(batch_size=512, columns=list(COLUMNS)):
            for row in batch.to_pylist():
                where = f"{path}, {row['qid']}"
                images = [] if row["image"] is None else files.listed(row, "image", where=where, of=str)
                if held_out(images):
                    yield row, where


def _item(row: dict[str, Any], pictures: tuple[Path, ...], where: str) -> Item:
    asked, answer, category = (
        files.text(row, key, where=where) for key in ("question", "answer", "category")
    )
    facts = {"qid": files.id_of(row, "qid", where=where), "answer": answer, "category": category}
    try:
        (question,) = prompts.name_pictures([asked], len(pictures))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    text = f"{prompts.picture_marks(len(pictures))}{question}\n{ASKED}"
    return pictures_item(facts["qid"], pictures, text, answer=answer, facts=facts)


def right(item: Item, prediction: Prediction) -> float:
    return float(same(prediction.text, item.facts["answer"]))


SCORER = Scorer(
    score=score,
    data="",
    needs_data=False,
    sample_id=("qid",),
    runner=Runner(items=items, record=recorded("prediction"), truth=in_records, running=("accuracy", right)),
)
