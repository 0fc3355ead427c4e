import json
import os
import shutil
from pathlib import Path

import pytest
import yaml

from ans_core.config import ConfigError, load
from flows.params import add_sources, edited_keys, fingerprint, watch_sources, write, write_if_needed

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    return tmp_path


def edit(root: Path, old: str, new: str) -> None:
    text = (root / "params.yaml").read_text()
    assert old in text
    (root / "params.yaml").write_text(text.replace(old, new, 1))


def test_a_profile_is_written_complete_and_switching_needs_no_force(workspace: Path) -> None:
    write("tiny", workspace)
    write("smoke", workspace)
    assert load(workspace / "params.yaml").profile == "smoke"


def test_edits_by_hand_are_not_dropped_without_force_and_are_named(workspace: Path) -> None:
    write("tiny", workspace)
    edit(workspace, "seed: 0", "seed: 3")
    with pytest.raises(ConfigError, match="edited by hand: seed"):
        write("smoke", workspace)
    assert load(workspace / "params.yaml").seed == 3
    write("smoke", workspace, force=True)
    assert load(workspace / "params.yaml").seed == 0


def test_a_changed_comment_or_layout_is_no_edit(workspace: Path) -> None:
    write("tiny", workspace)
    edit(workspace, "seed: 0", "seed:    0  # still zero")
    assert edited_keys(workspace / "params.yaml") == []


def test_if_needed_keeps_edits_and_words_of_the_same_profile_and_says_so(workspace: Path) -> None:
    write("tiny", workspace, ("rl.kl=0.5",))
    assert "rl.kl=0.5 kept" in write_if_needed("tiny", workspace)
    assert load(workspace / "params.yaml").rl.kl == 0.5
    edit(workspace, "seed: 0", "seed: 3")
    assert "your edits kept (seed)" in write_if_needed("tiny", workspace)
    with pytest.raises(ConfigError, match="edited by hand"):
        write_if_needed("smoke", workspace)


def test_added_data_is_a_source_once_and_counts_as_an_edit(workspace: Path) -> None:
    (workspace / "mine").mkdir()
    (workspace / "mine/annotations.json").write_text(json.dumps([]))
    write("smoke", workspace)
    for _ in range(2):
        add_sources([workspace / "mine"], None, workspace)
    sources = yaml.safe_load((workspace / "params.yaml").read_text())["prepare"]["sources"]
    assert [(source["name"], source["format"]) for source in sources] == [("mine", "annotations")]
    assert edited_keys(workspace / "params.yaml") == ["prepare.sources"]


def test_changed_files_of_a_data_set_change_its_settings_and_so_run_its_stages_again(workspace: Path) -> None:
    annotations = workspace / "mine/annotations.json"
    annotations.parent.mkdir()
    annotations.write_text(json.dumps([]))
    write("smoke", workspace)
    add_sources([workspace / "mine"], None, workspace)

    def files() -> str:
        return yaml.safe_load((workspace / "params.yaml").read_text())["prepare"]["sources"][0]["files"]

    assert watch_sources(workspace) == []  # the first look
    first, text = files(), (workspace / "params.yaml").read_text()
    assert first
    assert watch_sources(workspace) == []
    assert (workspace / "params.yaml").read_text() == text
    annotations.write_text(json.dumps({}))  # as long as before
    assert watch_sources(workspace) == [f"params.yaml: the files of {workspace / 'mine'} have changed"]
    assert files() != first
    annotations.write_text(json.dumps([]))
    (workspace / "mine/new.png").write_bytes(b"")
    watch_sources(workspace)
    assert files() != first


def test_a_picture_that_is_edited_in_place_with_the_same_size_is_noticed(workspace: Path) -> None:
    picture = workspace / "mine/a.png"
    picture.parent.mkdir()
    (workspace / "mine/annotations.json").write_text("[]")
    picture.write_bytes(b"one")
    first = fingerprint(workspace / "mine")
    assert fingerprint(workspace / "mine") == first
    picture.write_bytes(b"two")
    os.utime(picture, ns=(0, picture.stat().st_mtime_ns + 1))  # clocks of file systems are coarse
    assert fingerprint(workspace / "mine") != first


def test_data_of_unknown_format_is_refused_before_anything_is_written(workspace: Path) -> None:
    write("smoke", workspace)
    (workspace / "odd").mkdir()
    with pytest.raises(ValueError, match="name its format with --format"):
        add_sources([workspace / "odd"], None, workspace)
    assert edited_keys(workspace / "params.yaml") == []
