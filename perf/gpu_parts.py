"""The parts that perf/gpu.py measures: a Job in, its figures out. Each runs in a process of its own.

MFU: operations of `ans_core.model.footprint` without recomputation, of tokens that are no padding, over the
device's peak.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from io import BytesIO
from itertools import count, product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from PIL import Image
from torch._dynamo.utils import counters
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from tqdm import tqdm

from ans_core import precision, prompts
from ans_core.benchmarks.loops import caption_request, mask_request, true_mask
from ans_core.checkpoints import published
from ans_core.config import Config, resolve
from ans_core.data import conversation
from ans_core.data.clips import draw_clip
from ans_core.data.collate import Batch, Layout, collate_readable
from ans_core.data.left_out import LeftOutFile
from ans_core.data.mixture import Mixture, Source
from ans_core.data.scene_text import region_caption
from ans_core.data.scenes import draw_scene
from ans_core.data.selection import Joined
from ans_core.inference import predict
from ans_core.inference.generation import stop_ids
from ans_core.inference.options import PredictOptions
from ans_core.inference.prefill import PrefilledBatch, prompt
from ans_core.inference.requests import request_of
from ans_core.inference.sa2va import Sa2VA
from ans_core.inference.video import track as track_objects
from ans_core.losses import mask_losses
from ans_core.model import adapters
from ans_core.model.footprint import MicroBatch, Operations, Work, activation_bytes, peak_flops
from ans_core.model.grounding import FrameFeatures, Grounding
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised, image_tokens, layout_of, packed
from ans_core.pictures import rle
from ans_core.rewards import REWARDS
from ans_core.rl.dual_loop import DualLoop
from ans_core.rl.rollout import Reader, exact_head, sample
from ans_core.stages.launch import cores_of_process
from ans_core.stages.rl_batches import RolloutBatches, samples_by_loop
from ans_core.train import loop, states
from ans_core.train.optim import optimizer_of
from ans_core.train.watch import Watch, compiled_graphs, peak_memory_mb
from ans_core.types import Sample
from perf import memory_training, rl_speed
from perf.model import THINGS, random_model
from perf.sft import LONG_SIDE, PICTURES, enlarged, model_of, photographs
from tasks.ports import free_port

PEAK = 989e12
"""Operations a second of an H100 or H200 in bf16, dense; counted with where the device's own peak is not
known, as on a CPU."""
WARM_UP = 3
"""Steps before those that count."""
WAYS = ((False, 0), (True, 0), (True, None), (False, None))
"""Of training: whether layers are compiled, and how many are computed again (None: all)."""
GROUP = 8
"""Answers a request."""


KERNELS = "kernels, "
"""Begins the case of a micro-batch's longest kernels, in milliseconds."""


class Skip(Exception):
    """A part can't be measured here, and why."""


def shown(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{name.replace('_', ' ')} {value:,.4g}" for name, value in figures.items())


class Figures:
    """Figures of one part by case, written to a file as they come: those of a part that is stopped stay."""

    def __init__(self, path: Path) -> None:
        self.path, self.began = path, time.perf_counter()
        self.cases: dict[str, dict[str, float]] = defaultdict(dict)

    def say(self, text: str) -> None:
        tqdm.write(f"[{time.perf_counter() - self.began:6.1f} s] {text}")  # not into the training's bar
        sys.stdout.flush()

    def add(self, case: str, **figures: float) -> None:
        self.cases[case] |= {name: float(f"{value:.4g}") for name, value in figures.items()}
        self.path.write_text(json.dumps(self.cases))
        self.say(f"{case}: {shown(figures)}")


@dataclass(frozen=True, kw_only=True)
class Job:
    """What a part measures, and where it writes its figures."""

    size: str
    device: torch.device
    quick: bool
    figures: Figures

    @property
    def tiny(self) -> bool:
        return self.size == "tiny"

    def config(self, *words: str) -> Config:
        """Return the size's profile for one process, with `key=value` words."""
        one = ("launch.processes=1", "launch.deepspeed_stage=0", "launch.inference_processes=1")
        return Config.model_validate(resolve(Path("profiles") / f"{self.size}.yaml", (*one, *words)))

    def autocast(self) -> torch.autocast:
        return precision.autocast(self.device, torch.bfloat16)

    def clock(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def seconds(self, compute: Callable[[], object], *, repeats: int = 3) -> float:
        """Return the median time; a first call is not counted."""
        compute()
        times = []
        for _ in range(1 if self.quick else repeats):
            begun = self.clock()
            compute()
            times.append(self.clock() - begun)
        return statistics.median(times)

    def reset_peak(self) -> None:
        gc.collect()  # an optimizer before
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def peak_gb(self) -> float:
        return peak_memory_mb(self.device) / 1e3


# Inputs


def samples_of() -> list[Sample]:
    """Return samples about pictures of 1,000 pixels: photographs if there are any here, else drawn scenes."""
    reference = Path(os.environ.get("ANS_REFERENCE", "/none"))
    if (reference / "data/regions").is_dir():
        return photographs(reference)
    found = []
    for index in range(PICTURES):
        scene = draw_scene(seed=0, split="train", index=index, image_size=LONG_SIDE)
        picture, height, width = enlarged(Image.fromarray(scene.image))
        for number, (thing, mask) in enumerate(zip(scene.things, scene.masks, strict=True)):
            found.append(
                Sample(
                    sample_id=f"{index}-{number}", dataset="drawn", image_id=str(index), frames=(picture,),
                    height=height, width=width, task="region_caption" if number % 2 else "referring",
                    text=region_caption(thing), masks=((rle.encode(mask),),),
                )
            )  # fmt: skip
    return found


def captions(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with one mask each, as captions of regions."""
    masked = [s for s in samples if s.masks and s.masks[0][0] is not None]
    return [
        replace(s, task="region_caption", text=s.text or "a thing in the picture", masks=s.masks[:1])
        for s in masked
    ]


def network(job: Job, samples: Sequence[Sample], *, speaks: bool = False) -> Network:
    """Return the model with random weights. `speaks`: its answers have a `[SEG]`; else its head is a plain
    one."""
    if job.tiny:
        return model_of(list(samples)).to(job.device).eval()
    model = random_model(job.size, device=str(job.device), dtype=torch.bfloat16)
    if not speaks:
        model.vlm.lm_head._forward_hooks.clear()
    return model


def supervised(job: Job, samples: Sequence[Sample]) -> Supervised:
    """Return SFT's losses on the model, prepared for SFT."""
    model, settings = network(job, samples), job.config().sft
    adapters.prepare_sft(model, adapters.lora_config(**settings.lora.model_dump()), seed=0)
    return Supervised(
        model, mask_weight=settings.mask_weight, dice_weight=settings.dice_weight, points=settings.mask_points
    )


def mixture_of(job: Job, samples: Sequence[Sample]) -> Mixture:
    """Return rows about the pictures, with as many questions as the profile asks."""
    source = Source(name="pictures", kind="extra", samples=samples)
    questions = job.config().sft.questions_per_image
    return Mixture([source], {"extra": 1.0}, questions=questions, frames=1, seed=0, turn=conversation.turn)


def policies_of(job: Job, samples: Sequence[Sample], config: Config) -> adapters.Policies:
    """Return RL's adapters over a model as SFT leaves it: what SFT trained is fp32."""
    model = network(job, samples)
    for _, module in adapters.full_modules(model):
        module.float()
    model.norms_in_fp32()
    model.requires_grad_(False)
    modules = adapters.policy_modules(model, drawing=config.rl.drawing)
    return adapters.Policies(
        model, adapters.rl_config(**config.rl.lora.model_dump(), modules=modules), seed=0
    )


class Enough(Exception):
    """Ends a training before it writes its last state."""


def train(
    job: Job, module: torch.nn.Module, make: Callable[[int, int], Any], metrics: list[dict[str, float]], *,
    name: str, accumulate: int, compiled: bool, watch: Watch | None = None,
    after_step: Callable[[int], dict[str, float]] | None = None,
) -> None:  # fmt: skip
    """Train for as many steps as `metrics` has places, as the stages do, and write each step's metrics
    there."""
    schedule = loop.Schedule(
        steps=len(metrics),
        lr=1e-5,
        weight_decay=0.0,
        warmup=0.0,
        clip_grad=1.0,
        accumulate=accumulate,
        save_every=10**6,
    )
    workers = min(8, cores_of_process() - 1) if job.device.type == "cuda" else 0
    machine = loop.Machine(device=job.device, dtype="bf16", workers=workers, compile=compiled)

    def note(found: dict[str, float], step: int) -> None:
        metrics[step] |= found
        job.figures.say(
            f"step {step}: {found[f'{name}/speed/step_s']:.2f} s, loss {found[f'{name}/loss']:.3f}"
        )
        if step + 1 == len(metrics):
            raise Enough

    with tempfile.TemporaryDirectory() as folder, suppress(Enough):
        loop.train(
            module, make, name=name, schedule=schedule, machine=machine, seed=0, scratch=Path(folder),
            log=note, watch=watch, after_step=after_step,
        )  # fmt: skip


# Parts


def sft(job: Job) -> None:
    samples, config = samples_of(), job.config()
    lora, settings = config.sft.lora, config.sft
    bare = network(job, samples) if job.tiny else published.build_meta(job.size)
    module, mixture = supervised(job, samples), mixture_of(job, samples)
    model = module.model
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    # gradients and two moments, fp32
    learned = sum(4 * 3 * p.numel() for p in model.parameters() if p.requires_grad)
    operations = Operations(bare, rank=lora.rank)
    first = 1 if job.tiny else WARM_UP
    steps = first + (2 if job.tiny else 5 if job.quick else 20)
    for compiled, recomputed in WAYS[1::2] if job.tiny else WAYS:
        case = (
            f"{'compiled' if compiled else 'eager'}, checkpointing "
            f"{'layers' if recomputed is None else 'none'}"
        )
        model.compiled, model.checkpointing = compiled, recomputed
        layout = layout_of(model, mask_size=settings.mask_size, max_length=settings.max_length)
        micros: list[MicroBatch] = []
        works: list[Work] = []

        def make(step: int, micro: int, layout: Layout = layout) -> Batch:
            return collate_readable(mixture.rows(step, micro, batch=2, micros=2), model.tokenizer, layout)[0]

        def counts(
            batch: Batch, micros: list[MicroBatch] = micros, works: list[Work] = works
        ) -> dict[str, float]:
            micros.append(size_of(batch))
            works.append(Work.of(batch))
            return {"tokens": micros[-1].rows * micros[-1].tokens}

        metrics: list[dict[str, float]] = [{} for _ in range(steps)]
        counters.clear()
        job.reset_peak()
        try:
            train(
                job,
                module,
                make,
                metrics,
                name="sft",
                accumulate=2,
                compiled=compiled,
                watch=Watch(counts=counts),
            )
        except torch.OutOfMemoryError as error:
            job.figures.say(f"{case}: {str(error).splitlines()[0]}")
            continue
        counted = metrics[first:]
        spent_s = [m["sft/speed/step_s"] for m in counted]
        tokens = sum(m["sft/speed/tokens_per_s"] * m["sft/speed/step_s"] for m in counted)
        useful = sum(sum(operations.of(work).values()) for work in works[2 * first :])
        kept = [
            activation_bytes(
                bare, m, rank=lora.rank, dropout=lora.dropout > 0, half=True, recomputed=recomputed
            )
            for m in micros
        ]
        job.figures.add(
            case,
            tokens_per_s=tokens / sum(spent_s),
            mfu=useful / sum(spent_s) / (peak_flops(job.device) or PEAK),
            step_s=statistics.median(spent_s),
            slowest_step_s=max(spent_s),
            first_step_s=metrics[0]["sft/speed/step_s"],
            graphs=compiled_graphs()["compile/graphs"],
            breaks=compiled_graphs()["compile/breaks"],
            peak_gb=job.peak_gb(),
            formula_gb=(weights + learned + max(sum(parts.values()) for parts in kept)) / 1e9,
            waiting=sum(m["sft/speed/waiting_for_data"] * s for m, s in zip(counted, spent_s, strict=True))
            / sum(spent_s),
            tokens_a_row=statistics.mean(m.tokens for m in micros),
        )
        if recomputed == 0:
            batch = next(b for b in (make(step, 0) for step in range(steps)) if len(b.pair_seg))
            micro_batch(job, module, batch, "compiled" if compiled else "eager")


def size_of(batch: Batch) -> MicroBatch:
    """Return what a micro-batch holds, without padding."""
    rows = len(batch.input_ids)
    return MicroBatch(
        rows=rows,
        tokens=int((batch.branch >= 0).sum()) // rows,
        learned=batch.learned.shape[1] // rows,
        grids=batch.views[0].grids,
        masks=len(batch.pair_seg) // rows,
    )


def micro_batch(job: Job, module: Supervised, batch: Batch, case: str) -> None:
    """Measure the parts of one micro-batch, and its longest kernels."""
    model = module.model
    optimizer = optimizer_of(module, lr=1e-5, weight_decay=0.0, scales={}, fused=job.device.type == "cuda")
    batch = module.begin_step([batch])[0].to(job.device)
    spent: dict[str, list[float]] = defaultdict(list)

    def timed(name: str, compute: Callable[[], Any]) -> Any:
        begun = job.clock()
        found = compute()
        spent[f"{name}_s"].append(job.clock() - begun)
        return found

    def once() -> None:
        with job.autocast():
            images = timed("vision_tower", lambda: image_tokens(model, batch.views))
            with torch.no_grad():
                frames = timed("sam2_encoder", lambda: model.sam2.encode(batch.sam_frames))
            hidden = timed(
                "language_forward", lambda: model.hidden_states(packed(batch), images.split(batch.views))
            )
            loss = timed("masks_and_losses", lambda: loss_of(module, batch, hidden, frames))
        timed("backward", loss.backward)
        timed("optimizer", optimizer.step)
        optimizer.zero_grad()

    for _ in range(2 if job.quick else 5):
        once()
    job.figures.add(
        f"micro-batch, {case}", **{name: statistics.median(times[1:]) for name, times in spent.items()}
    )
    on_gpu = job.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as profiled:
        once()
    rows = [
        row
        for row in profiled.key_averages()
        if row.device_type == (DeviceType.CUDA if on_gpu else DeviceType.CPU)
    ]
    times = {
        row.key: (row.self_device_time_total if on_gpu else row.self_cpu_time_total) / 1e3 for row in rows
    }
    job.figures.add(f"{KERNELS}{case}", all=sum(times.values()), number=sum(row.count for row in rows))
    for name in sorted(times, key=times.__getitem__, reverse=True)[:10]:
        job.figures.add(f"{KERNELS}{case}", **{name[:80]: times[name]})


def loss_of(module: Supervised, batch: Batch, hidden: torch.Tensor, frames: FrameFeatures) -> torch.Tensor:
    """Return the loss of a batch with masks, as `Supervised.forward` does, from hidden states and encoded
    frames."""
    (rows, places), model = batch.learned, module.model
    text = module.text_loss(hidden[rows, places - 1], batch.input_ids[rows, places])
    embeddings = model.seg_embeddings(hidden[batch.segs[0], batch.segs[1]])
    logits = model.sam2.decode(frames, batch.pair_frame, embeddings[batch.pair_seg]).logits
    bce, dice = mask_losses(logits, batch.targets, points=module.points, seeds=batch.pair_seeds)
    return text + module.mask_weight * bce + module.dice_weight * dice


@torch.no_grad()
def decode(job: Job) -> None:
    samples, config = captions(samples_of()), job.config()
    model = policies_of(job, samples, config).model
    exact_head(model)
    reader = Reader(temperature=1.0, forbidden=[model.image_token_id, *stop_ids(model)], guard="guard")
    pictures = {s.frames: s for s in reversed(samples)}.values()
    # one tile
    scenes = [draw_scene(seed=7, split="val", index=i, image_size=448).image for i in range(len(pictures))]
    requests = {
        "long": [caption_request(s, true_mask(s)) for s in pictures],
        "short": [
            request_of(image=scene, text=prompts.REFERRING_EVAL.format(text=THINGS[0])) for scene in scenes
        ],
    }
    few, many = (2, 8) if job.tiny else (8, 64)
    cases = product(
        requests.items(), (16,) if job.tiny else (64, 16), (False,) if job.tiny else (True, False)
    )
    for (length, asked), rows, model.compiled in cases:
        with job.autocast():
            prompted = prompt(model, asked[: rows // GROUP])

            def said(tokens: int, prompted: PrefilledBatch = prompted, rows: int = rows) -> None:
                found = sample(
                    model, prompted, group=GROUP, max_tokens=tokens, reader=reader, seeds=range(rows)
                )
                assert {len(answer.ids) for answer in found} == {tokens}

            job.reset_peak()
            begun = job.clock()
            said(many)
            first_s = job.clock() - begun
            short_s, long_s = (job.seconds(partial(said, tokens)) for tokens in (few, many))
        job.figures.add(
            f"{rows} rows, {length} prompts, {'compiled' if model.compiled else 'eager'}",
            token_ms=1e3 * (long_s - short_s) / (many - few),
            all_ms=1e3 * long_s / many,
            tokens_per_s=rows * many / long_s,
            first_call_s=first_s,
            peak_gb=job.peak_gb(),
            prompt_tokens=float(prompted.prefixes.shape[1] + prompted.embeds.shape[1]),
        )


def rl(job: Job) -> None:
    samples = captions(samples_of())
    batch, group, tokens = (2, 2, 8) if job.tiny else (8, GROUP, 64)
    config = job.config(
        f"rl.optim.batch={batch}", "rl.optim.accumulate=1", f"rl.group={group}", f"rl.max_tokens={tokens}",
        "rl.checkpointing=layers", "rl.loops={caption: 1.0, mask: 0.2}", "rl.samples_every=0", "rl.rows=0",
        "rl.use_llm_judge=false",
    )  # fmt: skip
    policies = policies_of(job, samples, config)
    model = policies.model
    model.checkpointing = None
    joined = Joined([samples])
    practice = samples_by_loop(joined, config.rl.loops)
    for compiled in (False,) if job.tiny else (False, True):
        model.compiled = compiled
        metrics: list[dict[str, float]] = [{} for _ in range(3)]
        counters.clear()
        job.reset_peak()
        module = DualLoop(
            policies, config.rl, seed=0, points=config.sft.mask_points,
            loss_weights=(config.sft.mask_weight, config.sft.dice_weight), rewards=REWARDS, log=lambda found,
            step, metrics=metrics: metrics[step].update(found),
        )  # fmt: skip
        with tempfile.TemporaryDirectory() as folder:
            make = RolloutBatches(
                config, practice, model, joined, LeftOutFile(Path(folder) / "left_out.jsonl")
            )
            train(
                job,
                module,
                make,
                metrics,
                name="rl",
                accumulate=1,
                compiled=compiled,
                after_step=module.after_step,
            )
        parts = [name for name in metrics[-1] if name.startswith("rl/seconds/")]
        job.figures.add(
            "compiled" if compiled else "eager",
            whole_step_s=min(m["rl/speed/step_s"] for m in metrics[1:]),
            first_step_s=metrics[0]["rl/speed/step_s"],
            graphs=compiled_graphs()["compile/graphs"],
            breaks=compiled_graphs()["compile/breaks"],
            peak_gb=job.peak_gb(),
            **{f"{name.removeprefix('rl/seconds/')}_s": min(m[name] for m in metrics[1:]) for name in parts},
        )


def trl(job: Job) -> None:
    if not find_spec("trl"):
        raise Skip("trl is not installed")
    if job.tiny:
        rl_speed.BATCH, rl_speed.GROUP, rl_speed.ANSWER, prompts_of = 2, 2, 8, 16
    else:
        rl_speed.BATCH, rl_speed.GROUP, rl_speed.ANSWER, prompts_of = 8, GROUP, 128, 512
        rl_speed.WORDS, rl_speed.LANGUAGE = (
            32000,
            {"hidden": 1536, "layers": 28, "heads": 12, "kv_heads": 2, "mlp": 8960},
        )
    torch.set_default_device(job.device)  # rl_speed makes its tensors there
    half = job.device.type == "cuda"
    own = rl_speed.Own(half=half)

    def measured(name: str, step: Callable[[int, int], int]) -> float:
        turns = count()
        job.reset_peak()
        with precision.autocast(job.device, torch.bfloat16 if half else torch.float32):
            step_s = job.seconds(lambda: step(prompts_of, next(turns)))
        job.figures.add(name, step_s=step_s, peak_gb=job.peak_gb())
        return step_s

    def generate(length: int, turn: int) -> int:
        return len(own.sample_answers(own.ids(rl_speed.drawn(length, turn)), turn))

    measured("generation here", generate)
    own_s = measured("here", own.step)
    for checkpointing in (False, True):
        name = f"TRL, checkpointing {'on' if checkpointing else 'off'}"
        theirs_s = measured(name, rl_speed.Trl(own, checkpointing=checkpointing, half=half).step)
        job.figures.add(name, speedup=theirs_s / own_s)


def parity(job: Job) -> None:
    golden = Path(os.environ.get("ANS_REFERENCE", "/none")) / "golden"
    if not golden.is_dir():
        raise Skip("ANS_REFERENCE names no folder with `golden`")
    pictures = [
        Image.open(BytesIO(frames[0])).convert("RGB")
        for frames in dict.fromkeys(s.frames for s in samples_of())
    ][:3]
    questions = ("<image>Please segment the person.", "<image>Describe.")
    asked = [request_of(image=picture, text=text) for picture in pictures for text in questions][
        : 2 if job.quick else None
    ]
    for kind in ("qwen2", "qwen3_vl", "qwen2_5_vl"):
        right = Sa2VA.from_pretrained(golden / kind, dtype=torch.float32, device_map="cpu").predict_many(
            asked, batch=1
        )
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if dtype == torch.float16 and job.device.type == "cpu":
                continue
            model = Sa2VA.from_pretrained(golden / kind, dtype=dtype, device_map=job.device)
            found = model.predict_many(asked, batch=1)
            equal = sum(a.text == b.text for a, b in zip(right, found, strict=True)) / len(asked)
            pairs = [
                (x, y)
                for a, b in zip(right, found, strict=True)
                for x, y in zip(a.masks, b.masks, strict=False)
            ]
            ious = [float((x & y).sum() / max(1, (x | y).sum())) if (x | y).any() else 1.0 for x, y in pairs]
            least = {"mean_iou": statistics.mean(ious), "least_iou": min(ious)} if ious else {}
            job.figures.add(f"{kind}, {str(dtype).removeprefix('torch.')}", texts_equal=equal, **least)


def state(job: Job) -> None:
    module = supervised(job, samples_of())
    optimizer = optimizer_of(module, lr=1e-5, weight_decay=0.0, scales={}, fused=job.device.type == "cuda")
    wrapped, optimizer = Accelerator(cpu=job.device.type == "cpu").prepare(module, optimizer)
    for p in module.parameters():
        p.grad = torch.zeros_like(p) if p.requires_grad else None
    optimizer.step()
    optimizer.zero_grad()
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if shutil.disk_usage(memory).free > 32e9 else None) as name:
        folder = Path(name)
        with states.Writer() as writer:
            begun = job.clock()
            writer.save(folder, 1, module, optimizer, wrapped, [], deepspeed_stage=0, keep=2)
            copied = job.clock()
        written = job.clock()
        states.resume(folder, module, optimizer, wrapped, deepspeed_stage=0, device=job.device)
        read = job.clock()
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    job.figures.add(
        "trained tensors and optimizer",
        waiting_s=copied - begun,
        written_s=written - begun,
        read_s=read - written,
        gigabytes=size / 1e9,
    )


def resume(job: Job) -> None:
    """Train for two steps, save, and go on for two, plain and with ZeRO-2 on one process (NCCL): where a fused AdamW
    and DeepSpeed's own autocast meet the loop."""
    if job.size.startswith("sa2va"):
        job = replace(job, size="sa2va-1b")
    samples, settings = samples_of(), job.config().sft
    mixture = mixture_of(job, samples)
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    os.environ["MASTER_PORT"] = str(free_port())

    def steps_s(steps: int, machine: loop.Machine, folder: Path) -> list[float]:
        """Train up to so many steps from the state in the folder, if there is one; return each step's seconds."""
        module, spent_s = supervised(job, samples), list[float]()
        layout = layout_of(module.model, mask_size=settings.mask_size, max_length=settings.max_length)

        def make(step: int, micro: int) -> Batch:
            rows = mixture.rows(step, micro, batch=2, micros=2)
            return collate_readable(rows, module.model.tokenizer, layout)[0]

        schedule = loop.Schedule(
            steps=steps, lr=1e-5, weight_decay=0.0, warmup=0.0, clip_grad=1.0, accumulate=2, save_every=2
        )
        loop.train(
            module, make, name="sft", schedule=schedule, machine=machine, seed=0, scratch=folder,
            log=lambda found, step: spent_s.append(found["sft/speed/step_s"]),
        )  # fmt: skip
        return spent_s

    for stage in (0, 2) if job.device.type == "cuda" else (0,):  # DeepSpeed compiles an operation for CPUs
        machine = loop.Machine(device=job.device, dtype="bf16", deepspeed_stage=stage)
        with tempfile.TemporaryDirectory() as name:
            begun, resumed = (steps_s(steps, machine, Path(name)) for steps in (2, 4))
        AcceleratorState._reset_state()  # accelerate takes one configuration of DeepSpeed a process
        job.figures.add(f"ZeRO-{stage}" if stage else "plain", step_s=begun[1], resumed_step_s=resumed[1])


def evaluate(job: Job) -> None:
    samples = captions(samples_of())[: 4 if job.tiny or job.quick else 64]
    model = network(job, samples, speaks=True)
    for name, asked in (("captions", caption_request), ("masks", mask_request)):
        second: Callable[[Sample], Any] = true_mask if name == "captions" else lambda s: s.text
        requests = [asked(s, second(s)) for s in samples]
        ask = partial(predict.predict, model, requests, max_tokens=24, batch=8)
        job.figures.add(
            name, questions_per_s=len(requests) / job.seconds(ask, repeats=1), peak_gb=job.peak_gb()
        )


def track(job: Job) -> None:
    frames, side = (4, 128) if job.tiny else (8 if job.quick else 32, 1024)
    model = network(job, samples_of()[:8])
    clip = [
        Image.fromarray(f)
        for f in draw_clip(seed=7, split="val", index=3, image_size=side, frames=frames).frames
    ]
    for objects in (3, 16):
        embeddings = torch.from_numpy(
            np.random.default_rng(0).standard_normal((objects, model.config.grounding.width), np.float32)
        )
        embeddings = embeddings.to(job.device, model.text_hidden_fcs[0].weight.dtype)
        job.reset_peak()
        spent_s = job.seconds(partial(track_objects, model, clip, embeddings, PredictOptions()), repeats=1)
        job.figures.add(f"{objects} objects", frames_per_s=frames / spent_s, peak_gb=job.peak_gb())


def memory(job: Job) -> None:
    frames, objects, side = (2, 1, 128) if job.tiny else (8, 3, 512)
    batch = memory_training.square(side=side, frames=frames, objects=objects).to(job.device)
    chosen = argparse.Namespace(modules=memory_training.DEFAULT)
    for way in memory_training.WAYS:
        sam2 = Grounding(memory_training.sized("tiny" if job.tiny else "large", side)).to(job.device)
        module, optimizer = memory_training.trainee(sam2, way, chosen)

        def step(module: torch.nn.Module = module, optimizer: Any = optimizer) -> None:
            with job.autocast():
                loss, _ = module(module.begin_step([batch])[0])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        job.reset_peak()
        job.figures.add(memory_training.WAYS[way], step_s=job.seconds(step), peak_gb=job.peak_gb())


@dataclass(frozen=True, kw_only=True)
class Part:
    measure: Callable[[Job], None]
    limit_s: int


PARTS = {
    "sft": Part(measure=sft, limit_s=330),
    "decode": Part(measure=decode, limit_s=150),
    "rl": Part(measure=rl, limit_s=240),
    "trl": Part(measure=trl, limit_s=180),
    "parity": Part(measure=parity, limit_s=120),
    "state": Part(measure=state, limit_s=150),
    "resume": Part(measure=resume, limit_s=150),
    "evaluate": Part(measure=evaluate, limit_s=120),
    "track": Part(measure=track, limit_s=90),
    "memory": Part(measure=memory, limit_s=90),
}
"""In the order of importance."""
