"""The tables of the store, and how a file of them is made and recognised."""

from __future__ import annotations

import os
import sqlite3
from contextlib import closing
from pathlib import Path

APPLICATION, VERSION = 0x414E534F, 3
"""SQLite's application_id ("ANSO") and user_version of our files."""
TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE experiences (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    request TEXT NOT NULL UNIQUE,
    time_s REAL NOT NULL,
    question TEXT NOT NULL,
    clip INTEGER NOT NULL,
    form TEXT NOT NULL,
    answer TEXT,
    policy INTEGER NOT NULL,
    label TEXT,
    share REAL,
    verified INTEGER NOT NULL DEFAULT 0,
    verdict TEXT,
    provenance TEXT NOT NULL DEFAULT '[]',
    visits INTEGER NOT NULL DEFAULT 0,
    flips INTEGER NOT NULL DEFAULT 0
);
CREATE TABLE vectors (
    experience INTEGER PRIMARY KEY REFERENCES experiences (id) ON DELETE CASCADE,
    vector BLOB NOT NULL
);
CREATE TABLE pictures (
    experience INTEGER NOT NULL REFERENCES experiences (id) ON DELETE CASCADE,
    place INTEGER NOT NULL,
    digest TEXT NOT NULL,
    PRIMARY KEY (experience, place)
);
CREATE INDEX pictures_digest ON pictures (digest);
CREATE TABLE queue (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    experience INTEGER NOT NULL UNIQUE REFERENCES experiences (id) ON DELETE CASCADE,
    learned INTEGER
);
CREATE TABLE feedback (
    experience INTEGER PRIMARY KEY REFERENCES experiences (id) ON DELETE CASCADE,
    time_s REAL NOT NULL,
    right INTEGER,
    answer TEXT,
    mask TEXT
);
CREATE TABLE counters (name TEXT PRIMARY KEY, value INTEGER NOT NULL);
CREATE TABLE events (
    number INTEGER PRIMARY KEY,
    time_s REAL NOT NULL,
    event TEXT NOT NULL,
    body TEXT NOT NULL
);
CREATE TABLE before (
    learned INTEGER NOT NULL,
    experience INTEGER NOT NULL REFERENCES experiences (id) ON DELETE CASCADE,
    label TEXT,
    share REAL,
    verified INTEGER NOT NULL,
    verdict TEXT,
    provenance TEXT NOT NULL,
    visits INTEGER NOT NULL,
    flips INTEGER NOT NULL,
    PRIMARY KEY (learned, experience)
);
"""
"""label, share, verified, verdict, provenance: what the worker found (voting.py, admission.py). learned: the
update that used a task; its row goes when that update's weights are safe. feedback: what a person said of the
answer that was given, the true one, if they know it, and the mask (RLE as JSON) of what is asked about. events: versions that were
published or rolled back to, and alerts; their body is JSON. before: what an experience's row was before update
`learned` changed it, until that update's weights are safe."""
FOUND = ("label", "share", "verified", "verdict", "provenance", "visits", "flips")
"""The columns that an update changes."""


def create(file: Path, meta: dict[str, str]) -> None:
    """Make a new file, whole or not at all; of two processes that do, one wins and both go on with its
    file."""
    partial = file.with_suffix(f".{os.getpid()}.partial")
    partial.unlink(missing_ok=True)
    with closing(sqlite3.connect(partial)) as db:
        db.executescript(
            f"PRAGMA application_id = {APPLICATION}; PRAGMA user_version = {VERSION}; BEGIN; {TABLES} COMMIT;"
        )
        with db:
            db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
    try:
        os.link(partial, file)  # unlike a rename it leaves a file alone that is there by now
    except FileExistsError:
        pass
    finally:
        partial.unlink()


def check(db: sqlite3.Connection, file: Path) -> None:
    """Raise ValueError for a file of somebody else's, of another version, or a damaged one;
    sqlite3.OperationalError for one that can't be read at present (its rights, a full disk), whatever it
    holds."""
    try:
        (application,) = db.execute("PRAGMA application_id").fetchone()
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if application != APPLICATION:
            raise ValueError(f"{file} is no store of the agent's experiences; name another folder (--store)")
        if version != VERSION:
            raise ValueError(
                f"{file} has layout {version}, this program reads {VERSION}; use the program that wrote it, "
                "or another folder"
            )
        (integrity, *_) = db.execute("PRAGMA quick_check(1)").fetchone()
    except sqlite3.OperationalError:
        raise
    except sqlite3.DatabaseError as error:
        integrity = str(error)
    if integrity != "ok":
        raise ValueError(
            f"{file} is damaged or cut short ({integrity}); put a backup in its place, or name another "
            "folder (--store)"
        )
