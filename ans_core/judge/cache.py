"""Cache a model's replies by the content of the request, in a SQLite file that several processes may
share."""

from __future__ import annotations

import hashlib
import json
import logging
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 2
BUSY_S = 30.0


def key_of(*, url: str, model: str, prompt_version: str, parameters: dict[str, Any], content: Any) -> str:
    """Return a sha256 over everything that decides a reply. `url`: the endpoint's, as the same name may be
    another model elsewhere. `content`: the question, as JSON values and pictures."""
    parts = [SCHEMA_VERSION, url, model, prompt_version, parameters, content]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=bytes.hex).encode()).hexdigest()


class Cache:
    """Holds understood replies; failures and unreadable replies are never stored. Use it from one thread at a
    time. The file must be on a local disk: SQLite's write-ahead log does not work over a network file
    system."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._warned = path, False
        self._database = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
        try:
            self._database.execute("PRAGMA journal_mode = WAL")
            self._database.execute("PRAGMA synchronous = NORMAL")
            self._database.execute(
                "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, reply TEXT NOT NULL, written_s "
                "REAL NOT NULL)"
            )
        except sqlite3.DatabaseError as error:
            self._database.close()
            raise ValueError(
                f"the judge's cache {path} can't be used: {error}; remove it, or name another (judge.cache)"
            ) from None

    def get(self, key: str) -> str | None:
        """Return the reply; None if there is none, or if the file can't be read any more."""
        with self._optional():
            row = self._database.execute("SELECT reply FROM replies WHERE key = ?", (key,)).fetchone()
            return None if row is None else str(row[0])
        return None

    def put(self, key: str, reply: str) -> None:
        """Keep the reply, if the file can be written."""
        with self._optional():
            self._database.execute(
                "INSERT OR REPLACE INTO replies VALUES (?, ?, ?)", (key, reply, time.time())
            )

    @contextmanager
    def _optional(self) -> Iterator[None]:
        """Warn, once, where the file fails: a run does without it."""
        try:
            yield
        except (sqlite3.Error, UnicodeError) as error:
            if not self._warned:
                logging.warning("the judge's cache %s fails, and replies are not kept: %s", self._path, error)
            self._warned = True

    def close(self) -> None:
        self._database.close()
