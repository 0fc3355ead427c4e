"""Which words of a caption the model that draws it listens to: what a reward by masks can teach the model
that captions; a Markdown table.

    ans run                                              # makes runs/<profile>; up to `sft` is enough
    python perf/listener.py [--split test] [--regions N]    # 2 cores: a minute for `quick`

The SFT model draws regions of the drawn world from their true captions, from captions with one word wrong
and from captions without their place: the mean IoU with the true mask, from the whole caption and from each
half of its words. Where a wrong colour costs next to nothing, RL that pays captions by masks
alone has next to nothing to teach colours by.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from ans_core import data, dist
from ans_core.benchmarks.loops import redrawn_ious
from ans_core.benchmarks.region_caption import ATTRIBUTES
from ans_core.checkpoints.trained import sft_model
from ans_core.config import load
from ans_core.data.regions import is_region
from ans_core.data.scene_text import PLACES
from ans_core.inference.predict import predict
from ans_core.report import gallery
from ans_core.stages.launch import machine_of
from ans_core.types import Sample


def half_of(text: str, part: str) -> str:
    """Return the `first` or the `second` half of a caption's words, or the whole; a word in the middle belongs
    to the first."""
    words = text.split()
    middle = (len(words) + 1) // 2
    return {"first": " ".join(words[:middle]), "second": " ".join(words[middle:])}.get(part, text)


def place_of(sample: Sample) -> str:
    """Return the longest place that the caption names; nothing if it names none."""
    return max((place for place in PLACES if place in sample.text), key=len, default="")


def wrong(sample: Sample, kind: str, word: str, words: Iterable[str], seed: int) -> str:
    """Return the caption with another of the words in the place of its own."""
    others = [other for other in words if other != word]
    return sample.text.replace(word, dist.rng_of(seed, kind, sample.sample_id).choice(others), 1)


def captions_of(samples: Sequence[Sample], seed: int) -> dict[str, list[str]]:
    """Return each region's caption in every form."""
    forms = {"true": [sample.text for sample in samples]}
    for key in ATTRIBUTES:
        own = [str(sample.meta[key]) for sample in samples]
        if len(values := sorted({*own})) > 1:
            forms[f"wrong {key}"] = [
                wrong(sample, key, value, values, seed) for sample, value in zip(samples, own, strict=True)
            ]
    forms["wrong place"] = [wrong(sample, "place", place_of(sample), PLACES, seed) for sample in samples]
    forms["no place"] = [sample.text.partition(place_of(sample))[0].strip() for sample in samples]
    return forms


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", default="test")
    parser.add_argument("--regions", type=int, default=300)
    arguments = parser.parse_args()
    cfg = load(Path("params.yaml"))
    runs, machine = Path("runs") / cfg.profile, machine_of(cfg.launch)
    model = sft_model(runs / "base/base", runs / "sft", device=machine.device)
    every = [
        sample
        for source in data.sources(runs / "data", arguments.split)
        for sample in source.samples
        if is_region(sample) and all(sample.meta.get(key) for key in ATTRIBUTES) and place_of(sample)
    ]
    samples = gallery.spread(every, arguments.regions)
    inverse = partial(predict, model, batch=cfg.evaluate.batch, max_tokens=cfg.evaluate.max_tokens)
    forms = captions_of(samples, cfg.seed)
    print("| heard |", " | ".join(forms), "|")
    print("|-|", "-|" * len(forms), sep="")
    for part in ("whole", "first", "second"):
        means = []
        for captions in forms.values():
            heard = [half_of(text, part) for text in captions]
            means.append(fmean(redrawn_ious(samples, heard, inverse=inverse)))
        print(f"| {part} |", " | ".join(f"{mean:.3f}" for mean in means), "|", flush=True)


if __name__ == "__main__":
    main()
