"""Experiences -> one SQLite file (WAL) with queue and vectors, and a folder of pictures. Every change is one
transaction.

What `add` returned is on disk. Ids are never used again. One worker at a time takes tasks (`worker_lock`);
any number of engines add some.
"""

from __future__ import annotations

import fcntl
import json
import os
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from jaxtyping import Bool, Float, Int

from ans_core.agent.world.question import normal
from ans_core.config.online import Keeping
from ans_core.online import picture_files, schema
from ans_core.pictures import rle, transforms
from ans_core.types import RLE

FILE, PICTURES, LOCK = "experiences.sqlite", "pictures", "worker.lock"
TASK = ("id", "request", "question", "clip", "form", "policy", "label", "verdict", "visits", "flips")
"""The columns of an experience that a Task has."""
MOST_MARKED = 0.8
"""Share of the picture that a person may mark as what is asked about; more says nothing."""
BUSY_S = 30.0
"""How long a transaction waits for another process's."""

Verdict = Literal[
    "admitted", "below_gate", "not_verified", "flipped", "no_answer", "stale", "unreadable", "not_finite"
]  # fmt: skip
"""What became of a task. admitted: it was learned from. unreadable: the file of a picture is missing or
damaged. not_finite: its loss or gradient is no number."""


@dataclass(frozen=True, kw_only=True)
class Experience:
    """A question that was answered. `frames`: encoded pictures; `answer`: the engine's, of policy version
    `policy`."""

    request: str
    """Given by whoever asks: the same one is kept once."""
    question: str
    frames: tuple[bytes, ...]
    clip: bool
    form: str
    """The kind of question, by which verifiers know it; empty if none does."""
    answer: str | None
    policy: int


@dataclass(frozen=True, kw_only=True)
class Task:
    """An experience that waits for the worker, with what earlier visits found."""

    experience: int
    request: str
    question: str
    frames: tuple[Path, ...]
    clip: bool
    form: str
    policy: int
    label: str | None
    verdict: str | None
    visits: int
    flips: int
    true_answer: str | None = None
    """As a person gave or confirmed it."""
    wrong_answer: str | None = None
    """That a person called wrong without a better one."""
    mask: RLE | None = None
    """Of what is asked about, in the first frame, by a person."""
    feedback_s: float | None = None
    """When the person said it: by that `finish` and `drop` tell whether more was said since."""
    waits: bool = True
    """Whether it is in the queue; else it is visited again."""

    @property
    def was_judged(self) -> bool:
        """Whether a person has said something of it."""
        return self.feedback_s is not None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What the worker found out about a task. share: of the votes, that the label has; provenance: whose
    votes these were."""

    experience: int
    label: str | None
    share: float
    verified: bool
    verdict: Verdict
    flipped: bool = False
    provenance: tuple[Mapping[str, Any], ...] = ()
    feedback_s: float | None = None
    """The task's."""


class NameTaken(Exception):
    """Another question has this request's name."""


class Store:
    """An open store. Methods may be called from several threads."""

    def __init__(self, folder: Path, *, encoder: str | None = None, limits: Keeping | None = None) -> None:
        """Open the store of a folder; make one if there is none and `encoder` (which makes the vectors) is
        named. limits: how much is kept; experiences beyond `queue` tasks that wait are counted, and not kept.

        Raises ValueError for a file that is foreign, damaged or of another encoder."""
        self.folder, self.limits = folder, limits or Keeping()
        self.file, self.pictures = folder / FILE, folder / PICTURES
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"{folder} is no folder; name another one (--store)")
        if self.file.exists() and not self.file.is_file():
            raise ValueError(f"{self.file} is no file; name another folder (--store)")
        if not self.file.exists():
            if encoder is None:
                raise ValueError(
                    f"{folder} holds no {FILE}; start `ans agent serve` first, or name its folder (--store)"
                )
            folder.mkdir(parents=True, exist_ok=True)
            schema.create(self.file, {"encoder": encoder})
        self._lock = threading.RLock()
        try:
            self._db = sqlite3.connect(
                self.file, timeout=BUSY_S, isolation_level=None, check_same_thread=False
            )
            schema.check(self._db, self.file)
            for pragma in ("journal_mode = WAL", "synchronous = FULL", "foreign_keys = ON"):
                self._db.execute(f"PRAGMA {pragma}")
        except sqlite3.OperationalError as error:
            raise self._damaged(error) from error
        stored_encoder = self.meta("encoder")
        if encoder is not None and encoder != stored_encoder:
            raise ValueError(
                f"{self.file} holds vectors of the encoder {str(stored_encoder)[:12]}, this base's is "
                f"{encoder[:12]}; use the base that it was begun"
                " with, or another folder (--store)"
            )

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        self._db.close()

    # Transactions

    @contextmanager
    def writing(self) -> Iterator[sqlite3.Connection]:
        """Open a transaction, which is written as a whole when the context ends, or not at all. Raises
        OSError for a file that can't be written, or is damaged."""
        with self._lock:
            try:
                self._db.execute("BEGIN IMMEDIATE")
                try:
                    yield self._db
                    self._db.execute("COMMIT")
                except BaseException:
                    if self._db.in_transaction:  # SQLite ends some by itself, as on a full disk
                        self._db.execute("ROLLBACK")
                    raise
            except sqlite3.OperationalError as error:
                raise OSError(
                    f"{self.file} can't be written ({error}); free space on its disk, or end the process "
                    "that holds it"
                ) from error
            except sqlite3.DatabaseError as error:
                raise self._damaged(error) from error

    def rows(self, question: str, *values: Any) -> list[tuple[Any, ...]]:
        """Return what a SELECT finds. Raises OSError for a file that can't be read."""
        with self._lock:
            try:
                return self._db.execute(question, values).fetchall()
            except sqlite3.DatabaseError as error:
                raise self._damaged(error) from error

    def _damaged(self, error: sqlite3.DatabaseError) -> Exception:
        """Return what to raise: a sentence about the file, or what only a bug can cause as it is."""
        if isinstance(error, sqlite3.IntegrityError | sqlite3.ProgrammingError):
            return error
        # its rights, its disk, another process: what it holds is as good as before
        if isinstance(error, sqlite3.OperationalError):
            return OSError(
                f"{self.file} can't be read or written ({error}); free space on its disk, mend its rights, "
                "or end the process that holds it"
            )
        return OSError(
            f"{self.file} can't be read ({error}); end engine and worker and put a backup in its place, or "
            "name another folder (--store)"
        )

    def note(self, event: str, **body: Any) -> None:
        """Write an event down."""
        with self.writing() as db:
            _note(db, event, body)

    def meta(self, key: str) -> str | None:
        rows = self.rows("SELECT value FROM meta WHERE key = ?", key)
        return str(rows[0][0]) if rows else None

    def set_meta(
        self,
        values: Mapping[str, str | None],
        *,
        event: str | None = None,
        only_if: Mapping[str, str | None] | None = None,
        **body: Any,
    ) -> bool:
        """Set keys (None removes one), together with an event if one is named. Changes nothing and returns
        False unless the keys of `only_if` have these values."""
        with self.writing() as db:
            if any(self.meta(key) != value for key, value in (only_if or {}).items()):
                return False
            for key, value in values.items():
                db.execute("DELETE FROM meta WHERE key = ?", (key,))
                if value is not None:
                    db.execute("INSERT INTO meta VALUES (?, ?)", (key, value))
            if event is not None:
                _note(db, event, body)
        return True

    # Experiences

    def add(self, experience: Experience, vector: Float[np.ndarray, " D"]) -> int | None:
        """Keep an experience with its vector and its place in the queue; return its id once it is
        on disk. None if the queue is full. A request that is known already gets its id. Raises NameTaken if
        it was another question.

        Pictures are written between two transactions, so that a slow disk keeps nobody from writing: the
        first one tells whether they are needed, the second one finds them there. What is removed (`sweep`,
        `forget`, `evict`) is removed in a transaction, so a picture that is there in this one stays; one that
        was removed before it is written again."""
        frames = [picture_files.as_png(frame) for frame in experience.frames]
        digests = [picture_files.digest_of(frame) for frame in frames]
        settled, number = self._entered(experience, vector, digests, written=False)
        if settled:
            return number
        stored = False
        try:
            while not settled:
                for frame in frames:
                    picture_files.put(self.pictures, frame)
                settled, number = self._entered(experience, vector, digests, written=True)
            stored = number is not None
        finally:
            if not stored:
                with suppress(OSError):  # the next sweep removes them then
                    self.remove_unused(digests)
        return number

    def _entered(
        self,
        experience: Experience,
        vector: Float[np.ndarray, " D"],
        digests: Sequence[str],
        *,
        written: bool,
    ) -> tuple[bool, int | None]:
        """Return (whether it is settled, its id). It is not while a new experience lacks pictures; without an
        id the queue is full."""
        with self.writing() as db:
            row = db.execute("SELECT id FROM experiences WHERE request = ?", (experience.request,)).fetchone()
            if row:
                if not _is_same(db, int(row[0]), experience, digests):
                    raise NameTaken(
                        f"the request {experience.request!r} is another question of the store; give this "
                        "one a name of its own"
                    )
                return True, int(row[0])
            (waiting,) = db.execute("SELECT COUNT(*) FROM queue WHERE learned IS NULL").fetchone()
            if waiting >= self.limits.queue:
                count(db, "flooded")
                return True, None
            paths = [picture_files.path_of(self.pictures, digest) for digest in digests]
            if not (written and all(path.exists() for path in paths)):
                return False, None
            return True, _insert(db, experience, vector, digests)

    def remove_unused(self, digests: Iterable[str]) -> None:
        """Remove pictures that no experience has. In a transaction, so that nobody adds one meanwhile."""
        with self.writing() as db:
            for digest in digests:
                if not db.execute("SELECT 1 FROM pictures WHERE digest = ?", (digest,)).fetchone():
                    picture_files.path_of(self.pictures, digest).unlink(missing_ok=True)

    def size(self) -> int:
        """Return the number of experiences."""
        return int(self.rows("SELECT COUNT(*) FROM experiences")[0][0])

    def ids(self) -> set[int]:
        return {number for (number,) in self.rows("SELECT id FROM experiences")}

    def vectors(self, after: int = 0) -> tuple[Int[np.ndarray, " N"], Float[np.ndarray, "N D"]]:
        """Return the vectors of experiences with ids above `after`."""
        rows = self.rows(
            "SELECT experience, vector FROM vectors WHERE experience > ? ORDER BY experience", after
        )
        numbers = np.array([number for number, _ in rows], np.int64)
        vectors = [np.frombuffer(vector, "<f4") for _, vector in rows]
        return numbers, np.stack(vectors) if vectors else np.zeros((0, 0), np.float32)

    def tasks(self, numbers: Sequence[int]) -> list[Task]:
        """Return these experiences as tasks, in this order; those that are gone are left out."""
        marks = ",".join("?" * len(numbers))
        rows = self.rows(
            f"SELECT {', '.join(TASK)}, "
            "CASE WHEN feedback.right THEN experiences.answer ELSE feedback.answer END, "
            "CASE WHEN NOT feedback.right AND feedback.answer IS NULL THEN experiences.answer END, feedback.mask, "
            "feedback.time_s, experiences.id IN (SELECT queue.experience FROM queue WHERE learned IS NULL) "
            f"FROM experiences LEFT JOIN feedback ON experience = id WHERE id IN ({marks})",
            *numbers,
        )
        pictures: dict[int, list[Path]] = {}
        for number, digest in self.rows(
            f"SELECT experience, digest FROM pictures WHERE experience IN ({marks}) ORDER BY place", *numbers
        ):
            pictures.setdefault(number, []).append(picture_files.path_of(self.pictures, digest))
        by_id: dict[int, Task] = {}
        for number, *values, true, wrong, mask, feedback_s, waits in rows:
            if number in pictures:  # else it was forgotten between the two questions
                columns = dict(zip(TASK[1:], values, strict=True))
                columns |= {"clip": bool(columns["clip"]), "frames": tuple(pictures[number])}
                by_id[number] = Task(
                    experience=number, true_answer=true, wrong_answer=wrong, mask=mask and json.loads(mask),
                    feedback_s=feedback_s, waits=bool(waits), **columns,
                )  # fmt: skip
        return [by_id[number] for number in numbers if number in by_id]

    def labelled(self, verdict: Verdict, most: int) -> list[int]:
        """Return the newest experiences with a verdict, newest first."""
        query = "SELECT id FROM experiences WHERE verdict = ? ORDER BY id DESC LIMIT ?"
        return [number for (number,) in self.rows(query, verdict, most)]

    def votes(
        self, numbers: Sequence[int], *, verdict: Verdict | None = None
    ) -> dict[int, tuple[str, float, str]]:
        """Return (label, share, question) of those of these experiences that have a label, and this
        verdict if one is named."""
        marks = ",".join("?" * len(numbers))
        rows = self.rows(
            "SELECT id, label, share, question FROM experiences WHERE label IS NOT NULL AND id "
            f"IN ({marks}) AND verdict = COALESCE(?, verdict)",
            *numbers,
            verdict,
        )
        return {number: (label, share, question) for number, label, share, question in rows}

    def add_feedback(
        self,
        number: int,
        *,
        right: bool | None = None,
        answer: str | None = None,
        mask: Bool[np.ndarray, "H W"] | None = None,
    ) -> None:
        """Write down what a person says of an answer, in place of what was said before, and let the worker look at the question
        (again). right: None = not said. answer: the true one, where theirs was wrong. mask: what is asked about, in the first
        frame. Raises ValueError for an unknown id, for an answer that can't be right, since none was given, for a true one
        without a word, for a mask of another size than the picture's or without a pixel, and where nothing is said."""
        if right is None and mask is None:
            raise ValueError("say whether the answer was right, or show what was asked about")
        if right is not False and answer is not None:
            raise ValueError("a true answer is given in place of a wrong one")
        if answer is not None and not normal(answer):
            raise ValueError("the true answer is empty; write it, or say only that the answer was wrong")
        text = None if mask is None else json.dumps(self._checked_mask(number, mask))
        with self.writing() as db:
            row = db.execute("SELECT answer FROM experiences WHERE id = ?", (number,)).fetchone()
            if row is None:
                raise self.unknown(number)
            if right and not normal(row[0] or ""):
                raise ValueError(f"experience {number} has no answer that could be right; give the true one")
            db.execute(
                "INSERT OR REPLACE INTO feedback VALUES (?, ?, ?, ?, ?)",
                (number, time.time(), right, answer and answer.strip(), text),
            )
            # also if an update has used it whose weights are not safe yet
            db.execute(
                "INSERT INTO queue (experience) VALUES (?) ON CONFLICT (experience) DO UPDATE SET learned = NULL",
                (number,),
            )

    def _checked_mask(self, number: int, mask: Bool[np.ndarray, "H W"]) -> RLE:
        tasks = self.tasks([number])
        if not tasks:
            raise self.unknown(number)
        width, height = transforms.image_size(tasks[0].frames[0])
        if mask.shape != (height, width) or not 0 < mask.mean() <= MOST_MARKED:
            raise ValueError(
                f"the mask has {mask.shape[1]} x {mask.shape[0]} pixels, {mask.mean():.0%} of them set, and the picture {width} x "
                f"{height}: give one of the picture's size that shows what is asked about, and not all of it"
            )
        return rle.encode(mask)

    def unknown(self, number: int) -> ValueError:
        """Return what to raise where nobody knows an experience."""
        return ValueError(f"there is no experience {number} in {self.file}; `ans agent export` lists them")

    # The queue

    def waiting(self, most: int) -> list[int]:
        """Return the oldest experiences that wait for the worker."""
        query = "SELECT experience FROM queue WHERE learned IS NULL ORDER BY id LIMIT ?"
        return [number for (number,) in self.rows(query, most)]

    def finish(self, update: int, outcomes: Sequence[Outcome]) -> None:
        """Write down what update number `update` made of its tasks. They leave the queue with `settle`, but
        those of which a person has said something since they were read: these wait."""
        with self.writing() as db:
            for outcome in outcomes:
                db.execute(
                    f"INSERT OR IGNORE INTO before SELECT ?, id, {', '.join(schema.FOUND)} FROM "
                    "experiences WHERE id = ?",
                    (update, outcome.experience),
                )
                _write_outcome(db, outcome)
                if _is_as_read(db, outcome):
                    db.execute(
                        "UPDATE queue SET learned = ? WHERE experience = ?", (update, outcome.experience)
                    )

    def drop(self, tasks: Sequence[Task], verdict: Verdict) -> None:
        """Take tasks out of the queue unlearned, but those of which a person has said something since they
        were read."""
        with self.writing() as db:
            for task in tasks:
                if _is_as_read(db, task):
                    db.execute("UPDATE experiences SET verdict = ? WHERE id = ?", (verdict, task.experience))
                    db.execute("DELETE FROM queue WHERE experience = ?", (task.experience,))

    def settle(self, update: int) -> None:
        """Take the tasks of updates up to this one out of the queue: its weights are on disk."""
        with self.writing() as db:
            db.execute("DELETE FROM queue WHERE learned <= ?", (update,))
            db.execute("DELETE FROM before WHERE learned <= ?", (update,))

    def reopen(self, after: int) -> None:
        """Put the tasks of later updates back, and what these updates found out as it was before: a killed
        worker goes on from the weights of update `after`."""
        columns = ", ".join(schema.FOUND)
        with self.writing() as db:
            rows = db.execute(
                f"SELECT {columns}, experience FROM before WHERE learned > ? ORDER BY learned DESC", (after,)
            ).fetchall()
            marks = ", ".join("?" * len(schema.FOUND))
            db.executemany(f"UPDATE experiences SET ({columns}) = ({marks}) WHERE id = ?", rows)
            db.execute("DELETE FROM before WHERE learned > ?", (after,))
            db.execute("UPDATE queue SET learned = NULL WHERE learned > ?", (after,))


def _insert(
    db: sqlite3.Connection, experience: Experience, vector: Float[np.ndarray, " D"], digests: Sequence[str]
) -> int:
    """Insert an experience with all that hangs on it; return its id."""
    cursor = db.execute(
        "INSERT INTO experiences (request, time_s, question, clip, form, answer, policy) VALUES (?, ?, ?, "
        "?, ?, ?, ?)",
        (
            experience.request, time.time(), experience.question, experience.clip, experience.form,
            experience.answer, experience.policy,
        ),
    )  # fmt: skip
    number = int(cursor.lastrowid or 0)
    db.executemany(
        "INSERT INTO pictures VALUES (?, ?, ?)",
        [(number, place, digest) for place, digest in enumerate(digests)],
    )
    db.execute("INSERT INTO vectors VALUES (?, ?)", (number, vector.astype("<f4").tobytes()))
    db.execute("INSERT INTO queue (experience) VALUES (?)", (number,))
    return number


def _is_same(db: sqlite3.Connection, number: int, experience: Experience, digests: Sequence[str]) -> bool:
    """Tell whether an experience has this question and these pictures."""
    (question, clip) = db.execute("SELECT question, clip FROM experiences WHERE id = ?", (number,)).fetchone()
    stored_digests = [
        digest
        for (digest,) in db.execute(
            "SELECT digest FROM pictures WHERE experience = ? ORDER BY place", (number,)
        )
    ]
    asked = (experience.question, experience.clip, list(digests))
    return (question, bool(clip), stored_digests) == asked


def _is_as_read(db: sqlite3.Connection, read: Task | Outcome) -> bool:
    """Tell whether nothing was said of an experience since it was read."""
    row = db.execute("SELECT time_s FROM feedback WHERE experience = ?", (read.experience,)).fetchone()
    return (row[0] if row else None) == read.feedback_s


def _note(db: sqlite3.Connection, event: str, body: Mapping[str, Any]) -> None:
    db.execute(
        "INSERT INTO events (time_s, event, body) VALUES (?, ?, ?)",
        (time.time(), event, json.dumps(body, sort_keys=True)),
    )


def count(db: sqlite3.Connection, name: str, more: int = 1) -> None:
    db.execute(
        "INSERT INTO counters VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = value + excluded.value",
        (name, more),
    )


def _write_outcome(db: sqlite3.Connection, outcome: Outcome) -> None:
    db.execute(
        "UPDATE experiences SET label = ?, share = ?, verified = ?, verdict = ?, provenance = ?, visits = "
        "visits + 1, flips = flips + ? WHERE id = ?",
        (
            outcome.label, outcome.share, outcome.verified, outcome.verdict,
            json.dumps([dict(v) for v in outcome.provenance]), int(outcome.flipped), outcome.experience,
        ),
    )  # fmt: skip


@contextmanager
def worker_lock(folder: Path) -> Iterator[None]:
    """Be the one worker of a store; the kernel drops the lock when this process dies. Raises ValueError if
    another one is at work."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{folder} has a worker already (process {file.read().strip() or '?'}); end it first, or "
                "name another folder"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield
