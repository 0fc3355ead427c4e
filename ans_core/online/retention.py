"""Experiences that are to be gone: forgotten by their id, too old, or too many. Their ids never come back."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Sequence

from ans_core.online import picture_files
from ans_core.online.store import Store, count, note

DAY_S = 24 * 3600.0
READERS_S, EVICT_READERS_S = 10.0, 0.5
"""How long `forget` and `evict` wait for those who still read what was there."""


def forget(store: Store, number: int, *, wait_s: float = READERS_S) -> str:
    """Remove an experience with vector and pictures, also from the file's free pages and its WAL. Raises
    ValueError for an unknown id.

    Return an empty text, or a sentence on what is left because somebody reads the store for longer than
    `wait_s`."""
    with store.writing() as db:
        if not db.execute("SELECT 1 FROM experiences WHERE id = ?", (number,)).fetchone():
            raise ValueError(
                f"there is no experience {number} in {store.file}; `ans agent export` lists them"
            )
        gone = _delete(db, [number])
        note(db, "forgotten", {"experience": number})
    store.remove_unused(gone)
    if store.empty_wal(wait_s):
        return ""
    return (
        f"its text is still in {store.file}-wal, because another process reads the store; it goes once that "
        "has ended, with the next"
        " experience that is forgotten or evicted, or when engine and worker have ended"
    )


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
        order = "verdict IN ('admitted', 'canary', 'review'), id"
        more = db.execute(
            f"SELECT id FROM experiences WHERE time_s >= ? AND {idle} ORDER BY {order} LIMIT ?",
            (oldest_s, over),
        )
        gone = old + [number for (number,) in more]
        if not gone:
            return 0
        digests = _delete(db, gone)
        count(db, "evicted", len(gone))
        note(db, "evicted", {"experiences": gone})
    store.remove_unused(digests)
    store.empty_wal(EVICT_READERS_S)  # where somebody reads, the next one does it
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
