"""Requests -> answers: batched greedy generation, then one pass over the answers for the masks of their
`[SEG]` tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from ans_core import dist
from ans_core.inference.generation import cut_at_stop, generate, seg_embeddings_of, spoken_ids, text_of
from ans_core.inference.options import PredictOptions
from ans_core.inference.prefill import PrefilledBatch, prompt
from ans_core.inference.video import stream_masks, track
from ans_core.model.config import VideoMode
from ans_core.model.masks import upsample
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.types import Frames, ImageRef, Predict, Prediction, Request

Output = TypeVar("Output")


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A text and the masks of its N `[SEG]` tokens in F frames of H x W pixels. A request without pictures
    gets no masks."""

    text: str
    """With special tokens, without the end-of-turn token."""
    mask_logits: Float[Tensor, "N F h4 w4"]
    """At SAM2's low resolution."""
    seg_embeddings: Float[Tensor, "_ C"]
    """One row per `[SEG]` token."""
    size: tuple[int, int]
    """(H, W)."""
    square: int
    """Side of SAM2's input picture."""
    truncated: bool = False
    """Whether max_tokens cut the text."""

    @cached_property
    def masks(self) -> list[Bool[np.ndarray, "F H W"]]:
        """Resize the logits to the picture and threshold them: one array per `[SEG]`, in the order of the
        text."""
        height, width = self.size
        return [
            np.stack([upsample(z, size=self.square, height=height, width=width) for z in one])
            for one in self.mask_logits
        ]

    def prediction(self) -> Prediction:
        return Prediction(
            text=self.text, masks=tuple(tuple(rle.encode(mask) for mask in one) for one in self.masks)
        )


@dataclass(frozen=True, kw_only=True)
class ClipAnswer:
    """A text and the masks of its N `[SEG]` tokens as they are found: (index of the frame, masks). Unpacks into
    these two."""

    text: str
    masks: Iterator[tuple[int, Bool[np.ndarray, "N H W"]]]
    truncated: bool
    """Whether max_tokens cut the text."""

    def __iter__(self) -> Iterator[Any]:
        return iter((self.text, self.masks))


def predict(
    model: Network,
    requests: Sequence[Request],
    *,
    max_tokens: int,
    batch: int,
    video_mode: Literal[VideoMode, "auto"] = "auto",
) -> list[Prediction]:
    """Answer requests in batches, with masks as RLE: what benchmarks call."""
    options = PredictOptions(mode=model.video_mode(video_mode))
    return in_batches(
        requests,
        batch,
        lambda some: [a.prediction() for a in answers(model, some, options, max_tokens=max_tokens)],
    )


def in_batches(
    requests: Sequence[Request],
    batch: int,
    ask: Callable[[list[Request]], list[Output]],
    *,
    shared: bool = False,
) -> list[Output]:
    """Call `ask` on `batch` requests at a time and return all results in the order of the requests. Requests
    about one picture or clip are put into one batch where possible, since a batch encodes each picture once.
    shared: the batches are divided among all processes."""
    order = alike(requests)
    ordered = [requests[i] for i in order]
    if shared:
        results = dist.by_turns(ordered, batch, lambda some: ask(list(some)))
    else:
        results = [
            one for start in range(0, len(ordered), batch) for one in ask(ordered[start : start + batch])
        ]
    by_request = dict(zip(order, results, strict=True))
    return [by_request[i] for i in range(len(requests))]


def alike(requests: Sequence[Request]) -> list[int]:
    """Return the places of the requests in an order in which neighbours cost alike: by frames, by picture or
    clip, by length."""
    place = {frames: number for number, frames in enumerate(dict.fromkeys(r.frames for r in requests))}
    return sorted(
        range(len(requests)),
        key=lambda i: (len(requests[i].frames), place[requests[i].frames], len(requests[i].text)),
    )


def on_all_processes(ask: Callable[..., list[Prediction]], batch: int) -> Predict:
    """Return what answers requests in batches, of which this process has `ask` answer every n-th. Which
    requests share a batch does not depend on the number of processes, so neither does an answer. All
    processes must ask the same."""
    return lambda requests: in_batches(
        requests, batch, lambda some: list(ask(some, batch=batch)), shared=True
    )


@torch.no_grad()
def answers(
    model: Network, requests: Sequence[Request], options: PredictOptions, *, max_tokens: int
) -> list[Answer]:
    """Answer all requests in one batch. Raises ValueError for a request that makes no sense (see
    `prompt`)."""
    with model.inference_autocast():
        prompted = prompt(model, requests, options=options)
        generated = generate(model, prompted, max_tokens=max_tokens)
    return answers_of(model, requests, prompted, generated, options)


@torch.no_grad()
def answers_of(
    model: Network,
    requests: Sequence[Request],
    prompted: PrefilledBatch,
    generated: Sequence[Sequence[int]],
    options: PredictOptions,
) -> list[Answer]:
    """Turn the token ids said to one batch's requests into answers, and draw their masks."""
    with model.inference_autocast():
        ids = [spoken_ids(model, list(row)) for row in generated]
        embeddings = seg_embeddings_of(model, prompted, ids)
        logits = decode_masks(model, requests, prompted.images, embeddings, options)
    return [
        Answer(
            text=text_of(model, row),
            mask_logits=masks,
            seg_embeddings=embedding.float(),
            size=(pictures[0].height, pictures[0].width) if pictures else (0, 0),
            square=model.sam2.image_size,
            truncated=not cut_at_stop(model, list(said))[1],
        )
        for said, row, masks, embedding, pictures in zip(
            generated, ids, logits, embeddings, prompted.images, strict=True
        )
    ]


@torch.no_grad()
def follow(
    model: Network, request: Request, frames: Sequence[ImageRef], options: PredictOptions, *, max_tokens: int
) -> ClipAnswer:
    """Answer a request about one clip of any length; its masks come in order of time.

    `request` comes without frames. Each of `frames` is read when it is needed and then dropped; only the seen
    ones are kept (in mode `keyframe` all are, and the masks come after the last). The iterator is empty if
    the text has no `[SEG]`.
    """
    seen = {index: frames[index] for index in options.seen_frames(model, len(frames))}
    with model.inference_autocast():
        prompted = prompt(model, [replace(request, frames=tuple(seen.values()), clip=True)], options=options)
        (generated,) = generate(model, prompted, max_tokens=max_tokens)
        ids = spoken_ids(model, generated)
        (embeddings,) = seg_embeddings_of(model, prompted, [ids])
    masks = stream_masks(
        model, len(frames), lambda index: seen.get(index) or frames[index], embeddings, options
    )
    return ClipAnswer(text=text_of(model, ids), masks=masks, truncated=not cut_at_stop(model, generated)[1])


def decode_masks(
    model: Network,
    requests: Sequence[Request],
    images: list[list[Image.Image]],
    embeddings: list[Float[Tensor, "_ C"]],
    options: PredictOptions,
) -> list[Float[Tensor, "N F h4 w4"]]:
    """Decode the low-resolution mask logits of every row. Pictures are decoded in one batch, clips one after
    the other with the objects of all their rows. A picture that several rows ask about is encoded once. In
    several pictures of one row nothing is drawn: which one `[SEG]` means, the text does not say."""
    side = model.sam2.image_size // 4
    masks = [torch.zeros(0, len(pictures), side, side, device=model.device) for pictures in images]
    frames = [request.frames for request in requests]
    with_segs = [i for i, e in enumerate(embeddings) if len(e) and images[i] and not requests[i].stills]
    if stills := [i for i in with_segs if not requests[i].is_clip]:
        still_masks = decode_stills(
            model,
            [frames[i] for i in stills],
            [images[i][0] for i in stills],
            [embeddings[i] for i in stills],
            options,
        )
        for i, row_masks in zip(stills, still_masks, strict=True):
            masks[i] = row_masks
    clips: dict[Frames, list[int]] = defaultdict(list)
    for i in with_segs:
        if requests[i].is_clip:
            clips[frames[i]].append(i)
    for rows in clips.values():
        objects = [embeddings[i] for i in rows]
        logits = track(model, images[rows[0]], torch.cat(objects), options)
        for i, row_masks in zip(rows, logits.split([len(o) for o in objects]), strict=True):
            masks[i] = row_masks
    return masks


def decode_stills(
    model: Network,
    pictures: Sequence[Frames],
    images: Sequence[Image.Image],
    embeddings: Sequence[Float[Tensor, "_ C"]],
    options: PredictOptions,
) -> list[Float[Tensor, "N 1 h4 w4"]]:
    """Decode low-resolution mask logits of all rows in one batch. Rows with equal `pictures` show the same
    image, which is encoded once."""
    shown = dict(zip(pictures, images, strict=True))
    place = {key: number for number, key in enumerate(shown)}
    features = model.sam2.encode(options.pixels(model, list(shown.values())))
    frame = torch.tensor(
        [
            place[key]
            for key, row_embeddings in zip(pictures, embeddings, strict=True)
            for _ in row_embeddings
        ],
        device=model.device,
    )
    logits = model.sam2.shown(model.sam2.decode(features, frame, torch.cat(list(embeddings))))
    return [row_masks[:, None] for row_masks in logits.split([len(e) for e in embeddings])]
