"""`ans demo`: the page on this machine alone, or, behind a password, on a network."""

from __future__ import annotations

import getpass
import os
import socket
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MOST_BYTES = 2 * 2**30
"""Of an upload, which gradio then ends with the word "Error". What is smaller and still too large gets a
sentence (sources.MOST_BYTES)."""
OWN_ONLY = "default-src 'self' data: blob: 'unsafe-inline' 'unsafe-eval'; frame-ancestors 'none'"
"""The browser loads nothing from any other host, whatever gradio or an answer's text may ask it to. gradio's
templates need eval."""


def serve(model: str, others: Sequence[str], *, host: str, port: int, auth: str | None, device: str) -> int:
    """Serve until Ctrl-C. Raises ValueError for a missing gradio, an open host without `auth`, an address
    that can't be had, and a checkpoint that can't be loaded."""
    user = _user(host, auth)
    _check_address(host, port)
    if find_spec("gradio") is None:
        raise ValueError(
            "the page needs gradio, which is no part of the pipeline's environment: pip install -c "
            "requirements/demo.txt -e '.[demo]'"
        )
    from ans_core.checkpoints.checkpoint import read_config
    from ans_core.checkpoints.folder import local_folder
    from ans_core.demo.checkpoints import offered
    from ans_core.demo.samples import held_out

    for other in others:  # errors come before the page does
        read_config(local_folder(other))
    loads = offered(model, others, device=device)
    next(iter(loads.values()))()
    with tempfile.TemporaryDirectory(prefix="ans-demo-") as scratch:
        os.environ |= {
            "GRADIO_ANALYTICS_ENABLED": "False",
            "GRADIO_TEMP_DIR": scratch,
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        from ans_core.demo.layout import css
        from ans_core.demo.page import build

        page = build(loads, held_out(Path(model)), Path(scratch))
        page.queue(default_concurrency_limit=4).launch(
            server_name=host, server_port=port, auth=user, css=css(), theme=_theme(),
            max_file_size=MOST_BYTES, share=False, ssr_mode=False, quiet=True, footer_links=[],
            mcp_server=False, enable_monitoring=False, pwa=False, prevent_thread_lock=True,
            app_kwargs={"middleware": _middleware(host)},
        )  # fmt: skip
        print(f"ans demo: {page.local_url} (Ctrl-C ends it)", flush=True)
        try:
            page.block_thread()
        finally:
            page.close(verbose=False)
    return 0


def _user(host: str, auth: str | None) -> tuple[str, str] | None:
    """Return (name, password). Raises ValueError for an open page without one."""
    if auth is None:
        if host not in LOOPBACK:
            raise ValueError(
                f"--host {host} opens the page to the network: give --auth USER as well (it asks for a "
                "password)"
            )
        return None
    try:
        password = os.environ.get("ANS_DEMO_PASSWORD") or getpass.getpass(f"password of {auth}: ")
    except EOFError:
        raise ValueError("--auth USER: nobody is there to type a password; set ANS_DEMO_PASSWORD") from None
    if not (auth and password):
        raise ValueError("--auth USER: neither the name nor the password may be empty")
    return auth, password


def _check_address(host: str, port: int) -> None:
    """Raise ValueError for a host that is not this machine's and a port that is taken, before a model is
    loaded for them."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.create_server((address[0], port), family=family):
            pass
    except (OSError, OverflowError) as error:
        raise ValueError(f"--host {host} --port {port} can't be had ({error}); give another port") from error


def _theme() -> Any:
    import gradio as gr

    fonts = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    return gr.themes.Default(
        primary_hue="indigo", neutral_hue="slate", radius_size="lg", font=fonts[0], font_mono=fonts[1]
    )


def _middleware(host: str) -> list[Any]:
    """Forbid the browser every other host; on loopback, answer only those who call it so (another site's name
    may point here)."""
    from starlette.middleware import Middleware
    from starlette.middleware.trustedhost import TrustedHostMiddleware

    names = [*LOOPBACK, "[::1]"] if host in LOOPBACK else ["*"]
    return [Middleware(TrustedHostMiddleware, allowed_hosts=names), Middleware(ContentSecurityPolicy)]


class ContentSecurityPolicy:
    """Add OWN_ONLY to every answer."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        async def sent(message: Any) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], (b"content-security-policy", OWN_ONLY.encode())]
            await send(message)

        await self.app(scope, receive, sent)
