from __future__ import annotations

import pytest
import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.model import adapters, parts
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised, image_tokens, packed
from tests import tiny

LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
SEGMENT = Turn(
    question="Please segment the red square.", answer="It is [SEG].", masks=((tiny.square(8, 8, 24, 24),),)
)


def prepared(model: Network, seed: int = 0) -> None:
    adapters.prepare_sft(model, adapters.lora_config(**LORA), seed=seed)


def policies(model: Network, seed: int = 0) -> adapters.Policies:
    return adapters.Policies(
        model, adapters.rl_config(**LORA, modules=adapters.policy_modules(model, drawing=True)), seed=seed
    )


def outputs(model: Network) -> tuple[Tensor, Tensor]:
    """Text logits and mask logits of one conversation."""
    batch = collate([tiny.row(SEGMENT)], model.tokenizer, tiny.layout(model))
    with torch.no_grad():
        hidden = model.hidden_states(packed(batch), image_tokens(model, batch.views).split(batch.views))
        return model.logits(hidden), Supervised(
            model, mask_weight=1.0, dice_weight=1.0, points=10
        ).decode_masks(batch, hidden).logits


def same(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def near(one: tuple[Tensor, ...], other: tuple[Tensor, ...]) -> bool:
    return all(
        (a - b).abs().max() < 1e-5 * max(1.0, float(b.abs().max())) for a, b in zip(one, other, strict=True)
    )


def stir(model: nn.Module, marker: str = "") -> None:
    """Moves what takes a gradient, by name."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.requires_grad and marker in name:
                p.add_(0.05 * torch.randn(p.shape, generator=generator))


# SFT


def test_fine_tuning_trains_what_the_family_trains_and_nothing_else(own_model: Network):
    prepared(own_model)
    trained: set[str] = set()
    frozen: set[str] = set()
    for name, p in own_model.named_parameters():
        (trained if p.requires_grad else frozen).add(parts.part_of(name))
    assert trained == {
        "projector",
        "embeddings",
        "language model",
        "head",
        "text_hidden_fcs",
        "SAM2 mask decoder",
    }
    assert frozen == {
        "vision tower",
        "language model",
        "SAM2 image encoder",
        "SAM2 prompt encoder",
        "SAM2 memory",
        "SAM2 mask decoder",
    }
    closed = {
        name.split(".")[2]
        for name, p in own_model.named_parameters()
        if "mask_decoder" in name and not p.requires_grad
    }
    assert closed == {"iou_prediction_head", "pred_obj_score_head"}  # no loss reads the scores
    inside = {
        name
        for name, p in own_model.named_parameters()
        if p.requires_grad and parts.part_of(name) == "language model"
    }
    assert all(".lora_" in name for name in inside)
    assert len(inside) == 2 * 7 * 2  # A and B of seven linears in two layers


def test_presence_is_trained_where_masks_depend_on_it(own_model: Network):
    own_model.use_seg_object_score()
    prepared(own_model)
    closed = {
        name.split(".")[2]
        for name, p in own_model.named_parameters()
        if "mask_decoder" in name and not p.requires_grad
    }
    assert closed == {"iou_prediction_head"}


@pytest.mark.slow
def test_lora_starts_as_the_base_and_is_drawn_from_its_seed(own_model: Network):
    before = outputs(own_model)
    torch.manual_seed(5)
    following = torch.rand(1)
    torch.manual_seed(5)
    prepared(own_model)
    assert torch.equal(torch.rand(1), following)  # the caller's random state is left as it was
    assert near(outputs(own_model), before)
    one, again, other = (tiny.build() for _ in range(3))
    prepared(one), prepared(again), prepared(other, seed=1)
    assert all(
        torch.equal(a, b)
        for a, b in zip(adapters.trained(one).values(), adapters.trained(again).values(), strict=True)
    )
    drawn = "internvl.model.language_model.layers.0.self_attn.q_proj.lora_A.default.weight"
    assert not torch.equal(adapters.trained(one)[drawn], adapters.trained(other)[drawn])


def test_lora_held_in_half_precision_is_itself_again_with_its_hooks(own_model: Network):
    """On a parameter's gradient accumulator DistributedDataParallel has the hook that averages gradients."""
    adapters.prepare_sft(own_model, adapters.lora_config(**LORA), seed=0)
    factors = {name: p for name, p in own_model.named_parameters() if ".lora_" in name}
    values = {name: p.detach().clone() for name, p in factors.items()}
    averaged: list[str] = []
    accumulators = {name: p.view_as(p).grad_fn.next_functions[0][0] for name, p in factors.items()}  # type: ignore[union-attr]
    for name, accumulator in accumulators.items():
        accumulator.register_hook(lambda *_, name=name: averaged.append(name))
    with adapters.lora_in(torch.bfloat16, own_model):
        halves = {name: p for name, p in own_model.named_parameters() if ".lora_" in name}
        assert {p.dtype for p in halves.values()} == {torch.bfloat16}
        assert all(torch.equal(halves[name], value.bfloat16()) for name, value in values.items())
    now = dict(own_model.named_parameters())
    assert all(now[name] is p and torch.equal(p, values[name]) for name, p in factors.items())
    sum(p.sum() for p in factors.values()).backward()  # type: ignore[union-attr]
    assert sorted(averaged) == sorted(factors)


def test_a_merged_model_equals_the_unmerged_one_and_has_no_lora_left(own_model: Network):
    before = outputs(own_model)
    tuner = adapters.prepare_sft(own_model, adapters.lora_config(**LORA), seed=0)
    stir(own_model)
    unmerged = outputs(own_model)
    assert not near(unmerged, before)
    names = set(tiny.build().state_dict())
    adapters.merge(tuner)
    assert near(outputs(own_model), unmerged)
    assert set(own_model.state_dict()) == names


def test_trained_tensors_put_into_a_fresh_model_give_the_same_model(own_model: Network):
    prepared(own_model)
    stir(own_model)
    again = tiny.build()
    prepared(again, seed=9)
    adapters.load_trained(again, {k: v.clone() for k, v in adapters.trained(own_model).items()})
    assert same(outputs(again), outputs(own_model))


def test_trained_tensors_of_other_settings_are_refused(own_model: Network):
    prepared(own_model)
    tensors = dict(adapters.trained(own_model))
    wide = tiny.build()
    adapters.prepare_sft(wide, adapters.lora_config(rank=8, alpha=8, dropout=0.0), seed=0)
    with pytest.raises(ValueError, match=r"0 missing \[\], 0 unknown \[\], 28 of another shape"):
        adapters.load_trained(wide, tensors)
    tensors["stray"] = tensors.pop("internvl.lm_head.weight")
    with pytest.raises(ValueError, match=r"1 missing \['internvl.lm_head.weight'\], 1 unknown \['stray'\]"):
        adapters.load_trained(own_model, tensors)


def test_a_training_step_gives_every_trained_tensor_a_gradient_and_moves_no_frozen_part(own_model: Network):
    """LoRA's A has none at first: B is zero."""
    prepared(own_model)
    stir(own_model, "lora_B")
    before = parts.hashes(own_model)
    shown = Turn(question="Describe region1.", answer="red.", regions=(tiny.square(0, 0, 32, 32),))
    batch = collate([tiny.row(SEGMENT, shown)], own_model.tokenizer, tiny.layout(own_model))
    torch.manual_seed(0)
    loss, _ = Supervised(own_model, mask_weight=2.0, dice_weight=0.5, points=200)(batch)
    loss.backward()
    missing = [
        n for n, p in own_model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    # of the masks that were not chosen
    unused = {"obj_score_token", "iou_token", "output_hypernetworks_mlps"}
    assert all(parts.part_of(n) == "SAM2 mask decoder" and n.split(".")[2] in unused for n in missing)
    assert all(p.grad is None for p in own_model.parameters() if not p.requires_grad)
    optimizer = torch.optim.AdamW([p for p in own_model.parameters() if p.requires_grad], lr=1e-3)
    optimizer.step()
    moved = parts.check_moved(before, own_model)
    assert [part for part, did in moved.items() if not did] == [
        part for part in before if part.endswith("(frozen)")
    ]


def test_a_frozen_part_that_moved_and_a_trained_one_that_did_not_are_named(own_model: Network):
    prepared(own_model)
    before = parts.hashes(own_model)
    with torch.no_grad():
        own_model.sam2.image_encoder.trunk.pos_embed.add_(1)
    with pytest.raises(RuntimeError, match=r"SAM2 image encoder \(frozen\)"):
        parts.check_moved(before, own_model)


def test_a_trained_part_that_stayed_is_named_and_a_training_that_moved_nothing_is_refused(
    own_model: Network, caplog: pytest.LogCaptureFixture
):
    prepared(own_model)
    before = parts.hashes(own_model)
    with pytest.raises(RuntimeError, match=r"head \(trained\)"):
        parts.check_moved(before, own_model)
    with torch.no_grad():
        own_model.vlm.lm_head.weight.add_(1)
    moved = parts.check_moved(before, own_model)
    assert [part for part, did in moved.items() if did] == ["head (trained)"]
    assert "text_hidden_fcs (trained)" in caplog.text
    assert "did not move" in caplog.text


def test_frozen_encoders_keep_no_graph(own_model: Network):
    prepared(own_model)
    batch = collate([tiny.row(SEGMENT)], own_model.tokenizer, tiny.layout(own_model))
    graphs: list[bool] = []
    own_model.internvl.model.vision_tower.register_forward_hook(
        lambda m, i, o: graphs.append(o.last_hidden_state.requires_grad)
    )
    own_model.sam2.image_encoder.register_forward_hook(
        lambda m, i, o: graphs.append(o["vision_features"].requires_grad)
    )
    Supervised(own_model, mask_weight=1.0, dice_weight=1.0, points=10)(batch)
    assert graphs == [False, False]


# Policy, teacher, reference


def test_all_three_policies_are_the_base_at_first_and_the_reference_stays_it_bit_for_bit(own_model: Network):
    base = outputs(own_model)
    both = policies(own_model)
    assert near(outputs(own_model), base)
    stir(own_model, ".policy.")
    assert not near(outputs(own_model), base)
    with both.using("teacher"):
        assert near(outputs(own_model), base)
    with both.using("reference"):
        assert same(outputs(own_model), base)


def test_switching_is_exact_both_ways_and_nests(own_model: Network):
    both = policies(own_model)
    stir(own_model, ".policy.")
    policy = outputs(own_model)
    with both.using("teacher"):
        teacher = outputs(own_model)
        with both.using("reference"):
            reference = outputs(own_model)
        assert same(outputs(own_model), teacher)
        with both.using("policy"):
            assert same(outputs(own_model), policy)
    assert same(outputs(own_model), policy)
    assert both.active == "policy"
    with both.using("reference"):
        assert same(outputs(own_model), reference)


def test_an_error_inside_leaves_the_policy_active(own_model: Network):
    both = policies(own_model)
    with pytest.raises(KeyError), both.using("teacher"):
        raise KeyError
    assert both.active == "policy"


def test_only_the_policy_takes_a_gradient_whatever_is_active(own_model: Network):
    both = policies(own_model)

    def trained() -> set[str]:
        return {n for n, p in own_model.named_parameters() if p.requires_grad}

    names = trained()
    assert names
    assert all(".policy." in n for n in names)
    assert {parts.part_of(n) for n in names} == {
        "language model",
        "projector",
        "text_hidden_fcs",
        "SAM2 mask decoder",
    }
    for adapter in ("teacher", "reference", "policy"):
        with both.using(adapter):
            assert trained() == names
    assert trained() == names


def test_the_teacher_follows_as_an_average(own_model: Network):
    """decay 3/4: 3/4 teacher + 1/4 policy; the distance left is 3/4 of the one before."""
    both = policies(own_model)
    stir(own_model, ".policy.")
    before = {k: v.clone() for k, v in both.tensors("teacher").items()}
    policy = {k: v.clone() for k, v in both.tensors("policy").items()}
    gap = (
        sum(float((policy[k] - before[k]).pow(2).sum()) for k in policy)
        / sum(v.numel() for v in policy.values())
    ) ** 0.5
    assert both.ema(0.75) == pytest.approx(0.75 * gap, rel=1e-4)
    assert all(
        torch.allclose(v, 0.75 * before[k] + 0.25 * policy[k], atol=1e-6)
        for k, v in both.tensors("teacher").items()
    )
    assert all(torch.equal(v, policy[k]) for k, v in both.tensors("policy").items())
    both.ema(0.0)
    assert all(torch.equal(v, policy[k]) for k, v in both.tensors("teacher").items())


def test_tensors_of_another_adapter_are_refused(own_model: Network):
    both = policies(own_model)
    with pytest.raises(ValueError, match="tensors of another adapter"):
        both.load("policy", {"x": torch.zeros(1)})


@pytest.mark.slow
@pytest.mark.parametrize("adapter", ["policy", "teacher"])
def test_an_adapter_merged_in_computes_the_same_without_it(own_model: Network, adapter: str):
    both = policies(own_model)
    stir(own_model, ".policy.")
    both.ema(0.5)
    with both.using(adapter):
        expected = outputs(own_model)
    merged = both.merged(adapter)
    assert near(outputs(merged), expected)
    assert set(merged.state_dict()) == set(tiny.build().state_dict())


def test_the_dropout_of_lora_works_in_training(own_model: Network):
    adapters.prepare_sft(own_model, adapters.lora_config(rank=4, alpha=8, dropout=0.5), seed=0)
    stir(own_model)
    assert any(isinstance(m, LoraLayer) for m in own_model.modules())
    torch.manual_seed(0)
    one, other = outputs(own_model), outputs(own_model)
    assert not same(one, other)
    own_model.eval()
    assert same(outputs(own_model), outputs(own_model))
