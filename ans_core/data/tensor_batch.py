"""What moves to a device as one: batches and their parts."""

from __future__ import annotations

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
        return replace(self, **{f.name: _moved(getattr(self, f.name), device) for f in fields(self) if f.name not in self.ON_HOST})


def _moved(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, list):
        return [_moved(v, device) for v in value]
    return value.to(device) if isinstance(value, (Tensor, TensorBatch)) else value
