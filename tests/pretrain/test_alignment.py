"""Pre-training of word embeddings and projector on where things are."""

import dataclasses

import pytest
import torch

from ans_core.data.collate import cell_shares
from ans_core.model.network import Network
from ans_core.pretrain.alignment import Alignment, AlignmentBatch, alignment_batch
from ans_core.pretrain.build import match_by_content
from ans_core.pretrain.finding import middle_attention
from tests import tiny


def batch(model: Network) -> AlignmentBatch:
    left = tiny.region(masks=((tiny.square(0, 0, 16, 32),),), text="a red square")
    right = tiny.region(masks=((tiny.square(32, 32, 64, 64),),), text="a blue circle on the right")
    return alignment_batch([(left.frames[0], [left, right])], model.tokenizer, cutter=model.backbone.cutter)


def test_a_batch_holds_the_words_and_the_cells_of_every_thing(tiny_model: Network) -> None:
    found = batch(tiny_model)
    texts = [tiny_model.tokenizer.decode([i for i in ids if i >= 0]) for ids in found.words.tolist()]
    assert texts == [" a red square", " a blue circle on the right"]
    assert found.image.tolist() == [0, 0]
    assert found.captions.tolist() == [True, True]
    assert torch.equal(found.shares[1], cell_shares(tiny.square(32, 32, 64, 64), 4))


def test_an_expression_is_not_all_there_is_to_say(tiny_model: Network) -> None:
    sample = tiny.sample()
    one = alignment_batch(
        [(sample.frames[0], [sample])], tiny_model.tokenizer, cutter=tiny_model.backbone.cutter
    )
    assert one.captions.tolist() == [False]


@pytest.mark.parametrize("whole", [False, True])
def test_the_loss_by_hand(own_model: Network, whole: bool) -> None:
    """Two words along the one axis that cell 0 shares: cosine 1 each, and 0 with every other cell. Of a
    caption, also every word's own binary cross-entropy: all words (padding is none) have the cosine of axis 0
    with the region's mean cell."""
    found = batch(own_model)
    width = own_model.internvl.get_input_embeddings().weight.shape[1]
    axes = torch.eye(width)
    cells = axes[1].repeat(16, 1)
    cells[0] = axes[0]
    own_model.project = lambda features: dataclasses.replace(features, values=cells)  # type: ignore[method-assign]
    with torch.no_grad():
        own_model.internvl.get_input_embeddings().weight.copy_(axes[0] * 3)
    count = 16
    shares = torch.eye(count)[:1] * 0.5 + 0.5 / count
    one = AlignmentBatch(
        views=found.views,
        image=torch.tensor([0]),
        words=torch.tensor([[5, 6, -1]]),
        shares=shares,
        captions=torch.tensor([whole]),
    )
    loss, metrics = Alignment(own_model)(one)
    first = torch.tensor([10.0] + [0.0] * (count - 1)).log_softmax(0)
    logit = 10.0 * shares[0, 0] - 4.0
    vocabulary = own_model.internvl.get_input_embeddings().num_embeddings
    told = (vocabulary - 3) * torch.nn.functional.softplus(logit) + 2 * torch.nn.functional.softplus(-logit)
    assert float(loss.detach()) == pytest.approx(float(-(shares[0] * first).sum() + whole * told), rel=1e-5)
    assert metrics["hit"] == 1.0


def test_the_padding_vector_which_is_zero_takes_no_gradient(own_model: Network) -> None:
    table, pad = (
        own_model.internvl.get_input_embeddings().weight.requires_grad_(True),
        own_model.tokenizer.pad_token_id,
    )
    with torch.no_grad():
        table[pad] = 0
    Alignment(own_model)(batch(own_model))[0].backward()
    assert table.grad is not None
    assert not table.grad[pad].any()
    assert 0 < float(table.grad.norm()) < 1e4


@pytest.mark.slow
def test_training_it_finds_things_by_their_words_and_not_by_others(own_model: Network) -> None:
    own_model.internvl.model.multi_modal_projector.requires_grad_(True)
    own_model.internvl.get_input_embeddings().requires_grad_(True)
    module, found = Alignment(own_model), batch(own_model)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(80):
        module(found)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    swapped = AlignmentBatch(
        views=found.views,
        image=found.image,
        words=found.words.flip(0),
        shares=found.shares,
        captions=found.captions,
    )
    assert module(found)[1]["hit"] == 1.0
    assert module(swapped)[1]["hit"] == 0.0


def test_queries_that_start_as_keys_attend_to_their_like(own_model: Network) -> None:
    attention = middle_attention(own_model)
    torch.manual_seed(0)
    match_by_content(attention)
    assert torch.allclose(
        attention.k_proj.weight @ attention.k_proj.weight.T,
        torch.eye(len(attention.k_proj.weight)),
        atol=1e-5,
    )
    tokens = torch.nn.functional.normalize(torch.randn(20, attention.q_proj.in_features), dim=-1)
    query, key = (
        f(tokens).unflatten(-1, (-1, attention.head_dim)) for f in (attention.q_proj, attention.k_proj)
    )
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(attention.num_key_value_groups, dim=1))
    assert (scores.sum(0).argmax(1) == torch.arange(20)).float().mean() > 0.9
