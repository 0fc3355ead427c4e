"""`ans rl`: a Sa2VA and regions with captions in, a checkpoint after RL and a report out."""

from __future__ import annotations

import inspect
import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from datasets import Dataset, Features, Image, Value

from ans_core.checkpoints import checkpoint
from ans_core.config import PROFILES, Config, dump, resolve
from ans_core.data import read_entry
from ans_core.data.formats import FORMATS, SPLITS
from ans_core.inference.sa2va import Sa2VA
from ans_core.model import adapters
from ans_core.model.network import Network
from ans_core.rl.dual_loop import check_learned
from ans_core.stages import rl as stages_rl
from ans_core.stages.sources import source_entries
from ans_core.types import Log
from flows import cli, rl_command, short_training, training_request
from tasks import runner
from tasks.process import held
from tasks.stages import stage_named
from tests import tiny
from tests.workspace import ROOT

REFERENCE = Path(os.environ.get("ANS_REFERENCE", Path(__file__).resolve().parents[2] / "../shared"))
needs_reference = pytest.mark.skipif(
    not REFERENCE.is_dir(), reason=f"no reference data at {REFERENCE} (set ANS_REFERENCE)"
)
FEW_WORDS = (  # of the tiny profile, shrunk
    "sft.mask_points=64", "sft.mask_size=32", "rl.group=2", "rl.max_tokens=4", "rl.lora.rank=2",
    "rl.lora.alpha=4", "rl.mask_grid=4", "evaluate.max_tokens=4", "evaluate.batch=4", "report.overlays=4",
)  # fmt: skip


def ans(*words: object) -> int:
    arguments = cli.parse(["rl", *map(str, words)])
    return arguments.function(arguments)


def save_regions(folder: Path, rows: list[tuple[Path, dict[str, object], str]]) -> Path:
    """Write (picture, mask, caption) as describe-anything and Grasp-Any-Region come: Arrow with embedded
    pictures, of one split."""
    said = [
        [{"from": "human", "value": "<image>\nDescribe <Prompt0>."}, {"from": "gpt", "value": caption}]
        for *_, caption in rows
    ]
    columns = {
        "image": [str(file) for file, *_ in rows],
        "mask_rle": [[mask] for _, mask, _ in rows],
        "conversations": said,
    }
    features = Features(
        {
            "image": Image(),
            "mask_rle": [{"size": [Value("int64")], "counts": Value("string")}],
            "conversations": [{"from": Value("string"), "value": Value("string")}],
        }
    )
    Dataset.from_dict(columns, features=features).save_to_disk(folder)
    return folder


def drawn(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.png").write_bytes(tiny.picture(number))
    return save_regions(
        folder / "regions",
        [(folder / f"{n}.png", tiny.square(8, 8, 24, 24), "a red square") for n in range(count)],
    )


def settings_of(folder: Path, *words: str, parameters: int = 1000) -> Config:
    arguments = cli.parse(["rl", "--model", "owner/a-release", "--data", str(folder), *words])
    return rl_command.settings(
        [rl_command.read_set(folder, None, name="mine")], arguments, parameters=parameters
    )


@pytest.mark.slow
def test_settings_have_the_loops_that_the_data_can_and_a_share_held_out(tmp_path: Path) -> None:
    folder = drawn(tmp_path / "mine", 30)
    config = settings_of(folder)
    (source,) = config.prepare.sources
    assert (source.format, source.hold_out) == ("region_arrow", 0.2)
    assert config.rl.loops == {"caption": 1.0, "mask": 0.2}
    assert (config.sft.optim.steps, config.base.source, config.base.internvl, config.base.sam2) == (
        0,
        "published",
        "owner/a-release",
        "",
    )
    assert config.evaluate.benchmarks == ("region_caption", "loops")
    train = len(rl_command.read_set(folder, None, name="mine").train)
    assert config.rl.optim.steps == -(-3 * train // 8)  # three epochs are fewer than the profile's 180 steps
    assert (config.rl.optim.batch, config.rl.rows, config.rl.use_llm_judge, config.launch.processes) == (
        8,
        8,
        False,
        1,
    )
    assert settings_of(folder, "rl.optim.epochs=5").rl.optim.steps == -(-5 * train // 8)
    assert settings_of(folder, "--steps", "7", "rl.kl=0.2").rl.optim.steps == 7
    with pytest.raises(ValueError, match=r"rl\.optim\.epochs and a number of steps are both given"):
        settings_of(folder, "--steps", "7", "rl.optim.epochs=2")
    with pytest.raises(ValueError, match=r"launch\.processes = 'two': give a whole number above 0"):
        settings_of(folder, "launch.processes=two")


def test_a_large_model_gets_the_profile_of_rl_alone_divided_for_one_process(tmp_path: Path) -> None:
    config = settings_of(drawn(tmp_path / "mine", 90), "launch.processes=2", parameters=10**9)
    optim = config.rl.optim
    assert config.profile == "sa2va-4b-rl"
    # the profile: 8 of 8 processes, so 1 sample at once here too
    assert (optim.batch, optim.accumulate, config.rl.rows) == (64, 32, 64)
    assert [one.name for one in config.evaluate.public] == ["dlc_bench", "refcoco"]
    command = short_training.ranks_command(stage_named("rl"), config, tmp_path, "x")
    assert {"--nproc-per-node=2", "flows.short_training", "rl"} <= {*command}
    assert short_training.starts_processes(stage_named("rl"), config)
    assert not short_training.starts_processes(stage_named("prepare"), config)


def test_steps_of_epochs_are_times_the_inner_steps_and_a_state_is_written_after_the_last_of_them(
    tmp_path: Path,
) -> None:
    folder = drawn(tmp_path / "mine", 30)
    train = len(rl_command.read_set(folder, None, name="mine").train)
    batches = -(-3 * train // 8)
    optim = settings_of(folder, "rl.inner_steps=4", "launch.processes=2").rl.optim
    assert (optim.steps, optim.save_every) == (4 * batches, 28)  # 25 rounded up
    assert (
        settings_of(folder, "rl.inner_steps=4", "rl.optim.epochs=5").rl.optim.steps == -(-5 * train // 8) * 4
    )
    with pytest.raises(ValueError, match=r"rl\.inner_steps = 'two': give a whole number above 0"):
        settings_of(folder, "rl.inner_steps=two")


def test_a_set_without_a_split_train_is_trained_on_with_all_its_parts(tmp_path: Path) -> None:
    """As describe-anything comes: a folder for each part."""
    for part in ("COCOStuff", "Mapillary"):
        drawn(tmp_path / part, 12)
        (tmp_path / part / "regions").rename(tmp_path / f"described-{part}")
    folder = tmp_path / "described"
    folder.mkdir()
    for part in ("COCOStuff", "Mapillary"):
        (tmp_path / f"described-{part}").rename(folder / part)
    assert SPLITS["region_arrow"](folder) == ["COCOStuff", "Mapillary"]
    one = rl_command.read_set(folder, None, name="described")
    assert len(one.train) + len(one.held_out) == 24
    (source,) = settings_of(folder).prepare.sources
    assert source.split == ("*",)
    entries = source_entries((source,))
    counts = {entry.split: len(read_entry(tmp_path, entry)) for entry in entries}
    assert counts == {"train": len(one.train), "val": len(one.held_out)}  # the stage reads the same


def test_settings_of_jobs_are_refused_and_a_profiles_are_left_out(tmp_path: Path) -> None:
    folder = drawn(tmp_path / "mine", 20)
    for word in ("launch.launcher=slurm", "launch.resources={rl: {gpus: 8}}", "launch.resources.rl.gpus=8"):
        with pytest.raises(
            ValueError, match=r"ans rl trains on this machine; use the profile and `ans run` for jobs"
        ):
            settings_of(folder, word)
        with pytest.raises(ValueError, match=r"launch\..*: ans finetune trains on this machine"):
            training_request.launch_words(8, [word.partition("=")[0]], command="finetune")
    assert {"launch.launcher=torchrun", "launch.resources={}"} <= {
        f"{key}={value}" for key, value in training_request.launch_words(8, [], command="rl").items()
    }


def test_data_sets_of_one_folder_name_or_of_a_kinds_get_names_of_their_own(tmp_path: Path) -> None:
    for folder in ("a/regions", "b/regions", "c/referring"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "b/regions.json").touch()
    paths = [tmp_path / name for name in ("a/regions", "b/regions", "b/regions.json", "c/referring")]
    assert training_request.set_names(paths) == ["regions", "b-regions", "regions-2", "c-referring"]
    with pytest.raises(ValueError, match=r"a/regions is given twice; leave one out"):
        training_request.set_names([paths[0], paths[0]])


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl", "rl/teacher"])
def test_what_a_stage_trained_is_a_start_model(tmp_path: Path, tiny_model: Network, stage: str) -> None:
    run, folder = tmp_path / "run", drawn(tmp_path / "mine", 20)
    checkpoint.save(
        tiny_model, run / "base/base", metadata={"stage": "base", "source": ["an/InternVL", "a/SAM2"]}
    )
    sft = {"stage": "sft", "lora": None, "seed": 0}
    checkpoint.save_delta({}, run / "sft", base_hash=checkpoint.weights_hash(run / "base/base"), config=sft)
    if stage != "sft":
        modules = adapters.policy_modules(tiny_model, drawing=False)
        lora = {"rank": 2, "alpha": 4, "dropout": 0.0}
        policies = adapters.Policies(
            checkpoint.load(run / "sft"), adapters.rl_config(**lora, modules=modules), seed=0
        )
        config = {"stage": "rl", "lora": lora, "modules": modules, "seed": 0}
        of_sft = checkpoint.weights_hash(run / "sft")
        checkpoint.save_delta(policies.tensors("policy"), run / stage, base_hash=of_sft, config=config)
    arguments = cli.parse(
        ["rl", "--model", str(run / stage), "--data", str(folder), "--out", str(tmp_path / "out")]
    )
    short_training.begin(rl_command.checked(arguments, tmp_path))
    started = checkpoint.load(tmp_path / "out/base/base")
    # adapters begin at 0
    assert all(
        one.equal(other) for one, other in zip(started.parameters(), tiny_model.parameters(), strict=True)
    )
    rl_command.checked(arguments, tmp_path)  # a killed run goes on with it


def test_a_trial_begins_anew_and_need_not_learn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings_of(drawn(tmp_path / "mine", 20))
    training = replace(rl_command.RL, before_estimate=())
    request = training_request.Request(
        training=training, data="mine", model="M", out=tmp_path / "out", config=config, identity={}
    )
    killed = tmp_path / "out/.scratch/measured/scratch"
    killed.mkdir(parents=True)

    def trial(*_: object, **__: object) -> tuple[int, str, str]:
        assert not killed.exists()
        return 0, json.dumps({"step_s": 2.0, "bytes": 1e9, "total": 4e9, "gpu": False}), ""

    monkeypatch.setattr(short_training, "run_ranks", trial)
    assert "2.00 s a step" in short_training.estimate(request)
    assert inspect.signature(stages_rl.run).parameters["must_learn"].default is True

    def alike(*_: object, log: Log, must_learn: bool = True, **__: object) -> dict[str, float]:
        for step in range(3):
            log({"rl/loss": 0.0}, step)
        if must_learn:
            check_learned([(step, "grad_norm", 0.0) for step in range(3)])
        return {}

    monkeypatch.setattr(runner, "stage_function", lambda stage: alike)
    assert short_training.measure(tmp_path / "out", stage_named("rl"), config)["bytes"] > 0


PROCESS = """
import time
from pathlib import Path
from ans_core import stop
from flows import short_training
from tasks import runner

def work(config, *, out, **_):
    (out / f"{__import__('os').environ['RANK']}.at_work").touch()
    with stop.deferred():
        while not stop.requested():
            time.sleep(0.05)
        time.sleep(1)  # the step at work
        (out / f"{__import__('os').environ['RANK']}.state").touch()
    raise stop.Stopped(stop.requested(), 1)

runner.stage_function = lambda stage: work
short_training.main(*__import__("sys").argv[1:])
"""

PARENT = """
import os, sys
from pathlib import Path
from flows import short_training
from ans_core import stop
from ans_core.processes import shared_words
from tasks.process import held

stop.exit_on_signals()
out = Path(sys.argv[1])
with held(out / "lock", "ans rl") as file:
    os.set_inheritable(file, True)
    command = [sys.executable, *shared_words(2), str(out / "process.py"), str(out), "rl", str(out)]
    short_training.run_ranks(command, os.environ | short_training.TORCHRUN)
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGUSR1])
def test_processes_end_with_the_command_after_a_state_and_hold_its_lock_until_then(
    tmp_path: Path, number: signal.Signals
) -> None:
    (tmp_path / "params.yaml").write_text(
        dump(resolve(ROOT / PROFILES / "smoke.yaml", ("launch.processes=2",)))
    )
    (tmp_path / "process.py").write_text(PROCESS)
    (tmp_path / "parent.py").write_text(PARENT)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, tmp_path / "parent.py", tmp_path], cwd=ROOT, env=environment, start_new_session=True
    )
    deadline_s = time.monotonic() + 240
    while len(list(tmp_path.glob("*.at_work"))) < 2:
        assert parent.poll() is None
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    children = psutil.Process(parent.pid).children(recursive=True)
    assert len(children) >= 3  # torchrun and two processes
    parent.send_signal(number)
    assert parent.wait(120) == (-9 if number == signal.SIGKILL else 128 + number)
    with held(tmp_path / "lock", "a second start"):
        assert len(list(tmp_path.glob("*.state"))) == 2
    _, alive = psutil.wait_procs(children, timeout=60)
    assert alive == []


def test_a_judge_that_is_named_is_not_asked_for_its_models() -> None:
    assert rl_command.judge_words(None, {}) == []
    named = rl_command.judge_words("http://127.0.0.1:9/v1", {"judge.model": "a"})
    assert named == ["rl.use_llm_judge=true", 'judge.base_url="http://127.0.0.1:9/v1"']
    with pytest.raises(
        ValueError,
        match=r"--judge http://127.0.0.1:9/v1: it does not tell its models .* name one \(judge.model=NAME\)",
    ):
        rl_command.judge_words("http://127.0.0.1:9/v1", {})


class Models(BaseHTTPRequestHandler):
    """An endpoint that tells its models."""

    names: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        body = json.dumps(
            {"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.mark.slow
def test_the_only_model_of_an_endpoint_judges_and_one_of_several_is_to_be_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        monkeypatch.setattr(Models, "names", ["a-judge"])
        config = settings_of(drawn(tmp_path / "mine", 20), "--judge", url)
        assert (config.judge.model, config.judge.base_url) == ("a-judge", url)
        assert (config.rl.use_llm_judge, config.rl.use_llm_judge_loop2) == (True, False)
        monkeypatch.setattr(Models, "names", ["one", "two"])
        with pytest.raises(
            ValueError, match=r"has 2 models \['one', 'two'\]; name one of them: judge.model=NAME"
        ):
            rl_command.judge_words(url, {})
        server.shutdown()


@pytest.mark.slow
def test_what_rl_can_not_learn_from_is_refused_before_a_model_is_loaded(
    tmp_path: Path, tiny_model: Network
) -> None:
    with pytest.raises(ValueError, match="1 pictures are too few to hold some out"):
        ans("--model", "nothing", "--data", drawn(tmp_path / "few", 1), "--out", tmp_path / "out")
    folder = drawn(tmp_path / "mine", 20)
    with pytest.raises(ValueError, match="no folder 'nothing'"):
        ans("--model", "nothing", "--data", folder, "--out", tmp_path / "out")
    checkpoint.save(
        tiny_model, tmp_path / "base", metadata={"stage": "base", "source": ["an/InternVL", "a/SAM2"]}
    )
    with pytest.raises(ValueError, match="an/InternVL with a/SAM2, whose text_hidden_fcs are random"):
        ans("--model", tmp_path / "base", "--data", folder, "--out", tmp_path / "out")
    question = {"image": "0.png", "question": "How many?", "answer": "Two."}
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked/0.png").write_bytes(tiny.picture(0))
    records = [question | {"split": "train"}, question | {"split": "val"}]
    (tmp_path / "asked/annotations.json").write_text(json.dumps(records))
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    with pytest.raises(
        ValueError, match=r"no samples for a loop of RL: caption and mask want region captions"
    ):
        ans("--model", tmp_path / "model", "--data", tmp_path / "asked", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_reference
@pytest.mark.slow
def test_a_release_and_regions_become_a_checkpoint_and_a_report_on_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Photographs with masks and captions, and a release in upstream's layout of random weights."""
    lines = [
        json.loads(line) for line in (REFERENCE / "data/regions/manifest.jsonl").read_text().splitlines()
    ]
    chosen = [line for line in lines if line.get("caption")][:16]
    rows = [
        (REFERENCE / "data/regions" / line["image"], line["segmentation"], line["caption"]) for line in chosen
    ]
    folder, release, out = (
        save_regions(tmp_path / "described", rows),
        REFERENCE / "golden/qwen2",
        tmp_path / "out",
    )
    assert len(list(FORMATS["region_arrow"](folder, name="d", split="train"))) == 16
    words = (
        "--model",
        release,
        "--data",
        folder,
        "--out",
        out,
        "--steps",
        2,
        "rl.optim.batch=4",
        "launch.processes=2",
        *FEW_WORDS,
    )
    assert ans(*words) == 0
    told = capsys.readouterr().out
    assert "loops caption, mask; 2 steps of 4" in told
    assert "s a step, " in told
    assert "held-out pictures, before and after" in told
    before, after = checkpoint.load(release), Sa2VA.from_pretrained(out / "model")
    assert any(not new.equal(old) for new, old in zip(after.parameters(), before.parameters(), strict=True))
    for row in ("sft", "rl"):
        metrics = json.loads((out / "evaluate" / row / "metrics.json").read_text())
        assert {
            "described/loop1/IoU",
            "described/loop2/METEOR",
            "described/region_caption/METEOR",
        } <= metrics.keys()
    page = (out / "report/report.html").read_text()
    assert "RL against sft" in page
    assert "ANS report: RL on described" in page
    assert ans(*words) == 0
    assert capsys.readouterr().out.count("was there") == 9
