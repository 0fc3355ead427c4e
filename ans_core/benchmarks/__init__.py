"""Benchmarks: what to ask about a sample, and how to score the answers. A new one is a file and a line here."""

from ans_core.benchmarks import grounded_caption, referring, region_caption, video
from ans_core.benchmarks.score import Benchmark, Score, shuffled

BENCHMARKS: dict[str, Benchmark] = {
    "referring": referring.BENCHMARK,
    "region_caption": region_caption.BENCHMARK,
    "grounded_caption": grounded_caption.BENCHMARK,
    "video": video.BENCHMARK,
}

__all__ = ["BENCHMARKS", "Benchmark", "Score", "shuffled"]
