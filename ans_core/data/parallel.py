"""One function on many items by the cores of this machine, with results in the items' order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from typing import TypeVar

from ans_core.processes import cores

THREADS = 16
"""They wait more than they compute."""
Item = TypeVar("Item")
Result = TypeVar("Result")


def in_order(
    work: Callable[[Item], Result], items: Sequence[Item], *, many: int, what: str, most: int | None = None
) -> Iterator[Result]:
    """Yield the result of `work` for each item. More than `many` items are shared out to a process for each
    core, which take half a minute to start; fewer to THREADS threads, which wait for disks and stores side by
    side. At most `most` of either (None: no limit), and two results more wait for their turn, so little is held.
    An error of `work` comes in its item's turn. Raises RuntimeError where a process is killed; what: it reads,
    for the message."""
    in_processes = len(items) > many
    workers = cores() if in_processes else THREADS
    workers = min(workers, most or workers)
    pool: Executor = (
        ProcessPoolExecutor(workers, mp_context=get_context("forkserver"))
        if in_processes
        else ThreadPoolExecutor(workers)
    )
    under_way: deque[Future[Result]] = deque()
    try:
        for item in items:
            under_way.append(pool.submit(work, item))
            if len(under_way) >= workers + 2:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()
    except BrokenProcessPool:
        raise RuntimeError(
            f"{what}: one of {workers} processes that read it was killed, mostly where memory is short: give it more, or "
            f"fewer cores (taskset; on a cluster `cpus` of launch.resources)"
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)
