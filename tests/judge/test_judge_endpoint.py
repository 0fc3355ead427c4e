"""The judge against a real HTTP server that delays, refuses, hangs, cuts off and talks nonsense."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ans_core.judge.base import self_checked
from ans_core.judge.chat import Endpoint, Price, is_local
from ans_core.judge.endpoint import EndpointJudge
from ans_core.judge.questions import Option, Question, Questions
from tests.judge.chat_server import Handler, body, completion, cuts_off, fails, hangs, says, serving

QUESTIONS: Questions = (
    Question(
        kind="recognition",
        text="A dog?",
        options=(Option(text="Yes", score=1.0), Option(text="No", score=0.0)),
    ),
    Question(
        kind="positive",
        text="Its colour?",
        options=(
            Option(text="brown", score=1.0),
            Option(text="dark", score=0.5),
            Option(text="not said", score=0.0),
            Option(text="white", score=-1.0),
        ),
    ),
)
DOG = [("a brown dog", QUESTIONS)]
RIGHT = '{"q1": "a", "q2": "a"}'
HALF = '{"q1": "a", "q2": "b"}'
Make = Callable[..., EndpointJudge]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Judges with short pauses, closed at the end."""
    made = []

    def judge(url: str, **settings: object) -> EndpointJudge:
        words = {
            "cache": tmp_path / "judge.sqlite",
            "api_key_env": "NO_KEY",
            "timeout_s": 5.0,
            "deadline_s": 10.0,
            "retries": 2,
        }
        values: dict[str, Any] = words | settings
        own = {key: values.pop(key) for key in ("cache", "deadline_s") if key in values}
        made.append(EndpointJudge(Endpoint(model="m", base_url=url, **values), **own))
        return made[-1]

    yield judge
    for one in made:
        one.close()


def captions(count: int) -> list[tuple[str, Questions]]:
    return [(f"dog {i}", QUESTIONS) for i in range(count)]


def test_a_caption_is_judged_by_one_call_with_a_schema_of_its_questions(make: Make):
    with serving(says(HALF)) as server:
        judge = make(server.url)
        assert judge.submit([("a  dark <p>dog</p> [SEG]", QUESTIONS)]).result() == [0.5]
        (seen,) = server.seen
    assert seen.body["temperature"] == 0
    assert seen.body["response_format"]["json_schema"]["schema"]["properties"]["q2"]["enum"] == [
        "a",
        "b",
        "c",
        "d",
    ]
    assert (
        seen.asked
        == 'Description: "a dark dog"\n\nq1. A dog?\na. Yes\nb. No\n\nq2. Its colour?\na. brown\nb. dark\nc. not said\nd. white'
    )
    stats = judge.stats()
    assert stats.pop("latency_s") > 0
    assert stats == {
        "calls": 1,
        "cached": 0,
        "failed": 0,
        "parse_failed": 0,
        "tokens_in": 100,
        "tokens_out": 10,
        "cost": 0,
    }
    assert set(judge.stats().values()) == {0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [fails(500), fails(503), fails(408), fails(409), fails(429), cuts_off],
    ids=["500", "503", "408", "409", "429", "cut"],
)
def test_what_passes_is_tried_again(make: Make, first: Callable[[Handler], None]):
    with serving(first, first, says(RIGHT)) as server:
        assert make(server.url).submit(DOG).result() == [1.0]
        assert len(server.seen) == 3


def error_in_200(error: object, **more: object) -> Callable[[Handler], None]:
    return lambda handler: handler.send(
        200, json.dumps({"error": error} | more), headers={"retry-after-ms": "1"}
    )


LIMIT = {"message": "Rate limit exceeded", "code": 429}


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        error_in_200(LIMIT),
        error_in_200(LIMIT | {"code": "429"}, choices=[]),
        error_in_200({"message": "Provider returned error", "code": "server_error"}),
        error_in_200("busy"),
        error_in_200(
            None, choices=[{"error": {"code": 502}, "finish_reason": "error", "message": {"content": ""}}]
        ),
    ],
    ids=["429", "text", "no number", "no object", "choice"],
)
def test_an_error_in_a_body_of_status_200_is_tried_again_like_its_own_status(
    make: Make, first: Callable[[Handler], None]
):
    with serving(first, first, says(RIGHT)) as server:
        judge = make(server.url)
        assert judge.submit(DOG).result() == [1.0]
        assert len(server.seen) == 3
    with serving(first) as server:
        assert make(server.url).submit([("a cat", QUESTIONS)]).result() == [None]
        assert len(server.seen) == 3  # the first call and two more


def test_an_error_in_a_body_of_status_200_is_told_and_final_where_its_own_status_is(
    make: Make, caplog: pytest.LogCaptureFixture
):
    with serving(error_in_200({"message": "Insufficient credits", "code": 402})) as server:
        judge = make(server.url)
        assert judge.submit(DOG).result() == [None]
        assert len(server.seen) == 1
    assert judge.stats()["failed"] == 1
    assert "the judge's endpoint failed: APIStatusError 402" in caplog.text
    with serving(error_in_200({"message": "no response_format here", "code": 400}), says(RIGHT)) as server:
        assert make(server.url).submit([("a cat", QUESTIONS)]).result() == [1.0]
        assert ["response_format" in seen.body for seen in server.seen] == [True, False]


def test_no_error_beside_a_reply_changes_nothing(make: Make):
    with serving(body(json.dumps(json.loads(completion(RIGHT)) | {"error": None}))) as server:
        assert make(server.url).submit(DOG).result() == [1.0]


@pytest.mark.slow
def test_retry_after_is_waited_for(make: Make):
    with serving(lambda h: h.send(429, "{}", headers={"Retry-After": "1"}), says(RIGHT)) as server:
        assert make(server.url).submit(DOG).result() == [1.0]
        assert 1.0 <= server.seen[1].at_s - server.seen[0].at_s < 2.0


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413])
def test_other_refusals_are_final(make: Make, status: int):
    with serving(fails(status)) as server:
        judge = make(server.url)
        assert judge.submit(DOG).result() == [None]
        assert len(server.seen) == 1
    assert judge.stats()["failed"] == 1


def test_after_the_last_retry_there_is_no_judgement_and_nothing_in_the_cache(make: Make):
    with serving(*[fails(500)] * 3, says(RIGHT)) as server:
        judge = make(server.url)
        assert judge.submit(DOG).result() == [None]
        assert len(server.seen) == 3
        assert judge.submit(DOG).result() == [1.0]


@pytest.mark.slow
def test_a_server_that_hangs_costs_a_timeout(make: Make):
    with serving(hangs, says(RIGHT)) as server:
        assert make(server.url, timeout_s=0.2).submit(DOG).result() == [1.0]


def test_nobody_listening_is_no_judgement(make: Make):
    with serving(says(RIGHT)) as server:
        url = server.url
    server.server_close()
    assert make(url, retries=0).submit(DOG).result() == [None]


@pytest.mark.slow
def test_a_batch_ends_at_its_deadline_with_what_is_there(make: Make):
    def slow_for_one(handler: Handler) -> None:
        says(RIGHT, after_s=0 if "dog 0" in handler.seen.asked else 2)(handler)

    with serving(slow_for_one) as server:
        judge = make(server.url, deadline_s=0.5, concurrency=1)
        start_s = time.monotonic()
        assert judge.submit(captions(3)).result() == [1.0, None, None]
        assert time.monotonic() - start_s < 1.5
    assert judge.stats()["failed"] == 2


@pytest.mark.parametrize(
    "reply",
    [
        '```json\n{"q1": "a", "q2": "b"}\n```',
        '{"q1": "a", "q2": "b',
        '["a", "b"]',
        "1. Yes\n2. dark",
        "<think>white? c?</think> The answers are: q1: a, q2: b. dark",
    ],
)
def test_prose_and_broken_json_are_understood(make: Make, reply: str):
    with serving(says(reply)) as server:
        assert make(server.url).submit(DOG).result() == [0.5]


NUMBER = "1" * 5000


@pytest.mark.slow
@pytest.mark.parametrize(
    "reply",
    [
        "",
        None,
        "I would rather not.",
        '{"q1": "a"}',
        '{"q1": "a", "q2": "x"}',
        "[" * 100_000,
        f'{{"q{NUMBER}": "a", "x": "b"}}',
    ],
    ids=["empty", "none", "refusal", "one", "letter", "nested", "number"],
)
def test_an_unreadable_reply_is_no_judgement_and_never_cached(make: Make, reply: str | None):
    with serving(says(reply), says(RIGHT)) as server:
        judge = make(server.url)
        assert judge.submit(DOG).result() == [None]
        assert (judge.stats()["parse_failed"], judge.submit(DOG).result()) == (1, [1.0])


@pytest.mark.parametrize(
    "respond",
    [
        body("<html>busy</html>", "text/html"),
        body("{", "application/json"),
        body("[]"),
        body("{}"),
        body('{"choices": [{"message": 3}]}'),
        body("[" * 100_000),
    ],
    ids=["html", "broken", "array", "empty", "odd", "nested"],
)
def test_a_body_that_is_no_completion_is_no_judgement(make: Make, respond: Callable[[Handler], None]):
    with serving(respond) as server:
        assert make(server.url).submit(DOG).result() == [None]


@pytest.mark.parametrize(
    "usage", [{"prompt_tokens": "many", "completion_tokens": -5}, {"prompt_tokens": None}, 3]
)
def test_tokens_that_a_server_does_not_count_are_estimated(make: Make, usage: object):
    message = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": RIGHT}}
    completion = {
        "id": "1",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [message],
        "usage": usage,
    }
    with serving(body(json.dumps(completion))) as server:
        judge = make(server.url)
        assert judge.submit(DOG).result() == [1.0]
        found = judge.stats()
    assert found["tokens_in"] > 20
    assert found["tokens_out"] == len(RIGHT) // 4


def test_a_server_without_schemas_is_asked_without_from_then_on(make: Make):
    def refuses(handler: Handler) -> None:
        fails(400, "response_format is not supported")(handler)

    with serving(refuses, says(RIGHT)) as server:
        assert make(server.url, concurrency=1).submit(captions(2)).result() == [1.0, 1.0]
        assert ["response_format" in seen.body for seen in server.seen] == [True, False, False]
        assert all("temperature" in seen.body for seen in server.seen)


@pytest.mark.slow
def test_the_breaker_opens_after_failures_in_a_row_and_closes_after_a_success(make: Make):
    with serving(fails(500), fails(500), fails(500), says(RIGHT)) as server:
        judge = make(server.url, retries=0, concurrency=1, breaker_failures=2, breaker_pause_s=0.3)
        assert judge.submit(captions(5)).result() == [None] * 5
        assert len(server.seen) == 2
        time.sleep(0.35)
        assert judge.submit(captions(5)).result() == [None] * 5  # one is let through, and fails
        assert len(server.seen) == 3
        time.sleep(0.35)
        assert judge.submit(captions(1)).result() == [1.0]
        assert judge.submit(captions(5)).result() == [1.0] * 5
        assert len(server.seen) == 3 + 5


def test_a_hanging_server_opens_the_breaker_too(make: Make):
    with serving(hangs) as server:
        judge = make(server.url, deadline_s=0.2, breaker_failures=2)
        assert judge.submit(captions(2)).result() == [None, None]
        assert judge.submit(captions(2)).result() == [None, None]
        assert len(server.seen) == 2


def test_at_the_cost_limit_nothing_is_asked_any_more(make: Make, caplog: pytest.LogCaptureFixture):
    """A call of 100 + 10 tokens at 10 and 100 USD per million costs .002 USD."""
    with serving(says(RIGHT)) as server:
        judge = make(server.url, concurrency=1, price=Price(tokens_in=10.0, tokens_out=100.0, limit=0.004))
        assert judge.submit(captions(4)).result() == [1.0, 1.0, None, None]
        assert judge.submit(captions(4)).result() == [1.0, 1.0, None, None]  # what is in the cache is free
        assert len(server.seen) == 2
    assert judge.stats()["cost"] == pytest.approx(0.004)
    assert caplog.text.count("max_cost_usd is spent") == 1


def test_the_cache_outlives_the_judge_and_knows_content_from_content(make: Make):
    with serving(says(RIGHT)) as server:
        with closing(make(server.url)) as judge:
            judge.submit(DOG).result()
        again = make(server.url)
        assert again.submit([(" a brown  dog", QUESTIONS)]).result() == [1.0]
        assert (len(server.seen), again.stats()["cached"]) == (1, 1)
        again.submit(
            [("a brown cat", QUESTIONS), ("a brown dog", QUESTIONS[:1] + QUESTIONS[1:] * 2)]
        ).result()
        assert len(server.seen) == 3


def test_another_server_is_asked_what_the_first_one_has_answered(make: Make):
    with serving(says(RIGHT)) as one, serving(says(HALF)) as other:
        assert make(one.url).submit(DOG).result() == [1.0]
        with_user = other.url.replace("://", "://user:word@")
        assert [make(url).submit(DOG).result() for url in (other.url, with_user)] == [[0.5]] * 2
        assert len(other.seen) == 1


def test_captions_alike_are_asked_once(make: Make):
    with serving(says(HALF)) as server:
        judge = make(server.url)
        assert judge.submit(DOG * 4 + captions(1)).result() == [0.5] * 5
        assert len(server.seen) == judge.stats()["calls"] == 2


def test_what_needs_no_call_makes_none(make: Make):
    with serving(says(RIGHT)) as server:
        assert make(server.url).submit(
            [("", QUESTIONS), ("<p> </p>[SEG]", QUESTIONS), ("a dog", ())]
        ).result() == [0.0, 0.0, None]
        assert make(server.url).submit([]).result() == []
        assert server.seen == []


def test_no_more_calls_at_a_time_than_allowed(make: Make):
    with serving(says(RIGHT, after_s=0.05)) as server:
        assert make(server.url, concurrency=3).submit(captions(12)).result() == [1.0] * 12
        assert server.most_busy == 3


def test_submitting_returns_before_the_server_answers(make: Make):
    with serving(says(RIGHT, after_s=0.4)) as server:
        judge = make(server.url)
        future = judge.submit(DOG)
        other = judge.submit(captions(1))
        assert not future.done()
        assert future.result() + other.result() == [1.0, 1.0]
        assert server.most_busy == 2  # side by side


@pytest.mark.slow
def test_several_threads_share_a_judge_and_several_judges_a_cache(make: Make):
    with serving(says(RIGHT)) as server, ThreadPoolExecutor(4) as pool:
        judges = [make(server.url), make(server.url)]
        results = list(pool.map(lambda i: judges[i % 2].submit(captions(6)).result(), range(6)))
        assert results == [[1.0] * 6] * 6


def test_closing_cancels_what_is_under_way_and_may_be_repeated(make: Make):
    with serving(hangs) as server:
        judge = make(server.url)
        future = judge.submit(DOG)
        time.sleep(0.1)
        judge.close()
        judge.close()
        assert future.cancelled()


def test_the_key_comes_from_the_environment_and_goes_nowhere_but_to_the_server(
    make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
):
    key = "sk-very-secret-0123456789"
    monkeypatch.setenv("MY_KEY", key)
    caplog.set_level(logging.DEBUG)
    for name in ("openai", "httpx2", "httpcore2", "httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(logging.DEBUG)

    def repeats_it(handler: Handler) -> None:
        fails(400, f"bad request with header {handler.seen.key}")(handler)

    def shows_parts(handler: Handler) -> None:
        fails(401, f"Incorrect API key provided: {handler.seen.key[-17:]}")(handler)

    with serving(repeats_it, shows_parts, fails(500), says(RIGHT)) as server:
        judge = make(server.url, api_key_env="MY_KEY", concurrency=1)
        assert judge.submit(captions(3)).result() == [None, None, 1.0]
        assert {seen.key for seen in server.seen} == {f"Bearer {key}"}
    judge.close()
    shown = [caplog.text, repr(judge), str(vars(judge)), repr(judge._chat), repr(judge._chat._client)]
    shown += [str(record.__dict__) for record in caplog.records]
    assert len(caplog.records) > 10
    assert "400: " in caplog.text
    assert not any(part in text for text in shown for part in (key, key[-17:]))
    assert not any(key.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


def test_a_missing_key_is_told_at_once_by_the_name_of_its_variable(make: Make):
    for url in ("", "https://api.example.com/v1"):
        with pytest.raises(ValueError, match=r"wants an API key: set the environment variable NO_KEY"):
            make(url)


def test_local_endpoints_are_those_of_this_machine_and_of_private_networks():
    assert all(
        is_local(url)
        for url in (
            "http://localhost:8000/v1",
            "http://127.0.0.1/v1",
            "http://[::1]:80/v1",
            "http://10.0.0.7/v1",
        )
    )
    assert not any(is_local(url) for url in ("", "https://api.openai.com/v1", "http://8.8.8.8/v1"))


DRAFT = {
    "subject": "a dog",
    "positives": [
        {
            "question": "Its colour?",
            "right": "brown",
            "partial": "dark",
            "absent": "not said",
            "wrong": "white",
        },
        {"question": "Its size?", "right": "big", "partial": "big", "absent": "not said", "wrong": "small"},
        {
            "question": "Its tail?",
            "right": "long",
            "partial": "visible",
            "absent": "not said",
            "wrong": "short",
        },
    ],
    "negatives": [{"question": "A collar?", "not_said": "no", "said": "yes", "no_subject": "no dog"}],
}


def knows_the_colour(handler: Handler) -> None:
    """Drafts, and answers rightly but for the tail, which it never finds."""
    asked = handler.seen.asked
    if "Write " in asked:
        handler.send(
            200,
            json.dumps(
                {"choices": [{"index": 0, "message": {"role": "assistant", "content": json.dumps(DRAFT)}}]}
            ),
        )
        return
    truth = asked.startswith('Description: "a big')
    wanted = {
        "likely": "Yes" if truth else "No",
        "colour": "brown" if truth else "not said",
        "tail": "not said",
    }
    wanted["collar"] = "no" if truth else "no dog"
    picked = []
    for block in asked.split("\n\n")[1:]:
        question, *options = block.splitlines()
        text = next(answer for word, answer in wanted.items() if word in question)
        picked.append(next(option[0] for option in options if option[3:] == text))
    says(json.dumps(picked))(handler)


def test_drafts_are_written_by_the_model_and_checked_against_the_truth_and_against_nothing(make: Make):
    with serving(knows_the_colour) as server:
        judge = make(server.url, concurrency=1)
        (draft,) = judge.write(["a big brown dog"], positives=4, negatives=3).result()
        assert draft is not None
        assert [(q.kind, len(q.options)) for q in draft] == [
            ("recognition", 2),
            ("positive", 4),
            ("positive", 4),
            ("negative", 3),
        ]
        (kept,) = self_checked(judge, ["a big brown dog"], [draft])
        assert [q.text for q in kept[1:]] == ["Its colour?", "A collar?"]
        assert judge.submit([("a big brown dog", kept)]).result() == [1.0]
        calls = len(server.seen)
        assert judge.write(["a big brown dog"], positives=4, negatives=3).result() == [draft]
        assert len(server.seen) == calls


def test_a_draft_that_is_none_counts_as_unreadable(make: Make):
    with serving(says('{"subject": "a dog"}')) as server:
        judge = make(server.url)
        assert judge.write(["a dog"], positives=1, negatives=1).result() == [None]
        assert judge.stats()["parse_failed"] == 1
