"""convert: base, SFT and RL tensors in, one Hugging Face folder out that `Sa2VA.from_pretrained` loads,
checked to equal the trained model.

dvc repro -s convert       tiny: seconds
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import yaml

from ans_core import data
from ans_core.benchmarks import BENCHMARKS
from ans_core.benchmarks.loops import caption_request, mask_request, true_mask
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints.trained import policy_model, rl_model
from ans_core.config import Config
from ans_core.data.regions import is_region
from ans_core.inference.generation import generate, seg_embeddings_of
from ans_core.inference.prefill import prompt
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.precision import inference_dtype
from ans_core.stages.launch import machine_of, show_precision
from ans_core.types import Log, Request

PROBES = 8
"""Number of held-out samples on which both models are compared."""
TOLERANCE = 2e-4
"""Largest difference of mask logits relative to their largest value; merging LoRA rounds once."""
HALF_TOLERANCE, HALF_TEXTS = 0.1, 0.25
"""For weights in half precision: the same tolerance, and the share of answers that may differ, because merged
weights are rounded. (tiny's, cast to bf16: 0.011 and none of 16.)"""
CARD_SETTINGS: Any = {
    "seed": True, "base": True, "memory": True, "sft": True, "rl": True, "convert": True,
    "evaluate": {"split"}, "judge": {"model", "meteor_weight", "judge_weight", "on_failure"},
}  # fmt: skip
"""Settings that decide the weights and this stage's output: a card with others would make another folder of
equal weights."""
BENCHMARK_DATA = ("regions", "videos")
"""Formats whose known data sets are benchmark test items: a model trained on them gets a tag that says so."""


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: data, base, sft, rl. Writes the model folder (weights, config, tokenizer,
    README.md as model card, parity.json) to `out`."""
    machine = machine_of(cfg.launch)
    base, sft, rl = inputs["base"] / "base", inputs["sft"], inputs["rl"]
    requests = probes(inputs["data"], cfg.evaluate.split)
    dtype = inference_dtype(machine.device)
    trained = outputs(
        policy_model(base, sft, rl, dtype=dtype, device=machine.device), requests, cfg.rl.max_tokens
    )
    metadata = {"stage": "convert", "profile": cfg.profile, "seed": cfg.seed}
    # in the base's own precision, which rounds what is merged
    merged = rl_model(base, sft, rl, device=machine.device)
    rounded = merged.dtype != torch.float32
    checkpoint.save(merged, out, max_shard=cfg.convert.max_shard, metadata=metadata)
    del merged
    model = Sa2VA.from_pretrained(out, dtype=dtype, device_map=machine.device)
    show_precision(model, log)
    difference = compare(trained, outputs(model, requests, cfg.rl.max_tokens))
    tolerance, texts = (HALF_TOLERANCE, HALF_TEXTS * difference["probes"]) if rounded else (TOLERANCE, 0.0)
    if not difference["masks"] <= tolerance or difference["texts"] > texts:  # NaN is refused too
        raise RuntimeError(
            f"the converted model is not the trained one: {difference}; relative tolerance {tolerance}, "
            f"answers {texts:.0f}"
        )
    (out / "parity.json").write_text(json.dumps(difference, indent=1))
    (out / "README.md").write_text(model_card(cfg, inputs["data"], difference), encoding="utf-8")
    return {f"parity/{key}": value for key, value in difference.items()}


def probes(prepared: Path, split: str) -> list[Request]:
    """Return requests in both directions for a few held-out regions; if the data has none, what benchmarks
    ask about pictures (a clip's first frame)."""
    sources = data.sources(prepared, split) or data.sources(prepared, "train")
    samples = [s for source in sources for s in source.samples]
    regions = [s for s in samples if is_region(s) and rle.area(true_mask(s))][:PROBES]
    if regions:
        return [r for s in regions for r in (caption_request(s, true_mask(s)), mask_request(s, s.text))]
    return [BENCHMARKS[s.task].request(s) for s in samples if s.task in BENCHMARKS][: 2 * PROBES]


@torch.no_grad()
def outputs(
    model: Network, requests: Sequence[Request], max_tokens: int
) -> tuple[list[list[int]], list[torch.Tensor]]:
    """Return every greedy answer's token ids, and the mask logits of its `[SEG]` tokens."""
    if not requests:
        return [], []
    with model.inference_autocast():
        prompted = prompt(model, requests)
        ids = generate(model, prompted, max_tokens=max_tokens)
        pixels = transforms.normalise([row[0] for row in prompted.images], size=model.sam2.image_size)
        frames = model.sam2.encode(pixels.to(model.device))
        embeddings = seg_embeddings_of(model, prompted, ids)
        frame = [torch.full((len(e),), i, device=e.device) for i, e in enumerate(embeddings)]
        return ids, [
            model.sam2.decode(frames, f, e).logits if len(e) else e
            for f, e in zip(frame, embeddings, strict=True)
        ]


def compare(
    one: tuple[list[list[int]], list[torch.Tensor]], other: tuple[list[list[int]], list[torch.Tensor]]
) -> dict[str, float]:
    """Compare outputs. texts: number of answers that differ; masks: largest relative difference of mask
    logits in the others; probes: answers compared."""
    same = [a == b for a, b in zip(one[0], other[0], strict=True)]
    pairs = [(a, b) for alike, a, b in zip(same, one[1], other[1], strict=True) if alike and len(a)]
    relative = [(a - b).abs().max() / a.abs().max().clamp(min=1) for a, b in pairs]
    return {
        "texts": float(same.count(False)),
        "masks": float(torch.stack(relative).max()) if relative else 0.0,
        "probes": float(len(same)),
    }


def model_card(cfg: Config, prepared: Path, difference: dict[str, float]) -> str:
    entries = data.read_entries(prepared)
    listed = "\n".join(f"- `{e.name}` ({e.split}, format {e.format})" for e in entries)
    tested = [e.name for e in entries if e.split == "train" and e.format in BENCHMARK_DATA]
    warning = (
        f"\n> Trained on benchmark test items ({', '.join(sorted(set(tested)))}): not for reported "
        "benchmark numbers.\n"
        if tested
        else ""
    )
    tags = ["ans", "sa2va", "image-segmentation", *(["trained-on-test-items"] if tested else [])]
    front = yaml.safe_dump(
        {"license": "apache-2.0", "library_name": "ans", "pipeline_tag": "image-text-to-text", "tags": tags}
    )
    settings = yaml.safe_dump(cfg.model_dump(mode="json", include=CARD_SETTINGS), sort_keys=False)
    return f"""---
{front}---
# {cfg.profile} (seed {cfg.seed})

A pixel-grounded multimodal model of the Sa2VA family, trained by ANS: a vision-language model (InternVL or Qwen-VL) + SAM2.
`[SEG]` in an answer draws a mask.
{warning}
    from ans_core.model.network import Network
    from ans_core.inference.sa2va import Sa2VA
    model = Sa2VA.from_pretrained("path/to/this/folder")

## Data
{listed}

## Metrics
Held-out metrics of every stage are in the run's report (`report.html`, `metrics/summary.json`). Converted and trained model gave the same
{difference["probes"]:.0f} answers; their mask logits differ by {difference["masks"]:.1e} of the largest.

## Licence
Apache-2.0 for what was trained here. Published base weights keep their own licences (base: {cfg.base.source}
{cfg.base.internvl} {cfg.base.sam2}), and so do data sets.

## Settings
```yaml
{settings}```
"""
