"""Questions that wait at the same time are answered together."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue
from threading import Thread

from ans_core.online.engine import Query, Reply

Waiting = tuple[Query, Future[Reply]]


class Batching:
    """Hands what many threads ask to one function, at most `size` questions at a time, in a thread of its own.

    The first question of a batch waits `wait_s` for others; those that come while a batch is answered are
    the next one.
    """

    def __init__(
        self, answer: Callable[[Sequence[Query]], Sequence[Reply]], *, size: int, wait_s: float
    ) -> None:
        self._answer, self._size, self._wait_s = answer, size, wait_s
        self._waiting: SimpleQueue[Waiting] = SimpleQueue()
        Thread(target=self._answer_for_ever, daemon=True).start()

    def ask(self, query: Query) -> Reply:
        """Return the answer. Raises what the function raises for this question alone."""
        reply: Future[Reply] = Future()
        self._waiting.put((query, reply))
        return reply.result()

    def _answer_for_ever(self) -> None:
        while True:
            batch = [self._waiting.get()]
            deadline_s = time.monotonic() + self._wait_s
            while len(batch) < self._size:
                try:
                    batch.append(self._waiting.get(timeout=max(0.0, deadline_s - time.monotonic())))
                except Empty:
                    break
            self._answer_batch(batch)

    def _answer_batch(self, batch: Sequence[Waiting]) -> None:
        try:
            replies = self._answer([query for query, _ in batch])
        except Exception as error:  # noqa: BLE001  whoever asked gets it
            if len(batch) == 1:
                batch[0][1].set_exception(error)
                return
            for one in batch:  # whoever is not to blame gets an answer
                self._answer_batch([one])
        else:
            for (_, waiting), reply in zip(batch, replies, strict=True):
                waiting.set_result(reply)
