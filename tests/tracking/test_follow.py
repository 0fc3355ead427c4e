from __future__ import annotations

import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch

from ans_core.benchmarks.public.asked import Item, Objects
from ans_core.metrics.video import j_and_f
from ans_core.model.grounding import Grounding
from ans_core.model.masks import upsample_logits
from ans_core.pictures import rle, transforms
from ans_core.tracking.answering import masklets
from ans_core.tracking.clips import Clips
from ans_core.tracking.epochs import EpochWeights
from ans_core.tracking.follow import ObjectPrompt, _inputs, follow, label_map
from ans_core.tracking.validation import clip_scores, follow_clip, true_prompt, validate
from ans_core.types import Request
from tests import tiny

MASK = np.zeros((64, 64), bool)
MASK[16:32, 0:16] = True


def pictures(count: int = 4):  # type: ignore[no-untyped-def]
    return [transforms.open_image(frame) for frame in tiny.clip(0, count).frames]


@pytest.mark.slow
def test_objects_followed_together_are_followed_as_one_by_one_and_late_ones_start_late(sam2: Grounding):
    prompts = [
        ObjectPrompt(mask=MASK),
        ObjectPrompt(points=((20.0, 24.0),), labels=(1,), frame=1),
        ObjectPrompt.box((0, 16, 16, 32)),
        ObjectPrompt(mask=np.roll(MASK, 20, axis=1)),
    ]
    shots = pictures()
    together = torch.stack([logits for _, logits in follow(sam2, shots, prompts, frames=4)])
    assert together.shape == (4, 4, 16, 16)
    assert (together[0, 1] == -1024).all()
    assert sam2.training  # as before
    for n, prompt in enumerate(prompts):
        alone = torch.stack([logits for _, logits in follow(sam2, shots, [prompt], frames=4)])
        assert torch.allclose(together[:, n], alone[:, 0], atol=2e-3), n  # memory is stored in bf16


PROMPTS = (
    ObjectPrompt.box((0, 16, 16, 32)),
    ObjectPrompt(points=((20.0, 24.0),), labels=(1,), frame=1),
    ObjectPrompt(mask=MASK),
)


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS, ids=["box", "late point", "mask"])
def test_without_memory_every_frame_is_decoded_as_if_it_were_the_prompted_one(
    sam2: Grounding, prompt: ObjectPrompt
):
    """Of a mask by its box: SAM2 would give the mask back."""
    shots = pictures()
    found = [logits[0] for _, logits in follow(sam2, shots, [prompt], frames=4, memory=False)]
    asked = PROMPTS[0] if prompt.mask is not None else replace(prompt, frame=0)
    for index, logits in enumerate(found):
        [(_, alone)] = follow(sam2, shots[index : index + 1], [asked], frames=1)
        assert torch.equal(logits, alone[0]) if index >= prompt.frame else bool((logits == -1024).all())
    with torch.no_grad():
        sam2.memory_encoder.out_proj.weight += 1  # read by memory alone
    again = [logits[0] for _, logits in follow(sam2, shots, [prompt], frames=4, memory=False)]
    assert all(map(torch.equal, found, again))


@pytest.mark.slow
def test_j_and_f_without_memory_of_a_clip_that_stands_still_are_those_of_its_picture(sam2: Grounding):
    """With memory, equal frames get unequal masks."""
    moving = tiny.clip(0, 4)
    [clip] = Clips([[replace(moving, frames=moving.frames[:1] * 4, masks=(moving.masks[0][:1] * 4,))]])
    [(_, [low])] = follow(sam2, pictures(1), [ObjectPrompt.around(MASK)], frames=1)
    expected = j_and_f(upsample_logits(low, size=64, height=64, width=64) > 0, MASK)
    assert 0 < expected[0] < 1
    for prompt in ("mask", "box"):
        [scores] = clip_scores(sam2, clip, prompt=prompt, memory=False)
        assert scores == dict.fromkeys((1, 2, 3), expected)
        assert validate(sam2, [clip], prompt=prompt, memory=False)["J&F"] == pytest.approx(sum(expected) / 2)
    [remembered] = clip_scores(sam2, clip, prompt="box")
    assert len(set(remembered.values())) > 1


@pytest.mark.slow
def test_memory_does_not_grow_with_the_clip(sam2: Grounding, monkeypatch: pytest.MonkeyPatch):
    kept = []
    step = Grounding.step

    def watched(self: Grounding, maps, rows, index, bank, **words):  # type: ignore[no-untyped-def]
        kept.append(sum(map(len, bank.values())))
        return step(self, maps, rows, index, bank, **words)

    monkeypatch.setattr(Grounding, "step", watched)
    shot = pictures(1)[0]
    for _ in follow(sam2, lambda index: shot, [ObjectPrompt(mask=MASK)], frames=40):
        pass
    assert max(kept) <= 18  # the prompted frame and the 16 that have object pointers, one of them about to go
    assert kept[-1] == max(kept)


MANY = 33


def test_a_label_map_of_many_objects_is_that_of_the_stacked_logits_and_holds_one_at_a_time():
    rng = np.random.default_rng(0)
    # whole numbers: many are equal, the highest may be 0
    stacked = rng.integers(-40, 8, (MANY, 300, 400)).astype(np.float32)
    highest = stacked.max(0)
    assert ((stacked == highest) & (highest > 0)).sum(0).max() > 1
    assert {-1.0, 0.0, 1.0} <= set(np.sign(highest).ravel().tolist())
    tracemalloc.start()
    labels = label_map(own.copy() for own in stacked)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert (labels == np.where(highest > 0, stacked.argmax(0) + 1, 0)).all()
    assert peak < 6 * stacked[0].nbytes


@pytest.mark.slow
@pytest.mark.parametrize("overlap", [False, True], ids=["one object a pixel", "objects overlap"])
def test_a_benchmark_of_many_objects_gets_the_masks_of_the_stacked_logits(sam2: Grounding, overlap: bool):
    masks = [np.roll(MASK, 3 * n, axis=(0, 1)) for n in range(MANY)]
    objects = Objects(
        names=tuple(map(str, range(MANY))),
        masklets=tuple((rle.encode(m), None) for m in masks),
        overlap=overlap,
    )
    item = Item(name="clip", request=Request(frames=tiny.clip(0, 2).frames, text=""), objects=lambda: objects)
    found = masklets(sam2, item)
    for t, low in follow(sam2, pictures(2), [ObjectPrompt(mask=mask) for mask in masks], frames=2):
        stacked = np.stack([upsample_logits(z, size=sam2.image_size, height=64, width=64) for z in low])
        owner = np.where(stacked.max(0) > 0, stacked.argmax(0), -1)
        for n in range(MANY):
            assert (rle.decode(found[n][t]) == (stacked[n] > 0 if overlap else owner == n)).all()


@pytest.mark.parametrize(
    ("prompt", "told"),
    [
        (
            ObjectPrompt(mask=np.zeros((64, 64), bool)),
            "the mask is empty; prompt in a frame that shows the object",
        ),
        (ObjectPrompt(mask=np.ones((10, 20), bool)), "the mask is 20 x 10, the frames 64 x 64"),
        (
            ObjectPrompt(points=((64.0, 3.0),), labels=(1,)),
            "the point 64,3 lies outside of the picture of 64 x 64",
        ),
        (ObjectPrompt.box((30, 10, 30, 20)), "the box 30,10,30,20 has no inside"),
        (ObjectPrompt(mask=MASK, frame=7), "there is no frame 7; the video has 4"),
    ],
)
def test_prompts_that_make_no_sense_are_refused(prompt: ObjectPrompt, told: str):
    with pytest.raises(ValueError, match=f"object 2: {told}"):
        prompt.check(width=64, height=64, frames=4, where="object 2")
    ObjectPrompt.box((0, 0, 64, 64)).check(width=64, height=64, frames=4, where="whole")


def test_frames_of_unequal_size_are_named(sam2: Grounding):
    shots = [*pictures(2), pictures(1)[0].resize((32, 64))]
    with pytest.raises(ValueError, match="frame 2 is 32 x 64, the first 64 x 64"):
        list(follow(sam2, shots, [ObjectPrompt(mask=MASK)], frames=3))


def test_scores_count_the_frames_after_the_prompt_that_have_ground_truth(
    sam2: Grounding, monkeypatch: pytest.MonkeyPatch
):
    """Predictions made by hand: right in the frame after the prompt, empty in the last; the one between has
    no truth. J is 1 and 0."""
    square, gone = tiny.square(8, 8, 24, 24), tiny.rle.empty(64, 64)
    sample = tiny.sample(
        0, frames=tuple(tiny.picture(n) for n in range(5)), masks=((gone, square, square, None, square),)
    )
    [clip] = Clips([[sample]])

    def predicted(sam2, pictures, prompts, *, frames, memory):  # type: ignore[no-untyped-def]
        assert [p.frame for p in prompts] == [1]
        inside = (
            torch.nn.functional.max_pool2d(torch.from_numpy(tiny.rle.decode(square))[None, None].float(), 4)[
                0
            ]
            * 20
            - 10
        )
        yield from (
            (index, inside if index == 2 else torch.full((1, 16, 16), -10.0)) for index in range(frames)
        )

    monkeypatch.setattr("ans_core.tracking.follow.follow", predicted)
    [scores] = clip_scores(sam2, clip, prompt="mask")
    assert sorted(scores) == [1, 3]
    assert scores[1][0] > 0.9
    assert scores[3] == (0.0, 0.0)
    found = validate(sam2, [clip], prompt="point")
    assert found["J"] == pytest.approx((scores[1][0] + 0) / 2)
    assert found["J&F"] == (found["J"] + found["F"]) / 2
    assert found["J_at_1"] == scores[1][0]
    assert "J_at_2" not in found


def test_every_kind_of_true_prompt_is_valid_and_the_prompted_mask_is_followed(sam2: Grounding):
    [clip] = Clips([[tiny.clip(0, 3)]])
    for kind in ("mask", "box", "point"):
        prompt = true_prompt(clip, 0, kind)  # type: ignore[arg-type]
        prompt.check(width=64, height=64, frames=3, where=kind)
    objects, masks = follow_clip(sam2, clip, prompt="mask")
    assert objects == [0]
    assert len(masks[0]) == 3
    # the prompt as it comes back from a quarter of the size
    assert tiny.rle.area(masks[0][0]) == pytest.approx(256, abs=40)


def test_a_mask_too_small_for_sam2s_size_keeps_its_middle_pixel(sam2: Grounding):
    mask = np.zeros((512, 512), bool)
    mask[301:303, 40:42] = True
    large = np.zeros((512, 512), bool)
    large[:256] = True
    given = _inputs(sam2, [ObjectPrompt(mask=mask), ObjectPrompt(mask=large)], (512, 512))["masks"]
    side = sam2.image_size
    assert given[0, 0].nonzero().tolist() == [[302 * side // 512, 41 * side // 512]]
    assert int(given[1].sum()) == side * side // 2


def test_epochs_of_the_run_before_that_are_not_reached_again_yet_are_forgotten(tmp_path):  # type: ignore[no-untyped-def]
    """A run that resumes on another number of processes need not score the same: what is best must be
    there."""
    kept = EpochWeights(folder=tmp_path, last=1)
    for epoch, score in enumerate((0.1, 0.2, 0.5, 0.4)):
        kept.add(epoch, score, {"w": torch.full((2,), float(epoch))})
    kept.add(2, 0.35, {"w": torch.full((2,), 2.5)})  # killed after epoch 3, resumed from a state of epoch 1
    assert kept.scores() == {0: 0.1, 1: 0.2, 2: 0.35}
    assert sorted(f.name for f in tmp_path.glob("*.safetensors")) == ["epoch-0002.safetensors"]
    kept.add(3, 0.3, {"w": torch.full((2,), 3.5)})
    assert kept.load(kept.best())["w"].tolist() == [2.5, 2.5]


def test_the_best_and_the_last_epochs_are_kept(tmp_path):  # type: ignore[no-untyped-def]
    kept = EpochWeights(folder=tmp_path, last=1)
    for epoch, score in enumerate((0.2, 0.6, 0.5, 0.6, 0.1)):
        kept.add(epoch, score, {"w": torch.full((2,), float(epoch))})
    again = EpochWeights(folder=tmp_path, last=1)
    assert again.best() == 1
    assert again.present() == [1, 4]
    assert sorted(f.name for f in tmp_path.glob("*.safetensors")) == [
        "epoch-0001.safetensors",
        "epoch-0004.safetensors",
    ]
    assert again.load(1)["w"].tolist() == [1, 1]
