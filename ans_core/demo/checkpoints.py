"""The checkpoints that a page offers, by name: the one it was started with, those of the same run before it,
and further ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

from ans_core.checkpoints import checkpoint
from ans_core.checkpoints.checkpoint import present_device
from ans_core.checkpoints.trained import sft_model
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from ans_core.precision import inference_dtype

Load = Callable[[], Network]


def offered(model: str, others: Sequence[str], *, device: str) -> dict[str, Load]:
    """Return loaders by name, the page's own first; each loads once, when it is first called.

    A folder runs/<profile>/model brings the same run's `before RL` (SFT merged) and `base`, where they are.
    Raises ValueError for a device that is not there.
    """
    present_device(device)
    first, *names = _names([model, *others])
    loads: dict[str, Load] = {first: partial(Sa2VA.from_pretrained, model, device_map=device)}
    run = Path(model).parent
    base, sft = run / "base/base", run / "sft"
    if Path(model).name == "model" and base.is_dir():
        if (sft / checkpoint.DELTA).exists():
            loads["before RL"] = partial(_before_rl, base, sft, device)
        loads["base"] = partial(Sa2VA.from_pretrained, str(base), device_map=device)
    for name, other in zip(names, others, strict=True):
        loads[name] = partial(Sa2VA.from_pretrained, other, device_map=device)
    return {name: cache(load) for name, load in loads.items()}


def _before_rl(base: Path, sft: Path, device: str) -> Network:
    place = present_device(device)
    return sft_model(base, sft, dtype=inference_dtype(place), device=place)


def _names(paths: Sequence[str]) -> list[str]:
    """Return the last two parts of each, more where these are the same: `runs/tiny/model` is `tiny/model`, a
    hub id stays as it is."""
    parts = [Path(path).resolve().parts if Path(path).is_dir() else Path(path).parts for path in paths]
    for length in range(2, max(map(len, parts))):
        names = ["/".join(one[-length:]) for one in parts]
        if len(set(names)) == len(set(parts)):
            return names
    return ["/".join(one) for one in parts]
