from pathlib import Path

import pytest
import yaml

from ans_core.config import Config
from tasks import lock_file
from tasks.deps import dvc_yaml, settings_read, unlisted_settings
from tasks.stages import AGENT, MEMORY, ONLINE, TABLE, Stage, needed_for

ROOT = Path(__file__).resolve().parents[1]


def test_dvc_yaml_is_what_the_table_says() -> None:
    assert (ROOT / "dvc.yaml").read_text() == dvc_yaml(), "run `make dvc`"
    for group in (AGENT, ONLINE):
        assert (ROOT / group / "dvc.yaml").read_text() == dvc_yaml(group), "run `make dvc`"


def test_the_agent_needs_the_model_that_it_starts_from_and_nothing_that_only_looks_at_it() -> None:
    needed = needed_for(AGENT, Config(profile="tiny"))
    names = [stage.name for stage in needed]
    assert names[:7] == ["prepare", "base", "memory", "sft", "judge_questions", "rl", "convert"]
    assert {stage.group for stage in needed[7:]} == {AGENT}
    assert len(names) == 7 + sum(stage.group == AGENT for stage in TABLE)


def test_learning_online_needs_the_agent_after_rl_and_none_of_its_figures() -> None:
    names = [stage.name for stage in needed_for(ONLINE, Config(profile="tiny"))]
    assert names[7:] == ["cota", "agent_sft@tools", "rft", "online"]


def test_a_sam2_alone_needs_no_stage_after_its_memory() -> None:
    assert [stage.name for stage in needed_for(MEMORY, Config(profile="tiny"))] == [
        "prepare",
        "base",
        "memory",
    ]


@pytest.mark.parametrize(("base", "before"), [
    ("/weights/sa2va", ["prepare"]),
    ("mine/sa2va", ["prepare"]),
    ("runs/tiny/base/base", ["prepare", "base"]),
    ("./runs/tiny/model", ["prepare", "base", "memory", "sft", "judge_questions", "rl", "convert"]),
])  # fmt: skip
def test_an_agent_that_starts_from_another_base_needs_no_more_than_leads_there(
    base: str, before: list[str]
) -> None:
    """The drawn expressions of `prepare` are part of the agent's SFT."""
    needed = needed_for(AGENT, Config.model_validate({"profile": "tiny", "agent": {"base": base}}))
    assert [stage.name for stage in needed if stage.group != AGENT] == before


def test_rows_wait_for_folders_that_published_weights_have_too() -> None:
    """An untrained model is there only where the base was trained here."""
    rows = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]["evaluate"]["foreach"]
    assert rows == {"untrained": "base/base", "base": "base/base", "sft": "base/base", "rl": "model"}


@pytest.mark.parametrize("stage", TABLE, ids=lambda stage: stage.name)
def test_a_stage_has_its_file_and_lists_the_settings_it_reads(stage: Stage) -> None:
    assert (ROOT / f"ans_core/stages/{stage.task}.py").is_file()
    assert unlisted_settings(stage, ROOT) == set()


def test_what_dvc_recorded_is_read_as_any_reader_of_yaml_reads_it() -> None:
    text = (ROOT / "dvc.lock").read_text()
    assert lock_file.parse(text) == yaml.safe_load(text)


def test_settings_read_are_found_and_methods_are_not(tmp_path: Path) -> None:
    file = tmp_path / "stage.py"
    file.write_text(
        "def run(cfg):\n    s = cfg.rl\n    return cfg.sft.optim.steps + cfg.seed + len(cfg.model_dump())"
    )
    assert settings_read(file) == {"rl", "sft.optim", "seed"}


def test_every_out_is_cached_but_the_headline_which_git_keeps_and_launch_is_nobodys_parameter() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert stages.pop("code")["outs"] == [{"runs/code.yaml": {"cache": False}}]
    for entry in (entry.get("do", entry) for entry in stages.values()):
        assert all(isinstance(out, str) for out in entry["outs"])  # a mapping would carry `cache: false`
        assert "launch" not in entry["params"]
        assert all(path.startswith("runs/") for path in entry.get("deps", ()))
    assert {name: entry["metrics"] for name, entry in stages.items() if "metrics" in entry} == {
        "report": [{"metrics/headline.json": {"cache": False}}]
    }


def test_every_plot_is_of_a_file_that_a_stage_writes_with_a_template_that_is_there() -> None:
    written = yaml.safe_load((ROOT / "dvc.yaml").read_text())
    folders = {
        out for entry in written["stages"].values() for out in entry.get("outs", ()) if isinstance(out, str)
    }
    plots = [plot for named in written["plots"] for plot in named.values()]
    assert {next(iter(plot["y"])) for plot in plots} == {
        f"runs/${{profile}}/{stage}/curves.csv" for stage in ("base", "memory", "sft", "rl")
    }
    for plot in plots:
        assert next(iter(plot["y"])).removesuffix("/curves.csv") in folders
        assert (ROOT / f".dvc/plots/{plot['template']}.json").is_file()
