"""cota: the model that the agent starts from in; traces of thoughts, calls and observations out, made by its
own operations.

    dvc repro agent/dvc.yaml:cota

Writes `train` and `val`, each a folder of traces (traces.jsonl + pictures). Held-out questions are functions
of (seed, family, split, index), so none are stored: stages draw them again. Several processes make the trace
of a question each in turn; the files are those of one process. With `agent.cota.judge` a language model
scores the traces that the rules keep (docs/agent.md); the first process asks it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

from ans_core import dist
from ans_core.agent.episode import Toolbox
from ans_core.agent.ocr import check_reader
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.policy import load_base
from ans_core.agent.world import judging
from ans_core.agent.world.traces import TraceJudge, Written, write_synthetic_traces
from ans_core.checkpoints import checkpoint
from ans_core.config import Config
from ans_core.precision import inference_dtype
from ans_core.stages.launch import machine_of
from ans_core.types import Log


def run(cfg: Config, *, inputs: dict[str, Path], out: Path, scratch: Path, log: Log) -> dict[str, float]:
    """Run the stage. inputs: model. Raises ValueError where the mix of golden, trap and self-correction is
    off after the filter, RuntimeError where the judge's endpoint answers nothing."""
    with judge_of_traces(cfg, log) as judge:
        counts = write(cfg, inputs["model"], out, judge)
    log({f"cota/{name}": value for name, value in counts.items()}, 0)
    return counts


@contextmanager
def judge_of_traces(cfg: Config, log: Log) -> Iterator[TraceJudge | None]:
    """Yield what scores traces; None where the settings want no judge."""
    if not cfg.agent.cota.judge:
        yield None
        return
    from ans_core.judge.choose import endpoint_of  # takes a second

    with closing(endpoint_of(cfg, deadline_s=judging.CHUNK_DEADLINE_S)) as endpoint:
        yield partial(judging.verdicts, endpoint, seed=cfg.seed, on_failure=cfg.judge.on_failure, log=log)


def write(cfg: Config, path: Path, out: Path, judge: TraceJudge | None) -> dict[str, float]:
    """Write the traces of both splits, made with the model at `path`; return their numbers."""
    check_reader(cfg.agent.reader)
    device = machine_of(cfg.launch).device
    model = load_base(
        path, operations=OPERATIONS, device=device, tiles=cfg.agent.tiles, dtype=inference_dtype(device)
    )
    about = {"base": checkpoint.weights_hash(path), "ocr": cfg.agent.reader} | (
        {"judge": cfg.judge.model} if judge is not None else {}
    )
    counts: dict[str, float] = {}
    families, settings = cfg.agent.families, cfg.agent.cota
    numbers = {
        "train": {family: settings.questions(family) for family in families},
        "val": dict.fromkeys(families, settings.val),
    }
    with dist.process_group():
        for split, questions in numbers.items():
            with Toolbox(model, seconds=cfg.agent.episode.time_limit_s, reader=cfg.agent.reader) as toolbox:
                written = write_synthetic_traces(
                    out / split,
                    questions,
                    split=split,
                    seed=cfg.seed,
                    toolbox=toolbox,
                    provenance=about,
                    judge=judge,
                )
            counts |= {f"{split}/{name}": value for name, value in counted(written).items()}
    return counts


def counted(written: Written) -> dict[str, float]:
    """Return how many traces there are of every kind, how many questions gave none, by family and reason, and
    what the judge gave."""
    kinds, dropped = written.kinds, written.dropped
    numbers = {
        "traces": kinds.total(),
        **kinds,
        "dropped": dropped.total(),
        **{f"dropped/{name}": n for name, n in dropped.items()},
    }
    judged = judging.numbers(written.verdicts) if written.verdicts else {}
    return {name: float(value) for name, value in numbers.items()} | {
        f"judge/{name}": value for name, value in judged.items()
    }
