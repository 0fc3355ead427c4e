"""`ans data fetch` and `ans weights fetch`: names of ans_core/hub/catalogue.py in, files on disk out."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from ans_core.hub import download as hub
from ans_core.hub.catalogue import UNKNOWN, Published

GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Order:
    """What of one name is to be fetched, and to where."""

    name: str
    published: Published
    repo: hub.HubRepo
    folder: Path
    files: list[hub.HubFile]

    @property
    def size(self) -> int:
        return hub.to_fetch(self.files, self.folder)


def fetch(
    names: Sequence[str], table: Mapping[str, Published], *, root: Path, into: str | None, yes: bool
) -> int:
    """Show what the names stand for, ask, and fetch it. Without names: list the table. HubError (a
    ValueError) if something is wrong."""
    if not names:
        print("\n".join(listed(table)))
        return 0
    return fetch_orders([order(name, table, root=root, into=into) for name in dict.fromkeys(names)], yes=yes)


def fetch_orders(orders: Sequence[Order], *, yes: bool) -> int:
    """Show the orders, ask, and fetch what is missing. Returns 1 if a person says no, else 0."""
    print("\n".join(shown(orders)))
    need = sum(o.size for o in orders)
    if any(o.files for o in orders):
        hub.check_room(need, orders[0].folder)
        if not (yes or confirmed(need)):
            print("nothing fetched")
            return 1
    for o in orders:
        with hub.alone(o.folder) if o.files else nullcontext():
            for number, file in enumerate(o.files, start=1):
                print(f"{o.name}: {file.path} ({number} of {len(o.files)})", flush=True)
                hub.fetch(o.repo, file, o.folder)
        print(
            f"{o.name} is in {o.folder}, checksums compared"
            + (f". Next: {o.published.then}" if o.published.then else "")
        )
    return 0


def order(name: str, table: Mapping[str, Published], *, root: Path, into: str | None) -> Order:
    if name not in table:
        near = difflib.get_close_matches(name, table, n=1)
        raise hub.HubError(
            f"no name {name!r}{f' (did you mean {near[0]!r}?)' if near else ''}; there are {', '.join(table)}"
        )
    published = table[name]
    folder = Path(into).resolve() / name if into else root / published.into
    repo = hub.look_up(published.repo, kind=published.kind, patterns=published.files)
    return Order(name=name, published=published, repo=repo, folder=folder, files=hub.missing(repo, folder))


def shown(orders: Sequence[Order]) -> list[str]:
    lines = []
    for o in orders:
        total, licence = sum(file.size for file in o.repo.files), o.repo.licence or o.published.licence
        gated = ", gated: its terms must be accepted first" if o.repo.gated else ""
        here = f", {(total - o.size) / GB:.2f} GB of it there already" if o.size < total else ""
        lines += [
            f"{o.name}: {o.repo.page} at {o.repo.revision[:8]}",
            f"  {len(o.repo.files)} files, {total / GB:.2f} GB{here}; into {o.folder}",
            f"  licence: {licence}{gated}" + (" (its card states none)" if licence == UNKNOWN else ""),
        ]
    return lines


def listed(table: Mapping[str, Published]) -> list[str]:
    width = max(map(len, table))
    lines = [
        f"{name:<{width}}  {p.repo}{f' ({chr(44).join(p.files)})' if p.files and p.kind == 'dataset' else ''}"
        for name, p in table.items()
    ]
    return [*lines, "size and licence: asked of the hub and shown before anything is fetched"]


def confirmed(need: int, *, verb: str = "fetch", past: str = "fetched") -> bool:
    """Ask a person; HubError if nobody can answer."""
    if not sys.stdin.isatty():
        raise hub.HubError(f"{need / GB:.2f} GB are to be {past} and nobody is there to ask; add --yes")
    return input(f"{verb.capitalize()} {need / GB:.2f} GB? [y/N] ").strip().lower() in {"y", "yes"}
