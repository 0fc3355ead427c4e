"""The object score of `[SEG]`: trained where asked for, and masks blank where it says that nothing is
there."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ans_core.checkpoints import checkpoint
from ans_core.checkpoints.conversion import convert
from ans_core.data.collate import Batch, Row, collate
from ans_core.data.conversation import Turn
from ans_core.inference.options import PredictOptions
from ans_core.inference.sa2va import Sa2VA
from ans_core.inference.video import track
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised
from ans_core.pictures import rle, transforms
from tests import tiny

HEAD = "pred_obj_score_head.layers.2.bias"


def clip_batch(model: Network) -> Batch:
    """One object, seen in the first of two frames."""
    masklet = (tiny.square(0, 0, 32, 32), rle.empty(64, 64))
    asked = Turn(question="Segment it.", answer="[SEG]", masks=(masklet,))
    row = Row(name="c", frames=(tiny.picture(1), tiny.picture(3)), turns=(asked,), mask_frames=(0, 1))
    return collate([row], model.tokenizer, tiny.layout(model))


def scored(model: Network, weight: float) -> Supervised:
    return Supervised(model, mask_weight=1.0, dice_weight=1.0, points=0, object_weight=weight)


def test_its_loss_is_the_cross_entropy_of_present_and_absent_frames(own_model: Network):
    batch = clip_batch(own_model)
    with torch.no_grad():
        plain, _ = scored(own_model, 0.0)(batch)
        loss, metrics = scored(own_model, 3.0)(batch)
        score = scored(own_model, 3.0).decode_masks(batch, scored(own_model, 3.0).states(batch)).object_score
    expected = F.binary_cross_entropy_with_logits(score, torch.tensor([1.0, 0.0]))
    assert metrics["object"] == pytest.approx(float(expected), rel=1e-5)
    assert float(loss - plain) == pytest.approx(3 * float(expected), rel=1e-4)


def test_without_a_weight_the_head_of_the_score_learns_nothing(own_model: Network):
    own_model.requires_grad_(True)
    head = own_model.sam2.sam_mask_decoder.get_parameter(HEAD)
    scored(own_model, 0.0)(clip_batch(own_model))[0].backward()
    assert head.grad is None
    scored(own_model, 1.0)(clip_batch(own_model))[0].backward()
    assert head.grad is not None
    assert head.grad.abs().sum() > 0


@pytest.mark.parametrize("mode", ["sa2va", "sa2va-i"])
def test_masks_are_blank_where_a_trained_score_is_negative(own_model: Network, mode: str):
    own_model.keep_original_decoder()
    own_model.sam2.sam_mask_decoder.get_parameter(HEAD).data -= 1e4
    pictures = [transforms.open_image(f) for f in tiny.clip(3).frames]
    embeddings = (
        torch.randn(2, own_model.config.grounding.width, generator=torch.Generator().manual_seed(1)) * 3
    )
    seen = own_model.seen_frames(len(pictures), mode)  # type: ignore[arg-type]

    def drawn() -> torch.Tensor:
        return track(own_model, pictures, embeddings, PredictOptions(mode=mode))[:, seen] > 0  # type: ignore[arg-type]

    assert drawn().any()  # upstream's score is not trained
    own_model.use_seg_object_score()
    assert not drawn().any()


def test_a_mask_with_a_positive_score_stays_as_it_is(own_model: Network):
    picture = transforms.normalise([transforms.open_image(tiny.picture(1))], size=own_model.sam2.image_size)
    features = own_model.sam2.encode(picture)
    out = own_model.sam2.decode(
        features, torch.zeros(3, dtype=torch.long), torch.randn(3, own_model.config.grounding.width)
    )
    out = replace(out, object_score=torch.tensor([2.0, -0.5, 0.1]))
    assert own_model.sam2.shown(out) is out.logits
    own_model.use_seg_object_score()
    shown = own_model.sam2.shown(out)
    assert torch.equal(shown[[0, 2]], out.logits[[0, 2]])
    assert (shown[1] == -1024).all()


@pytest.mark.slow
def test_a_folder_says_so_in_both_layouts(tmp_path: Path, own_model: Network):
    own_model.use_seg_object_score()
    checkpoint.save(own_model, tmp_path / "own", metadata={})
    convert(tmp_path / "own", tmp_path / "up", to="upstream", metadata={})
    convert(tmp_path / "up", tmp_path / "back", to="native", metadata={})
    for name in ("own", "up", "back"):
        found = Sa2VA.from_pretrained(tmp_path / name)
        assert found.config.seg_object_score
        assert found.sam2.seg_object_score
