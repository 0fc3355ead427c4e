"""What as many further steps of SFT give in RL's place: the same start, trained parts, learning rates and
steps, SFT's rows and losses.

ans run                              # makes runs/tiny: sft, and rl to compare with
python perf/further_sft.py               # 2 cores: some 8 minutes; writes perf/results/<profile>-<split>-further-seed<N>.json
python perf/further_sft.py --name other  # other settings than the profile's: other-<split>-further-seed<N>.json
python perf/further_sft.py --name other --captions FOLDER ... # half of the rows are of what `ans data caption` or `ans data draw` wrote
python perf/further_sft.py --name other --full 400 # all that SFT trains, so many steps of SFT's settings
python perf/further_sft.py --name other --full 400 --save FOLDER # and keep the model, to caption a second time
python perf/further_sft.py --table       # of all seeds whose results, and those of perf/bar.py, are there
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ans_core import data, dist
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints.trained import sft_model
from ans_core.config import Config, load
from ans_core.data import shard
from ans_core.data.collate import Batch, collate
from ans_core.data.mixture import Source
from ans_core.model import adapters
from ans_core.model.network import Network
from ans_core.stages import evaluate, sft
from ans_core.stages.launch import machine_of, schedule_of
from ans_core.stages.supervision import mixture_of, objective_of, sft_layout
from ans_core.train import loop
from ans_core.types import Sample
from perf.bar import RESULTS, spread

SELF = "self_captions"

METRICS = (
    "referring/{split}/gIoU", "referring/{split}/gIoU_all", "referring/{split}/N_acc",
    "referring/{split}/T_acc", "referring/{split}/gIoU/relation", "region_caption/{split}/exact_match",
    "grounded_caption/{split}/mIoU_all_objects", "video/{split}/J&F", "loop1/{split}/IoU",
    "loop2/{split}/METEOR",
)  # fmt: skip


def labelled(folders: Sequence[Path]) -> list[Sample]:
    """Read sets of the format shards; of a sample that is in several, the first one."""
    samples: dict[str, Sample] = {}
    for folder in folders:
        for sample in data.read_samples(format="shards", path=folder, name=SELF, split="train"):
            samples.setdefault(sample.sample_id, sample)
    return list(samples.values())


def trained(cfg: Config, inputs: dict[str, Path], scratch: Path, captions: Sequence[Sample] = ()) -> Network:
    """Train the adapter that RL would train, by SFT's objective, and merge it. captions have as large a share of
    the rows as all others together."""
    s, machine = cfg.sft, machine_of(cfg.launch, cfg.sft.dtype)
    model = sft_model(inputs["base"] / "base", inputs["sft"], device=machine.device)
    modules = adapters.policy_modules(model, drawing=cfg.rl.drawing)
    policies = adapters.Policies(
        model, adapters.rl_config(**cfg.rl.lora.model_dump(), modules=modules), seed=cfg.seed
    )
    seed = dist.seed_of(cfg.seed, "further sft")
    sources = data.sources(inputs["data"], "train")
    if captions:
        sources = [*sources, Source(name=SELF, samples=captions, kind="extra")]
        shares = {source.kind: cfg.sft.mixture.get(source.kind, 0.0) for source in sources}
        shares[SELF] = sum(shares.values())
        cfg = cfg.model_copy(update={"sft": s.model_copy(update={"mixture": shares})})
    mixture = mixture_of(cfg, sources, seed=seed)
    layout = sft_layout(cfg, model)

    def make(step: int, micro: int) -> Batch:
        return collate(mixture.rows(step, micro, batch=s.optim.batch, micros=1), model.tokenizer, layout)

    module = objective_of(cfg, model)
    loop.train(
        module, make, name="further", schedule=schedule_of(cfg.rl.optim), machine=machine, seed=seed,
        scratch=scratch,
        log=lambda metrics, step: None, scales=dict.fromkeys(modules, cfg.rl.modules_lr),
    )  # fmt: skip
    return policies.merged("policy").requires_grad_(False).eval()


def trained_in_full(
    cfg: Config, inputs: dict[str, Path], scratch: Path, captions: Sequence[Sample], steps: int
) -> Network:
    """Run the stage `sft` on the SFT model, with the captions as one more of its data sets."""
    base, given = scratch / "base", scratch / "data"
    checkpoint.save(sft_model(inputs["base"] / "base", inputs["sft"]), base / "base", metadata={})
    base_hash = checkpoint.weights_hash(base / "base")
    checkpoint.save_delta({}, scratch / "memory", base_hash=base_hash, config={"stage": "memory"})
    given.mkdir()
    for path in inputs["data"].iterdir():
        (given / path.name).symlink_to(path.resolve())
    entries = data.read_entries(inputs["data"])
    shares: dict[str, float] = dict(cfg.sft.mixture)
    if captions:
        shard.write(captions, scratch / SELF / "train")
        shares[SELF] = sum(shares.get(kind, 0.0) for kind in {entry.kind for entry in entries})
        entries.append(
            data.DatasetEntry(
                name=SELF, format="shards", path=str(scratch / SELF), split="train", kind="extra"
            )
        )
    (given / "datasets.json").unlink()
    data.write_entries(given, entries)
    for part in ("out", "scratch"):
        (scratch / part).mkdir()
    optim = cfg.sft.optim.model_copy(update={"steps": steps})
    settings = cfg.sft.model_copy(update={"optim": optim, "mixture": shares})
    sft.run(
        cfg.model_copy(update={"sft": settings}),
        inputs={"data": given, "base": base, "memory": scratch / "memory"},
        out=scratch / "out", scratch=scratch / "scratch", log=lambda metrics, step: None,
    )  # fmt: skip
    return sft_model(base / "base", scratch / "out")


def run(cfg: Config, name: str, folders: Sequence[Path], full: int, save: Path | None) -> None:
    captions = labelled(folders)
    runs = Path("runs") / cfg.profile
    inputs = {part: runs / part for part in ("data", "base", "sft")}
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder)
        inputs["model"] = save or here / "model"
        training = here / "training"
        training.mkdir()
        model = (
            trained_in_full(cfg, inputs, training, captions, full)
            if full
            else trained(cfg, inputs, training, captions)
        )
        checkpoint.save(model, inputs["model"], metadata={})
        for part in ("out", "scratch"):
            (here / part).mkdir()
        found = evaluate.run(
            cfg,
            row="rl",
            inputs=inputs,
            out=here / "out",
            scratch=here / "scratch",
            log=lambda metrics, step: None,
        )
    (RESULTS / f"{name}-{cfg.evaluate.split}-further-seed{cfg.seed}.json").write_text(
        json.dumps(found, indent=1, sort_keys=True)
    )


def table(profile: str, split: str) -> str:
    """Gains over SFT, paired by seed. Raises SystemExit where a seed lacks either result."""
    paths = sorted(RESULTS.glob(f"{profile}-{split}-further-seed*.json"))
    summaries = [RESULTS / path.name.replace("-further", "") for path in paths]
    if not paths or not all(path.exists() for path in summaries):
        raise SystemExit(
            f"{RESULTS}: no results of perf/further_sft.py, or none of perf/bar.py for the same seeds"
        )
    lines = [
        f"seeds {[path.stem.rpartition('seed')[2] for path in paths]}",
        "",
        "| metric | SFT | RL - SFT | further SFT - SFT |",
        "|-|-|-|-|",
    ]
    rows = [
        (json.loads(summary.read_text()), json.loads(path.read_text()))
        for summary, path in zip(summaries, paths, strict=True)
    ]
    for metric in (name.format(split=split) for name in METRICS):
        start = statistics.fmean(summary["sft"][metric] for summary, _ in rows)
        of_rl = spread([summary["rl"][metric] - summary["sft"][metric] for summary, _ in rows], "+")
        of_sft = spread(
            [found[metric] - summary["sft"][metric] if metric in found else None for summary, found in rows],
            "+",
        )
        lines.append(f"| {metric} | {start:.3f} | {of_rl} | {of_sft} |")
    return "\n".join(lines)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--name", default="", help="of the files, in place of the profile's")
    parser.add_argument(
        "--captions", type=Path, nargs="+", default=[], help="of `ans data caption` or `ans data draw`"
    )
    parser.add_argument("--full", type=int, default=0, metavar="STEPS", help="train all that SFT trains")
    parser.add_argument("--save", type=Path, help="the trained model; a new folder")
    arguments = parser.parse_args()
    if arguments.save and arguments.save.exists():
        parser.error(f"{arguments.save} exists; give a new folder")
    config = load(Path("params.yaml"))
    name = arguments.name or config.profile
    if not arguments.table:
        run(config, name, arguments.captions, arguments.full, arguments.save)
    print(table(name, config.evaluate.split) if arguments.table else "done")
