"""Sequences whose items are made each time they are asked for, so that few of them are in memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeVar, overload

Item = TypeVar("Item", covariant=True)


class Lazy(Sequence[Item], ABC):
    """A subclass gives the length, and one item by its number; slices are lists."""

    @abstractmethod
    def item(self, number: int) -> Item:
        """Make an item. number: 0 to length - 1."""

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> list[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | list[Item]:
        numbers = range(len(self))[index]
        return self.item(numbers) if isinstance(numbers, int) else [self.item(number) for number in numbers]
