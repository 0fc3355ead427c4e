"""What SAM2's memory training is worth and costs: Markdown tables.

    python perf/memory_training.py crossings --base runs/tiny/base/base [--seeds 0 1 2] [--steps 400]
    python perf/memory_training.py real --base runs/tiny/base/base --videos FOLDER [--seeds 0 1 2] [--steps 400]
    python perf/memory_training.py starts --base runs/tiny/base --data runs/tiny/data [--seeds 0 1 2 3 4 5 6 7 8 9] [--steps 150]
    python perf/memory_training.py activations [--model large] [--side 512] [--frames 5] [--objects 1] [--ways plain again]
    python perf/memory_training.py peak [--model large] [--side 1024] [--frames 16] [--objects 3] [--clips 1] [--dtype bf16] [--modules all]
    python perf/memory_training.py speed --model runs/tiny/base/base [--objects 1 5 16] [--frames 24]

crossings: J&F on held-out clips of look-alikes that cross, of a SAM2 before memory training, after it, after
training with a detached memory bank, and, of each, without memory (every frame decoded from its own features
by the prompt of the first). real: J&F on the second half of each clip of a folder in the format `videos`,
before and after training on the first halves. starts: the stage `memory` with the settings of params.yaml,
from one base by many seeds: J&F of the validation clips before and after. activations: bytes that autograd
keeps for the backward pass of a clip with SAM2.1's sizes, the time, with and without recomputing, and the
program's most memory so far. peak: the most bytes that a whole training step with SAM2.1's sizes takes at
once, computed with fake tensors (perf/training_peak.py). speed: frames per second against the stock video
predictor on the same weights and clip, and how far the masks agree.
"""

from __future__ import annotations

import argparse
import copy
import resource
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from accelerate import init_empty_weights
from hydra.utils import instantiate
from omegaconf import OmegaConf
from PIL import Image
from torch import Tensor
from torch.optim import Optimizer

from ans_core.checkpoints import sam2 as sam2_files
from ans_core.config import load
from ans_core.config.memory import MemoryLoss, MemoryPrompts
from ans_core.data.formats import videos
from ans_core.data.scenes import background, outline, random_thing, render
from ans_core.dist import rng_of
from ans_core.model.grounding import Grounding, GroundingConfig
from ans_core.pictures import media, rle, transforms
from ans_core.stages import memory as stage
from ans_core.tracking.batch import ClipTensors, TrackingBatch, make_batch
from ans_core.tracking.clips import Clip, Clips, choose_window, load_window
from ans_core.tracking.follow import ObjectPrompt, follow
from ans_core.tracking.forward import remembered
from ans_core.tracking.training import UNREAD, GradientCheck, Tracking, open_modules
from ans_core.tracking.validation import validate
from ans_core.train import loop
from ans_core.train.optim import optimizer_of
from perf.peak import watched
from perf.training_peak import as_on_gpu, faked, fakes, step_peak

MODULES = (
    "memory_attention", "memory_encoder", "sam_mask_decoder", "sam_prompt_encoder", "maskmem_tpos_enc",
    "obj_ptr_proj", "no_obj_ptr",
)  # fmt: skip

DEFAULT = ("memory_attention", "memory_encoder")
"""What the stage `memory` trains if nothing else is asked for."""


def crossing_clip(*, seed: int, index: int, size: int, frames: int) -> Clip:
    """Draw two things of one shape, colour and size whose straight paths cross, and a third that stands still
    in front of them."""
    rng = np.random.default_rng([seed, index, 11])
    alike = random_thing(rng, shape="circle", colour=str(rng.choice(["red", "green", "blue"])), size="large")
    still = random_thing(rng, shape="square", colour="yellow", size="small")
    reach = float(np.abs(outline(alike)).max())
    low, high = reach, 1 - reach
    time_ = np.linspace(0, 1, frames)[:, None]
    height = rng.uniform(low, high, 2)
    paths = [np.array([low, height[0]]) * (1 - time_) + np.array([high, height[1]]) * time_]
    height = rng.uniform(low, high, 2)
    paths.append(np.array([high, height[0]]) * (1 - time_) + np.array([low, height[1]]) * time_)
    paths.append(np.repeat(rng.uniform(0.3, 0.7, (1, 2)), frames, 0))
    canvas = background(rng, size)
    things = (alike, alike, still)
    shots = [
        render(
            tuple(replace(t, x=float(p[f, 0]), y=float(p[f, 1])) for t, p in zip(things, paths, strict=True)),
            canvas,
        )
        for f in range(frames)
    ]
    masklets = tuple(tuple(rle.encode(np.asarray(shot[1][n])) for shot in shots) for n in range(len(things)))
    return Clip(
        name=f"crossing/{index}",
        frames=tuple(media.reference(np.asarray(shot[0])) for shot in shots),
        masklets=masklets,
    )


def detached(out: dict[str, Any]) -> dict[str, Any]:
    """Cut a frame's memory off the graph, as sam2-video-training does."""
    kept = remembered(out)
    return {
        key: [x.detach() for x in value] if isinstance(value, list) else value.detach()
        for key, value in kept.items()
    }


def trained(
    start: Grounding,
    clips: Sequence[Clip],
    *,
    steps: int,
    batch: int,
    lr: float,
    muon_lr: float,
    frames: int,
    seed: int,
    detach: bool,
) -> tuple[Grounding, float]:
    """Train a copy; return it and the share of the memory encoder's tensors that had a gradient."""
    sam2 = copy.deepcopy(start)
    parameters = open_modules(sam2, MODULES)
    check = GradientCheck(sam2, parameters, modules=MODULES)
    module = Tracking(sam2, MemoryLoss(), recompute=False)
    if detach:
        module.remember = detached
    sam2.train()
    sam2.blank_absent = True

    def make(step: int, micro: int) -> TrackingBatch:
        tensors, rngs = [], []
        for place in range(batch):
            rng = rng_of(seed, "crossings", step, place)
            clip = rng.choice(clips)
            window = choose_window(clip, length=frames, max_gap=2, rng=rng)
            tensors.append(load_window(clip, window, size=sam2.image_size, max_objects=0, rng=rng))
            rngs.append(rng)
        return make_batch(tensors, MemoryPrompts(kinds={"box": 0.5, "mask": 0.5}), rngs=rngs)

    schedule = loop.Schedule(
        steps=steps,
        lr=lr,
        muon_lr=muon_lr,
        weight_decay=0.01,
        warmup=0.05,
        clip_grad=1.0,
        accumulate=1,
        save_every=steps,
    )
    with tempfile.TemporaryDirectory() as scratch:
        loop.train(
            module, make, name="memory", schedule=schedule,
            machine=loop.Machine(device=torch.device("cpu"), dtype="bf16"),
            seed=seed, scratch=Path(scratch), log=lambda metrics, step: None,
        )  # fmt: skip
    encoder = [name for name in parameters if name.startswith("memory_encoder.")]
    return sam2, 1 - len(set(check.missing) & set(encoder)) / len(encoder)


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in ("steps", "batch", "lr", "muon_lr", "frames")}


def real(arguments: argparse.Namespace) -> str:
    """Train on the first half of every clip's frames and follow its objects through the second half."""
    start = sam2_files.load(arguments.base)
    clips = Clips([list(videos.read(arguments.videos, split=videos.splits(arguments.videos)[0]))])
    halves = [(_part(clip, first=True), _part(clip, first=False)) for clip in clips]
    lines = [
        f"| seed | prompt | before, of {len(clips)} clips | trained | trained, read without memory |",
        "|---|---|---|---|---|",
    ]
    for seed in arguments.seeds:
        sam2, _ = trained(
            start, [train for train, _ in halves], detach=False, seed=seed, **options_of(arguments)
        )
        for prompt in ("mask", "box"):
            cells = [
                f"{validate(one, [later for _, later in halves], prompt=prompt)['J&F']:.3f}"
                for one in (start, sam2)
            ]
            alone = validate(sam2, [later for _, later in halves], prompt=prompt, memory=False)
            cells.append(f"{alone['J&F']:.3f}" if prompt == "box" else "")  # a mask is read as its box
            lines.append(f"| {seed} | {prompt} | " + " | ".join(cells) + " |")
        print("\n".join(lines), flush=True)
    return "\n".join(lines)


def _part(clip: Clip, *, first: bool) -> Clip:
    middle = len(clip.frames) // 2
    part = slice(middle) if first else slice(middle, None)
    return Clip(
        name=clip.name, frames=clip.frames[part], masklets=tuple(masklet[part] for masklet in clip.masklets)
    )


def crossings(arguments: argparse.Namespace) -> str:
    start = sam2_files.load(arguments.base)
    length = 2 * arguments.frames
    lines = [
        "| seed | before | trained | trained, detached | trained, read without memory | memory encoder's "
        "tensors with a gradient |"
    ]
    lines.append("|---|---|---|---|---|---|")
    for seed in arguments.seeds:
        train, held_out = (
            [
                crossing_clip(seed=seed + shift, index=i, size=start.image_size, frames=length)
                for i in range(count)
            ]
            for shift, count in ((0, arguments.clips), (10_000, arguments.held_out))
        )
        options = {**options_of(arguments), "seed": seed}
        whole, reached = trained(start, train, detach=False, **options)
        cut, reached_cut = trained(start, train, detach=True, **options)
        scores = [validate(sam2, held_out, prompt="box")["J&F"] for sam2 in (start, whole, cut)]
        scores.append(validate(whole, held_out, prompt="box", memory=False)["J&F"])
        row = " | ".join(f"{score:.3f}" for score in scores)
        lines.append(f"| {seed} | {row} | {reached:.0%}, detached {reached_cut:.0%} |")
        print("\n".join(lines), flush=True)
    return "\n".join(lines)


def starts(arguments: argparse.Namespace) -> str:
    config = load(Path("params.yaml"))
    optim = config.memory.optim.model_copy(update={"steps": arguments.steps})
    memory = config.memory.model_copy(
        update={"train": True, "optim": optim, "limit_train_batches": arguments.steps}
    )
    lines = ["| seed | J&F before | after |", "|---|---|---|"]
    for seed in arguments.seeds:
        with tempfile.TemporaryDirectory() as folder:
            found = stage.run(
                config.model_copy(update={"seed": seed, "memory": memory}),
                inputs={"data": arguments.data, "base": arguments.base}, out=Path(folder, "out"),
                scratch=Path(folder, "scratch"),
                log=lambda metrics, step: None,
            )  # fmt: skip
        lines.append(f"| {seed} | {found['J&F/before']:.3f} | {found['J&F/best']:.3f} |")
        print(lines[-1], flush=True)
    return "\n".join(lines)


SIZES = {"tiny": (96, 12), "large": (144, 48)}
"""Width and blocks of SAM2.1's image encoders."""
WAYS = {"plain": "plain back-propagation through time", "again": "frames computed again"}


def sized(model: str, side: int) -> GroundingConfig:
    """Return the sizes of a SAM2.1."""
    embed, blocks = SIZES[model]
    sizes: dict[str, Any] = sam2_files.PUBLISHED[embed, blocks] | {
        "embed": embed,
        "image_size": side,
        "temporal_pointers": True,
    }
    return GroundingConfig(**sizes)


def square(*, side: int, frames: int, objects: int, clips: int = 1) -> TrackingBatch:
    """Return clips of noise in which every object is the same square, given as a mask in the first frame."""
    masks = torch.zeros(objects, frames, side, side, dtype=torch.bool)
    masks[..., side // 4 : side // 2, side // 4 : side // 2] = True
    clip = ClipTensors(
        pixels=torch.randn(frames, 3, side, side),
        masks=masks,
        has_truth=torch.ones(objects, frames, dtype=torch.bool),
    )
    return make_batch([clip] * clips, MemoryPrompts(kinds={"mask": 1.0}), rngs=[Random(0)] * clips)


def peak(arguments: argparse.Namespace) -> str:
    """Compute the most bytes of a step on a GPU; with --measure those of a step on this CPU, and run it to
    compare."""
    size = {"side": arguments.side, "objects": arguments.objects, "clips": arguments.clips}
    lines = [
        "| frames | | weights | optimizer | inputs | gradients | activations | peak, MB | in | |",
        "|" + "---|" * 10,
    ]
    for frames in arguments.frames:
        batch = square(frames=frames, **size)
        for way in arguments.ways:
            with init_empty_weights():
                sam2 = Grounding(sized(arguments.model, arguments.side))
            with fakes() as mode, nullcontext() if arguments.measure else as_on_gpu():
                module, optimizer = trainee(sam2.to_empty(device="cpu"), way, arguments)
                found = step_peak(module, optimizer, faked(batch, mode), half=arguments.dtype == "bf16")
            measured = ""
            if arguments.measure:
                torch.manual_seed(0)
                module, optimizer = trainee(Grounding(sized(arguments.model, arguments.side)), way, arguments)
                with watched() as grown:
                    real = step_peak(module, optimizer, batch, half=arguments.dtype == "bf16")
                own = real.total - real.weights - real.inputs  # made in the step
                measured = (
                    f"real tensors {real.total / 1e6:,.0f}; of it new {own / 1e6:,.0f}, process grown by "
                    f"{grown.grown / 1e6:,.0f}"
                )
            parts = (
                found.weights,
                found.optimizer,
                found.inputs,
                found.gradients,
                found.activations,
                found.total,
            )
            cells = " | ".join(f"{part / 1e6:,.0f}" for part in parts)
            lines.append(f"| {frames} | {WAYS[way]} | {cells} | {found.phase} | {measured} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def trainee(sam2: Grounding, way: str, arguments: argparse.Namespace) -> tuple[Tracking, Optimizer]:
    """Return the loss module and the optimizer of the stage `memory`."""
    every = {name.split(".")[0] for name, _ in sam2.named_parameters()} - set(UNREAD)
    open_modules(sam2, every if arguments.modules == ["all"] else arguments.modules)
    sam2.train()
    sam2.blank_absent = True
    module = Tracking(sam2, MemoryLoss(), recompute=way == "again")
    return module, optimizer_of(module, lr=1e-4, weight_decay=0.01, scales={})


def activations(arguments: argparse.Namespace) -> str:
    """Count what autograd saves and what the memory bank holds: every storage once, parameters left out."""
    torch.manual_seed(0)
    sam2 = Grounding(sized(arguments.model, arguments.side)).train()
    open_modules(sam2, DEFAULT)
    batch = square(side=arguments.side, frames=arguments.frames, objects=arguments.objects)
    lines = ["| | activations kept | forward and backward | most memory |", "|---|---|---|---|"]
    for way in arguments.ways:
        held: dict[int, int] = {}
        own = {p.untyped_storage().data_ptr() for p in (*sam2.parameters(), *sam2.buffers())}
        module = Tracking(sam2, MemoryLoss(), recompute=way == "again")

        def keep(tensor: Tensor, held: dict[int, int] = held, own: set[int] = own) -> Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                held[storage.data_ptr()] = storage.nbytes()
            return tensor

        def remember(out: dict[str, Any]) -> dict[str, Any]:
            bank = remembered(out)
            for value in (*bank["maskmem_pos_enc"], bank["maskmem_features"], bank["obj_ptr"]):
                keep(value)
            return bank

        module.remember = remember
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss, _ = module(batch)
        del loss
        module.remember = remembered
        times = []
        for _ in range(arguments.repeats):
            sam2.zero_grad()
            begun = time.perf_counter()
            module(batch)[0].backward()
            times.append(time.perf_counter() - begun)
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        lines.append(
            f"| {WAYS[way]} | {sum(held.values()) / 2**20:.0f} MiB | {min(times):.2f} s | {peak:.2f} GiB |"
        )
    return "\n".join(lines)


def speed(arguments: argparse.Namespace) -> str:
    sam2 = sam2_files.load(arguments.model)
    lines = [
        "| objects | stock predictor, frames/s | here, frames/s | ratio | pixels that differ |",
        "|---|---|---|---|---|",
    ]
    clip = crossing_clip(seed=0, index=0, size=arguments.picture, frames=arguments.frames)
    side = arguments.picture
    with tempfile.TemporaryDirectory() as folder:
        sam2_files.save(sam2, Path(folder, "model"), metadata={})
        shots = Path(folder, "frames")
        shots.mkdir()
        for index, frame in enumerate(clip.frames):
            transforms.open_image(frame).save(shots / f"{index:05d}.jpg", quality=95)
        pictures = [Image.open(path).convert("RGB") for path in sorted(shots.iterdir())]
        predictor = instantiate(OmegaConf.load(Path(folder, "model", sam2_files.STOCK)).model).eval()
        predictor.load_state_dict(sam2.state_dict())
        for count in arguments.objects:
            corners = [
                (8 + 5 * (n % 8), 8 + 9 * (n // 8), 8 + 5 * (n % 8) + side // 3, 8 + 9 * (n // 8) + side // 3)
                for n in range(count)
            ]
            theirs, stock_s = stock(predictor, shots, corners, arguments.repeats)
            times = []
            for _ in range(arguments.repeats):
                begun = time.perf_counter()
                found = [
                    low
                    for _, low in follow(
                        sam2, pictures, [ObjectPrompt.box(c) for c in corners], frames=len(pictures)
                    )
                ]
                times.append(time.perf_counter() - begun)
            ours = torch.stack(
                [
                    torch.nn.functional.interpolate(low[:, None], size=(side, side), mode="bilinear")[:, 0]
                    for low in found
                ]
            )
            differing = float(((ours > 0) != (theirs > 0)).float().mean())
            here, there = len(pictures) / min(times), len(pictures) / stock_s
            lines.append(f"| {count} | {there:.2f} | {here:.2f} | {here / there:.2f} | {differing:.2e} |")
            print(lines[-1], flush=True)
    return "\n".join(lines)


def stock(
    predictor: Any, shots: Path, corners: Sequence[Sequence[float]], repeats: int
) -> tuple[Tensor, float]:
    """Return logits (F, N, H, W) and the best time in seconds: reading the frames, the prompts and the
    propagation, as here."""
    best = float("inf")
    for _ in range(repeats):
        begun = time.perf_counter()
        state = predictor.init_state(str(shots))
        for number, box in enumerate(corners):
            predictor.add_new_points_or_box(state, frame_idx=0, obj_id=number, box=np.array(box, np.float32))
        found = torch.stack([logits[:, 0] for _, _, logits in predictor.propagate_in_video(state)])
        best = min(best, time.perf_counter() - begun)
    return found, best


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for command in ("crossings", "real"):
        it = commands.add_parser(command)
        it.add_argument("--base", required=True)
        it.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        for name, value in (("steps", 400), ("batch", 2), ("frames", 6)):
            it.add_argument(f"--{name}", type=int, default=value)
        it.add_argument("--lr", type=float, default=2e-4)
        it.add_argument("--muon-lr", type=float, default=0.0, help="of the stacked matrices; 0 = AdamW alone")
        if command == "crossings":
            it.add_argument("--clips", type=int, default=100)
            it.add_argument("--held-out", type=int, default=30)
        else:
            it.add_argument("--videos", type=Path, required=True)
    it = commands.add_parser("starts")
    it.add_argument("--base", type=Path, required=True)
    it.add_argument("--data", type=Path, required=True)
    it.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    it.add_argument("--steps", type=int, default=150)
    it = commands.add_parser("activations")
    it.add_argument("--model", choices=list(SIZES), default="tiny")
    it.add_argument("--ways", choices=list(WAYS), nargs="+", default=list(WAYS))
    for name, value in (("side", 512), ("frames", 5), ("objects", 1), ("repeats", 3)):
        it.add_argument(f"--{name}", type=int, default=value)
    it = commands.add_parser("peak")
    it.add_argument("--model", choices=list(SIZES), default="large")
    it.add_argument("--ways", choices=list(WAYS), nargs="+", default=list(WAYS))
    it.add_argument("--frames", type=int, nargs="+", default=[16])
    for name, value in (("side", 1024), ("objects", 3), ("clips", 1)):
        it.add_argument(f"--{name}", type=int, default=value)
    it.add_argument("--dtype", choices=["fp32", "bf16"], default="bf16")
    it.add_argument(
        "--modules",
        nargs="+",
        default=list(DEFAULT),
        help="those that are trained; all = the whole SAM2 (what it reads)",
    )
    it.add_argument("--measure", action="store_true", help="compute a CPU's step, and run it")
    it = commands.add_parser("speed")
    it.add_argument("--model", required=True)
    it.add_argument("--objects", type=int, nargs="+", default=[1, 5, 16])
    for name, value in (("frames", 24), ("picture", 128), ("repeats", 2)):
        it.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    if arguments.command == "peak" and arguments.measure and len(arguments.frames) * len(arguments.ways) > 1:
        parser.error(
            "--measure takes one way and one number of frames: a process grows little by what it has freed "
            "before"
        )
    run = {
        "crossings": crossings,
        "real": real,
        "starts": starts,
        "activations": activations,
        "peak": peak,
        "speed": speed,
    }
    print(run[arguments.command](arguments))


if __name__ == "__main__":
    main()
