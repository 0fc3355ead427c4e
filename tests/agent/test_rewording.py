"""Thoughts in other words: what is asked, which replies are taken, what happens where the endpoint fails."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ans_core.agent.world.annotated import questions
from ans_core.agent.world.bank import FILE, write_questions
from ans_core.agent.world.rewording import may_stand, read_sentences, request, reworded
from ans_core.agent.world.things import pictures
from ans_core.config import Config, ConfigError, resolve
from ans_core.judge.chat import Endpoint
from ans_core.judge.endpoint import EndpointJudge
from ans_core.stages import cota
from tests.agent.test_annotated import CAT, DOG, samples
from tests.judge.chat_server import Handler, fails, says, serving
from tests.workspace import ROOT

Make = Callable[[str], EndpointJudge]
FOUND = pictures(samples({"cat": [CAT], "dog": [DOG]}))
(LARGER,) = questions(FOUND, families=["which_larger"], seed=0)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Judges of a server, with one cache; closed at the end."""
    made = []

    def judge(url: str) -> EndpointJudge:
        endpoint = Endpoint(
            model="m", base_url=url, api_key_env="NO_KEY", timeout_s=5.0, retries=0, concurrency=4
        )
        made.append(EndpointJudge(endpoint, cache=tmp_path / "judge.sqlite"))
        return made[-1]

    yield judge
    for one in made:
        one.close()


def says_now(handler: Handler) -> None:
    """Answer with each sentence behind `Now, `."""
    (line,) = re.findall(r"Sentences: (.*)", handler.seen.asked)
    says(json.dumps({"sentences": [f"Now, {sentence}" for sentence in json.loads(line)]}))(handler)


def test_questions_are_written_with_the_words_of_the_reply(make: Make, tmp_path: Path) -> None:
    with serving(says_now) as server:
        judge = make(server.url)
        write_questions(FOUND, tmp_path, seed=0, reword=lambda some: reworded(judge, some))
        assert {seen.body["temperature"] for seen in server.seen} == {1}
    records = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert len(records) == 6
    for record, question in zip(records, questions(FOUND, seed=0), strict=True):
        assert record["thoughts"] == [f"Now, {thought}" for thought in question.thoughts]


def test_an_endpoint_that_answers_nothing_stops_and_unreadable_replies_leave_the_templates(
    make: Make,
) -> None:
    with serving(fails(500)) as server, pytest.raises(RuntimeError, match="reworded none of 1 questions"):
        reworded(make(server.url), [LARGER])
    with serving(says("As you like.")) as server:
        assert reworded(make(server.url), [LARGER]) == [LARGER]


@pytest.mark.parametrize(
    ("sentences", "stands"),
    [
        (["First the dog, closer.", "Done with the dog; on to the cat."], True),
        (["I look at the dog."], False),
        (["I look at it.", "Then the cat."], False),  # a name is lost
        (["I look at the dog.", "That was the dog, the cat is bigger, 3 times."], False),
        (["I look at the dog.", "<tool_call> the dog, the cat"], False),
        (["I look at the dog.", "That was the dog, and the cat " + "really " * 20], False),
        (["", "That was the dog; the cat"], False),
    ],
)
def test_a_sentence_may_add_nothing(sentences: list[str], stands: bool) -> None:
    first = LARGER.thoughts[0]
    names = ("dog", "cat") if "dog" in first else ("cat", "dog")
    swapped = [re.sub("dog|cat", lambda m: names[m[0] == "cat"], sentence) for sentence in sentences]
    assert may_stand(swapped, LARGER) == stands


def test_no_sentence_says_the_answer_and_replies_are_read_with_and_without_their_object() -> None:
    (yes, *_) = questions(FOUND, families=["is_there"], seed=0)
    assert yes.answer == "yes"
    assert may_stand(["A cat may be there; closer."], yes)
    assert not may_stand(["Yes, this could be a cat."], yes)
    assert read_sentences('{"sentences": ["a  b"]}') == read_sentences('["a b"]') == ["a b"]
    assert read_sentences('{"sentences": [1]}') is None
    assert "Question" in str(request(yes).user)


def test_rewording_needs_a_model_and_its_key_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"agent\.cota\.reword.*judge\.model is empty"):
        resolve(ROOT / "profiles/tiny.yaml", ("agent.cota.reword=true",))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    values = {
        "profile": "tiny",
        "agent": {"cota": {"reword": True}},
        "judge": {"model": "m", "cache": str(tmp_path / "c.sqlite")},
    }
    with pytest.raises(ValueError, match="set the environment variable OPENAI_API_KEY"):
        cota.run(
            Config.model_validate(values),
            inputs={"model": tmp_path / "none"},
            out=tmp_path,
            scratch=tmp_path,
            log=lambda metrics, step: None,
        )
