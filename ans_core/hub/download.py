"""Files of a repository on the Hugging Face hub, to disk: each goes on where it was cut off, and is only
there once its checksum is right.

`huggingface_hub.snapshot_download` begins a file anew after a crash and compares sizes only; its parts are
used here one by one.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_url
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.hf_api import RepoFile
from huggingface_hub.utils import build_hf_headers, filter_repo_objects

VERIFIED = ".verified.json"
"""In the folder: path -> `Verified` of files that were fetched or compared, so that they are not read again."""
GIT_ONLY = ".gitattributes"
"""A file of every repository that says nothing to anybody but git."""
MARGIN = 100_000_000
"""Bytes that stay free on the disk."""
AGAIN = "the same command goes on from there"


class HubError(ValueError):
    """What keeps a file from being fetched or sent, and the remedy."""


@dataclass(frozen=True, kw_only=True)
class HubFile:
    path: str
    size: int
    checksum: str
    """SHA-256 of a large file; git's SHA-1 (40 letters) of a small one."""


@dataclass(frozen=True)
class Verified:
    """A file's checksum, and its size and time of last change (ns) when it was taken."""

    checksum: str
    state: tuple[int, int] | None


@dataclass(frozen=True, kw_only=True)
class HubRepo:
    repo: str
    kind: str
    revision: str
    licence: str | None
    gated: bool
    files: tuple[HubFile, ...]

    @property
    def page(self) -> str:
        return f"{constants.ENDPOINT}/{'datasets/' if self.kind == 'dataset' else ''}{self.repo}"


def look_up(repo: str, *, kind: str, patterns: Sequence[str] = ()) -> HubRepo:
    """Ask the hub what the repository holds today. HubError if it has no file of these patterns."""
    with explained(repo, kind):
        api = HfApi()
        info = api.repo_info(repo, repo_type=kind)
        assert info.sha is not None, "the hub names the revision"
        tree = api.list_repo_tree(repo, recursive=True, revision=info.sha, repo_type=kind)
        files = [_hub_file(entry) for entry in tree if isinstance(entry, RepoFile) and entry.path != GIT_ONLY]
    wanted = set(filter_repo_objects([file.path for file in files], allow_patterns=list(patterns) or None))
    if not wanted:
        raise HubError(
            f"{repo} on the hub has no file {' or '.join(patterns)} any more; it has "
            f"{_some([f.path for f in files])}"
        )
    return HubRepo(
        repo=repo, kind=kind, revision=info.sha, licence=_licence(getattr(info, "card_data", None)),
        gated=bool(info.gated),
        files=tuple(file for file in files if file.path in wanted),
    )  # fmt: skip


def missing(repo: HubRepo, folder: Path) -> list[HubFile]:
    """Return the files that are still to be fetched. A file that is there already is compared, and once more
    whenever it has changed since. HubError if it is another one."""
    verified, present = _verified(folder), []
    for file in repo.files:
        path = folder / file.path
        if not path.exists():
            continue
        earlier = verified.get(file.path)
        if earlier is None or earlier.state != _state(path):
            valid = [file.checksum, *([earlier.checksum] if earlier else [])]
            checksum = next((one for one in valid if _checksum(path, one) == one), None)
            if checksum is None:
                how = (
                    "has changed since it was fetched"
                    if earlier
                    else f"is there already and is not {repo.repo}'s"
                )
                raise HubError(f"{path} {how}; move it away, then fetch again")
            verified[file.path] = Verified(checksum, _state(path))
        if verified[file.path].checksum == file.checksum:  # not of an earlier revision
            present.append(file)
    if present:
        _write_verified(folder, verified)
    return [file for file in repo.files if file not in present]


def remove_stale(repo: HubRepo, folder: Path) -> list[str]:
    """Remove the files that were fetched or compared at an earlier revision and are not of this one; return
    their paths."""
    verified, current = _verified(folder), {file.path for file in repo.files}
    stale = sorted(verified.keys() - current)
    for path in stale:
        (folder / path).unlink(missing_ok=True)
    if stale:
        _write_verified(folder, {path: verified[path] for path in verified.keys() & current})
    return stale


def to_fetch(files: Sequence[HubFile], folder: Path) -> int:
    """Return the bytes that are still missing of these files."""
    return sum(file.size - min(file.size, _size(_partial(folder, file))) for file in files)


def check_room(need: int, folder: Path) -> None:
    """Raise HubError before anything is fetched that the disk has no room for."""
    free = shutil.disk_usage(next(place for place in (folder, *folder.parents) if place.exists())).free
    if need + MARGIN > free:
        raise HubError(
            f"{folder} needs {need / 1e9:.2f} GB and its disk has {free / 1e9:.2f} GB left: free some, or "
            "give --into a larger one"
        )


def fetch(repo: HubRepo, file: HubFile, folder: Path) -> None:
    """Fetch one file, or the rest of it, compare its checksum and put it in its place."""
    partial, path = _partial(folder, file), folder / file.path
    if file.size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        command = (
            f"hf download {repo.repo} {file.path} --repo-type {repo.kind} --revision {repo.revision} "
            f"--local-dir {folder}"
        )
        raise HubError(
            f"{file.path} of {file.size / 1e9:.0f} GB is more than the hub sends at once: `{command}`, then "
            "fetch again"
        )
    url = hf_hub_url(repo.repo, file.path, repo_type=repo.kind, revision=repo.revision)
    with explained(repo.repo, repo.kind, partial=partial, size=file.size):
        partial.parent.mkdir(parents=True, exist_ok=True)
        if _size(partial) > file.size:
            partial.unlink()
        with partial.open("ab") as opened:
            http_get(
                url, opened, resume_size=_size(partial), headers=build_hf_headers(), expected_size=file.size
            )
    if (checksum := _checksum(partial, file.checksum)) != file.checksum:
        partial.unlink()
        raise HubError(
            f"{repo.page}: {file.path} has the checksum {checksum[:12]}... and should have "
            f"{file.checksum[:12]}...; it was thrown away: fetch "
            "it again (the same once more: a proxy, or the repository, serves a damaged file)"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    partial.replace(path)
    _write_verified(folder, _verified(folder) | {file.path: Verified(file.checksum, _state(path))})


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Raise HubError where another process fetches into this folder: both would write the same files."""
    place = folder / ".partial"
    place.mkdir(parents=True, exist_ok=True)
    opened = os.open(place, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise HubError(f"another process is fetching into {folder}; wait for it, or end it") from None
        yield
    finally:
        os.close(opened)


@contextmanager
def explained(repo: str, kind: str, *, partial: Path | None = None, size: int = 0) -> Iterator[None]:
    """Turn errors of the hub, the network and the disk into one sentence with the remedy."""
    page = f"{constants.ENDPOINT}/{'datasets/' if kind == 'dataset' else ''}{repo}"
    try:
        yield
    except GatedRepoError as error:
        raise HubError(
            f"{repo} is gated: accept its terms at {page}, then `hf auth login` (or set HF_TOKEN), and run "
            "this again"
        ) from error
    except RepositoryNotFoundError as error:
        raise HubError(
            f"{page} does not exist, or is private: `hf auth login` (or set HF_TOKEN) if you may read it"
        ) from error
    except OfflineModeIsEnabled as error:
        raise HubError(f"{page} can't be asked: HF_HUB_OFFLINE is set; unset it") from error
    except HfHubHTTPError as error:
        if (status := error.response.status_code) in (401, 403):
            raise HubError(
                f"{page}: the hub answers {status}: `hf auth login` (or set HF_TOKEN) with a token that may "
                "do this"
            ) from error
        raise HubError(f"{page}: the hub answers {status}; try again later, {AGAIN}") from error
    except HTTPError as error:
        progress = (
            f" after {_size(partial) / 1e9:.2f} of {size / 1e9:.2f} GB, which are kept" if partial else ""
        )
        raise HubError(
            f"{page}: the connection failed{progress} ({error or type(error).__name__}); {AGAIN}"
        ) from error
    except OSError as error:
        if partial is None or error.errno not in (errno.ENOSPC, errno.EDQUOT):
            reason = str(error).partition("\n")[0]
            raise HubError(f"{page}: {reason}; {AGAIN}") from error
        left = (size - _size(partial)) / 1e9
        raise HubError(
            f"the disk of {partial.parent} is full, {left:.2f} GB of this file are missing: free some; "
            f"{AGAIN}"
        ) from error


def _hub_file(entry: RepoFile) -> HubFile:
    return HubFile(
        path=entry.path, size=entry.size, checksum=entry.lfs.sha256 if entry.lfs else entry.blob_id
    )


def _licence(card: object) -> str | None:
    licence = getattr(card, "license_name", None) or getattr(card, "license", None)
    return ", ".join(licence) if isinstance(licence, list) else licence


def _some(paths: Sequence[str]) -> str:
    return f"{', '.join(sorted(paths)[:12])}{' ...' if len(paths) > 12 else ''}"


def _partial(folder: Path, file: HubFile) -> Path:
    """Return where a file grows; another revision of it grows elsewhere."""
    return folder / ".partial" / f"{file.checksum[:16]}-{Path(file.path).name}"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _checksum(path: Path, like: str) -> str:
    """Return a file's checksum of the kind of `like`: SHA-256, or git's SHA-1 of a blob."""
    digest = (
        hashlib.sha256()
        if len(like) == 64
        else hashlib.sha1(f"blob {path.stat().st_size}\0".encode(), usedforsecurity=False)
    )
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def _state(path: Path) -> tuple[int, int]:
    stat = path.stat()
    return stat.st_size, stat.st_mtime_ns


def _verified(folder: Path) -> dict[str, Verified]:
    file = folder / VERIFIED
    entries = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    return {
        path: Verified(entry["checksum"], tuple(entry["state"]))
        if isinstance(entry, dict)
        else Verified(entry, None)  # of an older version: compared once more
        for path, entry in entries.items()
    }


def _write_verified(folder: Path, verified: dict[str, Verified]) -> None:
    partial, entries = folder / f"{VERIFIED}.partial", {path: asdict(one) for path, one in verified.items()}
    partial.write_text(json.dumps(entries, indent=1, sort_keys=True), encoding="utf-8")
    partial.replace(folder / VERIFIED)
