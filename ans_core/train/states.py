"""The training states that a killed run goes on from: trained tensors, optimizer, what the loss module keeps
and the curves, written completely or not at all."""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ans_core.dist import of_the_first, rank, wait_for_all, world_size
from ans_core.train import optimizer_state, sharding

Curves = list[tuple[int, str, float]]
"""(step, name, value) rows of curves.csv."""


def trained_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that require a gradient, by name (the module's own names, also if DDP or
    DeepSpeed wraps it)."""
    return {name: sharding.read(p) for name, p in module.named_parameters() if p.requires_grad}


def _state(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in module.state_dict().items() if name.endswith("_extra_state")}


class Writer:
    """Writes states in a thread, one after another, so that training waits for copies of its tensors and not
    for the disk.

    As a context it ends when all is written. An error of writing is raised by what comes next: a state,
    `wait`, or the end.
    """

    def __init__(self) -> None:
        self.thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="states")
        self.writing: Future[dict[str, float]] | None = None
        self.written: dict[str, float] = {}
        """How large the last state is and how long it took to write it, once it is."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception:
            if error is None:
                raise
            logging.exception("besides, a training state was not written")
        finally:
            self.thread.shutdown()

    def wait(self) -> None:
        """Wait until what was handed over is on the disk."""
        writing, self.writing = self.writing, None
        if writing is not None:
            self.written |= writing.result()

    def metrics(self) -> dict[str, float]:
        """Return `written` if a state has been written since the last call."""
        if self.writing is not None and self.writing.done():
            self.wait()
        written, self.written = self.written, {}
        return written

    def save(
        self,
        folder: Path,
        step: int,
        module: nn.Module,
        optimizer: Any,
        wrapped: Any,
        curves: Curves,
        *,
        best: int | None,
        deepspeed_stage: int,
        keep: int,
    ) -> None:
        """Write `<folder>/step-N` with a manifest and rename it once complete; then remove states older than
        the last `keep`, and the files of best weights that are older than the `best` step of the oldest state
        left. All processes must call it; the first one writes, and holds the state in main memory meanwhile."""
        self.wait()
        state = {"trained": trained_tensors(module), "extra": _state(module)}
        moments = optimizer_state.read(module, optimizer, wrapped, deepspeed_stage=deepspeed_stage)
        if rank() == 0:
            facts = {
                "step": step,
                "best": best,
                "processes": world_size(),
                "deepspeed_stage": deepspeed_stage,
                "trained": _shapes_hash(module),
            }
            tensors = {"state.pt": _copied(state), "optimizer.pt": moments}
            self.writing = self.thread.submit(_save, folder, step, tensors, list(curves), facts, keep)

    def save_weights(self, path: Path, step: int, module: nn.Module) -> None:
        """Write the trained tensors of this step to a file (`best_file`, `step_file`), in place of those in
        it. All processes must call it."""
        self.wait()
        tensors = trained_tensors(module)
        if rank() == 0:
            weights = _copied({"step": step, "trained": tensors})
            self.writing = self.thread.submit(_save_weights, path, weights)


def _copied(state: Any) -> Any:
    """Return a copy in main memory that training does not change."""
    return tree_map(
        lambda leaf: leaf.detach().to("cpu", copy=True) if isinstance(leaf, Tensor) else copy.deepcopy(leaf),
        state,
    )


def _save(
    folder: Path, step: int, tensors: dict[str, Any], curves: Curves, facts: dict[str, Any], keep: int
) -> dict[str, float]:
    began = time.perf_counter()
    final, partial = folder / f"step-{step:07d}", folder / f"step-{step:07d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    with _explained(final, partial):
        _write(partial, tensors, curves, facts)
    partial.replace(final)
    sync(folder)
    for old in states(folder)[:-keep]:
        shutil.rmtree(old)
    oldest = json.loads((states(folder)[0] / "manifest.json").read_text(encoding="utf-8"))
    for weights in folder.glob("best-*[0-9].pt"):
        if weights.name < best_file(folder, oldest.get("best") or 0).name:
            weights.unlink()
    size = sum(path.stat().st_size for path in final.rglob("*"))
    return {"speed/state_gb": size / 1e9, "speed/state_s": time.perf_counter() - began}


@contextmanager
def _explained(final: Path, partial: Path) -> Iterator[None]:
    """Remove `partial`, and say what can't be written, after an error; torch's RuntimeError for a full disk
    speaks of positions in a file."""
    try:
        yield
    except (OSError, RuntimeError) as error:
        free = shutil.disk_usage(final.parent).free
        if partial.is_dir():
            shutil.rmtree(partial, ignore_errors=True)
        else:
            partial.unlink(missing_ok=True)
        raise RuntimeError(
            f"the training state {final} can't be written, with {free / 1e6:,.0f} MB free on its disk "
            f"({error}). The states before it are kept: make room and start again"
        ) from error


def _write(partial: Path, tensors: dict[str, Any], curves: Curves, facts: dict[str, Any]) -> None:
    for name, content in tensors.items():
        torch.save(content, partial / name)
    (partial / "curves.json").write_text(json.dumps(curves))
    files = {str(p.relative_to(partial)): sha256(p) for p in sorted(partial.rglob("*")) if p.is_file()}
    (partial / "manifest.json").write_text(json.dumps({**facts, "files": files}))
    for path in partial.rglob("*"):
        sync(path)


def resume(
    folder: Path,
    module: nn.Module,
    optimizer: Any,
    wrapped: Any,
    *,
    deepspeed_stage: int,
    device: torch.device,
) -> tuple[int, Curves]:
    """Return (next step, curves so far); (0, []) without a state. A state that is damaged or of another model
    is moved aside, and the one before it is used.

    A state of another number of processes, or of another stage of DeepSpeed, resumes with the same global
    batch: rows are functions of the step, so only rounding and per-process randomness differ.
    """
    for path in reversed(states(folder)):
        manifest = of_the_first(partial(_manifest, path))  # it hashes gigabytes
        if manifest is None or manifest.get("trained") != _shapes_hash(module):
            if rank() == 0:
                aside = path.with_name(path.name + ".damaged")
                shutil.rmtree(aside, ignore_errors=True)
                path.replace(aside)
                why = (
                    "is damaged (a file is missing or differs from its hash)"
                    if manifest is None
                    else "trains other tensors than this run"
                )
                logging.warning("%s %s and was put aside as %s", path, why, aside.name)
            continue
        if (before := manifest["processes"]) != world_size():
            message = (
                "%d processes go on from a state of %d: the same rows at every step, other rounding, so not "
                "the same bits"
            )
            logging.warning(message, world_size(), before)
        state = torch.load(path / "state.pt", map_location=device, weights_only=True)
        _put(module, state["trained"])
        module.load_state_dict(state["extra"], strict=False)
        moments = torch.load(path / "optimizer.pt", map_location="cpu", weights_only=True, mmap=True)
        optimizer_state.write(moments, module, optimizer, wrapped, deepspeed_stage=deepspeed_stage)
        return int(manifest["step"]), [
            tuple(row) for row in json.loads((path / "curves.json").read_text(encoding="utf-8"))
        ]
    return 0, []


def states(folder: Path) -> list[Path]:
    """Return the complete training states, oldest first."""
    return sorted(folder.glob("step-*[0-9]"))


def _manifest(path: Path) -> dict[str, Any] | None:
    """Return the folder's manifest if every file in it has its hash, else None (a state that was cut off)."""
    try:
        manifest = json.loads((path / "manifest.json").read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return None
    intact = all((path / f).is_file() and sha256(path / f) == h for f, h in manifest["files"].items())
    return manifest if intact else None


def _shapes_hash(module: nn.Module) -> str:
    """Hash names and shapes of what is trained."""
    shapes = {
        name: tuple(getattr(p, "ds_shape", p.shape))
        for name, p in module.named_parameters()
        if p.requires_grad
    }
    return hashlib.sha256(repr(sorted(shapes.items())).encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def best_file(folder: Path, step: int) -> Path:
    """Return the file of the weights that were best in validation up to this step. Each has a file of its own: a
    run that goes on from an earlier state may find another step to be the best."""
    return folder / f"best-{step:07d}.pt"


def step_file(folder: Path, steps: int) -> Path:
    """Return the file of the weights after so many steps that stay to the end of the training."""
    return folder / f"kept-{steps:07d}.pt"


def saved_steps(folder: Path) -> list[int]:
    """Return the numbers of steps that have a `step_file`, in order. All processes must call it."""
    wait_for_all()  # for the first process's files
    return sorted(int(file.stem.removeprefix("kept-")) for file in folder.glob("kept-*[0-9].pt"))


def _save_weights(path: Path, weights: dict[str, Any]) -> dict[str, float]:
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with _explained(path, partial):
        torch.save(weights, partial)
        sync(partial)
    partial.replace(path)
    return {}


def load_weights(path: Path, step: int, module: nn.Module, *, device: torch.device) -> None:
    """Give the module the tensors of a file that `save_weights` wrote. All processes must call it. Raises
    RuntimeError if they are of another step."""
    wait_for_all()  # for the first process's file
    state = torch.load(path, map_location=device, weights_only=True)
    if state["step"] != step:
        raise RuntimeError(f"{path} holds step {state['step']}, not step {step}; start the stage anew")
    _put(module, state["trained"])


def _put(module: nn.Module, tensors: dict[str, Tensor]) -> None:
    parameters = dict(module.named_parameters())
    for name, values in tensors.items():
        sharding.write(parameters[name], values)
