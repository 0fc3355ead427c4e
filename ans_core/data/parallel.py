"""One function on many items by the cores of this machine, with results in the items' order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from typing import TypeVar

from ans_core.processes import cores

THREADS = 16
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(work: Callable[[Item], Result], items: Sequence[Item], *, many: int) -> Iterator[Result]:
    """Yield the result of `work` for each item. More than `many` items are shared out to a process for each
    core, which take half a minute to start; fewer to threads, which wait for disks and stores side by side.
    An error of `work` comes in its item's turn."""
    pool: Executor
    if len(items) > many:
        workers = cores()
        pool = ProcessPoolExecutor(workers, mp_context=get_context("forkserver"))
    else:
        workers = THREADS
        pool = ThreadPoolExecutor(workers)
    under_way: deque[Future[Result]] = deque()  # results before their turn wait, so they are few
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) > workers + 1:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)
