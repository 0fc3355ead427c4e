"""How well a model tells what is there from what is not, at every threshold: a Markdown table, and the ROC curve as a picture.

    python perf/denial.py runs/tiny/model [MODEL ...] [--data runs/tiny/data] [--split val] [--out roc.png]

The score of an expression is the probability that the answer begins as a denial does. AUC: the chance that an absent thing has a higher one
than a thing that is there. N_acc at T_acc .97: the share of absent things denied at the threshold where 3 % of the others are.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor
from tqdm import tqdm
from transformers import LogitsProcessor, LogitsProcessorList

from ans_core import data
from ans_core.benchmarks import referring
from ans_core.model import Sa2VA
from ans_core.model.generation import stopping
from ans_core.model.prefill import prompt, read_ahead
from ans_core.prompts import NO_TARGET_ANSWER
from ans_core.types import Sample

ALLOWED = 0.03
"""Share of the things that are there which may be denied."""


class First(LogitsProcessor):
    """Keep the scores of the first token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.scores = scores
        return scores


@torch.no_grad()
def denials(model: Sa2VA, samples: list[Sample], *, batch: int = 32) -> np.ndarray:
    """Return each expression's probability of a denial's first token."""
    first = model.tokenizer.encode(NO_TARGET_ANSWER, add_special_tokens=False)[0]
    found: list[float] = []
    for start in tqdm(range(0, len(samples), batch), desc="ask", mininterval=1):
        requests = [referring.request(sample) for sample in samples[start : start + batch]]
        prompted, kept = read_ahead(model, prompt(model, requests)), First()
        rows, width = torch.arange(len(prompted.embeds), device=model.device), model.vlm.config.text_config.hidden_size
        model.backbone.generate(
            **prompted.generate_inputs(rows, width=width), **stopping(model), max_new_tokens=1, do_sample=False,
            logits_processor=LogitsProcessorList([kept]),
        )  # fmt: skip
        found += kept.scores.float().softmax(1)[:, first].tolist()
    return np.array(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+")
    parser.add_argument("--data", type=Path, default=Path("runs/tiny/data"))
    parser.add_argument("--split", default="val")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    samples = [s for source in data.sources(arguments.data, arguments.split) for s in source.samples if referring_still(s)]
    absent = np.array([not s.masks for s in samples])
    figure = Figure(figsize=(4, 4), layout="constrained")
    axes = figure.subplots()
    print(f"{(~absent).sum()} things that are there, {absent.sum()} absent, split {arguments.split}\n")
    print("| model | AUC | N_acc at T_acc .97 |\n|-|-|-|")
    for name in arguments.models:
        score = denials(Sa2VA.from_pretrained(name).eval(), samples)
        above = (score[absent][:, None] > score[~absent]).mean() + (score[absent][:, None] == score[~absent]).mean() / 2
        threshold = np.quantile(score[~absent], 1 - ALLOWED)
        print(f"| {name} | {above:.3f} | {(score[absent] > threshold).mean():.3f} |", flush=True)
        levels = np.unique(np.append(score, [-1.0, 2.0]))[::-1]
        axes.plot([(score[~absent] >= v).mean() for v in levels], [(score[absent] >= v).mean() for v in levels], label=name)
    axes.set(xlabel="denied of what is there", ylabel="denied of what is absent")
    axes.legend()
    if arguments.out:
        figure.savefig(arguments.out)


def referring_still(sample: Sample) -> bool:
    return sample.task == "referring" and len(sample.frames) == 1


if __name__ == "__main__":
    main()
