"""Sampling and reading again are the same policy; segments that were given are not learned."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch

from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.inference.generation import generate, stop_ids
from ans_core.inference.prefill import PrefilledBatch, prompt
from ans_core.model.footprint import saved_bytes
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.rl.rollout import (
    CLIP,
    Group,
    Reader,
    Segment,
    _Sampling,
    entropies,
    exact_head,
    gumbel,
    pack,
    sample,
    token_logps,
)
from tests import tiny


def reader(temperature: float = 1.0, forbidden: tuple[int, ...] = (), **words: str) -> Reader:
    return Reader(temperature=temperature, forbidden=forbidden, guard=words.get("guard", "guard"))  # type: ignore[arg-type]


def prompted(model: Network, count: int = 2) -> PrefilledBatch:
    samples = [tiny.region(i, "a red square") for i in range(count)]
    with torch.no_grad():
        return prompt(model, [caption_request(s, true_mask(s)) for s in samples])


# Reader


def test_the_reader_divides_by_the_temperature_and_never_says_what_is_forbidden():
    found = reader(2.0, (1,))(torch.tensor([[2.0, 9.0, -4.0]]))
    assert found.tolist() == [[1.0, -math.inf, -2.0]]


def test_a_logit_that_is_not_finite_is_replaced_and_counted_and_the_others_keep_their_gradient():
    raw = torch.tensor([[1.0, math.nan, 2.0], [math.inf, 0.0, -math.inf]]).requires_grad_()
    own = reader()
    p = own(raw).softmax(1)
    assert own.nonfinite == 3
    assert p[0, 1] == 0
    assert p[1].tolist() == [1.0, 0.0, 0.0]
    p[0, 0].backward()
    assert raw.grad is not None
    assert raw.grad.isfinite().all()
    assert raw.grad[0, 0] != 0


def test_guarding_leaves_large_logits_alone_and_clipping_does_not():
    """The numbers of the clamp's docstring: it takes 0.13 from the likeliest token's log-probability and its
    gradient."""
    raw = torch.tensor([[35.0, 28.0, -40.0]]).requires_grad_()
    assert reader()(raw).log_softmax(1)[0, 0].item() == pytest.approx(-0.0009, abs=1e-4)
    clipped = reader(guard="clip")(raw)
    assert clipped.tolist() == [[CLIP, 28.0, -CLIP]]
    logp = clipped.log_softmax(1)[0, 0]
    assert logp.item() == pytest.approx(-0.127, abs=1e-3)
    logp.backward()
    assert raw.grad is not None
    assert raw.grad[0, 0] == 0


def test_half_precision_logits_are_read_in_fp32():
    assert reader()(torch.zeros(1, 3, dtype=torch.bfloat16)).dtype == torch.float32


# Sampling


def test_a_head_in_half_precision_is_cast_once_and_an_embedding_that_shares_its_weight_is_not(
    own_model: Network,
):
    model = own_model.requires_grad_(False).to(torch.bfloat16)
    head, embedding = model.vlm.lm_head, model.vlm.get_input_embeddings()
    embedding.weight = stored = head.weight
    hidden = torch.randn(3, head.in_features, requires_grad=True)
    expected = hidden @ stored.float().T
    exact_head(model)
    assert embedding.weight is stored
    assert stored.dtype == torch.bfloat16
    assert not head.weight.requires_grad
    assert torch.equal(model.logits(hidden), expected)
    assert saved_bytes(lambda: model.logits(hidden), {head.weight.data_ptr()}) == 0  # no copy by each call


def test_tokens_are_drawn_as_often_as_they_are_likely():
    """40,000 draws of three tokens, each row with a generator of its own: within five standard errors."""
    logits = torch.tensor([1.0, 0.0, -1.0, 5.0])
    own = reader(forbidden=(3,))
    count = 40_000
    drawing = _Sampling(own, range(count), words=4, max_tokens=1, device=torch.device("cpu"))
    chosen = drawing(logits.expand(count, -1), torch.tensor([0]))
    expected = own(logits[None]).softmax(1)[0]
    for token, p in enumerate(expected.tolist()):
        share = (chosen == token).float().mean().item()
        assert abs(share - p) <= 5 * math.sqrt(p * (1 - p) / count)
    assert torch.equal(drawing.logps[:, 0], own(logits[None]).log_softmax(1)[0][chosen])


def test_the_noise_is_gumbels_for_each_seed_token_and_word_alone():
    """Mean and deviation of a million values, rank correlation with the neighbour's in each direction, and a
    row alone."""
    noise = torch.stack(
        [gumbel(torch.arange(100), torch.tensor([count]), torch.arange(100)) for count in range(100)]
    )  # (token, seed, word)
    assert noise.mean().item() == pytest.approx(0.57722, abs=5 * 1.2825 / 1000)  # Euler's constant
    assert noise.std().item() == pytest.approx(math.pi / math.sqrt(6), abs=0.01)
    assert noise.max() < 20
    uniform = (-(-noise).exp()).exp() - 0.5
    for axis in range(3):
        neighbours = (uniform.narrow(axis, 0, 99) * uniform.narrow(axis, 1, 99)).mean() * 12
        assert abs(neighbours.item()) < 5 / 1000
    assert torch.equal(gumbel(torch.tensor([7]), torch.tensor([3]), torch.arange(40))[0], noise[3, 7, :40])


@pytest.mark.slow
def test_what_a_rollout_says_depends_on_its_seed_alone(own_model: Network):
    """Not on the rollouts and samples beside it, so not on the number of processes either."""
    both, second = prompted(own_model), prompted(own_model)
    own = {name: getattr(second, name)[1:] for name in ("prefix_of", "embeds", "attention", "segs")}
    alone = dataclasses.replace(second, **own)
    seeds = [11, 12, 13, 21, 22, 23]
    told = sample(own_model, both, group=3, max_tokens=6, reader=reader(), seeds=seeds)
    assert [
        a.ids for a in sample(own_model, alone, group=3, max_tokens=6, reader=reader(), seeds=seeds[3:])
    ] == [a.ids for a in told[3:]]
    other = sample(own_model, both, group=3, max_tokens=6, reader=reader(), seeds=[s + 100 for s in seeds])
    assert [a.ids for a in other] != [a.ids for a in told]
    assert len({a.ids for a in told[:3]}) > 1


@pytest.mark.slow
def test_what_is_drawn_without_heat_is_what_greedy_search_says(own_model: Network):
    """Each request's answers after one another."""
    cold = Reader(temperature=1e-6, forbidden=[own_model.image_token_id], guard="guard")
    told = sample(own_model, prompted(own_model), group=3, max_tokens=6, reader=cold, seeds=range(6))
    with torch.no_grad():
        greedy = generate(own_model, prompted(own_model), max_tokens=6)
    assert greedy[0] != greedy[1]
    assert [list(a.ids) for a in told] == [greedy[0]] * 3 + [greedy[1]] * 3


@pytest.mark.slow
def test_an_answer_ends_with_its_end_of_turn_and_is_complete_only_then(own_model: Network):
    stops = stop_ids(own_model)
    with torch.no_grad():
        own_model.internvl.lm_head.weight[stops[0]] += own_model.internvl.lm_head.weight.std()
    told = sample(own_model, prompted(own_model), group=16, max_tokens=8, reader=reader(), seeds=range(32))
    assert {a.complete for a in told} == {True, False}
    for answer in told:
        assert answer.complete == (answer.ids[-1] in stops)
        assert not set(answer.ids[:-1]) & set(stops)
        assert len(answer.logps) == len(answer.ids)
        assert answer.complete or len(answer.ids) == 8


# Segments


def test_of_several_turns_only_what_the_policy_said_is_learned(own_model: Network):
    """Question, words, a tool's reply, words: the log-probabilities are those of the words, each after all
    that stands before it."""
    turns = (
        Segment(ids=(5, 6), trainable=False), Segment(ids=(7, 8), trainable=True),
        Segment(ids=(9,), trainable=False), Segment(ids=(10,), trainable=True),
    )  # fmt: skip
    one = (Segment(ids=(5,), trainable=False), Segment(ids=(11, 12, 13), trainable=True))
    groups = [Group(prefix=(3, 4), rollouts=(one, turns)), Group(prefix=(4,), rollouts=(turns, one))]
    fields, rollout = pack(groups, pad_id=0)
    assert fields["input_ids"][fields["loss_mask"]].tolist() == [11, 12, 13, 7, 8, 10, 7, 8, 10, 11, 12, 13]
    assert rollout.tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    packed = Packed(**fields)
    with torch.no_grad():
        logps, entropy = token_logps(
            own_model, packed, own_model.hidden_states(packed, [None, None]), reader()
        )
        for group, words, own in (
            (groups[0], one, logps[:3]),
            (groups[0], turns, logps[3:6]),
            (groups[1], turns, logps[6:9]),
        ):
            ids = torch.tensor([*group.prefix, *(i for segment in words for i in segment.ids)])
            hidden = own_model.internvl.model.language_model(input_ids=ids[None]).last_hidden_state[0]
            every = own_model.logits(hidden[:-1]).log_softmax(1)[torch.arange(len(ids) - 1), ids[1:]]
            learned = torch.tensor([False] * len(group.prefix) + [s.trainable for s in words for _ in s.ids])
            assert (every[learned[1:]] - own).abs().max() < 1e-5
    assert entropy.min() > 0
    assert entropy.max() <= math.log(own_model.internvl.lm_head.out_features)


def test_the_entropy_has_a_gradient_without_nan_where_a_token_is_forbidden():
    raw = torch.randn(1, 5, generator=torch.Generator().manual_seed(0)).requires_grad_()
    logp = reader(forbidden=(2,))(raw).log_softmax(1)
    entropies(logp).sum().backward()
    assert raw.grad is not None
    assert raw.grad.isfinite().all()
    assert raw.grad[0, 2] == 0
    assert raw.grad.abs().sum() > 0
