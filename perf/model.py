"""What answering together saves: ratios of times, measured in turns in one run.

    python perf/model.py [--model runs/tiny/model] [--repeats 5] [--device cpu] [--dtype float32] [--side 128]
    python perf/model.py --random sa2va-4b --side 896 --device cuda --dtype bfloat16

1. k = 8 expressions about one picture, together and one by one.
2. Eight requests, one of every kind (pictures, regions, a clip, plain text), together and one by one.
3. Twelve of each kind, every kind in a batch of its own, and all one by one: what batching can give at most.
4. Three objects through a clip of 16 frames: as here, every frame encoded once and the objects side by side;
   and as upstream's
   algorithm has it, one object after the other, the frames encoded anew for each and the conditioning frames once more for the memory.

And per second of the eight together: tokens and masks; at last the most memory that was held. `--random`: a
published size with random weights, which need no download. What such a model says is nonsense, so its head is
made to say `[SEG]` as every answer's second word.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import time
from collections.abc import Callable

import numpy as np
import torch
from PIL import Image

from ans_core import prompts
from ans_core.checkpoints import checkpoint, published
from ans_core.data.clips import draw_clip
from ans_core.data.scenes import draw_scene
from ans_core.inference import predict as ask
from ans_core.inference.options import PredictOptions
from ans_core.inference.requests import request_of
from ans_core.inference.sa2va import Sa2VA
from ans_core.inference.video import track
from ans_core.model.grounding import in_order
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.types import Request

FRAMES, OBJECTS, LIKE, LONGEST = 16, 3, 12, 24
THINGS = (
    "red circle",
    "blue square",
    "green star",
    "large one",
    "small one",
    "striped one",
    "leftmost one",
    "one at the top",
)


def seconds(*ways: Callable[[], object], repeats: int) -> list[list[float]]:
    """Of every way, in turns; a first turn is not counted."""
    found: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        for times, way in zip(found, ways, strict=True):
            start_s = time.perf_counter()
            way()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn:
                times.append(time.perf_counter() - start_s)
    return found


def told(what: str, fast: list[float], slow: list[float]) -> None:
    ratios = [b / a for a, b in zip(fast, slow, strict=True)]
    print(
        f"{what}: {statistics.median(fast):.3f} s against {statistics.median(slow):.3f} s,"
        f" {statistics.median(ratios):.2f} times as fast ({min(ratios):.2f} to {max(ratios):.2f})",
        flush=True,
    )


def random_model(name: str, *, device: str, dtype: torch.dtype) -> Network:
    """Of a published size. It ends no answer by itself, and says `[SEG]` as the second word."""
    model = published.build_meta(name)
    shapes = {key: tensor.shape for key, tensor in model.state_dict().items()}
    drawn = ((key, torch.randn(shape, dtype=dtype, device=device) * 0.02) for key, shape in shapes.items())
    checkpoint.fill(model, drawn, where=name, device=device)
    model.norms_in_fp32()
    words = torch.zeros((), dtype=torch.long, device=device)  # counted there: decoding replays a graph

    def say(head: torch.nn.Module, given: object, logits: torch.Tensor) -> torch.Tensor:
        second = words % LONGEST == 1
        words.add_(1)
        logits = logits.clone()
        logits[..., model.seg_token_id] = torch.where(second, 1e4, -1e4).to(logits.dtype)
        return logits

    model.vlm.lm_head.register_forward_hook(say)
    return model.eval()


def mixed(side: int, number: int = 0) -> list[Request]:
    """One of every kind; other pictures with every number."""
    scenes = [draw_scene(seed=7, split="val", index=6 * number + i, image_size=side) for i in range(6)]
    clip = draw_clip(seed=7, split="val", index=number, image_size=side, frames=6)
    regions = [[rle.encode(mask) for mask in scene.masks] for scene in scenes]
    dot = np.zeros((side, side), bool)
    dot[side // 2, side // 2] = True
    segment = prompts.REFERRING_EVAL.format(text="the red circle")
    return [
        request_of(image=scenes[0].image, text=segment),
        request_of(image=scenes[1].image, text=prompts.GROUNDED_EVAL),
        request_of(image=scenes[2].image, text=prompts.REGION_EVAL, mask_prompts=regions[2][:1]),
        request_of(image=scenes[3].image, text=prompts.REGION_EVAL, mask_prompts=regions[3][:2]),
        request_of(image=scenes[4].image, text=prompts.REGION_EVAL, mask_prompts=[dot]),
        request_of(
            image=scenes[5].image, text="Please segment the large one.", past=[(segment, "Sure, [SEG].")]
        ),
        request_of(text="What is a circle?"),
        request_of(video=list(clip.frames), text=prompts.VIDEO_EVAL.format(text="the moving circle")),
    ]


def as_upstream(model: Network, pictures: list, embeddings: torch.Tensor, way: PredictOptions) -> int:
    """Returns the number of frames that the image encoder saw."""
    passes = 0
    for embedding in embeddings:
        frames = [*range(len(pictures)), *model.seen_frames(len(pictures), way.mode)]
        pixels = way.pixels(model, pictures)
        encoded = [model.sam2.encode(pixels[[i]]) for i in frames][: len(pictures)]
        passes += len(frames)
        clicks = model.sam2.seg_prompts(embedding[None], model.seen_frames(len(pictures), way.mode))
        shown = ((i, encoded[i]) for i in in_order(clicks, len(pictures)))
        for _ in model.sam2.propagate(shown, clicks, objects=1, frames=len(pictures)):
            pass
    return passes


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="runs/tiny/model")
    options.add_argument("--repeats", type=int, default=5)
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype", default="float32")
    options.add_argument(
        "--random",
        choices=sorted(published.PUBLISHED),
        help="a published size with random weights, instead of --model",
    )
    options.add_argument("--side", type=int, default=128, help="of pictures, in pixels")
    given = options.parse_args()
    dtype = getattr(torch, given.dtype)
    if given.random:
        model = random_model(given.random, device=given.device, dtype=dtype)
    else:
        model = Sa2VA.from_pretrained(given.model, dtype=dtype, device_map=given.device)
    size = sum(p.numel() for p in model.parameters())
    print(
        f"{given.random or given.model}, {size:,} parameters, {given.device}, {torch.get_num_threads()} "
        "threads"
    )
    way = PredictOptions()

    def together(requests: list[Request]) -> None:
        ask.answers(model, requests, way, max_tokens=LONGEST)

    def apart(requests: list[Request]) -> None:
        for request in requests:
            together([request])

    picture = draw_scene(seed=7, split="val", index=9, image_size=given.side).image
    eight = [request_of(image=picture, text=prompts.REFERRING_EVAL.format(text=text)) for text in THINGS]
    told(
        "8 expressions of one picture",
        *seconds(lambda: together(eight), lambda: apart(eight), repeats=given.repeats),
    )
    every = mixed(given.side)
    at_once, one_by_one = seconds(lambda: together(every), lambda: apart(every), repeats=given.repeats)
    told("8 requests of every kind", at_once, one_by_one)
    answers = ask.answers(model, every, way, max_tokens=LONGEST)
    tokens = (
        len(every) * LONGEST
        if given.random
        else sum(len(model.tokenizer.encode(answer.text)) for answer in answers)
    )
    masks = sum(len(answer.mask_logits) * answer.mask_logits.shape[1] for answer in answers)
    took_s = statistics.median(at_once)
    print(
        f"8 requests of every kind: {tokens / took_s:.0f} tokens/s, {masks / took_s:.1f} masks/s (a "
        "frame's counts as one)",
        flush=True,
    )
    kinds = [list(kind) for kind in zip(*(mixed(given.side, number) for number in range(LIKE)), strict=True)]

    def by_kind() -> None:
        for kind in kinds:
            together(kind)

    def all_apart() -> None:
        for kind in kinds:
            apart(kind)

    told(f"{LIKE} of each kind, a batch a kind", *seconds(by_kind, all_apart, repeats=given.repeats))

    frames = [
        Image.fromarray(f)
        for f in draw_clip(seed=7, split="val", index=3, image_size=given.side, frames=FRAMES).frames
    ]
    embeddings = torch.from_numpy(
        np.random.default_rng(0).standard_normal((OBJECTS, model.config.grounding.width), np.float32)
    )
    embeddings = embeddings.to(model.device, model.text_hidden_fcs[0].weight.dtype)
    with torch.no_grad():
        passes = as_upstream(model, frames, embeddings, way)
        ours = lambda: track(model, frames, embeddings, way)  # noqa: E731
        told(
            f"{OBJECTS} objects through {FRAMES} frames (image encoder: {FRAMES} passes against {passes})",
            *seconds(ours, lambda: as_upstream(model, frames, embeddings, way), repeats=given.repeats),
        )
    peak = (
        torch.cuda.max_memory_allocated()
        if given.device != "cpu"
        else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    )
    print(f"most memory: {peak / 1e9:.1f} GB")


if __name__ == "__main__":
    main()
