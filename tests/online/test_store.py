"""The store: what was acknowledged is there, once, until it is to be gone; and what is no store is
refused."""

from __future__ import annotations

import io
import os
import random
import sqlite3
import time
from contextlib import closing
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ans_core.config.online import Keeping
from ans_core.online import overview, picture_files
from ans_core.online.retention import evict, forget, sweep
from ans_core.online.store import FILE, Experience, NameTaken, Outcome, Store, worker_lock
from ans_core.pictures import rle, transforms
from tests import tiny

VECTOR = np.arange(4, dtype=np.float32)


def experience(number: int, **changes: object) -> Experience:
    values: dict[str, object] = {
        "request": f"r{number}", "question": "Which pattern is on the red square?",
        "frames": (tiny.picture(number),), "clip": False, "form": "pattern", "answer": "vertical",
        "policy": 0,
    }  # fmt: skip
    return Experience(**(values | changes))


def opened(folder: Path, **limits: float) -> Store:
    return Store(folder, encoder="e", limits=Keeping(**limits))


def outcome(number: int, label: str = "vertical", **changes: object) -> Outcome:
    return Outcome(
        **(
            {"experience": number, "label": label, "share": 1.0, "verified": True, "verdict": "admitted"}
            | changes
        )
    )


def files(store: Store) -> int:
    return sum(path.is_file() for path in store.pictures.rglob("*"))


def test_an_experience_is_kept_once_with_vector_picture_and_task(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        first = store.add(experience(0), VECTOR)
        assert store.add(experience(0), VECTOR) == first == 1
        second = store.add(experience(1), VECTOR + 1)
    with Store(tmp_path) as store:
        assert overview.counts(store) == {
            "experiences": 2, "vectors": 2, "pictures": 2, "with a person's feedback": 0, "waiting": 2,
            "learned, weights not on disk": 0,
        }  # fmt: skip
        numbers, vectors = store.vectors(after=1)
        assert numbers.tolist() == [second]
        assert np.array_equal(vectors, [VECTOR + 1])
        (task,) = store.tasks([second, 99])
        assert Image.open(task.frames[0]).tobytes() == Image.open(io.BytesIO(tiny.picture(1))).tobytes()


def test_a_full_queue_takes_no_more_and_counts(tmp_path: Path) -> None:
    with opened(tmp_path, queue=2) as store:
        assert [store.add(experience(i), VECTOR) for i in range(4)] == [1, 2, None, None]
        assert overview.counts(store)["flooded"] == 2
        store.finish(1, [outcome(1)])
        assert store.add(experience(9), VECTOR) == 3


def test_tasks_of_updates_whose_weights_are_lost_come_back(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        for i in range(4):
            store.add(experience(i), VECTOR)
        store.finish(1, [outcome(1)])
        store.finish(2, [outcome(2, "diagonal"), outcome(3, verdict="below_gate")])
        assert store.waiting(9) == [4]
        store.settle(1)
        store.reopen(after=1)
        assert store.waiting(9) == [2, 3, 4]
        store.settle(9)
        assert store.waiting(9) == [2, 3, 4]
        assert store.labelled("admitted", 9) == [1]
        asked = "Which pattern is on the red square?"
        assert store.votes([1, 2, 4]) == {1: ("vertical", 1.0, asked)}
        store.drop(store.tasks([4]), "stale")
        assert (store.waiting(9), overview.counts(store)["stale"]) == ([2, 3], 1)


def test_what_lost_updates_found_out_is_as_it_was_before_them(tmp_path: Path) -> None:
    """Experience 1 is learned in update 1, whose weights are kept, and visited again in the lost updates 2
    and 3."""
    with opened(tmp_path) as store:
        for i in range(3):
            store.add(experience(i), VECTOR)
        store.finish(1, [outcome(1)])
        store.settle(1)
        before = list(overview.records(store))
        store.finish(2, [outcome(2), outcome(1, "diagonal", share=0.8, verdict="flipped", flipped=True)])
        store.finish(3, [outcome(3, verdict="flipped"), outcome(1, "checked", flipped=True)])
        store.reopen(after=1)
        assert list(overview.records(store)) == before
        store.finish(2, [outcome(2)])
        store.settle(2)
        store.reopen(after=1)
        # of an update whose weights are safe nothing is taken back
        assert store.labelled("admitted", 9) == [2, 1]


def test_what_a_person_says_of_an_answer_brings_its_task_back_and_goes_with_it(tmp_path: Path) -> None:
    """Of three, one is settled, one is learned by an update whose weights are not safe, one waits."""
    with opened(tmp_path) as store:
        for i in range(3):
            store.add(experience(i), VECTOR)
        store.finish(1, [outcome(1)])
        store.settle(1)
        store.finish(2, [outcome(2)])
        store.add_feedback(1, right=True)
        store.add_feedback(2, right=False, answer="diagonal")
        store.add_feedback(3, right=False)
        store.settle(2)
        assert sorted(store.waiting(9)) == [1, 2, 3]
        tasks = {task.experience: (task.true_answer, task.wrong_answer) for task in store.tasks([1, 2, 3])}
        assert tasks == {1: ("vertical", None), 2: ("diagonal", None), 3: (None, "vertical")}
        store.add_feedback(3, right=True)  # on second thoughts
        assert store.tasks([3])[0].true_answer == "vertical"
        assert [record["feedback"] for record in overview.records(store)] == [
            {"right": True, "answer": None, "mask": None},
            {"right": False, "answer": "diagonal", "mask": None},
            {"right": True, "answer": None, "mask": None},
        ]
        forget(store, 2)
        assert overview.counts(store)["with a person's feedback"] == 2
        store.add(experience(9, answer=None), VECTOR)
        with pytest.raises(ValueError, match="has no answer that could be right"):
            store.add_feedback(4, right=True)
        with pytest.raises(ValueError, match="there is no experience 2 in"):
            store.add_feedback(2, right=True)


def test_what_a_person_says_while_the_worker_learns_the_task_is_not_lost(tmp_path: Path) -> None:
    """Of three, one waits, one is visited again, one is about to be dropped; each is read before a person
    speaks, and one of them a second time."""
    with opened(tmp_path) as store:
        for i in range(3):
            store.add(experience(i), VECTOR)
        store.finish(1, [outcome(2)])
        store.settle(1)
        store.add_feedback(1, right=True)
        read = store.tasks([1, 2, 3])
        assert [task.waits for task in read] == [True, False, True]
        for number in (1, 2, 3):
            store.add_feedback(number, right=False, answer="diagonal")
        store.finish(2, [outcome(task.experience, feedback_s=task.feedback_s) for task in read[:2]])
        store.drop(read[2:], "stale")
        store.settle(2)
        assert sorted(store.waiting(9)) == [1, 2, 3]
        again = store.tasks([1, 2, 3])
        store.finish(3, [outcome(task.experience, feedback_s=task.feedback_s) for task in again[:2]])
        store.drop(again[2:], "unreadable")
        store.settle(3)
        assert store.waiting(9) == []


def test_an_answer_without_a_word_is_no_true_one(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        number = store.add(experience(0, answer=" . "), VECTOR)
        assert number is not None
        for answer in ("", "  ", " ."):
            with pytest.raises(ValueError, match="the true answer is empty"):
                store.add_feedback(number, right=False, answer=answer)
        with pytest.raises(ValueError, match="no answer that could be right"):
            store.add_feedback(number, right=True)
        store.add_feedback(number, right=False, answer=" red ")
        assert store.tasks([number])[0].true_answer == "red"


def test_a_person_can_show_what_is_asked_about(tmp_path: Path) -> None:
    with opened(tmp_path) as store:
        store.add(experience(0), VECTOR)
        width, height = transforms.image_size(store.tasks([1])[0].frames[0])
        mask = np.zeros((height, width), bool)
        with pytest.raises(ValueError, match=f"0% of them set, and the picture {width} x {height}"):
            store.add_feedback(1, mask=mask)
        mask[2:4, 1:3] = True
        for useless in (mask[1:], np.ones_like(mask)):
            with pytest.raises(ValueError, match="give one of the picture's size"):
                store.add_feedback(1, mask=useless)
        with pytest.raises(ValueError, match="say whether the answer was right, or show"):
            store.add_feedback(1)
        with pytest.raises(ValueError, match="in place of a wrong one"):
            store.add_feedback(1, answer="diagonal", mask=mask)
        store.add_feedback(1, mask=mask)
        (task,) = store.tasks([1])
        assert (task.true_answer, task.wrong_answer) == (None, None)  # of the answer nothing is said
        assert task.was_judged
        assert task.mask is not None
        assert (rle.decode(task.mask) == mask).all()
        store.add_feedback(1, right=False, mask=mask)
        assert store.tasks([1])[0].wrong_answer == "vertical"


def test_what_is_evicted_was_least_useful_and_its_id_never_comes_back(tmp_path: Path) -> None:
    with opened(tmp_path, experiences=2) as store:
        for i in range(4):
            store.add(experience(i), VECTOR)
        store.finish(1, [outcome(1), outcome(2, verdict="below_gate"), outcome(3), outcome(4)])
        assert evict(store) == 0  # all are in the queue until their weights are on disk
        store.settle(1)
        assert evict(store) == 2
        assert store.ids() == {3, 4}
        forget(store, 4)
        forget(store, 3)
        assert store.add(experience(7), VECTOR) == 5
    with opened(tmp_path, days=1e-9) as store:
        store.add(experience(8), VECTOR)
        store.finish(2, [outcome(6)])
        time.sleep(0.01)
        # 5 still waits, but is too old; 6 was learned, and the weights are not on disk
        assert evict(store) == 1
        assert store.ids() == {6}
        store.settle(2)
        assert evict(store) == 1
        assert (store.ids(), files(store)) == (set(), 0)


def test_forget_removes_row_vector_and_picture(tmp_path: Path) -> None:
    """A picture that another experience shows, too, stays."""
    with opened(tmp_path) as store:
        store.add(
            experience(0, frames=(tiny.picture(5), tiny.picture(6))),
            VECTOR,
        )
        store.add(experience(1, frames=(tiny.picture(6),)), VECTOR)
        shared = picture_files.digest_of(picture_files.as_png(tiny.picture(6)))
        forget(store, 1)
        assert [path.stem for path in store.pictures.rglob("*.png")] == [shared]
        assert overview.counts(store)["vectors"] == 1
        with pytest.raises(ValueError, match=r"there is no experience 1 in .*`ans agent export` lists them"):
            forget(store, 1)


def test_pictures_are_kept_without_what_their_pixels_do_not_need(tmp_path: Path) -> None:
    file = io.BytesIO()
    exif = Image.Exif()
    exif[0x010E] = "at Ann Lee's"
    Image.open(io.BytesIO(tiny.picture(3))).save(
        file, "JPEG", exif=exif, icc_profile=b"profile of Ann Lee's camera"
    )
    with opened(tmp_path) as store:
        store.add(experience(0, frames=(file.getvalue(),)), VECTOR)
        (kept,) = store.pictures.rglob("*.png")
        assert b"Ann" in file.getvalue()
        assert b"Ann" not in kept.read_bytes()
        assert not Image.open(kept).getexif()
        assert "icc_profile" not in Image.open(kept).info


def test_the_name_of_a_picture_is_on_disk_before_its_digest_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[Path, list[str]]] = []

    def fsync(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        synced.append((path, sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []))

    monkeypatch.setattr(os, "fsync", fsync)
    digest = picture_files.put(tmp_path / "pictures", b"pixels")
    assert synced[1:] == [
        (tmp_path / "pictures" / digest[:2], [f"{digest}.png"]), (tmp_path / "pictures", [digest[:2]]),
        (tmp_path, ["pictures"]),
    ]  # fmt: skip


@pytest.mark.slow
def test_foreign_cut_and_empty_files_and_another_encoder_are_refused_with_a_sentence(tmp_path: Path) -> None:
    with opened(tmp_path / "a") as store:
        for i in range(30):
            store.add(experience(i), np.ones(256, np.float32))
    with pytest.raises(
        ValueError, match=r"holds vectors of the encoder e, this base's is other; use the base"
    ):
        Store(tmp_path / "a", encoder="other")
    whole = (tmp_path / "a" / FILE).read_bytes()
    for name, content in {
        "cut": whole[: len(whole) // 2],
        "words": b"no database, but long enough to be one" * 99,
        "empty": b"",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / FILE).write_bytes(content)
        with pytest.raises(ValueError, match=r"damaged or cut short|is no store of the agent's"):
            Store(tmp_path / name, encoder="e")
    with closing(sqlite3.connect(tmp_path / "other.sqlite")) as db:
        db.execute("CREATE TABLE experiences (id)")
    (tmp_path / "b").mkdir()
    (tmp_path / "other.sqlite").rename(tmp_path / "b" / FILE)
    with pytest.raises(ValueError, match=r"is no store of the agent's experiences; name another folder"):
        Store(tmp_path / "b", encoder="e")
    with pytest.raises(ValueError, match=r"holds no experiences.sqlite; start `ans agent serve`"):
        Store(tmp_path / "c")
    (tmp_path / "d" / FILE).mkdir(parents=True)
    with pytest.raises(ValueError, match=r"experiences.sqlite is no file; name another folder"):
        Store(tmp_path / "d", encoder="e")
    (tmp_path / "note.txt").touch()
    with pytest.raises(ValueError, match=r"note.txt is no folder; name another one"):
        Store(tmp_path / "note.txt", encoder="e")


def test_a_store_that_can_not_be_read_now_is_not_called_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody holds it, or its disk is full: putting a backup in its place would lose what was
    acknowledged."""
    opened(tmp_path).close()
    monkeypatch.setattr("ans_core.online.store.BUSY_S", 0.1)
    with closing(sqlite3.connect(tmp_path / FILE)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(
            OSError, match=r"can't be read or written \(database is locked\); free space on its disk"
        ):
            Store(tmp_path)
    Store(tmp_path).close()


def test_a_store_has_one_worker(tmp_path: Path) -> None:
    refused = pytest.raises(ValueError, match=rf"has a worker already \(process {os.getpid()}\)")
    with worker_lock(tmp_path), refused, worker_lock(tmp_path):
        pass
    with worker_lock(tmp_path):
        pass


def test_pictures_are_written_while_others_may_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put, written = picture_files.put, 0

    def slow(folder: Path, encoded: bytes) -> str:
        nonlocal written
        with opened(tmp_path) as other:
            other.rows("PRAGMA busy_timeout = 0")
            other.note("alert", kind="none", told="another process writes meanwhile")
        written += 1
        return put(folder, encoded)

    with opened(tmp_path) as store:
        monkeypatch.setattr(picture_files, "put", slow)
        assert store.add(experience(0, frames=tuple(tiny.picture(i) for i in range(3))), VECTOR) == 1
        assert (written, files(store)) == (3, 3)


def test_pictures_that_a_sweep_takes_before_their_experience_is_there_are_written_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may start at any moment: once before a picture has its name, once after that."""
    put, fsync, moments = picture_files.put, os.fsync, ["named", "unnamed"]

    def swept(folder: Path, encoded: bytes) -> str:
        digest = put(folder, encoded)
        if moments == ["named"]:
            moments.pop()
            assert sweep(store) == 1
        return digest

    def unnamed(descriptor: int) -> None:
        fsync(descriptor)
        if moments[-1:] == ["unnamed"]:
            moments.pop()
            assert sweep(store) == 1

    with opened(tmp_path) as store:
        monkeypatch.setattr(picture_files, "put", swept)
        monkeypatch.setattr(os, "fsync", unnamed)
        frames = (tiny.picture(0), tiny.picture(1))
        assert store.add(experience(0, frames=frames), VECTOR) == 1
        assert moments == []
        (task,) = store.tasks([1])
        assert [picture_files.read(path) for path in task.frames] == [
            picture_files.as_png(frame) for frame in frames
        ]
        assert (sweep(store), files(store)) == (0, 2)


def test_what_is_not_kept_leaves_no_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full queue and a name that is taken: known before pictures are written, or after that. A disk that
    fails. A process that was killed before the experience was there leaves them until the next sweep."""
    put = picture_files.put

    def meanwhile(number: int, **changes: object) -> None:
        """Put pictures as a process that another one overtakes."""
        monkeypatch.setattr(picture_files, "put", put)
        with opened(tmp_path) as other:
            assert other.add(experience(number, **changes), VECTOR) is not None

    with opened(tmp_path, queue=3) as store:
        store.add(experience(0), VECTOR)
        for request, told in ((0, "there before"), (1, "there meanwhile")):
            if request:
                monkeypatch.setattr(picture_files, "put", lambda *given: (meanwhile(1), put(*given))[1])
            with pytest.raises(NameTaken):
                store.add(experience(5, request=f"r{request}"), VECTOR)
            assert files(store) == request + 1, told
        monkeypatch.setattr(picture_files, "put", lambda *given: (meanwhile(2), put(*given))[1])
        assert store.add(experience(6, frames=(tiny.picture(6), tiny.picture(0))), VECTOR) is None
        assert store.add(experience(7), VECTOR) is None
        assert files(store) == 3  # the picture of 0, which 6 shows too, stays
        assert overview.counts(store)["flooded"] == 2
        store.drop(store.tasks([1]), "stale")

        def full(folder: Path, encoded: bytes) -> str:
            if encoded == picture_files.as_png(tiny.picture(9)):
                raise OSError("no space left")
            return put(folder, encoded)

        monkeypatch.setattr(picture_files, "put", full)
        with pytest.raises(OSError, match="no space left"):
            store.add(experience(8, frames=(tiny.picture(8), tiny.picture(9))), VECTOR)
        assert files(store) == 3
        put(store.pictures, b"of a killed process")
        (store.pictures / "ab").mkdir(exist_ok=True)
        (store.pictures / "ab" / "abcd.0123.partial").touch()
        assert sweep(store) == 2
        assert files(store) == 3


def adds(folder: Path, first: int, told: int) -> None:
    with opened(folder, queue=10**6) as store:  # else full after a thousand
        for number in range(first, first + 10_000):
            os.write(told, f"{number} {store.add(experience(number), VECTOR)}\n".encode())


@pytest.mark.slow
def test_nothing_acknowledged_is_lost_when_a_process_is_killed_while_it_adds(tmp_path: Path) -> None:
    rng, acknowledged = random.Random(0), {}
    for _ in range(6):
        first = max(acknowledged, default=-1)  # the last one again: it is known already
        reads, writes = os.pipe()
        process = get_context("fork").Process(target=adds, args=(tmp_path, max(first, 0), writes))
        process.start()
        os.close(writes)
        with os.fdopen(reads) as told:
            lines = [told.readline() for _ in range(rng.randint(1, 50))]
            time.sleep(rng.uniform(0, 0.02))
            process.kill()
            lines += told.read().splitlines(keepends=True)
        process.join()
        acknowledged |= {int(n): int(k) for n, k in (line.split() for line in lines if line.endswith("\n"))}
    with opened(tmp_path) as store:
        assert len(acknowledged) > 60
        known = {record["id"] for record in overview.records(store)}
        assert set(acknowledged.values()) <= known
        counts = overview.counts(store)
        assert (
            counts["experiences"]
            == counts["vectors"]
            == counts["pictures"]
            == len(known)
            <= len(acknowledged) + 20
        )
        sweep(store)
        assert files(store) == len(known)
