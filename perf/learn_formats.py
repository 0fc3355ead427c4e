"""Whether the picture sets can be learned as their readers give them: a small model from random weights overfits drawn samples of each.

    python perf/learn_formats.py [NAME ...] [--samples 64] [--steps 2000]

Every set is written in its published layout, read, mixed and collated as for SFT, and trained on until mask IoU > 0.9 (referring) or text
loss < 0.1 (all others) on the samples themselves. The exit status tells whether all were. For masks, SAM2 first learns clicks and boxes, as
in the stage `base`, and the prompts begin at the size of SAM2's own: see PROMPTS.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch

from ans_core.data.collate import collate
from ans_core.data.conversation import turn
from ans_core.data.formats import FORMATS
from ans_core.data.mixture import Mixture, Source
from ans_core.model.grounding import GroundingConfig
from ans_core.model.sa2va import Sa2VA
from ans_core.model.supervised import Supervised, layout_of
from ans_core.optim import lr_factor
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from ans_core.pretrain.promptable import Promptable, prompt_batch
from ans_core.types import Sample
from tests import picture_sets

SIDE = 64
"""Pixels on a side of a picture."""
IOU, TEXT = 0.9, 0.1
QUESTIONS = 8
"""Most samples of a picture in a step."""
GROUNDING = GroundingConfig(
    image_size=2 * SIDE, embed=32, heads=1, stages=(1, 1, 2, 1), global_blocks=(3,), windows=(4, 2, 4, 2), width=64,
    memory_layers=1, memory_feedforward=32, memory_width=16,
)  # fmt: skip
LR = {"text": 3e-3, "masks": 3e-4, "clicks": 5e-4}
"""Masks get stuck with the larger one."""
CLICKS = 150
"""Steps in which SAM2 learns clicks and boxes. Its predicted IoU chooses one of three masks, and unlearned it changes its choice again and
again, to a mask that was never trained."""
PROMPTS = 6.0
"""Factor on the last layer between `[SEG]`'s states and SAM2. As built, its outputs differ by 0.08 (standard deviation over the objects;
SAM2's own prompts: about 1). SAM2 then learns one mean mask for all, IoU .25, and the text loss meanwhile makes the states alike."""


@dataclass(frozen=True)
class Learned:
    """After `steps` steps, each over all samples."""

    steps: int
    samples: int
    text: float
    iou: float | None

    @property
    def enough(self) -> bool:
        return self.text < TEXT if self.iou is None else self.iou > IOU


def samples_of(name: str, count: int, root: Path) -> list[Sample]:
    picture_sets.write(root, picture_sets.draw(count, image_size=SIDE))
    form, path = picture_sets.SETS[name]
    return list(islice(FORMATS[form](root / path, name=name, split="train"), count))


def small_model(samples: list[Sample]) -> Sa2VA:
    """A model whose tokenizer knows the samples' words; everything in it is trained."""
    texts = [text for s in samples for text in (s.text, s.question or "")]
    tokenizer = build_tokenizer(texts, vocabulary=600)
    config = tiny_config(
        vision={"image_size": SIDE, "patch_size": 8, "hidden": 64, "layers": 2, "heads": 2, "mlp": 128},
        language={"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 256},
        grounding=GROUNDING,
        tokenizer=tokenizer,
        template="qwen_chat",
        video_frames=2,
    )  # fmt: skip
    return build_tiny(config, tokenizer, seed=0).requires_grad_(True)


def learn_clicks(model: Sa2VA, samples: list[Sample]) -> None:
    """Let SAM2 learn the samples' own masks from clicks and boxes, and give the prompts of `[SEG]` their size."""
    module, rng = Promptable(model.sam2), Random(0)
    optimizer = torch.optim.AdamW(model.sam2.parameters(), lr=LR["clicks"], weight_decay=0.0)
    pictures = [(s.frames, s.masks) for s in samples]
    for _ in range(CLICKS):
        some = rng.sample(pictures, min(len(pictures), 3 * QUESTIONS))
        loss, _found = module(prompt_batch(some, size=model.sam2.image_size, objects=1, frames=1, rng=rng))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.sam2.parameters(), 1.0)
        optimizer.step()
    last = [layer for layer in model.text_hidden_fcs.modules() if isinstance(layer, torch.nn.Linear)][-1]
    with torch.no_grad():
        last.weight *= PROMPTS


def learn(name: str, *, count: int, steps: int) -> Learned:
    """Train on one set until it is learned, or for `steps` steps."""
    with tempfile.TemporaryDirectory() as folder:
        samples = samples_of(name, count, Path(folder))
        model = small_model(samples)
        source = Source(name=name, kind="extra", samples=samples)
        mixture = Mixture([source], {"extra": 1.0}, questions=QUESTIONS, frames=1, seed=0, turn=turn)
        layout = layout_of(model, mask_size=32, max_length=1024)
        module = Supervised(model, mask_weight=2.0, dice_weight=2.0, points=512)
        referring = samples[0].task == "referring"
        if referring:
            learn_clicks(model, samples)
        optimizer = torch.optim.AdamW(model.parameters(), lr=LR["masks" if referring else "text"], weight_decay=0.0)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_factor(step, steps=steps, warmup=0.05))
        images = mixture.table(0)[0].images
        for step in range(steps):
            loss, found = module(collate(mixture.rows(step, 0, batch=images, micros=1), model.tokenizer, layout))
            learned = Learned(step, len(samples), found["text"], found["mask_iou"] if referring else None)
            if learned.enough:
                break
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
    return learned


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(picture_sets.SETS)}; all without any")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2000)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(picture_sets.SETS):
        parser.error(f"no sets named {sorted(unknown)}; there are {list(picture_sets.SETS)}")
    missed = []
    for name in arguments.names or picture_sets.SETS:
        start = time.monotonic()
        found = learn(name, count=arguments.samples, steps=arguments.steps)
        reached = f"text loss {found.text:.3f}" if found.iou is None else f"mask IoU {found.iou:.3f}"
        told = f"{name:32} {found.samples:3} samples  {reached} after {found.steps} steps, {time.monotonic() - start:.0f} s"
        print(told if found.enough else f"{told}  NOT LEARNED", flush=True)
        missed += [] if found.enough else [name]
    raise SystemExit(f"not learned: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
