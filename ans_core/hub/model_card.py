"""A checkpoint folder and the run that made it in; a model card for the hub with its pictures out."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard

from ans_core import data
from ans_core.metrics.bootstrap import RESAMPLES, Ratio, interval
from ans_core.report.changes import OF_SOME, SCORED_BY, Answers, read_answers
from ans_core.report.files import read_json
from ans_core.report.metrics import ROWS, named, parse

README = "README.md"
EXAMPLES = "examples"
PLACEHOLDER = "path/to/this/folder"
"""What the stage `convert` writes where the model's address belongs."""
TAGS = ["ans", "sa2va", "image-segmentation"]
OWN_USE = """    from ans_core.model import Sa2VA
    model = Sa2VA.from_pretrained("{repo}")
"""
UPSTREAM_USE = """    from transformers import AutoModel, AutoTokenizer
    model = AutoModel.from_pretrained("{repo}", trust_remote_code=True)
    model.predict_forward(image=picture, text="<image>Please segment the dog.", tokenizer=AutoTokenizer.from_pretrained("{repo}"))

or, without running the code files of this repository, with ANS:

"""
NO_CODE = (
    "\nThis is upstream's layout without its code files (`*.py` of a release on the same language model), "
    "which upstream's classes need.\n"
)


@dataclass(frozen=True, kw_only=True)
class Card:
    text: str
    pictures: dict[str, Path]
    """By their path in the repository."""
    licence: str
    lacking: tuple[str, ...]
    """What the card should say and does not, with the reason."""


def card(checkpoint: Path, repo: str, *, run: Path | None, licence: str | None, upstream: bool) -> Card:
    """Make the card of the README.md beside the weights, or a new one. Its sections Metrics and Examples are
    written anew.

    run: folder laid out as runs/<profile>; its last evaluated row is taken for the checkpoint's. None: the
    folder around it, if it has one. upstream: the checkpoint is in upstream's layout. Raises ValueError if
    neither the README.md nor `licence` states a licence.
    """
    file = checkpoint / README
    written = ModelCard(file.read_text(encoding="utf-8")) if file.exists() else None
    stated = licence or (written.data.get("license") if written else None)
    if not stated:
        why = (
            f"{file} states no licence"
            if written
            else f"{checkpoint} has no {README} that would state a licence"
        )
        raise ValueError(f"{why}: give --licence apache-2.0, or what the base weights and the data allow")
    folder, lacking = run or checkpoint.resolve().parent, []
    row = evaluated(folder)
    if row is None:
        if run is not None:
            raise ValueError(
                f"--run {run} has no evaluate/<{'|'.join(ROWS)}>/metrics.json; give a folder like "
                "runs/<profile>"
            )
        lacking.append(
            "metrics and examples: no evaluation lies beside the checkpoint (--run runs/<profile> says where)"
        )
    text = (
        written.text
        if written
        else new_text(
            checkpoint.resolve().name, folder, upstream=upstream, code=bool(list(checkpoint.glob("*.py")))
        )
    )
    text = text.replace(PLACEHOLDER, repo).replace("{repo}", repo)
    pictures: dict[str, Path] = {}
    if row is not None:
        pictures, example_text = examples(row)
        text = with_section(
            with_section(text, "Metrics", metrics_text(row)), "Examples", example_text, after="Metrics"
        )
    lacking += [
        f"{name.lower()}: no section of it" for name in ("Data", "Settings") if f"## {name}\n" not in text
    ]
    front = (
        written.data.to_dict()
        if written
        else {"library_name": "ans", "pipeline_tag": "image-text-to-text", "tags": TAGS}
    ) | {"license": stated}
    head = yaml.safe_dump(front, sort_keys=False, allow_unicode=True)
    return Card(
        text=f"---\n{head}---\n{text}", pictures=pictures, licence=str(stated), lacking=tuple(lacking)
    )


def evaluated(run: Path) -> Path | None:
    """Return the folder of the last row of a run that was evaluated."""
    return next(
        (folder for row in reversed(ROWS) if ((folder := run / "evaluate" / row) / "metrics.json").exists()),
        None,
    )


def new_text(name: str, run: Path, *, upstream: bool, code: bool) -> str:
    """Return a card's text without metrics and examples, of what the run's folder tells about data and
    settings."""
    use = f"{UPSTREAM_USE if upstream and code else ''}{OWN_USE}{NO_CODE if upstream and not code else ''}"
    text = (
        f"# {name}\n\nA pixel-grounded multimodal model of the Sa2VA family: `[SEG]` in an answer draws a "
        f"mask.\n\n{use}"
    )
    if (run / "data/datasets.json").exists():
        listed = [
            f"- `{entry.name}` ({entry.split}, format {entry.format})"
            for entry in data.read_entries(run / "data")
        ]
        text = with_section(text, "Data", "\n".join(listed))
    if (settings := run / "params.yaml").exists():
        text = with_section(text, "Settings", f"```yaml\n{settings.read_text(encoding='utf-8')}```")
    return text


def with_section(text: str, title: str, body: str, *, after: str = "") -> str:
    """Return Markdown with the section `## title` replaced, or added behind the section `after`, else at the
    end."""
    parts = re.split(r"^(?=## )", text.rstrip() + "\n", flags=re.MULTILINE)
    titles = [
        part.partition("\n")[0].removeprefix("## ").strip() if part.startswith("## ") else ""
        for part in parts
    ]
    made = f"## {title}\n\n{body.strip()}\n"
    if title in titles:
        parts[titles.index(title)] = made
    else:
        parts.insert(titles.index(after) + 1 if after in titles[1:] else len(parts), made)
    return "\n".join(part.rstrip() + "\n" for part in parts)


def scores_of(answers: Answers, benchmark: str, task: str, metric: str) -> list[float]:
    """Return the scores whose mean the metric is; empty if it is none."""
    of_benchmark = answers.get(benchmark, {}).values()
    if metric == SCORED_BY.get(task):
        return [answer.score for answer in of_benchmark]
    objects = OF_SOME.get(task, {}).get(metric)
    return [answer.score for answer in of_benchmark if objects and answer.objects in objects]


def metrics_text(row: Path) -> str:
    """Return the table of the main figures of an evaluation, with bootstrap intervals where predictions.jsonl has
    a score of each sample."""
    values, answers = read_json(row / "metrics.json"), read_answers(row)
    lines = ["| benchmark | metric | value | 95 % interval | samples |", "|-|-|-|-|-|"]
    for name in named(values):
        parts, spread = parse(name), None
        scores = scores_of(answers, parts.benchmark, parts.task, parts.metric)
        # scores are kept to four digits
        if len(scores) > 1 and abs(sum(scores) / len(scores) - values[name]) < 1e-3:
            spread = interval(Ratio(numerators=scores))
        measured = "{:.3f} to {:.3f} | {}".format(*spread, len(scores)) if spread else "– | –"
        lines.append(f"| {parts.title} | {parts.metric} | {values[name]:.3f} | {measured} |")
    note = (
        f"Measured on held-out samples (row `{row.name}` of the run). Intervals: bootstrap over samples, "
        f"{RESAMPLES} resamples."
    )
    return "\n".join([*lines, "", note])


def examples(row: Path) -> tuple[dict[str, Path], str]:
    """Return pictures of the evaluation, some right and some wrong ones of each benchmark, and the text that
    shows them."""
    index = row / "overlays/index.json"
    listed = read_json(index) if index.exists() else []
    first: dict[tuple[str, str], dict[str, Any]] = {}
    for entry in listed:
        first.setdefault((entry["benchmark"], entry["verdict"]), entry)
    benchmarks = dict.fromkeys(entry["benchmark"] for entry in listed)
    kinds = itertools.product(benchmarks, ("right", "wrong"))
    chosen = [first[kind] for kind in kinds if kind in first]
    pictures = {f"{EXAMPLES}/{entry['file']}": index.parent / entry["file"] for entry in chosen}
    lines = [
        f"![{e['verdict']}]({EXAMPLES}/{e['file']})\n\n{parse(e['benchmark']).title}: {e['verdict']} (score "
        f"{e['score']:.2f})"
        for e in chosen
    ]
    intro = (
        "Left the truth, right the answer: of each benchmark one that counts as right and one as wrong, if "
        "there are both."
    )
    return pictures, "\n\n".join([intro, *lines]) if lines else "The run kept none."
