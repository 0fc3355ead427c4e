"""How well a model tells what is there from what is not, by the kind of what is not: a Markdown table, and
the ROC curve as a picture.

    python perf/denial.py runs/tiny/sft runs/tiny/model [MODEL ...] [--data runs/tiny/data] [--split val] [--out roc.png]

N_acc is the benchmark's: the share of absent things for which the model draws nothing. For the other columns,
the score of an expression is the probability that the answer begins as a denial does. AUC: the chance that an
absent thing has a higher one than a thing that is there. N_acc at T_acc .97: the share of absent things
denied at the threshold where 3 % of the others are; one threshold for all kinds.

The kind says what the expression gets wrong: `colour` or `shape` if a thing of the picture has all its other
words, `colour or shape` if there is one of either sort, `neither` if there is none. It is told from the
regions' attributes; pictures without them count as `unknown`.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm

from ans_core import data
from ans_core.benchmarks import referring
from ans_core.checkpoints.trained import sft_model
from ans_core.data.scene_text import ATTRIBUTES
from ans_core.data.scenes import SHAPES, SIZES, TEXTURES
from ans_core.inference.decoding import decode
from ans_core.inference.predict import predict
from ans_core.inference.prefill import prompt
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from ans_core.pictures.colours import COLOURS
from ans_core.prompts import NO_TARGET_ANSWER
from ans_core.types import ImageRef, Sample

ALLOWED = 0.03
"""Share of the things that are there which may be denied."""
MAX_TOKENS = 48
"""Of an answer, as in the profile `tiny`."""
WORDS = dict(zip(ATTRIBUTES, (SIZES, COLOURS, TEXTURES, SHAPES), strict=True))
KINDS = ("colour", "shape", "colour or shape", "neither", "unknown")


@torch.no_grad()
def denials(model: Network, samples: list[Sample], *, batch: int = 32) -> np.ndarray:
    """Return each expression's probability of a denial's first token."""
    first = model.tokenizer.encode(NO_TARGET_ANSWER, add_special_tokens=False)[0]
    found: list[float] = []
    for start in tqdm(range(0, len(samples), batch), desc="ask", mininterval=1):
        requests = [referring.request(sample) for sample in samples[start : start + batch]]
        first_logits: list[Tensor] = []

        def look(logits: Tensor, count: Tensor, seen: list[Tensor] = first_logits) -> Tensor:
            seen.append(logits)
            return logits.argmax(1)

        decode(model, prompt(model, requests), answers=1, max_tokens=1, choose=look, stops=[])
        found += first_logits[0].softmax(1)[:, first].tolist()
    return np.array(found)


def kind_of(text: str, things: Sequence[Mapping[str, str]]) -> str:
    """Return which of KINDS an expression for something absent is, among things given by their attributes."""
    asked = {name: word for name, values in WORDS.items() for word in text.split() if word in values}
    wrong = [
        name
        for name in ("colour", "shape")
        if name in asked and any(fits(thing, asked, but=name) for thing in things)
    ]
    return (" or ".join(wrong) or "neither") if things else "unknown"


def fits(thing: Mapping[str, str], asked: Mapping[str, str], *, but: str) -> bool:
    return all(thing[name] == value for name, value in asked.items() if name != but)


def things_of(samples: Sequence[Sample]) -> dict[ImageRef, list[Mapping[str, str]]]:
    """Return the attributes of every picture's things, from the captions of its regions."""
    things: dict[ImageRef, list[Mapping[str, str]]] = defaultdict(list)
    for sample in samples:
        if sample.task == "region_caption" and sample.meta.keys() >= set(ATTRIBUTES):
            things[sample.frames[0]].append(sample.meta)
    return things


def auc(absent: np.ndarray, there: np.ndarray) -> float:
    """Return the chance that an absent thing's score is the higher one; a tie counts half."""
    return float((absent[:, None] > there).mean() + (absent[:, None] == there).mean() / 2)


def loaded(folder: Path) -> Network:
    """Load a model's folder, or what the stage `sft` trained, with the run's base beside it."""
    if (folder / "delta.json").exists():
        return sft_model(folder.parent / "base" / "base", folder)
    return Sa2VA.from_pretrained(str(folder)).eval()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="+", type=Path)
    parser.add_argument("--data", type=Path, default=Path("runs/tiny/data"))
    parser.add_argument("--split", default="val")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    every = [sample for source in data.sources(arguments.data, arguments.split) for sample in source.samples]
    things, samples = things_of(every), [sample for sample in every if referring_still(sample)]
    there, absent = [s for s in samples if s.masks], [s for s in samples if not s.masks]
    kinds = np.array([kind_of(s.text, things.get(s.frames[0], ())) for s in absent])
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    print(f"{len(there)} things that are there, {len(absent)} absent, split {arguments.split}\n")
    print("| model | what is wrong | absent | N_acc | AUC | N_acc at T_acc .97 |\n|-|-|-|-|-|-|")
    for name in arguments.models:
        model = loaded(name)
        answers = predict(model, [referring.request(s) for s in absent], max_tokens=MAX_TOKENS, batch=32)
        scores, others = denials(model, absent), denials(model, there)
        threshold = np.quantile(others, 1 - ALLOWED)
        for kind in ("all", *(k for k in KINDS if k in kinds)):
            some = np.flatnonzero((kinds == kind) | (kind == "all"))
            n_acc = referring.score([absent[i] for i in some], [answers[i] for i in some]).metrics["N_acc"]
            cells = [
                f"{n_acc:.3f}",
                f"{auc(scores[some], others):.3f}",
                f"{(scores[some] > threshold).mean():.3f}",
            ]
            print(f"| {name} | {kind} | {len(some)} | {' | '.join(cells)} |", flush=True)
        levels = np.unique(np.concatenate([scores, others, [-1.0, 2.0]]))[::-1]
        axes.plot(
            [(others >= v).mean() for v in levels], [(scores >= v).mean() for v in levels], label=str(name)
        )
    axes.set(xlabel="denied of what is there", ylabel="denied of what is absent")
    axes.legend()
    if arguments.out:
        figure.savefig(arguments.out)


def referring_still(sample: Sample) -> bool:
    return sample.task == "referring" and len(sample.frames) == 1


if __name__ == "__main__":
    main()
