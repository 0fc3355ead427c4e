"""Rollouts as tokens: packed groups of questions and answers in, hidden states of the active adapter out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from ans_core import prompts
from ans_core.benchmarks.loops import expression_of
from ans_core.data.branches import branch_places
from ans_core.data.collate import conversation_ids, prefix_ids
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.packing import Packed
from ans_core.pictures import rle, transforms
from ans_core.rl.batch import EncodedBatch, FramePart
from ans_core.rl.rollout import Group, Rollout, Segment, pack
from ans_core.rl.step import RolloutStep
from ans_core.types import RLE

MASK_ANSWER = prompts.REFERRING_ANSWERS[0]
"""Teacher-forced: the policy explores the mask, not the words around `[SEG]`."""


def group_of(step: EncodedBatch, index: int, rollouts: Sequence[Rollout]) -> Group:
    """Make a group of rollouts that share the sample's picture."""
    tokens, marks = step.batch.views[index].tokens, step.model.backbone.marks
    prefix = prefix_ids(
        step.model.tokenizer, template=step.model.config.template, frame_tokens=tokens, marks=marks
    )
    return Group(prefix=tuple(prefix), rollouts=tuple(rollouts))


def answers_of(step: EncodedBatch, index: int, question: Segment, answers: Sequence[Segment]) -> Group:
    """Make a group of rollouts that share the picture and the question."""
    picture = group_of(step, index, ())
    last = replace(question, ids=question.ids[-1:])
    return Group(
        prefix=picture.prefix + question.ids[:-1], rollouts=tuple((last, answer) for answer in answers)
    )


def question_segment(
    step: EncodedBatch, text: str, cells: Sequence[int] = (), past: Sequence[tuple[str, str]] = ()
) -> Segment:
    """Return the question, after earlier questions and answers, as a given segment. The first question
    comes without `<image>`."""
    turns, model = (*past, (text, "")), step.model
    *asked, _ = conversation_ids(
        model.tokenizer, turns, template=model.config.template, cells=cells, marks=model.backbone.marks
    )
    return Segment(ids=tuple(token for part in asked for token in part), trainable=False)


def referring_rollout(step: EncodedBatch, text: str) -> Rollout:
    """Return the question for the object that `text` means, and the answer that draws it."""
    question = prompts.referring_question(expression_of(text), prompts.REFERRING_QUESTIONS[1])
    answer = MASK_ANSWER + prompts.TEMPLATES[step.model.config.template].suffix
    ids = step.model.tokenizer.encode(answer, add_special_tokens=False)
    return question_segment(step, question), Segment(ids=tuple(ids), trainable=True)


def region_cells(step: EncodedBatch, index: int, mask: RLE) -> Bool[Tensor, "h w"]:
    return transforms.grid_cells(rle.decode(mask), grid=step.batch.views[index].shown)


def hidden_states(
    step: EncodedBatch,
    groups: Sequence[Group],
    regions: list[list[Tensor]],
    observed: Sequence[list[ImageFeatures]] = (),
) -> tuple[Packed, Float[Tensor, "B L D"], Int[Tensor, " M"]]:
    """Return packed tokens, their hidden states under the active adapter, and the rollout of every
    trainable token. observed: tokens of each sample's observed pictures (`observed_features`)."""
    multiple = step.model.length_multiple
    tokens, rollout = pack(groups, pad_id=step.model.tokenizer.pad_token_id or 0, multiple=multiple)
    device = step.model.device
    packed = Packed(
        **dict[str, Any](tokens),
        places=branch_places(tokens["branch"], multiple=multiple),
        regions=regions,
    ).to(device)
    asked = [step.model.project(v) for v in step.encoded.vision]
    return (
        packed,
        step.model.hidden_states(packed, asked, observed),
        rollout.to(device),
    )


def observed_features(step: RolloutStep, parts: Sequence[Sequence[FramePart]]) -> list[list[ImageFeatures]]:
    """Return the image tokens of each sample's observed pictures."""
    found = []
    for chosen, own in zip(step.batch.samples, parts, strict=True) if parts else ():
        assert step.practice is not None, "rollouts with pictures, and nothing that encodes them"
        features = step.practice.encode([(chosen.frames[frame], box) for frame, box in own])
        found.append([step.model.project(f) for f in features])
    return found
