"""Requests -> predictions: batched greedy generation, then one pass over what was said for the masks of its `[SEG]` tokens."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from ans_core import prompts, rle, transforms
from ans_core.model.sa2va import Sa2VA, VideoMode
from ans_core.types import ImageRef, Masklet, Prediction, Request


@dataclass(frozen=True, kw_only=True)
class Prompted:
    """B requests as left-padded embeddings, ready to be continued."""

    embeds: Float[Tensor, "B L D"]
    attention: Bool[Tensor, "B L"]
    images: list[list[Image.Image]]


def predict(
    model: Sa2VA, requests: Sequence[Request], *, max_tokens: int, batch: int, video_mode: Literal[VideoMode, "auto"] = "auto"
) -> list[Prediction]:
    """Same order as asked. Requests are batched with their like (images; questions about one picture or clip), `batch` at a time; what a
    batch asks of one picture is encoded once.

    Raises ValueError for a request that makes no sense (see `prompt`), and as `Sa2VA.video_mode` does."""
    mode = model.video_mode(video_mode)
    place = {frames: number for number, frames in enumerate(dict.fromkeys(r.frames for r in requests))}
    order = sorted(range(len(requests)), key=lambda i: (len(requests[i].frames), place[requests[i].frames], len(requests[i].text)))
    found: dict[int, Prediction] = {}
    for start in range(0, len(order), batch):
        chosen = order[start : start + batch]
        answers = predict_batch(model, [requests[i] for i in chosen], max_tokens=max_tokens, mode=mode)
        found.update(zip(chosen, answers, strict=True))
    return [found[i] for i in range(len(requests))]


@torch.no_grad()
def predict_batch(model: Sa2VA, requests: Sequence[Request], *, max_tokens: int, mode: VideoMode) -> list[Prediction]:
    prompted = prompt(model, requests, mode=mode)
    ids = [said(model, row) for row in generate(model, prompted, max_tokens=max_tokens)]
    texts = [text_of(model, row) for row in ids]
    embeddings = spoken_segs(model, prompted, ids)
    masks = draw(model, [r.frames for r in requests], prompted.images, embeddings, mode)
    return [Prediction(text=t, masks=m) for t, m in zip(texts, masks, strict=True)]


def prompt(model: Sa2VA, requests: Sequence[Request], features: Sequence[Tensor] | None = None, *, mode: VideoMode = "sa2va") -> Prompted:
    """`features`: each request's `vision_features` where they are known already; no picture is then encoded.

    Raises ValueError when a request has pictures but no `<image>` in its text, or the other way round."""
    template = prompts.TEMPLATES[model.config.template]
    opened = {frames: [transforms.open_image(ref) for ref in frames] for frames in dict.fromkeys(r.frames for r in requests)}
    tiles = {frames: seen_tiles(model, pictures, mode) for frames, pictures in opened.items()}
    if features is None:
        known = dict(zip(tiles, vision_features(model, list(tiles.values())), strict=True))
    else:
        known = {request.frames: seen for request, seen in zip(requests, features, strict=True)}
    projected = {frames: model.project(seen) for frames, seen in known.items() if frames}
    embeds = []
    for request in requests:
        pictures, cut = opened[request.frames], tiles[request.frames]
        if (marks := request.text.count("<image>")) != bool(pictures):
            raise ValueError(
                f"the text has {marks} <image> for {len(pictures)} frames: {request.text[:60]!r}; write it once, or give no frames"
            )
        regions = [_cells(model, m, pictures[0]) for m in request.mask_prompts]
        image = prompts.image_text(len(cut) * model.grid**2) if len(pictures) == 1 else prompts.image_text(model.grid**2, len(cut))
        text = request.text.replace("<image>", image + prompts.region_text([int(r.sum()) for r in regions]))
        ids = torch.tensor(model.tokenizer.encode(template.user.format(input=text.strip())), device=model.device)
        if pictures:
            embeds.append(model.embed(ids[None], [projected[request.frames]], [regions])[0])
        else:
            embeds.append(model.internvl.get_input_embeddings()(ids))
    return Prompted(images=[opened[r.frames] for r in requests], **left_padded(embeds))


def vision_features(model: Sa2VA, tiles: Sequence[Sequence[Image.Image]]) -> list[Tensor]:
    """Vision features of every request's tiles, all pictures in one batch (an empty tensor for text alone)."""
    flat = [tile for row in tiles for tile in row]
    if not flat:
        return [torch.zeros(0, device=model.device)] * len(tiles)
    found = model.vision_features(transforms.normalise(flat, size=model.tile_size).to(model.device))
    return list(found.split([len(row) for row in tiles]))


def seen_tiles(model: Sa2VA, pictures: list[Image.Image], mode: VideoMode = "sa2va") -> list[Image.Image]:
    """An image is tiled; of a clip the language model sees the chosen frames, a tile each."""
    if not pictures:
        return []
    if len(pictures) == 1:
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


def generate(model: Sa2VA, prompted: Prompted, *, max_tokens: int, samples: int = 0, temperature: float = 1.0) -> list[list[int]]:
    """Token ids of every answer, its end-of-turn token included where it came to one. samples = G > 0 draws G per row
    from torch's generator.

    Never says IMG_CONTEXT: no picture could fill its slot when the answer is read again.
    """
    stops = stop_ids(model)
    sampling = {"do_sample": True, "num_return_sequences": samples, "temperature": temperature, "top_p": 1.0, "top_k": 0} if samples else {}
    out = model.internvl.generate(
        inputs_embeds=prompted.embeds,
        attention_mask=prompted.attention.long(),
        max_new_tokens=max_tokens,
        eos_token_id=stops,
        pad_token_id=model.tokenizer.pad_token_id,
        suppress_tokens=[model.image_token_id],
        **({"do_sample": False} | sampling),
    )
    return [next((row[: i + 1] for i, token in enumerate(row) if token in stops), row) for row in out.tolist()]


def stop_ids(model: Sa2VA) -> list[int]:
    ids: Any = model.tokenizer.convert_tokens_to_ids(list(prompts.TEMPLATES[model.config.template].stop_words))
    return [i for i in ids if i is not None and i != model.tokenizer.unk_token_id]


def text_of(model: Sa2VA, ids: list[int]) -> str:
    """Special tokens kept."""
    text = model.tokenizer.decode(ids)
    assert isinstance(text, str)
    return text


def said(model: Sa2VA, ids: list[int]) -> list[int]:
    """The answer without its end-of-turn token."""
    return ids[:-1] if ids and ids[-1] in stop_ids(model) else ids


def spoken_segs(model: Sa2VA, prompted: Prompted, ids: list[list[int]]) -> list[Float[Tensor, "_ C"]]:
    """Seg embeddings of every row (N = its `[SEG]`s), from one forward pass over prompt + answer: the states that training sees."""
    rows = [i for i, row in enumerate(ids) if model.seg_token_id in row]
    empty = torch.zeros(0, model.config.grounding.width, device=model.device)
    found = [empty] * len(ids)
    if not rows:
        return found
    table = model.internvl.get_input_embeddings()
    whole = [torch.cat([prompted.embeds[i][prompted.attention[i]], table(torch.tensor(ids[i], device=model.device))]) for i in rows]
    padded = left_padded(whole)
    mask = padded["attention"]
    hidden = model.internvl.model.language_model(
        inputs_embeds=padded["embeds"], attention_mask=mask.long(), position_ids=(mask.cumsum(1) - 1).clamp(min=0), use_cache=False
    ).last_hidden_state
    for place, i in enumerate(rows):
        answer = hidden[place, -len(ids[i]) :]
        found[i] = model.seg_embeddings(answer[torch.tensor(ids[i], device=model.device) == model.seg_token_id])
    return found


def draw(
    model: Sa2VA,
    frames: Sequence[tuple[ImageRef, ...]],
    images: list[list[Image.Image]],
    embeddings: list[Float[Tensor, "_ C"]],
    mode: VideoMode,
) -> list[tuple[Masklet, ...]]:
    """Masklets of every row: images in one batch, clips one after the other through the memory, each with the objects of all its rows. A
    picture that several rows ask about is encoded once."""
    masks: list[tuple[Masklet, ...]] = [()] * len(images)
    stills = [i for i, e in enumerate(embeddings) if len(e) and len(images[i]) == 1]
    if stills:
        shown = {frames[i]: images[i][0] for i in stills}
        place = {key: number for number, key in enumerate(shown)}
        pixels = transforms.normalise(list(shown.values()), size=model.sam2.image_size).to(model.device)
        frame = torch.tensor([place[frames[i]] for i in stills for _ in embeddings[i]], device=model.device)
        logits = model.sam2.decode(model.sam2.encode(pixels), frame, torch.cat([embeddings[i] for i in stills])).logits
        for i, own in zip(stills, logits.split([len(embeddings[i]) for i in stills]), strict=True):
            masks[i] = tuple((_binary(model, z, images[i][0]),) for z in own)
    clips: dict[tuple[ImageRef, ...], list[int]] = defaultdict(list)
    for i, embedding in enumerate(embeddings):
        if len(embedding) and len(images[i]) > 1:
            clips[frames[i]].append(i)
    for rows in clips.values():
        pictures, objects = images[rows[0]], [embeddings[i] for i in rows]
        logits = track(model, pictures, torch.cat(objects), mode)
        for i, own in zip(rows, logits.split([len(o) for o in objects]), strict=True):
            masks[i] = tuple(tuple(_binary(model, z, pictures[0]) for z in masklet) for masklet in own)
    return masks


def track(model: Sa2VA, pictures: list[Image.Image], seg_embeddings: Float[Tensor, "N C"], mode: VideoMode) -> Float[Tensor, "N F h4 w4"]:
    """Low-resolution mask logits of N objects in every frame of a clip.

    Mode `sa2va-i`: the seen frames are decoded each alone, as in training, and their masks, at the pictures' size, prompt the original
    SAM2 (kumuji/Sa2VA-i).
    """
    features = model.sam2.encode(transforms.normalise(pictures, size=model.sam2.image_size).to(model.device))
    seen = model.seen_frames(len(pictures), mode)
    if mode == "sa2va":
        return model.sam2.track(features, seg_embeddings, conditioning=seen)
    frame = torch.tensor(seen, device=model.device).repeat(len(seg_embeddings))
    alone = model.sam2.decode(features, frame, seg_embeddings.repeat_interleave(len(seen), dim=0)).logits
    masks = F.interpolate(alone[None], size=(pictures[0].height, pictures[0].width), mode="bilinear")[0] > 0
    with model.sam2.original():
        return model.sam2.track_masks(features, masks.unflatten(0, (-1, len(seen))), conditioning=seen)


def _binary(model: Sa2VA, logits: Float[Tensor, "h w"], picture: Image.Image) -> dict[str, object]:
    return rle.encode(upsample(logits, size=model.sam2.image_size, height=picture.height, width=picture.width))


def upsample(logits: Float[Tensor, "h w"], *, size: int, height: int, width: int) -> Bool[np.ndarray, "H W"]:
    """Upstream's two bilinear steps (to the model's square, then to the picture) and its threshold sigmoid > 0.5."""
    square = F.interpolate(logits[None, None].float(), size=(size, size), mode="bilinear", align_corners=False)
    return (F.interpolate(square, size=(height, width), mode="bilinear", align_corners=False)[0, 0] > 0).cpu().numpy()
