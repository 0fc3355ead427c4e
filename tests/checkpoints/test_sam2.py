"""The same SAM2 in the stock package, in transformers and here: names, sizes, and masks through a clip."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from safetensors.torch import load_file
from transformers import Sam2HieraDetConfig, Sam2VideoConfig, Sam2VideoModel, Sam2VisionConfig
from transformers.models.sam2_video.modeling_sam2_video import Sam2VideoInferenceSession

from ans_core.checkpoints import checkpoint
from ans_core.checkpoints import sam2 as sam2_files
from ans_core.model.grounding import Grounding, GroundingConfig
from ans_core.model.network import Network
from ans_core.pictures import transforms
from ans_core.tracking.follow import ObjectPrompt, follow
from tests import tiny

WIDTH, HEIGHT, FRAMES = 80, 56, 10  # more frames than the memory holds; no square
MASK = np.zeros((HEIGHT, WIDTH), bool)
MASK[10:30, 16:40] = True
WIDE = {"width": 128, "memory_width": 64}
# as transformers' conversion of the published files gives them
PUBLISHED_TRUNKS: dict[str, dict[str, Any]] = {
    "tiny": {},
    "small": {"blocks_per_stage": [1, 2, 11, 2], "global_attention_blocks": [7, 10, 13]},
    "base_plus": {
        "hidden_size": 112, "embed_dim_per_stage": [112, 224, 448, 896], "num_attention_heads_per_stage": [2, 4, 8, 16],
        "blocks_per_stage": [2, 3, 16, 3], "global_attention_blocks": [12, 16, 20],
        "window_positional_embedding_background_size": [14, 14],
    },
    "large": {
        "hidden_size": 144, "embed_dim_per_stage": [144, 288, 576, 1152],
        "num_attention_heads_per_stage": [2, 4, 8, 16], "blocks_per_stage": [2, 6, 36, 4],
        "global_attention_blocks": [23, 33, 43], "window_size_per_stage": [8, 4, 16, 8],
    },
}  # fmt: skip
PROMPTS = {
    "mask": ObjectPrompt(mask=MASK),
    "point": ObjectPrompt(points=((27.0, 20.0),), labels=(1,)),
    "box": ObjectPrompt.box((16, 10, 40, 30)),
}


def drawn(*, temporal: bool, **sizes: int) -> Grounding:
    """Random weights under which objects are there and masks differ from frame to frame."""
    torch.manual_seed(3)
    sam2 = Grounding(replace(tiny.GROUNDING, temporal_pointers=temporal, **sizes)).eval()
    with torch.no_grad():
        for name, p in sam2.named_parameters():
            if name.startswith(("memory_", "sam_mask_decoder", "obj_ptr", "maskmem")):
                p.add_(torch.randn_like(p) * 0.05)
        sam2.sam_mask_decoder.pred_obj_score_head.layers[-1].bias += 3
    return sam2


@pytest.fixture(scope="module")
def frames(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_frames(tmp_path_factory.mktemp("frames"))


def write_frames(folder: Path) -> Path:
    """Write frames as the stock predictor reads them."""
    rng = np.random.default_rng(0)
    for index in range(FRAMES):
        pixels = rng.integers(0, 90, (HEIGHT, WIDTH, 3), dtype=np.uint8)
        pixels[10 + index : 30 + index, 16 + 3 * index : 40 + 3 * index] = (220, 120, 40)
        Image.fromarray(pixels).save(folder / f"{index:05d}.jpg", quality=95)
    return folder


def ours(sam2: Grounding, frames: Path, prompt: ObjectPrompt) -> torch.Tensor:
    pictures = [transforms.open_image(path) for path in sorted(frames.iterdir())]
    return torch.stack([logits[0] for _, logits in follow(sam2, pictures, [prompt], frames=FRAMES)])


def whole(low: torch.Tensor) -> torch.Tensor:
    return F.interpolate(low[:, None], size=(HEIGHT, WIDTH), mode="bilinear", align_corners=False)[:, 0]


def stock_masks(folder: Path, frames: Path, prompt: ObjectPrompt) -> torch.Tensor:
    predictor = instantiate(OmegaConf.load(folder / "sam2.yaml").model, _recursive_=True).eval()
    predictor.load_state_dict(torch.load(folder / "sam2.pt", weights_only=True)["model"])
    state = predictor.init_state(str(frames), offload_video_to_cpu=True)
    if prompt.mask is not None:
        predictor.add_new_mask(state, frame_idx=0, obj_id=1, mask=torch.from_numpy(prompt.mask))
    else:
        predictor.add_new_points_or_box(
            state,
            frame_idx=0,
            obj_id=1,
            points=np.array(prompt.points),
            labels=np.array(prompt.labels, np.int32),
        )
    return torch.stack([logits[0, 0] for _, _, logits in predictor.propagate_in_video(state)])


def transformers_masks(
    model: Sam2VideoModel, sam2: Grounding, frames: Path, prompt: ObjectPrompt
) -> torch.Tensor:
    pictures = [transforms.open_image(path) for path in sorted(frames.iterdir())]
    session = Sam2VideoInferenceSession(
        transforms.normalise(pictures, size=64), HEIGHT, WIDTH, dtype=torch.float32
    )
    number = session.obj_id_to_idx(1)
    if prompt.mask is not None:
        session.add_mask_inputs(
            number, 0, sam2.mask_prompts(torch.from_numpy(prompt.mask)[None, None], [0])[0]["masks"]
        )
    else:
        points = torch.tensor(prompt.points) * torch.tensor([64 / WIDTH, 64 / HEIGHT])
        given = {
            "point_coords": points[None, None],
            "point_labels": torch.tensor(prompt.labels, dtype=torch.int32)[None, None],
        }
        session.add_point_inputs(number, 0, given)
    session.obj_with_new_inputs = [1]
    found = model.eval().propagate_in_video_iterator(session, start_frame_idx=0)
    return torch.stack([out.pred_masks[0, 0].detach() for out in found])


@pytest.mark.slow
@pytest.mark.parametrize("temporal", [False, True], ids=["SAM 2", "SAM 2.1"])
@pytest.mark.parametrize("kind", PROMPTS)
def test_the_stock_predictor_builds_our_folder_and_draws_the_same_masks(
    tmp_path: Path, frames: Path, kind: str, temporal: bool
):
    sam2 = drawn(temporal=temporal)
    sam2_files.save(sam2, tmp_path / "out", metadata={})
    theirs = stock_masks(tmp_path / "out", frames, PROMPTS[kind])
    mine = whole(ours(sam2_files.load(tmp_path / "out"), frames, PROMPTS[kind]))
    assert float((mine[1:] - mine[:-1]).abs().max()) > 0.1  # the memory does something
    assert float((mine - theirs).abs().max()) < 2e-3 * float(theirs.abs().max())  # memories are kept in bf16


@pytest.mark.slow
@pytest.mark.parametrize("temporal", [False, True], ids=["SAM 2", "SAM 2.1"])
def test_transformers_loads_the_weights_and_draws_the_same_masks(
    tmp_path: Path, frames: Path, temporal: bool
):
    with pytest.raises(ValueError, match="has memories of width 64 only, this SAM2's have 16"):
        sam2_files.save_transformers(drawn(temporal=temporal), tmp_path / "hf")
    sam2 = drawn(temporal=temporal, **WIDE)
    sam2_files.save_transformers(sam2, tmp_path / "hf")
    model, told = Sam2VideoModel.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert {key: found for key, found in told.items() if found} == {}
    # transformers always does, as the stock package's optional post-processing
    sam2.binarize_mask_from_pts_for_mem_enc = True
    for kind, prompt in PROMPTS.items():
        theirs = transformers_masks(model, sam2, frames, prompt)
        mine = ours(sam2, frames, prompt)
        assert float((mine - theirs).abs().max()) < 5e-3 * float(theirs.abs().max()), kind


@pytest.mark.slow
def test_files_of_every_origin_give_the_same_sam2(
    tmp_path: Path, own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    sam2 = drawn(temporal=True, **WIDE)
    sam2_files.save(sam2, tmp_path / "own", metadata={})
    sam2_files.save_transformers(sam2, tmp_path / "hf")
    sizes = sam2_files.layouts.upstream_sizes(sam2.config)
    renamed = sam2_files.from_transformers(load_file(tmp_path / "hf/model.safetensors"))
    assert renamed.keys() == sam2.state_dict().keys()
    assert all(torch.equal(tensor, sam2.state_dict()[name]) for name, tensor in renamed.items())
    again = sam2_files.load(tmp_path / "own", image_size=96)
    assert again.image_size == again.config.image_size == 96
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in sam2.state_dict().items())
    plain = drawn(temporal=False, **WIDE)  # a bare file with sizes beside it, as small test weights have them
    (tmp_path / "bare").mkdir()
    torch.save({"model": plain.state_dict()}, tmp_path / "bare/sam2.pt")
    (tmp_path / "bare/tiny_sam2_config.json").write_text(json.dumps(sizes))
    assert torch.equal(sam2_files.load(tmp_path / "bare").no_mem_embed, plain.no_mem_embed)
    own_model.keep_original_decoder()
    before = own_model.sam2.sam_mask_decoder.conv_s0.weight.clone()
    with torch.no_grad():
        own_model.sam2.sam_mask_decoder.conv_s0.weight += 1  # trained for [SEG]
    checkpoint.save(own_model, tmp_path / "sa2va", metadata={})
    monkeypatch.setattr(checkpoint, "load", None)  # the language model, which may be large, is not needed
    found = sam2_files.load(tmp_path / "sa2va")
    assert torch.equal(found.sam_mask_decoder.conv_s0.weight, before)
    assert not found.config.original_decoder


LAYERS = {"memory_layers": 5, "fuser_layers": 3}
"""More than any published SAM2 has."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", [{"image_size": 96}, {"memory_frames": 4, "max_object_pointers": 3}, LAYERS], ids=str
)
@pytest.mark.parametrize("temporal", [False, True], ids=["SAM 2", "SAM 2.1"])
def test_a_transformers_folder_is_loaded_at_the_size_it_was_written_at(
    tmp_path: Path, sizes: dict[str, int], temporal: bool
):
    sam2 = drawn(temporal=temporal, **(WIDE | sizes))
    sam2_files.save_transformers(sam2, tmp_path / "hf")
    for source in (tmp_path / "hf", tmp_path / "hf/model.safetensors"):
        again = sam2_files.load(source)
        assert again.config == sam2.config
        assert again.image_size == sam2.config.image_size
        assert again.state_dict().keys() == sam2.state_dict().keys()
        assert all(
            torch.equal(tensor, again.state_dict()[name]) for name, tensor in sam2.state_dict().items()
        )
    assert sam2_files.load(tmp_path / "hf", image_size=128).config == replace(sam2.config, image_size=128)


@pytest.mark.parametrize("name", PUBLISHED_TRUNKS)
@pytest.mark.parametrize("newer", [False, True], ids=["SAM 2", "SAM 2.1"])
def test_sizes_of_published_configurations_of_transformers_are_those_of_the_weights(
    tmp_path: Path, name: str, newer: bool
):
    trunk, file = PUBLISHED_TRUNKS[name], tmp_path / "config.json"
    theirs = Sam2VideoConfig(
        vision_config=Sam2VisionConfig(backbone_config=Sam2HieraDetConfig(**trunk)),
        enable_temporal_pos_encoding_for_object_pointers=newer,
        enable_occlusion_spatial_embedding=newer,
    )
    file.write_text(theirs.to_json_string(use_diff=False))  # every key that transformers knows
    config = sam2_files.read_transformers_config(file)
    width, blocks = trunk.get("hidden_size", 96), sum(trunk.get("blocks_per_stage", [1, 2, 7, 2]))
    positions = tuple(trunk.get("window_positional_embedding_background_size", (7, 7)))
    published = sam2_files.PUBLISHED[width, blocks]
    assert config == GroundingConfig(embed=width, background=positions, temporal_pointers=newer, **published)
    file.write_text(theirs.to_json_string())  # what differs from transformers' defaults
    assert sam2_files.read_transformers_config(file) == config


@pytest.mark.slow
def test_a_folder_that_transformers_writes_is_loaded(tmp_path: Path):
    theirs = Sam2VideoModel(Sam2VideoConfig(image_size=512))  # the other sizes are those of SAM2.1-tiny
    with torch.no_grad():  # one table in every trained SAM2
        theirs.shared_image_embedding.positional_embedding.copy_(
            theirs.prompt_encoder.shared_embedding.positional_embedding
        )
    theirs.save_pretrained(tmp_path)
    found = sam2_files.load(tmp_path)
    published = GroundingConfig(
        image_size=512, embed=96, temporal_pointers=True, **sam2_files.PUBLISHED[96, 12]
    )
    assert (found.image_size, found.config) == (512, published)
    again = sam2_files.to_transformers(found.state_dict())
    assert again.keys() == theirs.state_dict().keys()
    assert all(torch.equal(tensor, again[name]) for name, tensor in theirs.state_dict().items())


def test_a_malformed_configuration_of_transformers_is_refused(tmp_path: Path):
    file = tmp_path / "config.json"
    for text, said in (
        ('{"image_size": "large"}', "no configuration of transformers' Sam2VideoModel .*image_size"),
        ('{"image_size": [512, 256]}', r"image_size \[512, 256\] is not square"),
        ("{", "not JSON"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"(?s){file}: {said}"):
            sam2_files.read_transformers_config(file)


@pytest.mark.parametrize(
    ("name", "embed", "blocks", "positions"),
    [("tiny", 96, 12, 7), ("base_plus", 112, 24, 14), ("large", 144, 48, 7)],
)
def test_published_sizes_are_told_by_the_shapes(name: str, embed: int, blocks: int, positions: int):
    tensors = {
        "image_encoder.trunk.patch_embed.proj.weight": torch.empty(embed, 3, 7, 7, device="meta"),
        "image_encoder.trunk.pos_embed": torch.empty(1, embed, positions, positions, device="meta"),
        **{
            f"image_encoder.trunk.blocks.{n}.norm1.weight": torch.empty(0, device="meta")
            for n in range(blocks)
        },
    }
    config = sam2_files.sizes_of(tensors, where=name)
    assert (sum(config.stages), config.background, config.temporal_pointers) == (
        blocks,
        (positions, positions),
        False,
    )
    assert sam2_files.sizes_of(
        tensors | {"no_obj_embed_spatial": torch.empty(0)}, where=name
    ).temporal_pointers
    other = tensors | {"image_encoder.trunk.patch_embed.proj.weight": torch.empty(97, 3, 7, 7, device="meta")}
    with pytest.raises(
        ValueError, match=f"{name}: an image encoder of width 97 with {blocks} blocks is none of SAM2's"
    ):
        sam2_files.sizes_of(other, where=name)
    with pytest.raises(ValueError, match="holds no SAM2"):
        sam2_files.sizes_of({}, where=name)
