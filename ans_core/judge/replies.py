"""Requests in a benchmark's own words to a judge on an OpenAI-compatible endpoint -> the texts of its
replies, with a cache on disk."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from tqdm import tqdm

from ans_core.judge.cache import Cache, key_of
from ans_core.judge.chat import Chat, Endpoint, Unavailable
from ans_core.judge.wording import Request

VERSION = "text 1"


class NoReplyError(RuntimeError):
    """The judge did not answer every request. What it did answer is in the cache."""


class Replies:
    """One judge; `name` is what a figure calls it."""

    def __init__(self, endpoint: Endpoint, *, cache: Path) -> None:
        self.name = f"{endpoint.model} at {endpoint.base_url or 'api.openai.com'}"
        self._endpoint, self._cache = endpoint, cache
        Chat(endpoint)  # a missing key is said before anything is asked

    def ask(self, requests: Sequence[Request], *, desc: str) -> list[str]:
        """Return a reply to each request. Raises NoReplyError if one is missing."""
        return asyncio.run(self._all(requests, desc))

    async def _all(self, requests: Sequence[Request], desc: str) -> list[str]:
        chat = Chat(self._endpoint)
        with closing(Cache(self._cache)) as cache, tqdm(total=len(requests), desc=desc, unit="") as bar:

            async def one(request: Request) -> str | Unavailable:
                key = key_of(
                    url=chat.url,
                    model=self._endpoint.model,
                    prompt_version=VERSION,
                    parameters={"max_tokens": request.max_tokens},
                    content=_content(request),
                )
                reply = cache.get(key)
                if reply is None:
                    try:
                        reply = await chat.reply(request)
                    except Unavailable as error:
                        return error
                    if reply:
                        cache.put(key, reply)
                bar.update()
                return reply

            try:
                replies = await asyncio.gather(*map(one, requests))
            finally:
                await chat.close()
        if lost := [reply for reply in replies if isinstance(reply, Unavailable)]:
            raise NoReplyError(
                f"{self.name} left {len(lost)} of {len(requests)} requests without a reply ({lost[0]}); run "
                "again to go on"
            )
        return [reply for reply in replies if isinstance(reply, str)]


def _content(request: Request) -> list[Any]:
    parts = [request.user] if isinstance(request.user, str) else request.user
    return [
        request.system,
        *(hashlib.sha256(part).hexdigest() if isinstance(part, bytes) else part for part in parts),
    ]
