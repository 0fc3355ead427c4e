"""How fast and how large scoring is: ours and the plain way in turn on the same masks, texts and pictures,
with equal results.

    python perf/eval.py [--rounds 7] [--model runs/tiny/model] [--only NAME ...]

Writes perf/results/eval.json and prints the table of docs/evaluation.md; fails if a bar is missed. Processor
time but for two processes, which are timed by the clock, so they need two idle cores. J and F need `pip
install scikit-image`, which the reference uses; the model's two need a checkpoint.
"""

from __future__ import annotations

import argparse
import functools
import json
import multiprocessing
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from nltk.translate.meteor_score import single_meteor_score
from pycocotools import mask as coco

from ans_core import prompts
from ans_core.data.scenes import draw_scene
from ans_core.inference.predict import predict
from ans_core.inference.requests import request_of
from ans_core.inference.sa2va import Sa2VA
from ans_core.metrics.mask import ciou, counts
from ans_core.metrics.meteor import meteor_of_words, synonyms, words
from ans_core.metrics.video import j_and_f
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.types import Prediction, Request
from perf.model import THINGS
from tests.metrics.test_meteor import GOLDEN, Wordnet
from tests.metrics.test_video import davis_boundary

SIZE = (480, 854)
PREDICTIONS = 100_000
PICTURES, LONGEST = 12, 16
RESULTS = Path("perf/results/eval.json")


@dataclass(frozen=True, kw_only=True)
class Result:
    what: str
    bar: str
    holds: bool
    value: float
    """Times as fast, as the median of the rounds; GB for memory."""
    spread: tuple[float, float]
    ours_ms: float
    plain_ms: float

    def row(self) -> str:
        times = f", {self.ours_ms:.3g} ms against {self.plain_ms:.3g} ms" if self.plain_ms else ""
        return (
            f"| {self.what} | {self.bar} | {self.value:.2f} ({self.spread[0]:.2f} to "
            f"{self.spread[1]:.2f}){times} |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--model", default="runs/tiny/model")
    parser.add_argument("--only", nargs="+", choices=list(BARS), default=list(BARS))
    given = parser.parse_args()
    torch.set_num_threads(1)
    missed = []
    for name in given.only:
        result = BARS[name](given)
        print(result.row(), "" if result.holds else "MISSED", flush=True)
        keep(name, result)
        missed += [] if result.holds else [name]
    if missed:
        sys.exit(f"missed: {', '.join(missed)}")


def keep(name: str, result: Result) -> None:
    known = {r["name"]: r for r in json.loads(RESULTS.read_text())} if RESULTS.exists() else {}
    known[name] = {"name": name, **asdict(result)}
    RESULTS.write_text(json.dumps([known[bar] for bar in BARS if bar in known], indent=1) + "\n")


def compare(
    what: str,
    ours: Callable[[], object],
    plain: Callable[[], object],
    *,
    rounds: int,
    items: int,
    at_least: float,
    clock: Callable[[], float] = time.process_time,
) -> Result:
    """In turn, so that a busy machine slows both. The results must be equal; a first round is not counted."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds + 1):
        results = []
        for spent, call in zip(times, (ours, plain), strict=True):
            start = clock()
            results.append(call())
            if turn:
                spent.append(1e3 * (clock() - start) / items)
        assert results[0] == results[1], f"{what}: not the same results"
    ratios = [b / a for a, b in zip(*times, strict=True)]
    value = statistics.median(ratios)
    one, other = map(statistics.median, times)
    spread = (min(ratios), max(ratios))
    return Result(
        what=what,
        bar=f"at least {at_least:.2g} times",
        holds=value >= at_least,
        value=value,
        spread=spread,
        ours_ms=one,
        plain_ms=other,
    )


def masks() -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(0)
    return [
        (m, np.roll(m, tuple(rng.integers(-6, 7, 2)), (0, 1))) for m in (blob(rng, SIZE) for _ in range(60))
    ]


def blob(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Some overlapping ellipses: about a twentieth of the picture, with a boundary of some 1,000 pixels."""
    height, width = size
    y, x = np.mgrid[:height, :width]
    middle, mask = (rng.uniform(0.2, 0.8) * height, rng.uniform(0.2, 0.8) * width), np.zeros(size, bool)
    for _ in range(4):
        at, radii = [m + rng.normal(scale=25) for m in middle], rng.uniform(15, 60, 2)
        mask |= ((y - at[0]) / radii[0]) ** 2 + ((x - at[1]) / radii[1]) ** 2 < 1
    return mask


def j_and_f_bar(given: argparse.Namespace) -> Result:
    pairs = masks()
    return compare(
        "J and F of a pair of 480 x 854, against DAVIS' plain arithmetic",
        lambda: [j_and_f(*pair) for pair in pairs],
        lambda: [plain_j_and_f(*pair) for pair in pairs],
        rounds=given.rounds,
        items=len(pairs),
        at_least=8,
    )


def plain_j_and_f(prediction: np.ndarray, truth: np.ndarray) -> tuple[float, float]:
    """DAVIS 2017's arithmetic on the whole picture, with its libraries."""
    import cv2
    from skimage.morphology import disk

    cv2.setNumThreads(1)
    union = np.sum(prediction | truth)
    j = np.sum(prediction & truth) / union if union else 1.0
    radius = np.ceil(0.008 * np.linalg.norm(truth.shape))
    edges = [davis_boundary(mask) for mask in (prediction, truth)]
    grown = [cv2.dilate(edge.astype(np.uint8), disk(radius).astype(np.uint8)) for edge in edges]
    drawn, real = (np.sum(edge) for edge in edges)
    if not drawn or not real:
        return float(j), float(drawn == real)
    precision, recall = np.sum(edges[0] * grown[1]) / float(drawn), np.sum(edges[1] * grown[0]) / float(real)
    return float(j), float(2 * precision * recall / (precision + recall)) if precision + recall else 0.0


def meteor_bar(given: argparse.Namespace) -> Result:
    """Texts of 25 to 80 words and paraphrases: words kept, replaced by synonyms, inflected or dropped."""
    rng = random.Random(0)
    common = [word for pair in GOLDEN for word in words(pair["hypothesis"])]
    references = [rng.choices(common, k=rng.randint(25, 80)) for _ in range(100)]
    pairs = [
        (
            [
                rng.choice((w, w, sorted(synonyms(w))[0], w + "s", rng.choice(common)))
                for w in text
                if rng.random() < 0.9
            ],
            text,
        )
        for text in references
    ]
    return compare(
        "METEOR of a pair of texts, against NLTK",
        lambda: [meteor_of_words(*pair) for pair in pairs],
        lambda: [single_meteor_score(text, told, wordnet=Wordnet()) for told, text in pairs],
        rounds=given.rounds,
        items=len(pairs),
        at_least=5,
    )


def coded_pairs() -> list[tuple[dict, dict]]:
    codes = [(rle.encode(a), rle.encode(b)) for a, b in masks()]
    return [codes[i % len(codes)] for i in range(10_000)]


def ciou_bar(given: argparse.Namespace) -> Result:
    pairs = coded_pairs()
    return compare(
        "cIoU of 10,000 RLE pairs, against decode and count",
        lambda: ciou(counts(*pair) for pair in pairs),
        lambda: decoded_ciou(pairs),
        rounds=min(3, given.rounds),
        items=1,
        at_least=5,
    )


def decoded_ciou(pairs: Sequence[tuple[dict, dict]]) -> float:
    intersection = union = 0
    for one, other in pairs:
        a, b = rle.decode(one), rle.decode(other)
        intersection += int((a & b).sum())
        union += int((a | b).sum())
    return intersection / union


def reading_bar(given: argparse.Namespace) -> Result:
    """At most 20 % slower = at least 1 / 1.2 times as fast."""
    codes = [one for pair in coded_pairs()[:60] for one in pair]
    height, width = SIZE
    return compare(
        "reading an RLE of 480 x 854 with all checks, against pycocotools' decode",
        lambda: [
            rle.decode(rle.from_annotation(code, height=height, width=width, where="")) for code in codes
        ][-1].tobytes(),
        lambda: [coco.decode(code) for code in codes][-1].tobytes(),
        rounds=given.rounds,
        items=len(codes),
        at_least=1 / 1.2,
    )


def requests_of(picture: int) -> list[Request]:
    image = draw_scene(seed=7, split="val", index=picture, image_size=128).image
    return [request_of(image=image, text=prompts.REFERRING_EVAL.format(text=text)) for text in THINGS]


def together_bar(given: argparse.Namespace) -> Result:
    ask = partial(predict, Sa2VA.from_pretrained(given.model), max_tokens=LONGEST)
    requests = requests_of(0)
    return compare(
        "k = 8 expressions of a picture together, against one by one",
        lambda: [answer.text for answer in ask(requests, batch=len(THINGS))],
        lambda: [answer.text for request in requests for answer in ask([request], batch=1)],
        rounds=given.rounds,
        items=1,
        at_least=3,
    )


@functools.cache
def worker_model(model: str) -> Network:
    torch.set_num_threads(1)
    return Sa2VA.from_pretrained(model)


def answer_pictures(model: str, pictures: range) -> list[Prediction]:
    ask = partial(predict, worker_model(model), max_tokens=LONGEST, batch=len(THINGS))
    return [answer for picture in pictures for answer in ask(requests_of(picture))]


def processes_bar(given: argparse.Namespace) -> Result:
    """Pictures shared out in turn, one thread a process; the processes stay, so that loading is not
    counted."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(2) as two, context.Pool(1) as one:

        def ask(pool: multiprocessing.pool.Pool, count: int) -> dict[int, list[Prediction]]:
            shares = [range(r, PICTURES, count) for r in range(count)]
            found = pool.map(partial(answer_pictures, given.model), shares, chunksize=1)
            k = len(THINGS)
            return {
                p: some[k * i : k * (i + 1)]
                for share, some in zip(shares, found, strict=True)
                for i, p in enumerate(share)
            }

        return compare(
            f"{PICTURES * len(THINGS)} expressions by two processes, against one",
            lambda: ask(two, 2),
            lambda: ask(one, 1),
            rounds=given.rounds,
            items=1,
            at_least=1.7,
            clock=time.perf_counter,
        )


def memory_bar(given: argparse.Namespace) -> Result:
    """The command itself, on predictions in a file."""
    rng = np.random.default_rng(0)
    codes = [rle.encode(blob(rng, (480, 640))) for _ in range(50)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("drawn.jsonl", "truth.jsonl")]
        for shift, path in enumerate(paths):
            with path.open("w") as file:
                file.writelines(
                    json.dumps({"id": i, "mask": codes[(i + shift) % 50]}) + "\n" for i in range(PREDICTIONS)
                )
        start = time.perf_counter()
        ans = str(Path(sys.executable).with_name("ans"))
        command = [ans, "eval", "score", "refcoco", "--predictions", str(paths[0]), "--data", str(paths[1])]
        peak = (
            int(
                subprocess.run(
                    [sys.executable, "-c", PEAK, *command], check=True, capture_output=True, text=True
                ).stdout
            )
            / 2**20
        )
        seconds = time.perf_counter() - start
    what = f"`ans eval score refcoco` of {PREDICTIONS:,} predictions, GB of memory"
    return Result(
        what=what,
        bar="at most 1 GB",
        holds=peak <= 1,
        value=peak,
        spread=(peak, peak),
        ours_ms=1e3 * seconds,
        plain_ms=0,
    )


PEAK = (
    "import resource, subprocess, sys; subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
    " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
)
"""A process of its own, as only the largest of all children is known."""
BARS: dict[str, Callable[[argparse.Namespace], Result]] = {
    "j_and_f": j_and_f_bar,
    "meteor": meteor_bar,
    "ciou": ciou_bar,
    "reading": reading_bar,
    "together": together_bar,
    "processes": processes_bar,
    "memory": memory_bar,
}


if __name__ == "__main__":
    main()
