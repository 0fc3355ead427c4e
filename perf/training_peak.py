"""One training step in, the most bytes that live at once out, by kind; also of a step that no machine at hand
could run.

Every storage counts from the operation that makes it until nothing refers to it any more. With fake tensors
(shapes without values) nothing is computed and nothing is allocated. What one kernel takes and gives back
inside itself, what an allocator rounds up or can't reuse, and CUDA's own memory are not counted.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from ans_core.data.collate import TensorBatch

aten = torch.ops.aten


@dataclass(frozen=True, kw_only=True)
class StepPeak:
    """Bytes at the moment when most live."""

    weights: int
    """Trained and frozen, and buffers."""
    optimizer: int
    inputs: int
    gradients: int
    """Of weights, as far as the backward pass had come."""
    activations: int
    """All else: what the backward pass reads, the memory bank, gradients of activations, results that are let
    go at once."""
    phase: str
    """forward, backward or update."""

    @property
    def total(self) -> int:
        return self.weights + self.optimizer + self.inputs + self.gradients + self.activations


class LiveBytes(TorchDispatchMode):
    """Counts the storages that operations make and that still live; those made before are told to `watch`."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.phase = 0, 0, ""
        self.gradients = 0
        """Bytes of weights' gradients so far; the caller counts them."""
        self.at_most = ("", 0)
        """`phase` and `gradients` when most bytes lived."""
        self._seen: Any = WeakIdKeyDictionary()

    def watch(self, tensors: Iterable[Tensor]) -> int:
        """Count tensors' storages if they are new; return their bytes."""
        before = self.now
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = True
                self.now += storage.nbytes()
                weakref.finalize(storage, self._gone, storage.nbytes())
        return self.now - before

    def _gone(self, size: int) -> None:
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch(x for x in tree_leaves(result) if isinstance(x, Tensor))
        if self.now > self.most:
            self.most, self.at_most = self.now, (self.phase, self.gradients)
        return result


class AnsweredReads(TorchDispatchMode):
    """Answers what a fake tensor can't: a value that is read is true, or 1, and rows chosen by a mask are all
    rows.

    In a step of Tracking, values are read for curves, and to leave out frames and objects without ground
    truth."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._local_scalar_dense.default:
            return True if args[0].dtype == torch.bool else 1
        if func is aten.index.Tensor:
            chosen = [torch.arange(len(x)) if x is not None and x.dtype == torch.bool else x for x in args[1]]
            args = (args[0], chosen)
        return func(*args, **(kwargs or {}))


@contextmanager
def fakes() -> Iterator[FakeTensorMode]:
    """Make every tensor in the context a fake one."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, AnsweredReads():
        yield mode


@contextmanager
def as_on_gpu() -> Iterator[None]:
    """Let fake tensors of a CPU take the room that a GPU's would, which torch without CUDA has none of.

    Attention keeps its result and one number a query and head, never the matrix, with dropout, too (flash and
    memory-efficient attention; a CPU holds the matrix where there is dropout). Norms are computed in fp32
    under autocast.
    """
    norm, power = F.layer_norm, Tensor.pow

    def wide(x: Tensor) -> Tensor:
        return x.float() if torch.is_autocast_enabled("cpu") else x

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0
    ) -> Tensor:
        result: Tensor = aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, True, dropout_p
        )[0]
        return result

    replaced: list[tuple[Any, str, Any]] = [
        (F, "scaled_dot_product_attention", attention),
        (F, "layer_norm", lambda x, *rest: norm(wide(x), *rest)),
        (Tensor, "pow", lambda x, exponent: power(wide(x), exponent)),
    ]
    before = [getattr(owner, name) for owner, name, _ in replaced]
    for owner, name, own in replaced:
        setattr(owner, name, own)
    try:
        yield
    finally:
        for (owner, name, _), theirs in zip(replaced, before, strict=True):
            setattr(owner, name, theirs)


def faked(batch: Any, mode: FakeTensorMode) -> Any:
    """Return the batch with fake tensors in place of its own."""
    if isinstance(batch, Tensor):
        return mode.from_tensor(batch)
    if isinstance(batch, list):
        return [faked(one, mode) for one in batch]
    if isinstance(batch, TensorBatch):
        return replace(batch, **{f.name: faked(getattr(batch, f.name), mode) for f in fields(batch)})
    return batch


def _tensors(batch: Any) -> list[Tensor]:
    if isinstance(batch, TensorBatch):
        batch = [getattr(batch, f.name) for f in fields(batch)]
    if isinstance(batch, list):
        return [tensor for one in batch for tensor in _tensors(one)]
    return [batch] if isinstance(batch, Tensor) else []


def step_peak(module: nn.Module, optimizer: Optimizer, batch: Any, *, half: bool) -> StepPeak:
    """Run a step of a loss module, `module(batch) -> (loss, curves)`, under autocast to bf16 if `half`.

    The optimizer holds its state from the beginning, as it does after a first step.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    for p in trained:
        p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    live = LiveBytes()
    weights = live.watch((*module.parameters(), *module.buffers()))
    state = live.watch(x for x in tree_leaves([*optimizer.state.values()]) if isinstance(x, Tensor))
    inputs = live.watch(_tensors(batch))

    def note(p: Tensor) -> None:
        assert p.grad is not None
        live.gradients += p.grad.nbytes

    hooks = [p.register_post_accumulate_grad_hook(note) for p in trained]
    with live:
        live.phase = "forward"
        with torch.autocast("cpu", torch.bfloat16, enabled=half):
            loss, _ = module(batch)
        live.phase = "backward"
        loss.backward()
        del loss
        live.phase = "update"
        nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    for hook in hooks:
        hook.remove()
    phase, gradients = live.at_most
    rest = live.most - weights - state - inputs - gradients
    return StepPeak(
        weights=weights, optimizer=state, inputs=inputs, gradients=gradients, activations=rest, phase=phase
    )
