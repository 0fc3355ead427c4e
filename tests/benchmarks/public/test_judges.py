"""Benchmarks whose answers a judge reads: what it is asked, what is kept of its replies, that those give the
same figures again."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ans_core.benchmarks.public import files, gar_judge
from ans_core.benchmarks.public.scored import Inputs, Scored
from ans_core.benchmarks.registry import SCORERS
from ans_core.evaluation import score as eval_score
from ans_core.judge.chat import Endpoint
from ans_core.judge.endpoint import EndpointJudge, NoReplyError
from ans_core.judge.wording import Request
from flows import cli
from tests import tiny
from tests.benchmarks.public.drawn import write
from tests.golden import REFERENCE
from tests.judge.chat_server import body, fails, says, serving

REPLAY = REFERENCE / "data"
recorded = pytest.mark.skipif(not (REPLAY / "replay").is_dir(), reason="no recorded replies in ANS_REFERENCE")


class Known:
    """A judge with a function for a head."""

    name = "known"

    def __init__(self, reply: Callable[[Request], str]) -> None:
        self.reply = reply

    def ask(self, requests: Sequence[Request], *, desc: str) -> list[str]:
        return [self.reply(request) for request in requests]


def judged(name: str, given: Inputs, reply: Callable[[Request], str], out: Path) -> Scored:
    scorer = SCORERS[name]
    assert scorer.judging is not None
    assert scorer.judging.needed(given)
    found = scorer.score(scorer.judging.ask(given, Known(reply), out))
    assert any("judge: known" in note for note in found.notes)
    return found


@pytest.mark.slow
@recorded
def test_dlc_benchs_judge_is_asked_as_the_recorded_one_was_and_its_replies_give_the_official_figures(
    tmp_path: Path,
):
    folder = REPLAY / "dlc_bench"
    record = json.loads((folder / "dam_3b_v1_eval.json").read_text())
    kinds = ("details_recognition", "details_positives", "details_negatives")
    replies: dict[str, str] = {}
    for entry in (entry for entry in record.values() if isinstance(entry, dict)):
        answers = {
            a["question_index"] + 1 if "question_index" in a else 0: a["pred_answer"]
            for kind in kinds
            for a in entry[kind]
        }
        replies |= {prompt: answers[n] for n, prompt in enumerate(entry["prompt"])}
    assert len(replies) == 992
    given = Inputs(predictions=folder / "dam_3b_v1.json", data=folder)
    found = judged("dlc_bench", given, lambda request: replies[str(request.user)], tmp_path / "judge.json")
    assert found.metrics["positive"] == pytest.approx(record["avg_pos"], rel=1e-12)
    assert found.metrics["negative"] == pytest.approx(record["avg_neg"], rel=1e-12)
    again = SCORERS["dlc_bench"].score(
        Inputs(predictions=given.predictions, data=folder, replay=tmp_path / "judge.json")
    )
    assert again.metrics == found.metrics
    assert again.notes == found.notes


@recorded
def test_ferret_benchs_judge_reads_context_reference_and_answer(tmp_path: Path):
    folder = REPLAY / "replay/ferret_bench"
    reviews = files.records(folder / "gar_1b_review.jsonl.gz")
    asked: list[Request] = []

    def reply(request: Request) -> str:
        asked.append(request)
        (review,) = (r for r in reviews if f"[Assistant 2]\n{r['answer2']}\n\n[End of" in request.user)
        assert f"[Assistant 1]\n{review['answer1']}\n\n[End of Assistant 1]" in request.user
        return str(review["content"])

    given = Inputs(predictions=folder / "gar_1b_answer.jsonl.gz", data=folder)
    assert judged("ferret_bench", given, reply, tmp_path / "review.jsonl").published["score"] == "56.0"
    assert str(asked[0].user).startswith("[Context]\\Objects:\nObject 0 : arrows at")
    assert "avoiding any potential bias" in asked[0].user
    few = write(tmp_path / "few.jsonl", files.records(given.predictions)[:3])
    with pytest.raises(ValueError, match=r"37 questions are not answered: .*--predicted-only"):
        judged("ferret_bench", Inputs(predictions=few, data=folder), reply, tmp_path / "review.jsonl")
    some = judged(
        "ferret_bench",
        Inputs(predictions=few, data=folder, predicted_only=True),
        reply,
        tmp_path / "review.jsonl",
    )
    assert (some.metrics["questions"], some.missing) == (3, 0)


@pytest.mark.parametrize("detailed", [False, True])
def test_gar_benchs_judge_sees_the_picture_and_every_region(tmp_path: Path, detailed: bool):
    (tmp_path / "images").mkdir()
    (tmp_path / "images/a.png").write_bytes(tiny.picture(0))
    about = (
        {"subject_name": "cat", "object_name": "mat", "predicate_name": "on"}
        if detailed
        else {"question": "Where?", "answer": "there"}
    )
    question = {
        "image": "images/a.png",
        "mask_rles": [tiny.square(0, 0, 9, 9), tiny.square(20, 20, 30, 30)],
        **about,
    }
    name = "Detailed" if detailed else "Simple"
    write(tmp_path / f"GAR-Bench-Caption-{name}.json", [question])
    told = write(
        tmp_path / "told.jsonl",
        [{key: v for key, v in question.items() if key != "mask_rles"} | {"model_output": "It lies there."}],
    )

    def reply(request: Request) -> str:
        pictures = [Image.open(io.BytesIO(part)).size for part in request.user if isinstance(part, bytes)]
        assert pictures[0] == (64, 64)
        assert len(pictures) == 5
        words = " ".join(part for part in request.user if isinstance(part, str))
        assert all(value in words for value in [*about.values(), "It lies there.", "<Prompt1>"])
        return "True"

    found = judged("gar_bench", Inputs(predictions=told, data=tmp_path), reply, tmp_path / "judge.json")
    assert found.metrics[f"caption_{name.lower()}/accuracy"] == 1.0
    assert "in other words than the benchmark's" in found.notes[-1]


def test_a_region_is_shown_with_its_surroundings():
    mask = np.zeros((500, 400), bool)
    mask[200:300, 10:20] = True  # 100 x 10, widened to 56
    rows, columns = gar_judge.surroundings(mask)
    assert (rows, columns) == (slice(100, 400), slice(0, 99))  # the middle is 15: from -13 - 56 to -13 + 112


def judge_at(url: str, cache: Path, **settings: Any) -> closing[EndpointJudge]:
    endpoint = Endpoint(**{"model": "m", "base_url": url, "timeout_s": 5.0, "retries": 0} | settings)
    return closing(EndpointJudge(endpoint, cache=cache / "judge.sqlite", deadline_s=None))


def test_free_text_is_asked_without_a_schema_and_kept(tmp_path: Path):
    requests = [Request(system="", user=f"question {n}", schema=None, max_tokens=9) for n in range(3)]
    shown = Request(system="Look.", user=("This:", b"\x89PNG", "?"), schema=None, max_tokens=9)
    with serving(says("A. Yes")) as server, judge_at(server.url, tmp_path) as judge:
        assert judge.ask([*requests, shown], desc="d") == ["A. Yes"] * 4
        assert judge.ask([*requests[:2], shown], desc="d") == ["A. Yes"] * 3
        assert len(server.seen) == 4  # the others were known
        assert judge.name == f"m at {server.url}"
        (body,) = (seen.body for seen in server.seen if len(seen.body["messages"]) == 2)
        assert (
            body["messages"][1]["content"][1]["image_url"]["url"]
            == "data:image/png;base64," + base64.b64encode(b"\x89PNG").decode()
        )
        assert body["temperature"] == 0
        assert not any("response_format" in seen.body for seen in server.seen)
    with serving(says("C")) as server, judge_at(server.url, tmp_path) as judge:
        assert judge.ask(requests[:1], desc="d") == ["C"]  # another server's reply is not known
    with (
        serving(says("B"), fails(400)) as server,
        judge_at(server.url, tmp_path, model="other", concurrency=1) as judge,
        pytest.raises(NoReplyError, match=r"left 2 of 3 requests without a reply .*run again to go on"),
    ):
        judge.ask(requests, desc="d")
    with serving(says("")) as server, judge_at(server.url, tmp_path) as judge:
        for _ in range(2):  # an empty reply is one, and not kept
            assert judge.ask(requests[:1], desc="d") == [""]
        assert len(server.seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize("text", ['{"error": {"code": 403}}', "{}", '{"choices": []}'])
def test_status_200_without_a_reply_is_told_and_never_scored(tmp_path: Path, text: str):
    requests = [Request(system="", user=f"question {n}", schema=None, max_tokens=9) for n in range(3)]
    message = r"left 2 of 3 requests without a reply \(the judge's endpoint failed: "
    with (
        serving(says("B"), body(text)) as server,
        judge_at(server.url, tmp_path, concurrency=1) as judge,
        pytest.raises(NoReplyError, match=message),
    ):
        judge.ask(requests, desc="d")


def test_a_judge_is_asked_where_the_settings_name_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(eval_score, "root", lambda: tmp_path)
    questions = [
        {"question": "?", "type": kind, "choices": [["right", 1], ["wrong", -1]]}
        for kind in ("positive", "negative")
    ]
    write(tmp_path / "annotations.json", {"annotations": [{"id": 7}]})
    write(tmp_path / "qa.json", {"7": questions})
    write(tmp_path / "class_names.json", {"7": "scissors"})
    told = write(tmp_path / "told.json", {"7": "a pair of scissors"})
    words = [
        "eval",
        "score",
        "dlc_bench",
        "--predictions",
        str(told),
        "--data",
        str(tmp_path),
        "--out",
        str(tmp_path / "out/metrics.json"),
    ]
    arguments = cli.parse(words)
    with pytest.raises(ValueError, match=r"scored by a judge: name one in params\.yaml .*--replay REPLIES"):
        arguments.function(arguments)
    with serving(says("A. Yes"), says("right"), says("wrong")) as server:
        judge = f"judge: {{model: tiny-judge, base_url: '{server.url}', concurrency: 1}}"
        (tmp_path / "params.yaml").write_text(f"profile: x\n{judge}\n")
        assert arguments.function(arguments) == 0
    assert "judge: tiny-judge at http://127" in capsys.readouterr().out
    found = json.loads((tmp_path / "out/metrics.json").read_text())
    assert (found["metrics"]["positive"], found["metrics"]["negative"]) == (1.0, -1.0)
    assert json.loads((tmp_path / "out/metrics.judge.json").read_text())["judge"].startswith("tiny-judge")
