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
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, accuracies, accuracy, mean
from ans_core.data.formats.virl39k import HELD_OUT, held_out
from ans_core.metrics.answers import BOXED, final, same
from ans_core.types import Prediction

ASKED = "Give the final answer in \\boxed{}."
COLUMNS = ("qid", "question", "answer", "category", "image")


def score(inputs: Inputs) -> Scored:
    samples: list[dict[str, Any]] = []
    for name, record in files.by_id(
        files.records(inputs.predictions), "qid", where=inputs.predictions
    ).items():
        reply = record.text("prediction")
        samples.append(
            {
                "qid": name,
                "category": record.text("category"),
                "said": final(reply),
                "right": same(reply, record.text("answer")),
                "boxed": BOXED in reply,
            }
        )
    figures, ratio = accuracy((s["category"], s["right"]) for s in samples)
    return Scored(
        metrics=figures | {"boxed": mean(s["boxed"] for s in samples)},
        published=accuracies(figures, 1),
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
    names = chain.from_iterable(row["image"] for row in rows)
    pictures = files.pictures_named(names, folder, where=folder)
    for row in rows:
        yield _item(row, tuple(pictures[name] for name in row["image"]))


def _rows(folder: Path) -> Iterator[files.Record]:
    """Yield the rows that are asked about."""
    import pyarrow.parquet as parquet

    paths = sorted(folder.glob("*.parquet"))
    if not paths:
        raise ValueError(f"{folder}: no *.parquet; give the folder of ViRL39K's release")
    for path in paths:
        table = parquet.ParquetFile(path)
        if absent := set(COLUMNS) - set(table.schema_arrow.names):
            raise ValueError(f"{path}: columns {', '.join(sorted(absent))} are missing")
        for batch in table.iter_batches(batch_size=512, columns=list(COLUMNS)):
            for values in batch.to_pylist():
                row = files.Record(values, f"{path}, {values['qid']}")
                if held_out([] if row["image"] is None else row.listed("image", str)):
                    yield row


def _item(row: files.Record, pictures: tuple[Path, ...]) -> Item:
    asked, answer, category = (row.text(key) for key in ("question", "answer", "category"))
    name = row.id_of("qid")
    try:
        (question,) = prompts.name_pictures([asked], len(pictures))
    except ValueError as error:
        raise ValueError(f"{row.where}: {error}") from None
    text = f"{prompts.picture_marks(len(pictures))}{question}\n{ASKED}"
    facts = {"qid": name, "answer": answer, "category": category}
    return pictures_item(name, pictures, text, answer=answer, facts=facts)


def right(item: Item, prediction: Prediction) -> float:
    return float(same(prediction.text, item.facts["answer"]))


SCORER = Scorer(
    score=score,
    sample_id=("qid",),
    runner=Runner(items=items, record=recorded("prediction"), truth=in_records, running=("accuracy", right)),
)
