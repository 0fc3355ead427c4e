from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sam2.modeling.sam.transformer import RoPEAttention
from torch import Tensor
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from ans_core.config import Config, resolve
from ans_core.config.memory import MemoryLoss
from ans_core.model.grounding import FrameFeatures, Grounding
from ans_core.precision import autocast
from ans_core.tracking import forward
from ans_core.tracking.batch import TrackingBatch
from ans_core.tracking.forward import remembered, track
from ans_core.tracking.training import PATIENCE, GradientCheck, Tracking, open_modules, places, set_dropout
from tests.tracking.conftest import batch_of

ROOT = Path(__file__).resolve().parents[2]
MEMORY = ("memory_attention", "memory_encoder")


def gradients(
    sam2: Grounding, batch: TrackingBatch, *, dtype: torch.dtype = torch.float32, **options: bool
) -> dict[str, Tensor]:
    sam2.zero_grad()
    torch.manual_seed(1)  # dropout, and where corrective clicks fall
    with autocast(sam2.device, dtype):
        loss, _ = Tracking(sam2, MemoryLoss(), **options)(batch)
    loss.backward()
    return {name: p.grad.clone() for name, p in sam2.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
@pytest.mark.parametrize(("kind", "options"), [("mask", {}), ("box", {"clicks": 2, "second_frame": 1.0})])
def test_frames_computed_again_give_the_gradients_of_plain_back_propagation(
    sam2: Grounding, kind: str, options: dict[str, float], dtype: torch.dtype, tolerance: float
):
    """A frame that is computed again with another frame's features, bank, dropout or clicks has the same loss
    and other gradients: with other dropout those of some tensor are off by 2.5 times their norm. Under
    autocast a weight is cast once for all frames that are not computed again, and their gradients of it are
    summed in bf16."""
    open_modules(sam2, (*MEMORY, "sam_mask_decoder", "maskmem_tpos_enc", "image_encoder"))
    batch = batch_of(kind, frames=5, **options)
    plain, again = (gradients(sam2, batch, recompute=recompute, dtype=dtype) for recompute in (False, True))
    assert plain.keys() == again.keys()
    # a key's bias changes no softmax: its gradient is rounding alone
    rounding = 1e-7 * max(gradient.norm() for gradient in plain.values())
    assert {
        name: off
        for name in plain
        if (off := (plain[name] - again[name]).norm()) > tolerance * plain[name].norm() + rounding
    } == {}
    assert all(plain[name].any() for name in plain if name.startswith(MEMORY))


@pytest.mark.slow
def test_torch_sees_the_device_whose_random_state_a_frame_computed_again_needs(
    sam2: Grounding, monkeypatch: pytest.MonkeyPatch
):
    """It keeps a GPU's state for tensors among the arguments alone; of a closure over them it sees none, and
    dropout differs silently."""
    seen: list[set[str]] = []

    def recorded(function: Callable[..., object], *arguments: object, **options: bool) -> object:
        seen.append({leaf.device.type for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)})
        return checkpoint(function, *arguments, **options)

    monkeypatch.setattr(forward, "checkpoint", recorded)
    open_modules(sam2, (*MEMORY, "image_encoder"))
    gradients(sam2, batch_of("box", frames=3, clicks=2), recompute=True)
    assert len(seen) >= 6  # frames of the encoder and of the memory
    assert all(devices == {"cpu"} for devices in seen)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_on_a_gpu_too_frames_computed_again_draw_the_same_dropout_and_clicks(sam2: Grounding):
    sam2.cuda()
    open_modules(sam2, MEMORY)
    set_dropout(sam2, 0.1)
    batch = batch_of("box", frames=4, clicks=2).to("cuda")
    plain, again = (gradients(sam2, batch, recompute=recompute) for recompute in (False, True))
    assert {
        name for name in plain if not torch.allclose(plain[name], again[name], rtol=1e-3, atol=1e-5)
    } == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("trained", "recompute", "at_once"), [(True, True, 1), (True, False, 4), (False, True, 4)]
)
def test_a_trained_image_encoder_is_computed_again_frame_by_frame(
    sam2: Grounding, monkeypatch: pytest.MonkeyPatch, *, trained: bool, recompute: bool, at_once: int
):
    """What is computed again is held at once; four frames of SAM2's large size would be 22 GB."""
    open_modules(sam2, (*MEMORY, "image_encoder") if trained else MEMORY)
    seen: list[int] = []
    encode = sam2.encode

    def counted(pixels: Tensor) -> FrameFeatures:
        seen.append(len(pixels))
        return encode(pixels)

    monkeypatch.setattr(sam2, "encode", counted)
    gradients(sam2, batch_of("mask", count=1), recompute=recompute)
    assert set(seen) == {at_once}


@pytest.mark.slow
def test_a_frame_computed_again_reads_its_own_features_and_the_bank_of_its_time(sam2: Grounding):
    """The gradient of every frame's features by itself, where an index bound too late would show; the bank
    grows meanwhile."""
    sam2.requires_grad_(False)
    batch = batch_of("box", frames=4, count=1)
    [groups] = batch.tracks
    with torch.no_grad():
        features = sam2.encode(batch.frames)

    def of_features(*, recompute: bool) -> Tensor:
        coarse = features.coarse.clone().requires_grad_(True)
        maps = sam2.maps(FrameFeatures(fine=features.fine, middle=features.middle, coarse=coarse))
        torch.manual_seed(1)
        kept: list[dict[str, object]] = []

        def remember(out: dict[str, object]) -> dict[str, object]:
            kept.append(remembered(out))
            return kept[-1]

        found = track(sam2, maps, batch, groups, recompute=recompute, remember=remember)
        torch.stack([frame.out["pred_masks"].sum() for frame in found]).sum().backward()
        assert coarse.grad is not None
        return coarse.grad

    plain, again = of_features(recompute=False), of_features(recompute=True)
    assert plain.flatten(1).any(1).all()
    assert torch.allclose(plain, again, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_gradients_reach_the_memory_encoder_through_the_bank_and_stop_where_the_bank_is_detached(
    sam2: Grounding,
):
    trained = open_modules(sam2, MEMORY)
    check = GradientCheck(sam2, trained, modules=MEMORY)
    assert len(gradients(sam2, batch_of("mask"))) == len(trained)
    check.judge_first()
    assert check.missing == []
    detached = Tracking(sam2, MemoryLoss())
    detached.remember = lambda out: {
        key: [x.detach() for x in value] if isinstance(value, list) else value.detach()
        for key, value in remembered(out).items()
    }
    check = GradientCheck(sam2, trained, modules=MEMORY)
    sam2.zero_grad()
    detached(batch_of("mask"))[0].backward()
    with pytest.raises(
        RuntimeError,
        match=r"after 1 step no gradient has reached memory_encoder.*take them out of memory.trainable",
    ):
        check.judge_first()
    with pytest.raises(RuntimeError, match=r"after 3 steps no gradient has reached memory_encoder \(1\)"):
        check.judge(3)


def test_inner_modules_are_trained_by_their_names(sam2: Grounding):
    inner = open_modules(sam2, ("sam_prompt_encoder.mask_downscaling", "memory_attention.norm"))
    assert {name.rpartition(".")[0] for name in inner} == {
        *(f"sam_prompt_encoder.mask_downscaling.{n}" for n in (0, 1, 3, 4, 6)),
        "memory_attention.norm",
    }
    assert {name for name, p in sam2.named_parameters() if p.requires_grad} == set(inner)


@pytest.mark.slow
def test_only_the_named_modules_are_trained_and_unknown_names_are_refused(sam2: Grounding):
    trained = open_modules(sam2, ("memory_encoder", "no_obj_ptr"))
    assert {name for name, p in sam2.named_parameters() if p.requires_grad} == set(trained)
    assert {name.split(".")[0] for name in trained} == {"memory_encoder", "no_obj_ptr"}
    with pytest.raises(ValueError, match=r"has no \['memory_encode'\]; it has .*memory_attention"):
        open_modules(sam2, ("memory_encode",))
    check = GradientCheck(sam2, trained, modules=("memory_encoder", "no_obj_ptr"))
    gradients(sam2, batch_of("mask"))
    sam2.no_mem_embed.grad = torch.zeros_like(sam2.no_mem_embed)
    with pytest.raises(RuntimeError, match="1 frozen tensors have a gradient: no_mem_embed"):
        check.judge_first()


@pytest.mark.slow
@pytest.mark.parametrize("profile", ["tiny", "sam2-memory", "sa2va-4b"])
def test_every_profile_trains_what_can_learn(sam2: Grounding, profile: str):
    """Each entry gets a gradient of masks, boxes or clicks on objects that come and go."""
    modules = Config.model_validate(resolve(ROOT / f"profiles/{profile}.yaml", ())).memory.trainable_modules
    check = GradientCheck(sam2, open_modules(sam2, modules), modules=modules)
    for kind in ("mask", "box", "point"):
        gradients(sam2, batch_of(kind, clicks=0 if kind == "mask" else 1))
    with torch.no_grad():
        sam2.sam_mask_decoder.pred_obj_score_head.layers[-1].bias -= 100  # from here on nothing is there
    gradients(sam2, batch_of("box"))
    check.judge(PATIENCE)
    assert not set(modules) & set(check.missing)


@pytest.mark.parametrize(
    "name", ["no_mem_pos_enc", "image_encoder.neck.position_encoding", "memory_attention.layers.0.dropout1"]
)
def test_a_name_of_nothing_that_could_learn_is_refused(sam2: Grounding, name: str):
    with pytest.raises(
        ValueError, match=rf"memory.trainable_modules: \['{name}'\] can't learn: .*leave it out"
    ):
        open_modules(sam2, (*MEMORY, name))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "without", "reached_by"),
    [
        ("sam_prompt_encoder.mask_downscaling", "box", "mask"),
        ("mask_downsample", "point", "mask"),
        ("no_mem_embed", "mask", "box"),
    ],
)
def test_a_module_that_no_prompt_has_reached_in_any_step_is_refused_by_its_name(
    sam2: Grounding, module: str, without: str, reached_by: str
):
    """Boxes alone do not reach the downscaling of masks, which a later step may draw."""
    check = GradientCheck(sam2, open_modules(sam2, (*MEMORY, module)), modules=(*MEMORY, module))
    gradients(sam2, batch_of(without))
    check.judge_first()
    with pytest.raises(
        RuntimeError, match=rf"after 7 steps no gradient has reached {module} \(1\);.*memory\.prompts\.kinds"
    ):
        check.judge(7)
    gradients(sam2, batch_of(reached_by))
    gradients(sam2, batch_of(without))
    check.judge(7)


@pytest.mark.slow
def test_tensors_without_a_gradient_are_named_and_clips_without_absent_objects_are_no_mistake(
    sam2: Grounding, caplog: pytest.LogCaptureFixture
):
    modules = (*MEMORY, "sam_prompt_encoder", "no_obj_ptr")
    check = GradientCheck(sam2, open_modules(sam2, modules), modules=modules)
    gradients(sam2, batch_of("mask"))
    check.judge(1)
    [warning] = caplog.messages
    assert warning.startswith(f"memory: {len(check.missing)} trained tensors had no gradient in 1 step: ")
    assert {"no_obj_ptr", "sam_prompt_encoder.point_embeddings.2.weight"} <= set(
        warning.split(": ")[-1].split(", ")
    )


@pytest.mark.slow
def test_a_step_whose_loss_is_not_finite_reaches_nothing(sam2: Grounding):
    """Every gradient of it is NaN, also of what it does not use."""
    check = GradientCheck(sam2, trained := open_modules(sam2, (*MEMORY, "mask_downsample")), modules=MEMORY)
    loss, _ = Tracking(sam2, MemoryLoss())(batch_of("box"))
    (loss * math.nan).backward()
    assert check.missing == list(trained)


@pytest.mark.slow
def test_objects_divided_among_passes_cost_what_they_cost_together(sam2: Grounding):
    """Nothing is dropped: four objects at once, or three and one, on the same prompts."""
    sam2.eval()
    sam2.requires_grad_(False)
    whole, parts = (batch_of("mask", count=4, at_once=n) for n in (4, 3))
    assert [[len(group.objects) for group in groups] for groups in parts.tracks] == [[3], [1]]
    (one, curves), (other, again) = (Tracking(sam2, MemoryLoss())(batch) for batch in (whole, parts))
    assert float(one) == pytest.approx(float(other), rel=1e-4)
    assert curves == pytest.approx(again, abs=2e-3)  # a pixel at the threshold may flip
    assert set(curves) == {
        "loss_mask",
        "loss_dice",
        "loss_iou",
        "loss_object",
        *(f"iou_at_{d}" for d in (1, 2, 3)),
    }  # a given mask is no prediction


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_objects_of_every_kind_of_prompt_are_followed_together_as_each_by_itself(
    sam2: Grounding, dtype: torch.dtype, tolerance: float
):
    sam2.eval()
    kinds = ("mask", "box", "point")
    made = [batch_of(kind, count=2, clicks=0 if kind == "mask" else 1) for kind in kinds]
    groups = [replace(b.tracks[0][0], objects=b.tracks[0][0].objects + 2 * n) for n, b in enumerate(made)]
    common = {
        name: torch.cat([getattr(b, name) for b in made]) for name in ("frames", "targets", "has_truth")
    }
    rows = torch.cat([b.rows + n * len(b.frames) for n, b in enumerate(made)])
    apart = replace(made[0], **common, rows=rows, tracks=[[group] for group in groups])
    open_modules(sam2, (*MEMORY, "sam_prompt_encoder"))
    costs, curves, steps = [], [], []
    for batch in (apart, replace(apart, tracks=[groups])):
        sam2.zero_grad()
        torch.manual_seed(0)  # of corrective clicks
        with counted_steps(sam2) as seen, autocast(sam2.device, dtype):
            loss, found = Tracking(sam2, MemoryLoss(), recompute=False)(batch)
        loss.backward()
        costs.append(
            (loss.item(), {name: p.grad.clone() for name, p in sam2.named_parameters() if p.grad is not None})
        )
        curves.append(found)
        steps.append(seen)
    assert (len(steps[0]), len(steps[1])) == (12, 6)  # 3 groups of 4 frames; 3 first frames and 3 later ones
    assert steps[1][3:] == [6, 6, 6]
    assert costs[1][0] == pytest.approx(costs[0][0], rel=1e-4)
    assert curves[1] == pytest.approx(curves[0], abs=2e-3)
    (_, alone), (_, together) = costs
    assert alone.keys() == together.keys()
    assert {
        name: off
        for name in alone
        if (off := (alone[name] - together[name]).norm()) > tolerance * alone[name].norm()
    } == {}


@contextmanager
def counted_steps(sam2: Grounding) -> Iterator[list[int]]:
    """List the objects of every pass through SAM2."""
    step, seen = sam2.step, list[int]()

    def counted(maps: list[Tensor], rows: Tensor, *arguments: Any, **words: Any) -> dict[str, Any]:
        seen.append(len(rows))
        return step(maps, rows, *arguments, **words)

    sam2.step = counted  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        sam2.step = step  # type: ignore[method-assign]


@pytest.mark.slow
def test_distances_count_from_the_last_prompt_and_a_later_prompted_frame_is_none(sam2: Grounding):
    open_modules(sam2, MEMORY)
    batch = batch_of("box", frames=5, second_frame=1.0)
    expected = set()
    for first, second in (group.frames for [group] in batch.tracks):
        expected |= {
            index - (second if index > second else first) for index in range(first, 5) if index != second
        }
    _, curves = Tracking(sam2, MemoryLoss())(batch)
    assert (
        {int(name.removeprefix("iou_at_")) for name in curves if name.startswith("iou_at_")}
        == expected
        != set(range(5))
    )


@pytest.mark.slow
def test_frames_without_ground_truth_cost_nothing_and_an_all_unknown_batch_has_a_gradient_of_zero(
    sam2: Grounding,
):
    trained = open_modules(sam2, MEMORY)
    batch = batch_of("mask", count=1)
    half = batch.has_truth.clone()
    half[:, 2:] = False
    sam2.eval()
    other = batch.targets.clone()
    other[:, 2:] = ~other[:, 2:]
    module = Tracking(sam2, MemoryLoss())
    losses = [
        module(replace(batch, has_truth=half, targets=targets))[0].item()
        for targets in (batch.targets, other)
    ]
    assert losses[0] == losses[1] != module(batch)[0].item()
    nothing = replace(batch, has_truth=torch.zeros_like(batch.has_truth))
    loss, curves = Tracking(sam2, MemoryLoss())(nothing)
    loss.backward()
    assert loss.item() == 0
    assert curves == {}
    assert all(p.grad is not None and not p.grad.any() for p in trained.values())


@pytest.mark.slow
@pytest.mark.parametrize(("share", "equal"), [(0.0, True), (0.1, False)])
def test_dropout_reaches_every_layer_of_the_memory_attention(sam2: Grounding, share: float, *, equal: bool):
    sam2.train()
    set_dropout(sam2, share)
    module, batch = Tracking(sam2, MemoryLoss()), batch_of("mask")
    with torch.no_grad():
        assert (module(batch)[0].item() == module(batch)[0].item()) is equal
    layers = [m for m in sam2.memory_attention.modules() if isinstance(m, (torch.nn.Dropout, RoPEAttention))]
    assert {m.p if isinstance(m, torch.nn.Dropout) else m.dropout_p for m in layers} == {share}


@pytest.mark.slow
def test_absent_objects_are_taught_even_when_sam2_says_that_nothing_is_there(sam2: Grounding):
    """With a score below zero SAM2 blanks its mask; the score itself and the mask behind the blank still
    learn."""
    open_modules(sam2, ("sam_mask_decoder",))
    sam2.blank_absent = True
    with torch.no_grad():
        sam2.sam_mask_decoder.pred_obj_score_head.layers[-1].bias -= 100
    found = gradients(sam2, batch_of("box"))
    assert found["sam_mask_decoder.pred_obj_score_head.layers.2.bias"].any()
    assert any(found[f"sam_mask_decoder.output_hypernetworks_mlps.{n}.layers.2.bias"].any() for n in range(4))


def test_every_clip_of_an_epoch_comes_once_whatever_the_batch_is_divided_into():
    whole = [p for step in range(3) for p in places(step, 0, batch=4, micros=1, per_epoch=6)]
    assert whole == [(0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5), *((1, n) for n in range(6))]
    assert [p for micro in range(2) for p in places(0, micro, batch=4, micros=2, per_epoch=6)] == [
        (0, 0),
        (0, 2),
        (0, 1),
        (0, 3),
    ]
