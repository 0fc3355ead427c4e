"""A dictionary of what was used last, bounded in entries and in bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Value = TypeVar("Value")


class LruCache(Generic[Value]):
    """Keeps values that cost something to make. Where there are too many, the least recently used make room.
    For one thread."""

    def __init__(
        self, *, most: int, most_bytes: int = 0, size: Callable[[Value], int] = lambda value: 0
    ) -> None:
        """most: entries. most_bytes: of all values together, as `size` counts them. A value that is larger by
        itself is not kept."""
        self.most, self.most_bytes, self.size = most, most_bytes, size
        self.bytes = 0
        self._values: OrderedDict[Hashable, Value] = OrderedDict()

    def __len__(self) -> int:
        return len(self._values)

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """Return the key's value, which is made if it is not there."""
        if key in self._values:
            self._values.move_to_end(key)
            return self._values[key]
        value = make()
        if (size := self.size(value)) > self.most_bytes:
            return value
        self._values[key] = value
        self.bytes += size
        while len(self._values) > self.most or self.bytes > self.most_bytes:
            _, oldest = self._values.popitem(last=False)
            self.bytes -= self.size(oldest)
        return value
