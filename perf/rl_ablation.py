"""What each part of RL is good for: short runs from one SFT model with a part left out, judged by a frozen
inverse model.

    ans run                                                # makes runs/tiny, up to `sft` is enough
    python perf/rl_ablation.py                             # two hours or more; writes perf/results/rl-ablation-seed<N>.json as it goes
    python perf/rl_ablation.py --table                     # only the table, of all seeds that are there
    python perf/rl_ablation.py --steps 180 --name rl-gain --only "as in the profile" "ten times the KL"    # into a file of another name

Every run is the profile's RL with `--steps` steps, without rows of SFT beside it unless its name says so.
Judged on held-out regions (`val`): IoU of loop 1 (the model captions, the frozen SFT model draws), METEOR of
loop 2 (the model draws, the frozen SFT model captions), captions that are right word for word, and those
whose colour and shape are; and gIoU of expressions of one thing, and of all (absent and several things).
Gains are paired by region or expression with the SFT model's own. Printed beside the table: the share of each
loop's groups in which all rewards are equal, a mean over the steps. A file of the same seed, steps and
regions keeps the runs that it has: name another, or remove it, if SFT's model or the code is another one.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ans_core import data
from ans_core.benchmarks import BENCHMARKS
from ans_core.benchmarks.loops import loop_scores
from ans_core.benchmarks.region_caption import ATTRIBUTES
from ans_core.checkpoints.trained import rl_model, sft_model
from ans_core.config import Config, load
from ans_core.data.regions import is_region
from ans_core.inference.predict import predict
from ans_core.metrics.caption import attributes_right, same_text
from ans_core.stages import rl
from ans_core.types import Predict, Sample

LOOP_2 = {"loops": {"mask": 0.2}}
RUNS: dict[str, dict[str, Any]] = {
    "as in the profile": {},
    "loop 1 alone": {"loops": {"caption": 1.0}},
    "loop 2 alone": LOOP_2,
    "refer alone": {"loops": {"refer": 1.0}},
    "rows of SFT, too": {"rows": 8},
    "what makes masks almost still": {"modules_lr": 1e-3},
    "no judge": {"use_llm_judge": False},
    "teacher frozen at SFT": {"inverse": "reference"},
    "no teacher: the policy is its own inverse": {"inverse": "policy"},
    "no KL": {"kl": 0.0, "kl_words": 0.0},
    "groups of 12, half the samples": {"group": 12, "optim": {"batch": 4}},
    "groups of 3, twice the samples": {"group": 3, "optim": {"batch": 16}},
    "advantages by group": {"scale_rewards": "group"},
    "advantages not scaled": {"scale_rewards": "none"},
    "reward parts normalised, then summed": {"combine_rewards": "normalise_then_sum"},
    "loop 2 alone, no supervised mask loss": {**LOOP_2, "mask_weight": 0.0},
    "ten times the KL": {"kl": 0.2},
    "three tenths absent": {"absent": 0.3},
    "twice the samples": {"optim": {"batch": 16}},
    "twice the rate": {"optim": {"lr": 1.2e-3}},
    "twice the candidates": {"oversample": 1.0},
    "twice the candidates, twice the rate": {"oversample": 1.0, "optim": {"lr": 1.2e-3}},
    "twice the candidates, twice the rate, rows of SFT": {"oversample": 1.0, "optim": {"lr": 1.2e-3}, "rows": 8},
    "twice the candidates, by Muon": {"oversample": 1.0, "optim": {"muon_lr": 1.2e-3}},
    "ten times the KL, twice the samples": {"kl": 0.2, "optim": {"batch": 16}},
    "ten times the KL, twice the rate": {"kl": 0.2, "optim": {"lr": 1.2e-3}},
    "true captions compared, too": {"rewards_caption": {"iou": 1.0, "meteor": 1.0}},
    "loop 2, too": {"loops": {"caption": 1.0, "mask": 0.2}},
}  # fmt: skip
"""Name -> what differs from the profile's `rl` without rows of SFT."""

NOTHING = "nothing moved, so the stage refused it"


def configured(cfg: Config, changes: dict[str, Any], steps: int) -> Config:
    values = cfg.model_dump()
    optim = values["rl"]["optim"] | changes.get("optim", {}) | {"steps": steps}
    values["rl"] |= {"rows": 0, **changes, "optim": optim, "samples_every": 0}
    return Config.model_validate(values)


def judged(
    ask: Predict, inverse: Predict, regions: Sequence[Sample], referring: Sequence[Sample]
) -> dict[str, list[float]]:
    """Return the table's columns, each region by region or expression by expression."""
    caption, refer = BENCHMARKS["region_caption"], BENCHMARKS["referring"]
    found = {
        f"{loop} {metric}": values for loop, metric, values in loop_scores(regions, ask=ask, inverse=inverse)
    }
    told = ask([caption.request(sample) for sample in regions])
    answers = ask([refer.request(sample) for sample in referring])
    ious = [sample["score"] for sample in refer.of_samples(referring, answers).samples]
    found["exact captions"] = [float(same_text(p.text, s.text)) for p, s in zip(told, regions, strict=True)]
    right = attributes_right(
        [p.text for p in told], [{key: s.meta[key] for key in ATTRIBUTES if key in s.meta} for s in regions]
    )
    found["attributes"] = [float(r["colour"] and r["shape"]) for r in right if "colour" in r and "shape" in r]
    found["gIoU"] = [iou for iou, s in zip(ious, referring, strict=True) if len(s.masks) == 1]
    found["all expressions"] = ious
    return {name: [round(value, 5) for value in found[name]] for name in NAMES}


def tied(curves: Path) -> dict[str, float]:
    """Return the share of each loop's groups that teach nothing, because all their rewards are equal."""
    found: dict[str, list[float]] = {}
    with curves.open() as file:
        for line in csv.DictReader(file):
            _, loop, *name = line["name"].split("/")
            if name == ["zero_spread"]:
                found.setdefault(loop, []).append(float(line["value"]))
    return {loop: round(statistics.fmean(values), 3) for loop, values in found.items()}


NAMES = ("loop1 IoU", "loop2 METEOR", "exact captions", "attributes", "gIoU", "all expressions")
"""The table's columns."""


def table(paths: Sequence[Path]) -> str:
    """One seed: gains +- standard error over regions or expressions; several: their mean +- deviation over
    seeds. A column for which an older file holds one number has no standard error, and one that it lacks is
    left out."""
    seeds = [json.loads(path.read_text())["runs"] for path in paths]
    names = [n for n in NAMES if all(n in runs["SFT"] for runs in seeds)]
    lines = [f"| run | {' | '.join(names)} |", "|-" * (len(names) + 1) + "|"]
    lines.append(
        "| SFT | "
        + " | ".join(
            f"{statistics.fmean(statistics.fmean(runs['SFT'][n]) for runs in seeds):.3f}" for n in names
        )
        + " |"
    )
    for run in seeds[0]:
        if run != "SFT" and all(run in runs for runs in seeds):
            moved = all(runs[run] for runs in seeds)
            cells = (
                [gain([differences(runs, run, n) for runs in seeds]) for n in names]
                if moved
                else [NOTHING, *[""] * (len(names) - 1)]
            )
            lines.append(f"| {run} | {' | '.join(cells)} |")
    return "\n".join(lines)


def differences(runs: dict[str, dict[str, list[float]]], run: str, name: str) -> list[float]:
    return [after - before for after, before in zip(runs[run][name], runs["SFT"][name], strict=True)]


def gain(seeds: Sequence[Sequence[float]]) -> str:
    means = [statistics.fmean(one) for one in seeds]
    told = f"{statistics.fmean(means):+.4f}"
    if len(means) > 1:
        return f"{told} ± {statistics.stdev(means):.4f}"
    if len(seeds[0]) > 1:
        return f"{told} ± {statistics.stdev(seeds[0]) / len(seeds[0]) ** 0.5:.4f}"
    return told


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--regions", type=int, default=800)
    parser.add_argument("--only", nargs="*", default=list(RUNS), choices=list(RUNS))
    parser.add_argument("--name", default="rl-ablation", help="of the file under perf/results")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    cfg = load(Path("params.yaml"))
    path = Path(f"perf/results/{arguments.name}-seed{cfg.seed}.json")
    path.parent.mkdir(exist_ok=True)
    if arguments.table:
        if not (paths := sorted(path.parent.glob(f"{arguments.name}-seed*.json"))):
            raise SystemExit(
                f"{path.parent}/{arguments.name}-seed*.json: no such file; make one without --table"
            )
        print(table(paths))
        return
    runs = Path("runs") / cfg.profile
    inputs = {name: runs / name for name in ("data", "base", "sft", "questions")}
    val = data.sources(inputs["data"], "val")
    regions = [s for s in data.of_kind(val, "region_caption") if is_region(s)][: arguments.regions]
    referring = data.of_kind(val, "referring")
    chosen = {"seed": cfg.seed, "steps": arguments.steps, "regions": len(regions)}
    results = json.loads(path.read_text()) if path.is_file() else {}
    if {name: results.get(name) for name in chosen} != chosen:
        results = {**chosen, "runs": {}}

    def asking(model: Any) -> Predict:
        return partial(predict, model, max_tokens=cfg.evaluate.max_tokens, batch=cfg.evaluate.batch)

    start = asking(sft_model(inputs["base"] / "base", inputs["sft"]))
    if "SFT" not in results["runs"]:
        results["runs"]["SFT"] = judged(start, start, regions, referring)
    for name in (name for name in arguments.only if name not in results["runs"]):
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder, torch.random.fork_rng():
            out, scratch = Path(folder, "out"), Path(folder, "scratch")
            changed = configured(cfg, RUNS[name], arguments.steps)
            try:
                rl.run(changed, inputs=inputs, out=out, scratch=scratch, log=lambda metrics, step: None)
            except RuntimeError as error:
                if not str(error).startswith("after training these parts"):
                    raise
                # a run that moved nothing is refused: the SFT model is what it left
                results["runs"][name] = {}
            else:
                results.setdefault("tied groups", {})[name] = tied(out / "curves.csv")
                results["runs"][name] = judged(
                    asking(rl_model(inputs["base"] / "base", inputs["sft"], out)), start, regions, referring
                )
        path.write_text(json.dumps(results))
        print(
            f"{name}: {time.perf_counter() - began:.0f} s, "
            f"{results.get('tied groups', {}).get(name)}\n{table([path])}",
            flush=True,
        )


if __name__ == "__main__":
    main()
