"""What happened -> a chain of hashed rows: whoever edits, removes or inserts one breaks it. Rows hold numbers
and ids, no content."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass

GENESIS = "0" * 64
"""What the first row goes on from."""


@dataclass(frozen=True, kw_only=True)
class AuditRow:
    """One event. `hash` is that of all other fields, of which `previous` is the hash of the row before."""

    number: int
    time_s: float
    event: str
    body: str
    """JSON."""
    previous: str
    hash: str


def made(*, number: int, time_s: float, event: str, body: dict[str, object], previous: str) -> AuditRow:
    """Make the row that follows the one with the hash `previous`."""
    text = json.dumps(body, sort_keys=True)
    return AuditRow(
        number=number,
        time_s=time_s,
        event=event,
        body=text,
        previous=previous,
        hash=_hash(number, time_s, event, text, previous),
    )


def _hash(number: int, time_s: float, event: str, body: str, previous: str) -> str:
    return hashlib.sha256(json.dumps([number, repr(time_s), event, body, previous]).encode()).hexdigest()


def fault(rows: Iterable[AuditRow], *, marks: Iterable[tuple[int, str]] = ()) -> str | None:
    """Say which row is the first that was edited, removed or inserted; None if the chain holds. `marks`:
    numbers and hashes that were written down elsewhere (snapshots hold the newest of their time), so that a
    chain cut at its end is found as well."""
    previous, hashes = GENESIS, {0: GENESIS}
    for number, row in enumerate(rows, start=1):
        if row.number != number:
            return f"audit row {number} is missing; the next one is {row.number}"
        if row.previous != previous or row.hash != _hash(
            row.number, row.time_s, row.event, row.body, row.previous
        ):
            return f"audit row {row.number} ({row.event}) was edited"
        previous = hashes[number] = row.hash
    for marked, digest in marks:
        if hashes.get(marked) != digest:
            return (
                f"audit row {marked}, which a snapshot names, is "
                f"{'another one' if marked in hashes else 'missing: the end was cut off'}"
            )
    return None
