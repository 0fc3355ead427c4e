"""`Sa2VA.predict` against upstream's `predict_forward` (fp32, CPU, the reference's bf16 mean and deviation)."""

from __future__ import annotations

import copy
import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from ans_core.model import Sa2VA
from ans_core.model import predict as ask
from ans_core.model.sa2va import VideoMode
from tests.golden import GOLDEN, arrays, error, needs_golden

pytestmark = needs_golden


@lru_cache
def qwen2() -> tuple[Sa2VA, dict[str, Any], dict[str, torch.Tensor]]:
    model = Sa2VA.from_pretrained(GOLDEN / "qwen2")
    inputs = {k: v.numpy() for k, v in arrays("qwen2/inputs").items() if k.startswith("pf_")}
    return model, inputs, arrays("qwen2/outputs")


def question(name: str) -> dict[str, Any]:
    _, inputs, _ = qwen2()
    return {
        "image": {"text": "<image>Please segment the cat.", "image": inputs["pf_image_uint8"]},
        "video": {"text": "<image>Please segment the dog.", "video": list(inputs["pf_video_uint8"])},
        "vp": {
            "text": "<image>Can you describe region1?",
            "image": Image.fromarray(inputs["pf_image_uint8"]),
            "mask_prompts": [inputs["pf_mask_prompts"]],
        },
        "text": {"text": "Hello, who are you?"},
    }[name]


def reference() -> dict[str, Any]:
    return json.loads((GOLDEN / "qwen2/predict_forward.json").read_text())


@pytest.mark.parametrize("name", ["image", "video", "vp", "text"])
def test_the_same_words_and_masks(name: str):
    model, _, outputs = qwen2()
    answer, expected = model.predict(**question(name), max_tokens=24, constants="bf16"), reference()[name]
    assert answer.text == expected["prediction"].removesuffix("<|im_end|>")
    assert len(answer.masks) == expected["n_masks"]
    for number, mask in enumerate(answer.masks):
        other = outputs[f"pf_{name}_mask_{number}"].numpy()
        assert (mask.shape, mask.dtype) == (other.shape, np.bool_)
        assert (mask != other).mean() < 1e-3
        assert error(answer.seg_embeddings[[number]], outputs[f"pf_{name}_seg_embed_{number}"]) < 1e-4


def test_a_release_on_internvl3_is_read_as_one_on_internvl2_5(tmp_path: Path):
    """The same parts; its configuration stretches positions beyond the context it was trained with, and has the field's two names."""
    shutil.copytree(GOLDEN / "qwen2", tmp_path / "release")
    config = json.loads((GOLDEN / "qwen2/config.json").read_text())
    config["llm_config"]["rope_scaling"] = {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}
    (tmp_path / "release/config.json").write_text(json.dumps(config))
    model = Sa2VA.from_pretrained(tmp_path / "release")
    assert model.internvl.config.text_config.rope_parameters["rope_type"] == "dynamic"
    found, expected = (one.predict(**question("image"), max_tokens=24) for one in (model, qwen2()[0]))
    assert found.text == expected.text
    assert torch.equal(found.mask_logits, expected.mask_logits)


@pytest.mark.parametrize("mode", ["sa2va", "sa2va-i"])
@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_in_half_precision_the_answers_are_nearly_the_same(dtype: torch.dtype | str, mode: VideoMode):
    exact = copy.deepcopy(qwen2()[0])
    model = Sa2VA.from_pretrained(GOLDEN / "qwen2", dtype=dtype, device_map="cpu")
    assert model.dtype == model.internvl.lm_head.weight.dtype == getattr(torch, str(dtype).removeprefix("torch."))
    exact.keep_original_decoder()
    model.keep_original_decoder()
    for name in ("image", "video", "vp"):
        asked = question(name)
        expected = exact.predict(**asked, max_tokens=8, video_mode=mode)
        answer = model.predict(**asked, max_tokens=8, video_mode=mode)
        assert answer.text == expected.text
        assert answer.mask_logits.dtype == answer.seg_embeddings.dtype == torch.float32
        assert relative(answer.seg_embeddings, expected.seg_embeddings) < 0.05
        agree = [(a & b).sum() / max((a | b).sum(), 1) for a, b in zip(answer.masks, expected.masks, strict=True)]
        assert min(agree, default=1.0) > 0.9
    _, frames = model.follow(**question("video"), max_tokens=8, video_mode=mode)
    next(frames)
    assert not torch.is_autocast_enabled("cpu")


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-6))


def test_a_batch_of_everything_is_answered_as_one_by_one():
    model, *_ = qwen2()
    past = [("<image>Please segment the cat.", "Sure,[SEG].")]
    asked = [question(name) for name in ("text", "image", "vp", "video", "image")]
    asked[-1] |= {"text": "And the dog?", "past": past}
    together = model.predict_many([ask.request_of(**q) for q in asked], max_tokens=8)
    for one, q in zip(together, asked, strict=True):
        alone = model.predict(**q, max_tokens=8)
        assert one.text == alone.text
        assert all((a != b).mean() < 1e-3 for a, b in zip(one.masks, alone.masks, strict=True))


@pytest.mark.parametrize("mode", ["sa2va", "sa2va-i"])
def test_a_clip_is_followed_frame_by_frame_with_the_same_masks(mode: VideoMode):
    """Every frame is encoded once; between two frames the model answers other questions as ever."""
    model, inputs, _ = copy.deepcopy(qwen2())
    model.keep_original_decoder()
    with torch.no_grad():
        model.sam2.original_mask_decoder.conv_s0.weight.mul_(1.5)
    asked = question("video") | {"video": [*inputs["pf_video_uint8"], *inputs["pf_video_uint8"][::-1]]}
    whole = model.predict(**asked, max_tokens=8, video_mode=mode)
    picture = model.predict(**question("image"), max_tokens=8)
    encoded: list[int] = []
    handle = model.sam2.image_encoder.register_forward_pre_hook(lambda module, args: encoded.append(len(args[0])))
    text, frames = model.follow(**asked, max_tokens=8, video_mode=mode)
    assert text == whole.text
    for expected, (index, masks) in enumerate(frames):
        assert index == expected
        assert (masks[0] != whole.masks[0][index]).mean() < 1e-3
    handle.remove()
    assert index == 13
    assert sum(encoded) == 14
    _, frames = model.follow(**asked, max_tokens=8, video_mode=mode)
    next(frames)
    assert (model.predict(**question("image"), max_tokens=8).masks[0] == picture.masks[0]).all()


def test_frames_of_another_size_are_found_when_they_come():
    model, inputs, _ = qwen2()
    video = [*inputs["pf_video_uint8"], np.zeros((8, 9, 3), np.uint8)]
    _, frames = model.follow(text="<image>Please segment the dog.", video=video, max_tokens=8)
    with pytest.raises(ValueError, match="frame 7 is 9 x 8, the first 200 x 140"):
        list(frames)


def test_earlier_turns_stand_before_the_question_as_training_wrote_them():
    model, inputs, _ = qwen2()
    request = ask.request_of(image=inputs["pf_image_uint8"], text="And the dog?", past=[("<image>Please segment the cat.", "Sure,[SEG].")])
    with torch.no_grad():
        found = ask.prompt(model, [request]).row(0)
        first = ask.prompt(model, [ask.request_of(image=inputs["pf_image_uint8"], text="<image>Please segment the cat.")]).row(0)
        rest = "Sure,[SEG].<|im_end|>\n<|im_start|>user\nAnd the dog?<|im_end|>\n<|im_start|>assistant\n"
        second = model.internvl.get_input_embeddings()(torch.tensor(model.tokenizer.encode(rest)))
    assert torch.equal(found, torch.cat([first, second]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"video": [np.zeros((8, 8, 3), np.uint8)]}, "an image and a video at once"),
        ({"image": np.zeros((8, 8), np.uint8)}, r"a picture of shape \(8, 8\) and uint8; give \(height, width, 3\) of uint8"),
        ({"image": None, "video": [np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)]}, r"differ in size \(8 x 8, 9 x 8\)"),
        ({"image": None}, "the text has 1 <image> for 0 frames"),
        ({"text": "<image>" + "word " * 40_000}, r"\d+ tokens, pictures included, in a context of \d+"),
        ({"video_mode": "sa2va-i"}, "SAM2's original mask decoder"),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str):
    model, _, _ = qwen2()
    with pytest.raises(ValueError, match=message):
        model.predict(**(question("image") | changes))


@pytest.mark.parametrize("size", [(1, 1), (10_000, 10)])
def test_pictures_of_any_shape_are_answered_at_their_size(size: tuple[int, int]):
    model, _, _ = qwen2()
    answer = model.predict(text="<image>Please segment the cat.", image=Image.new("RGB", size, (90, 140, 20)), max_tokens=8)
    assert [mask.shape for mask in answer.masks] == [(1, size[1], size[0])]
