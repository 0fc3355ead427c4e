"""What moves to a device as one: batches and their parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

AnyBatch = TypeVar("AnyBatch", bound="TensorBatch")


@dataclass(frozen=True, kw_only=True)
class TensorBatch:
    """A batch whose tensors move together: its own, those in its lists, and those of batches in it."""

    ON_HOST: ClassVar[frozenset[str]] = frozenset()
    """Names of fields that stay where they are: what is read on the CPU in any case."""

    def to(self: AnyBatch, device: torch.device | str) -> AnyBatch:
        """Copy to a device; from pinned memory, without waiting for it."""
        return self._mapped(
            lambda part: part.to(device, non_blocking=True) if isinstance(part, Tensor) else part.to(device)
        )

    def pin_memory(self: AnyBatch) -> AnyBatch:
        """Copy to memory that a GPU reads by itself. torch's DataLoader calls it."""
        return self._mapped(lambda part: part.pin_memory())

    def _mapped(self: AnyBatch, move: Callable[[Any], Any]) -> AnyBatch:
        return replace(
            self,
            **{
                f.name: _mapped(getattr(self, f.name), move)
                for f in fields(self)
                if f.name not in self.ON_HOST
            },
        )


def _mapped(value: Any, move: Callable[[Any], Any]) -> Any:
    if isinstance(value, list):
        return [_mapped(part, move) for part in value]
    return move(value) if isinstance(value, (Tensor, TensorBatch)) else value
