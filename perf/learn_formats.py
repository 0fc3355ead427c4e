"""Whether the data sets can be learned as their readers give them: a small model from random weights overfits
drawn samples of each.

    python perf/learn_formats.py [NAME ...] [--samples 64] [--steps 600]     # a set takes 1 to 3 minutes of one core

Every set is written in its published layout, read, mixed and collated as for SFT, and trained on until mask
IoU > 0.9 (referring) or text loss < 0.1 (all others) on the samples themselves. The exit status tells whether
all were. For masks the model first learns clicks, as in the stage `base`: see `learn_clicks`. Then SAM2's
image encoder is frozen, as in SFT.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from ans_core.data.collate import Batch, collate
from ans_core.data.conversation import turn
from ans_core.data.formats import FORMATS
from ans_core.data.mixture import Mixture, Source
from ans_core.data.scene_write import write_clips, write_scenes
from ans_core.losses import mask_losses
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised, layout_of
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from ans_core.train.optim import lr_factor, optimizer_of
from ans_core.types import Sample
from tests import picture_sets
from tests.data import clip_sets

SCENES = {
    "refcoco": ("refcoco", "refcoco"),
    "grefcoco": ("grefcoco", "grefcoco"),
    "region_arrow": ("region_arrow", "region_captions"),
    "mevis": ("mevis", "mevis"),
}
"""Sets that the demo draws -> format and path."""
CLIPS = (
    "mevis",
    "revos",
    "ref_youtube_vos",
    "ref_davis17",
    "ref_sav",
    "chat_univi",
    "coco_video",
    "youtube_vis",
)
"""Sets of one or two clips with two squares; MeViS's is version 2 here."""
NAMES = (*SCENES, *picture_sets.SETS, *(f"clips/{name}" for name in CLIPS))
SIDE = 64
"""Pixels on a side of a drawn picture."""
MASK = 32
"""Of a mask target: what SAM2 draws here."""
IOU, TEXT = 0.9, 0.1
ROWS, QUESTIONS = 8, 8
"""Pictures a step, and most samples of each."""
CHECK = 20
"""Steps between looks at all samples."""
CLICKS = 200
"""Steps of `learn_clicks`."""
LR = {"text": (3e-3, 0.0), "clicks": (2e-3, 8e-4), "masks": (1e-3, 5e-4)}
"""Of the language side, and of SAM2."""
MUON = 4.0
"""Muon's rates over these."""
GROUNDING = GroundingConfig(
    image_size=2 * SIDE, embed=32, heads=1, stages=(1, 1, 2, 1), global_blocks=(3,), windows=(4, 2, 4, 2),
    width=64,
    memory_layers=1, memory_feedforward=32, memory_width=16,
)  # fmt: skip


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
    form, path = (SCENES | picture_sets.SETS).get(name, (name.removeprefix("clips/"), name))
    if name == "mevis":
        write_clips(root, seed=0, counts={"train": count}, image_size=SIDE, frames=2)
    elif name in SCENES:
        write_scenes(root, seed=0, counts={"train": count, "val": 0, "test": 0}, image_size=SIDE)
    elif name in picture_sets.SETS:
        picture_sets.write(root, picture_sets.draw(count, image_size=SIDE))
    else:
        getattr(clip_sets, form)(root / path)
    return list(islice(FORMATS[form](root / path, name=name, split="train"), count))


def small_model(samples: list[Sample]) -> Network:
    """A model whose tokenizer knows the samples' words and those they are asked in, so that rows are short;
    everything in it is trained."""
    rng = Random(0)
    turns = [turn(sample, rng) for sample in samples for _ in range(4)]
    texts = [
        text for t in turns for text in (t.question, t.answer, *(said for pair in t.past for said in pair))
    ]
    tokenizer = build_tokenizer([*texts, *["user\nassistant\n"] * 50], vocabulary=800)
    config = tiny_config(
        vision={"image_size": SIDE, "patch_size": 8, "hidden": 64, "layers": 2, "heads": 2, "mlp": 128},
        language={"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "mlp": 256},
        grounding=GROUNDING,
        tokenizer=tokenizer,
        template="qwen_chat",
        video_frames=2,
    )  # fmt: skip
    return build_tiny(config, tokenizer, seed=0).requires_grad_(True)


def clicks_loss(module: Supervised, batch: Batch) -> Float[Tensor, ""]:
    """Text loss + losses of the masks that SAM2 draws from a click inside each + 5 x MSE between `[SEG]`'s
    embedding and the click's.

    From `[SEG]`'s own embeddings alone masks stay at IoU 0.25 for hundreds of steps: at first they hardly
    differ (LOG), so SAM2 learns one mean mask for all, and the text loss makes `[SEG]`'s states alike
    meanwhile. Published bases know clicks; `Finding` teaches `tiny`'s the same. All of SAM2's three masks
    learn: its unlearned IoU head changes its choice among them.
    """
    model, hidden = module.model, module.states(batch)
    rows, places = batch.learned
    loss = module.text_loss(hidden[rows, places - 1], batch.input_ids[rows, places])
    if not len(batch.pair_seg):
        return loss
    prompts = model.seg_embeddings(hidden[(batch.input_ids == model.seg_token_id) & batch.loss_mask])
    shown = batch.pair_seg.unique()
    first = [int((batch.pair_seg == seg).nonzero()[0]) for seg in shown]  # its first frame with a mask
    at = torch.stack([middle(batch.targets[pair]) for pair in first]) * (model.sam2.image_size / MASK)
    clicks = model.sam2.click_embeddings(at).detach()
    frames = model.sam2.encode(batch.sam_frames)
    masks = model.sam2.decode(
        frames, batch.pair_frame, clicks[torch.searchsorted(shown, batch.pair_seg)]
    ).all_logits
    drawn = [part for token in masks.unbind(1) for part in mask_losses(token, batch.targets, points=0)]
    return loss + torch.stack(drawn).sum() + 5 * F.mse_loss(prompts[shown], clicks)


def middle(mask: Bool[Tensor, "M M"]) -> Float[Tensor, 2]:
    """Return (x, y) of the mask's pixel nearest to its centre of gravity; (0, 0) of an empty one."""
    places = mask.nonzero().flip(1).float()
    return places[(places - places.mean(0)).pow(2).sum(1).argmin()] if len(places) else torch.zeros(2)


class Descent:
    """AdamW, and Muon for the layers' matrices, with a warm-up and a cosine, at rates of the language side's
    and of SAM2's own."""

    def __init__(self, model: Network, rates: Sequence[float], *, steps: int) -> None:
        named = list(model.named_parameters())
        self.parts = [
            [p for n, p in named if n.startswith("sam2.") == sam2 and p.requires_grad]
            for sam2 in (False, True)
        ]
        lr, sam2_lr = rates
        self.optimizer = optimizer_of(
            model, lr=lr, weight_decay=0.0, scales={"sam2.": sam2_lr / lr}, muon_lr=MUON * lr
        )
        for group in self.optimizer.param_groups:
            group["lr"] = lr * group["scale"]
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: lr_factor(step, steps=steps, warmup=0.05)
        )

    def step(self, loss: Float[Tensor, ""]) -> None:
        self.optimizer.zero_grad()
        loss.backward()
        for part in self.parts:
            torch.nn.utils.clip_grad_norm_(part, 1.0)
        self.optimizer.step()
        self.schedule.step()


def learn(name: str, *, count: int, steps: int, clicks: int = CLICKS) -> Learned:
    """Train on one set until it is learned, or for `steps` steps (after those with clicks)."""
    with tempfile.TemporaryDirectory() as folder:
        samples = samples_of(name, count, Path(folder))
        model, source = small_model(samples), Source(name=name, kind="extra", samples=samples)
        mixture = Mixture([source], {"extra": 1.0}, questions=QUESTIONS, frames=2, seed=0, turn=turn)
        pictures = mixture.table(0)[0].images
        layout = layout_of(model, mask_size=MASK, max_length=1024)
        referring = any(sample.task == "referring" for sample in samples)
        module = Supervised(model, mask_weight=2.0 * referring, dice_weight=2.0 * referring, points=512)

        def batch(step: int, rows: int) -> Batch:
            return collate(mixture.rows(step, 0, batch=rows, micros=1), model.tokenizer, layout)

        if referring:
            descent = Descent(model, LR["clicks"], steps=clicks)
            for step in range(clicks):
                descent.step(clicks_loss(module, batch(step, min(ROWS, pictures))))
            model.sam2.image_encoder.requires_grad_(False)
        descent = Descent(model, LR["masks" if referring else "text"], steps=steps)
        for step in range(steps + 1):
            if step % CHECK == 0 or step == steps:
                with torch.no_grad():
                    found = module(batch(step, pictures))[1]  # an epoch: every picture once
                learned = Learned(step, len(samples), found["text"], found["mask_iou"] if referring else None)
                if learned.enough:
                    break
            descent.step(module(batch(step, min(ROWS, pictures)))[0])
    return learned


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all without any")
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(NAMES):
        parser.error(f"no sets named {sorted(unknown)}; there are {list(NAMES)}")
    missed = []
    for name in arguments.names or NAMES:
        start = time.process_time()
        found = learn(name, count=arguments.samples, steps=arguments.steps)
        reached = f"text loss {found.text:.3f}" if found.iou is None else f"mask IoU {found.iou:.3f}"
        told = (
            f"{name:32} {found.samples:3} samples  {reached} after {found.steps} steps, "
            f"{time.process_time() - start:.0f} s of CPU"
        )
        print(told if found.enough else f"{told}  NOT LEARNED", flush=True)
        missed += [] if found.enough else [name]
    raise SystemExit(f"not learned: {', '.join(missed)}" if missed else 0)


if __name__ == "__main__":
    main()
