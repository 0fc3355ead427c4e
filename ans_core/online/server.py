"""An engine as an HTTP server of JSON: questions with pictures in, answers out.

    POST /ask     {"question": "...", "image": "<base64>"}  (or "frames": ["<base64>", ...] of a clip; "request": a name of your own)
    POST /feedback  {"experience": 17, "right": true}  (or "right": false, with "answer": "..." if the true one is known;
                    "mask": "<base64>", with or without "right": a picture in which what is asked about is not black)
    GET  /status
    GET  /          a page that does all of it

Pictures come in the request, never as paths of this machine. A request must name one of the server's own
addresses as its host, and no other site's page as its origin: a page of another site can neither send one nor
have its own name point here.
"""

from __future__ import annotations

import asyncio
import base64
import io
import math
import socket
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import HTMLResponse, JSONResponse
from jaxtyping import Bool
from pydantic import BaseModel, ConfigDict, Field
from starlette.requests import ClientDisconnect

from ans_core.agent import asking
from ans_core.inference.answer import read_mask
from ans_core.online import overview
from ans_core.online.batching import Batching
from ans_core.online.engine import Engine, Query
from ans_core.pictures import transforms

LARGEST = 64 * 2**20
"""Bytes of a request."""
MOST_FRAMES = 128
"""Of a clip, as many as TRACK_OBJECT follows."""
MOST_PIXELS = 128_000_000
"""Of all pictures of a request: they are decoded, and written anew."""
MOST_WAITING = 32
"""Requests that are read or wait for the model; further ones are turned away with 503."""
MOST_CONNECTIONS = 512
"""Those that say nothing count, too."""
READ_S = 60.0
"""In which a request must be there."""
PAGE = Path(__file__).with_name("page.html")
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class Question(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(extra="forbid")
    question: str
    image: str | None = None
    frames: list[str] | None = Field(None, min_length=1, max_length=MOST_FRAMES)
    request: str = Field(default_factory=lambda: str(uuid.uuid4()), pattern=r"^[A-Za-z0-9._:-]{1,128}$")
    """It is kept as it comes, so there is no room for an address or a sentence in it."""


class Feedback(BaseModel):
    """What a person says of an answer."""

    model_config = ConfigDict(extra="forbid")
    experience: int = Field(gt=0, lt=2**63)
    right: bool | None = None
    answer: str | None = Field(None, min_length=1, max_length=4000)
    mask: str | None = None


def query_of(sent: Question) -> Query:
    """Read a request. Raises ValueError for a question that can't be asked, and for pictures that are none or
    too large."""
    encoded = [sent.image] if sent.frames is None else sent.frames
    if (sent.image is None) == (sent.frames is None):
        raise ValueError('give either "image" or "frames"')
    frames = tuple(decoded(one or "") for one in encoded)
    pixels = sum(math.prod(transforms.image_size(frame)) for frame in frames)
    if pixels > MOST_PIXELS:
        raise ValueError(
            f"the pictures have {pixels / 1e6:.0f} million pixels, at most {MOST_PIXELS / 1e6:.0f} are "
            "taken; make them smaller"
        )
    question = asking.checked(sent.question)
    return Query(request=sent.request, question=question, frames=frames, clip=sent.frames is not None)


def decoded(picture: str) -> bytes:
    try:
        return base64.b64decode(picture, validate=True)
    except ValueError as error:  # also of texts that are not ASCII
        raise ValueError(f"a picture is no base64 ({error})") from None


def mask_of(picture: bytes) -> Bool[np.ndarray, "H W"]:
    if math.prod(transforms.image_size(picture)) > MOST_PIXELS:
        raise ValueError("the mask is larger than any picture that is taken")
    return read_mask(io.BytesIO(picture), name="the mask")


def listening(host: str, port: int) -> socket.socket:
    """Listen at an address. Raises ValueError where no server can: to be found out before a model is
    loaded."""
    try:
        return socket.create_server(
            (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET, backlog=MOST_WAITING
        )
    except (OSError, OverflowError) as error:
        raise ValueError(
            f"nobody can listen on {host}, port {port} ({error}); give another --port or --host"
        ) from None


def server_of(engine: Engine, *, host: str, wait_s: float) -> uvicorn.Server:
    """Make the server. host: the address that it was given. wait_s: how long a question waits for others, to be
    answered with them."""
    return uvicorn.Server(
        uvicorn.Config(
            app_of(engine, host=host, wait_s=wait_s), limit_concurrency=MOST_CONNECTIONS, timeout_graceful_shutdown=3,
            log_level="warning", access_log=False,
        )
    )  # fmt: skip


async def arrived(request: Request) -> bool:
    """Read a request's body; tell whether all of it came within READ_S."""
    try:
        await asyncio.wait_for(request.body(), READ_S)
    except (TimeoutError, ClientDisconnect):
        return False
    return True


def app_of(engine: Engine, *, host: str, wait_s: float) -> FastAPI:
    """Return the application, which asks the engine in batches."""
    app = FastAPI(openapi_url=None)
    batching = Batching(engine.answer, size=engine.batch, wait_s=wait_s)
    waiting = 0

    @app.middleware("http")
    async def admit(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        nonlocal waiting
        if error := foreign(request, host):
            return JSONResponse({"error": error}, 403)
        if request.method != "POST":
            return await answer(request)
        length = request.headers.get("Content-Length", "")
        # a body in chunks has no length, whatever the header says
        if "Transfer-Encoding" in request.headers or not (
            length.isascii() and length.isdigit() and int(length) <= LARGEST
        ):
            return JSONResponse({"error": f"send Content-Length, at most {LARGEST}, and no chunks"}, 400)
        if waiting >= MOST_WAITING:
            return JSONResponse({"error": f"{waiting} requests wait already; try again later"}, 503)
        waiting += 1
        try:
            if not await arrived(request):
                return JSONResponse({"error": f"the request was not there within {READ_S:g} s"}, 408)
            return await answer(request)
        finally:
            waiting -= 1

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        faults = [f"{'.'.join(map(str, one['loc'][1:]))}: {one['msg']}" for one in error.errors()]
        return JSONResponse({"error": "; ".join(faults)}, 400)

    @app.exception_handler(ValueError)  # a question or a picture that can't be read
    async def unreadable(request: Request, error: ValueError) -> Response:
        return JSONResponse({"error": str(error)}, 400)

    @app.exception_handler(OSError)  # the store can't be read
    async def damaged(request: Request, error: OSError) -> Response:
        return JSONResponse({"error": str(error)}, 500)

    @app.get("/")
    def page() -> HTMLResponse:
        # in a frame of another page, a click on it would not be its user's
        return HTMLResponse(
            PAGE.read_text(encoding="utf-8"), headers={"Content-Security-Policy": "frame-ancestors 'none'"}
        )

    @app.post("/ask")
    def ask(sent: Question) -> dict[str, Any]:
        return asdict(batching.ask(query_of(sent)))

    @app.post("/feedback")
    def feedback(sent: Feedback) -> dict[str, Any]:
        if engine.read_only:
            raise ValueError("this server keeps nothing (--read-only)")
        mask = None if sent.mask is None else mask_of(decoded(sent.mask))
        engine.store.add_feedback(sent.experience, right=sent.right, answer=sent.answer, mask=mask)
        return {"experience": sent.experience}

    @app.get("/status")
    def status() -> dict[str, Any]:
        told = {name: getattr(engine, name) for name in ("version", "trouble", "read_only")}
        return told | {"store": overview.counts(engine.store)}

    return app


def foreign(request: Request, host: str) -> str:
    """Say why a request is not for this server; empty if it is. A site's name may point here (DNS rebinding),
    its page may send. host: the address that the server was given; another one of this machine's counts where
    the request reached it there."""
    reached, port = request.scope["server"]
    names = {*LOOPBACK, host.lower(), reached.removeprefix("::ffff:")}
    bare = {f"[{name}]" if ":" in name else name for name in names}
    # browsers leave :80 out
    hosts = {f"{name}:{port}" for name in bare} | (bare if port == 80 else set())
    named = [name.lower() for name in request.headers.getlist("Host")]
    if len(named) != 1 or named[0] not in hosts:
        return f"the request's Host is none of this server's addresses; ask {' or '.join(sorted(hosts))}"
    origins = [origin.lower() for origin in request.headers.getlist("Origin")]
    if any(origin not in {f"http://{name}" for name in hosts} for origin in origins):
        return (
            "the request's Origin is a page of another site; this server answers its own address and "
            "programs alone"
        )
    return ""
