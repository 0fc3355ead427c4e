"""Every kind of backbone at equal sizes on the CPU: a Markdown table of its speed, in turns, and its memory.

    python perf/backbones.py [--repeats 5] [--layers 4] [--hidden 256]

Random weights. All kinds have a language model and a vision tower of the same sizes, and make 256 image
tokens of a picture. ROWS questions about a picture each are answered with WORDS words.

- encode: picture to image tokens, vision tower and projector or merger.
- prefill: tokens of the prefixes (nearly all are image tokens), read by the language model from image
  features that are there already.
- decode: words of the answers, generated in one batch from the prefixes' cache.
- train: tokens of a supervised step, forward and backward, pictures encoded; the language model is trained
  whole.
- memory: most bytes above the model's own while the questions are answered, in a process of its own.

Ratios are to InternVL's of the same turn: above 1 is faster. A turn times every kind once, so other work on
the machine slows all alike.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from multiprocessing import get_context

import torch

from ans_core.data.collate import Row, collate
from ans_core.data.conversation import Turn
from ans_core.data.scenes import draw_scene
from ans_core.inference.generation import generate
from ans_core.inference.prefill import encoded, prompt, visible
from ans_core.inference.requests import request_of
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised, layout_of
from ans_core.pictures.media import reference
from ans_core.pictures.transforms import open_image
from ans_core.pretrain.build import TINY, build_tiny, build_tokenizer, tiny_config
from perf.model import seconds
from perf.peak import watched
from tests.tiny import GROUNDING, TEXTS

SIDE, PATCH, ROWS, WORDS = 448, 14, 4, 32
FIRST = "internvl"
QUESTION, ANSWER = "What is the red square?", "a red circle left of a blue square " * 4


def model_of(kind: str, *, layers: int, hidden: int) -> Network:
    """Build a model that says one word for ever."""
    words = build_tokenizer(TEXTS * 5, vocabulary=300, kind=kind)
    config = tiny_config(
        kind=kind,
        vision={"image_size": SIDE, "patch_size": PATCH, "hidden": 128, "layers": 4, "heads": 4, "mlp": 512},
        language={"hidden": hidden, "layers": layers, "heads": 8, "kv_heads": 2, "mlp": 11 * hidden // 4},
        grounding=GROUNDING,
        tokenizer=words,
        template="qwen_chat",
        video_frames=2,
    )
    model = build_tiny(config, words, seed=0).eval().requires_grad_(False)
    word = torch.tensor(words.encode("a")[:1])
    model.vlm.lm_head.register_forward_hook(
        lambda head, given, logits: logits.index_fill(-1, word, 1e4) if not model.training else None
    )
    return model


def pictures() -> list[bytes]:
    return [reference(draw_scene(seed=7, split="val", index=i, image_size=SIDE).image) for i in range(ROWS)]  # type: ignore[misc]


def ways(model: Network) -> dict[str, tuple[float, Callable[[], object]]]:
    """Return (pictures or tokens of a run, what runs) by column."""
    files = pictures()
    requests = [request_of(text=f"<image>{QUESTION}", image=file) for file in files]
    views = [visible(model, [open_image(file)]) for file in files]
    assert all(sum(view.tokens) == (SIDE // PATCH // 2) ** 2 for view in views), (
        "all kinds make as many image tokens of a picture"
    )
    features = encoded(model, views)
    prompted = prompt(model, requests, features)
    turn = Turn(question=QUESTION, answer=ANSWER)
    rows = [Row(name=str(i), frames=(file,), turns=(turn,)) for i, file in enumerate(files)]
    batch = collate(rows, model.tokenizer, layout_of(model, mask_size=32, max_length=2048))
    loss = Supervised(model, mask_weight=0.0, dice_weight=0.0, points=1)

    def train() -> None:
        model.train()
        model.vlm.model.language_model.requires_grad_(True)
        with torch.enable_grad():
            loss(batch)[0].backward()
        model.zero_grad()
        model.requires_grad_(False).eval()

    return {
        "encode, pictures/s": (float(ROWS), lambda: [model.project(one) for one in encoded(model, views)]),
        "prefill, tokens/s": (
            float(prompted.prefix_attention.sum()),
            lambda: prompt(model, requests, features),
        ),
        "decode, tokens/s": (float(ROWS * WORDS), lambda: generate(model, prompted, max_tokens=WORDS)),
        "train, tokens/s": (float(batch.branch.ge(0).sum()), train),
    }


def memory(kind: str, layers: int, hidden: int) -> int:
    model = model_of(kind, layers=layers, hidden=hidden)
    requests = [request_of(text=f"<image>{QUESTION}", image=file) for file in pictures()]
    with torch.no_grad(), watched() as peak:
        generate(model, prompt(model, requests), max_tokens=WORDS)
    return peak.grown


def main(*, repeats: int, layers: int, hidden: int) -> None:
    models = {kind: model_of(kind, layers=layers, hidden=hidden) for kind in TINY}
    print(
        f"{torch.get_num_threads()} threads, language model of {layers} layers and width {hidden}, "
        f"{repeats} turns\n"
    )
    with torch.no_grad():
        made = {kind: ways(model) for kind, model in models.items()}
        columns = list(made[FIRST])
        print(
            "| kind | parameters | "
            + " | ".join(columns)
            + " | memory |\n"
            + "|---" * (len(columns) + 3)
            + "|"
        )
        cells: dict[str, list[str]] = {kind: [] for kind in models}
        for column in columns:
            found = dict(
                zip(
                    models, seconds(*(made[kind][column][1] for kind in models), repeats=repeats), strict=True
                )
            )
            for kind, times in found.items():
                rates = [made[kind][column][0] / time_s for time_s in times]
                ratios = [
                    rate * time_s / made[FIRST][column][0]
                    for rate, time_s in zip(rates, found[FIRST], strict=True)
                ]
                beside = (
                    ""
                    if kind == FIRST
                    else f" ({statistics.median(ratios):.2f}: {min(ratios):.2f} to {max(ratios):.2f})"
                )
                cells[kind].append(f"{statistics.median(rates):.1f}{beside}")
    for kind, model in models.items():
        with get_context("spawn").Pool(1) as pool:
            grown = pool.apply(memory, (kind, layers, hidden))
        size = sum(p.numel() for p in model.parameters())
        print(
            f"| {kind} | {size / 1e6:.1f} M | " + " | ".join(cells[kind]) + f" | {grown / 1e6:.0f} MB |",
            flush=True,
        )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=256)
    main(**vars(parser.parse_args()))
