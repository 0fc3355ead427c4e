from __future__ import annotations

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from ans_core import prompts
from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.inference import predict as ask
from ans_core.inference.generation import generate, seg_embeddings_of, spoken_ids, stop_ids
from ans_core.inference.prefill import SIMILAR_LENGTH, encoded, prompt, visible
from ans_core.model.masks import upsample
from ans_core.model.network import Network
from ans_core.model.supervised import image_tokens, packed
from ans_core.pictures import rle, transforms
from ans_core.types import Prediction, Request
from tests import tiny
from tests.tracks import track


@pytest.fixture(scope="module")
def talker() -> Network:
    """Says something else about every picture, with some `[SEG]`s: its head prefers that token a little."""
    model = tiny.build()
    with torch.no_grad():
        model.internvl.lm_head.weight[model.seg_token_id] *= 3
    return model


def still(number: int, text: str = "<image>\nPlease segment the red square.", **changes: object) -> Request:
    return Request(frames=(tiny.picture(number),), text=text, **changes)  # type: ignore[arg-type]


REQUESTS = [
    still(0),
    still(1, prompts.REGION_EVAL, mask_prompts=(tiny.square(0, 0, 40, 40),)),
    Request(frames=(), text="What is a square?"),
    still(2, "<image>\nWhat?"),
    Request(frames=tiny.clip(3).frames, text="<image>\nPlease segment the moving square."),
    still(4, prompts.REGION_EVAL, mask_prompts=(tiny.square(0, 0, 9, 9), tiny.square(30, 30, 60, 64))),
    Request(frames=tiny.clip(5).frames, text="<image>\nWho moves?"),
]


def pixels(prediction: Prediction) -> np.ndarray:
    return np.stack([[rle.decode(m) for m in masklet if m is not None] for masklet in prediction.masks])


@pytest.mark.slow
def test_a_batch_is_answered_as_its_requests_one_by_one(talker: Network):
    together = ask.predict(talker, REQUESTS, max_tokens=12, batch=len(REQUESTS))
    alone = [ask.predict(talker, [r], max_tokens=12, batch=1)[0] for r in REQUESTS]
    assert [p.text for p in together] == [p.text for p in alone]
    assert len({p.text for p in together}) > 3
    drawn = 0
    for one, other in zip(together, alone, strict=True):
        assert len(one.masks) == len(other.masks)
        if one.masks:
            drawn += 1
            assert (pixels(one) != pixels(other)).mean() < 1e-3
    assert drawn > 2


@pytest.mark.slow
def test_answers_come_in_the_order_of_the_questions_whatever_the_batches(talker: Network):
    expected = [p.text for p in ask.predict(talker, REQUESTS, max_tokens=8, batch=100)]
    assert [p.text for p in ask.predict(talker, REQUESTS[::-1], max_tokens=8, batch=2)] == expected[::-1]
    assert ask.predict(talker, [], max_tokens=8, batch=2) == []


@pytest.mark.slow
def test_there_is_a_masklet_for_every_seg_with_a_mask_for_every_frame(talker: Network):
    for request, prediction in zip(
        REQUESTS, ask.predict(talker, REQUESTS, max_tokens=12, batch=4), strict=True
    ):
        frames = len(request.frames)
        assert len(prediction.masks) == (prediction.text.count(prompts.SEG) if frames else 0)
        for masklet in prediction.masks:
            assert [m["size"] for m in masklet if m is not None] == [[64, 64]] * frames


def test_text_alone_is_answered_as_the_language_model_does(talker: Network):
    (answer,) = ask.predict(talker, [Request(frames=(), text="What is a square?")], max_tokens=6, batch=1)
    ids = talker.tokenizer.encode("<|im_start|>user\nWhat is a square?<|im_end|>\n<|im_start|>assistant\n")
    said: list[int] = []
    with torch.no_grad():
        for _ in range(6):
            logits = talker.internvl.lm_head(
                talker.internvl.model.language_model(input_ids=torch.tensor([ids + said])).last_hidden_state[
                    0, -1
                ]
            )
            logits[talker.image_token_id] = -torch.inf
            said.append(int(logits.argmax()))
            if said[-1] in stop_ids(talker):
                break
    assert answer.text == talker.tokenizer.decode(spoken_ids(talker, said))


def test_an_answer_ends_before_its_end_of_turn(own_model: Network):
    with torch.no_grad():  # every hidden state then prefers the stop word
        own_model.internvl.model.language_model.norm.weight.zero_()
        own_model.internvl.lm_head.weight.zero_()
    stop = own_model.tokenizer.convert_tokens_to_ids("<|im_end|>")
    own_model.internvl.lm_head.register_forward_hook(
        lambda m, i, o: o.index_fill(-1, torch.tensor([stop]), 1.0)
    )
    prompted = prompt(own_model, [REQUESTS[0]])
    assert generate(own_model, prompted, max_tokens=5) == [[stop]]
    assert ask.predict(own_model, [REQUESTS[0]], max_tokens=5, batch=1) == [Prediction(text="")]
    assert stop in stop_ids(own_model)
    before = stop_ids(own_model)
    own_model.tokenizer.unk_token = "<|endoftext|>"  # as of a Qwen2Tokenizer whose files don't name one
    assert stop_ids(own_model) == before
    assert own_model.tokenizer.unk_token_id in before


def test_an_answer_never_holds_an_image_token(own_model: Network):
    own_model.internvl.lm_head.register_forward_hook(
        lambda m, i, o: o.index_fill(-1, torch.tensor([own_model.image_token_id]), 99.0)
    )
    with torch.no_grad():
        found = generate(own_model, prompt(own_model, [REQUESTS[0]]), max_tokens=8)
    assert own_model.image_token_id not in {token for row in found for token in row}


@pytest.mark.parametrize(
    ("question", "shown"),
    [
        ("<image>\nPlease segment the red square.", ()),
        (prompts.REGION_EVAL, (tiny.square(0, 0, 40, 40), tiny.square(20, 20, 64, 64))),
    ],
)
def test_the_seg_embeddings_of_an_answer_are_those_of_training(
    talker: Network, question: str, shown: tuple[dict[str, object], ...]
):
    """The same words read as a training row: prompt, regions, positions and the place of `[SEG]` agree."""
    answer = "It is [SEG] and [SEG]."
    asked = Turn(
        question=question.removeprefix("<image>").removeprefix("\n"),
        answer=answer,
        regions=shown,
        masks=((tiny.square(0, 0, 8, 8),),) * 2,
    )
    batch = collate([tiny.row(asked)], talker.tokenizer, tiny.layout(talker))
    with torch.no_grad():
        hidden = talker.hidden_states(packed(batch), image_tokens(talker, batch.views).split(batch.views))
        trained = talker.seg_embeddings(hidden[(batch.input_ids == talker.seg_token_id) & batch.loss_mask])
        prompted = prompt(talker, [still(0, question, mask_prompts=shown)])
        (spoken,) = seg_embeddings_of(talker, prompted, [talker.tokenizer.encode(answer)])
    assert spoken.shape == (2, 32)
    assert (spoken - trained).abs().max() < 1e-5


def test_a_clip_is_asked_about_as_in_training(talker: Network):
    clip = tiny.clip(3)
    seen = talker.seen_frames(4)
    asked = Turn(question="Please segment it.", answer="[SEG]", masks=clip.masks)
    row = tiny.row(asked, frames=tuple(clip.frames[i] for i in seen), mask_frames=tuple(seen))
    batch = collate([row], talker.tokenizer, tiny.layout(talker))
    with torch.no_grad():
        hidden = talker.hidden_states(packed(batch), image_tokens(talker, batch.views).split(batch.views))
        trained = talker.seg_embeddings(hidden[(batch.input_ids == talker.seg_token_id) & batch.loss_mask])
        prompted = prompt(talker, [Request(frames=clip.frames, text="<image>\nPlease segment it.")])
        (spoken,) = seg_embeddings_of(talker, prompted, [talker.tokenizer.encode("[SEG]")])
    assert (spoken - trained).abs().max() < 1e-5


def test_an_image_is_a_clip_of_one_frame(talker: Network):
    images = transforms.normalise([transforms.open_image(tiny.picture(n)) for n in (0, 1)], size=64)
    prompt = torch.randn(3, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = talker.sam2.encode(images)
        image = talker.sam2.decode(features, torch.tensor([1, 1, 1]), prompt).logits
        clip = track(talker.sam2, talker.sam2.encode(images[1:]), prompt, conditioning=[0])
    assert (clip[:, 0] - image).abs().max() < 1e-4 * image.abs().max()


@pytest.mark.parametrize(
    ("frames", "choice", "seen"),
    [
        (1, "uniform", [0]),
        (2, "uniform", [0, 1]),
        (9, "uniform", [0, 4, 8]),
        (9, "first", [0, 1, 2]),
        (10, "uniform", [0, 4, 9]),
    ],
)
def test_the_language_model_sees_the_first_or_evenly_spread_frames(
    own_model: Network, frames: int, choice: str, seen: list[int]
):
    from dataclasses import replace

    own_model.config = replace(own_model.config, video_frames=3, frame_choice=choice)  # type: ignore[arg-type]
    assert own_model.seen_frames(frames) == seen


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (
            still(0, "Please segment it."),
            r"the text has 0 <image> for 1 frames: 'Please segment it.'; write it once",
        ),
        (still(0, "<image> <image> both"), "the text has 2 <image> for 1 frames"),
        (Request(frames=(), text="<image> what?"), "the text has 1 <image> for 0 frames"),
        (still(0, prompts.REGION_EVAL, mask_prompts=(rle.empty(64, 64),)), "a mask prompt is empty"),
        (
            still(0, prompts.REGION_EVAL, mask_prompts=(rle.encode(np.ones((64, 60), bool)),)),
            r"the mask prompt is \(64, 60\) \(height, width\), the image \(64, 64\)",
        ),
        (Request(frames=(b"no picture",), text="<image>"), "cannot read the image of 10 embedded bytes"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(tiny_model: Network, request_: Request, message: str):
    with pytest.raises(ValueError, match=message):
        ask.predict(tiny_model, [request_], max_tokens=2, batch=1)


def test_known_features_are_not_computed_again(talker: Network):
    calls: list[int] = []
    handle = talker.internvl.model.vision_tower.register_forward_hook(lambda m, i, o: calls.append(1))
    with torch.no_grad():
        features = encoded(talker, [visible(talker, [transforms.open_image(REQUESTS[0].frames[0])])])
        one, other = prompt(talker, REQUESTS[:1], features), prompt(talker, REQUESTS[:1])
    handle.remove()
    assert len(calls) == 2
    assert torch.equal(tiny.embeds_of(one), tiny.embeds_of(other))


def test_mask_logits_are_stretched_to_the_picture_and_cut_at_zero():
    """2 x 2 logits, right column positive: the border lies in the middle of any width."""
    logits = torch.tensor([[-1.0, 1.0], [-1.0, 1.0]])
    mask = upsample(logits, size=8, height=6, width=20)
    assert mask.shape == (6, 20)
    assert mask[:, 10:].all()
    assert not mask[:, :10].any()
    assert not upsample(torch.zeros(2, 2), size=8, height=4, width=4).any()  # exactly 0 is outside


@pytest.mark.slow
def test_questions_about_one_clip_are_drawn_in_one_pass_through_it(
    talker: Network, monkeypatch: pytest.MonkeyPatch
):
    clip, other = tiny.clip(0).frames, tiny.clip(1).frames
    asked = [
        Request(frames=f, text=f"<image>\nPlease segment {what}.")
        for what in ("this", "that one", "another")
        for f in (clip, other)
    ]
    track_frames: list[int] = []
    go = talker.sam2.propagate
    monkeypatch.setattr(
        talker.sam2,
        "propagate",
        lambda *given, objects, **rest: track_frames.append(objects) or go(*given, objects=objects, **rest),
    )
    together = ask.predict(talker, asked, max_tokens=12, batch=6)
    drawn = sum(len(p.masks) for p in together)
    assert len(track_frames) == len({r.frames for r, p in zip(asked, together, strict=True) if p.masks})
    assert sum(track_frames) == drawn > 2
    alone = [ask.predict(talker, [r], max_tokens=12, batch=1)[0] for r in asked]
    for one, single in zip(together, alone, strict=True):
        assert one.text == single.text
        assert all((pixels(a) != pixels(b)).mean() < 1e-3 for a, b in ((one, single),) if a.masks)


@pytest.mark.slow
def test_a_picture_that_several_requests_ask_about_is_encoded_once(
    talker: Network, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[str, int]] = []
    vision, sam = type(talker).vision_features, type(talker.sam2).encode
    monkeypatch.setattr(
        type(talker),
        "vision_features",
        lambda self, x: seen.append(("vision", sum(len(v.grids) for v in x))) or vision(self, x),
    )
    monkeypatch.setattr(
        type(talker.sam2), "encode", lambda self, x: seen.append(("sam", len(x))) or sam(self, x)
    )
    asked = [
        still(n % 2, prompts.REFERRING_EVAL.format(text=text))
        for n, text in enumerate(("the cat", "a dog", "it", "the sky", "a bird"))
    ]
    together = ask.predict(talker, asked, max_tokens=8, batch=8)
    tiles = sum(len(visible(talker, [transforms.open_image(asked[n].frames[0])]).grids) for n in (0, 1))
    assert seen == [("vision", tiles), ("sam", 2)]
    prompted = prompt(talker, asked)
    assert prompted.prefix_of.tolist() == [0, 1, 0, 1, 0]
    assert len(prompted.prefixes) == 2
    assert prompted.prefix_cache.get_seq_length() == prompted.prefixes.shape[1]
    alone = [ask.predict(talker, [a], max_tokens=8, batch=1)[0] for a in asked]
    assert [a.text for a in together] == [a.text for a in alone]
    assert all(a.masks for a in together)
    assert together == alone


def test_beginnings_are_read_beside_those_of_their_length(talker: Network, monkeypatch: pytest.MonkeyPatch):
    sizes: list[torch.Size] = []
    language = talker.internvl.model.language_model
    read = language.forward
    monkeypatch.setattr(
        language,
        "forward",
        lambda *a, inputs_embeds, **k: (
            sizes.append(inputs_embeds.shape[:2]) or read(inputs_embeds=inputs_embeds, **k)
        ),
    )
    with torch.no_grad():
        together = prompt(talker, REQUESTS)
        slots, tokens = sum(rows * width for rows, width in sizes), int(together.prefix_attention.sum())
        assert len(sizes) > 1
        assert tokens <= slots <= SIMILAR_LENGTH * tokens < together.prefix_attention.numel()
        for number, request in enumerate(REQUESTS):
            alone = prompt(talker, [request])
            row, length = together.prefix_of[number], alone.prefixes.shape[1]
            assert together.prefix_attention[row].sum() == length
            for layer, own in zip(together.prefix_cache.layers, alone.prefix_cache.layers, strict=True):
                assert (layer.keys[row, :, -length:] - own.keys[0]).abs().max() < 1e-5
                assert (layer.values[row, :, -length:] - own.values[0]).abs().max() < 1e-5


def test_the_public_import_is_the_front_on_the_network() -> None:
    from ans_core import model
    from ans_core.inference.sa2va import Sa2VA
    from ans_core.model.network import Network

    assert model.Sa2VA is Sa2VA
    assert issubclass(Sa2VA, Network)
    with pytest.raises(ImportError, match="Sa2VB"):
        from ans_core.model import Sa2VB  # noqa: F401


@pytest.mark.slow
def test_the_package_itself_imports_the_front_by_its_file() -> None:
    """A stage's hash of its code follows import statements, and `ans_core.model.Sa2VA` is imported by
    name."""
    package = Path(__file__).resolve().parents[2] / "ans_core"
    imports = [
        (file, node.module, {alias.name for alias in node.names})
        for file in package.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text("utf-8")))
        if isinstance(node, ast.ImportFrom)
    ]
    assert len(imports) > 1000
    assert [file for file, module, names in imports if module == "ans_core.model" and "Sa2VA" in names] == []
