from __future__ import annotations

import random

import pytest
import torch
from sam2.modeling.position_encoding import PositionEmbeddingRandom
from sam2.modeling.sam.transformer import Attention

from ans_core.losses import mean_iou
from ans_core.model.grounding import _rope
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.pretrain.build import match_by_place, match_same_place
from ans_core.pretrain.promptable import Promptable, PromptBatch, prompt_batch
from tests import tiny


def shown(count: int = 2) -> list:  # type: ignore[type-arg]
    return [(tiny.clip(i, 1).frames[0], [mask for mask, *_ in tiny.clip(i, 1).masks]) for i in range(count)]


def batch(seed: int = 0, objects: int = 3) -> PromptBatch:
    return prompt_batch(shown(), size=64, objects=objects, rng=random.Random(seed))


@pytest.mark.slow
def test_prompts_lie_inside_the_mask_or_are_its_box():
    kinds = set()
    for seed in range(60):
        found = batch(seed=seed)
        for n in range(len(found.targets)):
            mask, labels, points = (
                found.targets[n],
                found.labels[n].tolist(),
                found.coordinates[n].long().tolist(),
            )
            kinds.add(tuple(labels))
            if labels == [1, -1]:
                (x, y), _ = points
                assert mask[y, x]
            else:
                ys, xs = mask.nonzero(as_tuple=True)
                assert points == [[xs.min(), ys.min()], [xs.max(), ys.max()]]
    assert kinds == {(1, -1), (2, 3)}


def test_every_mask_token_learns_from_every_prompt(own_model: Network):
    """`[SEG]` is answered from the last three: were only the first trained, SFT would start from an untrained
    head."""
    own_model.sam2.requires_grad_(True)
    Promptable(own_model.sam2)(batch())[0].backward()
    for mlp in own_model.sam2.sam_mask_decoder.output_hypernetworks_mlps:
        assert all(bool(p.grad.any()) for p in mlp.parameters())


def test_all_four_masks_are_those_that_sam2_answers_with(tiny_model: Network):
    one = batch()
    sam, points = tiny_model.sam2, (one.coordinates, one.labels)
    features = sam.encode(one.pictures)
    every = sam.decode_every(features, one.image, points)
    single, three = (sam.decode(features, one.image, points=points, multimask=m) for m in (False, True))
    assert torch.allclose(
        every.all_logits, torch.cat([single.all_logits, three.all_logits], dim=1), atol=1e-5
    )
    assert torch.allclose(every.ious, torch.cat([single.ious, three.ious], dim=1), atol=1e-5)
    assert torch.allclose(every.logits, three.logits, atol=1e-5)
    assert torch.allclose(every.object_score, three.object_score, atol=1e-5)


def test_an_image_alone_asks_nothing_of_the_memory(own_model: Network):
    own_model.sam2.requires_grad_(True)
    loss, _ = Promptable(own_model.sam2)(batch())
    loss.backward()
    assert not any(p.grad is not None and p.grad.any() for p in own_model.sam2.memory_attention.parameters())
    assert any(p.grad is not None and p.grad.any() for p in own_model.sam2.image_encoder.parameters())


def test_an_object_that_leaves_costs_only_its_score(tiny_model: Network):
    """Absent in the only frame that counts: the loss is the cross-entropy of the object score alone."""
    one = batch(objects=1)
    absent = PromptBatch(
        pictures=one.pictures,
        image=one.image,
        coordinates=one.coordinates,
        labels=one.labels,
        targets=torch.zeros_like(one.targets),
    )
    with torch.no_grad():
        loss, _ = Promptable(tiny_model.sam2)(absent)
        sam = tiny_model.sam2
        decoded = sam.decode(sam.encode(one.pictures), one.image, points=(one.coordinates, one.labels))
    assert loss.item() == pytest.approx(
        torch.nn.functional.softplus(decoded.object_score).mean().item(), rel=1e-4
    )


def test_objects_in_one_batch_are_segmented_as_one_by_one(tiny_model: Network):
    both = batch(objects=1)
    with torch.no_grad():
        together, _ = Promptable(tiny_model.sam2)(both)
        alone = [
            Promptable(tiny_model.sam2)(
                PromptBatch(
                    pictures=both.pictures, image=both.image[n : n + 1],
                    coordinates=both.coordinates[n : n + 1], labels=both.labels[n : n + 1],
                    targets=both.targets[n : n + 1],
                )
            )[0]
            for n in range(2)
        ]  # fmt: skip
    assert together.item() == pytest.approx(sum(x.item() for x in alone) / 2, rel=1e-4)


def test_mean_iou_by_hand():
    """Half of a full target; both empty 1; drawn where nothing is 0."""
    target = torch.zeros(3, 4, 4, dtype=torch.bool)
    target[0] = True
    logits = torch.full((3, 4, 4), -1.0)
    logits[0, :2] = 1
    logits[2, 0, 0] = 1
    assert mean_iou(logits, target) == pytest.approx((0.5 + 1 + 0) / 3)
    assert mean_iou(logits[:0], target[:0]) == 0


def test_a_thing_too_small_for_a_pixel_is_not_asked_for_and_a_batch_without_any_costs_nothing(
    own_model: Network,
):
    """The step must go on, with a gradient of zero."""
    own_model.sam2.sam_mask_decoder.requires_grad_(True)
    nothing = prompt_batch([(shown(1)[0][0], [rle.empty(64, 64)])], size=64, objects=3, rng=random.Random(0))
    assert len(nothing.targets) == 0
    loss, found = Promptable(own_model.sam2)(nothing)
    loss.backward()
    assert loss.item() == 0
    assert found == {"iou_single": 0.0, "iou_three": 0.0}


def test_a_thing_is_asked_for_in_its_own_picture():
    found = batch(objects=1)
    assert found.image.tolist() == [0, 1]
    assert len(found.pictures) == 2
    assert found.targets.flatten(1).sum(1).tolist() == [256, 256]


@torch.no_grad()
def test_a_seg_embedding_equal_to_a_clicks_draws_what_the_click_draws(tiny_model: Network):
    sam2, at = tiny_model.sam2.eval(), torch.tensor([[16.0, 20.0], [40.0, 9.0]])
    features, frame = sam2.encode(batch().pictures[:1]), torch.zeros(2, dtype=torch.long)
    padded = torch.stack([at, torch.zeros_like(at)], 1), torch.tensor([[1, -1], [1, -1]])
    clicked, said = (
        sam2.decode(features, frame, points=padded),
        sam2.decode(features, frame, sam2.click_embeddings(at)),
    )
    assert torch.allclose(clicked.logits, said.logits, atol=1e-4)
    assert not torch.allclose(clicked.logits[0], clicked.logits[1], atol=1e-2)


def test_a_pixel_of_a_new_model_listens_to_the_click_that_is_near_it(tiny_model: Network):
    """At the published decoder's width; the random model of other tests is narrower."""
    torch.manual_seed(0)
    encoder = PositionEmbeddingRandom(128)
    attention = Attention(256, 8, downsample_rate=2)
    side, clicks = 8, torch.rand(50, 2)

    def right(of: Attention) -> float:
        """Share of clicks whose best pixel of all is a neighbour."""
        places = encoder((side, side)).flatten(1).T
        scores = of.q_proj(places) @ of.k_proj(encoder.forward_with_coords(clicks[None] * 64, (64, 64))[0]).T
        best = scores.argmax(0)
        cell = (clicks * side).floor()
        return float(
            ((torch.stack([best % side, best // side], 1) - cell).abs().max(1).values <= 1).float().mean()
        )

    assert right(attention) < 0.5
    match_by_place(attention)
    assert right(attention) > 0.95
    layer = tiny_model.sam2.sam_mask_decoder.transformer.layers[0]
    for matched in (layer.cross_attn_image_to_token, layer.cross_attn_token_to_image):
        assert torch.equal(matched.q_proj.weight, matched.k_proj.weight)
    assert not torch.equal(layer.self_attn.q_proj.weight, layer.self_attn.k_proj.weight)


def test_memory_attention_first_looks_at_its_own_place():
    """Equal biases under rotary positions: of a memory that is the same everywhere, the own place has the
    largest weight, far ones less."""
    attention = _rope(64, 8, rope_k_repeat=True, kv_in_dim=16)
    match_same_place(attention)
    # with values that name their place, the output then is the attention itself
    attention.v_proj = torch.nn.Identity()
    torch.nn.init.eye_(attention.out_proj.weight)
    torch.nn.init.zeros_(attention.out_proj.bias)
    seen = attention.eval()(q=torch.zeros(1, 64, 64), k=torch.zeros(1, 64, 16), v=torch.eye(64)[None])[0]
    assert seen.argmax(dim=1).tolist() == list(range(64))
    assert seen[0, 0] > seen[0, 1] > seen[0, 4]
