"""The model against upstream's own outputs (fp32, CPU; tolerances of the golden README)."""

from __future__ import annotations

import dataclasses
import json
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.internvl.configuration_internvl import InternVLVisionConfig
from transformers.models.internvl.modeling_internvl import InternVLVisionModel

from ans_core import losses
from ans_core.checkpoints import checkpoint, folder, layouts
from ans_core.data.views import Views
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.grounding import FrameFeatures, Grounding, GroundingConfig
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.pictures import transforms
from tests.golden import GOLDEN, arrays, error, needs_golden
from tests.tracks import track

pytestmark = needs_golden


@pytest.fixture(autouse=True)
def _one_thread():
    """As the reference ran: memory features are rounded to bf16, and two threads' last bits round to other
    values (2e-4 in masks)."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def _no_grad():
    with torch.no_grad():
        yield


@lru_cache
def qwen2() -> tuple[Network, dict[str, Tensor], dict[str, Tensor]]:
    return Sa2VA.from_pretrained(GOLDEN / "qwen2"), arrays("qwen2/inputs"), arrays("qwen2/outputs")


@lru_cache
def without_sam2(name: str) -> Network:
    """The golden InternLM2 and Phi3 checkpoints hold no SAM2, so a random one joins them: everything else
    must be there."""
    path = GOLDEN / name
    tokenizer = checkpoint.read_tokenizer(path)
    config = layouts.from_upstream_config(checkpoint.read_config(path), tokenizer)
    sizes = GroundingConfig(
        image_size=64,
        embed=8,
        heads=1,
        stages=(1, 1, 2, 1),
        global_blocks=(3,),
        windows=(4, 2, 2, 2),
        width=32,
    )
    model = checkpoint.empty(dataclasses.replace(config, grounding=sizes), tokenizer)
    state = layouts.to_native(folder.tensors(folder.weight_files(path)), layouts.layout_of(config))
    own = ((f"sam2.{name}", tensor) for name, tensor in Grounding(sizes).state_dict().items())
    checkpoint.fill(model, (*state, *own), where=str(path))
    return model.eval()


def packed(ids: Tensor, mask: Tensor | None = None, regions: list[list[Tensor]] | None = None) -> Packed:
    """Plain rows as upstream packs them: one sequence, padding on the right."""
    mask = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
    positions = torch.arange(ids.shape[1]).expand_as(ids)
    return Packed(
        input_ids=ids, position_ids=positions, branch=mask.long() - 1, loss_mask=mask, regions=regions or []
    )


def views(pixels: Tensor) -> list[Views]:
    return [Views(pixels=pixels, grids=((4, 4),) * len(pixels))]


def clip(inputs: dict[str, Tensor], frames: int) -> Tensor:
    pixels = inputs["g_frames_uint8"][:frames].float() / 255
    mean, std = (torch.tensor(c).view(1, 3, 1, 1) for c in (transforms.MEAN, transforms.STD))
    return (pixels - mean) / std


def to_image_size(low: Tensor) -> Tensor:
    return F.interpolate(low, scale_factor=4, mode="bilinear", align_corners=False)


def shifted_loss(logits: Tensor, labels: Tensor) -> Tensor:
    learned = labels[:, 1:] != -100
    return losses.text_loss(logits[:, :-1][learned], labels[:, 1:][learned])


# Language and vision, Qwen2


def test_vision_features_equal_upstreams_before_and_after_the_projector():
    model, inputs, outputs = qwen2()
    features = model.vision_features(views(inputs["pixel_values"]))
    assert error(features.values, outputs["pixel_shuffle"].flatten(0, 1)) < 1e-4
    assert error(model.project(features).values, outputs["vit_embeds"].flatten(0, 1)) < 1e-4
    tower = model.internvl.model.vision_tower(pixel_values=inputs["pixel_values"]).last_hidden_state
    assert error(tower, outputs["vit_last_hidden_state"]) < 1e-4


def test_text_logits_loss_and_seg_embedding_of_one_tiled_image_equal_upstreams():
    model, inputs, outputs = qwen2()
    tiles = [model.project(model.vision_features(views(inputs["pixel_values"])))]
    ids = inputs["single_input_ids"]
    assert error(model.embed(ids, tiles, []), outputs["single_inputs_embeds"]) < 1e-4
    hidden = model.hidden_states(packed(ids), tiles)
    assert error(hidden, outputs["single_hidden_last"]) < 1e-4
    assert error(model.logits(hidden), outputs["single_logits"]) < 1e-4
    assert error(shifted_loss(model.logits(hidden), inputs["single_labels"]), outputs["single_loss"]) < 1e-4
    seg = hidden[ids == model.seg_token_id]
    assert error(seg, outputs["single_seg_hidden"]) < 1e-4
    assert error(model.seg_embeddings(seg), outputs["single_seg_embed"]) < 1e-4


def test_a_padded_batch_of_an_image_row_and_a_text_row_equals_upstreams():
    model, inputs, outputs = qwen2()
    tile = model.project(model.vision_features(views(inputs["pixel_values"][:1])))
    ids, mask = inputs["batch_input_ids"], inputs["batch_attention_mask"]
    hidden = model.hidden_states(packed(ids, mask), [tile, ImageFeatures(values=tile.values[:0], grids=())])
    logits = model.logits(hidden)
    assert not mask.all(), "the golden batch has padding"
    assert error(logits[mask], outputs["batch_logits"][mask]) < 1e-4
    assert error(shifted_loss(logits, inputs["batch_labels"]), outputs["batch_loss"]) < 1e-4
    assert (
        error(model.seg_embeddings(hidden[(ids == model.seg_token_id) & mask]), outputs["batch_seg_embed"])
        < 1e-4
    )


def test_visual_prompts_fill_the_slots_that_upstream_fills():
    model, inputs, outputs = qwen2()
    tiles = [model.project(model.vision_features(views(inputs["pixel_values"])))]
    ids, regions = inputs["vp_input_ids"], [list(inputs["vp_prompt_masks"] > 0.5)]
    embeds = model.embed(ids, tiles, regions)
    assert error(embeds, outputs["vp_inputs_embeds"]) < 1e-4
    assert error(embeds[ids == model.image_token_id][48:], outputs["vp_region_embeds"]) < 1e-4
    assert (
        error(model.logits(model.hidden_states(packed(ids, regions=regions), tiles)), outputs["vp_logits"])
        < 1e-4
    )


def test_more_image_slots_than_image_tokens_are_refused():
    model, inputs, _ = qwen2()
    tiles = [model.project(model.vision_features(views(inputs["pixel_values"][:2])))]
    with pytest.raises(
        ValueError, match="row 0: the text has 48 image slots, the pictures and regions give 32 tokens"
    ):
        model.embed(inputs["single_input_ids"], tiles, [])


# SAM2


def test_sam2_feature_maps_equal_upstreams():
    model, inputs, outputs = qwen2()
    features = model.sam2.encode(clip(inputs, 1))
    fine, middle = model.sam2.high_res(features)
    assert error(fine[..., ::2, ::2], outputs["sam_fpn_0_ds2"]) < 1e-5
    assert error(middle, outputs["sam_fpn_1"]) < 1e-5
    assert error(features.coarse, outputs["sam_fpn_2"]) < 1e-5


@pytest.mark.parametrize("index", [0, 1, 2])
def test_the_mask_decoder_prompted_by_a_seg_embedding_equals_upstreams(index: int):
    model, inputs, outputs = qwen2()
    features = model.sam2.encode(clip(inputs, 1))
    decoded = model.sam2.decode(features, torch.tensor([0]), inputs["sam_language_embd"][index : index + 1])
    assert error(decoded.all_logits, outputs[f"heads_low_res_multimasks_{index}"]) < 1e-5
    assert error(decoded.ious, outputs[f"heads_ious_{index}"]) < 1e-5
    assert error(decoded.logits[:, None], outputs[f"heads_best_low_res_{index}"]) < 1e-5
    assert error(decoded.object_score[:, None], outputs[f"heads_object_score_logits_{index}"]) < 1e-5


def test_frames_and_objects_decode_in_one_batch_as_one_by_one():
    model, inputs, outputs = qwen2()
    features = model.sam2.encode(clip(inputs, 3))
    frame = torch.arange(3).repeat_interleave(2)
    decoded = model.sam2.decode(features, frame, inputs["sam_language_embd"][:2].repeat(3, 1))
    assert error(decoded.logits.view(3, 2, 64, 64), outputs["inject_3frames_2obj_low_res"]) < 1e-5


def test_memory_features_equal_upstreams():
    model, inputs, outputs = qwen2()
    features = model.sam2.encode(clip(inputs, 1))
    mask = F.interpolate(outputs["heads_best_low_res_0"], scale_factor=4, mode="nearest")
    memory, places = model.sam2._encode_new_memory(
        current_vision_feats=[features.coarse.flatten(2).permute(2, 0, 1)],
        feat_sizes=[features.coarse.shape[-2:]],
        pred_masks_high_res=mask,
        object_score_logits=outputs["heads_object_score_logits_0"],
        is_mask_from_pts=False,
    )
    assert error(memory, outputs["mem_features_nearest_up"]) < 1e-5
    assert error(places[0], outputs["mem_pos_enc"]) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "frames", "objects", "conditioning", "stride", "tolerance"),
    [
        ("infer_image_logits", 1, 1, 1, 1, 1e-5),
        ("infer_clip3_allcond_logits_ds2", 3, 1, 3, 2, 1e-4),
        ("infer_clip3_1cond_logits_ds2", 3, 1, 1, 2, 1e-4),
        # rounding grows through six frames of memory: 2.3e-4 on one processor
        ("infer_clip8_2cond_logits_ds4", 8, 1, 2, 4, 5e-4),
        ("infer_clip8_5cond_2obj_logits_ds4", 8, 2, 5, 4, 1e-4),
    ],
)
def test_tracked_mask_logits_equal_upstreams(
    name: str, frames: int, objects: int, conditioning: int, stride: int, tolerance: float
):
    model, inputs, outputs = qwen2()
    features = model.sam2.encode(clip(inputs, frames))
    # logits of shape N, F, 64, 64
    low = track(model.sam2, features, inputs["sam_language_embd"][:objects], conditioning=range(conditioning))
    full = to_image_size(low)[..., ::stride, ::stride].transpose(0, 1).flatten(0, 1)  # frame-major
    assert error(full[:, None], outputs[name]) < tolerance


def test_a_frame_is_encoded_alone_as_in_a_batch():
    model, inputs, _ = qwen2()
    frames = clip(inputs, 3)
    together, alone = model.sam2.encode(frames), model.sam2.encode(frames[2:])
    for one, other in zip(vars(together[2:]).values(), vars(alone).values(), strict=True):
        assert error(one, other) < 1e-5
    assert isinstance(together, FrameFeatures)


# Other text models and towers


@pytest.mark.slow
@pytest.mark.parametrize("name", ["internlm2", "phi3"])
def test_other_text_models_equal_upstreams(name: str):
    model, inputs, outputs = without_sam2(name), arrays(f"{name}/inputs"), arrays(f"{name}/outputs")
    tiles = [model.project(model.vision_features(views(qwen2()[1]["pixel_values"])))]
    assert error(tiles[0].values, outputs["vit_embeds"].flatten(0, 1)) < 1e-4
    ids = inputs["single_input_ids"]
    hidden = model.hidden_states(packed(ids), tiles)
    assert error(hidden, outputs["single_hidden_last"]) < 1e-4
    assert error(model.logits(hidden), outputs["single_logits"]) < 1e-4
    assert error(shifted_loss(model.logits(hidden), inputs["single_labels"]), outputs["single_loss"]) < 1e-4
    assert error(model.seg_embeddings(hidden[ids == model.seg_token_id]), outputs["single_seg_embed"]) < 1e-4


@pytest.mark.parametrize("name", ["internlm2", "phi3"])
def test_right_padded_text_of_other_text_models_equals_upstreams(name: str):
    model, inputs, outputs = without_sam2(name), arrays(f"{name}/inputs"), arrays(f"{name}/outputs")
    mask = inputs["text_batch_attention_mask"]
    hidden = model.hidden_states(packed(inputs["text_batch_input_ids"], mask), [None, None])
    assert error(hidden[mask], outputs["text_batch_hidden_last"][mask]) < 1e-4
    assert error(model.logits(hidden)[mask], outputs["text_batch_logits"][mask]) < 1e-4


def test_the_6b_kind_of_vision_tower_equals_upstreams():
    path, io = GOLDEN / "vit6b_type", arrays("vit6b_type/io")
    tower = InternVLVisionModel(
        InternVLVisionConfig(**layouts.vision_config(json.loads((path / "config.json").read_text())))
    )
    layout = layouts.Layout(text_model="internlm2", queries_per_key=1, head_width=1)
    prefix = "internvl.model.vision_tower."
    state = layouts.to_native(folder.tensors(folder.weight_files(path)), layout)
    checkpoint.fill(tower, ((name.removeprefix(prefix), tensor) for name, tensor in state), where=str(path))
    assert (
        error(tower.eval()(pixel_values=io["pixel_values"]).last_hidden_state, io["last_hidden_state"]) < 1e-4
    )


def test_a_model_merged_from_a_training_checkpoint_gives_upstreams_outputs():
    model = Sa2VA.from_pretrained(GOLDEN / "training_pth" / "merged_hf")
    inputs, outputs = arrays("training_pth/probe_inputs"), arrays("training_pth/probe_outputs")
    ids = inputs["input_ids"]
    hidden = model.hidden_states(
        packed(ids), [model.project(model.vision_features(views(inputs["pixel_values"])))]
    )
    assert error(model.logits(hidden), outputs["logits"]) < 5e-4
    seg = model.seg_embeddings(hidden[ids == model.seg_token_id])
    assert error(seg, outputs["seg_embed"]) < 1e-4
    pixels = inputs["g_image_uint8"].permute(2, 0, 1)[None]
    low = track(model.sam2, model.sam2.encode(clip({"g_frames_uint8": pixels}, 1)), seg, conditioning=[0])
    assert error(to_image_size(low), outputs["image_mask_logits"]) < 1e-3
