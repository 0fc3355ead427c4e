"""What `quantize=` saves and costs: bytes, time, words and masks of a checkpoint as it is stored and in 8
bits.

    python perf/quantize.py --model runs/tiny/model [--repeats 5] [--scenes 50] [--dtype bfloat16] [--device cuda --kinds int8 fp8]
    python perf/quantize.py --model runs/tiny/model --agent runs/tiny/agent/rft [--scenes 50]    # an agent's answers
    python perf/quantize.py --random 8 --width 1024                  # speed and memory of a larger text model with random weights

Of a checkpoint: bytes of the language model's layers and of the whole, tokens per second of reading a prompt
and of writing, and over questions about drawn scenes the share of answers with the same words, the mean IoU
of their masks with the stored model's, and the mean IoU of both with the truth. Times are taken in turns.
`--agent`: over `--scenes` questions of each family about stills of `val`, right answers and those that are
the same as in full, and bytes of the language model with its copies of layers. `--random`: so many layers of
Qwen2's kind and this width; times alone.

fp8 computes on a GPU only; `--kinds fp8-weights` rounds the weights alone to fp8 on any device, which shows
what that rounding costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen2Config, Qwen2Model

from ans_core import prompts
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import operations_told
from ans_core.agent.evaluation import request_of as question_request
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import play
from ans_core.agent.policy import load_policy
from ans_core.agent.world import draw_question, is_right
from ans_core.config import load as load_config
from ans_core.data.scene_text import single_expressions
from ans_core.data.scenes import draw_scene
from ans_core.inference.predict import Answer
from ans_core.inference.requests import request_of
from ans_core.inference.sa2va import Sa2VA
from ans_core.model import quantization

STILLS = ("easy", "pattern", "text", "larger")
"""Families of the agent's world whose questions are about one picture."""
READ, WRITTEN = 128, 16
"""Tokens of a turn."""


def weights_alone(layers: torch.nn.Module) -> None:
    """Round the weights of linear layers to fp8, and compute with them in their own precision."""
    from torchao.quantization import Float8WeightOnlyConfig, quantize_

    quantize_(layers, Float8WeightOnlyConfig())


def load(name: str, kind: str, **where: Any) -> Sa2VA:
    if kind != "fp8-weights":
        return Sa2VA.from_pretrained(name, quantize=None if kind == "as stored" else kind, **where)
    model = Sa2VA.from_pretrained(name, **where)
    weights_alone(model.vlm.model.language_model.layers)
    return model


def questions(scenes: int, side: int) -> tuple[list[Any], list[np.ndarray]]:
    """Return referring questions about drawn scenes of the split `test`, and the truth of each."""
    found, truth = [], []
    for index in range(scenes):
        scene = draw_scene(seed=0, split="test", index=index, image_size=side)
        for expression in single_expressions(np.random.default_rng(index), scene.things):
            found.append(
                request_of(image=scene.image, text=prompts.REFERRING_EVAL.format(text=expression.text))
            )
            truth.append(scene.masks[list(expression.targets)].any(0))
    return found, truth


def stored_bytes(module: torch.nn.Module) -> int:
    """Return the bytes of all parameters as they are stored: quantized ones count their 8-bit values and
    scales."""
    return sum(_bytes(parameter.data) for parameter in module.parameters())


def _bytes(tensor: torch.Tensor) -> int:
    if not quantization.is_quantized(tensor):
        return tensor.numel() * tensor.element_size()
    names, _ = tensor.__tensor_flatten__()
    return sum(_bytes(getattr(tensor, name)) for name in names)


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
        f"IoU with the truth {before.mean():.4f} -> {after.mean():.4f} ({(after - before).mean():+.4f}, "
        f"standard error {error:.4f})"
    )


def speeds(
    models: dict[str, torch.nn.Module], *, width: int, dtype: torch.dtype, repeats: int
) -> dict[str, str]:
    """Read a prompt of READ tokens, then write WRITTEN more one by one; the first turn is not counted."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for turn in range(repeats + 1):
        for name, model in models.items():
            times = read_and_write(model, width=width, dtype=dtype)
            if turn:
                found[name].append(times)
    first = next(iter(found.values()))
    told = {}
    for name, times in found.items():
        read, write = (statistics.median(one[part] for one in times) for part in (0, 1))
        ratios = [
            sorted(base[part] / own[part] for base, own in zip(first, times, strict=True)) for part in (0, 1)
        ]
        told[name] = "; ".join(
            f"{what} {count / value:.1f} tokens/s, {statistics.median(ratio):.2f} times as fast "
            f"({ratio[0]:.2f} to {ratio[-1]:.2f})"
            for what, count, value, ratio in (
                ("reading", READ, read, ratios[0]),
                ("writing", WRITTEN, write, ratios[1]),
            )
        )
    return told


@torch.no_grad()
def read_and_write(text_model: torch.nn.Module, *, width: int, dtype: torch.dtype) -> tuple[float, float]:
    """Return seconds of both."""
    device = next(text_model.parameters()).device
    prompt = torch.randn(1, READ, width, device=device, dtype=dtype)
    marks = []
    out = None
    for step in range(WRITTEN + 1):
        if step in (0, 1):
            marks.append(now())
        given = prompt if step == 0 else prompt[:, :1]
        out = text_model(
            inputs_embeds=given, past_key_values=out.past_key_values if out else None, use_cache=True
        )
    return marks[1] - marks[0], now() - marks[1]


def now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def random_text_model(layers: int, width: int, dtype: torch.dtype) -> Qwen2Model:
    torch.manual_seed(0)
    config = Qwen2Config(
        hidden_size=width, intermediate_size=4 * width, num_hidden_layers=layers,
        num_attention_heads=width // 64, num_key_value_heads=width // 64, vocab_size=1000,
    )  # fmt: skip
    return Qwen2Model(config).to(dtype).eval().requires_grad_(False)


def of_random(given: argparse.Namespace) -> None:
    """Time all kinds in turns: other work on the machine then slows all of them alike."""
    models: dict[str, torch.nn.Module] = {}
    for kind in ("as it is", *given.kinds):
        model = random_text_model(given.random, given.width, getattr(torch, given.dtype or "float32")).to(
            given.device
        )
        if kind == "fp8-weights":
            weights_alone(model.layers)
        elif kind != "as it is":
            work = quantization.quantizer(model, quantization.check(kind, torch.device(given.device)))
            for layer in model.layers:
                work(layer)
        models[kind] = model
    told = speeds(
        models, width=given.width, dtype=getattr(torch, given.dtype or "float32"), repeats=given.repeats
    )
    for kind, model in models.items():
        print(
            f"{kind:<12} layers {stored_bytes(model.layers) / 1e6:.1f} MB, {told[kind]}",
            flush=True,
        )


def of_checkpoint(given: argparse.Namespace) -> None:
    where = {"device_map": given.device, "dtype": given.dtype}
    asked, truth = questions(given.scenes, given.side)
    stored: list[Answer] = []
    models = {}
    for kind in ("as stored", *given.kinds):
        model = load(given.model, kind, **where)
        sizes = [stored_bytes(part) / 1e6 for part in (model.vlm.model.language_model.layers, model)]
        print(f"{kind}: layers {sizes[0]:.2f} MB of {sizes[1]:.2f} MB", flush=True)
        answers = model.predict_many(asked, max_tokens=64)
        stored = stored or answers
        print(f"  {cost(stored, answers, truth)}", flush=True)
        models[kind] = model.vlm.model.language_model
    dtype = model.dtype
    for kind, told in speeds(
        models, width=model.vlm.config.text_config.hidden_size, dtype=dtype, repeats=given.repeats
    ).items():
        print(f"{kind}: {told}", flush=True)


def of_agent(given: argparse.Namespace) -> None:
    agent, device = load_config(Path("params.yaml")).agent, torch.device(given.device)
    episode = agent.episode
    full: list[str | None] = []
    for kind in (None, *given.kinds):
        policy = load_policy(
            Path(given.model), Path(given.agent), operations=OPERATIONS, device=device,
            quantize=None if kind is None else quantization.check(kind, device),
        )  # fmt: skip
        model = policy.model
        asked = [
            draw_question(family, seed=0, split="val", index=index, tile=model.backbone.crop_side)
            for index in range(given.scenes)
            for family in STILLS
        ]
        with Toolbox(
            model, adapters_off=policy.base, seconds=episode.time_limit_s, reader=agent.reader
        ) as toolbox:
            told = operations_told(toolbox, policy.lists_operations(episode.operations_told))
            requests = [question_request(question, told) for question in asked]
            played = play(model, toolbox, requests, limits=episode)
        answers = [own.answer for own in played]
        full = full or answers
        right = sum(is_right(answer or "", question) for answer, question in zip(answers, asked, strict=True))
        same = sum(one == other for one, other in zip(answers, full, strict=True))
        size = stored_bytes(model.vlm.model.language_model) / 1e6
        print(
            f"{kind or 'as stored'}: right {right} of {len(asked)}, as in full {same}, language model "
            f"{size:.2f} MB",
            flush=True,
        )


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--model", default="runs/tiny/model")
    options.add_argument("--agent", metavar="FOLDER")
    options.add_argument(
        "--kinds", nargs="+", default=["int8", "fp8-weights"], choices=["int8", "fp8", "fp8-weights"]
    )
    options.add_argument("--random", type=int, metavar="LAYERS")
    options.add_argument("--width", type=int, default=1024)
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype")
    options.add_argument("--scenes", type=int, default=50)
    options.add_argument("--side", type=int, default=128, help="of the scenes, in pixels")
    options.add_argument("--repeats", type=int, default=5)
    given = options.parse_args()
    print(f"{torch.get_num_threads()} threads, torch {torch.__version__}, {given.device}")
    if given.agent:
        given.kinds = [kind for kind in given.kinds if kind != "fp8-weights"]
    (of_random if given.random else of_agent if given.agent else of_checkpoint)(given)


if __name__ == "__main__":
    main()
