"""Fetching from a hub that cuts, damages, asks for a token or fills the disk."""

from __future__ import annotations

import errno
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from ans_core.hub import catalogue, fetch
from ans_core.hub import download as hub
from ans_core.hub.catalogue import Published
from tests.hub_server import Hub, serving

BIG = bytes(range(256)) * 40
FILES = {"set.zip": BIG, "sub/notes.json": b'{"a": 1}', "other.bin": b"not asked for" * 100}
TABLE = {
    "set": Published(
        repo="org/set", files=("*.zip", "*.json"), licence="CC BY 4.0", into="data/set", then="unzip it"
    )
}


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """The library has read its environment when it was imported, so the endpoint is set where it keeps it."""
    with serving(Hub(dict(FILES))) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        # what comes is written in pieces of 10 MB otherwise
        monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 500)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        real = time.sleep  # of the library, between two attempts
        monkeypatch.setattr(time, "sleep", lambda seconds: real(seconds / 1000))
        yield made


def got(root: Path, **changes: Any) -> int:
    return fetch.fetch(["set"], TABLE, root=root, **({"into": None, "yes": True} | changes))


def test_what_is_needed_is_shown_then_fetched_compared_and_not_fetched_again(
    served: Hub, tmp_path: Path, capsys
):
    served.licence = "apache-2.0"
    assert got(tmp_path) == 0
    folder = tmp_path / "data/set"
    told = capsys.readouterr().out
    assert (
        f"{served.url}/datasets/org/set at {served.revision[:8]}\n  2 files, 0.00 GB; into {folder}\n  licence: apache-2.0\n"
        in told
    )
    assert told.endswith("checksums compared. Next: unzip it\n")
    assert (folder / "set.zip").read_bytes() == BIG
    assert (folder / "sub/notes.json").read_bytes() == FILES["sub/notes.json"]
    assert not (folder / "other.bin").exists()
    asked = len(served.ranges)
    assert got(tmp_path, yes=False) == 0  # nothing to ask about
    assert len(served.ranges) == asked == 2
    (folder / hub.VERIFIED).unlink()
    assert got(tmp_path) == 0  # files of one's own copying are compared, not fetched
    assert len(served.ranges) == 2
    (folder / "set.zip").write_bytes(BIG[:-1] + b"?")
    with pytest.raises(hub.HubError, match=r"set\.zip has changed since it was fetched; move it away"):
        got(tmp_path)
    (folder / "set.zip").write_bytes(BIG)
    with hub.alone(folder):
        assert got(tmp_path) == 0  # nothing to fetch
        (folder / "sub/notes.json").unlink()
        with pytest.raises(hub.HubError, match="another process is fetching into"):
            got(tmp_path)
    assert got(tmp_path) == 0
    assert len(served.ranges) == 3
    served.files["set.zip"] = BIG + b"more"  # a new revision
    assert got(tmp_path) == 0
    assert (folder / "set.zip").read_bytes() == BIG + b"more"


@pytest.mark.slow
def test_a_file_that_is_cut_off_goes_on_where_it_was_also_in_another_process(served: Hub, tmp_path: Path):
    """Cut once at 3,000 bytes: the library goes on by itself. Cut for good at 5,000: the next run asks for
    the rest alone."""
    served.cuts = [3000, *[5000] * 7]
    with pytest.raises(
        hub.HubError,
        match=r"the connection failed after 0\.00 of 0\.00 GB, which are kept .*the same command goes on",
    ):
        got(tmp_path)
    (partial,) = (tmp_path / "data/set/.partial").iterdir()
    assert partial.read_bytes() == BIG[:5000]
    assert served.ranges[:3] == [None, "bytes=3000-", "bytes=5000-"]
    before = len(served.ranges)
    served.cuts = []
    environment = os.environ | {"HF_ENDPOINT": served.url, "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    script = (
        "from ans_core.hub import fetch; from ans_core.hub.catalogue import Published; from pathlib import Path; import sys;"
        "fetch.fetch(['set'], {'set': Published(repo='org/set', files=('*.zip',), into='data/set')}, root=Path(sys.argv[1]),"
        " into=None, yes=True)"
    )
    subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=environment, check=True, stdout=subprocess.DEVNULL
    )
    assert served.ranges[before:] == ["bytes=5000-"]
    assert (tmp_path / "data/set/set.zip").read_bytes() == BIG


@pytest.mark.parametrize("name", ["set.zip", "sub/notes.json"])  # by SHA-256 and by git's checksum
def test_a_file_with_a_wrong_checksum_is_thrown_away(served: Hub, tmp_path: Path, name: str):
    served.damaged = {name}
    with pytest.raises(
        hub.HubError,
        match=f"{name} has the checksum .* and should have .*; it was thrown away: fetch it again",
    ):
        got(tmp_path)
    assert not (tmp_path / "data/set" / name).exists()
    served.damaged = set()
    assert got(tmp_path) == 0
    assert (tmp_path / "data/set" / name).read_bytes() == FILES[name]


class SmallDisk(io.FileIO):
    """A file on a disk that is full after 4,000 bytes."""

    def write(self, content: Any) -> int:
        if self.tell() + len(content) > 4000:
            super().write(content[: 4000 - self.tell()])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def test_a_full_disk_is_told_before_or_while_a_file_is_written_and_what_came_is_kept(
    served: Hub, tmp_path: Path, monkeypatch
):
    real = Path.open

    def opened(path: Path, mode: str = "r", *more: Any, **named: Any) -> Any:
        return SmallDisk(path, mode) if mode == "ab" else real(path, mode, *more, **named)

    with monkeypatch.context() as small:
        small.setattr(Path, "open", opened)
        with pytest.raises(
            hub.HubError,
            match=r"the disk of .* is full, 0\.00 GB of this file are missing: free some; the same command",
        ):
            got(tmp_path)
    (partial,) = (tmp_path / "data/set/.partial").iterdir()
    assert partial.read_bytes() == BIG[:4000]
    assert got(tmp_path) == 0
    assert "bytes=4000-" in served.ranges
    with pytest.raises(
        hub.HubError, match=r"needs 9000000\.00 GB and its disk has .* left: free some, or give --into"
    ):
        hub.check_room(9 * 10**15, tmp_path / "nowhere yet")


def test_a_gated_set_asks_for_its_terms_and_a_token(served: Hub, tmp_path: Path, monkeypatch, capsys):
    served.gated = True
    with pytest.raises(
        hub.HubError,
        match=r"org/set is gated: accept its terms at http.*/datasets/org/set, then `hf auth login`",
    ):
        got(tmp_path)
    assert "licence: CC BY 4.0, gated: its terms must be accepted first" in capsys.readouterr().out
    monkeypatch.setenv("HF_TOKEN", served.token)
    assert got(tmp_path) == 0


def test_mistakes_are_named_with_their_remedy(served: Hub, tmp_path: Path, monkeypatch):
    with pytest.raises(hub.HubError, match=r"no name 'sett' \(did you mean 'set'\?\)"):
        fetch.fetch(["sett"], TABLE, root=tmp_path, into=None, yes=True)
    with pytest.raises(hub.HubError, match="nobody is there to ask; add --yes"):
        got(tmp_path, yes=False)
    (tmp_path / "mine/set").mkdir(parents=True)
    (tmp_path / "mine/set/set.zip").write_bytes(b"another")
    with pytest.raises(hub.HubError, match=r"set\.zip is there already and is not org/set's; move it away"):
        got(tmp_path, into=str(tmp_path / "mine"))
    assert (tmp_path / "mine/set/set.zip").read_bytes() == b"another"
    served.files = {"README.md": b"moved"}
    with pytest.raises(hub.HubError, match=r"has no file \*\.zip or \*\.json any more; it has README\.md"):
        got(tmp_path)
    served.repo = "org/elsewhere"
    with pytest.raises(hub.HubError, match=r"/org/set does not exist, or is private"):
        got(tmp_path)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(hub.HubError, match="the connection failed"):
        got(tmp_path)


def test_the_catalogue_names_folders_of_its_kind_and_is_listed(capsys):
    for table, folder in ((catalogue.DATA, "data"), (catalogue.WEIGHTS, "weights")):
        assert fetch.fetch([], table, root=Path(), into=None, yes=False) == 0
        told = capsys.readouterr().out
        for name, published in table.items():
            assert Path(published.into).parts[0] == folder
            assert published.repo in told
            assert name in told
