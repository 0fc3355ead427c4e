"""The pipeline's own benchmarks, of samples in a prepared folder: what to ask about a sample, and how to
score the answers.

registry.py has all benchmarks by name.
"""

from ans_core.benchmarks import grounded_caption, referring, region_caption, video
from ans_core.benchmarks.score import Benchmark, shuffled

BENCHMARKS: dict[str, Benchmark] = {
    "referring": referring.BENCHMARK,
    "region_caption": region_caption.BENCHMARK,
    "grounded_caption": grounded_caption.BENCHMARK,
    "video": video.BENCHMARK,
}

__all__ = ["BENCHMARKS", "Benchmark", "shuffled"]
