"""A model of a few ten thousand weights and samples drawn by hand, for tests of everything that trains,
samples or predicts."""

from __future__ import annotations

import io
from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from ans_core.data.collate import Layout, Row
from ans_core.data.conversation import Turn
from ans_core.inference.prefill import PrefilledBatch
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import Network
from ans_core.model.supervised import layout_of
from ans_core.pictures import rle
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from ans_core.types import RLE, Sample

SIDE = 64
"""Pixels on a side of a drawn picture."""
GROUNDING = GroundingConfig(
    image_size=64, embed=16, heads=1, stages=(1, 1, 2, 1), global_blocks=(3,), windows=(4, 2, 4, 2), width=32,
    memory_layers=1, memory_feedforward=32, memory_width=16,
)  # fmt: skip
"""As small as SAM2 gets."""
TEXTS = (
    "a red circle left of a blue square",
    "Please segment the red square in this image.",
    "It is [SEG].",
    "a small green square",
)


@lru_cache(maxsize=1)
def _model() -> Network:
    tokenizer = build_tokenizer(TEXTS * 5, vocabulary=300)
    config = tiny_config(
        vision={"image_size": 64, "patch_size": 8, "hidden": 32, "layers": 2, "heads": 2, "mlp": 64},
        language={"hidden": 32, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 64},
        grounding=GROUNDING,
        tokenizer=tokenizer,
        template="qwen_chat",
        video_frames=2,
    )  # fmt: skip
    model = build_tiny(config, tokenizer, seed=0)
    torch.manual_seed(1)
    # wider than a trained model's first weights, so that tokens and pictures make a difference
    with torch.no_grad():
        for name, p in model.internvl.model.language_model.named_parameters():
            if p.ndim == 2:
                p.normal_(std=0.3 if "embed" not in name else 1.0)
        model.internvl.lm_head.weight.normal_(std=0.3)
    return model.eval().requires_grad_(False)


def build() -> Network:
    """A copy that a test may change."""
    fresh = Network(_model().config, _model().tokenizer)
    fresh.load_state_dict(_model().state_dict())
    return fresh.eval().requires_grad_(False)


def layout(model: Network, **changes: int) -> Layout:
    return layout_of(model, **({"mask_size": 32, "max_length": 512} | changes))


def square(x1: int, y1: int, x2: int, y2: int) -> RLE:
    mask = np.zeros((SIDE, SIDE), bool)
    mask[y1:y2, x1:x2] = True
    return rle.encode(mask)


def picture(number: int, box: tuple[int, int, int, int] = (8, 8, 24, 24)) -> bytes:
    """PNG of a coloured square on grey noise; all decided by the arguments."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(60, 120, (SIDE, SIDE, 3), dtype=np.uint8)
    x1, y1, x2, y2 = box
    pixels[y1:y2, x1:x2] = rng.integers(0, 255, 3)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def sample(number: int = 0, **changes: object) -> Sample:
    """A referring sample about one square, unless changed."""
    values: dict[str, object] = {
        "sample_id": f"s{number}",
        "dataset": "drawn",
        "image_id": f"i{number}",
        "frames": (picture(number),),
        "height": SIDE,
        "width": SIDE,
        "task": "referring",
        "text": "red square",
        "masks": ((square(8, 8, 24, 24),),),
    }
    return Sample(**(values | changes))


def clip(number: int = 0, frames: int = 4, **changes: object) -> Sample:
    """A square that moves 8 pixels to the right in every frame."""
    boxes = [(8 * i, 16, 8 * i + 16, 32) for i in range(frames)]
    values = {
        "frames": tuple(picture(100 + number, box) for box in boxes),
        "masks": (tuple(square(*box) for box in boxes),),
    }
    return sample(number, **(values | changes))


def region(number: int = 0, text: str = "a red square", **changes: object) -> Sample:
    return sample(number, task="region_caption", text=text, **changes)


def row(*turns: Turn, number: int = 0, **changes: object) -> Row:
    return Row(**({"name": f"drawn/i{number}", "frames": (picture(number),), "turns": turns} | changes))


def embeds_of(prompted: PrefilledBatch, number: int = 0) -> Float[Tensor, "_ E"]:
    """Return what the language model reads of a request, without padding."""
    start = int(prompted.prefix_of[number])
    prefix = prompted.prefixes[start][prompted.prefix_attention[start]]
    return torch.cat([prefix, prompted.embeds[number][prompted.attention[number]]])
