"""`Sa2VA.predict` against upstream's `predict_forward` (fp32, CPU, the reference's bf16 mean and
deviation)."""

from __future__ import annotations

import copy
import dataclasses
import json
import shutil
from functools import lru_cache
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from PIL import Image

from ans_core.inference.generation import cut_at_stop
from ans_core.inference.options import PredictOptions
from ans_core.inference.prefill import prompt
from ans_core.inference.requests import request_of
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.config import VideoMode
from ans_core.model.network import Network
from ans_core.pictures import media, rle
from tests import tiny
from tests.data.clip_sets import write_video
from tests.golden import GOLDEN, arrays, error, needs_golden

pytestmark = needs_golden


@lru_cache
def qwen2() -> tuple[Network, dict[str, Any], dict[str, torch.Tensor]]:
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_release_on_internvl3_is_read_as_one_on_internvl2_5(tmp_path: Path):
    """The same parts; its configuration stretches positions beyond the context it was trained with, and has
    the field's two names."""
    shutil.copytree(GOLDEN / "qwen2", tmp_path / "release")
    config = json.loads((GOLDEN / "qwen2/config.json").read_text())
    config["llm_config"]["rope_scaling"] = {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}
    (tmp_path / "release/config.json").write_text(json.dumps(config))
    model = Sa2VA.from_pretrained(tmp_path / "release")
    assert model.internvl.config.text_config.rope_parameters["rope_type"] == "dynamic"
    found, expected = (one.predict(**question("image"), max_tokens=24) for one in (model, qwen2()[0]))
    assert found.text == expected.text
    assert torch.equal(found.mask_logits, expected.mask_logits)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "mode", "names"),
    [
        ("bfloat16", "sa2va", ("image", "video", "vp")),
        (torch.float16, "sa2va-i", ("image", "video", "vp")),
        ("bfloat16", "keyframe", ("video",)),  # the mode is that of clips alone
    ],
)
def test_in_half_precision_the_answers_are_nearly_the_same(
    dtype: torch.dtype | str, mode: VideoMode, names: tuple[str, ...]
):
    exact = copy.deepcopy(qwen2()[0])
    model = Sa2VA.from_pretrained(GOLDEN / "qwen2", dtype=dtype, device_map="cpu")
    assert (
        model.dtype
        == model.internvl.lm_head.weight.dtype
        == getattr(torch, str(dtype).removeprefix("torch."))
    )
    exact.keep_original_decoder()
    model.keep_original_decoder()
    for name in names:
        asked = question(name)
        expected = exact.predict(**asked, max_tokens=8, video_mode=mode)
        answer = model.predict(**asked, max_tokens=8, video_mode=mode)
        assert answer.text == expected.text
        assert answer.mask_logits.dtype == answer.seg_embeddings.dtype == torch.float32
        assert relative(answer.seg_embeddings, expected.seg_embeddings) < 0.05
        agree = [
            (a & b).sum() / max((a | b).sum(), 1) for a, b in zip(answer.masks, expected.masks, strict=True)
        ]
        assert min(agree, default=1.0) > 0.9
    _, frames = model.follow(**question("video"), max_tokens=8, video_mode=mode)
    next(frames)
    assert not torch.is_autocast_enabled("cpu")


def relative(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).norm() / other.norm().clamp(min=1e-6))


@pytest.mark.slow
def test_a_batch_of_everything_is_answered_as_one_by_one():
    model, *_ = qwen2()
    past = [("<image>Please segment the cat.", "Sure,[SEG].")]
    asked = [question(name) for name in ("text", "image", "vp", "video", "image")]
    asked[-1] |= {"text": "And the dog?", "past": past}
    together = model.predict_many([request_of(**q) for q in asked], max_tokens=8)
    for one, q in zip(together, asked, strict=True):
        alone = model.predict(**q, max_tokens=8)
        assert one.text == alone.text
        assert all((a != b).mean() < 1e-3 for a, b in zip(one.masks, alone.masks, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sa2va", "sa2va-i", "keyframe"])
def test_a_clip_is_followed_frame_by_frame_with_the_same_masks(mode: VideoMode):
    """Every frame is encoded once (in mode keyframe twice); between two frames the model answers other
    questions as ever."""
    model, inputs, _ = copy.deepcopy(qwen2())
    model.keep_original_decoder()
    with torch.no_grad():
        model.sam2.original_mask_decoder.conv_s0.weight.mul_(1.5)
    asked = question("video") | {"video": [*inputs["pf_video_uint8"], *inputs["pf_video_uint8"][::-1]]}
    whole = model.predict(**asked, max_tokens=8, video_mode=mode)
    picture = model.predict(**question("image"), max_tokens=8)
    encoded: list[int] = []
    handle = model.sam2.image_encoder.register_forward_pre_hook(
        lambda module, args: encoded.append(len(args[0]))
    )
    text, frames = model.follow(**asked, max_tokens=8, video_mode=mode)
    assert text == whole.text
    for expected, (index, masks) in enumerate(frames):
        assert index == expected
        assert (masks[0] != whole.masks[0][index]).mean() < 1e-3
    handle.remove()
    assert index == 13
    assert sum(encoded) == (28 if mode == "keyframe" else 14)
    _, frames = model.follow(**asked, max_tokens=8, video_mode=mode)
    next(frames)
    assert (model.predict(**question("image"), max_tokens=8).masks[0] == picture.masks[0]).all()


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sa2va", "sa2va-i", "keyframe"])
def test_a_video_file_is_followed_as_its_frames_with_a_few_held(tmp_path: Path, mode: VideoMode):
    """40 frames, of which five are kept and one is decoded at a time."""
    model, inputs, _ = copy.deepcopy(qwen2())
    model.keep_original_decoder()
    shots = np.concatenate([inputs["pf_video_uint8"]] * 6)[:40]
    write_video(tmp_path / "clip.mp4", shots)
    frames = tuple(media.clip(tmp_path / "clip.mp4"))
    decoded, alive, most = media.VideoFile.__getitem__, [0], [0]

    class Held(bytes):
        def __del__(self) -> None:
            alive[0] -= 1

    def counted(self: media.VideoFile, index: int) -> bytes:
        found = Held(decoded(self, index))
        alive[0] += 1
        most[0] = max(most[0], alive[0])
        return found

    asked = {"text": question("video")["text"], "max_tokens": 8, "video_mode": mode}
    expected = model.predict(**asked, video=list(frames))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(media.VideoFile, "__getitem__", counted)
        text, masks = model.follow(**asked, video=tmp_path / "clip.mp4")
        found = [one for _, one in masks]
    assert text == expected.text
    assert (np.stack(found)[:, 0] != expected.masks[0]).mean() < 1e-3
    assert 5 <= most[0] <= 5 + 2


@pytest.mark.slow
def test_frames_of_another_size_are_found_when_they_come():
    model, inputs, _ = qwen2()
    video = [*inputs["pf_video_uint8"], np.zeros((8, 9, 3), np.uint8)]
    _, frames = model.follow(text="<image>Please segment the dog.", video=video, max_tokens=8)
    with pytest.raises(ValueError, match="frame 7 is 9 x 8, the first 200 x 140"):
        list(frames)


def test_earlier_turns_stand_before_the_question_as_training_wrote_them():
    model, inputs, _ = qwen2()
    request = request_of(
        image=inputs["pf_image_uint8"],
        text="And the dog?",
        past=[("<image>Please segment the cat.", "Sure,[SEG].")],
    )
    with torch.no_grad():
        found = tiny.embeds_of(prompt(model, [request]))
        first = tiny.embeds_of(
            prompt(model, [request_of(image=inputs["pf_image_uint8"], text="<image>Please segment the cat.")])
        )
        rest = "Sure,[SEG].<|im_end|>\n<|im_start|>user\nAnd the dog?<|im_end|>\n<|im_start|>assistant\n"
        second = model.internvl.get_input_embeddings()(torch.tensor(model.tokenizer.encode(rest)))
    assert torch.equal(found, torch.cat([first, second]))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"video": [np.zeros((8, 8, 3), np.uint8)]}, "an image and a video at once"),
        (
            {"image": np.zeros((8, 8), np.uint8)},
            r"a picture of shape \(8, 8\) and uint8; give \(height, width, 3\) of uint8",
        ),
        (
            {"image": None, "video": [np.zeros((8, 8, 3), np.uint8), np.zeros((8, 9, 3), np.uint8)]},
            r"differ in size \(8 x 8, 9 x 8\)",
        ),
        ({"image": None}, "the text has 1 <image> for 0 frames"),
        ({"text": "<image>" + "word " * 40_000}, r"\d+ tokens, pictures included, in a context of \d+"),
        ({"video_mode": "sa2va-i"}, "SAM2's original mask decoder"),
        ({"video_mode": "sa2va_i"}, "video mode 'sa2va_i'; there are sa2va, sa2va-i, keyframe, and auto"),
        ({"constants": "bfloat16"}, "constants 'bfloat16'; there are fp32, bf16"),
        ({"tiny_regions": "all"}, "tiny_regions 'all'; there are largest, none"),
        ({"frames": 0}, "0 frames of a clip; give a whole number from 1"),
        ({"frame_choice": "last"}, "frame choice 'last'; there are first, uniform"),
        ({"past": "<|im_start|>user"}, "past is a text; give the turns before as"),
        (
            {"past": [{"role": "user", "content": "What?"}]},
            r"past holds a dict with 'role', 'content', as chat messages are",
        ),
        (
            {"past": ["What?", "A cat."]},
            r"past holds 'What\?'; give the turns before as \(question, answer\) pairs",
        ),
        (
            {"image": None, "video": Image.new("RGB", (8, 8))},
            "the video is Image, one picture; give it as image",
        ),
        ({"image": None, "video": b"pixels"}, "the video is bytes, one picture"),
        (
            {"image": None, "video": np.zeros((8, 8, 3), np.uint8)},
            r"a video of shape \(8, 8, 3\); give \(frames, height, width, 3\)",
        ),
        (
            {"image": None, "video": torch.zeros(2, 3, 8, 8)},
            r"a picture of shape \(3, 8, 8\) and float32; give \(height, width, 3\)",
        ),
        ({"image": None, "video": []}, "the video has no frames; give at least one"),
        ({"image": [np.zeros((8, 8, 3), np.uint8)]}, "not list; give one picture"),
        ({"mask_prompts": [np.ones(8, bool)]}, r"a mask prompt of shape \(8,\); give a list"),
        (
            {"image": None, "text": "What?", "mask_prompts": [np.ones((8, 8), bool)]},
            "1 mask prompts without a picture",
        ),
    ],
)
def test_a_question_that_makes_no_sense_is_refused(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users have no such check of types
    model, _, _ = qwen2()
    with pytest.raises(ValueError, match=message):
        model.predict(**(question("image") | changes))


def test_what_upstream_leaves_out_is_nothing_and_masks_come_in_any_form():
    model, inputs, _ = qwen2()
    plain = model.predict(**question("image"), max_tokens=8)
    assert (
        model.predict(**question("image"), video=None, past=None, mask_prompts=None, max_tokens=8).text
        == plain.text
    )
    mask = inputs["pf_mask_prompts"][0]
    expected = request_of(text="<image>", image=inputs["pf_image_uint8"], mask_prompts=[mask]).mask_prompts
    counted = rle.encode(mask.astype(bool))
    runs = np.diff(
        np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int).T.flatten(), [2]]))) + 0, prepend=0
    ).tolist()
    forms = [
        mask[None],
        torch.from_numpy(mask),
        Image.fromarray(mask.astype(np.uint8) * 255),
        counted,
        {"size": counted["size"], "counts": runs},
    ]
    for form in forms:
        assert (
            request_of(text="<image>", image=inputs["pf_image_uint8"], mask_prompts=[form]).mask_prompts
            == expected
        )
    assert (
        request_of(
            text="<image>", image=inputs["pf_image_uint8"], mask_prompts=inputs["pf_mask_prompts"]
        ).mask_prompts[:1]
        == expected
    )


@pytest.mark.slow
@pytest.mark.parametrize(("frames", "choice"), [(2, None), (None, "uniform"), (3, "uniform"), (7, "first")])
def test_frames_are_chosen_at_a_call_as_by_the_checkpoint(frames: int | None, choice: Any):
    model = qwen2()[0]
    other = copy.copy(model)
    other.config = dataclasses.replace(model.config, video_frames=frames or 5, frame_choice=choice or "first")
    asked = question("video") | {"max_tokens": 8}
    expected = other.predict(**asked)
    for given in (model.predict(**asked, frames=frames, frame_choice=choice), expected):
        assert torch.equal(given.seg_embeddings, expected.seg_embeddings)
        assert torch.equal(given.mask_logits, expected.mask_logits)
    assert not torch.equal(model.predict(**asked).seg_embeddings, expected.seg_embeddings)
    text, masks = model.follow(**asked, frames=frames, frame_choice=choice)
    assert text == expected.text
    assert (np.stack([one[0] for _, one in masks]) != expected.masks[0]).mean() < 1e-3


def test_a_region_that_sampling_misses_has_no_tokens_by_upstreams_rule():
    model, inputs, _ = qwen2()
    dot = np.zeros(inputs["pf_image_uint8"].shape[:2], bool)
    dot[3, 5] = True
    request = request_of(text="<image>What is region1?", image=inputs["pf_image_uint8"], mask_prompts=[dot])
    with torch.no_grad():
        lengths = [
            len(tiny.embeds_of(prompt(model, [request], options=PredictOptions(tiny_regions=rule))))
            for rule in ("largest", "none")
        ]
    assert lengths[0] == lengths[1] + 1
    answers = [
        model.predict(**question("image"), mask_prompts=[dot], max_tokens=8, tiny_regions=rule)
        for rule in ("largest", "none")
    ]
    assert not torch.equal(answers[0].seg_embeddings, answers[1].seg_embeddings)


def test_following_nothing_is_refused():
    with pytest.raises(ValueError, match="the video has no frames"):
        qwen2()[0].follow(text="<image>Who moves?", video=[])


def test_a_video_may_be_one_array_or_tensor():
    _, inputs, _ = qwen2()
    expected = request_of(text="<image>", video=list(inputs["pf_video_uint8"]))
    for video in (inputs["pf_video_uint8"], torch.from_numpy(inputs["pf_video_uint8"])):
        assert request_of(text="<image>", video=video) == expected


@pytest.mark.slow
def test_a_video_may_be_a_file_or_a_folder_of_frames(tmp_path: Path):
    model, inputs, _ = qwen2()
    for number, frame in enumerate(inputs["pf_video_uint8"]):
        Image.fromarray(frame).save(tmp_path / f"{number}.png")
    asked = question("video")
    found = model.predict(**asked | {"video": str(tmp_path)}, max_tokens=8)
    assert torch.equal(found.mask_logits, model.predict(**asked, max_tokens=8).mask_logits)


def test_regions_of_a_clip_are_those_of_its_first_frame():
    model, inputs, _ = qwen2()
    frames = list(inputs["pf_video_uint8"])
    mask = np.ones(frames[0].shape[:2], bool)

    def prompted(changed: int | None) -> torch.Tensor:
        shown = [255 - f if i == changed else f for i, f in enumerate(frames)]
        with torch.no_grad():
            return tiny.embeds_of(
                prompt(model, [request_of(text="<image>What is region1?", video=shown, mask_prompts=[mask])])
            )

    plain, cells = prompted(None), model.backbone.cutter.grid**2
    # frame and region, frame alone
    for changed, expected in ((0, 2 * cells), (model.seen_frames(len(frames))[-1], cells)):
        assert int((prompted(changed) != plain).any(dim=1).sum()) == expected


def test_a_clip_of_one_frame_is_one_tile_and_is_followed_as_it_is_predicted():
    model, inputs, _ = copy.deepcopy(qwen2())
    model.keep_original_decoder()
    with torch.no_grad():
        model.sam2.original_mask_decoder.conv_s0.weight.mul_(1.5)
        asked = question("video") | {"video": list(inputs["pf_video_uint8"][:1])}
        tokens = len(tiny.embeds_of(prompt(model, [request_of(**asked)])))
        assert tokens < len(
            tiny.embeds_of(prompt(model, [request_of(text=asked["text"], image=asked["video"][0])]))
        )
    whole = model.predict(**asked, max_tokens=8, video_mode="sa2va-i")
    text, frames = model.follow(**asked, max_tokens=8, video_mode="sa2va-i")
    assert text == whole.text
    assert [(masks == [m[0] for m in whole.masks]).all() for _, masks in frames] == [True]


@pytest.mark.slow
def test_an_answer_ends_at_a_stop_word_of_several_tokens():
    """Sa2VA-4B: phi3_chat with a tokenizer that does not know `<|end|>`. The end of text stops, too."""
    model, *_ = copy.deepcopy(qwen2())
    model.config = dataclasses.replace(model.config, template="phi3_chat")
    told = model.tokenizer.encode("Sure,[SEG].<|end|> and more", add_special_tokens=False)
    assert len(told) > 8
    drawn = told[: told.index(model.seg_token_id) + 1]
    for script, expected in (
        (told, "Sure,[SEG]."),
        ([*drawn, model.tokenizer.eos_token_id, *told], "Sure,[SEG]"),
    ):
        steps: list[int] = []

        def say(
            module: object,
            given: object,
            logits: torch.Tensor,
            script: list[int] = script,
            steps: list[int] = steps,
        ) -> torch.Tensor:
            steps.append(script[len(steps)])
            return torch.zeros_like(logits).index_fill_(-1, torch.tensor(steps[-1:]), 1.0)

        handle = model.internvl.lm_head.register_forward_hook(say)
        answer = model.predict(**question("image"), max_tokens=len(script))
        handle.remove()
        assert answer.text == expected
        assert len(answer.masks) == 1
        assert len(steps) < len(script)
    ids, complete = cut_at_stop(model, told)
    assert (complete, model.tokenizer.decode(ids)) == (True, "Sure,[SEG].<|end|>")
    assert cut_at_stop(model, told[:3]) == (told[:3], False)


@pytest.mark.parametrize("size", [(1, 1), (10_000, 10)])
def test_pictures_of_any_shape_are_answered_at_their_size(size: tuple[int, int]):
    model, _, _ = qwen2()
    answer = model.predict(
        text="<image>Please segment the cat.", image=Image.new("RGB", size, (90, 140, 20)), max_tokens=8
    )
    assert [mask.shape for mask in answer.masks] == [(1, size[1], size[0])]


def test_upstreams_names_of_the_parts_and_of_the_dtype_are_aliases():
    model = Sa2VA.from_pretrained(GOLDEN / "qwen2", torch_dtype="float32")
    assert model.dtype == torch.float32
    assert model.language_model is model.vlm.model.language_model
    assert model.vision_model is model.backbone.vision_tower
    assert model.grounding_encoder is model.sam2
    assert not any("grounding_encoder" in name or "vision_model" in name for name in model.state_dict())
    with pytest.raises(ValueError, match="dtype 'float32' and torch_dtype 'float32' are the same setting"):
        Sa2VA.from_pretrained(GOLDEN / "qwen2", dtype="float32", torch_dtype="float32")
