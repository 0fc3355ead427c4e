"""Sa2VA on Qwen2.5-VL and Qwen3-VL: upstream's own outputs (fp32, CPU), and what must hold beside them."""

from __future__ import annotations

import dataclasses
import json
import re
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor

from ans_core.data.collate import Row, collate
from ans_core.data.conversation import Turn
from ans_core.data.views import Patches, Views
from ans_core.inference import predict as ask
from ans_core.inference.clicks import with_clicks
from ans_core.inference.generation import generate
from ans_core.inference.options import PredictOptions
from ans_core.inference.prefill import prompt, visible
from ans_core.inference.requests import request_of
from ans_core.inference.sa2va import Sa2VA
from ans_core.losses import text_loss
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.backbones.qwen3_vl import Qwen3VL
from ans_core.model.masks import upsample
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.model.supervised import Supervised, image_tokens, layout_of, packed
from ans_core.pictures import media, rle
from tests import tiny
from tests.golden import GOLDEN, arrays, error, needs_golden

pytestmark = needs_golden
KINDS = pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl"])
UPSTREAM: dict[str, Any] = {
    "preparation": "upstream",
    "constants": "bf16",
    "frames": 5,
    "frame_choice": "first",
}


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@lru_cache
def golden(kind: str) -> tuple[Network, dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
    cases = json.loads((GOLDEN / kind / "predict_forward.json").read_text())
    return Sa2VA.from_pretrained(GOLDEN / kind), arrays(f"{kind}/inputs"), arrays(f"{kind}/outputs"), cases


def rows_of(ids: Tensor, mask: Tensor | None = None) -> Packed:
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    order = torch.arange(ids.shape[1]).expand_as(ids)
    return Packed(input_ids=ids, position_ids=order, branch=mask.long() - 1, loss_mask=mask)


def views_of(pixels: Tensor, grids: Tensor) -> Views:
    return Views(
        pixels=pixels, grids=tuple((int(rows) // 2, int(columns) // 2) for _, rows, columns in grids)
    )


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    learned = labels[:, 1:] != -100
    return text_loss(logits[:, :-1][learned], labels[:, 1:][learned])


@pytest.mark.slow
@KINDS
def test_a_training_row_equals_upstreams_from_pixels_to_seg_embeddings(kind: str):
    """Also where `[SEG]` takes its state: Qwen3-VL's lies 0.6 to 1.8 away after the last norm."""
    model, inputs, outputs, _ = golden(kind)
    made = model.backbone.cutter.views([Image.fromarray(inputs["single_image_uint8"].numpy())], clip=False)
    given, ids = (
        views_of(inputs["single_pixel_values"], inputs["single_image_grid_thw"]),
        inputs["single_input_ids"],
    )
    assert made.grids == given.grids
    assert error(made.pixels, given.pixels) == 0.0
    image = model.project(model.vision_features([given]))
    width, parts = outputs["single_image_embeds"].shape[1], [outputs["single_image_embeds"]]
    parts += [outputs[f"single_deepstack_{k}"] for k in range(2) if f"single_deepstack_{k}" in outputs]
    assert error(image.values, torch.cat(parts, dim=1)) < 1e-4
    row = rows_of(ids)
    assert torch.equal(model.positions(ids, row.position_ids, [image]), outputs["single_position_ids"])
    assert error(model.embed(ids, [image], [])[..., :width], outputs["single_inputs_embeds"]) < 1e-4
    hidden = model.hidden_states(row, [image])
    logits, seg = model.logits(hidden), hidden[ids == model.seg_token_id]
    assert error(hidden, outputs["single_hidden_last"]) < 1e-4
    assert error(logits, outputs["single_logits"]) < 1e-4
    assert error(loss_of(logits, inputs["single_labels"]), outputs["single_loss"]) < 1e-4
    assert error(model.seg_embeddings(seg), outputs["single_seg_embed"]) < 1e-4


@pytest.mark.slow
@KINDS
def test_a_padded_batch_of_two_frames_and_an_image_equals_upstreams(kind: str):
    model, inputs, outputs, _ = golden(kind)
    frames, image = ([Image.fromarray(p) for p in np.atleast_3d(inputs[name].numpy()).reshape(-1, *inputs[name].shape[-3:])]
                     for name in ("batch_frames_uint8", "batch_image_uint8"))  # fmt: skip
    whole = views_of(inputs["batch_pixel_values"], inputs["batch_image_grid_thw"])
    ids, mask = inputs["batch_input_ids"], inputs["batch_attention_mask"].bool()
    tokens = model.project(model.vision_features([whole])).split(
        [
            dataclasses.replace(whole, grids=whole.grids[:2], pictures=(1, 1)),
            dataclasses.replace(whole, grids=whole.grids[2:]),
        ]
    )
    assert (len(frames), len(image)) == (2, 1)
    row = rows_of(ids, mask)
    found = model.positions(ids, row.position_ids, tokens)
    assert torch.equal(found[:, mask], outputs["batch_position_ids"][:, mask])
    hidden = model.hidden_states(row, tokens)
    assert error(model.logits(hidden)[mask], outputs["batch_logits"][mask]) < 1e-4
    assert error(hidden[(ids == model.seg_token_id) & mask], outputs["batch_seg_hidden"]) < 1e-4
    only_text = inputs["text_input_ids"]
    assert error(model.logits(model.hidden_states(rows_of(only_text), [None])), outputs["text_logits"]) < 1e-4


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("case", ["image", "small", "wide", "video", "prompt_seg", "text", "text_past"])
def test_the_same_ids_words_and_masks(kind: str, case: str):
    """Upstream prepends `past_text` to the words of a text alone."""
    model, inputs, outputs, cases = golden(kind)
    expected = cases[case]
    asked: dict[str, Any] = {
        "text": (expected["past_text"] + expected["text"]).replace(
            "<image>" if case.startswith("text") else "\0", ""
        )
    }
    if case == "video":
        asked["video"] = list(inputs["pf_video_uint8"].numpy())
    elif not case.startswith("text"):
        asked["image"] = inputs[f"pf_{'small' if case == 'prompt_seg' else case}_uint8"].numpy()
    options = PredictOptions(**UPSTREAM)
    prompted = prompt(model, [request_of(**asked)], options=options)
    width = model.vlm.config.text_config.hidden_size
    table = model.vlm.get_input_embeddings().weight
    ids = torch.tensor(expected["input_ids"])
    words = ids != model.image_token_id
    assert torch.equal(tiny.embeds_of(prompted)[words][:, :width], table[ids[words]])
    assert len(tiny.embeds_of(prompted)) == len(ids)
    assert int(prompted.shift[0]) == expected["rope_delta"]
    image = (
        seen(model, prompted.images[0], clip=case == "video", outputs=outputs, case=case)
        if prompted.images[0]
        else None
    )
    order = torch.arange(len(ids))[None]
    assert torch.equal(
        model.positions(ids[None], order, [image]).expand(3, -1, -1)[:, 0],
        outputs[f"pf_{case}_position_ids"].long(),
    )
    steps: list[Tensor] = []
    handle = model.vlm.lm_head.register_forward_hook(lambda head, given, logits: steps.append(logits[0]))
    assert generate(model, prompted, max_tokens=24)[0] == expected["output_ids"]
    handle.remove()
    assert error(torch.stack(steps), outputs[f"pf_{case}_step_logits"]) < 1e-4
    answer = model.predict(**asked, max_tokens=24, **UPSTREAM)
    assert answer.text == expected["prediction"].removesuffix("<|im_end|>")
    assert len(answer.masks) == expected["n_masks"]
    for number, mask in enumerate(answer.masks):
        bits = np.unpackbits(outputs[f"pf_{case}_mask_{number}_bits"].numpy(), axis=1)[:, : mask[0].size]
        assert np.array_equal(mask, bits.reshape(mask.shape).astype(bool))
        assert error(answer.seg_embeddings[[number]], outputs[f"pf_{case}_seg_embed"][[number]]) < 1e-4
        stride = 4 if case == "video" else 2
        full = F.interpolate(answer.mask_logits[number][:, None], scale_factor=4, mode="bilinear")[
            ..., ::stride, ::stride
        ]
        assert error(full, outputs[f"pf_{case}_logits_{number}_ds{stride}"]) < 1e-4


@pytest.mark.slow
@KINDS
def test_pictures_come_first_wherever_image_is_written_as_in_upstreams_inference(kind: str):
    """Upstream deletes `<image>` from the words and puts all pictures before them, also where nobody wrote
    it."""
    model, inputs, _, cases = golden(kind)
    options = PredictOptions(**UPSTREAM)
    for case, source in (
        ("image", {"image": inputs["pf_image_uint8"].numpy()}),
        ("video", {"video": list(inputs["pf_video_uint8"].numpy())}),
    ):
        words = cases[case]["text"].removeprefix("<image>")
        rows = [
            tiny.embeds_of(prompt(model, [request_of(text=text, **source)], options=options))  # type: ignore[arg-type]
            for text in (f"<image>{words}", f"{words}<image>", words)
        ]
        assert torch.equal(rows[0], rows[1])
        assert torch.equal(rows[0], rows[2])
        with pytest.raises(ValueError, match="the text has 0 <image>"):
            prompt(model, [request_of(text=words, **source)])  # type: ignore[arg-type]
    alone = tiny.embeds_of(prompt(model, [request_of(text="<image>Hello")], options=options))
    assert torch.equal(alone, tiny.embeds_of(prompt(model, [request_of(text="Hello")], options=options)))


def seen(
    model: Network, pictures: list[Image.Image], *, clip: bool, outputs: dict[str, Tensor], case: str
) -> ImageFeatures:
    """What the language model sees of a recorded case; its pixels and image tokens are upstream's."""
    views = visible(model, pictures, PredictOptions(**UPSTREAM), clip=clip)
    assert error(views.pixels[::8], outputs[f"pf_{case}_pixel_values_rows8"]) == 0.0
    image = model.project(model.vision_features([views]))
    stride = 3 if f"pf_{case}_image_embeds_rows3" in outputs else 1
    recorded = outputs[f"pf_{case}_image_embeds" + ("_rows3" if stride == 3 else "")]
    assert error(image.values[::stride, : recorded.shape[1]], recorded) < 1e-4
    return image


@KINDS
def test_features_of_patches_stand_row_by_row_also_where_the_tower_leaves_them_by_windows(kind: str):
    """The merger makes the image tokens of these features, block by block."""
    model, inputs, *_ = golden(kind)
    pictures = [Image.fromarray(inputs[f"pf_{name}_uint8"].numpy()) for name in ("image", "wide")]
    views = [model.backbone.cutter.views([picture], clip=False) for picture in pictures]
    grids = tuple(view.grids[0] for view in views)
    pixels = torch.cat([view.pixels for view in views])
    patches = model.backbone.patch_features(pixels, grids).split(
        [4 * rows * columns for rows, columns in grids]
    )
    blocks = [
        part.unflatten(0, (rows, 2, columns, 2)).transpose(1, 2).flatten(0, 3)
        for part, (rows, columns) in zip(patches, grids, strict=True)
    ]
    tokens = model.backbone.vision_tower.merger(torch.cat(blocks))
    assert error(tokens, model.backbone.features(pixels, grids).values[:, : tokens.shape[1]]) < 1e-4


@KINDS
def test_published_models_see_the_sizes_that_upstream_shows_them(kind: str):
    """[width, height, after qwen-vl-utils (2), at inference (2), tokens, in training (2), tokens, of a frame
    in training (2), tokens]"""
    cases = json.loads((GOLDEN / kind / "resize_cases.json").read_text())
    patch = cases["factor"] // 2
    colour = (0.5, 0.5, 0.5)
    cutter = Patches(
        patch=patch, merge=2, temporal=2, mean=colour, std=colour, min_pixels=512 * 784, max_pixels=2048 * 784
    )
    for width, height, *rest in cases["rows"]:
        assert cutter.size(width, height) == tuple(rest[5:7])
        assert cutter.size(width, height, share=4) == tuple(rest[8:10])
        assert cutter.size(*rest[:2]) == tuple(rest[2:4])
    with pytest.raises(
        ValueError, match="a picture of 3000 x 10 pixels is more than 200 times as long as wide"
    ):
        cutter.size(3000, 10)


TURNS = (
    Turn(question="Please segment the cat.", answer="Sure, [SEG].", masks=((tiny.square(8, 8, 24, 24),),)),
    Turn(question="What is region1?", answer="A cat.", regions=(tiny.square(0, 0, 40, 40),)),
    Turn(
        question="Where are both?",
        answer="[SEG] and [SEG]",
        masks=((tiny.square(0, 0, 8, 64),), (tiny.square(32, 0, 64, 8),)),
    ),
)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize("frames", [1, 2])
def test_questions_of_one_picture_packed_into_a_row_give_the_numbers_of_a_row_each(kind: str, frames: int):
    """Branches start again after the prefix, whose largest rotary position is not its length."""
    model, *_ = golden(kind)
    layout = layout_of(model, mask_size=32, max_length=512)
    pictures = tuple(tiny.picture(i) for i in range(frames))
    turns = tuple(dataclasses.replace(turn, masks=tuple(m * frames for m in turn.masks)) for turn in TURNS)

    def states(*some: Turn) -> Tensor:
        row = Row(name="r", frames=pictures, turns=some, mask_frames=tuple(range(frames)))
        batch = collate([row, tiny.row(turns[0], number=9, frames=pictures[:1])], model.tokenizer, layout)
        hidden = model.hidden_states(packed(batch), image_tokens(model, batch.views).split(batch.views))
        at, place = batch.loss_mask.nonzero(as_tuple=True)
        return model.logits(hidden[at, place - 1][at == 0])

    together = states(*turns)
    assert error(together, torch.cat([states(turn) for turn in turns])) < 1e-5 * max(
        1.0, float(together.abs().max())
    )
    if frames > 1:  # these frames are a single cell
        return
    moved = dataclasses.replace(turns[1], regions=(tiny.square(24, 24, 64, 64),))
    assert (states(moved)[0] - states(turns[1])[0]).abs().max() > 1e-3  # the region is seen


@pytest.mark.slow
@KINDS
def test_answers_of_a_batch_with_regions_clips_and_text_are_those_one_by_one(kind: str):
    """Generation goes on from cached prefixes, and its `[SEG]` states are those of training."""
    model, inputs, *_ = golden(kind)
    picture, mask = inputs["pf_image_uint8"].numpy(), np.zeros((150, 230), bool)
    mask[20:90, 40:200] = True
    asked = [
        request_of(text="<image>\nPlease segment the cat.", image=picture),
        request_of(text="<image>What is region1?", image=picture, mask_prompts=[mask]),
        request_of(
            text="And region1?",
            image=picture,
            mask_prompts=[mask],
            past=[("<image>Please segment the cat.", "Sure,[SEG].")],
        ),
        request_of(text="<image>\nPlease segment the dog.", video=list(inputs["pf_video_uint8"].numpy()[:3])),
        request_of(text="Hello, who are you?"),
    ]
    together = model.predict_many(asked, max_tokens=8)
    for one, request in zip(together, asked, strict=True):
        alone = model.predict_many([request], max_tokens=8)[0]
        assert one.text == alone.text
        assert all((a != b).mean() < 1e-3 for a, b in zip(one.masks, alone.masks, strict=True))
    assert together[0].masks
    clip = model.predict(text="<image>\nPlease segment the dog.", video=[picture], max_tokens=8)
    assert isinstance(ask.rle.encode(clip.masks[0][0]), dict)
    with pytest.raises(
        ValueError,
        match=r"the frames of a clip differ in size \(230 x 100, 230 x 150\); bring them to one size",
    ):
        model.predict(text="<image>Please segment the dog.", video=[picture, picture[:100]])
    row = Row(
        name="r",
        frames=(asked[0].frames[0],),
        turns=(Turn(question="Please segment the cat.", answer=together[0].text),),
    )
    whole = dataclasses.replace(row.turns[0], masks=((rle.encode(mask),),) * len(together[0].masks))
    batch = collate(
        [dataclasses.replace(row, turns=(whole,))],
        model.tokenizer,
        layout_of(model, mask_size=32, max_length=512),
    )
    hidden = model.hidden_states(packed(batch), image_tokens(model, batch.views).split(batch.views))
    seg = hidden[(batch.input_ids == model.seg_token_id) & batch.loss_mask]
    assert error(model.seg_embeddings(seg), together[0].seg_embeddings) < 1e-4


def test_the_cells_of_a_region_carry_what_deepstack_adds_too():
    model, inputs, *_ = golden("qwen3_vl")
    assert isinstance(model.backbone, Qwen3VL)
    views = model.backbone.cutter.views([Image.fromarray(inputs["pf_image_uint8"].numpy())], clip=False)
    image = model.project(model.vision_features([views]))
    region = torch.zeros(views.shown, dtype=torch.bool)
    region[1, 2] = True
    cells = len(image.values)
    ids = torch.full((1, cells + 2), model.image_token_id)
    ids[0, cells] = 5
    embedded = model.embed(ids, [image], [[region]])[0]
    assert torch.equal(embedded[-1], image.values[views.shown[1] + 2])
    assert embedded[-1, 64:].any()
    assert not embedded[cells, 64:].any()


@pytest.mark.slow
@KINDS
def test_a_supervised_step_trains_the_text_side_and_leaves_the_vision_tower(kind: str):
    from ans_core.model import adapters
    from ans_core.model.parts import hashes

    model = Sa2VA.from_pretrained(GOLDEN / kind)
    with torch.enable_grad():
        adapters.prepare_sft(model, adapters.lora_config(rank=2, alpha=4, dropout=0.0), seed=0)
        row = Row(name="r", frames=(tiny.picture(0),), turns=TURNS)
        batch = collate([row], model.tokenizer, layout_of(model, mask_size=32, max_length=512))
        Supervised(model, mask_weight=1.0, dice_weight=1.0, points=32)(batch)[0].backward()
    without = [n for n, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert not without
    assert {part for part in hashes(model) if "(trained)" in part} == {
        "embeddings (trained)", "head (trained)", "language model (trained)", "text_hidden_fcs (trained)",
        "SAM2 mask decoder (trained)",
    }  # fmt: skip


@pytest.mark.slow
def test_points_and_boxes_are_regions_as_sam2_finds_them():
    model, inputs, *_ = golden("qwen3_vl")
    picture = inputs["pf_image_uint8"].numpy()
    asked = {"text": "<image>What is region1, region2 and region3?", "image": picture, "max_tokens": 8}
    mask = np.ones((150, 230), bool)
    request = with_clicks(
        model,
        request_of(text="<image>", image=picture, mask_prompts=[mask]),
        [media.reference(picture)],
        points=[(115.0, 75.0)],
        boxes=[(20.0, 20.0, 200.0, 130.0)],
    )
    drawn = [rle.decode(m) for m in request.mask_prompts]
    assert [d.shape for d in drawn] == [(150, 230)] * 3
    assert drawn[0].all()
    features = model.sam2.encode(PredictOptions().pixels(model, [Image.fromarray(picture)]))
    corners = torch.tensor([[[20 / 230 * 192, 20 / 150 * 192], [200 / 230 * 192, 130 / 150 * 192]]])
    box = model.sam2.decode(
        features,
        torch.tensor([0]),
        points=(corners, torch.tensor([[2, 3]], dtype=torch.int32)),
        multimask=False,
    )
    assert np.array_equal(drawn[2], upsample(box.logits[0], size=192, height=150, width=230))
    clicked = model.predict(
        **asked, mask_prompts=[mask], point_prompts=[(115.0, 75.0)], box_prompts=[(20.0, 20.0, 200.0, 130.0)]
    )
    assert clicked.text == model.predict(**asked, mask_prompts=drawn).text
    for wrong, message in (({"point_prompts": [(300.0, 5.0)]}, "(300, 5) is not in the picture of 230 x 150 pixels"),
                           ({"box_prompts": [(30.0, 5.0, 20.0, 9.0)]}, "the box (30, 5, 20, 9) is empty")):  # fmt: skip
        with pytest.raises(ValueError, match=re.escape(message)):
            model.predict(**asked, **wrong)
    with pytest.raises(ValueError, match=r"SAM2 finds no object at \(115, 75\)"):
        golden("qwen2_5_vl")[0].predict(**asked, point_prompts=[(115.0, 75.0)])
    with pytest.raises(ValueError, match="point and box prompts without a picture"):
        model.predict(text="What?", point_prompts=[(1.0, 1.0)])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "clicks"),
    [
        ("qwen2_5_vl", {"point_prompts": [(75.0, 55.0)], "box_prompts": [(15.0, 11.0, 135.0, 99.0)]}),
        ("qwen3_vl", {"point_prompts": [(115.0, 75.0)], "box_prompts": [(20.0, 20.0, 200.0, 130.0)]}),
        ("qwen2", {"point_prompts": [(40.0, 28.0), (140.0, 56.0)]}),
    ],
)
def test_a_clip_is_followed_with_points_and_boxes_in_its_first_frame(kind: str, clicks: dict[str, Any]):
    model, inputs, *_ = golden(kind)
    # its SAM2 finds nothing in the clip
    clip = [inputs["pf_image_uint8"]] * 2 if kind == "qwen3_vl" else inputs["pf_video_uint8"][:2]
    asked: dict[str, Any] = {
        "text": "<image>Please segment the dog.",
        "video": [frame.numpy() for frame in clip],
        "max_tokens": 8,
    }
    text, frames = model.follow(**asked, **clicks)
    followed = np.stack([masks[0] for _, masks in frames])
    whole, without = model.predict(**asked, **clicks), model.predict(**asked)
    assert text == whole.text
    assert (followed != whole.masks[0]).mean() < 1e-3
    assert (followed != without.masks[0]).mean() > 2e-3
    with pytest.raises(ValueError, match=r"the point or box \(500, 5\) is not in the picture"):
        model.follow(**asked, point_prompts=[(500.0, 5.0)])
