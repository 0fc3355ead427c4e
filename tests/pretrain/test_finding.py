"""Pre-training's supervised attention: what is counted, where, and that it teaches."""

import math

import pytest
import torch

from ans_core.data.collate import Batch, Row, cell_shares, collate
from ans_core.data.conversation import Turn
from ans_core.dist import read_together
from ans_core.model.network import Network
from ans_core.model.packing import branch_attention
from ans_core.model.supervised import Supervised, image_tokens
from ans_core.pictures import rle
from ans_core.pretrain.finding import Finding, first_looks, look_weights
from ans_core.types import RLE
from tests import tiny


def batch(model: Network, *masks: RLE | None) -> Batch:
    turns = tuple(
        Turn(question=f"Where is the {word} square?", answer="at the top.", targets=() if m is None else (m,))
        for word, m in zip("abcd", masks, strict=False)
    )
    other = (Turn(question="Describe the image.", answer="a red square."),)
    rows = [Row(name="x", frames=tiny.region().frames, turns=t) for t in (turns, other + turns[:1])]
    return collate(rows, model.tokenizer, tiny.layout(model))


def test_what_stands_before_an_answer_and_its_first_token_look_at_what_is_asked_for(
    tiny_model: Network,
) -> None:
    found = batch(tiny_model, tiny.square(0, 0, 16, 32), None, tiny.square(8, 40, 24, 56))
    rows, places, thing = found.looks.unbind(1)
    assert thing.tolist() == [0, 0, 1, 1, 2, 2]
    assert rows.tolist() == [0, 0, 0, 0, 1, 1]
    assert found.branch[rows, places].tolist() == [1, 1, 3, 3, 2, 2]
    assert found.loss_mask[rows, places + 1].all()
    assert found.loss_mask[rows, places].tolist() == [False, True] * 3
    assert torch.allclose(found.things.sum(1), torch.ones(3))
    assert found.boxes[1].tolist() == [8 / 64, 40 / 64, 24 / 64, 56 / 64]


def test_a_box_looks_at_its_own_thing(tiny_model: Network) -> None:
    one, other = tiny.square(0, 0, 16, 32), tiny.square(8, 40, 24, 56)
    asked = Turn(question="Segment a.", answer="Sure, it is <box>[[0, 0, 250, 500]]</box>.", targets=(one,))
    told = Turn(
        question="Describe it.",
        answer="<p> a </p> <box>[[0]]</box> by <p> b </p> <box>[[1]]</box>.",
        targets=(one, other),
    )
    nothing = Turn(question="Segment b.", answer="There is none.", targets=(rle.empty(64, 64),))
    found = collate([tiny.row(asked, told, nothing)], tiny_model.tokenizer, tiny.layout(tiny_model))
    before, boxes = (
        found.loss_mask[0].nonzero()[:, 0] - 1,
        (found.input_ids[0] == tiny_model.tokenizer.convert_tokens_to_ids("<box>")),
    )
    first = [before[found.branch[0, before] == branch] for branch in (1, 3)]
    assert found.looks[:, 1].tolist() == [first[0][0], *boxes.nonzero()[:, 0], *first[1][:2]]
    assert found.looks[:, 2].tolist() == [0, 0, 1, 2, 3, 3]
    assert [bool(share) for share in found.things.sum(1)] == [True, True, True, False]
    assert torch.equal(found.boxes[0], found.boxes[1])


def test_every_word_about_a_shown_region_looks_at_it(tiny_model: Network) -> None:
    mask = tiny.square(8, 40, 24, 56)
    turns = (Turn(question="Describe region1.", answer="a red square.", regions=(mask,), targets=(mask,)),)
    found = collate([tiny.row(*turns)], tiny_model.tokenizer, tiny.layout(tiny_model))
    assert found.looks[:, 1].tolist() == (found.loss_mask[0].nonzero()[:, 0] - 1).tolist()
    assert found.looks[:, 2].tolist() == [0] * len(found.looks)


def test_things_weigh_the_same_and_share_it_among_the_looks_at_them() -> None:
    thing = torch.tensor([0, 0, 0, 1, 2, 2])
    assert torch.allclose(look_weights(thing), torch.tensor([1 / 3, 1 / 3, 1 / 3, 1, 1 / 2, 1 / 2]) / 3)
    assert first_looks(thing).tolist() == [True, True, False, True, True, True]


def test_shares_of_cells_by_hand() -> None:
    shares = cell_shares(tiny.square(0, 0, 32, 64), 4).view(4, 4)  # the left half
    assert shares.tolist() == [[0.125, 0.125, 0, 0]] * 4


def test_attention_is_what_the_layer_attends_to(tiny_model: Network) -> None:
    found = batch(tiny_model, tiny.square(0, 0, 16, 32), tiny.square(8, 40, 24, 56))
    module = Finding(tiny_model, attention_weight=1.0, box_weight=0.0, click_weight=0.0)
    seen = {}
    language = tiny_model.internvl.model.language_model
    attention = language.layers[1].self_attn
    before = attention.register_forward_pre_hook(lambda m, a, k: seen.update(k), with_kwargs=True)
    used = language.config._attn_implementation
    language.config._attn_implementation = "eager"
    after = attention.register_forward_hook(lambda m, a, out: seen.update(weights=out[1]))
    try:
        embeds = tiny_model.embed(
            found.input_ids, image_tokens(tiny_model, found.views).split(found.views), found.regions
        )
        mask = torch.where(branch_attention(found.branch), 0.0, -torch.inf)[:, None]
        language(inputs_embeds=embeds, attention_mask=mask, position_ids=found.position_ids, use_cache=False)
    finally:
        language.config._attn_implementation = used
        before.remove()
        after.remove()
    attended = module.attended(seen["hidden_states"], seen["position_embeddings"], found)
    image = (found.input_ids == tiny_model.image_token_id) & (found.branch == 0)
    for k, (row, place, _) in enumerate(found.looks.tolist()):
        assert torch.allclose(attended[k].exp(), seen["weights"][row, :2, place][:, image[row]], atol=1e-5)


def test_the_loss_is_the_text_loss_and_the_divergence(tiny_model: Network) -> None:
    found = batch(tiny_model, tiny.square(0, 0, 64, 64))
    text = Supervised(tiny_model, mask_weight=0.0, dice_weight=0.0, points=1)(found)[0]
    loss, read = Finding(tiny_model, attention_weight=3.0, box_weight=2.0, click_weight=5.0)(found)
    (metrics,) = read_together([read])
    assert float(loss.detach()) == pytest.approx(
        float(text) + 3 * metrics["attention"] + 2 * metrics["box"] + 5 * metrics["click"], rel=1e-5
    )
    # Jensen: all cells are target here
    assert metrics["attention"] >= -math.log(metrics["attention_on_target"]) - 1e-5


def test_without_anything_meant_it_is_the_text_loss(tiny_model: Network) -> None:
    found = batch(tiny_model, None)
    assert len(found.looks) == 0
    text = Supervised(tiny_model, mask_weight=0.0, dice_weight=0.0, points=1)(found)[0]
    assert Finding(tiny_model, attention_weight=1.0, box_weight=1.0, click_weight=1.0)(found)[0] == text


def test_what_is_not_there_takes_no_attention_from_the_text_and_has_no_box(tiny_model: Network) -> None:
    module = Finding(tiny_model, attention_weight=3.0, box_weight=2.0, click_weight=5.0)
    nothing = batch(tiny_model, rle.empty(64, 64))
    assert nothing.things.sum() == 0
    text = Supervised(tiny_model, mask_weight=0.0, dice_weight=0.0, points=1)(nothing)[0]
    loss, read = module(nothing)
    (metrics,) = read_together([read])
    assert float(loss.detach()) == pytest.approx(float(text) + 3 * metrics["attention"], rel=1e-5)
    assert metrics["attention"] >= -math.log(1 - metrics["attention_if_absent"]) - 1e-5  # Jensen
    assert not {"box", "click", "attention_on_target"} & set(metrics)
    both, alone = (
        batch(tiny_model, rle.empty(64, 64), tiny.square(0, 0, 16, 32)),
        batch(tiny_model, None, tiny.square(0, 0, 16, 32)),
    )
    for name in ("box", "click"):  # what is absent counts neither in the sum nor in what it is divided by
        assert float(module(module.begin_step([both])[0])[1][name]) == pytest.approx(
            float(module(alone)[1][name]), rel=1e-5
        )


def test_micro_batches_add_up_to_the_loss_of_all_rows(tiny_model: Network) -> None:
    one, other = tiny.square(0, 0, 16, 32), tiny.square(8, 40, 24, 56)
    asked = Turn(question="Segment a.", answer="Sure, it is <box>[[0, 0, 250, 500]]</box>.", targets=(one,))
    told = Turn(
        question="Describe it.",
        answer="<p> a </p> <box>[[0]]</box> by <p> b </p> <box>[[1]]</box>.",
        targets=(one, other),
    )
    nothing = Turn(question="Segment b.", answer="There is none.", targets=(rle.empty(64, 64),))
    rows, layout = (
        [tiny.row(asked, nothing), tiny.row(told), tiny.row(asked, told, asked)],
        tiny.layout(tiny_model),
    )
    whole, first, second = (
        collate(some, tiny_model.tokenizer, layout) for some in (rows, rows[:1], rows[1:])
    )
    module = Finding(tiny_model, attention_weight=3.0, box_weight=2.0, click_weight=5.0)
    losses = [float(module(batch)[0].detach()) for batch in module.begin_step([first, second])]
    assert sum(losses) == pytest.approx(float(module(module.begin_step([whole])[0])[0].detach()), rel=1e-5)


@pytest.mark.slow
def test_training_it_moves_attention_to_what_is_meant(own_model: Network) -> None:
    own_model.internvl.requires_grad_(True)
    module = Finding(own_model, attention_weight=1.0, box_weight=1.0, click_weight=1.0)
    found = batch(own_model, tiny.square(0, 0, 16, 16), tiny.square(40, 40, 56, 56), rle.empty(64, 64))
    own_model.text_hidden_fcs.requires_grad_(True)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=3e-3)
    before = module(found)[1]
    for _ in range(100):
        module(found)[0].backward()
        optimizer.step()
        optimizer.zero_grad()
    last = module(found)[1]
    assert last["attention_on_target"] > max(0.8, 2 * before["attention_on_target"])
    assert last["attention_if_absent"] < min(0.2, before["attention_if_absent"] / 2)
    assert last["click"] < 0.2 * before["click"]
    assert last["box"] < 0.1
