"""Pre-training of the vision tower on the words of regions."""

import pytest
import torch

from ans_core.model.network import Network
from ans_core.pretrain.build import frequency_filters, sine_positions
from ans_core.pretrain.region_words import RegionWords, words_batch
from tests import tiny


def test_a_regions_weights_are_equal_on_the_patches_it_touches_and_add_up_to_one(tiny_model: Network) -> None:
    sample = tiny.region()
    batch = words_batch(
        [(sample.frames[0], [sample])], tiny_model.tokenizer, cutter=tiny_model.backbone.cutter
    )
    touched = batch.weights[0] > 0
    assert 0 < touched.sum() < 64
    assert batch.weights[0].sum() == pytest.approx(1.0)
    assert len(batch.weights[0][touched].unique()) == 1


def test_the_bag_holds_every_token_of_the_caption_once(tiny_model: Network) -> None:
    sample = tiny.region()
    batch = words_batch(
        [(sample.frames[0], [sample])], tiny_model.tokenizer, cutter=tiny_model.backbone.cutter
    )
    tokens = set(tiny_model.tokenizer.encode(" " + sample.text, add_special_tokens=False))
    assert set(batch.words[0].nonzero().flatten().tolist()) == tokens


@pytest.mark.slow
def test_words_are_learned_from_pixels_by_the_tower_alone(own_model: Network) -> None:
    own_model.internvl.model.vision_tower.requires_grad_(True)
    module = RegionWords(own_model)
    sample = tiny.region()
    batch = words_batch([(sample.frames[0], [sample])], own_model.tokenizer, cutter=own_model.backbone.cutter)
    optimizer = torch.optim.AdamW([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    first = module(batch)[0]
    for _ in range(10):
        loss, metrics = module(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert float(loss.detach()) < 0.2 * float(first.detach())
    assert metrics["recall"] == 1.0
    assert own_model.internvl.lm_head.weight.grad is None


def test_frequency_filters_are_orthogonal_and_the_mean_is_the_weakest() -> None:
    filters = frequency_filters(4, 48).flatten(1)
    gram = filters @ filters.T
    assert torch.allclose(gram, gram.diag().diag(), atol=1e-5)
    assert gram.diag().sqrt()[:3].tolist() == pytest.approx([0.17] * 3, abs=1e-5)
    with pytest.raises(ValueError, match="48 frequencies, fewer than the vision width 49"):
        frequency_filters(4, 49)


def test_sine_positions_tell_every_patch_apart_and_neighbours_are_alike() -> None:
    table = sine_positions(6, 32)
    similarity = table @ table.T
    assert (similarity.argmax(1) == torch.arange(36)).all()
    assert similarity[0, 1] > similarity[0, 3] > similarity[0, 35]
