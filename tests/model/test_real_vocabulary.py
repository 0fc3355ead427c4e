"""What a vocabulary of 300 words never meets: merges across words, 151,000 logits, stop words of several
tokens."""

from __future__ import annotations

import pytest
import torch

from ans_core import prompts
from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.inference.generation import cut_at_stop, stop_ids, stopping
from ans_core.inference.prefill import prompt
from ans_core.model import adapters
from ans_core.model.packing import Packed
from ans_core.model.supervised import Supervised
from ans_core.rl.rollout import Group, Reader, Segment, exact_head, pack, sample, token_logps
from tests import qwen_vocabulary, tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        qwen_vocabulary.file() is None,
        reason="Qwen's vocabulary is not here: pip install --no-deps dashscope",
    ),
]


def test_texts_come_back_and_frequent_words_are_one_token() -> None:
    tokenizer = qwen_vocabulary.tokenizer()
    text = "A jar of pickles; 2 naïve café-goers' dogs, 猫 and 🙂\n\n  (left of it)."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer) > 151_643
    assert [len(tokenizer.encode(word)) for word in (" segmentation", " picture", " the", "ing")] == [
        1,
        1,
        1,
        1,
    ]
    assert [tokenizer.convert_ids_to_tokens(i) for i in tokenizer.encode("It is [SEG].")][-2:] == [
        "[SEG]",
        ".",
    ]


def test_an_answer_is_the_same_tokens_whether_it_is_packed_or_asked_for() -> None:
    """Questions, regions and answers of a row are encoded part by part; a prompt is encoded whole, where
    merges might reach across."""
    model = qwen_vocabulary.model()
    turn = Turn(
        question="Please segment the dog's left ear.",
        answer="Sure, it is [SEG].",
        masks=((tiny.square(8, 8, 24, 24),),),
    )
    described = Turn(
        question="Describe region1.",
        answer=" a small, striped café chair",
        regions=(tiny.square(0, 0, 40, 40),),
    )
    batch = collate([tiny.row(turn, described, number=0, seed=0)], model.tokenizer, tiny.layout(model))
    learned = batch.input_ids[batch.learned[0], batch.learned[1]].tolist()
    suffix = prompts.TEMPLATES["qwen_chat"].suffix
    whole = [model.tokenizer.encode(text + suffix) for text in (turn.answer, described.answer)]
    assert learned in (whole[0] + whole[1], whole[1] + whole[0])
    assert (batch.input_ids == model.seg_token_id).sum() == 1
    module = Supervised(model, mask_weight=2.0, dice_weight=0.5, points=64)
    loss, metrics = module(batch)
    assert loss.isfinite()
    # the untrained model is uniform
    assert metrics["text"] == pytest.approx(torch.log(torch.tensor(float(model.vocabulary))).item(), rel=0.05)


def test_what_is_sampled_among_all_words_is_read_again_with_the_same_chances() -> None:
    model = qwen_vocabulary.model()
    policies = adapters.Policies(model, adapters.rl_config(rank=4, alpha=8, dropout=0.0, modules=[]), seed=0)
    exact_head(model)
    reader = Reader(temperature=1.0, forbidden=[model.image_token_id], guard="guard")
    samples = [tiny.region(i, "a red square") for i in range(2)]
    with torch.no_grad(), policies.using("policy"):
        prompted = prompt(model, [caption_request(s, true_mask(s)) for s in samples])
        answers = sample(model, prompted, group=4, max_tokens=12, reader=reader, seeds=range(8))
        ids = [i for answer in answers for i in answer.ids]
        assert len(set(ids)) > 80  # of 96 draws from 151,000 words nearly alike
        text = Segment(
            ids=tuple(model.tokenizer.encode("<|im_start|>user\nWhat?<|im_end|>\n")), trainable=False
        )
        last = Segment(ids=text.ids[-1:], trainable=False)
        group = Group(
            prefix=text.ids[:-1], rollouts=tuple((last, Segment(ids=a.ids, trainable=True)) for a in answers)
        )
        fields, rollout = pack([group], pad_id=model.tokenizer.pad_token_id)
        packed = Packed(**fields)
        logps, entropy = token_logps(model, packed, model.hidden_states(packed, [None]), reader)
    assert len(rollout) == len(ids)
    assert logps.isfinite().all()
    assert (entropy - torch.log(torch.tensor(float(model.vocabulary)))).abs().max() < 0.5


def test_a_stop_word_of_several_tokens_ends_an_answer_where_it_is_whole() -> None:
    """phi3_chat over Qwen's vocabulary, as Sa2VA-4B has it."""
    model = qwen_vocabulary.model("phi3_chat")
    stop = model.tokenizer.encode("<|end|>", add_special_tokens=False)
    assert len(stop) > 1
    assert not set(stop) & set(stop_ids(model))
    said = model.tokenizer.encode("A red cup")
    ids, complete = cut_at_stop(model, [*said, *stop, 11, 12])
    assert complete
    assert model.tokenizer.decode(ids).startswith("A red cup<|end|>")
    assert not cut_at_stop(model, [*said, *stop[:-1]])[1]
    ended = stopping(model)["ended"]
    assert ended([[*said, *stop], [*said, 5]]) == [True, False]
