import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from ans_core.config import ConfigError, load, setting
from ans_core.fingerprint import fingerprint
from flows import cli, commands
from flows import launch as flows_launch
from flows.kept import RUN, recover, settings_of_run, settle
from flows.params import (
    MARK,
    digest,
    edited_keys,
    insert_sources,
    marked,
    rewrite,
    watch_sources,
    words_of,
    write,
    write_if_needed,
)
from tasks.process import held

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    return tmp_path


def add_source(folder: Path, root: Path) -> None:
    values = load(root / "params.yaml").model_dump(mode="json")
    insert_sources(values, [folder], None)
    rewrite(root, values)


def edit(root: Path, old: str, new: str) -> None:
    text = (root / "params.yaml").read_text()
    assert old in text
    (root / "params.yaml").write_text(text.replace(old, new, 1))


def test_a_profile_is_written_complete_and_switching_needs_no_force(workspace: Path) -> None:
    write("tiny", workspace)
    write("smoke", workspace)
    assert load(workspace / "params.yaml").profile == "smoke"


def test_the_fingerprints_that_a_run_writes_are_no_edits(workspace: Path) -> None:
    (workspace / "mine").mkdir()
    (workspace / "mine/annotations.json").write_text("[]")
    source = f"prepare.sources=[{{name: mine, format: annotations, path: {workspace / 'mine'}}}]"
    write("smoke", workspace, (source,))
    watch_sources(workspace)
    assert load(workspace / "params.yaml").prepare.sources[0].files
    assert edited_keys(workspace / "params.yaml") == []
    write("tiny", workspace)
    assert load(workspace / "params.yaml").profile == "tiny"


@pytest.mark.parametrize(
    ("word", "mixture"),
    [
        ("sft.mixture={referring: 0.5,\n  video: 0.5}", {"referring": 0.5, "video": 0.5}),
        ("base.internvl=a`b\u2028c", "a`b\u2028c"),
    ],
)
def test_settings_of_several_lines_and_with_backticks_are_read_again(
    workspace: Path, word: str, mixture: object
) -> None:
    write("tiny", workspace, (word,))
    load(workspace / "params.yaml")
    assert edited_keys(workspace / "params.yaml") == []
    (again,) = words_of((workspace / "params.yaml").read_text())
    assert setting(again) == (word.partition("=")[0], mixture)


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


@pytest.mark.slow
def test_if_needed_keeps_edits_and_words_of_the_same_profile_and_says_so(workspace: Path) -> None:
    write("tiny", workspace, ("rl.kl=0.5",))
    assert "rl.kl=0.5 kept" in write_if_needed("tiny", workspace)
    assert load(workspace / "params.yaml").rl.kl == 0.5
    edit(workspace, "seed: 0", "seed: 3")
    assert "your edits kept (seed)" in write_if_needed("tiny", workspace)
    with pytest.raises(ConfigError, match="edited by hand"):
        write_if_needed("smoke", workspace)


def drop(root: Path, line: str) -> None:
    """As a version that did not know the setting wrote the file: without it, and with the digest of what it
    wrote."""
    edit(root, line, "")
    text = (root / "params.yaml").read_text()
    mark = f"{MARK}{marked(root / 'params.yaml')}"
    (root / "params.yaml").write_text(text.replace(mark, MARK + digest(yaml.safe_load(text))))


def test_a_file_of_an_older_version_is_written_anew_and_keeps_its_words(workspace: Path) -> None:
    write("tiny", workspace, ("rl.kl=0.5", "sft.mixture={video: 1.0, referring: 2.0}"))
    new = (workspace / "params.yaml").read_text()
    drop(workspace, "  ema_warmup: false\n")
    assert edited_keys(workspace / "params.yaml") == []
    assert "with rl.kl=0.5 'sft.mixture={video: 1.0, referring: 2.0}' kept" in write_if_needed(
        "tiny", workspace
    )
    assert (workspace / "params.yaml").read_text() == new


@pytest.mark.slow
@pytest.mark.parametrize("upgrade", [lambda root: write_if_needed("tiny", root), watch_sources])
def test_an_edited_file_of_an_older_version_keeps_its_edits_and_gets_what_it_lacks(
    workspace: Path, upgrade: Callable[[Path], object]
) -> None:
    write("tiny", workspace)
    drop(workspace, "  ema_warmup: false\n")
    edit(workspace, "seed: 0", "seed: 3")
    assert edited_keys(workspace / "params.yaml") == ["seed"]  # a setting that is not there is no edit
    upgrade(workspace)
    values = yaml.safe_load((workspace / "params.yaml").read_text())
    assert (values["seed"], values["rl"]["ema_warmup"]) == (3, False)
    assert edited_keys(workspace / "params.yaml") == ["seed"]


def test_a_setting_that_is_gone_is_refused_with_the_nearest_name_and_the_file_stays(workspace: Path) -> None:
    write("tiny", workspace)
    edit(workspace, "  ema_warmup: false", "  ema_warm_up: true")
    text = (workspace / "params.yaml").read_text()
    with pytest.raises(
        ConfigError, match=r"params.yaml:\d+: rl.ema_warm_up: unknown setting .did you mean 'ema_warmup'"
    ):
        write_if_needed("tiny", workspace)
    assert (workspace / "params.yaml").read_text() == text


@pytest.mark.slow
def test_added_data_is_a_source_once_and_counts_as_an_edit(workspace: Path) -> None:
    (workspace / "mine").mkdir()
    (workspace / "mine/annotations.json").write_text(json.dumps([]))
    write("smoke", workspace)
    for _ in range(2):
        add_source(workspace / "mine", workspace)
    sources = yaml.safe_load((workspace / "params.yaml").read_text())["prepare"]["sources"]
    assert [(source["name"], source["format"]) for source in sources] == [("mine", "annotations")]
    assert edited_keys(workspace / "params.yaml") == ["prepare.sources"]


@pytest.mark.slow
def test_data_added_to_a_run_is_not_in_the_next_one(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (workspace / "mine").mkdir()
    (workspace / "mine/annotations.json").write_text("not JSON: the run fails")
    write("smoke", workspace)
    watch_sources(workspace)
    before, runs = (workspace / "params.yaml").read_text(), []

    def run_pipeline(here: Path, *, group: str, overrides: dict[str, Any]) -> int:
        with settings_of_run(here, overrides=overrides):
            runs.append(load(here / "params.yaml"))
        return 1

    monkeypatch.setattr(commands, "root", lambda: workspace)
    monkeypatch.setattr(flows_launch, "run_pipeline", run_pipeline)
    words = ["run", "rl.kl=0.25", "--add-data", str(workspace / "mine"), "--format", "annotations"]
    for _ in range(2):
        assert commands.run(cli.parse(words)) == 1
        assert (workspace / "params.yaml").read_text() == before
    ((source,),) = {run.prepare.sources for run in runs}
    assert (source.name, source.format, runs[0].rl.kl) == ("mine", "annotations", 0.25)


@pytest.mark.slow
def test_changed_files_of_a_data_set_change_its_settings_and_so_run_its_stages_again(workspace: Path) -> None:
    annotations = workspace / "mine/annotations.json"
    annotations.parent.mkdir()
    annotations.write_text(json.dumps([]))
    write("smoke", workspace)
    add_source(workspace / "mine", workspace)

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


@pytest.mark.slow
def test_changed_weights_behind_a_path_run_the_stages_again_that_start_from_them(workspace: Path) -> None:
    weights = workspace / "mine/model.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(b"one")
    words = (
        "base.source=published", "base.internvl=mine", "base.sam2=facebook/sam2-hiera-large",
        f"sft.lora_ranks_from={weights.parent}", "agent.sft.traces=mine",
    )  # fmt: skip
    write("smoke", workspace, words)

    def found() -> tuple[str, str, str]:
        values = yaml.safe_load((workspace / "params.yaml").read_text())
        return (
            values["base"]["files"],
            values["sft"]["lora_ranks_files"],
            values["agent"]["sft"]["traces_files"],
        )

    assert watch_sources(workspace) == []  # the first look
    first = found()
    assert first == (fingerprint(weights.parent),) * 3  # the hub id has none
    weights.write_bytes(b"another")
    assert watch_sources(workspace) == [f"params.yaml: the files of {name} have changed" for name in (
        "mine or facebook/sam2-hiera-large", weights.parent, "mine",
    )]  # fmt: skip
    assert found() == (fingerprint(weights.parent),) * 3 != first


@pytest.mark.parametrize("name", ["a.png", "data-00000-of-00001.arrow"])
def test_a_picture_that_is_edited_in_place_with_the_same_size_is_noticed(workspace: Path, name: str) -> None:
    picture = workspace / "mine" / name
    picture.parent.mkdir()
    (workspace / "mine/annotations.json").write_text("[]")
    picture.write_bytes(b"one")
    first, before = fingerprint(workspace / "mine"), picture.stat()
    assert fingerprint(workspace / "mine") == first
    picture.write_bytes(b"two")
    os.utime(picture, ns=(0, before.st_mtime_ns))
    assert fingerprint(workspace / "mine") == first  # it is not read
    os.utime(picture, ns=(0, picture.stat().st_mtime_ns + 1))  # clocks of file systems are coarse
    assert fingerprint(workspace / "mine") != first


def test_data_of_unknown_format_is_refused_before_anything_is_written(workspace: Path) -> None:
    write("smoke", workspace)
    (workspace / "odd").mkdir()
    with pytest.raises(ValueError, match="a published set needs --format"):
        add_source(workspace / "odd", workspace)
    assert edited_keys(workspace / "params.yaml") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "asked", [{"overrides": {"rl.kl": 0.25}}, {"profile": "tiny"}, {"profile": "smoke", "data": ["mine"]}]
)
def test_settings_of_a_run_are_gone_after_it(
    workspace: Path, asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(workspace)
    (workspace / "mine").mkdir()
    (workspace / "mine/annotations.json").write_text(json.dumps([]))
    write("smoke", workspace)
    edit(workspace, "seed: 0", "seed: 3  # by hand")
    watch_sources(workspace)
    before, values = (workspace / "params.yaml").read_text(), load(workspace / "params.yaml")
    with settings_of_run(workspace, **asked):
        config = load(workspace / "params.yaml")
        assert config != values
        # on top of what is there, edits too
        assert config.seed == (0 if asked.get("profile") == "tiny" else 3)
    assert (workspace / "params.yaml").read_text() == before


@pytest.mark.slow
def test_settings_of_a_killed_run_go_with_the_next_and_those_written_since_stay(workspace: Path) -> None:
    write("smoke", workspace)
    before = (workspace / "params.yaml").read_text()

    def killed_run() -> None:
        with settings_of_run(workspace, overrides={"rl.kl": 0.25}):
            note = (workspace / RUN).read_bytes()
            changed = (workspace / "params.yaml").read_text()
        (workspace / RUN).write_bytes(note)
        (workspace / "params.yaml").write_text(changed)

    killed_run()
    partial = workspace / "runs/smoke/base.partial"  # of its stage
    partial.mkdir(parents=True)
    assert recover(workspace) == [
        "a run with settings of its own was killed here: params.yaml is again as before it"
    ]
    assert (workspace / "params.yaml").read_text() == before
    assert not partial.exists()
    killed_run()
    write("tiny", workspace, force=True)
    assert recover(workspace) == []
    assert load(workspace / "params.yaml").profile == "tiny"


@pytest.mark.slow
def test_what_a_run_can_not_have_is_said_in_its_users_words_and_changes_nothing(workspace: Path) -> None:
    write("smoke", workspace)
    before = (workspace / "params.yaml").read_text()
    for asked, sentence in (
        ({"data": ["/nope"]}, "^/nope can't be added"),
        ({"overrides": {"rll.kl": 1}}, "did you mean 'rl'"),
    ):
        with pytest.raises(ConfigError, match=sentence), settings_of_run(workspace, **asked):
            pass
    assert (workspace / "params.yaml").read_text() == before
    assert not (workspace / RUN).exists()


@pytest.mark.slow
def test_edits_under_a_run_with_settings_of_its_own_are_safe_from_ans_profile(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write("smoke", workspace)
    edit(workspace, "seed: 0", "seed: 3")
    with settings_of_run(workspace, overrides={"rl.kl": 0.25}):
        with (
            held(workspace / ".ans/flow.lock", "full-pipeline"),
            pytest.raises(ConfigError, match="settings of a run at work, full-pipeline"),
        ):
            settle(workspace)
        settle(workspace)  # as if the run had been killed
    assert "params.yaml is again as before" in capsys.readouterr().out
    assert load(workspace / "params.yaml").seed == 3
    with pytest.raises(ConfigError, match="edited by hand: seed"):
        write("smoke", workspace)
