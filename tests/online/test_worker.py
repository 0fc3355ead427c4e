"""Engine and worker on one store: what is answered is learned from, released or taken back; a killed worker
ends with the same bits."""

from __future__ import annotations

import errno
import math
import os
import re
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from ans_core.checkpoints import checkpoint
from ans_core.online import engine as engines
from ans_core.online import overview
from ans_core.online import store as stores
from ans_core.online import worker as workers
from ans_core.online.batching import Batching
from ans_core.online.engine import Query
from ans_core.online.learning import KlControl, OnlineLoop
from ans_core.online.retention import forget
from ans_core.online.store import Store
from ans_core.online.worker import Stopped, Worker
from ans_core.rl.practice import PlayedRollout
from ans_core.rl.step import RolloutStep
from ans_core.stages.online_parts import Guard, Parts, loop_of, opened, schedule, worker_of
from ans_core.train import states
from ans_core.train.loop import Machine
from ans_core.types import Log
from tests import tiny
from tests.online.conftest import MACHINE, config

Start = tuple[Path, Path]
QUESTION = "Which pattern is on the red square?"


def silent(metrics: dict[str, float], step: int) -> None:
    assert all(isinstance(value, int | float) for value in metrics.values())


@contextmanager
def online(start: Start, folder: Path, **changes: object) -> Iterator[Parts]:
    base, adapter = start
    with opened(
        config(**changes),
        base=base,
        start=adapter,
        folder=folder,
        machine=MACHINE,
        families=("easy", "pattern"),
    ) as parts:
        yield parts


def asked(first: int, count: int) -> list[Query]:
    return [
        Query(request=f"r{i}", question=QUESTION, frames=(tiny.picture(i),))
        for i in range(first, first + count)
    ]


def learned(
    parts: Parts,
    scratch: Path,
    *,
    steps: int,
    guard: Guard | None = None,
    log: Log = silent,
    machine: Machine = MACHINE,
) -> tuple[bool, Worker]:
    """Run a worker until there is nothing to do."""
    worker = worker_of(parts, waits=False, guard=guard)
    module = loop_of(parts, worker, guard=guard, log=log)
    return worker.run(
        module, schedule=schedule(parts.cfg, steps=steps), machine=machine, scratch=scratch, log=log
    ), worker


def events(store: Store) -> list[tuple[str, str]]:
    return store.rows("SELECT event, body FROM events ORDER BY number")


def bits(parts: Parts, version: int) -> dict[str, bytes]:
    return {name: t.numpy().tobytes() for name, t in parts.snapshots.load(version).tensors.items()}


@pytest.mark.slow
def test_what_is_asked_is_answered_learned_from_and_served(start: Start, tmp_path: Path) -> None:
    with online(start, tmp_path / "store") as parts:
        engine = parts.engine()
        first = engine.answer(asked(0, 8))
        assert [reply.experience for reply in first] == list(range(1, 9))
        assert {reply.version for reply in first} == {0}
        assert first[0].confidence is None
        seen: dict[str, float] = {}
        done, _ = learned(
            parts, tmp_path / "scratch", steps=4, log=lambda metrics, step: seen.update(metrics)
        )
        assert done
        assert parts.snapshots.versions() == [0, 1, 2]
        assert overview.counts(parts.store)["waiting"] == 0
        assert sum(overview.counts(parts.store).get(name, 0) for name in ("admitted", "no_answer")) == 8
        assert seen["online/agent/sampling_gap"] < 1e-4
        assert 0 < seen["online/agent/answer_entropy"] <= 1
        assert bits(parts, 2) != bits(parts, 0)
        again = engine.answer(asked(0, 1))
        assert (again[0].version, again[0].experience) == (2, 1)
        labelled = [record for record in overview.records(parts.store) if record["label"] is not None]
        assert (again[0].confidence is None) == (not labelled)
        reference = parts.policy.adapters.tensors("reference")
        assert all(
            torch.equal(tensor, reference[name]) for name, tensor in parts.snapshots.load(0).tensors.items()
        )


@pytest.mark.slow
@pytest.mark.parametrize("update", [1, 2, 3])
def test_a_worker_that_was_killed_learns_the_same_again(start: Start, tmp_path: Path, update: int) -> None:
    """Killed after an update whose weights were not on disk: its tasks are in the queue again. One that was
    published before the first training state was written (1 or 2, as updates are counted) is taken back."""
    results = []
    for name in ("whole", "killed"):
        with online(start, tmp_path / name) as parts:
            parts.engine().answer(asked(0, 8))
            if name == "killed":
                done, _ = learned(parts, tmp_path / "scratch killed", steps=4, log=_killing(update))
        with online(start, tmp_path / name) as parts:
            if name == "killed":
                assert overview.counts(parts.store)["learned, weights not on disk"] > 0
            done, _ = learned(parts, tmp_path / f"scratch {name}", steps=4)
            assert done
            verdicts = [(r["id"], r["label"], r["verdict"]) for r in overview.records(parts.store)]
            results.append((bits(parts, parts.snapshots.served()), verdicts))
    assert results[0] == results[1]


def _killing(update: int) -> Log:
    def log(metrics: dict[str, float], step: int) -> None:
        if step == update - 1 and "online/loss" in metrics:
            raise Stopped("as if by kill -9: nothing is tidied up")

    return log


@pytest.mark.slow
def test_tasks_wait_until_the_state_that_learned_them_is_on_disk(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread writes it, which a full disk or a kill may stop while the next update begins."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    with online(start, tmp_path / "whole") as parts:
        parts.engine().answer(asked(0, 8))
        learned(parts, tmp_path / "scratch of the whole", steps=4)
        expected = bits(parts, parts.snapshots.served())
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 8))
        with monkeypatch.context() as patch:
            patch.setattr(states, "_write", full)
            with pytest.raises(RuntimeError, match="can't be written"):
                learned(parts, tmp_path / "scratch", steps=4)
        assert len(parts.store.rows("SELECT experience FROM queue")) == 8
    with online(start, tmp_path / "store") as parts:
        assert learned(parts, tmp_path / "scratch", steps=4)[0]
        assert bits(parts, parts.snapshots.served()) == expected


@pytest.mark.slow
def test_a_store_that_began_with_another_agent_says_so(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base, adapter = start
    with online(start, tmp_path / "store"):
        pass
    other = tmp_path / "other"
    shutil.copytree(adapter, other)
    for file in other.glob("*.json"):
        if file.name == "manifest.json":
            file.unlink()
    (weights,) = other.glob("*.safetensors")
    tensors = load_file(weights)
    save_file({name: tensor + 1 for name, tensor in tensors.items()}, weights)
    assert "began with another agent" not in caplog.text
    with online((base, other), tmp_path / "store"):
        assert "began with another agent than" in caplog.text
    with (
        pytest.raises(ValueError, match=r"began with another agent than .*other; a new store"),
        opened(
            config(), base=base, start=other, folder=tmp_path / "store", machine=MACHINE, families=(),
            must_begin=True,
        ),
    ):  # fmt: skip
        pass


@pytest.mark.slow
def test_a_refused_release_gives_the_served_bits_back_and_too_many_freeze(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "refused", lambda *a, **k: "it lost everything")
    with online(start, tmp_path / "store", release={"roll_backs": 2}) as parts:
        parts.engine().answer(asked(0, 12))
        done, worker = learned(parts, tmp_path / "scratch", steps=6)
        assert not done
        assert parts.snapshots.versions() == [0]
        assert worker.practice.progress.roll_backs == 2
        assert (parts.snapshots.frozen() or "").startswith(
            "2 of the last 2 releases were refused, this one for it lost everything"
        )
        for adapter in ("policy", "teacher", "served"):
            own = parts.policy.adapters.tensors(adapter)
            assert {name: t.numpy().tobytes() for name, t in own.items()} == bits(parts, 0)
        assert len(parts.store.waiting(99)) == 12 - 2 * 2 * 2
        assert [event for event, _ in events(parts.store)].count("rolled_back") == 2
        assert parts.engine().answer(asked(50, 1))[0].version == 0  # answers go on


@pytest.mark.slow
def test_a_person_rolls_back_while_the_worker_learns(start: Start, tmp_path: Path) -> None:
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 16))

        def rolled_back(metrics: dict[str, float], step: int) -> None:
            if step == 4 and "online/loss" in metrics:
                parts.snapshots.roll_back(1, why="by hand")

        learned(parts, tmp_path / "scratch", steps=6, log=rolled_back)
        assert [event for event, _ in events(parts.store) if event != "alert"] == ["published"] * 3 + [
            "rolled_back",
            "published",
        ]
        assert parts.snapshots.served() == 3
        before = bits(parts, 1)
        parts.snapshots.roll_back(1, why="by hand")
        assert bits(parts, parts.snapshots.served()) == before
        with pytest.raises(ValueError, match=r"there is no version 9 in .*; there are \[0, 1, 2, 3\]"):
            parts.snapshots.roll_back(9, why="by hand")


@pytest.mark.slow
def test_what_is_too_old_goes_where_only_an_engine_runs(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with online(start, tmp_path / "store", keeping={"days": 1e-9}) as parts:
        engine = parts.engine()
        assert [engine.answer(asked(i, 1))[0].experience for i in range(2)] == [1, 2]
        assert parts.store.ids() == {1, 2}
        monkeypatch.setattr(engines, "EVICT_EVERY_S", 0.0)
        assert engine.answer(asked(2, 1))[0].experience == 3
        assert parts.store.ids() == {3}


@pytest.mark.slow
def test_a_person_names_a_later_version_while_no_worker_runs(start: Start, tmp_path: Path) -> None:
    """The worker went back to version 1 with a person, who then has second thoughts. What it published itself
    and has no state of goes."""
    update = {
        "optim": {"steps": 4, "batch": 4, "lr": 1e-2, "weight_decay": 0.0, "warmup": 0.0, "save_every": 2}
    }
    with online(start, tmp_path / "store", update=update) as parts:
        parts.engine().answer(asked(0, 16))
        learned(parts, tmp_path / "scratch", steps=4)
        parts.snapshots.roll_back(1, why="by hand")
        worker = worker_of(parts, waits=False)
        worker.practice.progress.version = 1
        worker._begin(4)
        assert parts.snapshots.served() == 1
        parts.snapshots.roll_back(2, why="by hand")
        worker = worker_of(parts, waits=False)
        worker.practice.progress.version = 1
        worker._begin(4)
        assert parts.snapshots.served() == 2


@pytest.mark.slow
def test_stale_tasks_are_dropped_and_a_full_queue_keeps_no_answer_back(start: Start, tmp_path: Path) -> None:
    with online(
        start, tmp_path / "store", update={"max_lag": 1}, keeping={"queue": 6}, admission={"cold_start": 2}
    ) as parts:
        replies = parts.engine().answer(asked(0, 8))
        assert [reply.why_not_kept for reply in replies] == [""] * 6 + ["the queue is full"] * 2
        learned(parts, tmp_path / "scratch", steps=2)
        (first, _) = parts.store.waiting(2)
        parts.store.add_feedback(first, right=False, answer="seven")  # what a person said is never stale
        for update in (1, 2):
            parts.snapshots.publish(
                parts.snapshots.load(1).tensors, after=update, update=update, about=parts.snapshots.load(1).about,
                measured={},
            )  # fmt: skip
        learned(parts, tmp_path / "scratch 2", steps=4)
        assert overview.counts(parts.store)["stale"] == 1
        assert overview.counts(parts.store)["flooded"] == 2
        assert parts.store.votes([first])[first][:2] == ("seven", 1.0)


@pytest.mark.slow
def test_a_store_or_snapshot_of_another_base_and_a_full_disk_are_refused_before_work_is_spent(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, adapter = start
    other = tiny.build()
    with torch.no_grad():
        other.text_hidden_fcs[0].bias.add_(1.0)
    checkpoint.save(other, tmp_path / "other", metadata={})
    with online(start, tmp_path / "store"):
        pass
    with (
        pytest.raises(
            ValueError, match=r"holds vectors of the encoder .* use the base that it was begun with"
        ),
        online((tmp_path / "other", adapter), tmp_path / "store"),
    ):
        pass
    with (
        pytest.raises(ValueError, match=r"was trained on the base"),
        online((tmp_path / "other", adapter), tmp_path / "new"),
    ):
        pass
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 10**6, 10**6)
    )
    with (
        pytest.raises(OSError, match=r"needs about 0.1 GB, its disk has 0.0 GB left; free some"),
        online(start, tmp_path / "store"),
    ):
        pass
    monkeypatch.undo()
    folder = tmp_path / "store/snapshots/v000000" / checkpoint.DELTA_WEIGHTS
    content = folder.read_bytes()
    folder.write_bytes(content[: len(content) // 2])
    with pytest.raises(ValueError, match=r"is damaged, or was edited"), online(start, tmp_path / "store"):
        pass


@pytest.mark.slow
def test_far_from_the_start_an_update_only_pulls_back(start: Start, tmp_path: Path) -> None:
    """With a target below every KL, and no weight on it, nothing is learned at all."""
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 4))
        worker = worker_of(parts, waits=False)
        module = loop_of(parts, worker, log=silent)
        module.control, worker.practice.progress.beta = KlControl(target=-1.0, low=0.0, high=0.0), 0.0
        worker.run(
            module,
            schedule=schedule(parts.cfg, steps=2),
            machine=MACHINE,
            scratch=tmp_path / "scratch",
            log=silent,
        )
        assert module.pulled_back
        own = parts.policy.adapters.tensors("policy")
        assert {name: tensor.numpy().tobytes() for name, tensor in own.items()} == bits(parts, 0)


@pytest.mark.slow
def test_before_the_cold_start_is_over_nothing_is_learned(start: Start, tmp_path: Path) -> None:
    with online(start, tmp_path / "store", admission={"cold_start": 5}) as parts:
        parts.engine().answer(asked(0, 4))
        assert not learned(parts, tmp_path / "scratch", steps=2)[0]
        assert (overview.counts(parts.store)["waiting"], parts.snapshots.versions()) == (4, [0])
        parts.engine().answer(asked(4, 1))
        assert learned(parts, tmp_path / "scratch", steps=2)[0]
        assert overview.counts(parts.store)["waiting"] == 1


def raising(error: Exception) -> Callable[..., None]:
    def full(*given: object) -> None:
        raise error

    return full


@pytest.mark.slow
def test_neither_a_damaged_snapshot_nor_a_full_disk_keeps_an_answer_back(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with online(start, tmp_path / "store") as parts:
        engine, first = parts.engine(), parts.snapshots.load(0)
        assert parts.snapshots.publish(first.tensors, after=0, update=1, about=first.about, measured={}) == 1
        (parts.snapshots.path(1) / checkpoint.DELTA_WEIGHTS).write_bytes(b"cut")
        (reply,) = engine.answer(asked(0, 1))
        assert (reply.version, reply.experience) == (0, 1)
        assert "is damaged" in engine.trouble
        parts.snapshots.roll_back(0, why="by hand")

        for module, name, error in (
            (stores, "_insert", sqlite3.OperationalError("database or disk is full")),
            (os, "fsync", OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, raising(error))
                (reply,) = engine.answer(asked(1, 1))
            assert (reply.version, reply.experience, engine.trouble) == (0, None, "")
            assert re.search(
                r"can't be written \(.*(disk is full|No space left).*\); free space", reply.why_not_kept
            )
            assert sum(path.is_file() for path in parts.store.pictures.rglob("*")) == 1
        assert engine.answer(asked(1, 1))[0].experience == 2
        quiet = parts.engine(read_only=True)
        assert quiet.answer(asked(2, 1))[0].why_not_kept == "read-only"
        assert parts.store.ids() == {1, 2}


@pytest.mark.slow
def test_the_worker_makes_its_batches_itself_whatever_the_machine_says(start: Start, tmp_path: Path) -> None:
    """`launch.workers` is for stages that read files: another process has neither the lessons nor the store's
    connection."""
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 2))
        done, worker = learned(
            parts, tmp_path / "scratch", steps=1, machine=replace(MACHINE, workers=1, deepspeed_stage=2)
        )
        assert (done, worker.update) == (True, 1)


@pytest.mark.slow
def test_a_killed_worker_that_visits_tasks_again_ends_with_the_same_bits_and_rows(
    start: Start, tmp_path: Path
) -> None:
    """Killed after update 5 of 6 with a state of update 3: what updates 4 and 5 said of earlier tasks is
    taken back, too."""
    results = []
    update = {
        "revisit": 0.25,
        "optim": {"steps": 6, "batch": 4, "lr": 1e-2, "weight_decay": 0.0, "warmup": 0.0, "save_every": 3},
    }
    for name in ("whole", "killed"):
        scratch = tmp_path / f"scratch {name}"
        if name == "killed":
            with online(start, tmp_path / name, update=update) as parts:
                parts.engine().answer(asked(0, 12))
                learned(parts, scratch, steps=6, log=_killing(5))
                assert any(record["visits"] > 1 for record in overview.records(parts.store))
        with online(start, tmp_path / name, update=update) as parts:
            if name == "whole":
                parts.engine().answer(asked(0, 12))
            done, _ = learned(parts, scratch, steps=6)
            assert done
            rows = [
                {key: value for key, value in r.items() if key not in ("time_s", "pictures")}
                for r in overview.records(parts.store)
            ]
            results.append((bits(parts, parts.snapshots.served()), rows))
    assert results[0] == results[1]


def lasting(parts: Parts, scratch: Path, *, segments: int = 99) -> Worker:
    """Run a worker in segments of two updates until there is nothing to do; killed before it begins segment
    number `segments`."""
    worker = worker_of(parts, waits=False)
    begun = iter(range(segments))

    def make() -> OnlineLoop:
        if next(begun, None) is None:
            raise KeyboardInterrupt("as if by kill -9")
        return loop_of(parts, worker, log=silent)

    with suppress(KeyboardInterrupt):
        worker.run_for_ever(
            make, schedule=schedule(parts.cfg, steps=2), machine=MACHINE, scratch=scratch, log=silent
        )
    return worker


@pytest.mark.slow
def test_a_worker_killed_before_it_writes_a_segment_down_counts_on(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*given: object, **named: object) -> bool:
        if workers.SEGMENT in given[1]:  # type: ignore[operator]
            raise KeyboardInterrupt("as if by kill -9")
        return real(*given, **named)  # type: ignore[arg-type]

    real = Store.set_meta
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 6))
        monkeypatch.setattr(Store, "set_meta", killed)
        lasting(parts, tmp_path / "scratch")
        assert parts.store.meta("segment") is None
    monkeypatch.undo()
    with online(start, tmp_path / "store") as parts:
        assert lasting(parts, tmp_path / "scratch").update == 3
        assert parts.store.meta("segment") == "3"
        assert {record["visits"] for record in overview.records(parts.store)} == {1}


@pytest.mark.slow
def test_refused_releases_are_counted_on_by_a_worker_that_was_killed_between_segments(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "refused", lambda *a, **k: "it lost everything")
    with online(start, tmp_path / "store", release={"roll_backs": 2}) as parts:
        parts.engine().answer(asked(0, 12))
        first = lasting(parts, tmp_path / "scratch", segments=1).practice.progress
        assert (first.roll_backs, len(first.recent), list((tmp_path / "scratch").iterdir())) == (1, 4, [])
    with online(start, tmp_path / "store", release={"roll_backs": 2}) as parts:
        second = lasting(parts, tmp_path / "scratch").practice.progress
        assert (second.roll_backs, len(second.recent)) == (2, 8)
        assert (parts.snapshots.frozen() or "").startswith("2 of the last 2 releases were refused")


@pytest.mark.slow
def test_a_persons_roll_back_during_a_refused_release_stands(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with online(start, tmp_path / "store", release={"roll_backs": 1}) as parts:

        def measured(*given: object, **named: object) -> str | None:
            if parts.snapshots.served() == 0:
                return None
            parts.snapshots.roll_back(0, why="by hand")
            return "it lost everything"

        monkeypatch.setattr(workers, "refused", measured)
        parts.engine().answer(asked(0, 8))
        done, worker = learned(parts, tmp_path / "scratch", steps=4)
        assert (done, parts.snapshots.served(), parts.snapshots.frozen()) == (True, 0, None)
        assert (worker.practice.progress.version, worker.practice.progress.roll_backs) == (0, 0)
        own = parts.policy.adapters.tensors("policy")
        assert {name: tensor.numpy().tobytes() for name, tensor in own.items()} == bits(parts, 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", [False, True], ids=["in one process", "from a training state of the skipped step"]
)
def test_a_step_that_was_skipped_leaves_nothing_to_the_next_one(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    """The first loss is not finite: its tasks are learned one by one after it, and count once."""
    real, calls = OnlineLoop.forward, iter(range(99))

    def forward(self: OnlineLoop, *given: Any) -> Any:
        loss, metrics = real(self, *given)
        return (loss * math.nan if next(calls) == 0 else loss), metrics

    monkeypatch.setattr(OnlineLoop, "forward", forward)
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 2))
        if killed:
            learned(parts, tmp_path / "scratch", steps=1)
        done, worker = learned(parts, tmp_path / "scratch", steps=3)
        assert done
        assert [record["visits"] for record in overview.records(parts.store)] == [1, 1]
        assert len(worker.practice.progress.recent) == 2


def _never_finite(monkeypatch: pytest.MonkeyPatch, is_at_fault: Callable[[OnlineLoop], bool]) -> None:
    real = OnlineLoop.forward

    def forward(self: OnlineLoop, batch: Any) -> Any:
        loss, metrics = real(self, batch)
        return (loss * math.nan if is_at_fault(self) else loss), metrics

    monkeypatch.setattr(OnlineLoop, "forward", forward)


@pytest.mark.slow
@pytest.mark.parametrize(
    "killed", [False, True], ids=["in one process", "from a training state of every step"]
)
def test_a_task_whose_steps_are_never_finite_is_found_and_given_up(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, killed: bool
) -> None:
    _never_finite(monkeypatch, lambda module: "experience 3" in module.online.lessons)
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 6))
        for steps in range(1, 9) if killed else (8,):
            learned(parts, tmp_path / "scratch", steps=steps)
        rows = {
            record["id"]: (record["verdict"], record["visits"]) for record in overview.records(parts.store)
        }
        assert rows.pop(3) == ("not_finite", 1)
        assert {visits for _, visits in rows.values()} == {1}
        assert sum("not_finite" in alert for event, alert in events(parts.store) if event == "alert") == 1


@pytest.mark.slow
def test_where_no_step_is_finite_no_task_is_given_up(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _never_finite(monkeypatch, lambda module: True)
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 14))
        learned(parts, tmp_path / "scratch", steps=6)
        assert {(record["verdict"], record["visits"]) for record in overview.records(parts.store)} == {
            (None, 0)
        }


@pytest.mark.slow
def test_after_a_roll_back_by_hand_new_tasks_are_not_stale(start: Start, tmp_path: Path) -> None:
    """Version numbers jump from 2 to 5 then, and what version 2 answered is one release old. A refused
    release is no change."""
    with online(start, tmp_path / "store", update={"max_lag": 1}) as parts:
        about, tensors = parts.snapshots.load(0).about, parts.snapshots.load(0).tensors
        for before in range(4):
            parts.snapshots.publish(tensors, after=before, update=0, about=about, measured={})
        assert parts.snapshots.recently_served(2) == {3, 4}
        parts.snapshots.roll_back(2, why="by hand")
        parts.engine().answer(asked(0, 1))
        parts.snapshots.publish(tensors, after=2, update=0, about=about, measured={})
        parts.snapshots.roll_back(5, why="a refused release")
        assert (parts.snapshots.served(), parts.snapshots.recently_served(2)) == (5, {2, 5})
        worker = worker_of(parts, waits=False)
        worker._drop_stale()
        assert len(parts.store.waiting(9)) == 1
        parts.snapshots.publish(tensors, after=5, update=0, about=about, measured={})
        worker._drop_stale()
        assert parts.store.waiting(9) == []


@pytest.mark.slow
def test_a_damaged_store_keeps_no_answer_back_and_says_what_is_wrong(start: Start, tmp_path: Path) -> None:
    with online(start, tmp_path / "store") as parts:
        engine = parts.engine()
        engine.answer(asked(0, 4))
        parts.store.rows("PRAGMA wal_checkpoint(TRUNCATE)")
        with parts.store.file.open("r+b") as file:
            file.write(b"no database" * 20_000)
        parts.store.rows("PRAGMA shrink_memory")  # what SQLite has in memory is whole
        (reply,) = engine.answer(asked(4, 1))
        assert (reply.version, reply.experience, reply.confidence) == (0, None, None)
        assert "put a backup in its place" in reply.why_not_kept or "can't be written" in reply.why_not_kept
        assert "put a backup in its place" in engine.trouble
        with pytest.raises(OSError, match="put a backup in its place"):
            overview.counts(parts.store)


@pytest.mark.slow
def test_unlike_questions_that_are_asked_at_once_get_the_answers_they_get_alone(
    start: Start, tmp_path: Path
) -> None:
    """A long one, a clip, a picture that is cut, and one name twice."""
    clip = Query(request="clip", question=QUESTION, frames=tuple(map(tiny.picture, range(3))), clip=True)
    long = Query(request="long", question=f"{QUESTION} " * 20, frames=(tiny.picture(5),))
    cut = Query(request="cut", question=QUESTION, frames=(tiny.picture(0)[:-40],))
    whole = [*asked(0, 2), clip, long, *asked(0, 1)]
    with online(start, tmp_path / "alone") as parts:
        engine = parts.engine()
        alone = {query.request: engine.answer([query])[0].turns for query in whole}
    with online(start, tmp_path / "at_once") as parts:
        engine = parts.engine()
        for queries in (whole, [*whole, cut]):  # the second time each is answered by itself in the end
            batching = Batching(engine.answer, size=len(queries), wait_s=3600)
            with ThreadPoolExecutor(len(queries)) as pool:
                replies = [pool.submit(batching.ask, query) for query in queries]
            told = {one.request: reply.result().turns for one, reply in zip(whole, replies, strict=False)}
            assert told == alone
        with pytest.raises(ValueError, match="cannot read"):
            replies[-1].result()
        assert parts.store.size() == len(alone)


@pytest.mark.slow
def test_a_request_with_the_name_of_another_question_is_answered_and_told_so(
    start: Start, tmp_path: Path
) -> None:
    with online(start, tmp_path / "store") as parts:
        engine = parts.engine()
        assert engine.answer(asked(0, 1))[0].experience == engine.answer(asked(0, 1))[0].experience == 1
        for other in ({"question": "Where is it?"}, {"frames": (tiny.picture(7),)}, {"clip": True}):
            (reply,) = engine.answer([replace(asked(0, 1)[0], **other)])  # type: ignore[arg-type]
            assert (reply.experience, parts.store.size()) == (None, 1)
            assert (
                reply.why_not_kept
                == "the request 'r0' is another question of the store; give this one a name of its own"
            )


@pytest.mark.slow
def test_pictures_that_are_missing_or_cut_or_forgotten_in_a_step_do_not_stop_the_worker(
    start: Start, tmp_path: Path
) -> None:
    """Of eight tasks, 1 has lost its picture and 4 half of it; 3 is forgotten after the worker took it."""
    with online(start, tmp_path / "store") as parts:
        parts.engine().answer(asked(0, 8))
        lost, cut = (parts.store.tasks([number])[0].frames[0] for number in (1, 4))
        lost.unlink()
        cut.write_bytes(cut.read_bytes()[:60])
        worker = worker_of(parts, waits=False)
        real = worker.practice.play

        def play(step: RolloutStep) -> list[PlayedRollout]:
            if 3 in parts.store.ids():
                forget(parts.store, 3)
            return real(step)

        worker.practice.play = play  # type: ignore[method-assign]
        module = loop_of(parts, worker, log=silent)
        assert worker.run(
            module,
            schedule=schedule(parts.cfg, steps=3),
            machine=MACHINE,
            scratch=tmp_path / "scratch",
            log=silent,
        )
        rows = {
            record["id"]: (record["verdict"], record["visits"]) for record in overview.records(parts.store)
        }
        assert rows.keys() == {1, 2, 4, 5, 6, 7, 8}
        assert rows[1] == rows[4] == ("unreadable", 0)
        assert {visits for number, (_, visits) in rows.items() if number not in (1, 4)} == {1}
        assert overview.counts(parts.store)["unreadable"] == 2
        told = [alert for event, alert in events(parts.store) if event == "alert" and "unreadable" in alert]
        assert len(told) == 2
        assert "a picture of experience 1 is missing or damaged" in told[0]
