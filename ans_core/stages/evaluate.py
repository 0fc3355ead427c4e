"""evaluate: one model of the run and the held-out data in; predictions, metrics and overlay pictures out.

    dvc repro -s evaluate@sft          tiny: about a minute on 2 cores

`row` is untrained, base, sft or rl (the converted folder). The loops of every row are measured with the same
frozen SFT model as the inverse; results with the row as its own inverse are named `*_self`. A killed run
resumes after the last finished batch. Several processes answer a batch each in turn, and all know all
answers: the figures are those of one process.
"""

from __future__ import annotations

import itertools
import json
import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch

from ans_core import data, dist
from ans_core.benchmarks import BENCHMARKS, Benchmark, shuffled
from ans_core.benchmarks.loops import LoopScores, averages, loop_scores, loop_scores_of_truth
from ans_core.benchmarks.public.asked import Answerer, Item
from ans_core.benchmarks.public.files import Lines
from ans_core.benchmarks.public.scored import Scored
from ans_core.benchmarks.registry import runnable
from ans_core.benchmarks.score import benchmark_of, prediction_of
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints.trained import is_passed_through, sft_model
from ans_core.config import Config, require_samples
from ans_core.data.regions import is_region
from ans_core.evaluation.answerers import in_words
from ans_core.evaluation.predictions import name_of, predict_all
from ans_core.evaluation.score import Result
from ans_core.evaluation.session import Session
from ans_core.evaluation.session import evaluate as evaluate_session
from ans_core.inference.predict import alike
from ans_core.metrics.caption import same_text
from ans_core.model.network import Network
from ans_core.pictures import overlay, rle, transforms
from ans_core.precision import inference_dtype
from ans_core.report.gallery import spread
from ans_core.report.lookup import entry_of
from ans_core.stages.launch import machine_of, show_precision
from ans_core.tracking import answering
from ans_core.types import Log, Predict, Prediction, Request, Sample

WINDOW = 256
"""Samples among which batches are formed, by length; part of what decides the last digits."""
LOOPS = "loops"
"""Not in BENCHMARKS because it needs two models."""


def run(
    cfg: Config, *, row: str, inputs: dict[str, Path], out: Path, scratch: Path, log: Log
) -> dict[str, float]:
    """Run the stage. Writes metrics.json, predictions.jsonl, overlays/, public/ (a folder a public benchmark)
    and skipped.json (benchmarks without samples or files) to `out`."""
    if dist.rank() > 0:  # what it would write, the first process writes
        out = scratch / f"process{dist.rank()}"
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
    with dist.process_group():
        metrics = measure(cfg, row=row, inputs=inputs, out=out, scratch=scratch, log=log)
        dist.wait_for_all()  # then the first process may remove `scratch`
    return metrics


def measure(
    cfg: Config, *, row: str, inputs: dict[str, Path], out: Path, scratch: Path, log: Log
) -> dict[str, float]:
    settings = cfg.evaluate
    machine = machine_of(cfg.launch)
    if row == "untrained" and not (inputs["base"] / "untrained").exists():
        (out / "metrics.json").write_text("{}")  # published weights: there is no untrained model
        return {}
    if row == "base" and "sft" in inputs and is_passed_through(inputs["sft"]):
        (out / "metrics.json").write_text("{}")
        (out / "skipped.json").write_text(
            json.dumps({"base": "SFT passed it through (sft.optim.steps 0): it is the row sft"})
        )
        return {}
    sets = evaluated_sets(cfg, inputs["data"])
    require_samples(settings, {evaluation.benchmark for evaluation in sets})
    public = public_sessions(cfg, row, out=out / "public")
    notes = without_samples(cfg, sets) | other_splits(inputs["data"], settings.split)
    model = load_row(row, inputs, machine.device)
    show_precision(model, log)
    mode = model.video_mode(settings.video_mode)
    logging.info("row %s: clips in video mode %s", row, mode)
    answer = in_words(model, max_tokens=settings.max_tokens, video_mode=mode)
    ask = inverse = Asking(answer, batch=settings.batch, scratch=scratch / "answers")
    if row != "sft" and any(evaluation.benchmark == LOOPS for evaluation in sets):
        frozen = in_words(load_row("sft", inputs, machine.device), max_tokens=settings.max_tokens)
        inverse = Asking(frozen, batch=settings.batch, scratch=scratch / "inverse")
    metrics: dict[str, float] = {}
    with (out / "predictions.jsonl").open("w") as lines:
        for evaluation in sets:
            if evaluation.benchmark == LOOPS:
                closed = close_loops(ask, inverse, evaluation, truth=row == "sft")
                metrics |= loop_metrics(evaluation, closed)
                write_loop_scores(lines, evaluation, closed)
                continue
            name, samples, benchmark = (
                evaluation.name(evaluation.benchmark),
                evaluation.samples,
                BENCHMARKS[evaluation.benchmark],
            )
            predictions = ask([benchmark.request(s) for s in samples], desc=name, window=WINDOW)
            scored = benchmark.of_samples(samples, predictions)
            metrics |= {f"{name}/{key}": value for key, value in scored.metrics.items()}
            write_predictions(lines, name, samples, predictions, scored)
            write_overlays(
                out / "overlays", name, benchmark, samples, predictions, scored, count=settings.overlays
            )
            if evaluation.benchmark == "referring" and can_shuffle(samples):
                metrics[f"{name}/gIoU_shuffled_text"] = shuffled_text(
                    ask, benchmark, samples, name=name, seed=cfg.seed
                )
        for result in public_results(cfg, model, public, scratch=scratch / "public"):
            metrics |= {f"{result.title}/{key}": float(value) for key, value in result.metrics.items()}
            notes |= {result.title: result.reason} if result.reason else {}
            lines.writelines(json.dumps(record) + "\n" for record in result.lines())
    (out / "skipped.json").write_text(json.dumps(notes, indent=1))
    (out / "metrics.json").write_text(json.dumps(metrics, indent=1, sort_keys=True))
    log({f"eval/{name}": value for name, value in metrics.items()}, 0)
    return metrics


def public_results(
    cfg: Config, model: Network, sessions: Sequence[Session], *, scratch: Path
) -> Iterator[Result]:
    """Run the model on the public benchmarks of the settings, and log the reason of those that give no
    figures."""
    settings = cfg.evaluate

    def follow(items: Sequence[Item]) -> list[Prediction]:
        with model.inference_autocast():
            return answering.answerer(model.sam2)(items)

    for one, session in zip(settings.public, sessions, strict=True):
        words = in_words(model, max_tokens=one.max_tokens, video_mode=model.video_mode(settings.video_mode))
        answer = follow if session.runner.follows else words
        result = evaluate_session(
            session, answer, judge=False, page=False, log=logging.info, scratch=scratch / session.out.name
        )
        if result.reason:
            logging.warning("evaluate.public: %s: %s", result.title, result.reason)
        yield result


def public_sessions(cfg: Config, row: str, *, out: Path) -> list[Session]:
    """Return what is asked of the public benchmarks of the settings. Raises ValueError where two of them are
    one split of one benchmark."""
    sessions: dict[Path, Session] = {}
    for one in cfg.evaluate.public:
        scorer, runner = runnable(one.name)
        data, split = Path(one.path), one.split or runner.split_in(Path(one.path))
        folder = out / "-".join(filter(None, (one.name, split)))
        if folder in sessions:
            raise ValueError(
                f"evaluate.public: {sessions[folder].data} and {data} are both split {split!r} of {one.name}"
            )
        sessions[folder] = Session(
            name=one.name, scorer=scorer, runner=runner, data=data, split=split, out=folder, model=row,
            limit=one.limit, batch=cfg.evaluate.batch, absent=runner.missing(data, split),
        )  # fmt: skip
    return list(sessions.values())


class Asking:
    """A model to whom every request is put once, by all processes together: benchmarks and loops ask some of
    the same. All processes must call it alike; a killed run that calls it alike again goes on where it
    stopped."""

    def __init__(self, answer: Answerer, *, batch: int, scratch: Path) -> None:
        self.answer, self.batch, self.scratch = answer, batch, scratch
        self.answers: dict[object, Prediction] = {}
        self.calls = 0

    def __call__(
        self, requests: Sequence[Request], *, desc: str = LOOPS, window: int | None = None
    ) -> list[Prediction]:
        """Return the answers. Batches are formed among `window` requests; None: among all."""
        keys = [(r.frames, r.text, repr(r.mask_prompts), r.is_clip) for r in requests]
        new: dict[object, Item] = {}
        for place, (key, request) in enumerate(zip(keys, requests, strict=True)):
            if key not in self.answers:
                new.setdefault(key, Item(name=str(place), request=request))
        self.calls += 1
        if new:
            batches = list(by_length(list(new.values()), self.batch, window or len(requests)))
            path = predict_all(
                lambda: batches, self.answer, record, out=self.scratch / f"{self.calls:04d}", desc=desc
            )
            lines = Lines(path, name_of)
            self.answers |= {key: prediction_of(lines[item.name]) for key, item in new.items()}
        return [self.answers[key] for key in keys]


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    return asdict(prediction)


def by_length(items: Sequence[Item], size: int, window: int) -> Iterator[list[Item]]:
    """Yield batches of `size` items, formed among those of every `window` places (their names): items about
    one picture or clip together, then those of about one length."""
    for _, some in itertools.groupby(items, key=lambda item: int(item.name) // window):
        block = list(some)
        ordered = [block[place] for place in alike([item.request for item in block])]
        yield from (ordered[start : start + size] for start in range(0, len(ordered), size))


def load_row(row: str, inputs: dict[str, Path], device: torch.device) -> Network:
    dtype = inference_dtype(device)
    match row:
        case "untrained" | "base":
            return checkpoint.load(inputs["base"] / row, dtype=dtype, device=device)
        case "sft":
            return sft_model(inputs["base"] / "base", inputs["sft"], dtype=dtype, device=device)
        case "rl":
            return checkpoint.load(inputs["model"], dtype=dtype, device=device)
    raise ValueError(f"no row {row!r}; rows are untrained, base, sft, rl")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The samples that one benchmark, or the loops, ask about: those of one data set, or of the drawn ones
    together."""

    benchmark: str
    dataset: str | None
    """None: the drawn data sets."""
    split: str
    samples: list[Sample]

    def name(self, metric: str) -> str:
        """Name a metric: `referring/val` for the drawn world, `mine/referring` for a data set."""
        return f"{metric}/{self.split}" if self.dataset is None else f"{self.dataset}/{metric}"


def evaluated_sets(cfg: Config, prepared: Path) -> list[Evaluation]:
    """Return every benchmark of every data set that has samples for it, the loops last. Raises ValueError if
    two sets share a name."""
    settings = cfg.evaluate
    loaded: dict[str | None, list[Sample]] = {None: []}
    for source in data.sources(prepared, settings.split):
        if source.kind == "extra":
            loaded[source.name] = list(source.samples)
        else:
            loaded[None] += source.samples
    for entry in data.read_entries(prepared, "val", ["extra"]):
        if entry.name not in loaded:  # `other_splits` says so
            loaded[entry.name] = list(data.read_entry(prepared, entry))
    for s in settings.sources:
        if s.name in loaded:
            raise ValueError(
                f"evaluate.sources: {s.name!r} is also a data set of prepare.sources; give it a name of its "
                "own"
            )
        loaded[s.name] = list(data.read_entry(prepared, entry_of(s)))
    evaluations = []
    for benchmark in sorted(settings.benchmarks, key=lambda name: name == LOOPS):
        for name, samples in loaded.items():
            if benchmark == LOOPS:
                limit = min(settings.limit or settings.loop_samples, settings.loop_samples)
                eligible = [s for s in samples if is_region(s)]
            else:
                limit, eligible = settings.limit, [s for s in samples if benchmark_of(s) == benchmark]
            if eligible := spread(eligible, limit or len(eligible)):
                evaluations.append(
                    Evaluation(benchmark=benchmark, dataset=name, split=settings.split, samples=eligible)
                )
    return evaluations


def without_samples(cfg: Config, sets: Sequence[Evaluation]) -> dict[str, str]:
    """Return and log, for each optional benchmark that no data set has samples of, the reason."""
    missing = [
        name for name in cfg.evaluate.benchmarks if name not in {evaluation.benchmark for evaluation in sets}
    ]
    reasons = dict.fromkeys(
        missing, f"skipped: no data set has samples of split {cfg.evaluate.split!r} for it"
    )
    for name, reason in reasons.items():
        logging.warning("evaluate.benchmarks: %s %s", name, reason)
    return reasons


def other_splits(prepared: Path, split: str) -> dict[str, str]:
    """Return and log, for each data set of the user's without the split that is asked for, what is evaluated
    instead: its `val` split."""
    notes: dict[str, str] = {}
    entries = data.read_entries(prepared, kinds=["extra"])
    for name in dict.fromkeys(entry.name for entry in entries):
        splits = {entry.split for entry in entries if entry.name == name}
        if split not in splits:
            instead = (
                "its split 'val' is evaluated"
                if "val" in splits
                else "nothing of it is evaluated: give it a split 'val' or 'test'"
            )
            notes[name] = f"it has no split {split!r}; {instead}"
            logging.warning("evaluate: data set %s: %s", name, notes[name])
    return notes


def can_shuffle(samples: Sequence[Sample]) -> bool:
    """Tell whether at least two images have single-object samples, so that their texts can be swapped."""
    return len({(s.dataset, s.image_id) for s in samples if len(s.masks) == 1}) > 1


def shuffled_text(ask: Asking, benchmark: Benchmark, samples: list[Sample], *, name: str, seed: int) -> float:
    """Return gIoU of single-object samples asked with another image's expression: near 0 only for a model
    that reads."""
    swapped = shuffled(samples, dist.seed_of(seed, "shuffled"))
    answers = ask([benchmark.request(s) for s in swapped], desc=f"{name}, shuffled texts", window=WINDOW)
    return benchmark.of_samples(swapped, answers).metrics["gIoU"]


def close_loops(
    ask: Predict, inverse: Predict, evaluation: Evaluation, *, truth: bool
) -> dict[str, LoopScores]:
    """Return both loops' scores by how they were closed.

    "": with the frozen SFT model as inverse; `_self`: with the row as its own inverse. With `truth` also
    `_of_truth`: what the inverse makes of true captions and masks, the most that either loop can gain.
    """
    regions = evaluation.samples
    scores = {
        "": loop_scores(regions, ask=ask, inverse=inverse),
        "_self": loop_scores(regions, ask=ask, inverse=ask),
    }
    return scores | ({"_of_truth": loop_scores_of_truth(regions, inverse=inverse)} if truth else {})


def loop_metrics(evaluation: Evaluation, closed: dict[str, LoopScores]) -> dict[str, float]:
    """Return loop1/<split>/IoU and loop2/<split>/METEOR (or <dataset>/loop1/IoU ...), with the suffixes of
    `close_loops`."""
    return {
        f"{evaluation.name(loop)}/{metric}{suffix}": value
        for suffix, scores in closed.items()
        for loop, metric, value in averages(scores)
    }


def write_loop_scores(lines: TextIO, evaluation: Evaluation, closed: dict[str, LoopScores]) -> None:
    """Write a line a sample and loop: `score` is of the frozen inverse, `score_self` and so on of the
    others."""
    for place, (loop, _, values) in enumerate(closed[""]):
        others = {f"score{suffix}": scores[place][2] for suffix, scores in closed.items() if suffix}
        for number, sample in enumerate(evaluation.samples):
            record = about(evaluation.name(loop), sample) | {"score": round(values[number], 4)}
            lines.write(
                json.dumps(record | {key: round(each[number], 4) for key, each in others.items()}) + "\n"
            )


def about(benchmark: str, sample: Sample) -> dict[str, object]:
    """Return what a line of predictions.jsonl says of its sample."""
    return {
        "benchmark": benchmark,
        "dataset": sample.dataset,
        "sample_id": sample.sample_id,
        "image_id": sample.image_id,
        "n_targets": len(sample.masks),
        "asked": sample.text,
    }


def write_predictions(
    lines: TextIO,
    name: str,
    samples: Sequence[Sample],
    predictions: Sequence[Prediction],
    scored: Scored,
) -> None:
    for sample, prediction, facts in zip(samples, predictions, scored.samples, strict=True):
        lines.write(
            json.dumps(about(name, sample) | {"score": round(facts["score"], 4)} | asdict(prediction)) + "\n"
        )


def write_overlays(
    folder: Path,
    name: str,
    benchmark: Benchmark,
    samples: Sequence[Sample],
    predictions: Sequence[Prediction],
    scored: Scored,
    *,
    count: int,
) -> None:
    """Draw half the best and half the worst samples, ground truth beside prediction, and list them in
    index.json."""
    folder.mkdir(exist_ok=True)
    index_file = folder / "index.json"
    index = json.loads(index_file.read_text(encoding="utf-8")) if index_file.exists() else []
    scores = [facts["score"] for facts in scored.samples]
    order = sorted(range(len(samples)), key=lambda i: -scores[i])
    counts = [is_right(*one) for one in zip(samples, predictions, scored.samples, strict=True)]
    right, wrong = [i for i in order if counts[i]], [i for i in reversed(order) if not counts[i]]
    for verdict, chosen in (("right", spread(right, count // 2)), ("wrong", spread(wrong, count // 2))):
        for i in chosen:
            sample, prediction, truth = samples[i], predictions[i], benchmark.truth(samples[i])
            picture = overlay.side_by_side(
                transforms.open_image(sample.frames[0]),
                truth=shown(sample, truth),
                prediction=shown(sample, prediction),
                question=benchmark.request(sample).text.removeprefix("<image>").strip(),
                truth_text=truth.text,
                prediction_text=prediction.text,
            )
            file = f"{name.replace('/', '_')}_{len(index):04d}.png"
            picture.save(folder / file)
            entry = {
                "file": file,
                "benchmark": name,
                "sample_id": sample.sample_id,
                "text": prediction.text,
                "truth": truth.text,
            }
            index.append(entry | {"score": scores[i], "verdict": verdict})
    index_file.write_text(json.dumps(index, indent=1))


def is_right(sample: Sample, prediction: Prediction, facts: Mapping[str, Any]) -> bool:
    """Tell whether the gallery shows an answer as right. If no object is meant, the answer's words must say
    so: drawing no mask is not enough. A region's caption is right word for word: METEOR gives 0.47 to one of
    which every attribute is wrong."""
    if sample.task == "region_caption":
        return same_text(prediction.text, sample.text)
    denied = bool(sample.masks) or facts.get("denies", True)
    return facts["score"] >= 0.5 and denied


def shown(sample: Sample, answer: Prediction) -> list[dict[str, object]]:
    """Return the masks to draw on the first frame: the answer's, or the region that was asked about."""
    masks = answer.masks or (sample.masks if sample.task == "region_caption" else ())
    empty = rle.empty(sample.height, sample.width)
    return [m[0] if m[0] is not None else empty for m in masks]
