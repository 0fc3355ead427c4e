"""rl: the merged SFT model and (image, mask, caption) samples in, the policy's trained tensors out.

    dvc repro -s rl            tiny: about 4 minutes on 2 cores

Policy and teacher are two adapters over one backbone; adapters off is the reference. Frozen: embeddings, head, encoders.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from ans_core import data, dist, loop
from ans_core.config import Config
from ans_core.data.mixture import picture_key
from ans_core.model import adapters, checkpoint
from ans_core.model.parts import check_moved, hashes
from ans_core.model.stages import sft_model
from ans_core.rl.dual_loop import DualLoop, RlBatch, Settings, collate
from ans_core.rl.loops import true_mask
from ans_core.stages.launch import last_means, machine_of, schedule_of
from ans_core.types import Log, Sample


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """inputs: data, base, sft. Writes the policy's tensors (delta on SFT), curves.csv, rewards.json and moved.json to `out`."""
    settings = cfg.rl
    machine = machine_of(cfg.launch)
    model = sft_model(inputs["base"] / "base", inputs["sft"])
    sources = data.sources(inputs["data"], "train")
    samples = [s for s in data.of_kind(sources, "region_caption") if len(s.masks) == 1]
    if not samples:
        raise ValueError(
            "rl needs data sets of region captions (an image, one mask, its caption); prepare.sources or prepare.scenes give none"
        )
    expressions = expressions_of(samples, data.of_kind(sources, "referring"))
    modules = adapters.policy_modules(settings.loops)
    lora = adapters.rl_config(**settings.lora.model_dump(), modules=modules)
    policies = adapters.Policies(model, lora, seed=dist.seed_of(cfg.seed, "rl lora"))
    before = hashes(model)
    weights = (cfg.sft.mask_weight, cfg.sft.dice_weight)
    chosen = Settings(**{name: getattr(settings, name) for name in Settings.__dataclass_fields__})
    module = DualLoop(policies, chosen, seed=cfg.seed, points=cfg.sft.mask_points, loss_weights=weights)

    def make(step: int, micro: int) -> RlBatch:
        rows = rows_of(len(samples), step, micro, batch=settings.optim.batch, micros=settings.optim.accumulate, seed=cfg.seed)
        number = step * settings.optim.accumulate + micro
        rng = dist.rng_of(cfg.seed, "rl asked", number, dist.rank())
        asked = [rng.choice(expressions[i] or [samples[i].text]) if rng.random() < settings.expressions else samples[i].text for i in rows]
        return collate([samples[i] for i in rows], asked, model, mask_size=cfg.sft.mask_size, step=number)

    curves = loop.train(
        module, make, name="rl", schedule=schedule_of(settings.optim), machine=machine, seed=cfg.seed, scratch=scratch, log=log,
        after_step=module.after_step, scales=dict.fromkeys(modules, settings.modules_lr),
    )  # fmt: skip
    moved = check_moved(before, model)
    config = {"stage": "rl", "lora": settings.lora.model_dump(), "modules": modules, "seed": cfg.seed}
    checkpoint.save_delta(policies.tensors("policy"), out, base_hash=checkpoint.weights_hash(inputs["sft"]), config=config)
    loop.write_curves(out / "curves.csv", {"rl": curves})
    (out / "rewards.json").write_text(json.dumps(module.record))
    (out / "moved.json").write_text(json.dumps(moved, indent=1))
    return last_means(curves)


def expressions_of(samples: Sequence[Sample], referring: Sequence[Sample]) -> list[list[str]]:
    """For every region the expressions that mean it: those with its picture and its very mask."""
    found: dict[tuple[object, ...], list[str]] = defaultdict(list)
    for sample in referring:
        if len(sample.masks) == 1:
            found[_thing(sample)].append(sample.text)
    return [found.get(_thing(sample), []) for sample in samples]


def _thing(sample: Sample) -> tuple[object, ...]:
    mask = true_mask(sample)
    return picture_key(sample), str(mask["size"]), mask["counts"]


def rows_of(count: int, step: int, micro: int, *, batch: int, micros: int, seed: int) -> list[int]:
    """Indices of this process's samples: shuffled epochs, decided by (seed, step) alone."""
    numbers = range(step * batch, (step + 1) * batch)[micro * dist.world_size() + dist.rank() :: micros * dist.world_size()]
    orders: dict[int, list[int]] = {}
    chosen = []
    for number in numbers:
        epoch, place = divmod(number, count)
        if epoch not in orders:
            orders[epoch] = list(range(count))
            dist.rng_of(seed, "rl epoch", epoch).shuffle(orders[epoch])
        chosen.append(orders[epoch][place])
    return chosen
