"""A judge on an OpenAI-compatible endpoint: questions and captions in, futures of rewards out, or requests in
other words in and texts out, with a cache on disk."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from tqdm import tqdm

from ans_core.judge import parse
from ans_core.judge.base import STATS, CaptionQuestions, Choice
from ans_core.judge.cache import Cache, key_of
from ans_core.judge.chat import Chat, Endpoint, Unavailable, Usage
from ans_core.judge.questions import Questions, reward
from ans_core.judge.wording import PROMPT_VERSION, Request, answering, normal, read_draft, writing

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, kw_only=True)
class _Job(Generic[T_co]):
    """A request, its cache key, and the function that reads its reply (None: unreadable)."""

    key: str
    request: Request
    read: Callable[[str], T_co | None]


class NoReplyError(RuntimeError):
    """The judge did not answer every request. What it did answer is in the cache."""


class EndpointJudge:
    """A `Judge` whose calls run in its own thread; only that thread's event loop touches the state, so
    submitting never blocks.

    A batch (one call) has `deadline_s` seconds, None: any time; what is missing by then is None.
    Limits (the endpoint's `concurrency`, `price.limit`) belong to this object: several processes divide them. One unreadable
    answer makes the whole reply unreadable, and its judgement None: counting it as 0 would reward the judge's
    style.
    """

    def __init__(self, endpoint: Endpoint, *, cache: Path, deadline_s: float | None = 60.0) -> None:
        self._chat = Chat(endpoint)
        self.name = f"{endpoint.model} at {endpoint.base_url or 'api.openai.com'}"
        self._model, self._deadline_s = endpoint.model, deadline_s
        self._failure = ""
        self._cache = Cache(cache)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="judge", daemon=True)
        self._thread.start()

    def submit(self, pairs: CaptionQuestions) -> Future[list[float | None]]:
        return self._start(self._rewards(pairs))

    def choose(self, pairs: CaptionQuestions) -> Future[list[Choice | None]]:
        return self._start(self._choices(pairs))

    def write(
        self, captions: Sequence[str], *, positives: int, negatives: int
    ) -> Future[list[Questions | None]]:
        return self._start(
            self._batch(
                [self._writing(caption, positives=positives, negatives=negatives) for caption in captions]
            )
        )

    def ask(self, requests: Sequence[Request], *, desc: str) -> list[str]:
        """Return the reply to each request, which may be empty. Raises NoReplyError if one is missing."""
        futures = [self.results([request], lambda reply: reply or None) for request in requests]
        replies = [future.result()[0] or "" for future in tqdm(futures, desc=desc, unit="")]
        if lost := int(self.stats()["failed"]):
            raise NoReplyError(
                f"{self.name} left {lost} of {len(requests)} requests without a reply ({self._failure}); run "
                "again to go on"
            )
        return replies

    def results(self, requests: Sequence[Request], read: Callable[[str], T | None]) -> Future[list[T | None]]:
        """Ask in other words than those of captions. `read` makes a result of a reply; None: unreadable."""
        return self._start(
            self._batch(
                [self._job(request, ["ask", request.system, request.user], read) for request in requests]
            )
        )

    def stats(self) -> dict[str, float]:
        return self._start(self._take_stats()).result()

    def close(self) -> None:
        """Drop calls under way and cancel their futures. May be called twice."""
        if self._loop.is_closed():
            return
        self._start(self._end()).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _rewards(self, pairs: CaptionQuestions) -> list[float | None]:
        """Compute rewards; captions without words get 0 without a call."""
        silent = [bool(questions) and not normal(caption) for caption, questions in pairs]
        chosen = await self._choices(
            [
                (caption, () if none else questions)
                for (caption, questions), none in zip(pairs, silent, strict=True)
            ]
        )
        return [
            0.0 if none else reward(questions, answers) if questions and answers is not None else None
            for (_, questions), answers, none in zip(pairs, chosen, silent, strict=True)
        ]

    async def _choices(self, pairs: CaptionQuestions) -> list[Choice | None]:
        """Compute answers; without questions there are no answers, and no call."""
        rows = [i for i, (_, questions) in enumerate(pairs) if questions]
        by_row = dict(zip(rows, await self._batch([self._answering(*pairs[i]) for i in rows]), strict=True))
        return [by_row[i] if questions else () for i, (_, questions) in enumerate(pairs)]

    def _answering(self, caption: str, questions: Questions) -> _Job[Choice]:
        def read(reply: str) -> Choice | None:
            chosen = parse.choices(reply, questions)
            return None if None in chosen else tuple(i for i in chosen if i is not None)

        request = answering(normal(caption), questions)
        return self._job(
            request, ["answer", normal(caption), [asdict(question) for question in questions]], read
        )

    def _writing(self, caption: str, *, positives: int, negatives: int) -> _Job[Questions]:
        def read(reply: str) -> Questions | None:
            return read_draft(reply, positives=positives, negatives=negatives)

        request = writing(normal(caption), positives=positives, negatives=negatives)
        return self._job(request, ["write", normal(caption), positives, negatives], read)

    def _job(self, request: Request, content: list[Any], read: Callable[[str], T | None]) -> _Job[T]:
        parameters = {"temperature": request.temperature, "max_tokens": request.max_tokens}
        key = key_of(
            url=self._chat.url,
            model=self._model,
            prompt_version=PROMPT_VERSION,
            parameters=parameters,
            content=content,
        )
        return _Job(key=key, request=request, read=read)

    async def _batch(self, jobs: Sequence[_Job[T]]) -> list[T | None]:
        """Run jobs; equal jobs run once, and cached ones without a call."""
        unlike = {job.key: job for job in jobs}
        tasks = {key: self._loop.create_task(self._done(job)) for key, job in unlike.items()}
        try:
            if tasks:
                await asyncio.wait(tasks.values(), timeout=self._deadline_s)
        finally:  # also where the whole batch is cancelled
            late = [task for task in tasks.values() if not task.done()]
            for task in late:
                task.cancel()
        self._chat.usage.failed += len(late)
        return [None if tasks[job.key] in late else tasks[job.key].result() for job in jobs]

    async def _done(self, job: _Job[T]) -> T | None:
        cached = self._cache.get(job.key)
        result = None if cached is None else job.read(cached)
        if result is not None:
            self._chat.usage.cached += 1
            return result
        try:
            reply = await self._chat.reply(job.request)
        except Unavailable as error:
            self._failure = self._failure or str(error)
            self._chat.usage.failed += 1
            return None
        result = job.read(reply)
        if result is None:
            self._chat.usage.parse_failed += 1
        else:
            self._cache.put(job.key, reply)
        return result

    async def _take_stats(self) -> dict[str, float]:
        usage, self._chat.usage = self._chat.usage, Usage()
        latency_s = usage.waited_s / usage.answered if usage.answered else 0.0
        counts = {name: float(count) for name, count in asdict(usage).items() if name in STATS}
        return counts | {"latency_s": latency_s}

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await self._chat.close()
        self._cache.close()
