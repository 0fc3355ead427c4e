"""`ans eval BENCHMARK --model MODEL`: what is asked of which model -> predictions, figures with intervals, a
table of samples, a page."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

from ans_core import dist, precision
from ans_core.benchmarks.public.asked import Answerer, Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Scorer
from ans_core.benchmarks.registry import CONVENTIONS, module_of, runnable
from ans_core.code_hash import CodeHashes
from ans_core.data.pictures import check_decoding
from ans_core.evaluation import score
from ans_core.evaluation.answerers import BOX, MAX_TOKENS, Model, model_of
from ans_core.evaluation.predictions import PARTS, PREDICTIONS, by_picture, limited, predict_all
from ans_core.fingerprint import fingerprint
from ans_core.places import root
from ans_core.processes import run_in
from ans_core.types import ImageRef, VideoFrames
from ans_core.written import write_atomically

SKIPPED = 3
"""Exit status if a benchmark's data are not there; 2 is for words that don't fit."""
HASHED = {
    "data_files": "the benchmark's files",
    "config": "the model's config.json or tokenizer files",
    "code": "the code of ANS that makes predictions",
}
"""Settings that are hashes -> what they are of."""
BATCH = 16
Benchmarks = Mapping[str, tuple[Scorer, Runner]]
"""By the names that the user calls them: refcoco+ is scored by refcoco."""


@dataclass(frozen=True, kw_only=True)
class Session:
    """One benchmark asked of one model."""

    name: str
    """As the user calls it."""
    scorer: Scorer
    runner: Runner
    data: Path
    split: str
    out: Path
    model: str
    absent: str | None
    """What of the benchmark's files is not there; None: all is."""
    limit: int = 0
    """Questions, at equal steps through all of them, in whole groups (`Runner.group`); 0 = all."""
    batch: int = BATCH
    convention: str | None = None
    text_encoder: str | None = None
    note: Callable[[Iterable[Mapping[str, Any]]], str] | None = None
    """Says something of all records."""
    settings: dict[str, Any] = field(default_factory=dict)
    """What decides the predictions."""

    @property
    def title(self) -> str:
        return "/".join(filter(None, (self.name, self.split)))

    @property
    def head(self) -> dict[str, Any]:
        """What metrics.json says of itself."""
        return {"benchmark": self.name, "split": self.split, "model": self.model, "limit": self.limit}

    def items(self) -> Callable[[], Iterator[Item]]:
        return limited(partial(self.runner.questions, self.data, self.split), self.limit, self.runner.group)

    def inputs(self, predictions: Path) -> Inputs:
        """Return what the scorer reads. Raises UnscoredError if the truth is elsewhere."""
        return Inputs(
            predictions=predictions,
            data=self.runner.truth(self.data, self.split),
            predicted_only=bool(self.limit),
            split=self.split if "split" in self.scorer.options else "",
            convention=self.convention or CONVENTIONS.get(self.name),
            text_encoder=self.text_encoder if "text_encoder" in self.scorer.options else None,
        )


def evaluate(
    session: Session,
    answer: Answerer,
    *,
    judge: bool,
    page: bool,
    log: Callable[[str], None] = print,
    scratch: Path | None = None,
) -> score.Result:
    """Ask the benchmark's questions and score the answers. All processes must call it; the first one scores,
    the others get no figures.

    judge: ask the judge that params.yaml names, where one must read the answers. page: write pictures and a
    page, too. log: gets the lines to show. scratch: where predictions grow, from where a killed run goes on;
    None: in the session's folder.
    """
    first = dist.rank() == 0
    if session.absent:
        return (
            score.without_figures(session, log, skipped=session.absent)
            if first
            else score.Result(title=session.title, skipped=True)
        )
    out = scratch or session.out
    if first and not any((out / name).exists() for name in (PARTS, PREDICTIONS)):
        check_pictures(session)
    dist.wait_for_all()
    batches = by_picture(session.items(), session.batch)
    runner = session.runner
    made = predict_all(batches, answer, runner.record, out=out, desc=session.title, running=runner.running)
    if not first:
        return score.Result(title=session.title)
    session.out.mkdir(parents=True, exist_ok=True)
    predictions = made if scratch is None else Path(shutil.copy(made, session.out))
    return score.score_run(session, predictions, judge=judge, page=page, log=log)


def check_pictures(session: Session) -> None:
    """Decode every picture file that the questions show. Raises DataError naming those that are faulty: once
    answers are there, mending one would be a change of the benchmark's files. Videos are not decoded, of which a
    model may see few frames."""
    shown: dict[ImageRef | VideoFrames, str] = {}
    for item in session.items()():
        if not isinstance(item.request.frames, VideoFrames):
            for frame in (frame for frame in item.request.frames if isinstance(frame, Path)):
                shown.setdefault(frame, f"question {item.name}")
    check_decoding(shown, where=session.title)


def run(arguments: argparse.Namespace) -> int:
    names = arguments.what.lower().replace("-", "_").split(",")
    benchmarks = {name: runnable(name) for name in names}
    check_options(benchmarks, arguments)
    if len(names) > 1 and (arguments.data or arguments.out or arguments.split):
        raise ValueError(
            "--data, --out and --split are of one benchmark; of several, leave them out "
            "(data/benchmarks/<benchmark>)"
        )
    if arguments.job_words is not None and (job := arguments.job_words(arguments)) is not None:
        return subprocess.run([sys.executable, *job], check=False).returncode
    if (arguments.processes or 1) > 1 and "RANK" not in os.environ:
        status = run_in(arguments.processes)
        lacking = any(
            runner.missing(*data_of(name, runner, arguments)) for name, (_, runner) in benchmarks.items()
        )
        return status or (SKIPPED if lacking else 0)
    model = cache(lambda follows: model_of(arguments, follows=follows))
    statuses = []
    with dist.process_group():
        for name, (scorer, runner) in benchmarks.items():
            session = session_of(name, scorer, runner, model(runner.follows), arguments)
            if arguments.agent:
                statuses.append(of_agent(session, arguments))
            else:
                statuses.append(go_on(session, model(runner.follows).answer, arguments))
    return 0 if "RANK" in os.environ else max(statuses)  # torchrun takes any other status for a crash


def go_on(session: Session, answer: Answerer, arguments: argparse.Namespace) -> int:
    """Evaluate in the session's folder, from where an earlier run with the same settings stopped; return the
    exit status. Where the pipeline is there, its MLflow records the figures (`arguments.record`)."""
    if dist.rank() == 0:
        check_settings(session.out, session.settings)
    # a faster process would write its answers into the folder before the first one has looked at it
    dist.wait_for_all()
    result = evaluate(session, answer, judge=True, page=True)
    if result.metrics and arguments.record is not None:
        arguments.record(session, result.metrics, result.notes)
    return SKIPPED if result.skipped else 0


def of_agent(session: Session, arguments: argparse.Namespace) -> int:
    """Evaluate an agent on the model, without tools and with them, and compare the two."""
    from ans_core.evaluation import agent as eval_agent

    with eval_agent.ways(session, arguments) as ways:
        status = max(go_on(way, ask, arguments) for way, ask in ways)
    if dist.rank() == 0 and not status:
        eval_agent.compare(session)
    return status


def check_options(benchmarks: Benchmarks, arguments: argparse.Namespace) -> None:
    """Raise ValueError for options that one of the benchmarks does not take, and a device that is not
    there."""
    from ans_core.checkpoints.checkpoint import present_device
    from ans_core.model import quantization

    follows = [name for name, (_, runner) in benchmarks.items() if runner.follows]
    if follows and arguments.model.startswith(BOX):
        raise ValueError(f"{follows[0]} follows given masks; {BOX} answers expressions")
    for option in ("max_tokens", "video_mode", "dtype", "quantize", "batch"):
        if len(follows) == len(benchmarks) and getattr(arguments, option):
            raise ValueError(
                f"{', '.join(follows)}: a SAM2 follows masks without words, so it takes no "
                f"--{option.replace('_', '-')}"
            )
    if arguments.agent and (follows or arguments.model.startswith(BOX)):
        raise ValueError(
            f"--agent answers questions in words on a plain base; {follows[0] if follows else BOX} has none"
        )
    if arguments.agent and (arguments.video_mode or arguments.dtype):
        raise ValueError(
            "an agent draws no masks and keeps its base's precision: leave --video-mode and --dtype out"
        )
    if arguments.reader and not arguments.agent:
        raise ValueError("--reader says what an agent's read_text reads with: give --agent, or leave it out")
    if arguments.convention and len(follows) != len(benchmarks):
        raise ValueError(f"--convention is of vos, not of {', '.join(set(benchmarks) - set(follows))}")
    if arguments.text_encoder and (
        others := [name for name, (scorer, _) in benchmarks.items() if "text_encoder" not in scorer.options]
    ):
        raise ValueError(f"--text-encoder is of gcg, not of {', '.join(others)}")
    device = present_device(arguments.device or "auto")
    if arguments.quantize:
        quantization.check(arguments.quantize, device)


def data_of(name: str, runner: Runner, arguments: argparse.Namespace) -> tuple[Path, str]:
    """Return the folder of a benchmark's files and the split."""
    data = (arguments.data or root() / "data/benchmarks" / name).resolve()
    return data, arguments.split or runner.split_in(data)


def session_of(
    name: str, scorer: Scorer, runner: Runner, model: Model, arguments: argparse.Namespace
) -> Session:
    data, split = data_of(name, runner, arguments)
    limit, batch, absent = arguments.limit or 0, arguments.batch or BATCH, runner.missing(data, split)
    leave_out = arguments.out.resolve() if arguments.out else None
    settings = {
        "benchmark": name,
        "split": split,
        "data": str(data),
        "data_files": "" if absent else files_hash(runner, data, split, leave_out=leave_out),
        "limit": limit,
        "model": arguments.model,
        **model.decisive,
        "code": code_hash(name, model),
        "batch": batch,
        "max_tokens": arguments.max_tokens or MAX_TOKENS,
        "video_mode": arguments.video_mode or "auto",
        "dtype": arguments.dtype or ("as stored" if runner.follows else precision_on(arguments.device)),
        # absent: evaluations from before it was there go on
        **({"quantize": arguments.quantize} if arguments.quantize else {}),
    }
    if arguments.agent:
        from ans_core.evaluation import agent as eval_agent

        settings |= eval_agent.settings_of(arguments)
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    return Session(
        name=name,
        scorer=scorer,
        runner=runner,
        data=data,
        split=split,
        out=arguments.out or root() / ".ans/eval" / "-".join(filter(None, (name, split, model.name, key))),
        model=arguments.model,
        absent=absent,
        limit=limit,
        batch=batch,
        convention=arguments.convention,
        text_encoder=arguments.text_encoder,
        settings=settings,
    )


def precision_on(device: str | None) -> str:
    """Return how a Sa2VA computes there unless told: not all devices compute half precision."""
    dtype = precision.inference_dtype(dist.pick_device(device or "auto"))
    return "as stored" if dtype is None else str(dtype).removeprefix("torch.")


def files_hash(runner: Runner, data: Path, split: str, *, leave_out: Path | None) -> str:
    """Hash the benchmark's folder, and by size and time of last change the pictures and videos of its
    questions, wherever they lie."""
    digest = hashlib.sha256(fingerprint(data, leave_out=leave_out).encode())
    frames = (frame for item in runner.questions(data, split) for frame in item.request.frames)
    for path in dict.fromkeys(path for frame in frames if (path := file_of(frame))):
        # the error of a missing picture comes when pictures are checked
        stat = path.stat() if path.exists() else None
        digest.update(f"{path} {stat and (stat.st_size, stat.st_mtime_ns)}\n".encode())
    return digest.hexdigest()[:16]


def file_of(frame: ImageRef) -> Path | None:
    """Return the file that a frame is read from; None if its bytes came from a table, or come from a URL."""
    file = frame if isinstance(frame, (bytes, Path)) else frame.file
    return file if isinstance(file, Path) else None


def code_hash(name: str, model: Model) -> str:
    """Hash the code of ans_core that makes the predictions: the benchmark's, the engine's and the model's."""
    return CodeHashes(Path(__file__).resolve().parents[2]).hash_of(
        ("ans_core.evaluation.predictions", module_of(name), *model.code)
    )


def check_settings(out: Path, settings: dict[str, Any]) -> None:
    """Note the settings in the folder. Raises ValueError if it holds answers that other settings gave, or may
    have given."""
    path = out / "settings.json"
    if out.exists() and not out.is_dir():
        raise ValueError(f"--out {out} is a file; a run needs a folder")
    if (out / PREDICTIONS).exists() or (out / PARTS).exists():
        try:
            changed = changes(json.loads(path.read_text(encoding="utf-8")), settings)
        except (FileNotFoundError, ValueError):
            changed = [f"{path.name} is missing or can't be read"]
        if changed:
            raise ValueError(
                f"{out} holds answers of other settings ({'; '.join(changed)}); give another --out, or "
                "remove the folder"
            )
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(settings, indent=1) + "\n")


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs. Hashes that an earlier evaluation did not record count as different: nobody knows
    what they were."""
    lines = []
    for key in (key for key in {**before, **now} if before.get(key) != now.get(key)):
        if key in HASHED:
            lines.append(f"{HASHED[key]}: {'changed since' if key in before else 'not recorded then'}")
        else:
            lines.append(f"{key} {before.get(key)!r}, now {now.get(key)!r}")
    return lines
