"""Requests -> a PrefilledBatch: pictures encoded, prompts embedded, and their prefixes read by the language
model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor
from transformers import Cache

from ans_core import prompts
from ans_core.data.views import Views, shown_view, token_counts
from ans_core.inference.options import PredictOptions
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.types import Frames, Request

SIMILAR_LENGTH = 1.5
"""Prefixes share a batch while the longest is at most this many times as long as the shortest."""


@dataclass(frozen=True, kw_only=True)
class PrefilledBatch:
    """B requests that generation can continue. A prefix ends with the pictures; the language model has read
    it already, and requests about the same pictures share one of the P prefixes. The rest of each request is
    still unread. Both are padded on the left."""

    prefixes: Float[Tensor, "P K E"]
    prefix_attention: Bool[Tensor, "P K"]
    prefix_cache: Cache
    """Keys and values of the prefixes."""
    shift: Int[Tensor, " P"]
    """Rotary position minus number of a token that follows the prefix."""
    prefix_of: Int[Tensor, " B"]
    """Number of the prefix that a request begins with."""
    embeds: Float[Tensor, "B L E"]
    attention: Bool[Tensor, "B L"]
    segs: Bool[Tensor, "B L"]
    """Tokens of the request itself that draw a mask (`PromptForm.prompt_segs`)."""
    images: list[list[Image.Image]]
    unread: Int[Tensor, "*axes B L"] | None = None
    """Rotary positions of `embeds` where pictures may be among them, the last of which is text; None: they
    count on."""

    def cache(self, rows: Int[Tensor, " R"]) -> Cache:
        """Return a cache with one row per given prefix; continuing it leaves this batch as it is."""
        copied = copy.copy(self.prefix_cache)
        copied.layers = [copy.copy(layer) for layer in self.prefix_cache.layers]
        copied.batch_select_indices(rows)
        return copied

    def positions(self, attention: Bool[Tensor, "R L"], prefix: Int[Tensor, " R"]) -> Int[Tensor, "R L"]:
        """Return rotary positions of tokens after their prefix. `attention`: of the prefix and what follows
        it; the prefix's own positions, which are read by then, are not meaningful."""
        return order_of(attention) + self.shift[prefix, None]


def prompt(
    model: Network,
    requests: Sequence[Request],
    features: Sequence[ImageFeatures] | None = None,
    *,
    options: PredictOptions | None = None,
) -> PrefilledBatch:
    """Encode the pictures of all requests, embed their prompts and read the prefixes.

    `features`: each request's `vision_features` where they are known already; no picture is then encoded.
    Raises ValueError when a request has pictures but no `<image>` in its first question (of several pictures,
    one each), or the other way round, when the frames of a clip differ in size, a mask prompt is empty, of
    another size than the picture, of none or of several, and when the text is longer than the context.
    """
    options = options or PredictOptions()
    if model.backbone.prompt_form(options.preparation).pictures_first:
        requests = [_pictures_first(request) for request in requests]
    opened = {
        frames: [transforms.open_image(ref) for ref in frames]
        for frames in dict.fromkeys(r.frames for r in requests)
    }
    for request in requests:
        _check(request, opened[request.frames])
    shown = {_view(r): r for r in requests if r.frames}
    if features is None:
        views = [visible(model, opened[r.frames], options, clip=r.is_clip) for r in shown.values()]
        features_of = dict(zip(shown, encoded(model, views), strict=True))
    else:
        features_of = {_view(r): row_features for r, row_features in zip(requests, features, strict=True)}
    images = {view: model.project(features_of[view]) for view in shown}
    rows = [_embedded(model, request, images.get(_view(request)), options) for request in requests]
    places: dict[object, int] = {}
    begins = [(_view(request), row.ids[: row.prefix]) for request, row in zip(requests, rows, strict=True)]
    prefix_of = [places.setdefault(begin, len(places)) for begin in begins]
    begun = [rows[prefix_of.index(place)] for place in range(len(places))]
    prefixes = left_padded([row.embeds[: row.prefix] for row in begun])
    rest = left_padded([row.embeds[row.prefix :] for row in rows])
    segs = torch.zeros_like(rest["attention"])
    if model.backbone.prompt_form(options.preparation).prompt_segs:
        unread = [token for row in rows for token in row.ids[row.prefix :]]
        segs[rest["attention"]] = torch.tensor(unread, device=model.device) == model.seg_token_id
    return PrefilledBatch(
        prefixes=prefixes["embeds"],
        prefix_attention=prefixes["attention"],
        prefix_cache=_prefill(model, begun),
        shift=torch.tensor([row.shift for row in begun], device=model.device),
        prefix_of=torch.tensor(prefix_of, device=model.device),
        segs=segs,
        images=[opened[r.frames] for r in requests],
        **rest,
    )


def _pictures_first(request: Request) -> Request:
    """Move `<image>` to the start of its turn; without any it is put into the first turn. A text alone loses
    it. Several pictures stay where they are."""
    if request.stills:
        return request
    questions = [*(question for question, _ in request.past), request.text]
    at = next((place for place, question in enumerate(questions) if "<image>" in question), 0)
    questions = [question.replace("<image>", "") for question in questions]
    if request.frames:
        questions[at] = "<image>" + questions[at]
    past = tuple(
        (question, answer) for question, (_, answer) in zip(questions[:-1], request.past, strict=True)
    )
    return replace(request, text=questions[-1], past=past)


def _check(request: Request, pictures: Sequence[Image.Image]) -> None:
    """Raise ValueError for a request that makes no sense."""
    full_text = "".join(question + answer for question, answer in request.past) + request.text
    wanted = len(pictures) if request.stills else int(bool(pictures))
    if (marks := full_text.count("<image>")) != wanted:
        raise ValueError(
            f"the text has {marks} <image> for {len(pictures)} "
            f"{'pictures' if request.stills else 'frames'}: {request.text[:60]!r}; write it "
            f"{'once for each' if request.stills else 'once'}, or give no frames"
        )
    if request.stills and request.mask_prompts:
        raise ValueError("mask prompts are of one picture, and the question has several; ask about one")
    if request.is_clip and len({picture.size for picture in pictures}) > 1:
        sizes = sorted({f"{p.width} x {p.height}" for p in pictures})
        raise ValueError(f"the frames of a clip differ in size ({', '.join(sizes)}); bring them to one size")
    if request.mask_prompts and not pictures:
        raise ValueError(
            f"{len(request.mask_prompts)} mask prompts without a picture: {request.text[:60]!r}; give the "
            "picture they are in"
        )
    for mask in request.mask_prompts:
        decoded = rle.decode(mask)
        if decoded.shape != (size := pictures[0].size[::-1]):
            raise ValueError(
                f"the mask prompt is {decoded.shape} (height, width), the image {size}; give masks of the "
                "image's size"
            )
        if not decoded.any():
            raise ValueError("a mask prompt is empty; there is no region to ask about")


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One request's tokens, embedded."""

    ids: tuple[int, ...]
    prefix: int
    """Length of its prefix."""
    embeds: Float[Tensor, "L E"]
    positions: Int[Tensor, "*axes 1 L"]

    @property
    def shift(self) -> int:
        return int(self.positions[..., -1].max()) - len(self.ids) + 1


def _embedded(model: Network, request: Request, image: ImageFeatures | None, options: PredictOptions) -> _Row:
    template, form, marks = (
        prompts.TEMPLATES[model.config.template],
        model.backbone.prompt_form(options.preparation),
        model.backbone.marks,
    )
    text = "".join(
        template.user.format(input=q.strip()) + a + template.suffix + template.separator
        for q, a in request.past
    )
    text = form.before + text + template.user.format(input=request.text.strip())
    regions = []
    if image is not None:
        grid = image.grids[shown_view(image.pictures)]
        largest = options.tiny_regions == "largest"
        regions = [
            transforms.grid_cells(rle.decode(m), grid=grid, largest=largest).to(model.device)
            for m in request.mask_prompts
        ]
        region_text = prompts.region_text([int(r.sum()) for r in regions], marks)
        counts = token_counts(image.grids, image.pictures)
        for shown in [[count] for count in counts] if request.stills else [counts]:
            pictures = prompts.image_text(shown, marks, between=form.between_frames)
            text = text.replace("<image>", pictures + region_text, 1)
    ids = model.tokenizer.encode(text)
    if len(ids) >= (limit := model.vlm.config.text_config.max_position_embeddings):
        raise ValueError(
            f"{len(ids)} tokens, pictures included, in a context of {limit}: {request.text[:60]!r}; use a "
            "shorter text"
        )
    tensor = torch.tensor([ids], device=model.device)
    return _Row(
        ids=tuple(ids),
        prefix=1
        if image is None
        else len(ids) - ids[::-1].index(model.tokenizer.convert_tokens_to_ids(marks.end)),
        embeds=model.embed(tensor, [image], [regions])[0],
        positions=model.positions(tensor, torch.arange(len(ids), device=model.device)[None], [image]),
    )


def _view(request: Request) -> tuple[Frames, bool]:
    """Return what decides the pictures that the language model sees; requests with equal views share them."""
    return request.frames, request.is_clip


def _prefill(model: Network, rows: Sequence[_Row]) -> Cache:
    """Compute keys and values of the rows' prefixes, padded on the left. Rows of similar length share a
    batch: otherwise a line of text would cost as much as the tiled picture beside it."""
    alike: list[list[int]] = []
    for number in sorted(range(len(rows)), key=lambda i: rows[i].prefix):
        if alike and rows[number].prefix <= SIMILAR_LENGTH * rows[alike[-1][0]].prefix:
            alike[-1].append(number)
        else:
            alike.append([number])
    caches: list[Any] = []
    for numbers in alike:
        padded = left_padded([rows[i].embeds[: rows[i].prefix] for i in numbers])
        length = padded["attention"].shape[1]
        begins = [
            F.pad(rows[i].positions[..., : rows[i].prefix], (length - rows[i].prefix, 0)) for i in numbers
        ]
        _, cache = model.backbone.language_model(
            padded["embeds"],
            attention_mask=padded["attention"].long(),
            position_ids=torch.cat(begins, dim=-2),
        )
        caches.append(cache)
    order = torch.tensor([i for numbers in alike for i in numbers], device=model.device).argsort()
    merged = caches[-1]  # of the longest rows
    for number, layer in enumerate(merged.layers):
        layer.keys = _stacked([cache.layers[number].keys for cache in caches])[order]
        layer.values = _stacked([cache.layers[number].values for cache in caches])[order]
    return merged


def _stacked(parts: Sequence[Float[Tensor, "_ H _ d"]]) -> Float[Tensor, "P H K d"]:
    """Concatenate, padded on the left to the length of the last part."""
    return torch.cat([F.pad(part, (0, 0, parts[-1].shape[2] - part.shape[2], 0)) for part in parts])


def order_of(attention: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    """Number the tokens of rows that are padded on the left."""
    return (attention.cumsum(1) - 1).clamp(min=0)


def read_ahead(model: Network, prompted: PrefilledBatch) -> PrefilledBatch:
    """Read all but the last token of every request once; return a batch whose cache holds them. Every answer
    then reads the last token itself."""
    if prompted.embeds.shape[1] == 1:
        return prompted
    begun, length = prompted.prefix_of, prompted.prefixes.shape[1]
    attention = torch.cat([prompted.prefix_attention[begun], prompted.attention], dim=1)
    unread = prompted.positions(attention, begun)[:, length:] if prompted.unread is None else prompted.unread
    _, cache = model.backbone.language_model(
        prompted.embeds[:, :-1],
        attention_mask=attention[:, :-1].long(),
        position_ids=unread[..., :-1],
        cache=prompted.cache(begun),
    )
    assert cache is not None
    last = unread[..., -1].reshape(-1, len(begun))[0]  # of text: the same in all rows of positions
    return PrefilledBatch(
        prefixes=torch.cat([prompted.prefixes[begun], prompted.embeds[:, :-1]], dim=1),
        prefix_attention=attention[:, :-1],
        prefix_cache=cache,
        shift=last - order_of(attention)[:, -1],
        prefix_of=torch.arange(len(begun), device=begun.device),
        embeds=prompted.embeds[:, -1:],
        attention=prompted.attention[:, -1:],
        segs=prompted.segs[:, -1:],
        images=prompted.images,
    )


def encoded(model: Network, views: Sequence[Views]) -> list[ImageFeatures]:
    """Compute the vision features of every row's views in one batch."""
    views = [view.to(model.device) for view in views]
    return model.vision_features(views).split(views) if views else []


def visible(
    model: Network,
    pictures: Sequence[Image.Image],
    options: PredictOptions | None = None,
    *,
    clip: bool = False,
) -> Views:
    """Return what the language model sees of an image, of several, or of the chosen frames of a clip."""
    options = options or PredictOptions()
    seen = [pictures[i] for i in options.seen_frames(model, len(pictures))] if clip else pictures
    return model.backbone.cutter.views(seen, clip=clip, preparation=options.preparation)


def left_padded(rows: Sequence[Float[Tensor, "_ E"]]) -> dict[str, Tensor]:
    """Stack rows of different lengths to embeds (B, L, D) and attention (B, L), padded on the left."""
    length = max(len(r) for r in rows)
    embeds = torch.stack([F.pad(r, (0, 0, length - len(r), 0)) for r in rows])
    attention = torch.tensor(
        [[False] * (length - len(r)) + [True] * len(r) for r in rows], device=embeds.device
    )
    return {"embeds": embeds, "attention": attention}
