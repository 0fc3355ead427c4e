"""Settings of SFT -> its mixture, how its rows look, and its objective; for every stage that learns from such
rows."""

from __future__ import annotations

from collections.abc import Sequence

from ans_core.config import Config
from ans_core.data import conversation
from ans_core.data.collate import Layout
from ans_core.data.mixture import Mixture, Source
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised, layout_of


def mixture_of(cfg: Config, sources: Sequence[Source], *, seed: int) -> Mixture:
    """Mix the sources as the settings of SFT say."""
    s = cfg.sft
    return Mixture(
        sources,
        s.mixture,
        questions=s.questions_per_image,
        frames=s.frames,
        seed=seed,
        turn=conversation.turn,
    )


def sft_layout(cfg: Config, model: Network) -> Layout:
    s = cfg.sft
    return layout_of(model, mask_size=s.mask_size, max_length=s.max_length, objects=s.objects)


def objective_of(cfg: Config, model: Network) -> Supervised:
    """Return SFT's losses with their weights."""
    s = cfg.sft
    return Supervised(
        model, mask_weight=s.mask_weight, dice_weight=s.dice_weight, points=s.mask_points,
        object_weight=s.object_weight,
    )  # fmt: skip
