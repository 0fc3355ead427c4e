import functools
import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from huggingface_hub.serialization._base import parse_size_to_int
from huggingface_hub.utils import validate_repo_id
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ans_core.agent.world import FAMILIES
from ans_core.benchmarks import BENCHMARKS
from ans_core.benchmarks.registry import SCORERS
from ans_core.config import (
    Config,
    ConfigError,
    LoopName,
    RewardName,
    Rl,
    TextRewardName,
    dump,
    load,
    names,
    read_yaml,
    require_samples,
    resolve,
    yaml_file,
)  # fmt: skip
from ans_core.config.evaluate import Evaluate
from ans_core.config.names import OTHER_NAMES
from ans_core.config.read import _flat, completed
from ans_core.config.section import SYNONYMS
from ans_core.data import Kind
from ans_core.data.formats import FORMATS
from ans_core.model.config import VideoMode
from ans_core.rewards import CORPUS_REWARDS, REWARDS
from ans_core.rl import grpo
from ans_core.rl.dual_loop import LOOPS
from ans_core.stages.evaluate import LOOPS as LOOP_BENCHMARK

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
    assert completed(values, PROFILES.parent) == (values, []), (
        "what a profile writes, the reader misses nothing in"
    )


@pytest.mark.parametrize("path", sorted(PROFILES.glob("sa2va-*.yaml")), ids=lambda path: path.stem)
def test_a_published_base_is_named_as_the_hub_names_it(path: Path) -> None:
    base = Config.model_validate(resolve(path)).base
    assert bool(base.sam2) != path.stem.endswith("-rl"), "RL alone starts from a whole Sa2VA"
    for name in filter(None, (base.internvl, base.sam2)):
        validate_repo_id(name)
        assert name.count("/") == 1


@pytest.mark.parametrize("path", sorted(PROFILES.glob("sa2va-*.yaml")), ids=lambda path: path.stem)
def test_a_full_size_profile_has_what_rl_learned_on_tiny_models(path: Path) -> None:
    full, tiny = resolve(path)["rl"], resolve(PROFILES / "tiny.yaml")["rl"]
    for name in ("modules_lr", "ema", "ema_warmup", "kl_words"):
        assert full[name] == tiny[name]
    # which the sets of these profiles have nothing for
    lacking = {"refer"} if path.stem.endswith("-rl") else set()
    assert full["loops"] == {name: weight for name, weight in tiny["loops"].items() if name not in lacking}


def test_an_unknown_key_is_refused_with_its_line_and_the_nearest_name(tmp_path: Path) -> None:
    path = written(tmp_path)
    lines = path.read_text().splitlines()
    at = next(number for number, line in enumerate(lines, 1) if line.strip().startswith("temperature:"))
    path.write_text("\n".join(lines).replace("  temperature:", "  temprature:"))
    with pytest.raises(
        ConfigError,
        match=rf"params.yaml:{at}: rl.temprature: unknown setting \(did you mean 'temperature'\?\)",
    ):
        load(path)


def test_an_unknown_key_inside_a_list_is_located(tmp_path: Path) -> None:
    source = {"name": "a", "formt": "regions", "path": "x"}
    values = resolve(PROFILES / "tiny.yaml")
    values["prepare"]["sources"] = [source]
    with pytest.raises(
        ConfigError,
        match=r"params.yaml:\d+: prepare.sources.0.formt: unknown setting \(did you mean 'format'\?\)",
    ):
        load(written(tmp_path, prepare=values["prepare"]))


def test_an_unknown_loop_is_refused(tmp_path: Path) -> None:
    values = resolve(PROFILES / "tiny.yaml")
    with pytest.raises(
        ConfigError,
        match=r"rl.loops.captoin.*Input should be 'caption', 'mask', 'refer', 'ground', .* or 'agent'",
    ):
        load(written(tmp_path, rl=values["rl"] | {"loops": {"captoin": 1.0}}))


def test_an_unknown_reward_is_refused(tmp_path: Path) -> None:
    values = resolve(PROFILES / "tiny.yaml")
    with pytest.raises(
        ConfigError, match=r"rl.rewards_caption.metoer.*Input should be 'iou', 'soft_iou', 'meteor'"
    ):
        load(written(tmp_path, rl=values["rl"] | {"rewards_caption": {"metoer": 1.0}}))


def test_the_names_that_settings_can_hold_are_those_that_there_are() -> None:
    """Written down twice, so that reading settings loads no model code."""
    assert set(names.FORMATS) == set(FORMATS)
    assert set(names.FAMILIES) == set(FAMILIES)
    assert set(names.BENCHMARKS) == {*BENCHMARKS, LOOP_BENCHMARK}
    assert sorted(SCORERS) == list(names.SCORED)
    assert {OTHER_NAMES.get(name, name) for name in names.PUBLIC} == {
        name for name, scorer in SCORERS.items() if scorer.runner
    }
    # these have one half of a pair: no share of a mixture
    assert {*names.DATA_KINDS, "masks", "phrases"} == set(get_args(Kind))
    assert get_args(Evaluate.model_fields["video_mode"].annotation) == ("auto", *get_args(VideoMode))
    assert set(get_args(LoopName)) == set(LOOPS)
    assert set(get_args(RewardName)) == {*REWARDS, *CORPUS_REWARDS}
    assert set(get_args(TextRewardName)) <= set(get_args(RewardName))
    for field, known in (("objective", set(get_args(grpo.Form))),):
        assert set(get_args(Rl.model_fields[field].annotation)) == known


def test_a_value_of_the_wrong_kind_is_refused_with_the_value(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"params.yaml:\d+: seed = 'many'"):
        load(written(tmp_path, seed="many"))


def test_reading_settings_loads_no_model_code() -> None:
    heavy = "print({'torch', 'transformers', 'numpy', 'ans_core.benchmarks', 'ans_core.data'} & set(__import__('sys').modules))"
    code = f"import ans_core.config; {heavy}"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True
        ).stdout
        == "set()\n"
    )


def test_a_key_that_an_older_version_did_not_have_gets_the_profiles_value_and_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "profiles").symlink_to(PROFILES)
    values = resolve(PROFILES / "tiny.yaml", ("rl.ema=0.5",))
    del values["rl"]["ema_warmup"], values["convert"]
    path = tmp_path / "params.yaml"
    path.write_text(dump(values))
    for _ in range(2):
        config = load(path)
    # the default of ema_warmup is true
    assert (config.rl.ema, config.rl.ema_warmup, config.convert.max_shard) == (0.5, False, "5GB")
    told = f"{path} lacks rl.ema_warmup, convert.max_shard: taken from profile tiny; `ans profile tiny --if-needed` writes them in\n"
    assert capsys.readouterr().err == told


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
        ("sft.learning_rate=1e-4", r"did you mean 'sft.optim.lr'\?"),
        ("sft.lr=1e-4", r"did you mean 'sft.optim.lr'\?"),
        (
            "training.lr=1e-4",
            "no section 'training' .did you mean 'memory.optim.lr' or 'sft.optim.lr' or 'rl.optim.lr'",
        ),
        ("sft.seed=1", r"did you mean 'seed'\?"),
        ("num_generations=8", r"did you mean 'rl.group'\?"),
        (
            "launch.resources={prepare: {cpu: 3}}",
            r"launch.resources.prepare.cpu: unknown setting \(did you mean 'cpus'\?\)",
        ),
        ("launch.resources={prepare: {gpus: 3}}", "prepare: gpus is 3, and it uses none; give cpus"),
        ("rl.beta=0.1", r"did you mean 'rl.kl'\?"),
        ("rl.max_grad_norm=1", r"did you mean 'rl.optim.clip_grad'\?"),
        ("epochs=2", r"did you mean 'memory.optim.epochs' or 'sft.optim.epochs' or 'rl.optim.epochs'\?"),
        ("sft.num_train_epochs=2", r"did you mean 'sft.optim.epochs'\?"),
        ("agent.rft.optim.epochs=2", r"there are \['steps', 'batch'"),
        (
            "prepare.sources.0=1",
            r"prepare.sources has no keys; give its value as a whole, as prepare.sources=\[\]",
        ),
        ("profile=smoke", "`ans profile smoke`"),
        ("seed", "write key=value"),
        ("rl.kl=true", "'rl.kl=true': rl.kl = True: Input should be a valid number"),
        ("rl.kl=[1", r"'rl.kl=\[1':1 is no YAML"),
    ],
)
def test_a_mistyped_word_is_refused(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(PROFILES / "tiny.yaml", (word,))


@pytest.mark.slow
def test_every_synonym_leads_to_a_setting_and_hides_none() -> None:
    names = [f".{name}" for name in _flat(Config(profile="none").model_dump(mode="json"))]
    for word, name in SYNONYMS.items():
        assert any(full.endswith(f".{name}") for full in names), name
        with pytest.raises(ConfigError, match=rf"did you mean '[\w.]*{name}'"):
            resolve(PROFILES / "tiny.yaml", (f"{word}=1",))


def test_steps_and_epochs_displace_each_other_and_are_refused_together(tmp_path: Path) -> None:
    def lengths(*words: str, profile: Path = PROFILES / "tiny.yaml") -> tuple[int, float, int]:
        values = resolve(profile, words)
        return (
            values["sft"]["optim"]["steps"],
            values["sft"]["optim"]["epochs"],
            values["rl"]["optim"]["steps"],
        )

    assert lengths("sft.optim.epochs=2") == (0, 2.0, 180)
    (tmp_path / "tiny.yaml").symlink_to(PROFILES / "tiny.yaml")
    long = tmp_path / "long.yaml"
    long.write_text("extends: tiny\nsft:\n  optim: {epochs: 3}\n")
    assert lengths(profile=long) == (0, 3.0, 180)
    assert lengths("sft.optim.steps=7", profile=long) == (7, 0.0, 180)
    with pytest.raises(
        ConfigError,
        match=r"'sft.optim.epochs=2': .*2 epochs and 3 steps are both given; set one of them to 0",
    ):
        lengths("sft.optim.epochs=2", "sft.optim.steps=3")
    with pytest.raises(
        ConfigError, match=r"rl.optim.steps: optim.steps and optim.epochs are both 0: nothing is learned"
    ):
        lengths("rl.optim.steps=0")


@pytest.mark.parametrize(
    ("profile", "what"),
    [("sa2va-4b", "joined with a SAM2 has random text_hidden_fcs"), ("tiny", "has not learned")],
)
def test_a_base_without_seg_is_not_passed_through(profile: str, what: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"'sft.optim.steps=0': sft.optim.steps: .*{what}.* start from a Sa2VA"
    ):
        resolve(PROFILES / f"{profile}.yaml", ("sft.optim.steps=0",))


@pytest.mark.parametrize("path", sorted(PROFILES.glob("*-rl.yaml")), ids=lambda path: path.stem)
def test_a_profile_of_rl_alone_trains_from_a_release_and_is_evaluated_on_pictures_that_it_holds_out(
    path: Path,
) -> None:
    config = Config.model_validate(resolve(path, ("base.internvl=runs/mine/model",)))
    assert (config.sft.optim.steps, config.sft.optim.epochs, config.base.sam2) == (0, 0.0, "")
    assert all(source.hold_out and source.format == "region_arrow" for source in config.prepare.sources)
    assert {"loops", "region_caption"} == {*config.evaluate.benchmarks}
    assert [(one.name, one.split) for one in config.evaluate.public] == [
        ("dlc_bench", ""),
        ("refcoco", "val"),
    ]


def test_an_empty_word_empties_a_text_and_nothing_is_held_out_of_what_is_evaluated_alone() -> None:
    assert resolve(PROFILES / "sa2va-1b.yaml", ("base.sam2=",))["base"]["sam2"] == ""
    with pytest.raises(ConfigError, match=r"evaluate.sources.0.hold_out: all of it is evaluated"):
        resolve(
            PROFILES / "tiny.yaml", ("evaluate.sources=[{name: a, format: coco, path: x, hold_out: 0.1}]",)
        )


def test_a_free_table_in_a_profile_replaces_the_default_one(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("sft: {mixture: {video: 1.0}}")
    assert resolve(tmp_path / "mine.yaml")["sft"]["mixture"] == {"video": 1.0}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"rl": {"lora": {"dropout": 0.1}}},
            "rl.lora.dropout: lora.dropout is 0.1: what samples would be another policy than what learns",
        ),
        ({"rl": {"rewards_caption": {}}}, "rl.rewards_caption"),
        ({"rl": {"rewards_mask": {"iou": 0.0}}}, "rewards_mask: all weights are 0"),
        ({"rl": {"entropy": -1}}, "rl.entropy"),
        (
            {"judge": {"model": "m", "base_url": "http://me:secret@host/v1"}},
            "give a key by judge.api_key_env",
        ),
        (
            {"judge": {"model": "m", "base_url": "https://host/v1?api_key=secret"}},
            "give a key by judge.api_key_env",
        ),
    ],
)
def test_rewards_and_judges_that_make_no_sense_are_refused(
    tmp_path: Path, changes: dict[str, object], told: str
):
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(changes))
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        resolve(tmp_path / "mine.yaml")
    assert "secret" not in str(refused.value)


def changed(tmp_path: Path, **sections: dict[str, Any]) -> Path:
    """params.yaml of tiny with some settings changed, by section."""
    values = resolve(PROFILES / "tiny.yaml")
    return written(tmp_path, **{name: values[name] | changes for name, changes in sections.items()})


DATA = {"name": "mine", "format": "regions", "path": "data/mine", "split": "train"}
OWN_AGENT = "runs/tiny/agent/sft/tools"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("section", "changes", "told"),
    [
        ("evaluate", {"benchmarks": ["video", "refering"]}, "evaluate.benchmarks.1 = 'refering': no such name (did you mean 'referring'?)"),
        ("evaluate", {"optional": ["vidoe"]}, "evaluate.optional.0 = 'vidoe': no such name (did you mean 'video'?)"),
        ("evaluate", {"benchmarks": ["video", "video"]}, "evaluate.benchmarks.1: 'video' stands there twice"),
        ("evaluate", {"split": "vall"}, "evaluate.split: no data set has a split 'vall' (did you mean 'val'?)"),
        ("prepare", {"test_scenes": 0}, "evaluate.benchmarks.0: 'referring' has no samples: prepare draws no scenes of split 'test'"),
        ("prepare", {"test_clips": 0}, "evaluate.benchmarks.3: 'video' has no samples: prepare draws no clips of split 'test'"),
        ("prepare", {"val_clips": 0, "val_scenes": 0}, "nothing to follow: prepare.val_clips = prepare.val_scenes = 0, and"),
        ("prepare", {"caption_share": 0.3, "mask_share": 0.7}, "prepare.mask_share: with caption_share it makes 1: no picture has both"),
        ("sft", {"mixture": {"vidoe": 1.0}}, "sft.mixture.vidoe: no kind of data and no name in prepare.sources (did you mean 'video'?)"),
        ("sft", {"mixture": {"video": 0.0}}, "sft.mixture: mixture: all weights are 0, so nothing is trained on"),
        ("base", {"mixture": {"refering": 1.0}}, "base.mixture.refering = 'refering': no such name (did you mean 'referring'?)"),
        ("prepare", {"sources": [DATA | {"format": "region"}]}, "prepare.sources.0.format = 'region': no such name (did you mean"),
        ("prepare", {"sources": [DATA, {**DATA}]}, "prepare.sources.1.name: 'mine' is the name of another data set"),
        ("prepare", {"sources": [DATA | {"name": "video"}]}, "prepare.sources.0.name: 'video' is the name of a kind of data"),
        ("agent", {"families": []}, "agent.families: there is none, and no source: name some families, or agent.sources"),
        ("agent", {"sources": [DATA | {"split": "Part1"}]}, "agent.sources.0.split: no stage of the agent reads a split 'Part1'"),
        ("agent", {"sources": [DATA, {**DATA}]}, "agent.sources.1.name: 'mine' is the name of another data set"),
        ("agent", {"sources": [DATA | {"repeats": 2}]}, "agent.sources.0.repeats: families of questions take turns"),
        ("agent", {"sources": [DATA, DATA | {"name": "again", "hold_out": 0.2}]}, "agent.sources.1.hold_out: another of"),
        ("convert", {"max_shard": "5XB"}, "convert.max_shard = '5XB': no size: write a number and KB, MB, GB or TB"),
        ("launch", {"device": "cdua"}, "launch.device = 'cdua': Input should be 'auto', 'cpu' or 'cuda' (did you mean 'cuda'?)"),
        ("launch", {"device": "gpu"}, "did you mean 'cuda'?)"),
        ("base", {"template": "qwen_chta"}, "(did you mean 'qwen_chat'?)"),
        ("base", {"source": "published"}, "base.internvl: internvl is empty: base.source is published"),
        ("base", {"language": {"heads": 4, "kv_heads": 3}}, "base.language.kv_heads: 4 is no multiple of 3"),
        ("base", {"language": {"hidden": 161}}, "base.language.hidden: 161 is no multiple of 8: heads share it"),
        ("base", {"vision": {"heads": 3}}, "base.vision.hidden: 128 is no multiple of 3: heads share it"),
        ("base", {"vision": {"image_size": 100}}, "base.vision.image_size: 100 is no multiple of 16"),
        ("base", {"sam": {"global_blocks": [4, 7]}}, "base.sam.global_blocks.1: there is no block 7; stages have 7"),
        ("sft", {"optim": {"steps": 10**30, "batch": 1, "lr": 0.1}}, "sft.optim.steps = 1000000000000000000000000000000: Input should be"),
        ("rl", {"optim": {"steps": 1, "batch": 4, "lr": 0.1, "accumulate": 8}}, "rl.optim.batch: 4 is less than a sample for each of 8"),
        ("launch", {"processes": 9}, "memory.optim.batch: 6 is less than a sample for each of 1 micro-batches (accumulate) on each of 9"),
        ("launch", {"deepspeed_stage": 2}, "memory.optim.muon_lr: Muon needs whole matrices, and DeepSpeed divides the optimizer"),
        ("rl", {"use_llm_judge": True, "rewards_caption": {"iou": 1.0}}, "rl.use_llm_judge: METEOR and judge pay together"),
        ("rl", {"use_llm_judge": True, "rewards_caption": {"iou": 1.0, "meteor": 0.0}}, "rl.use_llm_judge: METEOR and judge pay together"),
        ("rl", {"loops": {"agent": 1.0}}, "rl.loops: 'agent' is the loop of the stage `rft`"),
        ("rl", {"loops": {"vqa": 1.0}}, "rl.loops: 'vqa' wants questions about pictures, which drawn scenes have none of"),
        ("agent", {"sft": {"optim": {"steps": 1, "batch": 8, "lr": 0.1, "accumulate": 7}}}, "6 traces a step can't be shared out to 7"),
        ("agent", {"sft": {"whole": True, "lora_ranks_from": "full"}}, "agent.sft.whole: whole copies have no ranks to take from"),
        ("agent", {"sft": {"whole": False, "lora_ranks_from": OWN_AGENT}}, f"{OWN_AGENT} is removed and made anew by this profile's own"),
    ],
)  # fmt: skip
def test_what_can_not_be_is_refused_at_its_line_with_the_nearest_name(
    tmp_path: Path, section: str, changes: dict[str, Any], told: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(told)) as refused:
        load(changed(tmp_path, **{section: changes}))
    place, key = re.match(r"\S*params\.yaml:(\d+): ([\w.]+)", str(refused.value)).groups()  # type: ignore[union-attr]
    line = (tmp_path / "params.yaml").read_text().splitlines()[int(place) - 1]
    names_in_line = key.split(".")[-1] if not key[-1].isdigit() else "-"
    # the section's line, where the file lacks the key
    assert names_in_line in line or key.split(".")[-2] in line


def test_rows_beside_rl_are_enough_for_all_processes_or_refused_before_sft() -> None:
    optim = {"steps": 1, "batch": 8, "lr": 0.1}
    values = {
        "profile": "own",
        "rl": {"rows": 4, "optim": optim},
        "sft": {"optim": optim},
        "memory": {"optim": optim},
    }
    Config.model_validate(values | {"launch": {"processes": 4}})
    with pytest.raises(ValueError, match=r"4 is less than a row for each of 1 micro-batches .* give 8, or 0"):
        Config.model_validate(values | {"launch": {"processes": 8}})


@pytest.mark.parametrize(
    ("words", "lacking"),
    [
        ("prepare.val_clips=0", "prepare.val_clips = prepare.val_scenes"),
        # no scenes at all
        ("prepare.val_clips=0 prepare.val_scenes=2", "prepare.val_clips = prepare.val_scenes"),
        ("memory.image_share=0.5", "prepare.scenes"),
        ("prepare.clips=0 prepare.scenes=4 prepare.val_scenes=2", "prepare.clips"),
        ("prepare.clips=0 prepare.scenes=4 prepare.val_scenes=2 memory.image_share=1", ""),
    ],
)
def test_drawn_clips_or_stills_that_memory_training_needs_must_be_drawn(words: str, lacking: str) -> None:
    told = re.escape(f"nothing to follow: {lacking} = 0, and prepare.sources names no data set")
    with pytest.raises(ConfigError, match=told) if lacking else nullcontext():
        resolve(PROFILES / "sam2-memory.yaml", tuple(words.split()))


def test_the_memory_of_a_sam2_alone_is_trained_or_measured() -> None:
    with pytest.raises(
        ConfigError, match=r"memory\.train: base\.source is sam2, whose memory is neither trained nor"
    ):
        resolve(PROFILES / "sam2-memory.yaml", ("memory.train=false",))
    resolve(PROFILES / "sam2-memory.yaml", ("memory.train=false", "memory.validate_only=true"))


def test_a_data_set_of_ones_own_can_be_mixed_by_name_and_brings_its_splits(tmp_path: Path) -> None:
    config = load(changed(
        tmp_path, prepare={"sources": [DATA | {"split": "testA"}]}, sft={"mixture": {"mine": 1.0}}, evaluate={"split": "testA"}
    ))  # fmt: skip
    assert (config.sft.mixture, config.evaluate.split) == ({"mine": 1.0}, "testA")


@pytest.mark.slow
@pytest.mark.parametrize("size", ["5GB", "500MB", "1.5TB", "200 KB"])
def test_a_size_that_is_taken_is_one_to_the_hub_too(tmp_path: Path, size: str) -> None:
    assert parse_size_to_int(load(changed(tmp_path, convert={"max_shard": size})).convert.max_shard) > 0


def test_a_benchmark_without_samples_is_an_error_unless_it_is_optional() -> None:
    evaluate = Config.model_validate(
        {"profile": "a", "evaluate": {"benchmarks": ["referring", "video"], "optional": ["video"]}}
    ).evaluate
    require_samples(evaluate, {"referring"})
    with pytest.raises(
        ConfigError, match=r"no data set has samples of split 'val' for referring of evaluate\.benchmarks"
    ):
        require_samples(evaluate, {"video", "region_caption"})


def test_a_profile_extends_another_and_faults_are_told_where_they_stand(tmp_path: Path) -> None:
    (tmp_path / "large.yaml").write_text("rl:\n  kl: 0.5\n  ema: 0.9\nsft: {mixture: {video: 1.0}}\n")
    (tmp_path / "larger.yaml").write_text(
        "extends: large\nrl:\n  kl: 0.25\nsft: {mixture: {referring: 1.0}}\n"
    )
    values = resolve(tmp_path / "larger.yaml")
    assert (values["profile"], values["rl"]["kl"], values["rl"]["ema"]) == ("larger", 0.25, 0.9)
    assert values["sft"]["mixture"] == {"referring": 1.0}
    (tmp_path / "large.yaml").write_text("rl:\n  kl: 0.5\n  ema: 9\n")
    with pytest.raises(
        ConfigError, match=r"large.yaml:3: rl.ema = 9: Input should be less than or equal to 1"
    ):
        resolve(tmp_path / "larger.yaml")
    (tmp_path / "large.yaml").write_text("extends: larger\n")
    with pytest.raises(ConfigError, match=r"larger.yaml extends itself, by \['larger', 'large'\]"):
        resolve(tmp_path / "larger.yaml")
    (tmp_path / "large.yaml").write_text("extends: lrager\n")
    with pytest.raises(ConfigError, match=r"no profile named 'lrager' .did you mean 'larger'"):
        resolve(tmp_path / "large.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("a: 1\nb:\n  c: 1\n  c: 2", ":4: b.c stands there twice, first in line 3"),
        ("a: &x 1\nb: *x", "b is an alias"),
        ("a: 2020-01-01", ":1: a is no text, number, true, false, list or table (but timestamp)"),
        ("a: !!python/object/apply:os.getcwd []", ":1: a is no text"),
        ("a: !!set {x, y}", ":1: a is no text"),
        ("seed: " + "1" * 5000, ":1: seed is no value"),
        ("a: !!int x", ":1: a is no value"),
        ("b: 1\n3: 1", ":2: the whole has a key that is no name: '3'"),
        ("a: " + "[" * 1000, "nested too deeply"),
        ("a: 1\n---\na: 2", ":2 is no YAML"),
        ("a:\n\tb: 1", ":2 is no YAML"),
        ("a: \0", "is no YAML"),
        ("- 1", ":1: must hold `key: value` lines, it holds list"),
        ("", ":1: must hold `key: value` lines, it holds nothing"),
    ],
)
def test_what_is_no_plain_yaml_is_refused_by_line(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(told)):
        read_yaml(path)
    path.write_bytes(b"a: 1\nb: \xff")
    with pytest.raises(ConfigError, match=r"params\.yaml:2: not UTF-8"):
        read_yaml(path)


def test_values_are_read_as_dvc_reads_them_and_come_back_as_they_were_written(tmp_path: Path) -> None:
    from dvc.utils.serialize import load_yaml

    path = tmp_path / "params.yaml"
    path.write_text("a: 1:30\nb: yes\nc: 0o17\nd: 1e-4\ne: 010\nf: off\ng: 1_000\nh: 'x'\n")
    values = read_yaml(path).values
    assert (
        values
        == load_yaml(path)
        == {"a": "1:30", "b": "yes", "c": 15, "d": 1e-4, "e": 10, "f": "off", "g": 1000, "h": "x"}
    )
    path.write_text(dump(values | {"i": "1e-4", "j": "null", "k": "", "l": 1e-7, "m": "a\nb: 1", "n": "010"}))
    assert read_yaml(path).values == load_yaml(path)
    assert read_yaml(path).values["i"] == "1e-4"


def test_a_number_that_is_written_is_a_number_to_readers_of_older_yaml_too() -> None:
    numbers = {"a": 3e-5, "b": 1.5e-7, "c": 1e20, "d": 1e-4, "e": -2e-9}
    assert yaml.safe_load(dump(numbers)) == numbers
    assert yaml_file.parse(dump(numbers), source="")[0] == numbers


TINY = dump(resolve(PROFILES / "tiny.yaml", ("prepare.sources=[{name: mine, format: regions, path: x}]",)))
EVERYWHERE = ("null", "{a: 1}", "[[]]", "2020-01-01", "*x", "!!binary aGk=")
WRONG = {
    dict: ("true", "3", "word", "[a]"),
    int: (
        "true",
        "1:30",
        "1.5",
        "1e3",
        ".inf",
        ".nan",
        "-1",
        "1" + "0" * 30,
        "'3'",
        "[1]",
        "yes",
        "1" * 5000,
    ),
    float: ("true", "1:30", ".inf", "-.inf", ".nan", "1e999", "-0.5", "'1'", "[]", "yes"),
    bool: ("yes", "on", "1", "0", "'true'", "1.0"),
    str: ("3", "true", "1.5", "[a]"),
    list: ("3", "text", "true", "!!set {a}"),
}
"""What a setting of each type can never be."""


@functools.cache
def leaves() -> list[tuple[tuple[str, ...], int, type]]:
    """Keys, line and type of everything in TINY that has a line of its own."""
    values, lines = yaml_file.parse(TINY, source="")
    found = []
    for keys, line in lines.items():
        value: Any = values
        for key in keys:
            value = value[int(key)] if isinstance(value, list) else value[key]
        if not value or not isinstance(value, dict | list):
            found.append((keys, line, type(value)))
    return found


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(data=st.data())
def test_no_setting_takes_a_value_that_it_can_not_have(tmp_path: Path, data: st.DataObject) -> None:
    keys, number, kind = data.draw(st.sampled_from(leaves()))
    path, lines = tmp_path / "params.yaml", TINY.splitlines()
    start = re.match(r"( *(- )*(\w+:)?) ?", lines[number - 1]).group(1)  # type: ignore[union-attr]
    match data.draw(st.sampled_from(["value", "value", "value", "key", "twice"])):
        case "value":
            lines[number - 1] = f"{start.rstrip()} {data.draw(st.sampled_from(WRONG[kind] + EVERYWHERE))}"
        case "key" if not keys[-1].isdigit():
            lines[number - 1] = lines[number - 1].replace(f"{keys[-1]}:", f"{keys[-1]}x:")
            keys = (*keys[:-1], f"{keys[-1]}x")
        case "twice" if not keys[-1].isdigit():
            lines.insert(
                number, " " * (2 * lines[number - 1].count("- ")) + lines[number - 1].replace("- ", "")
            )
            number += 1
        case _:
            return
    path.write_text("\n".join(lines))
    with pytest.raises(ConfigError) as refused:
        load(path)
    place = f"{path}:{number}"
    assert any(
        f"{place}: {'.'.join(keys)}" in line or f"{place} is no YAML" in line
        for line in str(refused.value).splitlines()
    )


@pytest.mark.slow
@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(
    at=st.integers(0, len(TINY)),
    cut=st.integers(0, 40),
    new=st.text(alphabet=st.sampled_from("\n\t :-[]{}&*!|>'\"%@`,?#.e0123xyz_~=<é\u2028\x00"), max_size=12),
)
@example(at=0, cut=0, new="%YAML 1.1\n---\n")
def test_whatever_is_typed_into_params_yaml_gives_settings_or_our_own_error(
    tmp_path: Path, at: int, cut: int, new: str
) -> None:
    path = tmp_path / "params.yaml"
    path.write_text(TINY[:at] + new + TINY[at + cut :])
    try:
        config = load(path)
    except ConfigError as error:
        assert str(error).startswith(str(path))  # noqa: PT017  some are settings, and load
    else:
        assert load(written(tmp_path, **config.model_dump(mode="json"))) == config
