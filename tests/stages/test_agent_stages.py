"""The agent's stages one after the other on a model that knows nothing: what they write, and that a killed
run goes on."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from ans_core import dist, precision
from ans_core.agent import ocr
from ans_core.agent import policy as policies
from ans_core.agent.evaluation import costs
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.practice import sample_of
from ans_core.agent.world import traces
from ans_core.agent.world.annotated_clips import FAMILIES_OF_PICTURES
from ans_core.agent.world.bank import QuestionBank
from ans_core.agent.world.question import Question
from ans_core.agent.world.trace_file import SHARES, Trace, mix, read_traces
from ans_core.checkpoints import checkpoint
from ans_core.config import Config
from ans_core.stages import agent_evaluate, agent_report, agent_sft, cota, online, prepare, rft
from ans_core.types import Log
from tests import tiny
from tests.agent.test_annotated import five_photographs
from tests.half_products import HalfProducts
from tests.workspace import launch

pytestmark = pytest.mark.slow
CONFIG = Config.model_validate(
    {
        "profile": "tiny",
        "prepare": {"scenes": 8, "val_scenes": 3, "test_scenes": 0, "clips": 0, "val_clips": 0, "image_size": 64},
        "sft": {"mask_points": 50, "mask_size": 32, "questions_per_image": 2},
        "evaluate": {"benchmarks": ["referring"], "max_tokens": 4, "batch": 4},
        "agent": {
            "reader": "template",
            "families": ["easy", "pattern", "text"],
            "episode": {"turn_tokens": 4, "batch": 8},
            "cota": {"train": 10, "more": {"text": 13}, "val": 10},
            "sft": {
                "optim": {"steps": 4, "batch": 4, "lr": 1e-3, "save_every": 1},
                "lora": {"rank": 2, "alpha": 4}, "curriculum": [0.5, 0.25, 0.25], "checked": 1,
                "referring": 0.5,
            },
            "rft": {
                "often": {"text": 2}, "optim": {"steps": 3, "batch": 2, "lr": 1e-3, "save_every": 1},
                "samples_every": 2, "phases": {"every": 1, "base": {"threshold": 0.0, "steps": 9}},
            },
            "evaluate": {"each": 2, "control_each": 1, "referring": 2, "shown": 1},
        },
    }
)  # fmt: skip
SFT = ("data", "model", "agent/cota")
RFT = ("model", "agent/cota", "agent/sft/tools")


def silent(metrics: dict[str, float], step: int) -> None:
    assert all(isinstance(value, int | float) for value in metrics.values())


def run(  # type: ignore[no-untyped-def]
    stage,
    folder: Path,
    name: str,
    inputs: tuple[str, ...],
    *,
    log: Log = silent,
    cfg: Config = CONFIG,
    **words: str,
) -> Path:
    out = folder / name
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    stage.run(
        cfg,
        inputs={k: folder / k for k in inputs},
        out=out,
        scratch=folder / "scratch" / name,
        log=log,
        **words,
    )
    return out


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    checkpoint.save(tiny.build(), folder / "model", metadata={})
    run(prepare, folder, "data", ())
    run(cota, folder, "agent/cota", ("model",))
    for row in ("tools", "direct"):
        run(agent_sft, folder, f"agent/sft/{row}", SFT, row=row)
    run(rft, folder, "agent/rft", RFT)
    for row, made in (
        ("direct", "agent/sft/direct"),
        ("oracle", "agent/cota"),
        ("sft", "agent/sft/tools"),
        ("rft", "agent/rft"),
    ):
        run(agent_evaluate, folder, f"agent/evaluate/{row}", ("data", "model", "agent/cota", made), row=row)
    run(
        agent_report,
        folder,
        "agent/report",
        tuple(f"agent/evaluate/{row}" for row in ("direct", "oracle", "sft", "rft")),
    )
    return folder


def test_questions_about_a_users_photographs_are_learned_and_asked_beside_the_drawn_ones(
    runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    five_photographs(tmp_path / "mine")
    for name in ("model", "data"):
        (tmp_path / name).symlink_to(runs / name)
    values = CONFIG.model_dump()
    source = {"name": "mine", "format": "annotations", "path": str(tmp_path / "mine"), "hold_out": 0.5}
    values["agent"] |= {"families": ["easy", "text"], "sources": [source], "source_share": 0.5}
    values["agent"]["evaluate"] |= {"each": 3, "control_each": 2}
    values["agent"]["rft"]["optim"] |= {"batch": 4}
    cfg = Config.model_validate(values)
    run(cota, tmp_path, "agent/cota", ("model",), cfg=cfg)
    traces_of = {split: read_traces(tmp_path / "agent/cota" / split) for split in ("train", "val")}
    pictures = {
        split: {trace.frames[0] for trace in read if trace.provenance["source"] == "annotated"}
        for split, read in traces_of.items()
    }
    assert pictures["train"]
    assert pictures["val"]
    assert not pictures["train"] & pictures["val"]
    assert sum(map(len, pictures.values())) == 5
    asked: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rft, "sample_of", lambda q: asked.update([q.family]) or sample_of(q))
        run(agent_sft, tmp_path, "agent/sft/tools", SFT, cfg=cfg, row="tools")
        run(rft, tmp_path, "agent/rft", RFT, cfg=cfg)
    of_pictures = sum(number for family, number in asked.items() if family in FAMILIES_OF_PICTURES)
    assert (of_pictures, asked.total()) == (6, 12)
    assert asked["text"] == 4  # twice as often as `easy`
    assert {"is_there", "which_larger", "left_or_right", "which_colour"} < asked.keys()
    for row, made in (("oracle", "agent/cota"), ("sft", "agent/sft/tools"), ("rft", "agent/rft")):
        needed = ("data", "model", "agent/cota", made)
        run(agent_evaluate, tmp_path, f"agent/evaluate/{row}", needed, cfg=cfg, row=row)
    oracle = json.loads((tmp_path / "agent/evaluate/oracle/metrics.json").read_text())
    assert oracle["pictures/accuracy"] == oracle["pictures/faithful_calls"] == 1
    assert oracle["is_there/questions"] == 3
    assert "forbidden/pictures/accuracy" in json.loads(
        (tmp_path / "agent/evaluate/rft/metrics.json").read_text()
    )
    rows = tuple(f"agent/evaluate/{row}" for row in ("oracle", "sft", "rft"))
    page = (run(agent_report, tmp_path, "agent/report", rows, cfg=cfg) / "episodes.html").read_text()
    assert "needed/accuracy" in page
    assert "pictures/accuracy" in page
    assert "left or right of the" in page


def test_a_set_of_questions_and_answers_is_practised_and_asked_without_traces(
    runs: Path, tmp_path: Path
) -> None:
    (tmp_path / "mine").mkdir()
    five_photographs(tmp_path / "mine")
    files = sorted(path.name for path in (tmp_path / "mine").glob("*.png"))
    records = [
        {
            "image": [file, files[0]] if n % 2 else file,
            "task": "conversation",
            "question": f"What is it, {n}?",
        }
        | {"answer": "7"}
        | {"split": "train" if n < 3 else "val"}
        for n, file in enumerate(files)
    ]
    (tmp_path / "mine/annotations.json").write_text(json.dumps(records))
    for name in ("model", "data", "agent/sft"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(runs / name)
    values = CONFIG.model_dump()
    source = {"name": "mine", "format": "annotations", "path": str(tmp_path / "mine")}
    values["agent"] |= {"families": ["easy", "text"], "sources": [source], "source_share": 0.5}
    values["agent"]["evaluate"] |= {"each": 2, "control_each": 2}
    values["agent"]["rft"]["optim"] |= {"batch": 4}
    cfg = Config.model_validate(values)
    run(cota, tmp_path, "agent/cota", ("model",), cfg=cfg)
    assert {trace.family for trace in read_traces(tmp_path / "agent/cota/train")} == {"easy", "text"}
    shown: list[Question] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rft, "sample_of", lambda q: shown.append(q) or sample_of(q))
        run(rft, tmp_path, "agent/rft", RFT, cfg=cfg)
    asked = Counter(question.family for question in shown)
    assert (asked["qa_mine"], asked.total()) == (6, 12)
    assert {len(question.frames) for question in shown if question.family == "qa_mine"} == {1, 2}
    for row, made in (("oracle", "agent/cota"), ("rft", "agent/rft")):
        run(
            agent_evaluate,
            tmp_path,
            f"agent/evaluate/{row}",
            ("data", "model", "agent/cota", made),
            cfg=cfg,
            row=row,
        )
    figures = {
        row: json.loads((tmp_path / f"agent/evaluate/{row}/metrics.json").read_text())
        for row in ("oracle", "rft")
    }
    assert figures["rft"]["qa_mine/questions"] == 2
    assert "forbidden/question_sets/accuracy" in figures["rft"]
    assert not {name for name in figures["rft"] if name.startswith("plan/q")}
    assert not {name for name in figures["oracle"] if "qa_mine" in name}  # nobody knows their plan
    values["agent"] |= {"families": []}
    with pytest.raises(ValueError, match=r"no trace can be made of the questions of 'train'"):
        run(cota, tmp_path, "agent/none", ("model",), cfg=Config.model_validate(values))


def test_no_stage_multiplies_in_bf16_where_that_is_emulated(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a base in bf16, as published weights are."""
    monkeypatch.setattr(precision, "cpu_times", lambda: {"fp32": 1.0, "bf16": 9.0})
    checkpoint.save(tiny.build().to(torch.bfloat16), tmp_path / "model", metadata={})
    (tmp_path / "data").symlink_to(runs / "data")
    with HalfProducts() as seen:
        run(cota, tmp_path, "agent/cota", ("model",))
        run(agent_sft, tmp_path, "agent/sft/tools", SFT, row="tools")
        run(rft, tmp_path, "agent/rft", RFT)
        for row, made in (("oracle", "agent/cota"), ("rft", "agent/rft")):
            run(
                agent_evaluate,
                tmp_path,
                f"agent/evaluate/{row}",
                ("data", "model", "agent/cota", made),
                row=row,
            )
    assert seen.counts == {}


def test_traces_are_mixed_and_the_adapter_names_its_base(runs: Path) -> None:
    operated = [trace for trace in read_traces(runs / "agent/cota/train") if trace.family != "easy"]
    assert mix(operated) == pytest.approx(SHARES, abs=0.05)
    base = checkpoint.weights_hash(runs / "model")
    tensors, config = checkpoint.load_delta(runs / "agent/sft/tools", base_hash=base)
    assert {name.split(".")[-1] for name in tensors} == {"weight", "bias", "*"}
    assert (config["row"], config["lora"]["rank"]) == ("tools", 2)
    moved = json.loads((runs / "agent/sft/tools/moved.json").read_text())
    assert {part for part, did in moved.items() if did} == {
        f"{p} (trained)" for p in ("projector", "embeddings", "language model", "head")
    }
    parts = json.loads((runs / "agent/sft/tools/curriculum.json").read_text())
    assert [(part["part"], part["steps"]) for part in parts] == [("simple", 2), ("medium", 2)]


def test_a_run_killed_between_two_parts_ends_with_the_same_bits(runs: Path) -> None:
    first = (runs / "agent/sft/tools" / checkpoint.DELTA_WEIGHTS).read_bytes()
    shutil.rmtree(runs / "scratch/agent/sft/tools/medium")
    states = sorted(path.name for path in (runs / "scratch/agent/sft/tools/simple").glob("step-*"))
    shutil.rmtree(runs / "scratch/agent/sft/tools/simple" / states[-1])
    again = run(agent_sft, runs, "agent/sft/tools", SFT, row="tools")
    assert (again / checkpoint.DELTA_WEIGHTS).read_bytes() == first


def test_own_traces_are_learned_in_place_of_those_of_cota(runs: Path, tmp_path: Path) -> None:
    for name in ("model", "data"):
        (tmp_path / name).symlink_to(runs / name)
    shutil.copytree(runs / "agent/cota/train", tmp_path / "mine")
    values = CONFIG.model_dump()
    values["agent"]["sft"]["traces"] = str(tmp_path / "mine")
    made = run(agent_sft, tmp_path, "agent/sft/tools", SFT, cfg=Config.model_validate(values), row="tools")
    assert (made / checkpoint.DELTA_WEIGHTS).read_bytes() == (
        runs / "agent/sft/tools" / checkpoint.DELTA_WEIGHTS
    ).read_bytes()


def test_a_fault_of_own_traces_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "traces.jsonl").write_text("{}")
    values = CONFIG.model_dump()
    values["agent"]["sft"]["traces"] = str(tmp_path)
    nothing = dict.fromkeys(SFT, tmp_path / "none")
    with pytest.raises(ValueError, match=r"traces\.jsonl: line 1: trace_id: Field required"):
        agent_sft.run(
            Config.model_validate(values),
            row="tools",
            inputs=nothing,
            out=tmp_path,
            scratch=tmp_path,
            log=silent,
        )


def test_rft_trains_the_adapter_alone_keeps_its_boundaries_and_ends_killed_with_the_same_bits(
    runs: Path,
) -> None:
    """One step of each phase: `base` and `coherence` end at once, by threshold and by steps or by
    roll-back."""
    out = runs / "agent/rft"
    moved = json.loads((out / "moved.json").read_text())
    assert {part for part, did in moved.items() if did and "trained" in part} == {
        f"{p} (trained)" for p in ("projector", "embeddings", "language model", "head")
    }
    assert not any(did for part, did in moved.items() if "frozen" in part)
    files = [
        "curves.csv",
        checkpoint.DELTA_WEIGHTS,
        "rewards.json",
        *(f"boundaries/{p.name}" for p in (out / "boundaries").iterdir()),
    ]
    assert len(files) >= 5
    assert len(list((out / "samples").glob("*.json"))) == 2
    first = {name: (out / name).read_bytes() for name in files}
    shutil.rmtree(runs / "scratch/agent/rft/rft/step-0000003")
    again = run(rft, runs, "agent/rft", RFT)
    assert {name: (again / name).read_bytes() for name in files} == first


def sft_of(**sft: Any) -> Config:
    """Return the settings with other ones of agent.sft."""
    values = CONFIG.model_dump()
    values["agent"]["sft"] |= sft
    return Config.model_validate(values)


WHOLE = sft_of(
    whole=True, dtype="bf16", optim={**CONFIG.agent.sft.optim.model_dump(), "muon_lr": 1e-3, "accumulate": 2}
)


@pytest.fixture(scope="module")
def whole(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that trained copies of layers from the same model and traces."""
    folder = tmp_path_factory.mktemp("whole")
    for name in ("model", "data", "agent/cota"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).symlink_to(runs / name)
    run(agent_sft, folder, "agent/sft/tools", SFT, cfg=WHOLE, row="tools")
    return folder


def test_copies_of_layers_are_trained_by_both_stages_in_place_of_lora(runs: Path, whole: Path) -> None:
    made = whole / "agent/sft/tools", run(rft, whole, "agent/rft", RFT, cfg=WHOLE)
    first, second = (
        checkpoint.load_delta(folder, base_hash=checkpoint.weights_hash(runs / "model")) for folder in made
    )
    assert first[1]["lora"] is second[1]["lora"] is None
    assert first[0].keys() == second[0].keys()
    matrices = [name for name in first[0] if "language_model.layers" in name and name.endswith("weight")]
    assert len(matrices) == 2 * 7  # two layers
    assert not any(torch.equal(first[0][name], second[0][name]) for name in matrices)


def test_lora_gets_the_ranks_that_trained_copies_need(
    runs: Path, whole: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = checkpoint.weights_hash(runs / "model")
    copies, model = (
        checkpoint.load_delta(whole / "agent/sft/tools", base_hash=base)[0],
        checkpoint.load(runs / "model"),
    )
    wanted: dict[str, int] = {}
    kinds: dict[str, list[int]] = {}
    for name in (name for name in copies if "language_model.layers" in name and name.endswith("weight")):
        own = name.removesuffix(".modules_to_save.*.weight")
        squares = torch.linalg.svdvals((copies[name] - model.get_submodule(own).weight).double()) ** 2
        wanted[own] = max(4, int((squares.cumsum(0) < 0.9 * squares.sum()).sum()) + 1)
        kinds.setdefault(own.rpartition(".")[2], []).append(wanted[own])
    assert len(set(wanted.values())) > 2
    for name in SFT:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(runs / name)
    logged: dict[str, float] = {}
    cfg = sft_of(lora_ranks_from=str(whole / "agent/sft/tools"))
    made = run(
        agent_sft,
        tmp_path,
        "agent/sft/tools",
        SFT,
        cfg=cfg,
        row="tools",
        log=lambda values, _: logged.update(values),
    )
    assert checkpoint.load_delta(made, base_hash=base)[1]["lora"]["rank_pattern"] == wanted
    policy = policies.load_policy(runs / "model", made, operations=OPERATIONS)
    trained = {
        n.partition(".lora_A")[0]: len(p)
        for n, p in policy.adapters.parameters(policies.AGENT).items()
        if "lora_A" in n
    }
    assert trained == wanted
    downs = kinds["down_proj"]
    assert logged["lora_rank/down_proj"] == sum(downs) / 2
    shown = f"down_proj          2  {min(downs):8}  {sum(downs) / 2:5.1f}  {max(downs):7}"
    assert shown in capsys.readouterr().out


def test_ranks_are_taken_from_no_lora_and_from_no_agent_of_another_base(
    runs: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_sft, "base_of", lambda *_, **words: pytest.fail("a model was loaded"))
    inputs = {name: runs / name for name in SFT}

    def refused(folder: Path) -> None:
        cfg = sft_of(lora_ranks_from=str(folder))
        agent_sft.run(cfg, row="tools", inputs=inputs, out=tmp_path, scratch=tmp_path / "scratch", log=silent)

    with pytest.raises(
        ValueError,
        match=r"agent\.sft\.lora_ranks_from: .*tools was trained with LoRA, .* agent\.sft\.whole=true",
    ):
        refused(runs / "agent/sft/tools")
    with torch.no_grad():
        other = tiny.build()
        other.vlm.lm_head.weight.add_(1)
    checkpoint.save(other, tmp_path / "model", metadata={})
    inputs["model"] = tmp_path / "model"
    with pytest.raises(ValueError, match="tools was trained on the base "):
        refused(whole / "agent/sft/tools")


SHARED = """
import sys
from pathlib import Path
from tests.stages import test_agent_stages as stages
if __name__ == "__main__":  # the process for operations imports this file
    stages.run_shared(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def run_shared(runs: Path, folder: Path) -> None:
    """Run what several processes share, so that two have unlike shares: an odd number of questions, one
    process alone has `easy` of the traces, and one alone has `text` of the controls; notes how much this
    process does."""
    values = CONFIG.model_dump()
    values["agent"]["cota"]["more"] = {"easy": 1, "text": 14}
    values["agent"]["episode"]["batch"] = 2
    values["agent"]["evaluate"] |= {"each": 3, "referring": 5}
    values["evaluate"]["batch"] = 2
    cfg = Config.model_validate(values)
    done: Counter[str] = Counter()
    traces.trace = counting(traces.trace, done, "traces")  # type: ignore[assignment]
    agent_evaluate.play = counting(agent_evaluate.play, done, "batches")  # type: ignore[assignment]
    agent_evaluate.oracle = counting(agent_evaluate.oracle, done, "plans")  # type: ignore[assignment]
    agent_evaluate.predict = counting(agent_evaluate.predict, done, "referring")  # type: ignore[assignment]
    for name in ("model", "data", "agent/cota", "agent/sft/tools"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            (folder / name).symlink_to(runs / name)
    with dist.process_group():
        # a second one would look for the first one's addresses
        dist.process_group = counting(nullcontext, done, "groups")
        for stage, name, needed, row in (
            (cota, "cota", ("model",), {}),
            (
                agent_evaluate,
                "evaluate/sft",
                ("data", "model", "agent/cota", "agent/sft/tools"),
                {"row": "sft"},
            ),
            (agent_evaluate, "evaluate/oracle", ("data", "model", "agent/cota"), {"row": "oracle"}),
        ):
            out = folder / "made" / name
            out.mkdir(parents=True, exist_ok=True)
            stage.run(
                cfg,
                inputs={k: folder / k for k in needed},
                out=out,
                scratch=folder / "scratch",
                log=silent,
                **row,
            )  # type: ignore[attr-defined]
    (folder / f"done-{dist.rank()}.json").write_text(json.dumps(done))


def counting(function: Callable[..., Any], done: Counter[str], name: str) -> Callable[..., Any]:
    def counted(*arguments: Any, **words: Any) -> Any:
        done[name] += 1
        return function(*arguments, **words)

    return counted


def test_two_processes_make_traces_and_evaluate_agents_to_the_bits_of_one(runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    for processes in (1, 2):
        launch(script, str(runs), str(tmp_path / str(processes)), processes=processes)
    one, two = (
        {
            path.relative_to(folder).as_posix(): path.read_bytes()
            for path in folder.rglob("*")
            if path.is_file()
        }
        for folder in (tmp_path / "1/made", tmp_path / "2/made")
    )
    named = {
        "cota/train/traces.jsonl",
        "evaluate/sft/metrics.json",
        "evaluate/sft/episodes/episodes.json",
        "evaluate/oracle/metrics.json",
    }
    assert named <= one.keys()
    assert one.keys() == two.keys()
    assert [file for file in one if one[file] != two[file]] == []
    alone, *shares = (
        json.loads((tmp_path / name).read_text())
        for name in ("1/done-0.json", "2/done-0.json", "2/done-1.json")
    )
    assert alone == {"groups": 3, "traces": 25 + 30, "batches": 5 + 4 * 2 + 3, "plans": 9, "referring": 2 * 3}
    assert shares[0] == {
        "groups": 3,
        "traces": 13 + 15,
        "batches": 3 + 4 * 1 + 3,
        "plans": 5,
        "referring": 2 * 2,
    }
    assert shares[1] == {"groups": 3, "traces": 12 + 15, "batches": 2 + 4 * 1, "plans": 4, "referring": 2 * 1}


TRAINED = """
import sys
from pathlib import Path
from tests.stages import test_agent_stages as stages
if __name__ == "__main__":  # the process for operations imports this file
    stages.run_training(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def run_training(runs: Path, folder: Path) -> None:
    """Train with tools and by episodes, so that two processes have unlike shares: three traces, three
    questions, one referring row. A step for each of two parts, so that no difference is carried far."""
    values = CONFIG.model_dump()
    values["agent"]["sft"] |= {"referring": 0.25, "checked": 3, "dtype": "fp32"}
    values["agent"]["sft"]["optim"] |= {"steps": 2, "warmup": 0.0}
    values["agent"]["rft"] |= {"inner_steps": 1, "samples_every": 1, "dtype": "fp32"}
    values["agent"]["rft"]["optim"] |= {"steps": 1, "batch": 3, "warmup": 0.0}
    cfg = Config.model_validate(values)
    asked: list[str] = []
    play, agent_sft.play = (
        agent_sft.play,
        lambda *given, **words: asked.extend(r.text for r in given[2]) or play(*given, **words),
    )  # type: ignore[assignment,func-returns-value]
    for stage, name, needed, row in (
        (agent_sft, "agent/sft/tools", ("data", "model", "agent/cota"), {"row": "tools"}),
        (rft, "agent/rft", RFT, {}),
    ):
        out = folder / name
        out.mkdir(parents=True, exist_ok=True)
        inputs = {k: (folder if k == "agent/sft/tools" else runs) / k for k in needed}
        stage.run(cfg, inputs=inputs, out=out, scratch=folder / "scratch" / name, log=silent, **row)  # type: ignore[attr-defined]
    (folder / f"asked-{dist.rank()}.json").write_text(json.dumps(asked))


def test_two_processes_train_agents_as_one_does(runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "trained.py"
    script.write_text(TRAINED)
    folders = [tmp_path / "1", tmp_path / "2"]
    for processes, folder in enumerate(folders, start=1):
        launch(script, str(runs), str(folder), processes=processes)
    base = checkpoint.weights_hash(runs / "model")
    for stage in ("agent/sft/tools", "agent/rft"):
        found = [
            sorted(p.relative_to(folder / stage).as_posix() for p in (folder / stage).rglob("*"))
            for folder in folders
        ]
        assert found[0] == found[1]
        one, two = (checkpoint.load_delta(folder / stage, base_hash=base)[0] for folder in folders)
        assert one.keys() == two.keys()
        for name in one:
            torch.testing.assert_close(
                one[name], two[name], rtol=0, atol=1e-5, msg=lambda said, name=name: f"{name}: {said}"
            )
    parts = [(folder / "agent/sft/tools/curriculum.json").read_text() for folder in folders]
    assert parts[0] == parts[1]
    asked = [
        json.loads(path.read_text())
        for path in (tmp_path / "1/asked-0.json", *sorted(tmp_path.glob("2/asked-*.json")))
    ]
    assert sorted(asked[0]) == sorted(asked[1])  # one batch: the first process plays it, and both know
    assert asked[2] == []


def test_an_agents_step_that_has_not_a_row_for_every_process_is_refused(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    inputs = {name: runs / name for name in (*SFT, *RFT)}
    with pytest.raises(
        ValueError,
        match=r"agent\.sft\.optim\.batch: 2 traces a step are less than one .* on each of 4 processes",
    ):
        agent_sft.run(CONFIG, row="tools", inputs=inputs, out=tmp_path, scratch=tmp_path, log=silent)
    with pytest.raises(ValueError, match=r"agent\.rft\.optim\.batch: 2 questions a step"):
        rft.run(CONFIG, inputs=inputs, out=tmp_path, scratch=tmp_path, log=silent)


BROKEN = """
import sys
from pathlib import Path
from ans_core import dist, precision
from ans_core.agent import policy as policies
from ans_core.agent.world import traces
from tests.stages import test_agent_stages as stages
def broken(*arguments, **words):
    raise RuntimeError("this process is broken")
if __name__ == "__main__":
    if dist.rank() == 1:
        traces.trace = broken
    stages.run_shared(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def test_a_process_that_fails_ends_the_others_and_no_traces_have_their_name(
    runs: Path, tmp_path: Path
) -> None:
    script = tmp_path / "broken.py"
    script.write_text(BROKEN)
    with pytest.raises(AssertionError, match="this process is broken"):
        launch(script, str(runs), str(tmp_path), processes=2)
    assert not list(tmp_path.rglob("traces.jsonl"))


def test_the_curriculum_has_a_part_for_each_difficulty_that_is_there(runs: Path) -> None:
    traces = read_traces(runs / "agent/cota/train")
    hard = [
        trace.model_copy(update={"difficulty": "hard"}) if trace.family == "text" else trace
        for trace in traces
    ]
    simple = [trace for trace in traces if trace.family != "text"]

    def parts(some: list[Trace], *shares: float) -> list[tuple[str, int, int]]:
        found = list(agent_sft.curriculum(some, shares, 10))
        assert [part.first for part in found] == [sum(p.steps for p in found[:i]) for i in range(len(found))]
        return [(part.name, part.steps, len(part.traces)) for part in found]

    assert parts(traces, 0.3, 0.2, 0.5) == [("simple", 3, len(simple)), ("medium", 7, len(traces))]
    assert parts(hard, 0.3, 0.2, 0.5) == [("simple", 3, len(simple)), ("hard", 7, len(traces))]
    assert parts(hard, 0.0, 0.0, 1.0) == [("hard", 10, len(traces))]
    assert parts(simple, 0.3, 0.2, 0.5) == parts(simple, 0.0, 0.0, 1.0) == [("simple", 10, len(simple))]
    assert [part.before for part in agent_sft.curriculum(traces, (0.3, 0.2, 0.5), 10)] == [
        (),
        ("easy", "pattern"),
    ]


@pytest.mark.parametrize(
    ("before", "after", "costly"),
    [
        ([True] * 20, [True] * 10 + [False] * 10, True),
        ([True] * 20, [True] * 19 + [False], False),  # exactly what is allowed
        ([True, False] * 10, [False, True] * 10, False),  # others are right
        ([True] * 12 + [False] * 8, [True] * 6 + [False] * 8 + [True] * 6, False),  # as many
        # .15 less, by chance one in five times
        ([True] * 12 + [False] * 8, [False] * 4 + [True] * 9 + [False] * 7, False),
        ([True] * 20, [True] * 15 + [False] * 5, False),  # five of five: one in 32
        ([True] * 20, [True] * 14 + [False] * 6, True),
        ([], [], False),
    ],
)
def test_a_part_is_taken_back_for_a_loss_that_is_no_accident(
    before: list[bool], after: list[bool], costly: bool
) -> None:
    assert costs(before, after, 0.05) is costly


def test_rft_asks_what_no_trace_has_answered(runs: Path) -> None:
    asked = rft.Questions(CONFIG, QuestionBank(CONFIG.agent.families, seed=CONFIG.seed, tile=32))
    found = [asked.number(number).question_id for number in range(8)]
    turns = (
        [("text", 13), ("easy", 10), ("pattern", 10), ("text", 14)],
        [("text", 15), ("easy", 11), ("pattern", 11), ("text", 16)],
    )
    assert found == [f"{family}/train/{index}" for turn in turns for family, index in turn]
    assert (
        max(
            int(t.trace_id.rpartition("/")[2])
            for t in read_traces(runs / "agent/cota/train")
            if t.family == "text"
        )
        == 12
    )


def test_micro_batches_hold_a_step_s_traces_once_and_those_of_like_length_together(runs: Path) -> None:
    traces = read_traces(runs / "agent/cota/train")[:11]
    parts = [agent_sft.shared_out(traces, micro, 4) for micro in range(4)]
    assert sorted(t.trace_id for part in parts for t in part) == sorted(t.trace_id for t in traces)
    assert all(parts)
    lengths = [[sum(len(turn.text) for turn in t.turns) for t in part] for part in parts]
    assert all(max(shorter) <= min(longer) for shorter, longer in pairwise(lengths))
    assert agent_sft.shared_out(traces[:1], 0, 2) == []


def test_figures_controls_and_episodes_reach_the_page(runs: Path) -> None:
    figures = json.loads((runs / "agent/report/agent.json").read_text())
    assert list(figures) == ["direct", "oracle", "rft", "sft"]
    assert figures["oracle"]["pattern/accuracy"] == figures["oracle"]["pattern/evidence"] == 1.0
    assert figures["direct"]["needed/calls"] == 0.0
    assert {f"{name}/needed/accuracy" for name in agent_evaluate.CONTROLS} <= figures["sft"].keys()
    assert figures["sft"]["plan/pattern/RaPR"] == 1.0
    assert figures["sft"]["referring/gIoU_all_base"] >= 0
    page = (runs / "agent/report/episodes.html").read_text()
    sections = [
        page.index(f'<section id="{name}">')
        for name in ("short", "rft", "sft", "direct", "controls", "figures")
    ]
    assert sections == sorted(sections)
    assert (
        page.index(">needed/accuracy<")
        < page.index(">easy/accuracy<")
        < page.index(">needed/RaPR<")
        < page.index("<article")
    )
    assert page.count("<article") == 9  # one of every family, of direct, sft and rft
    assert page.count("<dt>task</dt>") == 9
    assert 'src="data:image/webp;base64,' in page
    assert "http" not in page.replace("http-equiv", "")


class _LoadsError(Exception):
    """A model was about to be loaded."""


def test_a_stage_says_before_it_loads_a_model_that_another_reader_made_what_it_starts_from(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: object, **words: object) -> None:
        raise _LoadsError

    here, base = CONFIG.agent.reader, checkpoint.weights_hash(runs / "model")
    for row, made_by in (("agent/sft/tools", here), ("agent/rft", here), ("agent/sft/direct", None)):
        assert checkpoint.load_delta(runs / row, base_hash=base)[1].get("ocr") == made_by, row
    other = CONFIG.model_copy(update={"agent": CONFIG.agent.model_copy(update={"reader": "rapidocr"})})
    monkeypatch.setattr(policies, "load_base", refuse)
    monkeypatch.setattr(agent_sft, "base_of", refuse)
    monkeypatch.setattr(ocr, "find_spec", lambda name: object())  # nothing is read
    inputs = {name: runs / name for name in ("data", "model", "agent/cota", "agent/sft/tools", "agent/rft")}
    given: dict[str, Any] = {
        "inputs": inputs,
        "out": tmp_path,
        "scratch": tmp_path / "scratch",
        "log": silent,
    }
    for stage, words, told in (
        (agent_sft, {"row": "tools"}, "the traces in .* were made"),
        (rft, {}, "the agent in .*tools was trained"),
        (agent_evaluate, {"row": "rft"}, "the agent in .*rft was trained"),
        (online, {}, "the agent in .*rft was trained"),
    ):
        with (
            pytest.warns(match=f"{told} with what READ_TEXT read by {here}; now it reads by rapidocr"),
            pytest.raises(_LoadsError),
        ):
            stage.run(other, **given, **words)


@pytest.mark.parametrize(
    ("stage", "words"),
    [
        (agent_sft, {"row": "tools"}),
        (rft, {}),
        (agent_evaluate, {"row": "oracle"}),
        (agent_evaluate, {"row": "rft"}),
        (online, {}),
    ],
)
def test_a_stage_begins_with_a_look_for_its_reader(
    stage: Any, words: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are no inputs: whatever came before would raise something else."""
    monkeypatch.setattr(ocr, "find_spec", lambda name: None)
    cfg = CONFIG.model_copy(update={"agent": CONFIG.agent.model_copy(update={"reader": "rapidocr"})})
    with pytest.raises(
        ValueError,
        match=r"agent\.reader: READ_TEXT reads by rapidocr; to be installed: rapidocr, onnxruntime",
    ):
        stage.run(cfg, inputs={}, out=tmp_path, scratch=tmp_path / "scratch", log=silent, **words)


def test_the_plan_is_not_given_where_it_tells_the_answer_or_is_not_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(agent_evaluate._Asking, "about", lambda self, names, **options: (names, {}))
    asking: Any = agent_evaluate._Asking(
        cfg=None,
        policy=None,
        toolbox=None,
        held_out=None,
        lists_operations=True,  # type: ignore[arg-type]
    )
    assert asking.under("plan", [("count", 0), ("easy", 1), ("qa_set", 0)]) == [("easy", 1)]
