"""Rollouts that were shown further pictures: packed in one row, they read as each does alone."""

from __future__ import annotations

import io

import pytest
import torch
from PIL import Image
from torch import Tensor

from ans_core.data.collate import prefix_ids
from ans_core.inference.prefill import encoded, visible
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.rl.rollout import Group, Reader, Rollout, Segment, pack, token_logps
from tests import tiny
from tests.golden import GOLDEN

QWEN = pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference outputs")
KINDS = pytest.mark.parametrize(
    "kind", ["internvl", *(pytest.param(kind, marks=QWEN) for kind in ("qwen2_5_vl", "qwen3_vl"))]
)


def model_of(kind: str) -> Network:
    return (
        tiny.build()
        if kind == "internvl"
        else Sa2VA.from_pretrained(GOLDEN / kind).requires_grad_(False).eval()
    )


def tokens_of(model: Network, number: int, size: tuple[int, int] = (64, 64)) -> ImageFeatures:
    """Image tokens of a picture of its own."""
    image = Image.open(io.BytesIO(tiny.picture(number))).convert("RGB").resize(size)
    return model.project(encoded(model, [visible(model, [image])])[0])


def shown(model: Network, image: ImageFeatures) -> Segment:
    """A user's turn that shows a picture."""
    marks, count = model.backbone.marks, len(image.values)
    return given(model, f"\nlook {marks.start}{marks.slot * count}{marks.end} then")


def given(model: Network, text: str) -> Segment:
    return Segment(ids=tuple(model.tokenizer.encode(text, add_special_tokens=False)), trainable=False)


def said(*ids: int) -> Segment:
    return Segment(ids=ids, trainable=True)


def alone(
    model: Network,
    prefix: tuple[int, ...],
    rollout: Rollout,
    filling: list[ImageFeatures | Tensor],
    reader: Reader,
) -> Tensor:
    """Log-probabilities of one conversation's words. `filling`: what stands in its image slots, sorted by
    hand."""
    ids = torch.tensor([[*prefix, *(i for segment in rollout for i in segment.ids)]])
    values = torch.cat([part if isinstance(part, Tensor) else part.values for part in filling])
    embeds = model.embed_text(ids)
    embeds[ids == model.image_token_id] = values
    slots, order = ids == model.image_token_id, torch.arange(ids.shape[1])[None]
    at = slots[0].nonzero()[:, 0].tolist()
    for part in filling:
        length = len(part if isinstance(part, Tensor) else part.values)
        if isinstance(part, Tensor):  # cells of a region count as text
            slots[0, at[:length]] = False
        at = at[length:]
    grids = tuple(grid for part in filling if isinstance(part, ImageFeatures) for grid in part.grids)
    positions = model.backbone.positions(order, slots, [grids], torch.zeros_like(order))
    states, _ = model.backbone.language_model(
        embeds, attention_mask=torch.ones_like(ids), position_ids=positions, use_cache=False
    )
    learned = torch.tensor([False] * len(prefix) + [s.trainable for s in rollout for _ in s.ids])
    every = reader(model.logits(states[0, :-1])).log_softmax(1)[torch.arange(ids.shape[1] - 1), ids[0, 1:]]
    return every[learned[1:]]


@pytest.mark.slow
@KINDS
@torch.no_grad()
def test_rollouts_with_unlike_numbers_of_turns_and_pictures_read_packed_as_alone(kind: str) -> None:
    """Two samples, the second without a region and beside a longer row: no turn, one, two with the same
    picture twice, and a region named within a branch, whose cells are the first picture's. Image slots of
    both kinds are mixed in the order of the text."""
    model = model_of(kind)
    reader = Reader(temperature=1.3, forbidden=[model.image_token_id], guard="guard")
    first, second = tokens_of(model, 0), tokens_of(model, 1)
    wide, tall = tokens_of(model, 2, (96, 48)), tokens_of(model, 3, (40, 80))
    region = torch.zeros(first.grids[-1], dtype=torch.bool)
    region[0, 1] = region[1, 0] = True
    slot = model.backbone.marks.slot
    part = given(model, f"region1<vp>{slot * 2}</vp>")
    start = given(model, "?").ids
    answer = said(11, 12, 13)
    with_region: list[tuple[Rollout, list[ImageFeatures | Tensor]]] = [
        ((given(model, ":"), answer), []),
        ((given(model, ":"), said(14), shown(model, wide), answer), [wide]),
        (
            (given(model, ":"), said(15, 16), shown(model, tall), said(17), part, shown(model, wide), said(18, 19)),
            [tall, first.region(region), wide],
        ),
        ((given(model, ":"), said(20), shown(model, tall), said(21, 22), shown(model, tall), answer), [tall, tall]),
    ]  # fmt: skip
    plain: list[tuple[Rollout, list[ImageFeatures | Tensor]]] = [
        ((given(model, ":"), said(23), shown(model, wide), said(24)), [wide]),
        ((given(model, ":"), said(25, 26)), []),
    ]
    groups, expected = [], []
    for image, rollouts in ((first, with_region), (second, plain)):
        tokens = [len(image.values)]
        prefix = (
            *prefix_ids(
                model.tokenizer,
                template=model.config.template,
                frame_tokens=tokens,
                marks=model.backbone.marks,
            ),
            *start,
        )
        groups.append(Group(prefix=prefix, rollouts=tuple(rollout for rollout, _ in rollouts)))
        expected += [
            alone(model, prefix, rollout, [image, *filling], reader) for rollout, filling in rollouts
        ]
    observed = [
        [f for _, filling in rollouts for f in filling if isinstance(f, ImageFeatures)]
        for rollouts in (with_region, plain)
    ]
    fields, rollout = pack(groups, pad_id=0)
    packed = Packed(**fields, regions=[[region], []])
    logps, _ = token_logps(model, packed, model.hidden_states(packed, [first, second], observed), reader)
    found = [logps[rollout == number] for number in range(len(expected))]
    assert max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True)) < 1e-5
    swapped = token_logps(
        model, packed, model.hidden_states(packed, [first, second], [observed[0][::-1], observed[1]]), reader
    )[0]
    assert float((swapped - logps).abs().max()) > 1e-3  # pictures make a difference, and their order does


def test_pictures_that_the_text_has_no_place_for_are_refused() -> None:
    model = tiny.build()
    image, marks = tokens_of(model, 0), model.backbone.marks
    ids = torch.tensor(
        [model.tokenizer.encode(f"{marks.start}{marks.slot * 16}{marks.end}", add_special_tokens=False)]
    )
    with pytest.raises(
        ValueError, match="row 0: after its picture the text has 0 regions and 0 pictures, given are 0 and 1"
    ):
        model.embed(ids, [image], [], [[image]])
