"""`ans eval BENCHMARK --model`: by one process, by two, killed and started again; skipped without data; the
untrained baseline."""

from __future__ import annotations

import argparse
import copy
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest
import torch

from ans_core import dist
from ans_core.benchmarks import box_baseline
from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.registry import module_of, runnable
from ans_core.checkpoints import checkpoint
from ans_core.code_hash import CodeHashes
from ans_core.data.conversation import pretraining_turn
from ans_core.data.formats import refcoco as refcoco_reader
from ans_core.data.formats.checks import DataError
from ans_core.data.scene_write import write_scenes
from ans_core.data.views import Patches
from ans_core.evaluation import answerers
from ans_core.evaluation import session as eval_run
from ans_core.inference.prefill import prompt
from ans_core.model.backbones.qwen2_5_vl import Qwen2_5VL
from ans_core.model.backbones.qwen_vl import MAX_PIXELS, MIN_PIXELS
from ans_core.model.network import Network
from ans_core.types import Request
from flows import cli
from tests import tiny
from tests.workspace import LIMIT_S, ROOT, environment

FILES = ("predictions.jsonl", "metrics.json", "metrics.samples.jsonl")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    write_scenes(folder, seed=0, counts={"train": 1, "val": 8, "test": 1}, image_size=64)
    return folder / "refcoco"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model: Network) -> Path:
    """A model that begins every answer with `[SEG]`."""
    talker = copy.deepcopy(tiny_model)
    with torch.no_grad():
        prompted = prompt(talker, [Request(frames=tiny.sample(0).frames, text="<image>\nthe square")])
        state = talker.internvl.model.language_model(
            inputs_embeds=tiny.embeds_of(prompted)[None]
        ).last_hidden_state[0, -1]
        talker.internvl.lm_head.weight.zero_()
        talker.internvl.lm_head.weight[talker.seg_token_id] = state
    folder = tmp_path_factory.mktemp("model") / "talker"
    checkpoint.save(talker, folder, metadata={})
    return folder


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eval_run, "root", lambda: tmp_path)
    # others use the real store; importing it takes seconds
    monkeypatch.setattr("flows.eval_command.log_to_mlflow", lambda *_: None)


def words(data: Path, model: Path | str, out: Path) -> list[str]:
    return [
        "eval",
        "refcoco",
        "--model",
        str(model),
        "--data",
        str(data),
        "--out",
        str(out),
        "--batch",
        "4",
        "--max-tokens",
        "2",
    ]


def ans(*given: str) -> int:
    arguments: argparse.Namespace = cli.parse(list(given))
    status: int = arguments.function(arguments)
    return status


MODEL = answerers.Model(
    name="m", decisive={}, code=("ans_core.inference.predict",), load=lambda: lambda items: []
)


def session_of(name: str, arguments: argparse.Namespace) -> eval_run.Session:
    scorer, runner = runnable(name)
    return eval_run.session_of(
        name, scorer, runner, answerers.model_of(arguments, follows=runner.follows), arguments
    )


def command(store: Path, *given: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *given], env=environment(ROOT, MLFLOW_TRACKING_URI=f"sqlite:///{store}"),
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


@pytest.mark.slow
def test_a_run_scores_as_its_predictions_file_does_and_leaves_a_page(
    tmp_path: Path,
    data: Path,
    model: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    splits: list[str] = []
    read = refcoco_reader.read
    monkeypatch.setattr(
        refcoco_reader,
        "read",
        lambda *given, split, **more: splits.append(split) or read(*given, split=split, **more),
    )
    assert ans(*words(data, model, tmp_path / "one"), "--split", "val") == 0
    assert set(splits) == {"val"}  # train is a hundred times as large
    assert len(splits) <= 7
    told = capsys.readouterr().out
    found = json.loads((tmp_path / "one/metrics.json").read_text())
    assert found["missing"] == 0
    assert found["metrics"]["expressions"] > 8
    assert found["metrics"]["without_a_mask"] == 0
    assert 0 < found["metrics"]["gIoU"] < 1
    assert "Sa2VA-4B" in told  # published figures; ours is not beside them, as the data are not RefCOCO
    page = (tmp_path / "one/page.html").read_text()
    assert page.count("<figure>") == len(json.loads((tmp_path / "one/overlays/index.json").read_text())) > 8
    score = [
        "eval",
        "score",
        "refcoco",
        "--predictions",
        str(tmp_path / "one/predictions.jsonl"),
        "--data",
        str(data),
    ]
    assert ans(*score, "--out", str(tmp_path / "again.json")) == 0
    assert json.loads((tmp_path / "again.json").read_text())["metrics"] == found["metrics"]
    assert ans(*words(data, model, tmp_path / "few"), "--limit", "3") == 0
    few = json.loads((tmp_path / "few/metrics.json").read_text())
    assert (few["metrics"]["expressions"], few["missing"]) == (3, 0)
    with pytest.raises(
        ValueError, match=r"holds answers of other settings .limit 3, now 4.; give another --out"
    ):
        ans(*words(data, model, tmp_path / "few"), "--limit", "4")


@pytest.mark.slow
def test_without_its_data_a_benchmark_is_skipped_and_says_why(
    tmp_path: Path, data: Path, model: Path, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "data/benchmarks").mkdir(parents=True)
    (tmp_path / "data/benchmarks/refcoco").symlink_to(data)
    assert (
        ans("eval", "mevis,refcoco", "--model", str(model), "--limit", "2", "--max-tokens", "2")
        == eval_run.SKIPPED
    )
    told = capsys.readouterr().out
    assert f"mevis/valid_u: skipped: {tmp_path / 'data/benchmarks/mevis'} is not there" in told
    found = {
        path.parent.name.partition("-")[0]: json.loads(path.read_text())
        for path in tmp_path.glob(".ans/eval/*/metrics.json")
    }
    assert found["mevis"]["metrics"] == {}
    assert found["mevis"]["skipped"]
    assert found["refcoco"]["metrics"]["expressions"] == 2


def change_a_picture(data: Path, model: Path) -> None:
    picture = data.parent / "images/val_000000.png"
    picture.write_bytes(picture.read_bytes() + b" ")


def change_the_template(data: Path, model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_dynamic_patch": 7}))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (change_a_picture, "the benchmark's files: changed since"),
        (change_the_template, "the model's config.json or tokenizer files: changed since"),
        ("data_files", "the benchmark's files: not recorded then"),
        ("code", "the code of ANS that makes predictions: not recorded then"),
    ],
)
def test_answers_about_other_files_or_of_another_configuration_or_code_are_not_gone_on_with(
    tmp_path: Path, data: Path, model: Path, change: object, told: str
):
    """A name of a setting: a folder from before the setting was recorded."""
    for source, target in ((data, "data"), (data.parent / "images", "images"), (model, "model")):
        shutil.copytree(source, tmp_path / target)
    inside = tmp_path / "data/out"  # what is written there is none of the benchmark's files
    given = cli.parse(words(tmp_path / "data", tmp_path / "model", inside))
    for _ in range(2):
        asked = session_of("refcoco", given)
        eval_run.check_settings(asked.out, asked.settings)
        (inside / "predictions.jsonl").touch()
    if callable(change):
        change(tmp_path / "data", tmp_path / "model")
    else:
        (asked.out / "settings.json").write_text(
            json.dumps({k: v for k, v in asked.settings.items() if k != change})
        )
    again = session_of("refcoco", given)
    with pytest.raises(ValueError, match=rf"{told}\); give another --out, or remove the folder"):
        eval_run.check_settings(again.out, again.settings)


def test_answers_of_a_device_with_half_precision_are_not_gone_on_with_on_one_without(
    data: Path, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    precisions = []
    for has_half in (True, False):
        monkeypatch.setattr("ans_core.precision.bf16_is_faster", lambda device, has=has_half: has)
        precisions.append(session_of("refcoco", cli.parse(words(data, model, tmp_path))).settings["dtype"])
    assert precisions == ["as stored", "float32"]


def test_the_code_that_answers_and_settings_that_are_gone_count(monkeypatch: pytest.MonkeyPatch):
    before = eval_run.code_hash("refcoco", MODEL)
    monkeypatch.setattr(eval_run.CodeHashes, "hash_of", lambda *_: "another")
    now = eval_run.code_hash("refcoco", MODEL)
    assert eval_run.changes({"code": before, "quantize": "int8"}, {"code": now}) == [
        "the code of ANS that makes predictions: changed since",
        "quantize 'int8', now None",
    ]


def test_another_benchmarks_code_is_no_part_of_what_predictions_depend_on():
    code = CodeHashes(ROOT)
    files = {
        file.name
        for module in ("ans_core.evaluation.predictions", module_of("refcoco+"), *MODEL.code)
        for file in code.files(module)
    }
    assert {"predictions.py", "refcoco.py", "expressions.py", "predict.py"} <= files
    assert not {"vstar.py", "registry.py", "session.py"} & files


@pytest.mark.slow
def test_two_processes_and_a_killed_run_give_what_one_gives(tmp_path: Path, data: Path, model: Path):
    assert ans(*words(data, model, tmp_path / "one")) == 0
    whole = [(tmp_path / "one" / name).read_text() for name in FILES]

    two = command(tmp_path / "mlflow.db", *words(data, model, tmp_path / "two"), "--processes", "2")
    told, _ = two.communicate(timeout=LIMIT_S)
    assert two.returncode == 0, told
    assert [(tmp_path / "two" / name).read_text() for name in FILES] == whole

    with closing(sqlite3.connect(tmp_path / "mlflow.db")) as store:
        assert ("eval/refcoco/val/gIoU",) in store.execute("SELECT key FROM metrics").fetchall()

    first = tmp_path / "killed/parts/0.jsonl"
    killed = command(tmp_path / "other.db", *words(data, model, tmp_path / "killed"))
    deadline = time.monotonic() + LIMIT_S
    while not (first.exists() and first.read_text().count("\n") >= 4):
        assert time.monotonic() < deadline
        assert killed.poll() is None, "it ended before it could be killed"
        time.sleep(0.005)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    kept = first.read_bytes()
    assert kept.count(b"\n") < len(whole[0].splitlines())
    with first.open("ab") as file:
        file.write(b'{"item": "half a li')  # as a kill in the middle of a write leaves it
    assert ans(*words(data, model, tmp_path / "killed")) == 0
    assert [(tmp_path / "killed" / name).read_text() for name in FILES] == whole


def test_no_process_writes_before_the_first_one_has_looked_at_the_folder(
    tmp_path: Path, data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    class Waits(Exception):
        pass

    def wait() -> None:
        raise Waits

    monkeypatch.setattr(dist, "rank", lambda: 1)
    monkeypatch.setattr(dist, "wait_for_all", wait)
    with pytest.raises(Waits):
        ans(*words(data, model, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_broken_pictures_are_named_before_the_first_answer_and_mended_ones_are_read(
    tmp_path: Path, data: Path, model: Path
):
    for source, target in ((data, "data"), (data.parent / "images", "images")):
        shutil.copytree(source, tmp_path / target)
    broken = [tmp_path / f"images/val_00000{n}.png" for n in (1, 3)]
    for picture in broken:
        picture.write_bytes(picture.read_bytes()[:-40])
    given = (*words(tmp_path / "data", model, tmp_path / "out"), "--limit", "10")
    with pytest.raises(DataError, match=r"refcoco/val, question .*val_000001(.|\n)*val_000003"):
        ans(*given)
    for picture in broken:
        shutil.copy(data.parent / "images" / picture.name, picture)
    assert ans(*given) == 0


@pytest.mark.slow
def test_what_was_answered_is_not_asked_again(
    tmp_path: Path, data: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    """Stopped after two batches, one line of the second lost: the second is answered as it was, with its
    other items."""
    asked: list[list[str]] = []
    load = answerers.answering

    def counting(arguments: argparse.Namespace):
        ask = load(arguments)

        def answer(items):
            if len(asked) == 2 and not resumed:
                raise KeyboardInterrupt
            asked.append([item.name for item in items])
            return ask(items)

        return answer

    monkeypatch.setattr(answerers, "answering", counting)
    resumed = True
    assert ans(*words(data, model, tmp_path / "whole"), "--limit", "10") == 0
    batches, resumed = list(asked), False
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        ans(*words(data, model, tmp_path / "cut"), "--limit", "10")
    part = tmp_path / "cut/parts/0.jsonl"
    part.write_bytes(part.read_bytes()[:-7])
    asked.clear()
    resumed = True
    assert ans(*words(data, model, tmp_path / "cut"), "--limit", "10") == 0
    assert asked == batches[1:]
    assert [(tmp_path / "cut" / name).read_text() for name in FILES] == [
        (tmp_path / "whole" / name).read_text() for name in FILES
    ]


def test_a_base_is_asked_for_boxes_as_it_was_taught_to_give_them(tmp_path: Path, tiny_model: Network):
    checkpoint.save(tiny_model, tmp_path / "made", metadata={"stage": "base", "seed": 0})
    checkpoint.save(
        tiny_model, tmp_path / "imported", metadata={"stage": "base", "source": ["internvl", "sam2"]}
    )
    asked = box_baseline.question_of(tmp_path / "made").removeprefix("<image>\n").format(text="red square")
    told = [pretraining_turn(tiny.sample(text="red square"), random.Random(n)) for n in range(40)]
    assert asked in {turn.question for turn in told}
    assert all(box_baseline.box_of(turn.answer) is not None for turn in told)
    assert box_baseline.question_of(tmp_path / "imported") == box_baseline.QUESTION


def test_boxes_of_qwen2_5_vl_count_pixels_of_the_resized_picture(tiny_model: Network):
    qwen = object.__new__(Qwen2_5VL)
    colour = (0.5, 0.5, 0.5)
    qwen.cutter = Patches(
        patch=14, merge=2, temporal=2, mean=colour, std=colour, min_pixels=MIN_PIXELS, max_pixels=MAX_PIXELS
    )
    sides = qwen.box_sides(1600, 1200)
    assert sides == (1456, 1092)  # 52 x 39 blocks of 28 pixels: at most 2048
    reply = '[{"bbox_2d": [364, 273, 728, 1092], "label": "dog"}]'
    assert box_baseline.box_of(reply, sides=sides) == (0.25, 0.25, 0.5, 1.0)
    assert tiny_model.backbone.box_sides(1600, 1200) == (1000, 1000)


@pytest.mark.slow
def test_a_base_is_asked_for_a_box_which_sam2_turns_into_a_mask(
    tmp_path: Path, data: Path, model: Path, tiny_model: Network
):
    assert box_baseline.box_of("It is <box>[[100, 250, 500.5, 1000]]</box>.") == (0.1, 0.25, 0.5005, 1.0)
    assert box_baseline.box_of("[[1, 2, 3]] [[5, 5, 5, 9]]") is None
    ask = box_baseline.answerer(tiny_model, question=box_baseline.QUESTION, max_tokens=2)
    items = [
        Item(name=str(n), request=Request(frames=tiny.clip(n).frames, text=""), expression="the square")
        for n in range(2)
    ]
    assert [p.masks for p in ask(items)] == [(), ()]  # no box in a random reply
    still = [Item(name="s", request=Request(frames=tiny.sample(3).frames, text=""), expression="it")]
    masks = box_baseline._masks(
        tiny_model, [*items, *still], [(0.1, 0.1, 0.5, 0.5), None, (0.5, 0.5, 1.0, 1.0)]
    )
    assert {i: len(masklet) for i, masklet in masks.items()} == {0: 4, 2: 1}
    assert all(mask["size"] == [tiny.SIDE, tiny.SIDE] for masklet in masks.values() for mask in masklet)
    assert ans(*words(data, f"box:{model}", tmp_path / "box"), "--limit", "2") == 0
    assert json.loads((tmp_path / "box/metrics.json").read_text())["metrics"]["without_a_mask"] == 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ["refcocoo", "--model", "m"],
            "no benchmark 'refcocoo' to score .did you mean 'refcoco'..; there are captions",
        ),
        (
            ["mask_pairs", "--model", "m"],
            r"mask_pairs scores files alone .*a model can be run on detailed_captions",
        ),
        (["refcoco,mevis", "--model", "m", "--data", "d"], "--data, --out and --split are of one benchmark"),
        (["refcoco", "--model", "m", "--predictions", "p"], "ans eval BENCHMARK takes no --predictions"),
        (["compare", "a", "b", "--limit", "2"], "ans eval compare takes no --limit"),
        (["refcoco"], "refcoco is no folder of a checkpoint; to run a benchmark give --model"),
        (["refcoco", "mevis", "--model", "m"], "takes nothing behind refcoco: mevis"),
    ],
)
def test_words_that_do_not_fit_are_refused(given: list[str], message: str):
    with pytest.raises(ValueError, match=message):
        ans("eval", *given)


@pytest.mark.parametrize("option", ["--limit", "--batch", "--max-tokens", "--processes"])
def test_counts_below_one_are_refused(option: str, capsys: pytest.CaptureFixture[str]):
    for text in ("0", "-3"):
        with pytest.raises(SystemExit):
            cli.parse(["eval", "refcoco", "--model", "m", option, text])
        assert f"argument {option}: invalid positive value: '{text}'" in capsys.readouterr().err


def test_a_file_for_the_folder_of_a_run_is_refused(tmp_path: Path, data: Path, model: Path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match="file is a file; a run needs a folder"):
        ans(*words(data, model, tmp_path / "file"))
