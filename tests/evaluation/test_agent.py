"""`ans eval BENCHMARK --agent`: an agent on a benchmark, without tools and with them."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from ans_core.agent import answering
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import PlayedEpisode, play
from ans_core.agent.policy import AgentPolicy, add_call_tokens
from ans_core.agent.protocol import Call, call_text
from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.registry import SCORERS, runnable
from ans_core.checkpoints import checkpoint
from ans_core.evaluation import agent as eval_agent
from ans_core.evaluation import score as eval_score
from ans_core.evaluation import session as eval_run
from ans_core.model import quantization
from ans_core.types import Request
from flows import cli
from tests import tiny
from tests.benchmarks.public.drawn import write
from tests.benchmarks.public.question_sets import SETS
from tests.evaluation.test_session import session_of
from tests.judge.chat_server import Handler, fails, says, serving
from tests.model.test_quantization import quantizes

EPISODE = "agent: {episode: {calls: 2, turn_tokens: 4}}\n"
ZOOM = call_text(Call(name="zoom_in", arguments={"bbox_2d": [0, 0, 500, 500]}))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, and an agent on it that learned nothing."""
    folder, model = tmp_path_factory.mktemp("trained"), tiny.build()
    checkpoint.save(model, folder / "base", metadata={})
    policy = AgentPolicy(
        model, lora={"rank": 4, "alpha": 8, "dropout": 0.0}, rows=add_call_tokens(model, OPERATIONS), seed=1
    )
    policy.save(folder / "agent", base_hash=checkpoint.weights_hash(folder / "base"), about={"stage": "rft"})
    return folder


@pytest.fixture
def workspace(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Base and agent, and a drawn V*Bench of three questions."""
    for module in (eval_run, eval_agent, eval_score):
        monkeypatch.setattr(module, "root", lambda: tmp_path)
    monkeypatch.setattr("flows.eval_command.log_to_mlflow", lambda *_: None)
    (tmp_path / "params.yaml").write_text("profile: drawn\n" + EPISODE)
    for name in ("base", "agent"):
        (tmp_path / name).symlink_to(trained / name)
    for number in range(3):
        path = tmp_path / "vstar/direct_attributes" / f"{number}.png"
        write(path.with_suffix(".json"), {"question": "Which colour?", "options": ["red", "blue"]})
        path.write_bytes(tiny.picture(number))
    (tmp_path / "vstar/relative_position").mkdir()
    return tmp_path


def ans(*words: object) -> int:
    arguments: argparse.Namespace = cli.parse([str(word) for word in words])
    status: int = arguments.function(arguments)
    return status


def looking(*given: Any, **options: Any) -> list[PlayedEpisode]:
    """Zooms in once where calls are not forbidden, and answers `B` (whatever the model would say)."""
    plan = ["B"] if options["forbidden"] else [ZOOM, "A"]
    return play(*given, **options, plans=[plan] * len(given[2]))


@pytest.mark.slow
def test_both_ways_are_scored_and_compared(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answering, "play", looking)
    given = [
        "eval",
        "vstar",
        "--model",
        workspace / "base",
        "--agent",
        workspace / "agent",
        "--data",
        workspace / "vstar",
    ]
    assert ans(*given, "--out", workspace / "out", "--batch", 2) == 0
    shown = capsys.readouterr().out
    assert "without tools -> with tools" in shown
    without, with_ = (
        json.loads((workspace / "out" / way / "metrics.json").read_text())
        for way in ("without_tools", "with_tools")
    )
    letters = [
        json.loads(line)["letter"]
        for line in (workspace / "out/with_tools/predictions.jsonl").read_text().splitlines()
    ]
    assert without["metrics"]["accuracy"] == letters.count("B") / 3
    assert with_["metrics"]["accuracy"] == letters.count("A") / 3
    assert without["notes"][-1].startswith("RaPR 0.000, 0.00 calls an episode; 0 of 3")
    assert with_["notes"][-1].startswith("RaPR 1.000, 1.00 calls an episode; 0 of 3")
    assert next((workspace / "out/side_by_side").glob("*.html")).is_file()
    settings = json.loads((workspace / "out/with_tools/settings.json").read_text())
    assert (settings["tools"], settings["episode"]["calls"]) == (True, 2)
    told = workspace / "out/with_tools/predictions.jsonl"
    assert ans("eval", "score", "vstar", "--predictions", told, "--out", workspace / "again.json") == 0
    assert json.loads((workspace / "again.json").read_text())["metrics"] == with_["metrics"]


METRICS = {
    "vstar": "accuracy",
    "tallyqa_complex": "accuracy",
    "infographicsvqa": "ANLS",
    "mmmu_val": "accuracy",
    "mm_vet": "score",
    "mathvista": "accuracy",
    "virl39k": "accuracy",
}


def judge(handler: Handler) -> None:
    """Grade a true answer of MM-Vet 1 and another one 0; find no answer in what no rule of MathVista's
    reads."""
    found = re.search(r"True answer: ([^|]*) \| Given answer: ([^|]*) \| Grade:$", handler.seen.asked)
    grade = "none" if found is None else str(float(found[1].replace(" ", "") == found[2].replace(" ", "")))
    says(grade)(handler)


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_every_set_is_asked_in_both_ways_scored_and_compared(
    name: str, workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first question is left to the model, which has learned nothing; the others are answered right after
    a look, and wrong without."""
    data, runner, main = SETS[name](workspace / "data"), runnable(name)[1], METRICS[name]
    _, *others = runner.items(data, runner.splits[0])
    right = {answering._request(item, None).text: item.truth.text for item in others if item.truth}

    def answering_right(*given: Any, **options: Any) -> list[PlayedEpisode]:
        told = [right.get(request.text) for request in given[2]]
        plans = [
            [] if text is None else ["no idea"] if options["forbidden"] else [ZOOM, text] for text in told
        ]
        return play(*given, **options, plans=plans)

    monkeypatch.setattr(answering, "play", answering_right)
    given = [
        "eval",
        name,
        "--model",
        workspace / "base",
        "--agent",
        workspace / "agent",
        "--data",
        data,
        "--out",
        workspace / "out",
    ]
    with serving(judge) as server:
        (workspace / "params.yaml").write_text(
            f"profile: drawn\njudge: {{model: m, base_url: {server.url}, api_key_env: NONE}}\n{EPISODE}"
        )
        assert ans(*given, "--batch", 2) == 0
    count = len(others) + 1
    ways = {
        way: json.loads((workspace / "out" / way / "metrics.json").read_text())
        for way in ("without_tools", "with_tools")
    }
    assert ways["without_tools"]["metrics"][main] == 0.0
    assert ways["with_tools"]["metrics"][main] == pytest.approx(len(others) / count)
    calls = {
        way: [json.loads(line)["calls"] for line in (workspace / "out" / way / "predictions.jsonl").open()]
        for way in ways
    }
    assert calls == {"without_tools": [0] * count, "with_tools": [0] + [1] * len(others)}
    compared = json.loads((workspace / "out/side_by_side/comparison.json").read_text())
    (change,) = (change for change in compared["changes"] if change["metric"] == main)
    assert (change["before"], change["after"], change["pairs"]) == (
        0.0,
        pytest.approx(len(others) / count),
        count,
    )
    shown = capsys.readouterr().out
    assert "without tools -> with tools" in shown
    scorer = SCORERS[name]
    for way, own in ways.items():
        words: list[object] = [
            "eval",
            "score",
            name,
            "--predictions",
            workspace / "out" / way / "predictions.jsonl",
        ]
        words += ["--data", data] if scorer.needs_data else []
        words += (
            ["--replay", workspace / "out" / way / "metrics.judge.json"]
            if "judge: m" in str(own["notes"])
            else []
        )
        assert ans(*words, "--out", workspace / f"{way}.json") == 0
        assert json.loads((workspace / f"{way}.json").read_text())["metrics"] == own["metrics"]
    assert (
        ans("eval", "compare", *(workspace / f"{way}.json" for way in ways), "--out", workspace / "compared")
        == 0
    )
    assert json.loads((workspace / "compared/comparison.json").read_text())["changes"] == compared["changes"]


@pytest.mark.slow
def test_figures_that_can_not_be_compared_do_not_keep_the_next_benchmark_from_its_own(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One question has no interval; a judge that is down once leaves the figures of an earlier run behind."""
    monkeypatch.setattr(answering, "play", looking)
    for name in ("vstar", "mm_vet"):
        SETS[name](workspace / "data/benchmarks" / name)
    given = ["--model", workspace / "base", "--agent", workspace / "agent"]
    assert ans("eval", "vstar,tallyqa_complex", *given, "--limit", 1) == eval_run.SKIPPED
    shown = capsys.readouterr().out
    assert "no comparison: " in shown
    assert "have 1 samples in common; at least two are needed" in shown
    assert "tallyqa_complex is not there" in shown
    for respond in (judge, fails(400)):
        with serving(respond) as server:
            named = f"judge: {{model: {respond.__name__}, base_url: {server.url}, api_key_env: NONE}}"
            (workspace / "params.yaml").write_text(f"profile: drawn\n{named}\n{EPISODE}")
            assert ans("eval", "mm_vet,vstar", *given) == 0
    shown = capsys.readouterr().out
    assert "no comparison: " in shown
    assert "score both with `ans eval score mm_vet --replay`, and `ans eval compare` them" in shown
    assert shown.count("accuracy/direct_attributes") == 4  # of V*, in both ways, twice


@pytest.mark.slow
@quantizes
def test_an_agent_in_8_bits_is_another_evaluation(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both ways are answered by one model in 8 bits; the agent as it is stored has the folder that it had
    before."""
    monkeypatch.setattr(answering, "play", looking)
    loaded: list[eval_agent.Loaded] = []

    class Loaded(eval_agent.Loaded):
        def __init__(self, arguments: argparse.Namespace) -> None:
            super().__init__(arguments)
            loaded.append(self)

    monkeypatch.setattr(eval_agent, "Loaded", Loaded)
    given = [
        "eval",
        "vstar",
        "--model",
        workspace / "base",
        "--agent",
        workspace / "agent",
        "--data",
        workspace / "vstar",
    ]
    assert ans(*given, "--quantize", "int8") == 0
    (one,) = loaded
    assert any(quantization.is_quantized(p) for p in one.policy.model.vlm.model.language_model.parameters())
    (out,) = (workspace / ".ans/eval").iterdir()
    for way in ("without_tools", "with_tools"):
        assert json.loads((out / way / "settings.json").read_text())["quantize"] == "int8"
        assert json.loads((out / way / "metrics.json").read_text())["metrics"]
    plain = session_of("vstar", cli.parse([str(word) for word in given]))
    assert "quantize" not in plain.settings
    assert plain.out != out


def test_an_agent_in_8_bits_needs_torchao_and_fp8_a_gpu(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_agent, "Loaded", lambda *_: pytest.fail("an agent was loaded"))
    given = [
        "eval",
        "vstar",
        "--model",
        workspace / "base",
        "--agent",
        workspace / "agent",
        "--data",
        workspace / "vstar",
    ]
    monkeypatch.setattr(quantization, "missing", lambda: False)
    with pytest.raises(ValueError, match="which a CPU does not: use 'int8' here"):
        ans(*given, "--quantize", "fp8", "--device", "cpu")
    monkeypatch.setattr(quantization, "missing", lambda: True)
    with pytest.raises(ValueError, match="quantize 'int8' needs torchao, which is an extra"):
        ans(*given, "--quantize", "int8")


def test_what_ends_an_agents_answer_and_reads_its_texts_is_part_of_the_evaluation(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [
        "eval",
        "vstar",
        "--model",
        workspace / "base",
        "--agent",
        workspace / "agent",
        "--data",
        workspace / "vstar",
    ]

    def asked(*more: object) -> eval_run.Session:
        return session_of("vstar", cli.parse([str(word) for word in (*given, *more)]))

    plain, same, longer = asked(), asked("--max-tokens", 4), asked("--max-tokens", 512)
    assert (plain.settings["max_tokens"], longer.settings["max_tokens"]) == (4, 512)
    assert plain.out == same.out != longer.out
    assert asked("--reader", "template").out != plain.out
    assert plain.settings["ocr"] == "rapidocr"  # it is not known what this agent was trained with
    own = workspace / "template"
    shutil.copytree(workspace / "agent", own)
    values = json.loads((own / "delta.json").read_text())
    (own / "delta.json").write_text(json.dumps(values | {"config": values["config"] | {"ocr": "template"}}))
    assert [asked("--agent", own, *more).settings["ocr"] for more in ((), ("--reader", "rapidocr"))] == [
        "template",
        "rapidocr",
    ]


def test_what_an_agent_cannot_be_asked_is_refused_before_it_is_loaded(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(eval_agent, "Loaded", lambda *_: pytest.fail("an agent was loaded"))
    region = Item(
        name="7",
        request=Request(
            frames=(tiny.picture(0),),
            text="<image>\nWhat is region1?",
            mask_prompts=(tiny.square(0, 0, 9, 9),),
        ),
    )
    with pytest.raises(ValueError, match="question 7 is about regions or asks for masks"):
        answering.check(region)
    with pytest.raises(ValueError, match=r"holds no delta\.json; give what `agent_sft` or `rft` wrote"):
        ans(
            "eval",
            "vstar",
            "--model",
            workspace / "base",
            "--agent",
            workspace,
            "--data",
            workspace / "vstar",
        )
    with pytest.raises(ValueError, match="on a plain base; davis17 has none"):
        ans("eval", "davis17", "--model", workspace / "base", "--agent", workspace / "agent")
    with pytest.raises(
        ValueError, match="--reader says what an agent's read_text reads with: give --agent, or leave it out"
    ):
        ans("eval", "vstar", "--model", workspace / "base", "--reader", "template")
    with pytest.raises(ValueError, match="ans eval score takes no --reader"):
        ans("eval", "score", "vstar", "--predictions", workspace, "--reader", "template")
    with pytest.raises(ValueError, match="leave --video-mode and --dtype out"):
        ans(
            "eval",
            "vstar",
            "--model",
            workspace / "base",
            "--agent",
            workspace / "agent",
            "--dtype",
            "bfloat16",
        )
    gone = [
        "eval",
        "vstar",
        "--model",
        workspace / "base",
        "--agent",
        workspace / "agent",
        "--data",
        workspace / "nowhere",
    ]
    assert ans(*gone, "--out", workspace / "gone") == eval_run.SKIPPED
    with pytest.raises(ValueError, match="ans eval score takes no --agent"):
        ans("eval", "score", "vstar", "--agent", workspace / "agent")
