"""What answers a benchmark's questions: a Sa2VA, a base's boxes given to SAM2 (`box:`), or a SAM2 that
follows objects."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ans_core.benchmarks.public.asked import Answerer, Item
from ans_core.types import Prediction

if TYPE_CHECKING:
    from ans_core.model.config import VideoMode
    from ans_core.model.network import Network

BOX = "box:"
MAX_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Model:
    """A model that is not loaded yet."""

    name: str
    """In the names of results."""
    decisive: dict[str, str]
    """What of it decides its answers."""
    code: tuple[str, ...]
    """The modules that answer."""
    load: Callable[[], Answerer] = field(repr=False)
    """Loads it once."""

    def answer(self, items: Sequence[Item]) -> list[Prediction]:
        return self.load()(items)


def model_of(arguments: argparse.Namespace, *, follows: bool) -> Model:
    """Return the model that `ans eval` names, without loading it. follows: as what follows objects."""
    from ans_core.benchmarks import box_baseline
    from ans_core.checkpoints import folder, sam2
    from ans_core.checkpoints.checkpoint import config_hash, weights_hash

    name = arguments.model
    if follows:
        title, weights = sam2.identity(name)
        # a lone file has no other
        decisive = {"weights": weights, "config": config_hash(name) if Path(name).is_dir() else ""}
        return Model(
            name=title,
            decisive=decisive,
            code=("ans_core.tracking.answering",),
            load=cache(partial(following, arguments)),
        )
    checkpoint = folder.local_folder(name.removeprefix(BOX))
    decisive = {"weights": weights_hash(checkpoint), "config": config_hash(checkpoint)}
    title = checkpoint.name
    code: tuple[str, ...] = ("ans_core.inference.predict",)
    if name.startswith(BOX):
        decisive["question"] = box_baseline.question_of(checkpoint)
        title, code = f"box-{checkpoint.name}", ("ans_core.benchmarks.box_baseline",)
    elif arguments.agent:
        code = tuple(
            f"ans_core.agent.{module}" for module in ("answering", "episode", "policy", "operations")
        )
    return Model(name=title, decisive=decisive, code=code, load=cache(partial(answering, arguments)))


def following(arguments: argparse.Namespace) -> Answerer:
    """Load a SAM2."""
    from ans_core import dist
    from ans_core.checkpoints import sam2
    from ans_core.tracking import answering

    return answering.answerer(
        sam2.load(arguments.model, device=arguments.device or str(dist.pick_device("auto")))
    )


def answering(arguments: argparse.Namespace) -> Answerer:
    """Load a Sa2VA, or a base that is asked for boxes."""
    from ans_core import dist, precision
    from ans_core.benchmarks import box_baseline
    from ans_core.checkpoints import folder
    from ans_core.inference.sa2va import Sa2VA

    checkpoint = arguments.model.removeprefix(BOX)
    device = arguments.device or str(dist.pick_device("auto"))
    model = Sa2VA.from_pretrained(
        checkpoint, device_map=device, dtype=arguments.dtype, quantize=arguments.quantize
    )
    if dist.rank() == 0:
        print(precision.of_weights(model.dtype, device), file=sys.stderr)
    max_tokens = arguments.max_tokens or MAX_TOKENS
    if arguments.model.startswith(BOX):
        return box_baseline.answerer(
            model, question=box_baseline.question_of(folder.local_folder(checkpoint)), max_tokens=max_tokens
        )
    return in_words(model, max_tokens=max_tokens, video_mode=model.video_mode(arguments.video_mode or "auto"))


def in_words(model: Network, *, max_tokens: int, video_mode: Literal[VideoMode, "auto"] = "auto") -> Answerer:
    """Return the model as it answers requests, a batch at a time."""
    from ans_core.inference.predict import predict

    return lambda items: predict(
        model,
        [item.request for item in items],
        max_tokens=max_tokens,
        batch=len(items),
        video_mode=video_mode,
    )
