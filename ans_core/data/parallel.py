"""One function on many items by the cores of this machine, and of the other nodes of a job, with results in the
items' order."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from multiprocessing import parent_process
from threading import Thread
from typing import Any, TypeVar

import torch.distributed

from ans_core import dist
from ans_core.processes import cores, forks_with

THREADS = 16
"""They wait more than they compute."""
Item = TypeVar("Item")
Result = TypeVar("Result")
T = TypeVar("T")
_helpers: list[int] = []
"""Ranks of the processes that take part in this one's `in_order`."""


def led_by_the_first(work: Callable[[], T]) -> T | None:
    """Let the first process do `work`, alone but for `in_order`, of whose items all processes take their share.
    All must call it, inside of `dist.process_group`; the others return None once it is done."""
    if dist.world_size() == 1:
        return work()
    if dist.rank() > 0:
        _help()
        return None
    ranks = range(1, dist.world_size())
    _helpers.extend(ranks)
    try:
        with dist.alone():
            made = work()
    finally:
        _helpers.clear()
    for rank in ranks:
        _send(None, rank)
    return made


def in_order(
    work: Callable[[Item], Result], items: Sequence[Item], *, many: int, what: str, most: int | None = None
) -> Iterator[Result]:
    """Yield the result of `work` for each item, to be taken to the last one. More than `many` items are shared out
    to a process for each core, which take some seconds to start, on all nodes of `led_by_the_first`; fewer to THREADS
    threads, which wait for disks and stores side by side. At most `most` of either on a node (None: no limit), and two
    results more wait for their turn, so little of them is held. An error of `work` comes in its item's turn. Raises
    RuntimeError where a process is killed; what: it reads, for the message."""
    if len(items) <= many:
        yield from _in_pool(work, items, what=what, most=most, processes=False)
        return
    nodes = 1 + len(_helpers)
    for rank in _helpers:
        with _named(rank, what):
            _send((work, items[rank::nodes], what, most), rank)
    own = _in_pool(work, items[::nodes], what=what, most=most, processes=True)
    for number in range(len(items)):
        rank = number % nodes
        yield next(own) if rank == 0 else _result_from(rank, what)


def _in_pool(
    work: Callable[[Item], Result], items: Sequence[Item], *, what: str, most: int | None, processes: bool
) -> Iterator[Result]:
    workers = cores() if processes else THREADS
    workers = min(workers, most or workers)
    pool: Executor = _processes(workers, work) if processes else ThreadPoolExecutor(workers)
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


def _processes(count: int, work: Callable[..., Any]) -> ProcessPoolExecutor:
    """Return a pool whose processes have what `work` needs imported: seconds of processor time and hundreds of MB
    for each otherwise."""
    context = forks_with(getattr(work, "func", work).__module__)
    return ProcessPoolExecutor(count, mp_context=context, initializer=_end_with_starter)


def _end_with_starter() -> None:
    """End this process of a pool once the one that started it has ended, also by a kill: it would wait for work
    for ever."""
    starter = parent_process()
    assert starter is not None

    def watch() -> None:
        starter.join()
        os._exit(1)

    Thread(target=watch, daemon=True).start()


def _help() -> None:
    """Work on this process's share of whatever the first one hands out. (Sending waits for the first process to
    take a result.) If the first one fails, it says why, and this one just ends."""
    with suppress(RuntimeError):  # of a connection: those of the work are sent
        while (share := _received(0)) is not None:
            work, items, what, most = share
            try:
                for result in _in_pool(work, items, what=what, most=most, processes=True):
                    _send((result, None), 0)
            except Exception as error:  # noqa: BLE001  the first process raises it in its item's turn
                _send((None, error), 0)


@contextmanager
def _named(rank: int, what: str) -> Iterator[None]:
    """Name the process of a connection that is lost."""
    try:
        yield
    except RuntimeError:
        raise RuntimeError(
            f"{what}: process {rank}, which shares it, is gone: killed, mostly where memory is short, or its node is lost"
        ) from None


def _result_from(rank: int, what: str) -> Any:
    with _named(rank, what):
        result, error = _received(rank)
    if error is not None:
        raise error
    return result


def _send(value: object, rank: int) -> None:
    torch.distributed.send_object_list([value], dst=rank)


def _received(rank: int) -> Any:
    values: list[Any] = [None]
    torch.distributed.recv_object_list(values, src=rank)
    return values[0]
