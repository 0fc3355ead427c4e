"""The tables of perf/bar.py and perf/further_sft.py: means, deviations, and gains paired by seed, worked out
by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from perf import bar, further_sft

GIOU, N_ACC, CEILING = "referring/test/gIoU", "referring/test/N_acc", "loop1/test/IoU_of_truth"


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(bar, "RESULTS", tmp_path)
    monkeypatch.setattr(further_sft, "RESULTS", tmp_path)
    return tmp_path


def write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))


def cells(table: str, metric: str) -> list[str]:
    """Return the cells after the first of the one line of a metric."""
    (found,) = [line for line in table.splitlines() if line.startswith(f"| {metric} |")]
    return [cell.strip() for cell in found.strip("|").split("|")][1:]


def test_a_spread_is_mean_and_sample_deviation_of_what_is_known():
    assert bar.spread([0.1, 0.2, 0.6]) == "0.300 ± 0.265"  # squares .04 + .01 + .09, halved: .07
    assert bar.spread([0.1, None, 0.3]) == "0.200 ± 0.141"
    assert bar.spread([0.25]) == "0.250"
    assert bar.spread([None, None]) == "-"
    assert bar.spread([0.25], "+") == "+0.250"
    assert bar.spread([-0.1, -0.3], "+") == "-0.200 ± 0.141"


def test_bars_gains_are_paired_by_seed(results: Path):
    """Unpaired, the seeds' spread of 0.4 would hide a gain that is the same in both."""
    for seed, sft in ((0, 0.2), (1, 0.6)):
        rows = {
            "untrained": {},
            "base": {GIOU: 0.0},
            "sft": {GIOU: sft, CEILING: 0.9},
            "rl": {GIOU: sft + 0.1},
        }
        write(results / f"tiny-test-seed{seed}.json", rows)
    write(results / "tiny-test-further-seed0.json", {GIOU: 0.0})  # no result of perf/bar.py
    write(results / "tiny-val-seed2.json", {"rl": {GIOU: 0.0}, "sft": {}})
    found = bar.table("tiny", "test")
    assert found.splitlines()[0] == "2 seeds: [0, 1]"
    assert cells(found, GIOU) == ["-", "0.000 ± 0.000", "0.400 ± 0.283", "0.500 ± 0.283", "+0.100 ± 0.000"]
    assert cells(found, CEILING) == ["-", "-", "0.900 ± 0.000", "-", "-"]
    assert cells(found, N_ACC) == ["-"] * 5


def test_a_seed_without_the_metric_on_both_sides_gives_no_gain(results: Path):
    write(
        results / "tiny-test-seed0.json",
        {"untrained": {}, "base": {}, "sft": {GIOU: 0.5, N_ACC: 0.5}, "rl": {GIOU: 0.5, N_ACC: 0.75}},
    )
    write(
        results / "tiny-test-seed1.json",
        {"untrained": {}, "base": {}, "sft": {GIOU: 0.5}, "rl": {GIOU: 0.5, N_ACC: 0.25}},
    )
    assert cells(bar.table("tiny", "test"), N_ACC) == ["-", "-", "0.500", "0.500 ± 0.354", "+0.250"]


def test_bar_names_the_seeds_of_another_split_and_says_when_there_are_none(results: Path):
    with pytest.raises(SystemExit, match=r"no metrics of split 'test' of seeds any"):
        bar.table("tiny", "test")
    write(results / "tiny-test-seed3.json", {"rl": {"referring/val/gIoU": 0.5}})
    with pytest.raises(SystemExit, match=r"no metrics of split 'test' of seeds \[3\]"):
        bar.table("tiny", "test")


def test_further_sft_and_rl_are_paired_with_the_same_seeds_sft(results: Path):
    every = {metric.format(split="test") for metric in further_sft.METRICS}
    for seed, sft, rl, further in ((0, 0.2, 0.3, 0.5), (1, 0.6, 0.7, 0.7)):
        write(
            results / f"tiny-test-seed{seed}.json",
            {"sft": dict.fromkeys(every, sft), "rl": dict.fromkeys(every, rl)},
        )
        write(results / f"tiny-test-further-seed{seed}.json", dict.fromkeys(every, further))
    # not trained further
    write(
        results / "tiny-test-seed2.json", {"sft": dict.fromkeys(every, 9.0), "rl": dict.fromkeys(every, 9.0)}
    )
    found = further_sft.table("tiny", "test")
    assert found.splitlines()[0] == "seeds ['0', '1']"
    assert cells(found, GIOU) == ["0.400", "+0.100 ± 0.000", "+0.200 ± 0.141"]  # further: .3 and .1


def test_what_further_sft_was_not_measured_by_stays_open(results: Path):
    every = {metric.format(split="test") for metric in further_sft.METRICS}
    write(
        results / "tiny-test-seed0.json", {"sft": dict.fromkeys(every, 0.2), "rl": dict.fromkeys(every, 0.3)}
    )
    write(results / "tiny-test-further-seed0.json", dict.fromkeys(every - {GIOU}, 0.5))
    found = further_sft.table("tiny", "test")
    assert cells(found, GIOU) == ["0.200", "+0.100", "-"]
    assert cells(found, N_ACC) == ["0.200", "+0.100", "+0.300"]


def test_further_sft_refuses_a_seed_that_perf_bar_did_not_measure(results: Path):
    write(results / "tiny-test-further-seed5.json", {})
    with pytest.raises(SystemExit, match=r"none of perf/bar\.py for the same seeds"):
        further_sft.table("tiny", "test")
