"""The judge of traces behind a real HTTP server: what it is asked, what is kept, and what happens where it
fails."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from ans_core import dist
from ans_core.agent.episode import Toolbox
from ans_core.agent.world import Question, bank, judging, traces
from ans_core.agent.world.judging import Verdict, grading, read_score, repeated, verdict, verdicts
from ans_core.agent.world.trace_file import Kind, Trace, read_traces
from ans_core.agent.world.traces import Written, kinds_of, write_synthetic_traces
from ans_core.checkpoints import checkpoint
from ans_core.config import Config, ConfigError, resolve
from ans_core.judge.chat import Endpoint, Price
from ans_core.judge.endpoint import EndpointJudge
from ans_core.stages import cota
from tests import tiny
from tests.judge.chat_server import Handler, fails, says, serving
from tests.workspace import ROOT, launch

NUMBERS = {"easy": 6, "pattern": 14}
Make = Callable[..., EndpointJudge]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Judges of a server, with one cache; closed at the end."""
    made = []

    def judge(url: str, **settings: object) -> EndpointJudge:
        words = {
            "cache": tmp_path / "judge.sqlite",
            "api_key_env": "NO_KEY",
            "timeout_s": 5.0,
            "retries": 0,
            "concurrency": 4,
        }
        values: dict[str, Any] = words | settings
        own = {key: values.pop(key) for key in ("cache", "deadline_s") if key in values}
        made.append(EndpointJudge(Endpoint(model="m", base_url=url, **values), **own))
        return made[-1]

    yield judge
    for one in made:
        one.close()


@pytest.fixture(scope="module", autouse=True)
def once() -> Iterator[None]:
    """Every question is drawn, and its plan run, once for all tests of this module."""
    with pytest.MonkeyPatch.context() as patch:
        draw, make = cache(bank.draw_question), traces.trace
        known: dict[str, object] = {}

        def made(question: Question, kind: Kind, toolbox: Toolbox, **words: Any) -> object:
            key = repr((question.question_id, kind, toolbox.tile, words))
            if key not in known:
                known[key] = make(question, kind, toolbox, **words)
            return known[key]

        patch.setattr(bank, "draw_question", draw)
        patch.setattr(traces, "trace", made)
        yield


@pytest.fixture(scope="module")
def drawn(toolbox: Toolbox) -> list[Trace]:
    """What `write` below makes of its questions before a judge sees it."""
    asked = [(family, index) for family, number in NUMBERS.items() for index in range(number)]
    made = []
    for (family, index), kind in zip(asked, kinds_of([family for family, _ in asked]), strict=True):
        question = bank.draw_question(family, seed=2, split="train", index=index, tile=toolbox.tile)
        found = traces.trace(question, kind, toolbox, seed=2, provenance={})
        assert not isinstance(found, str)
        made.append(found[0])
    return made


def silent(metrics: dict[str, float], step: int) -> None:
    assert step >= 0


def write(
    folder: Path, toolbox: Toolbox, endpoint: EndpointJudge | None, *, on_failure: str = "meteor"
) -> Written:
    judge = (
        None if endpoint is None else partial(verdicts, endpoint, seed=2, on_failure=on_failure, log=silent)
    )  # type: ignore[arg-type]
    return write_synthetic_traces(
        folder,
        bank.QuestionBank((), seed=2, tile=toolbox.tile),
        NUMBERS,
        split="train",
        toolbox=toolbox,
        provenance={},
        judge=judge,
    )


def scores(*given: int, of: str) -> Callable[[Handler], None]:
    """5 for all traces but those with the text `of`, which get what is given, one after the other; the last
    one from then on."""
    left = list(given)

    def respond(handler: Handler) -> None:
        with handler.server.lock:
            score = (left.pop(0) if len(left) > 1 else left[0]) if of in handler.seen.asked else 5
        says(json.dumps({"score": score}))(handler)

    return respond


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def pictures(some: Sequence[Trace]) -> set[str]:
    return {name for t in some for name in (*t.frames, *(name for turn in t.turns for name in turn.pictures))}


@pytest.mark.slow
def test_without_a_judge_what_the_rules_keep_is_written_as_it_is(
    drawn: list[Trace], toolbox: Toolbox, tmp_path: Path
) -> None:
    written = write(tmp_path, toolbox, None)
    lines = "".join(found.model_dump_json(exclude_defaults=True) + "\n" for found in drawn)
    assert (tmp_path / "traces.jsonl").read_text() == lines
    assert set(files(tmp_path)) == {"traces.jsonl", *pictures(drawn)}
    assert written == Written(kinds=Counter(found.kind for found in drawn))
    assert not any("judge" in name for name in cota.counted(written))


def test_good_traces_are_kept_with_their_scores_bad_ones_dropped_by_reason_and_a_second_run_asks_nothing(
    drawn: list[Trace], toolbox: Toolbox, make: Make, tmp_path: Path
) -> None:
    (again,) = repeated([found.trace_id for found in drawn], seed=2)
    bad = next(
        found
        for found in drawn
        if found.family == "pattern" and found.kind == "golden" and found.trace_id != again
    )
    alike = {found.trace_id for found in drawn if grading(found, sample=0) == grading(bad, sample=0)}
    assert alike == {bad.trace_id}
    with serving(scores(3, of=json.dumps(bad.turns[1].text))) as server:
        written = write(tmp_path / "1", toolbox, make(server.url))
        asked = len(server.seen)
        assert asked == len(drawn) + 2  # one is scored three times
        assert write(tmp_path / "2", toolbox, make(server.url)) == written
        assert len(server.seen) == asked
    kept = read_traces(tmp_path / "1")
    assert [found.trace_id for found in kept] == [found.trace_id for found in drawn if found != bad]
    assert {tuple(found.provenance["scores"]) for found in kept if found.trace_id != again} == {(5,)}
    assert {tuple(found.provenance["scores"]) for found in kept if found.trace_id == again} == {(5, 5, 5)}
    assert set(files(tmp_path / "1")) == {"traces.jsonl", *pictures(kept)}
    assert files(tmp_path / "1") == files(tmp_path / "2")
    found = cota.counted(written)
    assert found["traces"] == found["golden"] + found["trap"] + found["self_correction"] == len(drawn) - 1
    assert (found["dropped"], found["dropped/pattern/low_score"]) == (1, 1)
    assert found["judge/mean_score"] == pytest.approx((5 * (len(drawn) - 1) + 3) / len(drawn))
    assert (
        found["judge/judged"],
        found["judge/repeated"],
        found["judge/agreement"],
        found["judge/deviation"],
    ) == (len(drawn), 1, 1, 0)


def test_the_judge_is_told_the_words_of_a_trace_its_purpose_and_no_picture(
    drawn: list[Trace], make: Make
) -> None:
    trap = next(found for found in drawn if found.kind == "trap")
    with serving(says('{"score": 5}')) as server:
        verdicts(make(server.url), [trap], seed=0, on_failure="drop", log=silent)
        assert Counter(seen.body["temperature"] for seen in server.seen) == {0: 1, 1: 2}
        system, user = (message["content"] for message in server.seen[0].body["messages"])
    assert server.seen[0].body["response_format"]["json_schema"]["schema"]["properties"]["score"]["enum"] == [
        1,
        2,
        3,
        4,
        5,
    ]
    assert "- zoom_in: Shows a box" in system
    lines = user.splitlines()
    assert lines[0].startswith("Kind: trap. It shows an error on purpose")
    assert lines[1:3] == [f'Question: "{trap.question}"', f'True answer: "{trap.answer}"']
    assert [json.loads(line) for line in lines[4:]] == [
        {"model": trap.turns[1].text},
        {"came back": trap.turns[2].text.replace("<image>", "[picture]")},
        {"model": trap.final_answer},
    ]
    assert trap.final_answer != trap.answer


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([4], Verdict(scores=(4,))),
        ([3], Verdict(scores=(3,), rejected="low_score")),
        ([5, 4, 3], Verdict(scores=(5, 4, 3))),  # deviation 1, mean 4
        ([5, 5, 3], Verdict(scores=(5, 5, 3), rejected="unreliable")),  # deviation 1.15
        ([2, 2, 4], Verdict(scores=(2, 2, 4), rejected="unreliable")),
        ([4, 4, 3], Verdict(scores=(4, 4, 3), rejected="low_score")),
        ([None, 5, 4], Verdict(scores=(5, 4))),
        ([None, 5, None], Verdict(scores=(5,))),
    ],
)
def test_of_three_scores_the_mean_counts_unless_they_differ_too_much(
    given: list[int | None], expected: Verdict
) -> None:
    assert verdict(given, on_failure="meteor") == verdict(given, on_failure="drop") == expected


def test_what_has_no_score_stays_or_is_dropped_as_the_setting_says() -> None:
    assert verdict([None], on_failure="meteor") == Verdict()
    assert verdict([None] * 3, on_failure="drop") == Verdict(rejected="unjudged")


@pytest.mark.slow
def test_an_unreliable_trace_is_dropped_and_the_judges_consistency_told(
    drawn: list[Trace], toolbox: Toolbox, make: Make, tmp_path: Path
) -> None:
    (again,) = repeated([found.trace_id for found in drawn], seed=2)
    unsure = next(found for found in drawn if found.trace_id == again)
    with serving(scores(5, 5, 2, of=json.dumps(unsure.turns[1].text))) as server:
        written = write(tmp_path, toolbox, make(server.url, concurrency=1))
    found = cota.counted(written)
    assert (
        found[f"dropped/{unsure.family}/unreliable"],
        found["judge/unreliable"],
        found["judge/agreement"],
    ) == (1, 1, 0)
    assert found["judge/deviation"] == pytest.approx(3**0.5)
    assert again not in {kept.trace_id for kept in read_traces(tmp_path)}


def test_one_percent_is_scored_again_by_seed_and_name_and_one_at_least() -> None:
    names = [f"pattern/train/{number}" for number in range(5000)]
    chosen = repeated(names, seed=0)
    assert 30 < len(chosen) < 70
    assert repeated(names[:2500], seed=0) == chosen & set(names[:2500])
    assert repeated(names, seed=1) != chosen
    assert len(repeated(names[:3], seed=0)) == 1
    assert repeated([], seed=0) == set()


@pytest.mark.slow
def test_a_judge_that_drops_a_kind_spoils_the_mix_and_nothing_takes_its_place(
    toolbox: Toolbox, make: Make, tmp_path: Path
) -> None:
    with (
        serving(scores(1, of="Kind: trap")) as server,
        pytest.raises(ValueError, match=r"trap 0\.00 instead of 0\.21"),
    ):
        write(tmp_path, toolbox, make(server.url))
    assert not (tmp_path / "traces.jsonl").exists()
    with (
        serving(says('{"score": 1}')) as server,
        pytest.raises(ValueError, match=r"no trace is left of 20 .*'pattern/low_score': 14"),
    ):
        write(tmp_path / "none", toolbox, make(server.url, cache=tmp_path / "other.sqlite"))


@pytest.mark.slow
def test_a_reply_that_cannot_be_read_leaves_its_trace_to_the_setting(
    drawn: list[Trace], toolbox: Toolbox, make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (again,) = repeated([found.trace_id for found in drawn], seed=2)
    odd = next(found for found in drawn if found.family == "easy" and found.trace_id != again)
    same = [found for found in drawn if found.question == odd.question]

    def nonsense(handler: Handler) -> None:
        says("a fine trace" if json.dumps(odd.question) in handler.seen.asked else '{"score": 5}')(handler)

    with serving(nonsense) as server, caplog.at_level(logging.WARNING):
        kept = write(tmp_path / "kept", toolbox, make(server.url))
        dropped = write(tmp_path / "dropped", toolbox, make(server.url), on_failure="drop")
    assert (kept.kinds.total(), kept.dropped) == (20, Counter())
    assert dropped.dropped == {"easy/unjudged": len(same)}
    assert cota.counted(kept)["judge/unjudged"] == len(same)
    by_name = {found.trace_id: found for found in read_traces(tmp_path / "kept")}
    assert by_name[odd.trace_id].provenance["scores"] == []
    assert f"{len(same)} of 20 traces have no judgement and stay as the rules kept them" in caplog.text
    assert f"{len(same)} of 20 traces have no judgement and are dropped" in caplog.text


@pytest.mark.slow
def test_an_endpoint_that_answers_nothing_ends_the_stage_and_goes_on_where_it_was(
    drawn: list[Trace], make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judging, "CHUNK", 10)
    with serving(*[says('{"score": 4}')] * 8, *[fails(401)] * 30) as server:
        judge = make(server.url, concurrency=1)
        with pytest.raises(RuntimeError, match=r"answered none of \d+ requests; .* Run again"):
            verdicts(judge, drawn, seed=2, on_failure="meteor", log=silent)
        server.script = [says('{"score": 4}')]
        before = len(server.seen)
        again = verdicts(make(server.url), drawn, seed=2, on_failure="meteor", log=silent)
        assert {one.scores[0] for one in again} == {4}
        assert len(server.seen) - before == len(drawn) + 2 - 8


def test_one_call_that_fails_leaves_one_trace_to_the_setting(drawn: list[Trace], make: Make) -> None:
    with serving(fails(500), says('{"score": 5}')) as server:
        found = verdicts(make(server.url, concurrency=1), drawn[:3], seed=2, on_failure="drop", log=silent)
    assert sum(one.rejected == "unjudged" for one in found) <= 1
    assert [one.scores for one in found].count(()) <= 1
    assert sum(len(one.scores) for one in found) == 4  # of five requests


@pytest.mark.slow
def test_at_the_cost_limit_nothing_is_asked_any_more(drawn: list[Trace], make: Make) -> None:
    """A call of 100 + 10 tokens at 10 and 100 USD per million costs .002 USD; the limit is of the whole
    stage."""
    with serving(says('{"score": 5}')) as server:
        judge = make(server.url, concurrency=1, price=Price(tokens_in=10.0, tokens_out=100.0, limit=0.02))
        verdicts(judge, drawn[:6], seed=2, on_failure="drop", log=silent)
        found = verdicts(judge, drawn[6:12], seed=2, on_failure="drop", log=silent)
        assert len(server.seen) == 10
    assert sum(one.rejected == "unjudged" for one in found) > 0


@pytest.mark.parametrize(
    ("reply", "score"),
    [
        ('{"score": 4}', 4), ('Sure: ```json\n{"score": "5"}\n```', 5),
        ('<think>{"score": 1}</think>{"score": 3.0}', 3), ("4", 4), ('{"score": 4.5}', None),
        ('{"score": 0}', None), ('{"score": 6}', None), ('{"score": true}', None), ('{"grade": 4}', None),
        ('{"score": null}', None), ("[4]", None), ("fine", None), ("", None), ('{"score": [4]}', None),
    ],
)  # fmt: skip
def test_a_score_is_a_whole_number_from_one_to_five(reply: str, score: int | None) -> None:
    assert read_score(reply) == score


def test_a_judge_of_traces_needs_a_model_and_its_key_before_any_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"agent\.cota\.judge.*judge\.model is empty"):
        resolve(ROOT / "profiles/tiny.yaml", ("agent.cota.judge=true",))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    values = {
        "profile": "tiny",
        "agent": {"cota": {"judge": True}},
        "judge": {"model": "m", "cache": str(tmp_path / "c.sqlite")},
    }
    with pytest.raises(ValueError, match="set the environment variable OPENAI_API_KEY"):
        cota.run(
            Config.model_validate(values),
            inputs={"model": tmp_path / "none"},
            out=tmp_path,
            scratch=tmp_path,
            log=silent,
        )


@pytest.mark.slow
def test_the_stage_has_its_traces_judged_tells_what_it_cost_and_asks_nothing_when_it_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tiny.build(), tmp_path / "model", metadata={})
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    logged: list[dict[str, float]] = []

    def run(name: str, **judge: object) -> dict[str, float]:
        values = {
            "profile": "tiny",
            "agent": {"families": ["easy", "pattern"], "cota": {"train": 10, "val": 5, "judge": bool(judge)}},
            "judge": judge,
        }
        (tmp_path / name).mkdir()
        words: dict[str, Any] = {
            "inputs": {"model": tmp_path / "model"},
            "out": tmp_path / name,
            "scratch": tmp_path,
        }
        return cota.run(
            Config.model_validate(values), log=lambda metrics, step: logged.append(metrics), **words
        )

    off = run("off")
    with serving(says('{"score": 5}')) as server:
        judge = {
            "model": "m",
            "base_url": server.url,
            "cache": str(tmp_path / "judge.sqlite"),
            "concurrency": 4,
        }
        logged.clear()
        found = run("on", **judge)
        asked = len(server.seen)
        assert 0 < asked <= 30 + 2 * 2  # traces alike in words are asked about once
        assert sum(metrics.get("judge/calls", 0) for metrics in logged) == asked
        assert run("again", **judge) == found
        assert len(server.seen) == asked
    assert files(tmp_path / "again") == files(tmp_path / "on")
    assert {name: value for name, value in found.items() if "judge" not in name} == off
    assert (found["train/judge/judged"], found["val/judge/repeated"], found["train/judge/mean_score"]) == (
        20,
        1,
        5,
    )
    plain, judged = read_traces(tmp_path / "off/train"), read_traces(tmp_path / "on/train")
    assert {one.provenance["judge"] for one in judged} == {"m"}
    assert [one.model_copy(update={"provenance": {}}) for one in judged] == [
        one.model_copy(update={"provenance": {}}) for one in plain
    ]
    assert files(tmp_path / "on").keys() == files(tmp_path / "off").keys()


SHARED = """
import sys
from pathlib import Path
from tests.agent import test_judging
if __name__ == "__main__":  # the process for operations imports this file
    test_judging.run_shared(Path(sys.argv[1]), sys.argv[2])
"""


def run_shared(folder: Path, url: str) -> None:
    """The judge of each process has a cache of its own: what the second one asks would be seen."""
    with (
        dist.process_group(),
        Toolbox() as toolbox,
        closing(
            EndpointJudge(
                Endpoint(model="m", base_url=url, concurrency=4),
                cache=folder / f"judge-{dist.rank()}.sqlite",
            )
        ) as endpoint,
    ):
        written = write(folder / "traces", toolbox, endpoint)
    (folder / f"{dist.rank()}.json").write_text(json.dumps(cota.counted(written)))


@pytest.mark.slow
def test_with_two_processes_the_first_one_asks_and_the_files_are_those_of_one(
    drawn: list[Trace], toolbox: Toolbox, make: Make, tmp_path: Path
) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    bad = next(found for found in drawn if found.kind == "golden" and found.family == "pattern")
    with serving(scores(1, of=json.dumps(bad.turns[1].text))) as server:
        alone = cota.counted(write(tmp_path / "alone", toolbox, make(server.url)))
        assert len(server.seen) == len(drawn) + 2
        launch(script, str(tmp_path), server.url, processes=2)
        assert len(server.seen) == 2 * (len(drawn) + 2)
    assert alone["dropped/pattern/low_score"] == 1
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)] == [alone, alone]
    assert files(tmp_path / "traces") == files(tmp_path / "alone")
