import itertools

import numpy as np
import pytest

from ans_core.metrics.bootstrap import Ratio, difference, interval, intervals


def test_a_ratio_divides_the_sums_once():
    assert Ratio(numerators=[1, 3], denominators=[2, 8]).value == 4 / 10
    assert Ratio(numerators=[1, 0, 1, 1]).value == 0.75


def test_the_interval_of_a_mean_is_that_of_the_normal_distribution_and_the_same_for_a_seed():
    values = np.random.default_rng(0).normal(size=2000)
    low, high = interval(Ratio(numerators=values.tolist()))
    error = values.std() / 2000**0.5
    assert (low, high) == pytest.approx(
        (float(values.mean() - 1.96 * error), float(values.mean() + 1.96 * error)), abs=0.25 * error
    )
    assert interval(Ratio(numerators=values.tolist())) == (low, high)
    assert interval(Ratio(numerators=[1.0] * 9)) == (1.0, 1.0)


def test_an_interval_is_that_of_all_resamples():
    """Of five values there are 5 ** 5 resamples; 1,000 of them at random give the percentiles of all."""
    values = [-0.4, 0.1, 0.3, 0.5, 0.9]
    means = [np.mean(drawn) for drawn in itertools.product(values, repeat=5)]
    assert interval(Ratio(numerators=values)) == pytest.approx(
        tuple(np.percentile(means, (2.5, 97.5))), abs=0.05
    )


def test_pairing_leaves_out_how_hard_the_samples_are():
    rng = np.random.default_rng(0)
    hard = rng.uniform(size=400)
    ours, theirs = (
        Ratio(numerators=(hard + 0.05 + rng.normal(scale=0.01, size=400)).tolist()),
        Ratio(numerators=hard.tolist()),
    )
    low, high = difference(ours, theirs, paired=True)
    assert 0.048 < low < 0.05 < high < 0.052
    low, high = difference(ours, theirs, paired=False)
    assert low < 0.02 < 0.08 < high


def test_a_paired_comparison_needs_the_same_samples():
    with pytest.raises(ValueError, match="got 2 and 1"):
        difference(Ratio(numerators=[1, 2]), Ratio(numerators=[1]), paired=True)


def test_draws_in_which_nothing_counts_are_left_out():
    assert interval(Ratio(numerators=[1, 0], denominators=[1, 0])) == (1.0, 1.0)


def test_where_nothing_counts_at_all_there_is_no_interval():
    nothing, half = Ratio(numerators=[0, 0], denominators=[0, 0]), Ratio(numerators=[1, 0])
    assert interval(nothing) is None
    assert difference(nothing, half, paired=True) is None
    assert list(intervals({"nothing": nothing, "half": half})) == ["half"]
