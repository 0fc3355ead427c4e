"""`ans agent`: the engine and the worker of learning online as processes, and what people do with their
store."""

from __future__ import annotations

import argparse
import json
import logging
import shutil
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ans_core import stop
from ans_core.places import root

if TYPE_CHECKING:
    from ans_core.online.snapshots import Snapshots
    from ans_core.online.store import Store

ALERTS = 5
"""Newest ones that are told."""
MOST_WAIT_MS = 10_000
MOST_ID = 2**63 - 1
"""Of SQLite's."""


def add_arguments(it: argparse.ArgumentParser) -> None:
    actions = it.add_subparsers(metavar="ACTION", required=True)

    def action(name: str, function: object) -> argparse.ArgumentParser:
        made = actions.add_parser(name, help=(function.__doc__ or "").strip(), description=function.__doc__)
        made.set_defaults(act=function)
        made.add_argument("--store", metavar="FOLDER", help="(default: .ans/online/<profile>)")
        return made

    of = action("serve", serve)
    of.add_argument("--port", type=int, default=7870, help="(default: 7870)")
    of.add_argument(
        "--host",
        default="127.0.0.1",
        help="another address opens it to the network: it asks nobody for a password",
    )
    of.add_argument(
        "--read-only", action="store_true", help="answer, and keep nothing; needs a store that is there"
    )
    of.add_argument(
        "--wait",
        type=float,
        default=10,
        metavar="MS",
        help="milliseconds that a question waits for others, which are answered with it (default: 10); at most "
        "agent.episode.batch are answered together",
    )
    of.add_argument("--model", metavar="FOLDER", help="the base (default: agent.base of params.yaml)")
    of.add_argument(
        "--adapter", metavar="FOLDER", help="what a new store begins with (default: runs/<profile>/agent/rft)"
    )
    of = action("worker", worker)
    of.add_argument("--model", metavar="FOLDER", help="the base (default: agent.base of params.yaml)")
    of.add_argument(
        "--until-idle", action="store_true", help="end where no task waits, or learning is frozen"
    )
    action("status", status)
    of = action("rollback", rollback)
    of.add_argument("version", nargs="?", type=int, help="(default: the one that the served one came after)")
    of = action("export", export)
    of.add_argument("folder", help="a new one: experiences.jsonl and pictures")
    of = action("feedback", feedback)
    of.add_argument("id", type=int, help="of the experience, as the reply named it")
    what = of.add_mutually_exclusive_group()
    what.add_argument("--right", action="store_true", help="the answer was right")
    what.add_argument("--wrong", action="store_true", help="it was wrong, and the true one is not known")
    what.add_argument("--answer", metavar="TEXT", help="it was wrong; this is the true one")
    of.add_argument(
        "--mask", metavar="PICTURE", help="of the first frame's size: what is asked about is not black"
    )
    of = action("forget", forget)
    of.add_argument("id", type=int)


def run(arguments: argparse.Namespace) -> int:
    """Learning online: engine and worker as processes, their store's status, roll-back, feedback, export and forgetting
    (docs/online-learning.md)."""
    code: int = arguments.act(arguments)
    return code


def serve(arguments: argparse.Namespace) -> int:
    """Answers questions (HTTP, JSON) from the last snapshot, and puts them into the store for the worker."""
    from ans_core.config import load
    from ans_core.online.server import listening, server_of
    from ans_core.online.store import FILE
    from ans_core.online.worker import ADAPTERS
    from ans_core.stages.launch import machine_of
    from ans_core.stages.online_parts import opened

    cfg = load(root() / "params.yaml")
    base, adapter = base_of(arguments), Path(arguments.adapter or root() / "runs" / cfg.profile / "agent/rft")
    folder = folder_of(arguments)
    if not 0 <= arguments.wait <= MOST_WAIT_MS:
        raise ValueError(f"--wait {arguments.wait:g}: give 0 to {MOST_WAIT_MS} milliseconds")
    if arguments.read_only:
        _check_begun(folder)
    bound = listening(arguments.host, arguments.port)
    stop.exit_on_signals((signal.SIGTERM,))
    machine = machine_of(cfg.launch)
    start = adapter if adapter.is_dir() else None
    if start is None and (arguments.adapter or not (folder / FILE).exists()):
        raise ValueError(
            f"no agent {adapter} for a new store to begin with: `ans run --agent` trains one, or name one "
            "(--adapter)"
        )
    with (
        bound,
        opened(
            cfg,
            base=base,
            start=start,
            folder=folder,
            machine=machine,
            families=cfg.agent.families,
            names=ADAPTERS[3:],
            must_begin=arguments.adapter is not None,
        ) as parts,
    ):
        engine = parts.engine(read_only=arguments.read_only)
        host, port = bound.getsockname()[:2]
        address = f"{f'[{host}]' if ':' in host else host}:{port}"
        print(
            f"version {engine.version} of {folder} answers on http://{address}/ask, and has a page on "
            f"http://{address}/",
            flush=True,
        )
        server_of(engine, host=arguments.host, wait_s=arguments.wait / 1000).run(sockets=[bound])
    return 0


def _check_begun(folder: Path) -> None:
    """Raise ValueError for a store without a snapshot, which somebody who keeps nothing can't make."""
    from ans_core.online.store import FILE, Store

    if (folder / FILE).exists():
        with Store(folder) as store:
            if store.meta("served") is not None:
                return
    raise ValueError(
        f"{folder} has no snapshot to answer from; run `ans agent serve` once without --read-only, or name "
        "its store (--store)"
    )


def worker(arguments: argparse.Namespace) -> int:
    """Learns from the store's tasks, and publishes snapshots. One at a time."""
    from ans_core.config import load
    from ans_core.online.store import Store, worker_lock
    from ans_core.stages.launch import machine_of
    from ans_core.stages.online_parts import loop_of, opened, schedule, worker_of

    cfg, folder = load(root() / "params.yaml"), folder_of(arguments)
    if not cfg.agent.families:
        raise ValueError(
            "agent.families is empty, so there are no questions with known answers to replay and to measure a release "
            "by; learning online needs an agent that was trained on drawn families, too (docs/online-learning.md)"
        )
    Store(folder).close()  # a damaged or missing one is refused before the model is loaded
    stop.exit_on_signals((signal.SIGTERM,))
    machine = machine_of(cfg.launch)
    with worker_lock(folder):
        base = base_of(arguments)
        with opened(
            cfg, base=base, start=None, folder=folder, machine=machine, families=cfg.agent.families
        ) as parts:
            made = worker_of(parts, waits=not arguments.until_idle)
            print(f"learning from {folder}, version {parts.snapshots.served()}", flush=True)
            made.run_for_ever(
                lambda: loop_of(parts, made, log=logged),
                schedule=schedule(cfg, steps=cfg.agent.online.update.segment),
                machine=machine,
                scratch=folder / "training",
                log=logged,
            )
            print(f"nothing more to do; version {parts.snapshots.served()} is served")
    return 0


def logged(metrics: dict[str, float], step: int) -> None:
    logging.getLogger("ans.online").info(
        "update %d %s", step, json.dumps({name: round(float(v), 5) for name, v in metrics.items()})
    )


def status(arguments: argparse.Namespace) -> int:
    """Prints what the store holds, what is served, and alerts."""
    from ans_core.online import overview

    with open_store(arguments) as (store, snapshots):
        for name, value in overview.counts(store).items():
            print(f"{name:<28} {value}")
        print(f"{'served':<28} version {snapshots.served()} of {snapshots.versions()}")
        print(f"{'learning':<28} {'frozen: ' + why if (why := snapshots.frozen()) else 'goes on'}")
        for alert in overview.alerts(store, ALERTS):
            print(f"{'alert':<28} {alert}")
    return 0


def rollback(arguments: argparse.Namespace) -> int:
    """Serves an earlier version again, with the bits it had; learning goes on from it, also after a
    freeze."""
    with open_store(arguments) as (_, snapshots):
        served = snapshots.served()
        version = snapshots.before(served) if arguments.version is None else arguments.version
        if version is None:
            raise ValueError(f"version {served} is the first; there is none before it")
        snapshots.roll_back(version, why="by hand")
        print(f"version {version} is served instead of {served}")
    return 0


def export(arguments: argparse.Namespace) -> int:
    """Writes all experiences with their labels and votes, and their pictures."""
    from ans_core.online import overview

    folder = Path(arguments.folder)
    if folder.exists():
        raise ValueError(f"{folder} exists; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    partial.chmod(0o755)
    try:
        with open_store(arguments) as (store, _):
            records = list(overview.records(store))
            _write_records(partial, records)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(f"wrote {len(records)} experiences to {folder}")
    return 0


def _write_records(folder: Path, records: Sequence[dict[str, Any]]) -> None:
    """Write experiences.jsonl and the pictures. Raises ValueError for a picture that is missing."""
    (folder / "pictures").mkdir(parents=True)
    with (folder / "experiences.jsonl").open("w", encoding="utf-8") as file:
        for record in records:
            for picture in record["pictures"]:
                try:
                    shutil.copyfile(picture, folder / "pictures" / picture.name)
                except FileNotFoundError:
                    number = record["id"]
                    raise ValueError(
                        f"experience {number} has lost its picture {picture}; put it back from a backup, or "
                        f"remove the experience (`ans agent forget {number}`), and export again"
                    ) from None
            exported = record | {"pictures": [f"pictures/{picture.name}" for picture in record["pictures"]]}
            file.write(json.dumps(exported) + "\n")


def feedback(arguments: argparse.Namespace) -> int:
    """Says whether an answer was right, or what the true one is: the worker learns from that, whatever its own
    votes are. Or shows what is asked about: of the worker's own answers those count that looked at it."""
    from ans_core.inference.answer import read_mask

    said = (arguments.right, arguments.wrong, arguments.answer is not None, arguments.mask is not None)
    if not any(said):
        raise ValueError("say what of it: --right, --wrong, --answer TEXT or --mask PICTURE")
    right = True if arguments.right else False if arguments.wrong or arguments.answer is not None else None
    mask = read_mask(arguments.mask) if arguments.mask else None
    with open_store(arguments) as (store, _):
        store.add_feedback(_known_id(arguments.id, store), right=right, answer=arguments.answer, mask=mask)
    print(f"experience {arguments.id}: the worker learns from it next")
    return 0


def _known_id(number: int, store: Store) -> int:
    if not 0 < number <= MOST_ID:
        raise store.unknown(number)
    return number


def forget(arguments: argparse.Namespace) -> int:
    """Removes an experience with its vector and pictures. What the weights learned from it, only a roll-back
    takes back."""
    from ans_core.online import retention

    with open_store(arguments) as (store, _):
        retention.forget(store, _known_id(arguments.id, store))
    print(
        f"experience {arguments.id} is gone; versions published after it came may have learned from it "
        "(`ans agent rollback`)"
    )
    return 0


# Where things are


def folder_of(arguments: argparse.Namespace) -> Path:
    from ans_core.config import load

    return Path(arguments.store or root() / ".ans/online" / load(root() / "params.yaml").profile)


def base_of(arguments: argparse.Namespace) -> Path:
    from ans_core.config import load

    base = Path(arguments.model or root() / load(root() / "params.yaml").agent.base)
    if not base.is_dir():
        raise ValueError(f"no base {base}: `ans run --agent` makes it, or name one (--model)")
    return base


@contextmanager
def open_store(arguments: argparse.Namespace) -> Iterator[tuple[Store, Snapshots]]:
    """Open a store and its snapshots without a model: the base is the one that the store was begun with."""
    from ans_core.online.snapshots import Snapshots
    from ans_core.online.store import Store

    with Store(folder_of(arguments)) as store:
        base_hash = str(store.meta("encoder")).partition(":")[0]
        yield store, Snapshots(store, base_hash=base_hash)
