"""The README's results: the whole pipeline for several seeds, then the table (mean, deviation, gains of RL
over SFT paired by seed).

    python perf/bar.py --profile tiny --seeds 0 1 2        # 2 cores: 35 to 60 minutes a seed
    python perf/bar.py --table                             # only the table, from perf/results/
    python perf/bar.py --split val                         # the same of the pictures by which settings are chosen

Every seed's metrics/summary.json is kept as perf/results/<profile>-<split>-seed<N>.json. params.yaml is as
before afterwards.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

RESULTS = Path("perf/results")
ROWS = ("untrained", "base", "sft", "rl")
METRICS = (
    "referring/{split}/gIoU", "referring/{split}/cIoU", "referring/{split}/gIoU_shuffled_text",
    "referring/{split}/gIoU/relation",
    "referring/{split}/gIoU_several", "referring/{split}/gIoU_all", "referring/{split}/N_acc",
    "referring/{split}/T_acc",
    "region_caption/{split}/METEOR", "region_caption/{split}/exact_match",
    "region_caption/{split}/attribute_accuracy",
    "grounded_caption/{split}/mIoU_all_objects", "grounded_caption/{split}/mIoU", "video/{split}/J&F",
    "loop1/{split}/IoU", "loop2/{split}/METEOR", "loop1/{split}/IoU_self", "loop2/{split}/METEOR_self",
    "loop1/{split}/IoU_of_truth", "loop2/{split}/METEOR_of_truth",
)  # fmt: skip


def run(profile: str, seed: int, split: str) -> None:
    """One seed through DVC; what is cached is not done again."""
    ans = str(Path(sys.executable).with_name("ans"))
    before = Path("params.yaml").read_text()
    try:
        subprocess.run(
            [ans, "profile", profile, f"seed={seed}", f"evaluate.split={split}", "--force"], check=True
        )
        subprocess.run([sys.executable, "-m", "dvc", "repro"], check=True)
        RESULTS.mkdir(exist_ok=True)
        shutil.copyfile("metrics/summary.json", RESULTS / f"{profile}-{split}-seed{seed}.json")
    finally:
        Path("params.yaml").write_text(before)


def table(profile: str, split: str) -> str:
    """Raises SystemExit where a seed's results are of another split."""
    runs = {
        int(p.stem.rpartition("seed")[2]): json.loads(p.read_text())
        for p in sorted(RESULTS.glob(f"{profile}-{split}-seed*.json"))
    }
    wanted = [metric.format(split=split) for metric in METRICS]
    lacking = [seed for seed, summary in runs.items() if not summary.get("rl", {}).keys() & set(wanted)]
    if lacking or not runs:
        raise SystemExit(
            f"{RESULTS}/{profile}-{split}-seed*.json: no metrics of split {split!r} of seeds "
            f"{lacking or 'any'}; run them, or give their --split"
        )
    lines = [
        f"{len(runs)} seeds: {sorted(runs)}",
        "",
        "| metric | " + " | ".join(ROWS) + " | RL - SFT, paired |",
        "|-" * (len(ROWS) + 2) + "|",
    ]
    for metric in wanted:
        cells = [spread([summary[row].get(metric) for summary in runs.values()]) for row in ROWS]
        gains = [
            s["rl"][metric] - s["sft"][metric]
            for s in runs.values()
            if metric in s["rl"] and metric in s["sft"]
        ]
        lines.append(f"| {metric} | " + " | ".join(cells) + f" | {spread(gains, sign='+')} |")
    return "\n".join(lines)


def spread(values: list[float | None], sign: str = "") -> str:
    known = [v for v in values if v is not None]
    if not known:
        return "-"
    deviation = f" ± {statistics.stdev(known):.3f}" if len(known) > 1 else ""
    return f"{statistics.mean(known):{sign}.3f}{deviation}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", default="tiny")
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--split", default="test", help="that the models are evaluated on (default: test)")
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if not arguments.table:
        for seed in arguments.seeds:
            run(arguments.profile, seed, arguments.split)
    print(table(arguments.profile, arguments.split))
