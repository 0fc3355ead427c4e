"""One OpenAI-compatible chat endpoint: a request in, the text of its reply out, or `Unavailable`; it counts
what the calls cost.

Retries are the openai client's own: 408, 409, 429, 5xx, timeouts and broken connections, after Retry-After
(up to two minutes) or exponential pauses with jitter; any other 4xx is final. A status of 200 whose body
holds an error counts as the error's own. All methods belong to one event loop.
"""

from __future__ import annotations

import asyncio
import base64
import ipaddress
import json
import logging
import os
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import openai
from openai.types.chat import ChatCompletion

from ans_core.judge.wording import Request

CHARACTERS_PER_TOKEN = 4
"""For servers that do not count tokens."""
TOLD_STATUSES = {400, 404, 422}
"""Statuses whose messages go into the log: they describe the request. Messages of 401 and 403 may show parts
of the key."""
OPTIONAL = {
    "response_format": ("response_format", "json_schema", "structured", "grammar"),
    "temperature": ("temperature",),
    "max_tokens": ("max_tokens",),
}
"""Parts of a request that not every server or model takes -> words in its refusal that mean them."""


class Unavailable(RuntimeError):
    """No reply, for any reason; the message holds no key."""


@dataclass(kw_only=True, frozen=True)
class Price:
    """USD per million tokens, and the spending limit (0 = none). Calls under way when it is reached still
    finish."""

    tokens_in: float = 0.0
    tokens_out: float = 0.0
    limit: float = 0.0


@dataclass(kw_only=True, frozen=True)
class Endpoint:
    """Where a judge is and how it is called; an empty `base_url` is OpenAI's own."""

    model: str
    base_url: str = ""
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = 16
    timeout_s: float = 30.0
    retries: int = 3
    price: Price = Price()
    breaker_failures: int = 8
    """After so many failed calls in a row one call is let through every `breaker_pause_s`, until one
    succeeds."""
    breaker_pause_s: float = 30.0


class Breaker:
    """Opens after an endpoint's `breaker_failures`."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._row, self._until_s = endpoint, 0, 0.0

    def lets_through(self) -> bool:
        if self._row < self._endpoint.breaker_failures:
            return True
        if time.monotonic() < self._until_s:
            return False
        self._pause()
        return True

    def failed(self) -> None:
        self._row += 1
        self._pause()

    def succeeded(self) -> None:
        self._row = 0

    def _pause(self) -> None:
        self._until_s = time.monotonic() + self._endpoint.breaker_pause_s


@dataclass(kw_only=True)
class Usage:
    calls: int = 0
    cached: int = 0
    failed: int = 0
    """No judgement because of the endpoint."""
    parse_failed: int = 0
    answered: int = 0
    tokens_in: int = 0
    tokens_out: int = 0
    cost: float = 0.0
    waited_s: float = 0.0


class Chat:
    """Client of an endpoint. ValueError if the key's environment variable is not set, unless the endpoint is
    local."""

    def __init__(self, endpoint: Endpoint) -> None:
        key = os.environ.get(endpoint.api_key_env, "")
        if not key and not is_local(endpoint.base_url):
            where = endpoint.base_url or "OpenAI's endpoint"
            raise ValueError(
                f"{where} wants an API key: set the environment variable {endpoint.api_key_env} (named by "
                "judge.api_key_env)"
            )
        self._key = key
        self._client = openai.AsyncOpenAI(
            api_key=key or "none", base_url=endpoint.base_url or None, timeout=endpoint.timeout_s,
            max_retries=endpoint.retries,
            http_client=openai.DefaultAsyncHttpxClient(event_hooks={"response": [_take_status_of_body]}),
        )  # fmt: skip
        self._model, self._price, self._breaker = endpoint.model, endpoint.price, Breaker(endpoint)
        self._slots = asyncio.Semaphore(endpoint.concurrency)
        self._refused: set[str] = set()
        self._warned: set[str] = set()
        self._spent = 0.0
        self.usage = Usage()

    @property
    def url(self) -> str:
        """Return the endpoint's URL, without user and password."""
        url = self._client.base_url
        return f"{url.scheme}://{url.netloc.decode()}{url.path}"

    async def reply(self, request: Request) -> str:
        """Send a request once one of the `concurrency` places is free. The reply may be empty."""
        async with self._slots:
            self._check()
            start_s = time.monotonic()
            self.usage.calls += 1
            try:
                completion = await self._complete(request)
                text = _text(completion)
            except asyncio.CancelledError:  # the deadline: the only sign of a server that hangs
                self._breaker.failed()
                raise
            except (
                openai.OpenAIError,
                ValueError,
                RecursionError,
            ) as error:  # a body that is no JSON, or nested too deeply
                self._breaker.failed()
                raise Unavailable(self._tell(error)) from None
            self._breaker.succeeded()
            self.usage.answered += 1
            self.usage.waited_s += time.monotonic() - start_s
            self._count(completion, request, text)
            return text

    async def close(self) -> None:
        await self._client.close()

    def _check(self) -> None:
        if self._price.limit and self._spent >= self._price.limit:
            raise Unavailable(
                self._once(f"judge.max_cost_usd is spent ({self._spent:.2f} USD): no more calls")
            )
        if not self._breaker.lets_through():
            raise Unavailable("calls are paused after failures in a row")

    async def _complete(self, request: Request) -> ChatCompletion:
        """Send the request, without the parameters that the server has refused by name so far."""
        options: dict[str, Any] = {"temperature": request.temperature, "max_tokens": request.max_tokens}
        if request.schema is not None:
            schema = {"name": "reply", "schema": request.schema, "strict": True}
            options["response_format"] = {"type": "json_schema", "json_schema": schema}
        system = [{"role": "system", "content": request.system}] if request.system else []
        messages: Any = [*system, {"role": "user", "content": _content(request.user)}]
        while True:
            sent = {name: value for name, value in options.items() if name not in self._refused}
            try:
                completion = await self._client.chat.completions.create(
                    model=self._model, messages=messages, **sent
                )
            except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
                refused = {name for name in sent if any(word in error.message for word in OPTIONAL[name])}
                if not refused:
                    raise
                self._once(f"the judge's endpoint does not take {sorted(refused)}; going on without")
                self._refused |= refused
                continue
            if not isinstance(completion, ChatCompletion):
                raise ValueError(f"the reply is no chat completion but {type(completion).__name__}")
            return completion

    def _count(self, completion: ChatCompletion, request: Request, text: str) -> None:
        tokens_in = _counted(completion, "prompt_tokens") or request.characters // CHARACTERS_PER_TOKEN
        tokens_out = _counted(completion, "completion_tokens") or len(text) // CHARACTERS_PER_TOKEN
        cost = (tokens_in * self._price.tokens_in + tokens_out * self._price.tokens_out) / 1e6
        self._spent += cost
        self.usage.tokens_in += tokens_in
        self.usage.tokens_out += tokens_out
        self.usage.cost += cost

    def _tell(self, error: Exception) -> str:
        reason = type(error).__name__
        if isinstance(error, openai.APIStatusError):
            reason += f" {error.status_code}"
            if error.status_code in TOLD_STATUSES:
                reason += f": {error.message[:300]}"
        return self._once(f"the judge's endpoint failed: {reason}")

    def _once(self, message: str) -> str:
        """Log a message the first time only, without the key in case a server repeats it."""
        clean = message.replace(self._key, "***") if self._key else message
        if clean not in self._warned:
            self._warned.add(clean)
            logging.warning("%s", clean)
        return clean


def _content(user: str | tuple[str | bytes, ...]) -> str | list[dict[str, Any]]:
    if isinstance(user, str):
        return user
    return [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {
            "type": "image_url",
            "image_url": {"url": f"data:image/png;base64,{base64.b64encode(part).decode()}"},
        }
        for part in user
    ]


def is_local(base_url: str) -> bool:
    """Tell whether an address is this machine or in a private network: such servers seldom ask for keys."""
    host = urlsplit(base_url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_private
    except ValueError:
        return host == "localhost"


def _counted(completion: ChatCompletion, name: str) -> int:
    """Return a count of the reply's `usage`; 0 where it is none, because the client does not check what it
    receives."""
    count = getattr(completion.usage, name, None)
    return count if isinstance(count, int) and count > 0 else 0


def _text(completion: ChatCompletion) -> str:
    """Return the text; empty without content (a refusal). Raises ValueError without a choice or message: the
    client does not check what it receives."""
    try:
        content = completion.choices[0].message.content
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError("the reply holds no choice") from error
    return content if isinstance(content, str) else ""


async def _take_status_of_body(response: Any) -> None:
    """Give a response of status 200 that holds an error the error's status, before the client looks at it:
    OpenRouter and some proxies answer a rate limit so."""
    if response.status_code == 200:
        response.status_code = _status(await response.aread())


def _status(body: bytes) -> int:
    """Return the status of an error in a body, at its top or in its first choice; 500 if it names none; 200
    without an error."""
    try:
        values = json.loads(body)
    except (ValueError, RecursionError):  # the client says what is wrong with it
        return 200
    choices = values.get("choices") if isinstance(values, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    error = next(
        (part["error"] for part in (values, first) if isinstance(part, dict) and part.get("error")), None
    )
    if error is None:
        return 200
    code = str(error.get("code")) if isinstance(error, dict) else ""
    return int(code) if re.fullmatch("[45][0-9]{2}", code) else 500
