"""A Qwen3-VL from random weights learns to describe regions, which upstream's Qwen kind does not support."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from ans_core.data.collate import Row, collate
from ans_core.data.conversation import Turn
from ans_core.inference import predict as ask
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised, layout_of
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from ans_core.types import RLE, Request
from tests import tiny

pytestmark = pytest.mark.slow
COLOURS = {"red": (220, 30, 30), "green": (30, 200, 30), "blue": (40, 40, 230), "yellow": (230, 220, 30)}
ASKED = "Describe region1."
STEPS = 60


def scene(number: int) -> tuple[bytes, list[tuple[str, RLE]]]:
    """Two squares of different colours in two of the picture's quarters, and a caption and a mask for
    each."""
    rng = np.random.default_rng(number)
    pixels = rng.integers(60, 120, (64, 64, 3), dtype=np.uint8)
    things = []
    for colour, quarter in zip(
        rng.permutation(list(COLOURS))[:2], rng.permutation(4)[:2].tolist(), strict=True
    ):
        y, x = 32 * (quarter // 2), 32 * (quarter % 2)
        pixels[y + 2 : y + 30, x + 2 : x + 30] = COLOURS[colour]
        things.append((f"a {colour} square.", tiny.square(x, y, x + 32, y + 32)))
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue(), things


def model() -> Network:
    tokenizer = build_tokenizer(
        [ASKED] * 9 + [f"a {colour} square." for colour in COLOURS] * 9, vocabulary=300, kind="qwen3_vl"
    )
    config = tiny_config(
        kind="qwen3_vl",
        vision={"image_size": 64, "patch_size": 8, "hidden": 32, "layers": 2, "heads": 2, "mlp": 64},
        language={"hidden": 48, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 96},
        grounding=tiny.GROUNDING,
        tokenizer=tokenizer,
        template="qwen_chat",
        video_frames=2,
    )
    return build_tiny(config, tokenizer, seed=0)


def right(model: Network) -> float:
    """Share of unseen regions that are described exactly."""
    asked, captions = [], []
    for picture, things in map(scene, range(1000, 1012)):
        for caption, mask in things:
            asked.append(Request(frames=(picture,), text="<image>" + ASKED, mask_prompts=(mask,)))
            captions.append(caption)
    told = ask.predict(model, asked, max_tokens=8, batch=24)
    return sum(one.text == caption for one, caption in zip(told, captions, strict=True)) / len(captions)


def test_regions_of_unseen_pictures_are_described_after_sixty_steps():
    """Two regions of a picture have different captions, so only the cells shown for `<vp>` tell which is
    meant."""
    trained = model()
    assert right(trained.eval()) == 0.0
    trained.requires_grad_(False).vlm.requires_grad_(True)
    layout, loss = (
        layout_of(trained, mask_size=32, max_length=256),
        Supervised(trained, mask_weight=0.0, dice_weight=0.0, points=1),
    )
    optimizer = torch.optim.AdamW([p for p in trained.parameters() if p.requires_grad], lr=3e-3)
    for step in range(STEPS):
        rows = []
        for number in range(8 * step, 8 * step + 8):
            picture, things = scene(number)
            turns = tuple(Turn(question=ASKED, answer=caption, regions=(mask,)) for caption, mask in things)
            rows.append(Row(name=str(number), frames=(picture,), turns=turns))
        optimizer.zero_grad()
        loss(collate(rows, trained.tokenizer, layout))[0].backward()
        torch.nn.utils.clip_grad_norm_(trained.parameters(), 1.0)
        optimizer.step()
    assert right(trained.eval()) > 0.9
