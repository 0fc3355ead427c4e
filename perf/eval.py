"""How fast and how large scoring is, ours and the plain way in turn on the same masks and texts; medians of the rounds.

python perf/eval.py [--rounds 5]        (J and F need `pip install opencv-python-headless scikit-image`, which the reference uses)
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from nltk.translate.meteor_score import single_meteor_score

from ans_core import rle
from ans_core.metrics.mask import ciou, counts
from ans_core.metrics.meteor import meteor_of_words
from ans_core.metrics.video import j_and_f
from tests.metrics.test_meteor import Wordnet
from tests.metrics.test_video import davis_boundary

SIZE = (480, 854)
PREDICTIONS = 100_000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    rng = np.random.default_rng(0)
    pairs = [(m, np.roll(m, tuple(rng.integers(-6, 7, 2)), (0, 1))) for m in (blob(rng, SIZE) for _ in range(60))]
    compare(
        "J&F, a pair of 480 x 854", lambda: [j_and_f(*pair) for pair in pairs], lambda: [plain_j_and_f(*pair) for pair in pairs], rounds, 60
    )
    codes = [(rle.encode(a), rle.encode(b)) for a, b in pairs]
    many = [codes[i % len(codes)] for i in range(10_000)]
    compare("cIoU of 10,000 RLE pairs", lambda: ciou(counts(*pair) for pair in many), lambda: decoded_ciou(many), rounds, 1)
    words = ["a", "the", "red", "blue", "dog", "cat", "runs", "running", "sofa", "couch", "car", "auto", "house", "on", "in", "of", "small"]
    texts = [[[str(w) for w in rng.choice(words, rng.integers(25, 80))] for _ in range(2)] for _ in range(100)]
    compare("METEOR, a pair of texts", lambda: [meteor_of_words(*t) for t in texts], lambda: [nltk_meteor(*t) for t in texts], rounds, 100)
    memory()


def compare(name: str, ours: Callable[[], object], plain: Callable[[], object], rounds: int, items: int) -> None:
    """In turn, so that a busy machine slows both; the results must be equal."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        results = []
        for spent, call in zip(times, (ours, plain), strict=True):
            start = time.process_time()
            results.append(call())
            spent.append((time.process_time() - start) / items)
        assert results[0] == results[1], f"{name}: not the same numbers"
    one, other = map(statistics.median, times)
    ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
    print(f"{name}: {1e3 * one:.3f} ms, the plain way {1e3 * other:.3f} ms: {ratio:.1f} x, equal results")


def blob(rng: np.random.Generator, size: tuple[int, int]) -> np.ndarray:
    """Some overlapping ellipses: about a twentieth of the picture, with a boundary of some 1,000 pixels."""
    height, width = size
    y, x = np.mgrid[:height, :width]
    middle, mask = (rng.uniform(0.2, 0.8) * height, rng.uniform(0.2, 0.8) * width), np.zeros(size, bool)
    for _ in range(4):
        at, radii = [m + rng.normal(scale=25) for m in middle], rng.uniform(15, 60, 2)
        mask |= ((y - at[0]) / radii[0]) ** 2 + ((x - at[1]) / radii[1]) ** 2 < 1
    return mask


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


def decoded_ciou(pairs: Sequence[tuple[dict, dict]]) -> float:
    intersection = union = 0
    for one, other in pairs:
        a, b = rle.decode(one), rle.decode(other)
        intersection += int((a & b).sum())
        union += int((a | b).sum())
    return intersection / union


def nltk_meteor(hypothesis: list[str], reference: list[str]) -> float:
    """With our table in place of WordNet's files, which NLTK would read slower: its matching and stemming alone. (With them:
    perf/meteor.py.)"""
    return single_meteor_score(reference, hypothesis, wordnet=Wordnet())


def memory() -> None:
    """The command itself, on predictions in a file."""
    rng = np.random.default_rng(0)
    codes = [rle.encode(blob(rng, (480, 640))) for _ in range(50)]
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("drawn.jsonl", "truth.jsonl")]
        for shift, path in enumerate(paths):
            with path.open("w") as file:
                file.writelines(json.dumps({"id": i, "mask": codes[(i + shift) % 50]}) + "\n" for i in range(PREDICTIONS))
        start = time.perf_counter()
        command = [
            str(Path(sys.executable).with_name("ans")),
            "eval",
            "score",
            "refcoco",
            "--predictions",
            str(paths[0]),
            "--data",
            str(paths[1]),
        ]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        seconds = time.perf_counter() - start
        size = sum(path.stat().st_size for path in paths) / 2**20
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(f"ans eval score refcoco, {PREDICTIONS:,} predictions ({size:.0f} MB of files): {peak:.2f} GB at most, {seconds:.0f} s")


if __name__ == "__main__":
    main()
