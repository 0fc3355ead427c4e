"""A store -> what people want to know of it: counts, every experience with what was found out, the audit
chain."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from ans_core.online import audit
from ans_core.online.store import Store

FIELDS = (
    "id",
    "time_s",
    "question",
    "form",
    "answer",
    "policy",
    "label",
    "share",
    "verified",
    "verdict",
    "provenance",
    "visits",
    "flips",
)


def counts(store: Store) -> dict[str, int]:
    """Return how much there is of everything, experiences by verdict, and the counters (flooded, evicted)."""
    queries = {
        "experiences": "SELECT COUNT(*) FROM experiences",
        "vectors": "SELECT COUNT(*) FROM vectors",
        "pictures": "SELECT COUNT(DISTINCT digest) FROM pictures",
        "waiting": "SELECT COUNT(*) FROM queue WHERE learned IS NULL",
        "learned, weights not on disk": "SELECT COUNT(*) FROM queue WHERE learned IS NOT NULL",
        "audit rows": "SELECT COUNT(*) FROM audit",
    }
    totals = {name: int(store.rows(question)[0][0]) for name, question in queries.items()}
    verdicts = store.rows(
        "SELECT verdict, COUNT(*) FROM experiences WHERE verdict IS NOT NULL GROUP BY verdict ORDER BY "
        "verdict"
    )
    return totals | {
        str(name): int(n)
        for name, n in (*verdicts, *store.rows("SELECT name, value FROM counters ORDER BY name"))
    }


def records(store: Store) -> Iterator[dict[str, Any]]:
    """Yield every experience with its pictures' files."""
    for row in store.rows(f"SELECT {', '.join(FIELDS)} FROM experiences ORDER BY id"):
        record = dict(zip(FIELDS, row, strict=True))
        for task in store.tasks([record["id"]]):
            yield record | {"provenance": json.loads(record["provenance"]), "pictures": list(task.frames)}


def audit_rows(store: Store, last: int | None = None) -> list[audit.AuditRow]:
    """Return the chain, or its `last` rows."""
    names = ("number", "time_s", "event", "body", "previous", "hash")
    rows = store.rows(
        f"SELECT {', '.join(names)} FROM audit ORDER BY number DESC LIMIT ?", -1 if last is None else last
    )
    return [audit.AuditRow(**dict(zip(names, row, strict=True))) for row in reversed(rows)]


def audit_head(store: Store) -> tuple[int, str]:
    """Return number and hash of the newest row."""
    rows = audit_rows(store, 1)
    return (rows[0].number, rows[0].hash) if rows else (0, audit.GENESIS)
