"""What `quantize=` saves and costs: bytes, time, words and masks of a checkpoint as it is stored and in 8 bits, in turns in one run.

    python perf/quantize.py --model runs/tiny/model [--repeats 5] [--scenes 50] [--dtype bfloat16] [--device cuda --kinds int8 fp8]
    python perf/quantize.py --random 8 --width 1024                  # speed and memory of a larger text model with random weights

Of a checkpoint: bytes of the language model's layers and of the whole, the most memory that loading took, tokens per second of reading a
prompt and of writing, and over questions about drawn scenes the share of answers with the same words, the mean IoU of their masks with the
stored model's, and the mean IoU of both with the truth. `--random`: so many layers of Qwen2's kind and this width; times alone.

fp8 computes on a GPU only; `--kinds fp8-weights` rounds the weights alone to fp8 on any device, which shows what that rounding costs.
"""

from __future__ import annotations

import argparse
import gc
import resource
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2Model

from ans_core import prompts
from ans_core.data.scene_text import single_expressions
from ans_core.data.scenes import draw_scene
from ans_core.model import Sa2VA, quantization
from ans_core.model.predict import Answer
from ans_core.model.requests import request_of
from perf.peak import watched

WRITTEN = 32
"""Tokens a turn of writing."""


def quantized(model: Sa2VA, kind: str) -> Sa2VA:
    """fp8-weights alone; the other kinds are `from_pretrained`'s."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(model.vlm.model.language_model.layers, Float8WeightOnlyConfig())
    return model


def load(name: str, kind: str | None, **where: Any) -> tuple[Sa2VA, int]:
    """Return the model and the most memory that loading it took."""
    gc.collect()
    with watched() as peak:
        if kind == "fp8-weights":
            model = quantized(Sa2VA.from_pretrained(name, **where), kind)
        else:
            model = Sa2VA.from_pretrained(name, quantize=kind, **where)
    used = torch.cuda.max_memory_allocated() if model.device.type == "cuda" else peak.grown
    return model, used


def questions(scenes: int, side: int) -> tuple[list[Any], list[np.ndarray]]:
    """Return referring questions about drawn scenes of the split `test`, and the truth of each."""
    found, truth = [], []
    for index in range(scenes):
        scene = draw_scene(seed=0, split="test", index=index, image_size=side)
        for expression in single_expressions(np.random.default_rng(index), scene.things):
            found.append(request_of(image=scene.image, text=prompts.REFERRING_EVAL.format(text=expression.text)))
            truth.append(scene.masks[list(expression.targets)].any(0))
    return found, truth


def iou(one: np.ndarray, other: np.ndarray) -> float:
    union = (one | other).sum()
    return float((one & other).sum() / union) if union else 1.0


def first_mask(answer: Answer, like: np.ndarray) -> np.ndarray:
    return answer.masks[0][0] if answer.masks else np.zeros_like(like)


def cost(stored: list[Answer], other: list[Answer], truth: list[np.ndarray]) -> str:
    words = np.mean([a.text == b.text for a, b in zip(stored, other, strict=True)])
    masks = [(first_mask(a, t), first_mask(b, t), t) for a, b, t in zip(stored, other, truth, strict=True)]
    same = np.mean([iou(a, b) for a, b, _ in masks])
    before, after = (np.array([iou(pair[i], pair[2]) for pair in masks]) for i in (0, 1))
    error = (after - before).std(ddof=1) / np.sqrt(len(masks)) if len(masks) > 1 else float("nan")
    return (
        f"{len(truth)} questions: same words {words:.3f}, IoU with the stored model's masks {same:.4f}, "
        f"IoU with the truth {before.mean():.4f} -> {after.mean():.4f} ({(after - before).mean():+.4f}, standard error {error:.4f})"
    )


def seconds(work: Callable[[], object], repeats: int) -> list[float]:
    found = []
    for turn in range(repeats + 1):  # the first one is not counted
        start_s = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if turn:
            found.append(time.perf_counter() - start_s)
    return found


def text_speed(text_model: torch.nn.Module, *, tokens: int, width: int, dtype: torch.dtype, repeats: int) -> str:
    """Read a prompt of `tokens`, then write WRITTEN more one by one."""
    device = next(text_model.parameters()).device
    prompt = torch.randn(1, tokens, width, device=device, dtype=dtype)

    @torch.no_grad()
    def work(written: int) -> None:
        out = text_model(inputs_embeds=prompt, use_cache=True)
        for _ in range(written):
            out = text_model(inputs_embeds=prompt[:, :1], past_key_values=out.past_key_values, use_cache=True)

    read = statistics.median(seconds(lambda: work(0), repeats))
    both = seconds(lambda: work(WRITTEN), repeats)
    write = [(one - read) / WRITTEN for one in both]
    return (
        f"reading {tokens / read:.0f} tokens/s, writing {1 / statistics.median(write):.1f} tokens/s "
        f"({1 / max(write):.1f} to {1 / min(write):.1f})"
    )


def random_text_model(layers: int, width: int, dtype: torch.dtype) -> Qwen2Model:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers, num_attention_heads=width // 64,
        num_key_value_heads=width // 64, vocab_size=1000,
    )  # fmt: skip
    return Qwen2Model(config).to(dtype).eval().requires_grad_(False)


def of_random(given: argparse.Namespace) -> None:
    for kind in (None, *given.kinds):
        model = random_text_model(given.random, given.width, getattr(torch, given.dtype or "float32")).to(given.device)
        dtype = next(model.parameters()).dtype
        if kind == "fp8-weights":
            from torchao.quantization import Float8WeightOnlyConfig, quantize_

            quantize_(model.layers, Float8WeightOnlyConfig())
        elif kind is not None:
            work = quantization.quantizer(model, quantization.check(kind, torch.device(given.device)))
            for layer in model.layers:
                work(layer)
        told = text_speed(model, tokens=256, width=given.width, dtype=dtype, repeats=given.repeats)
        print(f"{kind or 'as it is':<12} layers {quantization.stored_bytes(model.layers) / 1e6:.1f} MB, {told}", flush=True)
        del model


def of_checkpoint(given: argparse.Namespace) -> None:
    where = {"device_map": given.device, "dtype": given.dtype}
    asked, truth = questions(given.scenes, given.side)
    stored: list[Answer] = []
    for kind in (None, *given.kinds):
        model, peak = load(given.model, kind, **where)
        layers = model.vlm.model.language_model
        sizes = [quantization.stored_bytes(part) / 1e6 for part in (layers.layers, model)]
        width, dtype = model.vlm.config.text_config.hidden_size, next(layers.layers[0].parameters()).dtype
        speed = text_speed(
            layers, tokens=256, width=width, dtype=model.dtype if dtype is not torch.float32 else dtype, repeats=given.repeats
        )
        print(
            f"{kind or 'as stored':<12} layers {sizes[0]:.2f} MB of {sizes[1]:.2f} MB, loading took {peak / 1e6:.0f} MB, {speed}",
            flush=True,
        )
        answers = model.predict_many(asked, max_tokens=64)
        if kind is None:
            stored = answers
        print(f"{'':<12} {cost(stored, answers, truth)}", flush=True)
        del model
    print(f"most memory of this process: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB")


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="runs/tiny/model")
    options.add_argument("--kinds", nargs="+", default=["int8", "fp8-weights"], choices=["int8", "fp8", "fp8-weights"])
    options.add_argument("--random", type=int, metavar="LAYERS")
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype")
    options.add_argument("--scenes", type=int, default=50)
    options.add_argument("--side", type=int, default=128, help="of the scenes, in pixels")
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {given.device}")
    (of_random if given.random else of_checkpoint)(given)


if __name__ == "__main__":
    main()
