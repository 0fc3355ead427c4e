"""Versions of the served adapter as folders of safetensors, published whole; a row of the store says which
one is served.

A version's folder is complete before the row names it (written beside, synced, renamed), so whoever is killed
leaves the last whole one. Version numbers only rise; rolling back names an earlier one again, whose bits
never changed.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ans_core.checkpoints import checkpoint
from ans_core.config.online import RELEASES
from ans_core.online.store import Store
from ans_core.train.states import sync

FOLDER, SERVED, FROZEN = "snapshots", "served", "frozen"
"""The folder, and the store's keys: which version is served, and why nothing is learned any more."""
NAME = re.compile(r"v(\d{6})")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    version: int
    tensors: dict[str, Tensor]
    about: dict[str, Any]
    """What the adapter is (lora, rows) and how it came about: update, canary."""


class Snapshots:
    """The versions of one store, all on one base."""

    def __init__(self, store: Store, *, base_hash: str, keep: int = 3) -> None:
        """keep: newest versions that stay, beside version 0 and the served one."""
        self.store, self.base_hash, self.keep = store, base_hash, keep
        self.folder = store.folder / FOLDER

    def path(self, version: int) -> Path:
        return self.folder / f"v{version:06d}"

    def versions(self) -> list[int]:
        """Return the versions whose folders are whole, oldest first."""
        names = [NAME.fullmatch(path.name) for path in self.folder.iterdir()] if self.folder.is_dir() else []
        return sorted(int(name[1]) for name in names if name)

    def served(self) -> int:
        """Return the version that is served. Raises ValueError before there is any."""
        version = self.store.meta(SERVED)
        if version is None:
            raise ValueError(
                f"{self.store.folder} has no snapshot; start `ans agent serve`, which makes the first one"
            )
        return int(version)

    def publish(
        self,
        tensors: Mapping[str, Tensor],
        *,
        after: int | None,
        update: int,
        about: Mapping[str, Any],
        measured: Mapping[str, Any],
    ) -> int | None:
        """Write a new version and serve it in the place of version `after` (None: the first one); return its
        number. None if another one is served by now: somebody rolled back meanwhile. about: what the adapter
        is; measured: figures, for the event too."""
        version = self._next()
        config = {**about, "version": version, "update": update, **measured}
        checkpoint.save_delta(dict(tensors), self.path(version), base_hash=self.base_hash, config=config)
        sync(self.folder)
        before = None if after is None else str(after)
        if not self.store.set_meta(
            {SERVED: str(version)},
            event="published",
            only_if={SERVED: before},
            version=version,
            update=update,
            **measured,
        ):
            if self.served() != version:  # two that begin a store at once write the same first version
                shutil.rmtree(self.path(version))
            return None
        self._drop_old(version)
        return version

    def _next(self) -> int:
        """Count on from everything that was ever served, also where its folder is gone by now."""
        changes = [json.loads(body)["version"] for _, body in self._last_changes(-1)]
        return max([-1, *changes, *self.versions()]) + 1

    def load(self, version: int) -> Snapshot:
        """Load a version. Raises ValueError for one that is missing, damaged, or of another base."""
        path = self.path(version)
        if not path.is_dir():
            raise ValueError(f"there is no version {version} in {self.folder}; there are {self.versions()}")
        tensors, about = checkpoint.load_delta(path, base_hash=self.base_hash)
        return Snapshot(version=version, tensors=tensors, about=about)

    def roll_back(
        self, version: int, *, why: str, frozen: str | None = None, instead_of: int | None = None
    ) -> bool:
        """Serve an earlier version again. frozen: why nothing is to be learned from now on; None: learning
        may go on. Changes nothing and returns False if `instead_of` is given and another version is served by
        now: somebody rolled back meanwhile."""
        self.load(version)  # before anything changes
        only_if = None if instead_of is None else {SERVED: str(instead_of)}
        return self.store.set_meta(
            {SERVED: str(version), FROZEN: frozen},
            event="rolled_back",
            only_if=only_if,
            version=version,
            why=why,
            frozen=frozen,
        )

    def recently_served(self, most: int) -> set[int]:
        """Return what was served last, the present version and up to `most` - 1 changes back. Numbers alone
        don't tell: after a roll-back by hand the next one is far from what it follows."""
        changes: list[int] = []
        for _, body in self._last_changes(most * (RELEASES + 1)):  # so many refusals in a row end learning
            version = int(json.loads(body)["version"])
            if not changes or version != changes[-1]:  # a refused release serves what was served
                changes.append(version)
            if len(changes) == most:
                break
        return set(changes)

    def before(self, version: int) -> int | None:
        """Return the newest version still here that a version came after: what was served when it was
        published, or what came before that. None for the first. Numbers alone don't tell: what somebody took
        back by hand has a lower number than what follows it."""
        came_after: dict[int, int | None] = {}
        serving = None
        for event, body in reversed(self._last_changes(-1)):
            named = int(json.loads(body)["version"])
            if event == "published":
                came_after[named] = serving
            serving = named
        here, earlier = self.versions(), came_after.get(version)
        while earlier is not None and earlier not in here:
            earlier = came_after.get(earlier)
        return earlier

    def rolled_back(self) -> bool:
        """Whether what is served was named by a roll-back, and not published since."""
        return [event for event, _ in self._last_changes(1)] == ["rolled_back"]

    def _last_changes(self, most: int) -> list[tuple[str, str]]:
        """Return (event, body) of the newest events that name what is served, the newest first; all of
        them for -1."""
        query = "SELECT event, body FROM events WHERE event <> 'alert' ORDER BY number DESC LIMIT ?"
        return [(str(event), str(body)) for event, body in self.store.rows(query, most)]

    def frozen(self) -> str | None:
        """Return why nothing is learned any more; None if it is."""
        return self.store.meta(FROZEN)

    def _drop_old(self, served: int) -> None:
        # served by now: somebody may have rolled back
        retained = {0, served, self.served(), *self.versions()[-self.keep :]}
        for version in self.versions():
            if version not in retained:
                shutil.rmtree(self.path(version))
        for left in self.folder.glob(".v*.partial"):  # somebody was killed while writing it
            shutil.rmtree(left)
