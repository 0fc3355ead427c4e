"""`ans eval BENCHMARK --model MODEL`: a model's predictions, figures with intervals, a table of samples, pictures and a page."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ans_core.benchmarks import public_run
from ans_core.benchmarks.public_run import runner_of
from ans_core.code_hash import CodeHashes
from ans_core.evaluation import score as eval_score
from ans_core.fingerprint import fingerprint
from ans_core.places import root
from ans_core.processes import shared_words, thread_variables
from ans_core.types import ImageRef
from ans_core.written import write_whole

SKIPPED = 3
"""Exit status if a benchmark's data are not there; 2 is for words that don't fit."""
BOX = "box:"
HASHED = {
    "data_files": "the benchmark's files",
    "config": "the model's config.json or tokenizer files",
    "code": "the code of ANS that makes predictions",
}
"""Settings that are hashes -> what they are of."""
BATCH, MAX_TOKENS = 16, 512


@dataclass(frozen=True, kw_only=True)
class Asked:
    """One benchmark on one model."""

    name: str
    """As the user calls it: refcoco+ is scored by refcoco."""
    split: str
    data: Path
    out: Path
    settings: dict[str, Any]
    """What decides the predictions."""

    @property
    def title(self) -> str:
        return "/".join(filter(None, (self.name, self.split)))


def run(arguments: argparse.Namespace) -> int:
    names = arguments.what.lower().replace("-", "_").split(",")
    check_options(names, arguments)
    if len(names) > 1 and (arguments.data or arguments.out or arguments.split):
        raise ValueError("--data, --out and --split are of one benchmark; of several, leave them out (data/benchmarks/<benchmark>)")
    if arguments.job_words is not None and (job := arguments.job_words(arguments)) is not None:
        return subprocess.run([sys.executable, *job], check=False).returncode
    if (arguments.processes or 1) > 1 and "RANK" not in os.environ:
        command = [sys.executable, *shared_words(arguments.processes), "-m", "ans_core.cli", *sys.argv[1:]]
        variables = thread_variables(0, processes=arguments.processes, environment=os.environ)
        status = subprocess.run(command, env={**os.environ, **variables}, check=False).returncode
        lacking = any(public_run.missing(runner_of(n), *data_of(n, arguments)) for n in names)
        return status or (SKIPPED if lacking else 0)
    from ans_core import dist
    from ans_core.evaluation import agent as eval_agent  # it runs this module's evaluations

    words, follower = cache(partial(answerer, arguments)), cache(partial(following, arguments))
    with dist.process_group():
        if arguments.agent:
            statuses = [eval_agent.run(name, arguments) for name in names]
        else:
            statuses = [evaluate(asked(n, arguments), follower if runner_of(n).follows else words, arguments) for n in names]
    return 0 if "RANK" in os.environ else max(statuses)  # torchrun takes any other status for a crash


def check_options(names: Sequence[str], arguments: argparse.Namespace) -> None:
    """Raise ValueError for unknown benchmarks, options that one of them does not take, and a device that is not there."""
    from ans_core.checkpoints.checkpoint import present_device
    from ans_core.model import quantization

    follows = [name for name in names if runner_of(name).follows]
    if follows and arguments.model.startswith(BOX):
        raise ValueError(f"{follows[0]} follows given masks; {BOX} answers expressions")
    for option in ("max_tokens", "video_mode", "dtype", "quantize", "batch"):
        if len(follows) == len(names) and getattr(arguments, option):
            raise ValueError(f"{', '.join(follows)}: a SAM2 follows masks without words, so it takes no --{option.replace('_', '-')}")
    if arguments.agent and (follows or arguments.model.startswith(BOX)):
        raise ValueError(f"--agent answers questions in words on a plain base; {follows[0] if follows else BOX} has none")
    if arguments.agent and (arguments.video_mode or arguments.dtype):
        raise ValueError("an agent draws no masks and keeps its base's precision: leave --video-mode and --dtype out")
    if arguments.reader and not arguments.agent:
        raise ValueError("--reader says what an agent's read_text reads with: give --agent, or leave it out")
    if arguments.convention and len(follows) != len(names):
        raise ValueError(f"--convention is of vos, not of {', '.join(set(names) - set(follows))}")
    device = present_device(arguments.device or "auto")
    if arguments.quantize:
        quantization.check(arguments.quantize, device)


def data_of(name: str, arguments: argparse.Namespace) -> tuple[Path, str]:
    """Return the folder of a benchmark's files and the split."""
    data = (arguments.data or root() / "data/benchmarks" / name).resolve()
    return data, arguments.split or public_run.split_of(runner_of(name), data)


def asked(name: str, arguments: argparse.Namespace) -> Asked:
    data, split = data_of(name, arguments)
    whose, decisive = model_of(name, arguments.model)
    settings = {
        "benchmark": name,
        "split": split,
        "data": str(data),
        "data_files": files_hash(name, data, split, leave_out=arguments.out.resolve() if arguments.out else None),
        "limit": arguments.limit or 0,
        "model": arguments.model,
        **decisive,
        "code": code_hash(name, arguments),
        "batch": arguments.batch or BATCH,
        "max_tokens": arguments.max_tokens or MAX_TOKENS,
        "video_mode": arguments.video_mode or "auto",
        "dtype": arguments.dtype or "as stored",
        **({"quantize": arguments.quantize} if arguments.quantize else {}),  # absent: evaluations from before it was there go on
    }
    if arguments.agent:
        from ans_core.evaluation import agent as eval_agent

        settings |= eval_agent.settings_of(arguments)
    key = hashlib.sha256(json.dumps(settings).encode()).hexdigest()[:12]
    out = arguments.out or root() / ".ans/eval" / "-".join(filter(None, (name, split, whose, key)))
    return Asked(name=name, split=split, data=data, out=out, settings=settings)


def files_hash(name: str, data: Path, split: str, *, leave_out: Path | None) -> str:
    """Hash the benchmark's folder, and by size and time of last change the pictures and videos of its questions, wherever they lie. Empty
    if its data are not there."""
    runner = runner_of(name)
    if public_run.missing(runner, data, split):
        return ""
    whole = hashlib.sha256(fingerprint(data, leave_out=leave_out).encode())
    frames = (frame for item in runner.questions(data, split) for frame in item.request.frames)
    for path in dict.fromkeys(path for frame in frames if (path := file_of(frame))):
        known = path.stat() if path.exists() else None  # the error of a missing picture comes when it is asked about
        whole.update(f"{path} {known and (known.st_size, known.st_mtime_ns)}\n".encode())
    return whole.hexdigest()[:16]


def file_of(frame: ImageRef) -> Path | None:
    """Return the file that a frame is read from; None if its bytes came from a table."""
    if isinstance(frame, bytes):
        return None
    return frame if isinstance(frame, Path) else frame.file


def model_of(name: str, model: str) -> tuple[str, dict[str, str]]:
    """Return what results call the model, and what of it decides the predictions."""
    from ans_core.benchmarks import box_baseline
    from ans_core.checkpoints import folder, sam2
    from ans_core.checkpoints.checkpoint import config_hash, weights_hash

    if runner_of(name).follows:
        whose, weights = sam2.identity(model)
        return whose, {"weights": weights, "config": config_hash(model) if Path(model).is_dir() else ""}  # a lone file has no other
    checkpoint = folder.local_folder(model.removeprefix(BOX))
    decisive = {"weights": weights_hash(checkpoint), "config": config_hash(checkpoint)}
    if model.startswith(BOX):
        return f"box-{checkpoint.name}", {**decisive, "question": box_baseline.question_of(checkpoint)}
    return checkpoint.name, decisive


def code_hash(name: str, arguments: argparse.Namespace) -> str:
    """Hash the code of ans_core that makes the predictions."""
    answering: tuple[str, ...]
    if arguments.agent:
        answering = ("ans_core.agent.answering", "ans_core.agent.episode", "ans_core.agent.policy", "ans_core.agent.operations")
    elif runner_of(name).follows:
        answering = ("ans_core.tracking.answering",)
    else:
        answering = ("ans_core.benchmarks.box_baseline",) if arguments.model.startswith(BOX) else ("ans_core.inference.predict",)
    return CodeHashes(Path(__file__).resolve().parents[2]).hash_of(("ans_core.benchmarks.running", *answering))


def following(arguments: argparse.Namespace) -> Callable[..., Any]:
    """Load a SAM2 and return it as an Answerer."""
    from ans_core import dist
    from ans_core.checkpoints import sam2
    from ans_core.tracking import answering

    return answering.answerer(sam2.load(arguments.model, device=arguments.device or str(dist.pick_device("auto"))))


def answerer(arguments: argparse.Namespace) -> Callable[..., Any]:
    """Load the model and return it as an Answerer."""
    from ans_core import dist
    from ans_core.benchmarks import box_baseline
    from ans_core.checkpoints import folder
    from ans_core.inference.predict import predict
    from ans_core.inference.sa2va import Sa2VA

    box, checkpoint = arguments.model.startswith(BOX), arguments.model.removeprefix(BOX)
    device = arguments.device or str(dist.pick_device("auto"))
    model = Sa2VA.from_pretrained(checkpoint, device_map=device, dtype=arguments.dtype, quantize=arguments.quantize)
    max_tokens = arguments.max_tokens or MAX_TOKENS
    if box:
        return box_baseline.answerer(model, question=box_baseline.question_of(folder.local_folder(checkpoint)), max_tokens=max_tokens)
    mode = model.video_mode(arguments.video_mode or "auto")
    return lambda items: predict(model, [i.request for i in items], max_tokens=max_tokens, batch=len(items), video_mode=mode)


def evaluate(asked: Asked, load: Callable[[], Callable[..., Any]], arguments: argparse.Namespace) -> int:
    """Run one benchmark; the first process scores it. Without its data it is skipped, and metrics.json says why."""
    from ans_core import dist
    from ans_core.agent.answering import counting
    from ans_core.benchmarks import running

    runner, first = runner_of(asked.name), dist.rank() == 0
    if "tools" in asked.settings:
        runner = counting(runner)
    if first:
        same_settings(asked)
    dist.wait_for_all()  # a faster process would write its answers into the folder before the first one has looked at it
    if reason := public_run.missing(runner, asked.data, asked.split):
        if first:
            write_reason(asked, skipped=reason)
        return SKIPPED
    items = running.limited(partial(runner.questions, asked.data, asked.split), asked.settings["limit"])
    predictions = running.predict_all(
        items, lambda some: load()(some), runner, out=asked.out, batch=asked.settings["batch"], desc=asked.title
    )
    if first:
        report(asked, predictions, items, arguments)
    return 0


def same_settings(asked: Asked) -> None:
    """Raise ValueError if the folder holds answers that other settings gave, or may have given."""
    from ans_core.benchmarks.running import PARTS, PREDICTIONS

    path = asked.out / "settings.json"
    if asked.out.exists() and not asked.out.is_dir():
        raise ValueError(f"--out {asked.out} is a file; a run needs a folder")
    if (asked.out / PREDICTIONS).exists() or (asked.out / PARTS).exists():
        try:
            changed = changes(json.loads(path.read_text(encoding="utf-8")), asked.settings)
        except (FileNotFoundError, ValueError):
            changed = [f"{path.name} is missing or can't be read"]
        if changed:
            raise ValueError(f"{asked.out} holds another evaluation ({'; '.join(changed)}); give another --out, or remove the folder")
    asked.out.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(asked.settings, indent=1) + "\n")


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return what differs. Hashes that an earlier evaluation did not record count as different: nobody knows what they were."""
    told = []
    for key in (key for key in {**before, **now} if before.get(key) != now.get(key)):
        if key in HASHED:
            told.append(f"{HASHED[key]}: {'changed since' if key in before else 'not recorded then'}")
        else:
            told.append(f"{key} {before.get(key)!r}, now {now.get(key)!r}")
    return told


def write_reason(asked: Asked, **reason: str) -> None:
    known = {"benchmark": asked.name, "split": asked.split, "model": asked.settings["model"], **reason, "metrics": {}}
    (asked.out / "metrics.json").write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    (name, text), *_ = reason.items()
    print(f"{asked.title}: {name}: {text}")


def report(asked: Asked, predictions: Path, items: Any, arguments: argparse.Namespace) -> None:
    """Score the predictions, and write and print what is found. Where the pipeline is there, its MLflow records it (`arguments.record`)."""
    from ans_core.agent import answering
    from ans_core.benchmarks import running, submission
    from ans_core.benchmarks.public import UnscoredError
    from ans_core.benchmarks.public.files import Lines
    from ans_core.benchmarks.public.published import beside, lines
    from ans_core.report import evaluation

    _, scorer = public_run.scorer_of(asked.name)
    if scorer.runner is not None and scorer.runner.follows:
        submission.write_vos(asked.out / "Annotations", Lines(predictions, running.name_of).values(), where=str(predictions))
    limit = asked.settings["limit"]
    try:
        given = public_run.given_of(
            asked.name,
            predictions,
            asked.data,
            asked.split,
            limit=limit,
            convention=arguments.convention,
            text_encoder=arguments.text_encoder,
        )
        given = eval_score.judged(asked.name, scorer, given, asked.out / "metrics.json")
    except UnscoredError as error:
        write_reason(asked, unscored=str(error))
        print("predictions:", predictions)
        return
    scored = scorer.score(given)
    scored.notes.extend(runner_of(asked.name).notes)
    if "tools" in asked.settings:
        scored.notes.append(answering.note(Lines(predictions, running.name_of).values()))
    if limit:
        scored.notes.append(f"only {limit} questions were asked: not the benchmark's figure")
    intervals = scored.intervals()
    file = asked.out / "metrics.json"
    head = {key: asked.settings[key] for key in ("benchmark", "split", "model", "limit")}
    public_run.write(file, head, scorer, scored, intervals)
    others = beside(asked.name, asked.split, scored.metrics, whole=len(scored.samples))
    page = evaluation.write(
        asked.out,
        head,
        scored,
        intervals,
        others,
        items=items,
        predictions=Lines(predictions, running.name_of),
        table=list(scorer.table(scored)),
    )
    print("\n".join([asked.title, *eval_score.table(scored, intervals), *lines(others)]))
    print("predictions, figures and pictures:", page)
    if arguments.record is not None:
        arguments.record(asked, scored.metrics, scored.notes)
