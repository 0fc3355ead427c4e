"""Read files of earlier stages as JSON values, and pictures as data URIs."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

KINDS = {".png": "png", ".gif": "gif", ".jpg": "jpeg", ".webp": "webp"}


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not JSON ({error}); run the stage that writes it again") from error


def data_uri(path: Path) -> str:
    if path.suffix not in KINDS:
        raise ValueError(f"{path}: the page shows pictures of {sorted(KINDS)}")
    return _uri(KINDS[path.suffix], path.read_bytes())


def clips(folder: Path | None) -> list[dict[str, str]]:
    """Return the stage `memory`'s validation clips, truth beside prediction."""
    paths = sorted((folder / "clips").glob("*.gif")) if folder else []
    return [{"name": path.stem.partition("-")[2], "source": data_uri(path)} for path in paths]


def webp_uri(content: bytes) -> str:
    return _uri("webp", content)


def _uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
