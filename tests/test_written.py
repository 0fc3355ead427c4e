"""Files that appear whole or not at all."""

import subprocess
import sys
from pathlib import Path

import pytest

from ans_core.written import write_atomically
from tests.workspace import ROOT


def test_the_file_that_a_link_names_is_written(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "there/params.yaml").write_text("1")
    (tmp_path / "params.yaml").symlink_to("there/params.yaml")
    write_atomically(tmp_path / "params.yaml", "2")
    assert (tmp_path / "params.yaml").is_symlink()
    assert (tmp_path / "there/params.yaml").read_text() == "2"


def test_a_file_that_is_mounted_by_itself_is_overwritten(tmp_path: Path) -> None:
    """As params.yaml in a container."""
    mine, file = tmp_path / "mine.yaml", tmp_path / "params.yaml"
    mine.write_text("1")
    file.write_text("0")
    write = f"from pathlib import Path; from ans_core.written import write_atomically; write_atomically(Path({str(file)!r}), '2')"
    done = subprocess.run(
        ["unshare", "--map-root-user", "--mount", "sh", "-c", 'mount --bind "$1" "$2" || exit 77; "$3" -c "$4"',
         "sh", mine, file, sys.executable, write],
        cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"no mounts here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert (mine.read_text(), file.read_text()) == ("2", "0")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.yaml", "params.yaml"]
