"""The checkpoints that a page offers, by name: the one it was started with, those of the same run before it, and further ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from ans_core import dist
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints.trained import sft_model
from ans_core.model import Sa2VA

Load = Callable[[], Sa2VA]


def offered(model: str, others: Sequence[str], *, device: str) -> dict[str, Load]:
    """Return loaders by name, the page's own first; each loads once, when it is first called.

    A folder runs/<profile>/model brings the same run's `before RL` (SFT merged) and `base`, where they are.
    """
    found: dict[str, Load] = {_name(model): partial(Sa2VA.from_pretrained, model, device_map=device)}
    run = Path(model).parent
    base, sft = run / "base/base", run / "sft"
    if Path(model).name == "model" and base.is_dir():
        if (sft / checkpoint.DELTA).exists():
            found["before RL"] = partial(_before_rl, base, sft, device)
        found["base"] = partial(Sa2VA.from_pretrained, str(base), device_map=device)
    for other in others:
        found[_name(other)] = partial(Sa2VA.from_pretrained, other, device_map=device)
    return {name: cache(load) for name, load in found.items()}


def _before_rl(base: Path, sft: Path, device: str) -> Sa2VA:
    return sft_model(base, sft, device=dist.pick_device(device))


def _name(path: str) -> str:
    """`runs/tiny/model` is `tiny/model`, a hub id stays as it is."""
    return "/".join(Path(path).parts[-2:])
