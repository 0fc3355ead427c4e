"""The stage that writes the judge's questions, by rules and by a model behind a real HTTP server."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ans_core import data
from ans_core.config import Config, ConfigError, Rl, resolve
from ans_core.judge.choose import judge_of
from ans_core.judge.endpoint import EndpointJudge
from ans_core.judge.questions import read_questions
from ans_core.judge.rules import RuleJudge
from ans_core.stages import judge_questions, prepare
from ans_core.types import Sample
from tests.judge.chat_server import Handler, fails, says, serving
from tests.workspace import ROOT

WORLD = {"scenes": 3, "val_scenes": 1, "test_scenes": 0, "clips": 0, "image_size": 64}
STILLS = {"benchmarks": ["region_caption"]}


def config(**judge: object) -> Config:
    return Config.model_validate(
        {
            "profile": "tiny",
            "evaluate": STILLS,
            "prepare": WORLD,
            "rl": {"use_llm_judge": True},
            "judge": judge,
        }
    )


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    prepare.run(config(), inputs={}, out=folder, scratch=folder, log=lambda metrics, step: None)
    return folder


def regions(prepared: Path) -> list[Sample]:
    return data.of_kind(data.sources(prepared, "train"), "region_caption")


def run(cfg: Config, prepared: Path, out: Path) -> dict[str, float]:
    out.mkdir(exist_ok=True)
    return judge_questions.run(
        cfg, inputs={"data": prepared}, out=out, scratch=out / "scratch", log=lambda metrics, step: None
    )


@pytest.mark.parametrize("rl", [{"use_llm_judge": False}, {"loops": {"refer": 1.0}}], ids=str)
def test_nothing_is_asked_where_rl_judges_nothing(
    prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rl: dict[str, object]
):
    """An endpoint may cost money for every caption."""
    monkeypatch.setattr(RuleJudge, "write", lambda *_, **__: pytest.fail("the judge was asked"))
    assert run(config().model_copy(update={"rl": Rl(**rl)}), prepared, tmp_path)["captions"] == 0
    assert read_questions(tmp_path / "questions.jsonl") == {}


@pytest.mark.slow
def test_every_region_of_the_training_split_gets_questions_by_which_its_caption_earns_one(
    prepared: Path, tmp_path: Path
):
    metrics = run(config(positives=3, negatives=2), prepared, tmp_path)
    questions = read_questions(tmp_path / "questions.jsonl")
    samples = regions(prepared)
    assert len(samples) >= 6
    assert list(questions) == [(sample.dataset, sample.sample_id) for sample in samples]
    asked = [(sample.text, questions[sample.dataset, sample.sample_id]) for sample in samples]
    assert RuleJudge().submit(asked).result() == [1.0] * len(samples)
    captions = float(len({sample.text for sample in samples}))
    assert metrics == {
        "samples": len(samples), "captions": captions, "captions_without_questions": 0,
        "questions_per_caption": 6, "dropped_by_self_check": 0,
    }  # fmt: skip
    run(config(positives=3, negatives=2), prepared, tmp_path / "again")
    assert (tmp_path / "again/questions.jsonl").read_bytes() == (tmp_path / "questions.jsonl").read_bytes()


def test_region_captions_of_another_data_set_are_asked_about_too(prepared: Path, tmp_path: Path):
    source = {"name": "mine", "format": "region_arrow", "path": str(prepared / "scenes/region_captions")}
    cfg = Config.model_validate(
        {
            "profile": "tiny",
            "rl": {"use_llm_judge": True},
            "evaluate": STILLS,
            "prepare": WORLD | {"scenes": 0, "val_scenes": 0, "sources": [source]},
        }
    )
    others = tmp_path / "data"
    others.mkdir()
    prepare.run(cfg, inputs={}, out=others, scratch=others, log=lambda metrics, step: None)
    run(cfg, others, tmp_path)
    assert list(read_questions(tmp_path / "questions.jsonl")) == [
        ("mine", sample.sample_id) for sample in regions(prepared)
    ]


def drafts_and_answers(handler: Handler) -> None:
    """One question of each kind; the true caption is recognised by its words, and the negative one is always
    answered with `claimed`."""
    asked = handler.seen.asked
    if "Write " in asked:
        positive = {
            "question": "Colour?",
            "right": "as stated",
            "partial": "partly",
            "absent": "not said",
            "wrong": "another",
        }
        negative = {
            "question": "A tail?",
            "not_said": "none",
            "said": "claimed",
            "no_subject": "nothing there",
        }
        return says(json.dumps({"subject": "a thing", "positives": [positive], "negatives": [negative]}))(
            handler
        )
    truth = asked.startswith('Description: "a')
    wanted = {"Yes" if truth else "No", "as stated" if truth else "not said", "claimed"}
    blocks = [block.splitlines()[1:] for block in asked.split("\n\n")[1:]]
    return says(
        json.dumps([next(option[0] for option in options if option[3:] in wanted) for options in blocks])
    )(handler)


@pytest.mark.slow
def test_a_model_writes_the_questions_and_loses_those_that_the_truth_does_not_answer(
    prepared: Path, tmp_path: Path
):
    with serving(drafts_and_answers) as server:
        cfg = config(
            model="m", base_url=server.url, cache=str(tmp_path / "judge.sqlite"), api_key_env="NO_KEY"
        )
        metrics = run(cfg, prepared, tmp_path)
        calls = len(server.seen)
        assert calls == metrics["captions"] * 2 + 1  # saying nothing is asked about alike
        assert run(cfg, prepared, tmp_path / "again") == metrics
        assert len(server.seen) == calls
    questions = read_questions(tmp_path / "questions.jsonl")
    assert {tuple(q.kind for q in asked) for asked in questions.values()} == {("recognition", "positive")}
    assert metrics["questions_per_caption"] == 2
    assert metrics["dropped_by_self_check"] == pytest.approx(1 / 3)


@pytest.mark.slow
def test_a_failing_endpoint_stops_the_stage_and_what_was_done_is_not_asked_again(
    prepared: Path, tmp_path: Path
):
    with serving(drafts_and_answers, fails(401), fails(401), drafts_and_answers) as server:
        cfg = config(
            model="m",
            base_url=server.url,
            cache=str(tmp_path / "judge.sqlite"),
            api_key_env="NO_KEY",
            concurrency=1,
            retries=0,
        )
        with pytest.raises(RuntimeError, match=r"gave no answer [23] times"):
            run(cfg, prepared, tmp_path)
        assert not (tmp_path / "questions.jsonl").exists()
        drafted = [seen.asked for seen in server.seen]
        metrics = run(cfg, prepared, tmp_path)
        assert metrics["captions_without_questions"] == 0
        assert drafted[0] not in [seen.asked for seen in server.seen[len(drafted) :]]


def test_the_settings_name_the_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert isinstance(judge_of(config()), RuleJudge)
    monkeypatch.setenv("WORLD_SIZE", "4")
    judge = judge_of(
        config(model="m", base_url="http://127.0.0.1:1/v1", cache=str(tmp_path / "c.sqlite"), concurrency=2)
    )
    assert isinstance(judge, EndpointJudge)
    judge.close()
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(ValueError, match="set the environment variable OPENAI_API_KEY"):
        judge_of(config(model="m", cache=str(tmp_path / "c.sqlite")))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("judge.base_url=http://x/v1", "name the model at that endpoint"),
        ("judge.max_cost_usd=5", "max_cost_usd needs price_in and price_out"),
        ("judge.timeout_s=90", r"timeout_s \(90\) is longer than deadline_s \(60\)"),
        ("judge.positives=0", "judge.positives"),
        ("judge.on_failure=mix", "Input should be 'meteor' or 'drop'"),
    ],
)
def test_impossible_settings_are_refused(word: str, message: str):
    with pytest.raises(ConfigError, match=message):
        resolve(ROOT / "profiles/tiny.yaml", (word,))
