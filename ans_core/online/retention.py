"""Experiences that are to be gone: forgotten by their id, too old, or too many. Their ids never come back."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from ans_core.online import picture_files
from ans_core.online.store import Store, count

DAY_S = 24 * 3600.0


def forget(store: Store, number: int) -> None:
    """Remove an experience with vector and pictures. Raises ValueError for an unknown id."""
    with store.writing() as db:
        if not db.execute("SELECT 1 FROM experiences WHERE id = ?", (number,)).fetchone():
            raise store.unknown(number)
        gone = _delete(db, [number])
    store.remove_unused(gone)


def evict(store: Store) -> int:
    """Remove experiences that are too old, also those that wait, then the least useful beyond the limit
    (unlearned and oldest first), but none that waits; and none whose update's weights are not safe yet.
    Return how many."""
    safe = "id NOT IN (SELECT experience FROM queue WHERE learned IS NOT NULL)"
    idle = "id NOT IN (SELECT experience FROM queue)"
    with store.writing() as db:
        oldest_s = time.time() - store.limits.days * DAY_S
        old = [
            number
            for (number,) in db.execute(
                f"SELECT id FROM experiences WHERE time_s < ? AND {safe}", (oldest_s,)
            )
        ]
        (there,) = db.execute("SELECT COUNT(*) FROM experiences").fetchone()
        over = max(0, there - len(old) - store.limits.experiences)
        order = "verdict = 'admitted', id"
        more = db.execute(
            f"SELECT id FROM experiences WHERE time_s >= ? AND {idle} ORDER BY {order} LIMIT ?",
            (oldest_s, over),
        )
        gone = old + [number for (number,) in more]
        if not gone:
            return 0
        digests = _delete(db, gone)
        count(db, "evicted", len(gone))
    store.remove_unused(digests)
    return len(gone)


def _delete(db: sqlite3.Connection, numbers: Sequence[int]) -> set[str]:
    """Delete experiences with all that hangs on them; return the digests of their pictures."""
    digests = set()
    for number in numbers:
        digests |= {
            digest for (digest,) in db.execute("SELECT digest FROM pictures WHERE experience = ?", (number,))
        }
        db.execute("DELETE FROM experiences WHERE id = ?", (number,))
    return digests


def sweep(store: Store) -> int:
    """Remove pictures that belong to no experience, because somebody was killed; return how many."""
    with store.writing() as db:
        digests = {digest for (digest,) in db.execute("SELECT DISTINCT digest FROM pictures")}
        return picture_files.sweep(store.pictures, digests) if store.pictures.is_dir() else 0
