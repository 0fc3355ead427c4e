"""memory: data and base in, a SAM2 that follows objects better out (its trained tensors; the base is referred
to by its hash).

    dvc repro -s memory

Trained: the modules named in memory.trainable_modules, with gradients through the memory over the whole clip.
The best epoch by J&F on the validation clips counts; the base itself, as epoch 0, is one of them, so the
result is never worse than what it started from there. Without held-out videos the validation clips are
pseudo-clips, made of held-out pictures. With `train: false` the base is passed through. A base that is a SAM2
alone gives a SAM2 alone, for the stock package and transformers.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from random import Random

import torch
from PIL import Image

from ans_core import data, dist
from ans_core.checkpoints import checkpoint, sam2_export
from ans_core.checkpoints import sam2 as sam2_files
from ans_core.config import Config, Memory
from ans_core.data.left_out import STAND_INS, LeftOutFile, first_readable
from ans_core.data.mixture import Source
from ans_core.model.grounding import Grounding
from ans_core.pictures import overlay, transforms
from ans_core.stages.launch import last_means, lasting, machine_of, schedule_of
from ans_core.tracking.batch import ClipTensors, TrackingBatch, make_batch
from ans_core.tracking.clips import JOINED, Clip, Clips, choose_window, load_window, why_left_out
from ans_core.tracking.epochs import EpochWeights
from ans_core.tracking.pseudo import PseudoClips, pseudo_clip
from ans_core.tracking.training import (
    PATIENCE,
    GradientCheck,
    Tracking,
    open_modules,
    places,
    set_dropout,
)
from ans_core.tracking.validation import follow_clip, validate
from ans_core.train import loop
from ans_core.types import RLE, ImageRef, Log

FRAME_MS = 250
SHOWN_WIDTH, SHOWN_FRAMES = 960, 48
"""Of the GIFs: pixels of both panels together, and the most frames."""


@dataclass(frozen=True, kw_only=True)
class Pool:
    """Clips to train on."""

    videos: Clips
    stills: Clips
    left_out: list[str]
    """Names of the clips that are left out, each with the reason."""
    joined: dict[str, int]
    """Data set -> number of its masks that are no single object, and are left out."""

    def epoch(self, settings: Memory) -> int:
        """Return the number of clips in an epoch."""
        clips = len(self.videos if settings.image_share < 1 else self.stills)
        return (
            min(clips, settings.limit_train_batches * settings.optim.batch)
            if settings.limit_train_batches
            else clips
        )


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: data, base. Writes the trained tensors (delta), those of the newest other epochs
    (last/epoch-N, each a delta), curves.csv, metrics.json and clips/*.gif to `out`; of a SAM2 alone sam2/ and
    transformers/; of what is not trained on left_out.txt."""
    settings, alone = cfg.memory, inputs["base"] / "sam2"
    base = alone if alone.is_dir() else inputs["base"] / "base"
    if not (settings.train or settings.validate_only):
        if dist.rank() == 0:
            _write_delta(cfg, {}, out, base=base)
        return {"trained": 0.0}
    machine = machine_of(cfg.launch, settings.dtype, log=log)
    loop.let_processes_talk(machine)  # they validate together
    train, val = (data.sources(inputs["data"], split) for split in ("train", "val"))
    _check_names(settings, [source.name for source in (*train, *val)])
    pool = _pool(settings, train) if settings.train else None
    chosen = _held_out(settings, val)
    if pool is not None:
        settings = settings.model_copy(
            update={"optim": lasting(settings.optim, "memory", samples=pool.epoch(settings))}
        )
        cfg = cfg.model_copy(update={"memory": settings})
    sam2 = _load(base, settings, machine.device)
    stills = len(chosen[0].frames) == 1
    held_out = PseudoClips(chosen, length=settings.frames, size=sam2.image_size) if stills else chosen
    curves: loop.Curves = []
    tensors: dict[str, torch.Tensor] = {}
    epochs = EpochWeights(folder=scratch / "kept", last=settings.keep_last)
    if pool is None:
        metrics = validate(sam2, held_out, prompt=settings.val_prompt) | {"trained": 0.0}
        metrics["J&F_without_memory"] = _without_memory(sam2, held_out, settings)
    else:
        curves, unreached = _train(
            cfg, sam2, pool, held_out, epochs, machine=machine, scratch=scratch, log=log
        )
        tensors = epochs.load(epochs.best())
        sam2.load_state_dict(tensors, strict=False)
        untrained = _load(base, settings, machine.device)
        metrics = _compared(sam2, untrained, held_out, settings, epochs) | {
            "tensors_without_gradient": float(unreached),
            "left_out_clips": float(len(pool.left_out)),
            **{name: value for name, value in last_means(curves).items() if "/val_" not in name},
        }
    if stills:
        metrics["pseudo_clips"] = float(len(held_out))
    if dist.rank() == 0:
        _write_delta(cfg, tensors, out, base=base)
        if pool is not None:
            _write_others(cfg, epochs, out, base=base)
            lines = (*_joined(pool), *pool.left_out)
            (out / "left_out.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        if alone.is_dir():
            sam2_export.write(sam2, out, metadata={"stage": "memory", "seed": cfg.seed, **metrics})
        loop.write_curves(out / "curves.csv", {"memory": curves})
        (out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
        _write_gifs(sam2, held_out[: settings.clips_shown], out / "clips", settings)
    dist.wait_for_all()
    return metrics


def _compared(
    sam2: Grounding, untrained: Grounding, held_out: Sequence[Clip], settings: Memory, epochs: EpochWeights
) -> dict[str, float]:
    """Return J&F before training and of the best epoch, also without memory."""
    best, scores = epochs.best(), epochs.scores()
    before = _without_memory(untrained, held_out, settings)
    return {
        "J&F/before": scores[0],
        "J&F/best": scores[best],
        "best_epoch": float(best),
        "trained": 1.0,
        "J&F/before_without_memory": before,
        "J&F/best_without_memory": _without_memory(sam2, held_out, settings) if best else before,
    }


def _write_others(cfg: Config, epochs: EpochWeights, out: Path, *, base: Path) -> None:
    """Write the newest epochs that are not the best."""
    for epoch in epochs.present():
        if epoch not in (0, epochs.best()):
            _write_delta(cfg, epochs.load(epoch), out / f"last/epoch-{epoch:04d}", base=base)


def _without_memory(sam2: Grounding, held_out: Sequence[Clip], settings: Memory) -> float:
    """Return J&F where every frame is decoded by the prompt alone."""
    return validate(sam2, held_out, prompt=settings.val_prompt, memory=False)["J&F"]


def _train(
    cfg: Config,
    sam2: Grounding,
    pool: Pool,
    held_out: Sequence[Clip],
    epochs: EpochWeights,
    *,
    machine: loop.Machine,
    scratch: Path,
    log: Log,
) -> tuple[loop.Curves, int]:
    """Train and keep the epochs' tensors; return the curves, and how many trained tensors never had a
    gradient."""
    settings, batch = cfg.memory, cfg.memory.optim.batch
    trained = open_modules(sam2, settings.trainable_modules)
    if 0 not in epochs.scores():
        epochs.add(0, validate(sam2, held_out, prompt=settings.val_prompt)["J&F"], trained)
    module = Tracking(sam2, settings.loss, recompute=settings.recompute)
    check = GradientCheck(sam2, trained, modules=settings.trainable_modules, reached=module.reached)
    steps_per_epoch = math.ceil(pool.epoch(settings) / batch)
    steps, first, judged, gradients_judged = settings.optim.steps, -1, 0, False
    left_out = LeftOutFile(scratch / f"left_out-{dist.rank()}.jsonl", rows=batch)

    def validated(epoch: int) -> dict[str, float]:
        nonlocal judged
        metrics = validate(sam2, held_out, prompt=settings.val_prompt)
        epochs.add(epoch, metrics["J&F"], trained)
        judged = epoch
        return {f"val_{name}": value for name, value in metrics.items()}

    def after(step: int) -> dict[str, float]:
        """Check and validate. It is not called after a step that is skipped: what was due then is done after
        the next one."""
        nonlocal first, judged, gradients_judged
        if first < 0:  # of this process; what a run before it judged up to here stands
            first, judged = step, max(epoch for epoch in epochs.scores() if epoch * steps_per_epoch <= step)
            check.judge_first()
        if not gradients_judged and (step + 1 == steps or step + 1 - first >= PATIENCE):
            check.judge(step + 1)
            gradients_judged = True
        epoch = (
            math.ceil((step + 1) / steps_per_epoch) if step + 1 == steps else (step + 1) // steps_per_epoch
        )
        return left_out.metrics(step, machine.device) | (validated(epoch) if epoch > judged else {})

    sam2.train()
    set_dropout(sam2, settings.dropout)
    sam2.blank_absent = True
    make = _batches(cfg, pool, sam2.image_size, left_out)
    curves = loop.train(
        module, make, name="memory", schedule=schedule_of(settings.optim), machine=machine, seed=cfg.seed,
        scratch=scratch, log=log, after_step=after,
    )  # fmt: skip
    if not gradients_judged:  # the last step was skipped, or a run before this one did it
        check.judge(steps)
    if first >= 0 and judged < (last := math.ceil(steps / steps_per_epoch)):  # the last step was skipped
        validated(last)
    return curves, len(check.missing)


def _batches(
    cfg: Config, pool: Pool, size: int, left_out: LeftOutFile
) -> Callable[[int, int], TrackingBatch]:
    """Return (step, micro-batch) -> this process's clips."""
    settings, per_epoch = cfg.memory, pool.epoch(cfg.memory)
    common = {"size": size, "max_objects": settings.max_objects}

    def candidates(epoch: int, place: int) -> Iterator[tuple[Clip, Random]]:
        """Yield the clip of this place, then stand-ins, each with its own random numbers."""
        for attempt in range(1 + STAND_INS):
            rng = dist.rng_of(
                cfg.seed, "memory clip", epoch, place, *([f"stand-in {attempt}"] if attempt else [])
            )
            choices = pool.stills if rng.random() < settings.image_share else pool.videos
            in_order = dist.permuted(place % len(choices), len(choices), cfg.seed, "memory epoch", epoch)
            yield choices[rng.randrange(len(choices)) if attempt else in_order], rng

    def read(candidate: tuple[Clip, Random]) -> ClipTensors:
        clip, rng = candidate
        if len(clip.frames) == 1:
            return pseudo_clip(clip, length=settings.frames, rng=rng, **common)
        window = choose_window(clip, length=settings.frames, max_gap=settings.max_gap, rng=rng)
        return load_window(clip, window, rng=rng, **common)

    def make(step: int, micro: int) -> TrackingBatch:
        share = places(
            step, micro, batch=settings.optim.batch, micros=settings.optim.accumulate, per_epoch=per_epoch
        )
        loaded = [
            first_readable(candidates(*at), read, name=lambda candidate: candidate[0].name, stage="memory")
            for at in share
        ]
        left_out.add(step, [clip for *_, broken in loaded for clip in broken])
        return make_batch(
            [clip for _, clip, _ in loaded], settings.prompts, at_once=settings.objects_at_once,
            rngs=[rng for (_, rng), *_ in loaded],
        )  # fmt: skip

    return make


def _check_names(settings: Memory, names: Sequence[str]) -> None:
    if unknown := sorted(set(settings.data) - set(names)):
        raise ValueError(
            f"memory.data: no data set {unknown} with a split 'train' or 'val'; there are "
            f"{sorted(set(names))}"
        )


def _chosen(settings: Memory, sources: Sequence[Source]) -> list[Source]:
    return [source for source in sources if not settings.data or source.name in settings.data]


def _pool(settings: Memory, sources: Sequence[Source]) -> Pool:
    """Sort out what to train on. Raises ValueError if there is nothing of what the settings ask for."""
    chosen = _chosen(settings, sources)
    clips = Clips([source.samples for source in chosen])
    videos, stills, joined = array("q"), array("q"), Counter[str]()
    videos_left_out, stills_left_out = list[str](), list[str]()
    for number, clip in enumerate(clips):
        still = len(clip.frames) == 1
        if not (settings.image_share if still else settings.image_share < 1):
            continue
        joined[clip.name.partition("/")[0]] += clip.joined
        if still and clip.visible.any():
            stills.append(number)
        elif still and clip.joined:
            stills_left_out.append(f"{clip.name}: {JOINED}")
        elif not still and (clip.masklets or clip.joined):
            if why := why_left_out(clip, length=settings.frames):
                videos_left_out.append(why)
            else:
                videos.append(number)
    names = [source.name for source in chosen]
    _check_pool(settings, names, videos=len(videos), stills=len(stills), left_out=videos_left_out)
    pool = Pool(
        videos=clips.at(videos),
        stills=clips.at(stills),
        left_out=videos_left_out + stills_left_out,
        joined=dict(+joined),
    )
    if dist.rank() == 0:
        for line in _joined(pool):
            print(line)
        if videos_left_out:
            print(
                f"{len(videos_left_out)} of {len(videos) + len(videos_left_out)} videos are left out: "
                f"{videos_left_out[0]} ..."
            )
    return pool


def _check_pool(
    settings: Memory, names: Sequence[str], *, videos: int, stills: int, left_out: Sequence[str]
) -> None:
    if settings.image_share < 1 and not videos:
        if left_out:
            raise ValueError(
                f"all {len(left_out)} clips are left out, the first is {left_out[0]}; lower memory.frames "
                "(prepare.clip_frames for drawn clips), or give the objects identities where they have none"
            )
        raise ValueError(
            f"no videos with masks in {names}; add some to prepare.sources, or set memory.image_share=1 or "
            "memory.train=false"
        )
    if settings.image_share and not stills:
        raise ValueError(
            f"memory.image_share is {settings.image_share:g}, and {names} hold no stills with masks of "
            "single objects"
        )


def _joined(pool: Pool) -> list[str]:
    """Say how many masks of a data set are left out, also of clips that are trained on."""
    why = (
        "stand for several objects each (crowds, or categories without instance_id or track_id) and are "
        "left out"
    )
    return [f"{name}: {count} masks {why}" for name, count in pool.joined.items()]


def _held_out(settings: Memory, sources: Sequence[Source]) -> Clips:
    """Choose the held-out videos; stills where there are none, of which validation makes pseudo-clips. Raises
    ValueError without both."""
    clips = Clips([source.samples for source in _chosen(settings, sources)])
    most = settings.limit_val_batches * settings.optim.batch or None
    videos = (
        n for n, clip in enumerate(clips) if len(clip.frames) > 1 and clip.followed(range(len(clip.frames)))
    )
    if chosen := list(islice(videos, most)):
        return clips.at(chosen)
    stills = (n for n, clip in enumerate(clips) if len(clip.frames) == 1 and clip.visible.any())
    if chosen := list(islice(stills, most)):
        if dist.rank() == 0:
            print(
                f"no videos in split 'val': J&F is that of pseudo-clips, one of each of {len(chosen)} of "
                "its pictures (docs/video.md)"
            )
        return clips.at(chosen)
    raise ValueError(
        f"no {'data set' if not settings.data else f'data set of memory.data {list(settings.data)}'} has a "
        "split 'val' with videos in which an object can be followed, or with pictures with masks of single "
        "objects: J&F on them chooses the best epoch; give about one video in ten to it, or, without "
        "videos, one picture in ten, or set memory.train=false"
    )


def _load(base: Path, settings: Memory, device: torch.device) -> Grounding:
    """Load SAM2 as it was before Sa2VA's training. Raises ValueError if its mask decoder is to be trained and
    was by Sa2VA already: both can't be kept."""
    if (base / "tokenizer_config.json").is_file() and any(
        name.split(".")[0] == "sam_mask_decoder" for name in settings.trainable_modules
    ):
        _, tensors = sam2_files.of_sa2va(base)
        before = sam2_files.stock_names(tensors)
        if any(
            not torch.equal(tensors[name], before[name])
            for name in tensors
            if name.startswith(sam2_files.DECODER)
        ):
            raise ValueError(
                f"memory.trainable_modules: {base} has a mask decoder trained for [SEG]; leave "
                "sam_mask_decoder out"
            )
    return sam2_files.load(base, image_size=settings.image_size, device=device)


def _write_delta(cfg: Config, tensors: dict[str, torch.Tensor], out: Path, *, base: Path) -> None:
    named = {f"{sam2_files.PART}{name}": tensor for name, tensor in tensors.items()}
    config = {"stage": "memory", "seed": cfg.seed, "image_size": cfg.memory.image_size}
    checkpoint.save_delta(named, out, base_hash=sam2_files.identity(base)[1], config=config)


def _write_gifs(sam2: Grounding, clips: Sequence[Clip], folder: Path, settings: Memory) -> None:
    """Draw the first frames of clips with the true masks left and the predicted ones right."""
    folder.mkdir()
    for number, clip in enumerate(clips):
        objects, predicted = follow_clip(sam2, clip, prompt=settings.val_prompt)
        pairs = [
            ([clip.masklets[n][index] for n in objects], [masks[index] for masks in predicted])
            for index in range(min(len(clip.frames), SHOWN_FRAMES))
        ]
        name = re.sub(r"[^A-Za-z0-9_.-]+", "_", clip.name)[:80]
        first, *others = [
            _side_by_side(frame, *pair) for frame, pair in zip(clip.frames, pairs, strict=False)
        ]
        file = folder / f"{number:02d}-{name}.gif"
        first.save(file, save_all=True, append_images=others, duration=FRAME_MS, loop=0)


def _side_by_side(
    frame: ImageRef, true: Sequence[RLE | None], predicted: Sequence[RLE | None]
) -> Image.Image:
    picture = transforms.open_image(frame)
    both = Image.new("RGB", (2 * picture.width + 4, picture.height), "white")
    both.paste(overlay.draw(picture, true), (0, 0))
    both.paste(overlay.draw(picture, predicted), (picture.width + 4, 0))
    both.thumbnail((SHOWN_WIDTH, SHOWN_WIDTH))
    return both
