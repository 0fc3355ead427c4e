"""How much better than its greedy answer a model's best sampled answers are: what RL has to choose from;
Markdown tables.

    ans run                                          # makes runs/<profile>; up to `sft` is enough
    python perf/headroom.py [--split test]           # 2 cores: some 5 minutes; writes perf/results/<name>-<split>-headroom-seed<N>.json
    python perf/headroom.py --table [--name NAME]    # of all seeds that are there

The answers are sampled from the SFT model as RL's rollouts are (`rl.group`, `rl.temperature`,
`rl.max_tokens`). Loop 1: IoU of the mask that the same model draws from each caption of a region.
Expressions: IoU of each answer as the benchmark scores it, absent and several things included. The best of an
answer's samples is chosen with the true mask in hand, and the greedy answer is one of them.

It is no bound on RL, which draws new samples in every step and trains what draws masks, too. It says how
often a step's samples hold anything better than what the model says anyway.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch
from tqdm import tqdm

from ans_core import data, dist
from ans_core.benchmarks import BENCHMARKS
from ans_core.benchmarks.loops import caption_request, redrawn_ious, true_mask
from ans_core.checkpoints.trained import sft_model
from ans_core.config import Config, load
from ans_core.data.regions import is_region
from ans_core.inference.options import PredictOptions
from ans_core.inference.predict import answers_of, predict
from ans_core.inference.prefill import prompt
from ans_core.model.network import Network
from ans_core.report import gallery
from ans_core.rl.rollout import Reader, sample
from ans_core.stages.launch import machine_of
from ans_core.types import Predict, Prediction, Request, Sample
from perf.bar import RESULTS, spread

Scores = dict[str, list[list[float]]]
"""Greedy score and scores of the G samples, `[greedy, sample 1, ..., sample G]` for each region or
expression, by what is measured."""


@torch.no_grad()
def sampled(
    model: Network, requests: Sequence[Request], cfg: Config, *, what: str, group: int
) -> list[list[Prediction]]:
    """Return G sampled answers to each request. Seeds depend on the request's number alone, not on what
    shares its batch."""
    reader = Reader(
        temperature=cfg.rl.temperature, forbidden=[model.image_token_id], guard=cfg.rl.logit_guard
    )
    found = []
    batch = max(1, cfg.evaluate.batch // group)
    for start in tqdm(range(0, len(requests), batch), desc=what, mininterval=1):
        some = requests[start : start + batch]
        each = [request for request in some for _ in range(group)]
        seeds = [
            dist.seed_of(cfg.seed, "headroom", what, start + i, g)
            for i in range(len(some))
            for g in range(group)
        ]
        with model.inference_autocast():
            prompted = prompt(model, each)
            said = sample(model, prompted, group=1, max_tokens=cfg.rl.max_tokens, reader=reader, seeds=seeds)
        answers = [
            one.prediction()
            for one in answers_of(model, each, prompted, [one.ids for one in said], PredictOptions())
        ]
        found += [answers[i : i + group] for i in range(0, len(answers), group)]
    return found


def loop1(
    model: Network, ask: Predict, regions: Sequence[Sample], cfg: Config, *, group: int
) -> tuple[list[list[float]], list[list[float]]]:
    """Return IoUs of greedy and sampled captions, and those of the true ones."""
    requests = [caption_request(region, true_mask(region)) for region in regions]
    greedy = ask(requests)
    captions = [
        [first.text, *(one.text for one in more)]
        for first, more in zip(
            greedy, sampled(model, requests, cfg, what="caption", group=group), strict=True
        )
    ]
    size = group + 2
    ious = redrawn_ious(
        [region for region in regions for _ in range(size)],
        [caption for region, own in zip(regions, captions, strict=True) for caption in (*own, region.text)],
        inverse=ask,
    )
    rows = [ious[i : i + size] for i in range(0, len(ious), size)]
    return [row[:-1] for row in rows], [row[-1:] for row in rows]


def expressions(
    model: Network, ask: Predict, referring: Sequence[Sample], cfg: Config, *, group: int
) -> list[list[float]]:
    benchmark = BENCHMARKS["referring"]
    requests = [benchmark.request(one) for one in referring]
    answers = [
        [first, *more]
        for first, more in zip(
            ask(requests), sampled(model, requests, cfg, what="refer", group=group), strict=True
        )
    ]
    scored = [benchmark.of_samples(referring, [own[g] for own in answers]) for g in range(group + 1)]
    columns = [[sample["score"] for sample in one.samples] for one in scored]
    return [list(row) for row in zip(*columns, strict=True)]


def measured(cfg: Config, *, split: str, group: int, regions: int) -> Scores:
    runs = Path("runs") / cfg.profile
    held_out = data.sources(runs / "data", split)
    model = sft_model(runs / "base" / "base", runs / "sft", device=machine_of(cfg.launch).device)
    ask = partial(predict, model, max_tokens=cfg.evaluate.max_tokens, batch=cfg.evaluate.batch)
    captioned = [s for s in data.of_kind(held_out, "region_caption") if is_region(s)]
    some = gallery.spread(captioned, regions or len(captioned))
    referring = data.of_kind(held_out, "referring")
    captions, truth = loop1(model, ask, some, cfg, group=group)
    found = expressions(model, ask, referring, cfg, group=group)
    absent = [row for row, s in zip(found, referring, strict=True) if not s.masks]
    scores = {
        "loop 1 IoU": captions,
        "loop 1 IoU of true captions": truth,
        "all expressions": found,
        "absent things": absent,
    }
    return {name: rows for name, rows in scores.items() if rows}


COLUMNS: dict[str, Callable[[list[float]], float]] = {
    "greedy": lambda row: row[0],
    "mean of the samples": lambda row: statistics.fmean(row[1:]),
    "best of all": max,
    "samples differ": lambda row: float(max(row[1:]) > min(row[1:])),
}


def table(seeds: Sequence[Scores]) -> str:
    """Mean ± deviation over seeds; then what the best of the greedy answer and the first k samples has over
    the greedy one, by k. Raises SystemExit where seeds have unlike numbers of samples."""
    names = [name for name in seeds[0] if len(seeds[0][name][0]) > 1]
    if len(sizes := {len(row) for seed in seeds for name in names for row in seed[name]}) != 1:
        raise SystemExit(
            f"the files have unlike numbers of samples, {sorted(size - 1 for size in sizes)}: measure all "
            "with one --group"
        )
    lines = [f"| | {' | '.join(COLUMNS)} |", "|-" * (len(COLUMNS) + 1) + "|"]
    for name in names:
        lines.append(
            f"| {name} | {' | '.join(of_seeds(seeds, name, column) for column in COLUMNS.values())} |"
        )
    for name in (name for name in seeds[0] if name not in names):
        lines.append(f"| {name} | {of_seeds(seeds, name, COLUMNS['greedy'])} |{' |' * (len(COLUMNS) - 1)}")
    most = range(1, sizes.pop())
    lines += [
        "",
        f"| best - greedy, by samples | {' | '.join(map(str, most))} |",
        "|-" * (len(most) + 1) + "|",
    ]
    for name in names:
        cells = [of_seeds(seeds, name, partial(gain, samples=count), sign="+") for count in most]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def gain(row: list[float], *, samples: int) -> float:
    return max(row[: samples + 1]) - row[0]


def of_seeds(
    seeds: Sequence[Scores], name: str, column: Callable[[list[float]], float], *, sign: str = ""
) -> str:
    return spread([statistics.fmean(map(column, seed[name])) for seed in seeds], sign)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--split", default="test")
    parser.add_argument("--group", type=int, help="samples of each answer; `rl.group` by default")
    parser.add_argument("--regions", type=int, default=800)
    parser.add_argument("--name", help="of the files, in place of the profile's")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    config = load(Path("params.yaml"))
    name = f"{arguments.name or config.profile}-{arguments.split}-headroom"
    if not arguments.table:
        scores = measured(
            config, split=arguments.split, group=arguments.group or config.rl.group, regions=arguments.regions
        )
        rounded = {
            what: [[round(value, 4) for value in row] for row in rows] for what, rows in scores.items()
        }
        (RESULTS / f"{name}-seed{config.seed}.json").write_text(json.dumps(rounded))
    if not (paths := sorted(RESULTS.glob(f"{name}-seed*.json"))):
        raise SystemExit(f"{RESULTS}/{name}-seed*.json: no such file; make one without --table")
    print(table([json.loads(path.read_text()) for path in paths]))
