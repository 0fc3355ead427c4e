import re
from pathlib import Path
from typing import get_args

import pytest
import yaml
from huggingface_hub.utils import validate_repo_id

from ans_core.config import Config, ConfigError, LoopName, RewardName, Rl, TextRewardName, load, resolve
from ans_core.rewards import CORPUS_REWARDS, REWARDS
from ans_core.rl import grpo
from ans_core.rl.curriculum import CURRICULA
from ans_core.rl.dual_loop import LOOPS
from ans_core.rl.mask_policy import MASK_POLICIES

ROOT = Path(__file__).resolve().parents[1]
PROFILES = ROOT / "profiles"


def written(tmp_path: Path, **changes: object) -> Path:
    path = tmp_path / "params.yaml"
    path.write_text(yaml.safe_dump({**resolve(PROFILES / "tiny.yaml"), **changes}, sort_keys=False))
    return path


def test_what_is_written_is_what_is_loaded(tmp_path: Path) -> None:
    assert load(written(tmp_path, seed=7)).seed == 7


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_profile_resolves_to_a_complete_valid_config(path: Path) -> None:
    values = resolve(path)
    assert values["profile"] == path.stem
    assert set(values) == set(Config.model_fields)
    assert Config.model_validate(values).model_dump(mode="json") == values


@pytest.mark.parametrize("path", sorted(PROFILES.glob("sa2va-*.yaml")), ids=lambda path: path.stem)
def test_a_published_base_is_named_as_the_hub_names_it(path: Path) -> None:
    base = Config.model_validate(resolve(path)).base
    for name in (base.internvl, base.sam2):
        validate_repo_id(name)
        assert name.count("/") == 1


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.strip().startswith("temperature:"))
    path.write_text("\n".join(lines).replace("  temperature:", "  temprature:"))
    with pytest.raises(ConfigError, match=rf"params.yaml:{at}: rl.temprature: unknown setting \(did you mean 'temperature'\?\)"):
        load(path)


def test_an_unknown_key_inside_a_list_is_located(tmp_path: Path) -> None:
    source = {"name": "a", "formt": "regions", "path": "x"}
    values = resolve(PROFILES / "tiny.yaml")
    values["prepare"]["sources"] = [source]
    with pytest.raises(ConfigError, match=r"params.yaml:\d+: prepare.sources.0.formt: unknown setting \(did you mean 'format'\?\)"):
        load(written(tmp_path, prepare=values["prepare"]))


def test_an_unknown_loop_is_refused(tmp_path: Path) -> None:
    values = resolve(PROFILES / "tiny.yaml")
    with pytest.raises(ConfigError, match=r"rl.loops.captoin.*Input should be 'caption', 'mask', 'describe' or 'vqa'"):
        load(written(tmp_path, rl=values["rl"] | {"loops": {"captoin": 1.0}}))


def test_an_unknown_reward_is_refused(tmp_path: Path) -> None:
    values = resolve(PROFILES / "tiny.yaml")
    with pytest.raises(ConfigError, match=r"rl.rewards_caption.metoer.*Input should be 'iou', 'soft_iou', 'meteor'"):
        load(written(tmp_path, rl=values["rl"] | {"rewards_caption": {"metoer": 1.0}}))


def test_the_names_that_rl_can_be_set_to_are_those_that_there_are() -> None:
    """Written down twice, so that reading settings loads no model code."""
    assert set(get_args(LoopName)) == set(LOOPS)
    assert set(get_args(RewardName)) == {*REWARDS, *CORPUS_REWARDS}
    assert set(get_args(TextRewardName)) <= set(get_args(RewardName))
    for field, known in (
        ("mask_policy", set(MASK_POLICIES)),
        ("curriculum", {"none", *CURRICULA}),
        ("objective", set(get_args(grpo.Form))),
    ):
        assert set(get_args(Rl.model_fields[field].annotation)) == known


def test_a_value_of_the_wrong_kind_is_refused_with_the_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"params.yaml:\d+: seed = 'many'"):
        load(written(tmp_path, seed="many"))


def test_a_missing_section_is_named_not_filled_in(tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    values = resolve(PROFILES / "tiny.yaml")
    del values["rl"]["kl"]
    path.write_text(yaml.safe_dump(values))
    with pytest.raises(ConfigError, match=r"lacks rl\.kl"):
        load(path)


def test_a_missing_file_and_broken_yaml_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not there: write it with `ans profile tiny`"):
        load(tmp_path / "params.yaml")
    (tmp_path / "params.yaml").write_text("a: [1")
    with pytest.raises(ConfigError, match="is no YAML"):
        load(tmp_path / "params.yaml")


def test_an_unknown_profile_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"no profile named 'tinny' .did you mean 'tiny'"):
        resolve(PROFILES / "tinny.yaml")


def test_words_override_one_key_and_keep_the_rest() -> None:
    plain, changed = (
        resolve(PROFILES / "tiny.yaml"),
        resolve(PROFILES / "tiny.yaml", ("sft.optim.steps=3", "rl.rewards_caption.iou=2")),
    )
    assert changed["sft"]["optim"] == {**plain["sft"]["optim"], "steps": 3}
    assert changed["rl"]["rewards_caption"] == {**plain["rl"]["rewards_caption"], "iou": 2.0}


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("sft.optim.stps=3", "did you mean 'steps'"),
        ("sftt.x=1", "no section 'sftt' .did you mean 'sft'"),
        ("seed", "write key=value"),
    ],
)
def test_a_mistyped_word_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(PROFILES / "tiny.yaml", (word,))


def test_a_free_table_in_a_profile_replaces_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("sft: {mixture: {video: 1.0}}")
    assert resolve(tmp_path / "mine.yaml")["sft"]["mixture"] == {"video": 1.0}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rl": {"lora": {"dropout": 0.1}}}, "lora.dropout is 0.1: what samples would be another policy than what learns"),
        ({"rl": {"rewards_caption": {}}}, "rl.rewards_caption"),
        ({"rl": {"rewards_mask": {"iou": 0.0}}}, "rewards_mask: all weights are 0"),
        ({"rl": {"entropy": -1}}, "rl.entropy"),
        ({"judge": {"model": "m", "base_url": "http://me:secret@host/v1"}}, "give a key by judge.api_key_env"),
        ({"judge": {"model": "m", "base_url": "https://host/v1?api_key=secret"}}, "give a key by judge.api_key_env"),
    ],
)
def test_rewards_and_judges_that_make_no_sense_are_refused(tmp_path: Path, changes: dict[str, object], told: str):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(changes))
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        resolve(tmp_path / "mine.yaml")
    assert "secret" not in str(refused.value)
