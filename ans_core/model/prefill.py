"""Requests -> a PrefilledBatch: pictures encoded, prompts embedded, and their prefixes read by the language model."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor
from transformers import Cache

from ans_core import prompts, rle, transforms
from ans_core.model.options import PredictOptions
from ans_core.model.sa2va import Sa2VA
from ans_core.types import Frames, Request

SIMILAR_LENGTH = 1.5
"""Prefixes share a batch while the longest is at most this many times as long as the shortest."""


@dataclass(frozen=True, kw_only=True)
class PrefilledBatch:
    """B requests that generation can continue. A prefix ends with the pictures; the language model has read it already, and requests about
    the same pictures share one of the P prefixes. The rest of each request is still unread. Both are padded on the left."""

    prefixes: Float[Tensor, "P K D"]
    prefix_attention: Bool[Tensor, "P K"]
    prefix_cache: Cache
    """Keys and values of the prefixes."""
    prefix_of: Int[Tensor, " B"]
    """Number of the prefix that a request begins with."""
    embeds: Float[Tensor, "B L D"]
    attention: Bool[Tensor, "B L"]
    images: list[list[Image.Image]]

    def row(self, number: int) -> Float[Tensor, "_ D"]:
        """Return a whole request without padding."""
        start = int(self.prefix_of[number])
        return torch.cat([self.prefixes[start][self.prefix_attention[start]], self.embeds[number][self.attention[number]]])

    def cache(self, rows: Int[Tensor, " R"]) -> Cache:
        """Return a cache with one row per given prefix; continuing it leaves this batch as it is."""
        own = copy.copy(self.prefix_cache)
        own.layers = [copy.copy(layer) for layer in self.prefix_cache.layers]
        own.batch_select_indices(rows)
        return own

    def generate_inputs(self, rows: Int[Tensor, " R"]) -> dict[str, Any]:
        """Return the arguments from which transformers' `generate` continues these requests."""
        start = self.prefix_of[rows]
        return {
            "inputs_embeds": torch.cat([self.prefixes[start], self.embeds[rows]], dim=1),
            "attention_mask": torch.cat([self.prefix_attention[start], self.attention[rows]], dim=1).long(),
            "past_key_values": self.cache(start),
        }


def prompt(
    model: Sa2VA, requests: Sequence[Request], features: Sequence[Tensor] | None = None, *, options: PredictOptions | None = None
) -> PrefilledBatch:
    """Encode the pictures of all requests, embed their prompts and read the prefixes.

    `features`: each request's `vision_features` where they are known already; no picture is then encoded.
    Raises ValueError when a request has pictures but no `<image>` in its first question, or the other way round, when the frames of a clip
    differ in size, a mask prompt is empty, of another size than the picture or of none, and when the text is longer than the context.
    """
    options = options or PredictOptions()
    template = prompts.TEMPLATES[model.config.template]
    opened = {frames: [transforms.open_image(ref) for ref in frames] for frames in dict.fromkeys(r.frames for r in requests)}
    tiles = {seen: visible_tiles(model, opened[seen[0]], options, clip=seen[1]) for seen in dict.fromkeys(map(_view, requests))}
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
        regions = [_cells(model, m, pictures[0], options) for m in request.mask_prompts]
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


def _view(request: Request) -> tuple[Frames, bool]:
    """Return what decides the pictures that the language model sees; requests with equal views share them."""
    return request.frames, request.is_clip


def _prefill(model: Sa2VA, rows: Sequence[Float[Tensor, "_ D"]]) -> Cache:
    """Compute keys and values of rows, padded on the left. Rows of similar length share a batch: otherwise a line of text would cost as
    much as the tiled picture beside it."""
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
            position_ids=positions(padded["attention"]),
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
    """Concatenate, padded on the left to the length of the last part."""
    return torch.cat([F.pad(part, (0, 0, parts[-1].shape[2] - part.shape[2], 0)) for part in parts])


def positions(attention: Bool[Tensor, "B L"]) -> Int[Tensor, "B L"]:
    return (attention.cumsum(1) - 1).clamp(min=0)


def vision_features(model: Sa2VA, tiles: Sequence[Sequence[Image.Image]]) -> list[Tensor]:
    """Compute the vision features of every request's tiles in one batch; an empty tensor for text alone."""
    flat = [tile for row in tiles for tile in row]
    if not flat:
        return [torch.zeros(0, device=model.device)] * len(tiles)
    found = model.vision_features(transforms.normalise(flat, size=model.tile_size).to(model.device))
    return list(found.split([len(row) for row in tiles]))


def visible_tiles(
    model: Sa2VA, pictures: list[Image.Image], options: PredictOptions | None = None, *, clip: bool = False
) -> list[Image.Image]:
    """Return what the language model sees: the tiles of an image, or the chosen frames of a clip, each as one tile."""
    if not pictures:
        return []
    if not clip:
        return transforms.tiles(pictures[0], size=model.tile_size, max_tiles=model.config.max_tiles)
    return [pictures[i] for i in (options or PredictOptions()).seen_frames(model, len(pictures))]


def _cells(model: Sa2VA, mask: dict[str, object], picture: Image.Image, options: PredictOptions) -> Bool[Tensor, "grid grid"]:
    decoded = rle.decode(mask)
    if decoded.shape != picture.size[::-1]:
        raise ValueError(
            f"the mask prompt is {decoded.shape} (height, width), the image {picture.size[::-1]}; give masks of the image's size"
        )
    if not decoded.any():
        raise ValueError("a mask prompt is empty; there is no region to ask about")
    return transforms.grid_cells(decoded, grid=model.grid, largest=options.tiny_regions == "largest").to(model.device)


def left_padded(rows: Sequence[Float[Tensor, "_ D"]]) -> dict[str, Tensor]:
    """Stack rows of different lengths to embeds (B, L, D) and attention (B, L), padded on the left."""
    length = max(len(r) for r in rows)
    embeds = torch.stack([F.pad(r, (0, 0, length - len(r), 0)) for r in rows])
    attention = torch.tensor([[False] * (length - len(r)) + [True] * len(r) for r in rows], device=embeds.device)
    return {"embeds": embeds, "attention": attention}
