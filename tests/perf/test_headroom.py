"""perf/headroom.py: what is sampled, and the arithmetic of its table."""

from __future__ import annotations

from pathlib import Path

import pytest

from ans_core.benchmarks.loops import caption_request, mask_request, true_mask
from ans_core.config import Config, load
from ans_core.inference.predict import predict
from ans_core.model.network import Network
from perf.headroom import sampled, table
from tests import tiny


def config(temperature: float, batch: int) -> Config:
    values = load(Path("params.yaml")).model_dump()
    values["rl"] |= {"temperature": temperature, "max_tokens": 12}
    values["evaluate"] |= {"batch": batch}
    return Config.model_validate(values)


@pytest.mark.slow
def test_sampled_nearly_without_chance_answers_are_the_greedy_ones(tiny_model: Network):
    regions = [tiny.region(i, "a red square") for i in range(3)]
    requests = [caption_request(r, true_mask(r)) for r in regions] + [
        mask_request(r, r.text) for r in regions
    ]
    greedy = predict(tiny_model, requests, max_tokens=12, batch=6)
    found = sampled(tiny_model, requests, config(1e-4, 12), what="caption", group=2)
    assert found == [[one, one] for one in greedy]


@pytest.mark.slow
def test_samples_differ_within_a_group_and_depend_on_no_batch(tiny_model: Network):
    requests = [caption_request(r, true_mask(r)) for r in (tiny.region(i, "a red square") for i in range(3))]
    found = [
        [
            [one.text for one in own]
            for own in sampled(tiny_model, requests, config(1.0, batch), what="caption", group=2)
        ]
        for batch in (2, 6)
    ]
    assert found[0] == found[1]
    assert all(len(set(own)) == 2 for own in found[0])


def test_the_best_is_paired_with_the_greedy_answer_which_is_one_of_them_and_means_are_over_seeds():
    seeds = [
        {"loop 1 IoU": [[0.5, 0.25, 0.75], [1.0, 0.5, 0.5]], "loop 1 IoU of true captions": [[1.0], [0.5]]},
        {"loop 1 IoU": [[0.5, 0.0, 0.5], [0.5, 0.5, 0.5]], "loop 1 IoU of true captions": [[1.0], [1.0]]},
    ]
    assert table(seeds).splitlines()[2:4] == [
        "| loop 1 IoU | 0.625 ± 0.177 | 0.438 ± 0.088 | 0.688 ± 0.265 | 0.500 ± 0.000 |",
        "| loop 1 IoU of true captions | 0.875 ± 0.177 | | | |",
    ]
    assert table(seeds).splitlines()[-1] == "| loop 1 IoU | +0.000 ± 0.000 | +0.062 ± 0.088 |"


def test_seeds_with_unlike_numbers_of_samples_are_refused():
    with pytest.raises(SystemExit, match=r"unlike numbers of samples, \[1, 2\]"):
        table([{"loop 1 IoU": [[0.5, 0.25, 0.75]]}, {"loop 1 IoU": [[0.5, 0.25]]}])
