"""Requests -> predictions: batched greedy generation, then one pass over what was said for the masks of its `[SEG]` tokens."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor
from transformers import Cache

from ans_core import media, prompts, rle, transforms
from ans_core.model.config import VideoMode
from ans_core.model.masks import VideoOptions, decode_masks, stream_masks, upsample
from ans_core.model.sa2va import Sa2VA
from ans_core.types import RLE, ImageRef, Prediction, Request

Found = TypeVar("Found")

Region = np.ndarray | Tensor | Image.Image | RLE
"""A mask prompt; what is not 0 is in it."""

SIMILAR_LENGTH = 1.5
"""Beginnings are read in one batch while the longest is at most so many times the shortest."""


@dataclass(frozen=True, kw_only=True)
class PrefilledBatch:
    """B requests, ready to be continued: P prefixes (up to the end of the pictures), which the language model has read already and which
    requests about the same pictures share, and the rest of every request. Both are padded on the left."""

    prefixes: Float[Tensor, "P K D"]
    prefix_attention: Bool[Tensor, "P K"]
    prefix_cache: Cache
    """Keys and values of the prefixes."""
    prefix_of: Int[Tensor, " B"]
    """Which of them a request begins with."""
    embeds: Float[Tensor, "B L D"]
    attention: Bool[Tensor, "B L"]
    images: list[list[Image.Image]]

    def row(self, number: int) -> Float[Tensor, "_ D"]:
        """A whole request, without padding."""
        start = int(self.prefix_of[number])
        return torch.cat([self.prefixes[start][self.prefix_attention[start]], self.embeds[number][self.attention[number]]])

    def cache(self, rows: Int[Tensor, " R"]) -> Cache:
        """Keys and values of these prefixes, one row each, free to be continued."""
        own = copy.copy(self.prefix_cache)
        own.layers = [copy.copy(layer) for layer in self.prefix_cache.layers]
        own.batch_select_indices(rows)
        return own

    def generate_inputs(self, rows: Int[Tensor, " R"]) -> dict[str, Any]:
        """What transformers' `generate` goes on from, for these requests."""
        start = self.prefix_of[rows]
        return {
            "inputs_embeds": torch.cat([self.prefixes[start], self.embeds[rows]], dim=1),
            "attention_mask": torch.cat([self.prefix_attention[start], self.attention[rows]], dim=1).long(),
            "past_key_values": self.cache(start),
        }


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a model says and draws: N `[SEG]` in F frames of H x W pixels. About text alone it draws nothing, whatever it says."""

    text: str
    """Special tokens kept; the end-of-turn token cut."""
    mask_logits: Float[Tensor, "N F h4 w4"]
    """SAM2's, at its low resolution."""
    seg_embeddings: Float[Tensor, "_ C"]
    """Of every `[SEG]`."""
    size: tuple[int, int]
    """H, W."""
    square: int
    """Side of the pictures that SAM2 saw."""

    @cached_property
    def masks(self) -> list[Bool[np.ndarray, "F H W"]]:
        """One array per `[SEG]`, in the order of the text."""
        height, width = self.size
        return [np.stack([upsample(z, size=self.square, height=height, width=width) for z in one]) for one in self.mask_logits]

    def prediction(self) -> Prediction:
        return Prediction(text=self.text, masks=tuple(tuple(rle.encode(mask) for mask in one) for one in self.masks))


def request_of(
    *,
    text: str,
    image: media.Picture | None = None,
    video: str | Path | Sequence[media.Picture] | None = None,
    past: Sequence[tuple[str, str]] | None = None,
    mask_prompts: Sequence[Region] | np.ndarray | None = None,
) -> Request:
    """video: a file, a folder of frames, or the frames. mask_prompts: each (H, W), or (N, H, W) as upstream has them, of what numpy takes,
    or RLE. None is nothing, as for upstream. Raises ValueError for a picture and a video at once, and for what is none of these."""
    shots = media.held(Path(video)) if isinstance(video, (str, Path)) else tuple(media.reference(p) for p in video or ())
    if image is not None and shots:
        raise ValueError("an image and a video at once; ask about one of them")
    if isinstance(past, str):
        raise ValueError("past is a text; give the turns before as (question, answer) pairs, without the template's tokens")
    return Request(
        frames=shots if image is None else (media.reference(image),),
        text=text,
        mask_prompts=() if mask_prompts is None else tuple(region for given in mask_prompts for region in _regions(given)),
        past=tuple(past or ()),
        clip=bool(shots),
    )


def _regions(given: Region) -> list[RLE]:
    if isinstance(given, dict):
        height, width = given["size"]
        return [rle.from_annotation(given, height=height, width=width, where="mask_prompts")]
    masks = np.asarray(given)
    if masks.ndim not in (2, 3):
        raise ValueError(f"a mask prompt of shape {masks.shape}; give a list of (height, width) or (N, height, width), or of RLE")
    return [rle.encode(mask != 0) for mask in masks.reshape(-1, *masks.shape[-2:])]


def predict(
    model: Sa2VA, requests: Sequence[Request], *, max_tokens: int, batch: int, video_mode: Literal[VideoMode, "auto"] = "auto"
) -> list[Prediction]:
    """`answers` as benchmarks want them, masks as RLE."""
    options = VideoOptions(mode=model.video_mode(video_mode))
    return in_batches(requests, batch, lambda some: [a.prediction() for a in answers(model, some, options, max_tokens=max_tokens)])


def in_batches(requests: Sequence[Request], batch: int, ask: Callable[[list[Request]], list[Found]]) -> list[Found]:
    """What `ask` gives for all requests, in their order, asked `batch` at a time: each with its like (images; questions about one picture
    or clip), since what a batch asks of one picture is encoded once."""
    place = {frames: number for number, frames in enumerate(dict.fromkeys(r.frames for r in requests))}
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].frames), place[requests[i].frames], len(requests[i].text)))
    found: dict[int, Found] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        found.update(zip(chosen, ask([requests[i] for i in chosen]), strict=True))
    return [found[i] for i in range(len(requests))]


@torch.no_grad()
def answers(model: Sa2VA, requests: Sequence[Request], options: VideoOptions, *, max_tokens: int) -> list[Answer]:
    """All requests in one batch. Raises ValueError for one that makes no sense (see `prompt`)."""
    with model.own_precision():
        prompted = prompt(model, requests, mode=options.mode)
        ids = [spoken_ids(model, row) for row in generate(model, prompted, max_tokens=max_tokens)]
        embeddings = seg_embeddings_of(model, prompted, ids)
        logits = decode_masks(model, requests, prompted.images, embeddings, options)
    return [
        Answer(
            text=text_of(model, row),
            mask_logits=masks,
            seg_embeddings=embedding.float(),
            size=(pictures[0].height, pictures[0].width) if pictures else (0, 0),
            square=model.sam2.image_size,
        )
        for row, masks, embedding, pictures in zip(ids, logits, embeddings, prompted.images, strict=True)
    ]


@torch.no_grad()
def follow(
    model: Sa2VA, request: Request, options: VideoOptions, *, max_tokens: int
) -> tuple[str, Iterator[tuple[int, Bool[np.ndarray, "N H W"]]]]:
    """As `answers`, for one clip of any length: the text, then (index, masks of its N `[SEG]`) frame by frame in order of time. Frames are
    opened when they are needed, and forgotten; masks of the seen frames wait for their turn. Without `[SEG]` there are no frames."""
    seen = model.seen_frames(len(request.frames), options.mode)
    with model.own_precision():
        prompted = prompt(model, [replace(request, frames=tuple(request.frames[index] for index in seen), clip=True)])
        (ids,) = [spoken_ids(model, row) for row in generate(model, prompted, max_tokens=max_tokens)]
        (embeddings,) = seg_embeddings_of(model, prompted, [ids])
    return text_of(model, ids), stream_masks(model, request.frames, embeddings, options)


def prompt(
    model: Sa2VA, requests: Sequence[Request], features: Sequence[Tensor] | None = None, *, mode: VideoMode = "sa2va"
) -> PrefilledBatch:
    """`features`: each request's `vision_features` where they are known already; no picture is then encoded.

    Raises ValueError when a request has pictures but no `<image>` in its first question, or the other way round, when the frames of a clip
    differ in size, a mask prompt is empty, of another size than the picture or of none, and when the text is longer than the context.
    """
    template = prompts.TEMPLATES[model.config.template]
    opened = {frames: [transforms.open_image(ref) for ref in frames] for frames in dict.fromkeys(r.frames for r in requests)}
    tiles = {seen: visible_tiles(model, opened[seen[0]], mode, clip=seen[1]) for seen in dict.fromkeys(map(_view, requests))}
    if features is None:
        known = dict(zip(tiles, vision_features(model, list(tiles.values())), strict=True))
    else:
        known = {_view(request): given for request, given in zip(requests, features, strict=True)}
    projected = {seen: model.project(found) for seen, found in known.items() if seen[0]}
    embeds, lengths, prefix_of = [], [], []
    places: dict[object, int] = {}
    image_end = model.tokenizer.convert_tokens_to_ids(prompts.IMG_END)
    for request in requests:
        pictures, cut = opened[request.frames], tiles[_view(request)]
        text = "".join(template.user.format(input=q.strip()) + a + template.suffix + template.separator for q, a in request.past)
        text += template.user.format(input=request.text.strip())
        if (marks := text.count("<image>")) != bool(pictures):
            raise ValueError(
                f"the text has {marks} <image> for {len(pictures)} frames: {request.text[:60]!r}; write it once, or give no frames"
            )
        if len({picture.size for picture in pictures}) > 1:
            sizes = sorted({f"{p.width} x {p.height}" for p in pictures})
            raise ValueError(f"the frames of a clip differ in size ({', '.join(sizes)}); bring them to one size")
        if request.mask_prompts and not pictures:
            raise ValueError(
                f"{len(request.mask_prompts)} mask prompts without a picture: {request.text[:60]!r}; give the picture they are in"
            )
        regions = [_cells(model, m, pictures[0]) for m in request.mask_prompts]
        image = prompts.image_text(model.grid**2, len(cut)) if request.is_clip else prompts.image_text(len(cut) * model.grid**2)
        text = text.replace("<image>", image + prompts.region_text([int(r.sum()) for r in regions]))
        ids = model.tokenizer.encode(text)
        if len(ids) >= (limit := model.internvl.config.text_config.max_position_embeddings):
            raise ValueError(f"{len(ids)} tokens, pictures included, in a context of {limit}: {request.text[:60]!r}; use a shorter text")
        tensor = torch.tensor(ids, device=model.device)
        if pictures:
            embeds.append(model.embed(tensor[None], [projected[_view(request)]], [regions], clips=[request.is_clip])[0])
        else:
            embeds.append(model.internvl.get_input_embeddings()(tensor))
        lengths.append(len(ids) - ids[::-1].index(image_end) if pictures else 1)
        prefix_of.append(places.setdefault((_view(request), tuple(ids[: lengths[-1]])), len(places)))
    first = [prefix_of.index(place) for place in range(len(places))]
    begun = [embeds[i][: lengths[i]] for i in first]
    prefixes = left_padded(begun)
    return PrefilledBatch(
        prefixes=prefixes["embeds"],
        prefix_attention=prefixes["attention"],
        prefix_cache=_prefill(model, begun),
        prefix_of=torch.tensor(prefix_of, device=model.device),
        images=[opened[r.frames] for r in requests],
        **left_padded([e[n:] for e, n in zip(embeds, lengths, strict=True)]),
    )


def _view(request: Request) -> tuple[tuple[ImageRef, ...], bool]:
    """What the language model sees: requests that agree in it share it."""
    return request.frames, request.is_clip


def _prefill(model: Sa2VA, rows: Sequence[Float[Tensor, "_ D"]]) -> Cache:
    """Keys and values of rows, padded on the left. Each is read beside those of its length: a line of text beside a tiled picture would
    cost as much as the picture."""
    alike: list[list[int]] = []
    for number in sorted(range(len(rows)), key=lambda i: len(rows[i])):
        if alike and len(rows[number]) <= SIMILAR_LENGTH * len(rows[alike[-1][0]]):
            alike[-1].append(number)
        else:
            alike.append([number])
    caches = []
    for numbers in alike:
        padded = left_padded([rows[i] for i in numbers])
        read = model.internvl.model.language_model(
            inputs_embeds=padded["embeds"],
            attention_mask=padded["attention"].long(),
            position_ids=_positions(padded["attention"]),
            use_cache=True,
        )
        caches.append(read.past_key_values)
    order = torch.tensor([i for numbers in alike for i in numbers], device=model.device).argsort()
    whole = caches[-1]  # of the longest rows
    for number, layer in enumerate(whole.layers):
        layer.keys = _stacked([cache.layers[number].keys for cache in caches])[order]
        layer.values = _stacked([cache.layers[number].values for cache in caches])[order]
    return whole


def _stacked(parts: Sequence[Float[Tensor, "_ H _ d"]]) -> Float[Tensor, "P H K d"]:
    """Padded on the left to the length of the last."""
    return torch.cat([F.pad(part, (0, 0, parts[-1].shape[2] - part.shape[2], 0)) for part in parts])


def _positions(attention: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    return (attention.cumsum(1) - 1).clamp(min=0)


def vision_features(model: Sa2VA, tiles: Sequence[Sequence[Image.Image]]) -> list[Tensor]:
    """Vision features of every request's tiles, all pictures in one batch (an empty tensor for text alone)."""
    flat = [tile for row in tiles for tile in row]
    if not flat:
        return [torch.zeros(0, device=model.device)] * len(tiles)
    found = model.vision_features(transforms.normalise(flat, size=model.tile_size).to(model.device))
    return list(found.split([len(row) for row in tiles]))


def visible_tiles(model: Sa2VA, pictures: list[Image.Image], mode: VideoMode = "sa2va", *, clip: bool = False) -> list[Image.Image]:
    """An image is tiled; of a clip the language model sees the chosen frames, a tile each."""
    if not pictures:
        return []
    if not clip:
        return transforms.tiles(pictures[0], size=model.tile_size, max_tiles=model.config.max_tiles)
    return [pictures[i] for i in model.seen_frames(len(pictures), mode)]


def _cells(model: Sa2VA, mask: dict[str, object], picture: Image.Image) -> Bool[Tensor, "grid grid"]:
    decoded = rle.decode(mask)
    if decoded.shape != picture.size[::-1]:
        raise ValueError(
            f"the mask prompt is {decoded.shape} (height, width), the image {picture.size[::-1]}; give masks of the image's size"
        )
    if not decoded.any():
        raise ValueError("a mask prompt is empty; there is no region to ask about")
    return transforms.grid_cells(decoded, grid=model.grid).to(model.device)


def left_padded(rows: Sequence[Float[Tensor, "_ D"]]) -> dict[str, Tensor]:
    """Rows of different lengths as embeds (B, L, D) and attention (B, L), padding on the left."""
    length = max(len(r) for r in rows)
    embeds = torch.stack([F.pad(r, (0, 0, length - len(r), 0)) for r in rows])
    attention = torch.tensor([[False] * (length - len(r)) + [True] * len(r) for r in rows], device=embeds.device)
    return {"embeds": embeds, "attention": attention}


def generate(model: Sa2VA, prompted: PrefilledBatch, *, max_tokens: int) -> list[list[int]]:
    """Token ids of every answer, by greedy search, its end-of-turn token included where it came to one.

    Never says IMG_CONTEXT: no picture could fill its slot when the answer is read again.
    """
    out = model.internvl.generate(
        **prompted.generate_inputs(torch.arange(len(prompted.embeds), device=model.device)),
        **stopping(model),
        max_new_tokens=max_tokens,
        suppress_tokens=[model.image_token_id],
        do_sample=False,
    )
    return [cut_at_stop(model, row)[0] for row in out.tolist()]


def stop_ids(model: Sa2VA) -> list[int]:
    """The tokenizer's end of text, and the template's stop words that are a token."""
    tokenizer = model.tokenizer
    ids: Any = tokenizer.convert_tokens_to_ids(
        [w for w in prompts.TEMPLATES[model.config.template].stop_words if w not in _stop_texts(model)]
    )
    return sorted({*ids, tokenizer.eos_token_id} - {None, tokenizer.unk_token_id})


def _stop_texts(model: Sa2VA) -> list[str]:
    """The template's stop words that are several tokens: those of `phi3_chat` for Sa2VA-4B's Qwen tokenizer."""
    words = prompts.TEMPLATES[model.config.template].stop_words
    return [word for word in words if len(model.tokenizer.encode(word, add_special_tokens=False)) > 1]


def stopping(model: Sa2VA) -> dict[str, Any]:
    """For transformers' `generate`: where an answer ends."""
    texts = _stop_texts(model)
    words = {"stop_strings": texts, "tokenizer": model.tokenizer} if texts else {}
    return {"eos_token_id": stop_ids(model), "pad_token_id": model.tokenizer.pad_token_id, **words}


def cut_at_stop(model: Sa2VA, ids: list[int]) -> tuple[list[int], bool]:
    """Generated ids up to the end of the answer, what ends it included, and whether it came to one."""
    stops, texts = stop_ids(model), _stop_texts(model)

    def holds_stop(length: int) -> bool:
        told = str(model.tokenizer.decode(ids[:length]))
        return any(text in told for text in texts)

    by_text = bisect_left(range(len(ids)), True, key=lambda place: holds_stop(place + 1)) if texts else len(ids)
    end = next((place for place, token in enumerate(ids[:by_text]) if token in stops), by_text)
    return ids[: end + 1], end < len(ids)


def text_of(model: Sa2VA, ids: list[int]) -> str:
    """Special tokens kept; a stop word that is several tokens is cut from the end."""
    text = model.tokenizer.decode(ids)
    assert isinstance(text, str)
    for stop in _stop_texts(model):
        text = text.removesuffix(stop)
    return text


def spoken_ids(model: Sa2VA, ids: list[int]) -> list[int]:
    """The answer without its end-of-turn token. (One of several tokens stays: its first may hold the answer's last letters.)"""
    return ids[:-1] if ids and ids[-1] in stop_ids(model) else ids


def seg_embeddings_of(model: Sa2VA, prompted: PrefilledBatch, ids: list[list[int]]) -> list[Float[Tensor, "_ C"]]:
    """Seg embeddings of every row (N = its `[SEG]`s), from one forward pass over prompt + answer: the states that training sees."""
    rows = [i for i, row in enumerate(ids) if model.seg_token_id in row]
    empty = torch.zeros(0, model.config.grounding.width, device=model.device)
    found = [empty] * len(ids)
    if not rows:
        return found
    table = model.internvl.get_input_embeddings()
    rest = left_padded(
        [torch.cat([prompted.embeds[i][prompted.attention[i]], table(torch.tensor(ids[i], device=model.device))]) for i in rows]
    )
    begun = prompted.prefix_of[rows]
    attention = torch.cat([prompted.prefix_attention[begun], rest["attention"]], dim=1)
    hidden = model.internvl.model.language_model(
        inputs_embeds=rest["embeds"],
        attention_mask=attention.long(),
        position_ids=_positions(attention)[:, prompted.prefixes.shape[1] :],
        past_key_values=prompted.cache(begun),
        use_cache=True,
    ).last_hidden_state
    for place, i in enumerate(rows):
        answer = hidden[place, -len(ids[i]) :]
        found[i] = model.seg_embeddings(answer[torch.tensor(ids[i], device=model.device) == model.seg_token_id])
    return found
