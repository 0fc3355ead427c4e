"""A store -> what people want to know of it: counts, alerts, every experience with what was found out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

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
        "with a person's feedback": "SELECT COUNT(*) FROM feedback",
        "waiting": "SELECT COUNT(*) FROM queue WHERE learned IS NULL",
        "learned, weights not on disk": "SELECT COUNT(*) FROM queue WHERE learned IS NOT NULL",
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
    """Yield every experience with its pictures' files, and what a person said of it."""
    feedback = {
        number: {
            "right": None if right is None else bool(right),
            "answer": answer,
            "mask": mask and json.loads(mask),
        }
        for number, right, answer, mask in store.rows("SELECT experience, right, answer, mask FROM feedback")
    }
    for row in store.rows(f"SELECT {', '.join(FIELDS)} FROM experiences ORDER BY id"):
        record = dict(zip(FIELDS, row, strict=True))
        for task in store.tasks([record["id"]]):
            yield record | {
                "provenance": json.loads(record["provenance"]),
                "pictures": list(task.frames),
                "feedback": feedback.get(task.experience),
            }


def alerts(store: Store, most: int) -> list[str]:
    """Return the newest alerts, the newest last."""
    rows = store.rows("SELECT body FROM events WHERE event = 'alert' ORDER BY number DESC LIMIT ?", most)
    return [json.loads(body)["told"] for (body,) in reversed(rows)]
