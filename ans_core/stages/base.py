"""base: data in, the model that SFT starts from out: imported published weights, or a tiny model pre-trained
from random weights.

    dvc repro -s base          tiny: about 11 minutes on 2 cores; prompted IoU (held-out) in metrics.json

Pre-training of a tiny model replaces what published weights have learned: the vision tower tells regions'
words apart; words lie near the image tokens they fit; SAM2 segments what is clicked or boxed in pictures
(through clips: the stage `memory`); the language model captions pictures and regions and finds described
things (boxes, clicks). No part knows `[SEG]` yet.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedTokenizerFast

from ans_core import data, dist, prompts
from ans_core.checkpoints import bases, checkpoint, sam2
from ans_core.checkpoints.folder import local_folder
from ans_core.checkpoints.trained import untaught
from ans_core.config import Base, Config, Optim
from ans_core.data import conversation
from ans_core.data.collate import collate
from ans_core.data.mixture import Mixture, Source
from ans_core.model.config import Sa2VAConfig
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import Network
from ans_core.model.parts import check_moved, hashes
from ans_core.model.supervised import layout_of
from ans_core.pretrain.alignment import Alignment, AlignmentBatch, alignment_batch
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from ans_core.pretrain.finding import Finding
from ans_core.pretrain.promptable import Promptable, PromptBatch, prompt_batch
from ans_core.pretrain.region_words import RegionWords, WordsBatch, words_batch
from ans_core.stages.launch import machine_of, schedule_of
from ans_core.train import loop
from ans_core.types import RLE, ImageRef, Log, Sample

T = TypeVar("T")
Shown = tuple[ImageRef, list[RLE]]
"""A picture and the masks of things in it."""


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One training of a part of the model; only that part's parameters require a gradient."""

    loss: nn.Module
    batches: Callable[[int, int], Any]
    """(step, micro) -> batch."""
    optim: Optim


DRAWN = ("referring", "region_caption", "grounded_caption", "video", "masks")
"""Kinds of the drawn data sets; a user's own data are used from SFT on."""

OBJECTS = 3
"""Most things of a picture that are clicked or boxed in one step."""


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: data. Writes out/untrained (tiny only) and out/base (both whole model folders),
    curves.csv and moved.json."""
    if cfg.base.source == "sam2":
        alone = sam2.load(cfg.base.sam2)
        sam2.save(alone, out / "sam2", metadata={"stage": "base", "source": cfg.base.sam2})
        return {"parameters": float(sum(p.numel() for p in alone.parameters()))}
    if cfg.base.source == "published":
        model = bases.import_base(cfg.base.internvl, cfg.base.sam2, template=cfg.base.template)
        made = {"stage": "base", "source": [cfg.base.internvl, cfg.base.sam2]}
        checkpoint.save(model, out / "base", metadata=untaught(local_folder(cfg.base.internvl)) or made)
        return {"parameters": float(sum(p.numel() for p in model.parameters()))}
    train = data.sources(inputs["data"], "train", DRAWN)
    tokenizer = build_tokenizer(_texts(train, seed=cfg.seed), kind=cfg.base.kind)
    model = build_tiny(
        _tiny(cfg.base, tokenizer, cfg.sft.frames), tokenizer, seed=dist.seed_of(cfg.seed, "weights")
    )
    checkpoint.save(model, out / "untrained", metadata={"stage": "untrained", "seed": cfg.seed})
    # One process trains here: nothing to share out.
    machine = replace(machine_of(cfg.launch, cfg.base.dtype, log=log), deepspeed_stage=0)
    moved, curves = {}, {}
    for name, start in PHASES.items():
        # some losses add heads: random, but the same after a restart
        dist.seed_everything(cfg.seed, name, "start")
        phase = start(cfg, model, train)
        before = hashes(model)
        curves[name] = loop.train(
            phase.loss,
            phase.batches,
            name=name,
            schedule=schedule_of(phase.optim),
            machine=machine,
            seed=cfg.seed,
            scratch=scratch,
            log=log,
        )
        moved[name] = check_moved(before, model)
    _start_seg(model)
    model.keep_original_decoder()
    checkpoint.save(model, out / "base", metadata={"stage": "base", "seed": cfg.seed})
    loop.write_curves(out / "curves.csv", curves)
    (out / "moved.json").write_text(json.dumps(moved, indent=1))
    return held_out(cfg, model, data.sources(inputs["data"], "val", DRAWN))


@torch.no_grad()
def _start_seg(model: Network) -> None:
    """Initialise `[SEG]`, which no text has used so far, as `<box>`, in whose place it will stand: read
    alike, and said alike."""
    box = model.tokenizer.convert_tokens_to_ids(prompts.BOX_START)
    for layer in (model.vlm.get_input_embeddings(), model.vlm.get_output_embeddings()):
        layer.weight[model.seg_token_id] = layer.weight[box]


def _tiny(base: Base, tokenizer: PreTrainedTokenizerFast, frames: int) -> Sa2VAConfig:
    grounding = GroundingConfig(**base.sam.model_dump())
    vision, language = base.vision.model_dump(), base.language.model_dump()
    return tiny_config(
        kind=base.kind,
        vision=vision,
        language=language,
        grounding=grounding,
        tokenizer=tokenizer,
        template=base.template,
        video_frames=frames,
    )


def _texts(sources: list[Source], *, seed: int) -> Iterator[str]:
    """Yield all training texts that the model will read and write, for the tokenizer."""
    rng = dist.rng_of(seed, "tokenizer")
    for source in sources:
        for sample in source.samples if source.kind != "masks" else ():
            turns = [conversation.turn(sample, rng)]
            if len(sample.frames) == 1:
                turns.append(conversation.pretraining_turn(sample, rng))
            for turn in turns:
                yield turn.question
                yield turn.answer


def _shown(sources: list[Source]) -> list[Shown]:
    """Return every picture of the region captions, and of masks without words, with all things in it, each
    once."""
    masks_of: dict[ImageRef, list[RLE]] = defaultdict(list)
    for sample in (*data.of_kind(sources, "region_caption"), *data.of_kind(sources, "masks")):
        masks = masks_of[sample.frames[0]]
        masks += [mask for mask, *_ in sample.masks if mask is not None and mask not in masks]
    return list(masks_of.items())


def _sam_images(cfg: Config, model: Network, sources: list[Source]) -> Phase:
    optim = cfg.base.sam_images
    model.requires_grad_(False)
    for part in (model.sam2.image_encoder, model.sam2.sam_prompt_encoder, model.sam2.sam_mask_decoder):
        part.requires_grad_(True)
    pictures = _shown(sources)

    def make(step: int, micro: int) -> PromptBatch:
        chosen, rng = _chosen(pictures, cfg, "images", optim, step, micro)
        return prompt_batch(chosen, size=cfg.base.sam.image_size, objects=OBJECTS, rng=rng)

    return Phase(loss=Promptable(model.sam2), batches=make, optim=optim)


def _chosen(
    pictures: list[T], cfg: Config, name: str, optim: Optim, step: int, micro: int
) -> tuple[list[T], Random]:
    """Return this process's pictures of a micro-batch, and the random numbers that chose them, for what else
    is drawn."""
    rng = dist.rng_of(cfg.seed, name, step, micro, dist.rank())
    return rng.sample(pictures, min(_share(optim), len(pictures))), rng


def _share(optim: Optim) -> int:
    """Return how many items of a batch this process takes per micro-batch."""
    return max(1, optim.batch // optim.accumulate // dist.world_size())


def _vision_words(cfg: Config, model: Network, sources: list[Source]) -> Phase:
    choose, optim = (
        _pictures(data.of_kind(sources, "region_caption"), cfg, "words", cfg.base.vision_words),
        cfg.base.vision_words,
    )
    model.requires_grad_(False)
    model.backbone.vision_tower.requires_grad_(True)

    def make(step: int, micro: int) -> WordsBatch:
        return words_batch(choose(step, micro), model.tokenizer, cutter=model.backbone.cutter)

    return Phase(loss=RegionWords(model), batches=make, optim=optim)


def _alignment(cfg: Config, model: Network, sources: list[Source]) -> Phase:
    named = [s for kind in ("referring", "region_caption") for s in data.of_kind(sources, kind) if s.masks]
    choose, optim = _pictures(named, cfg, "alignment", cfg.base.alignment), cfg.base.alignment
    model.requires_grad_(False)
    for part in model.backbone.connectors:
        part.requires_grad_(True)
    model.vlm.get_input_embeddings().requires_grad_(True)

    def make(step: int, micro: int) -> AlignmentBatch:
        return alignment_batch(choose(step, micro), model.tokenizer, cutter=model.backbone.cutter)

    return Phase(loss=Alignment(model), batches=make, optim=optim)


def _pictures(
    samples: list[Sample], cfg: Config, name: str, optim: Optim
) -> Callable[[int, int], list[tuple[ImageRef, list[Sample]]]]:
    """Return this process's pictures of a micro-batch, each with its samples."""
    by_picture: dict[ImageRef, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_picture[sample.frames[0]].append(sample)
    pictures = list(by_picture.items())

    def choose(step: int, micro: int) -> list[tuple[ImageRef, list[Sample]]]:
        return _chosen(pictures, cfg, name, optim, step, micro)[0]

    return choose


def _language(cfg: Config, model: Network, sources: list[Source]) -> Phase:
    optim = cfg.base.language_text
    model.requires_grad_(False)
    model.vlm.requires_grad_(True)
    model.text_hidden_fcs.requires_grad_(cfg.base.click_weight > 0)
    # trained by then: a new language model's gradients would undo it (LOG)
    model.backbone.vision_tower.requires_grad_(False)
    for part in model.backbone.connectors:
        part.requires_grad_(True)
    stills = [source for source in sources if source.kind != "video"]
    questions = cfg.base.questions_per_image
    mixture = Mixture(
        stills,
        cfg.base.mixture,
        questions=questions,
        frames=1,
        seed=cfg.seed,
        turn=conversation.pretraining_turn,
    )
    layout = layout_of(model, mask_size=model.sam2.image_size, max_length=cfg.sft.max_length)

    def make(step: int, micro: int) -> Any:
        return collate(
            mixture.rows(step, micro, batch=optim.batch, micros=optim.accumulate), model.tokenizer, layout
        )

    base = cfg.base
    loss = Finding(
        model,
        attention_weight=base.attention_weight,
        box_weight=base.box_weight,
        click_weight=base.click_weight,
    )
    return Phase(loss=loss, batches=make, optim=optim)


PHASES: dict[str, Callable[[Config, Network, list[Source]], Phase]] = {
    "vision_words": _vision_words,
    "alignment": _alignment,
    "sam_images": _sam_images,
    "language": _language,
}
"""In this order; each trains its own part of the model."""


@torch.no_grad()
def held_out(cfg: Config, model: Network, sources: list[Source]) -> dict[str, float]:
    """Return the IoU of clicked or boxed objects on held-out pictures."""
    model.eval()
    pictures, size = _shown(sources)[:100], model.sam2.image_size
    if not pictures:
        return {}
    rng = dist.rng_of(cfg.seed, "held out", "region_caption")
    _, ious = Promptable(model.sam2)(
        prompt_batch(pictures, size=size, objects=OBJECTS, rng=rng).to(model.device)
    )
    return {"prompted_image/IoU": float(ious["iou_three"])}
