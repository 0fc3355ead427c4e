"""Confidence intervals of metrics from per-sample counts, by bootstrap, also for the difference of two
systems."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

RESAMPLES = 1000
LEVEL = 0.95


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A metric that is one sum over samples divided by another: a mean (denominators 1), cIoU (intersections
    over unions), or a share of some samples (denominator 0 for samples that don't count)."""

    numerators: Sequence[float | int]
    denominators: Sequence[float | int] | None = None
    """None: all 1."""

    def terms(self) -> Float[np.ndarray, "n 2"]:
        below = np.ones(len(self.numerators)) if self.denominators is None else self.denominators
        return np.stack([np.asarray(self.numerators, float), np.asarray(below, float)], axis=1)

    @property
    def value(self) -> float:
        above, below = self.terms().sum(0)
        return float(above / below)


def interval(ratio: Ratio) -> tuple[float, float] | None:
    """Return the 95 % percentile bootstrap interval: samples are resampled with replacement. A resample in
    which nothing counts is left out; None where nothing counts in any."""
    return _middle(_resampled(ratio.terms())[:, 0])


def intervals(ratios: Mapping[str, Ratio]) -> dict[str, tuple[float, float]]:
    """Return the intervals of several metrics; those of equally many samples are resampled together, which
    saves most of the time."""
    alike: dict[int, dict[str, Ratio]] = defaultdict(dict)
    for name, ratio in ratios.items():
        alike[len(ratio.numerators)][name] = ratio
    bounds: dict[str, tuple[float, float]] = {}
    for count, group in alike.items():
        if count > 1:
            values = _resampled(np.concatenate([ratio.terms() for ratio in group.values()], axis=1))
            found = {name: _middle(column) for name, column in zip(group, values.T, strict=True)}
            bounds |= {name: bound for name, bound in found.items() if bound is not None}
    return {name: bounds[name] for name in ratios if name in bounds}


def difference(
    ours: Ratio, theirs: Ratio, *, paired: bool, resamples: int = RESAMPLES
) -> tuple[float, float] | None:
    """Return the 95 % interval of ours - theirs. paired: sample i is the same in both and both are resampled
    together, which removes the variation in difficulty; otherwise each is resampled by itself."""
    one, other = ours.terms(), theirs.terms()
    if paired and len(one) != len(other):
        raise ValueError(
            f"a paired comparison needs the same samples in both, got {len(one)} and {len(other)}"
        )
    values = _resampled(one, resamples) - _resampled(other, resamples, seed=0 if paired else 1)
    return _middle(values[:, 0])


def _resampled(
    terms: Float[np.ndarray, "n m"], resamples: int = RESAMPLES, *, seed: int = 0
) -> Float[np.ndarray, "r k"]:
    """Return the ratio of each pair of columns in each resample; NaN where nothing counts."""
    rng, count = np.random.default_rng(seed), len(terms)
    sums = np.stack(
        [np.bincount(rng.integers(count, size=count), minlength=count) @ terms for _ in range(resamples)]
    )
    above, below = sums[:, ::2], sums[:, 1::2]
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(below > 0, above / below, np.nan)


def _middle(values: Float[np.ndarray, " r"]) -> tuple[float, float] | None:
    valid = values[~np.isnan(values)]
    if not len(valid):
        return None
    low, high = np.quantile(valid, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)
