"""The exact commands of the launchers. tests/flows/test_pipeline.py
starts stages by them."""

import json
import os
import subprocess
import sys
import time
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from ans_core.config import Config, ConfigError, Launch, Memory
from tasks import jobs, ray_jobs, runner, slurm
from tasks.jobs import Job
from tasks.launcher import check_sharding, check_shares, is_job, ranks_command, run_job
from tasks.ports import free_port
from tasks.runner import FLIGHT_RECORDER
from tasks.stages import stage_named
from tests.workspace import ROOT

SFT, EVALUATE = stage_named("sft"), stage_named("evaluate@rl")
SEVERAL = {"PET_NNODES": "4", "PET_NODE_RANK": "1", "PET_MASTER_ADDR": "first", "PET_MASTER_PORT": "29500"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
HERE = ["--standalone", "--nproc-per-node=2"]


SPREAD = {"launcher": "slurm", "inference_processes": 2, "resources": {"evaluate": {"nodes": 4, "gpus": 2}}}


@pytest.mark.parametrize(
    ("stage", "launch", "environment", "command"),
    [
        ("sft", {}, {}, None),
        ("base", {"processes": 2, "deepspeed_stage": 2}, {}, None),  # not distributed
        ("memory", {"processes": 2}, {}, [*TORCHRUN, *HERE, "-m", "tasks", "memory"]),
        ("rl", {"deepspeed_stage": 2}, {}, [*TORCHRUN, "--standalone", "--nproc-per-node=1", "-m", "tasks", "rl"]),
        ("evaluate@rl", {"processes": 2}, {}, [*TORCHRUN, "--nnodes=1", *HERE, "-m", "tasks", "evaluate@rl"]),
        # of this node
        ("evaluate@rl", {"processes": 8}, SEVERAL, [*TORCHRUN, "--nnodes=1", *HERE, "-m", "tasks", "evaluate@rl"]),
        ("evaluate@rl", {"processes": 2, "launcher": "slurm"}, {"SLURM_NNODES": "2", "ANS_JOB": "1"}, None),
        ("evaluate@rl", {"inference_processes": 2}, {}, [*TORCHRUN, "--nnodes=1", *HERE, "-m", "tasks", "evaluate@rl"]),
        ("evaluate@rl", SPREAD, {**SEVERAL, "ANS_JOB": "1"}, [*TORCHRUN, "--nproc-per-node=2", "-m", "tasks", "evaluate@rl"]),
        ("evaluate@rl", {"inference_processes": 2, **SPREAD}, SEVERAL, None),  # the job starts them
        ("cota", {"inference_processes": 2}, {}, [*TORCHRUN, "--nnodes=1", *HERE, "-m", "tasks", "cota"]),
        ("agent_evaluate@sft", {"processes": 2}, {}, [*TORCHRUN, "--nnodes=1", *HERE, "-m", "tasks", "agent_evaluate@sft"]),
        ("evaluate@rl", {"processes": 2, "inference_processes": 1}, {}, None),
        ("evaluate@rl", {"inference_processes": 2, "launcher": "slurm"}, {}, None),  # the job starts them
        ("sft", {"inference_processes": 2}, {}, None),  # trains
        ("evaluate@rl", {"deepspeed_stage": 2}, {}, None),  # trains nothing
        ("sft", {"processes": 32}, SEVERAL, [*TORCHRUN, "--nproc-per-node=8", "-m", "tasks", "sft"]),
        ("sft", {"processes": 2, "launcher": "slurm"}, {"ANS_JOB": "1"}, [*TORCHRUN, *HERE, "-m", "tasks", "sft"]),
    ],
)  # fmt: skip
def test_ranks_start_by_this_command(
    stage: str, launch: dict[str, object], environment: dict[str, str], command: list[str] | None
) -> None:
    assert ranks_command(stage_named(stage), Launch.model_validate(launch), environment) == command


def test_processes_that_the_nodes_cannot_share_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"launch.processes is 6, on PET_NNODES=4 nodes: give a multiple"):
        ranks_command(SFT, Launch(processes=6), SEVERAL)


@pytest.mark.parametrize(("stage", "train_memory"), [("rl", False), ("memory", True)])
def test_stages_that_read_whole_weights_are_refused_under_zero_3_and_no_others(
    stage: str, train_memory: bool
) -> None:
    divided = Config(profile="own", memory=Memory(train=train_memory), launch=Launch(deepspeed_stage=3))
    with pytest.raises(
        ConfigError, match=rf"deepspeed_stage is 3, .* the stage {stage} needs them whole: .* set 2 \(or 0\)"
    ):
        check_sharding(stage_named(stage), divided)
    whole = divided.model_copy(update={"launch": Launch(deepspeed_stage=2)})
    for other, config in (("sft", divided), ("prepare", divided), (stage, whole)):
        check_sharding(stage_named(other), config)
    # which trains nothing
    check_sharding(stage_named("memory"), Config(profile="own", launch=Launch(deepspeed_stage=3)))


def test_an_agents_step_without_a_row_for_every_process_is_refused_before_anything_runs() -> None:
    """32 rows, 6 of them (a fifth) with expressions: 26 traces."""
    config = Config.model_validate(
        {
            "profile": "own",
            "agent": {"sft": {"optim": {"steps": 1, "batch": 32, "lr": 1e-3, "accumulate": 13}}},
        }
    )
    for processes, refused in (
        (2, []),
        (3, ["agent_sft@tools", "agent_sft@direct"]),
        (9, ["agent_sft@tools", "agent_sft@direct", "rft"]),
    ):
        of = config.model_copy(update={"launch": Launch(processes=processes)})
        for name in ("sft", "rl", "cota", "agent_sft@tools", "agent_sft@direct", "rft", "agent_evaluate@rft"):
            with (
                pytest.raises(ValueError, match=rf"a step are less than one .* {processes} processes")
                if name in refused
                else nullcontext()
            ):
                check_shares(stage_named(name), of)


@pytest.mark.parametrize(
    ("stage", "launcher", "environment", "submitted"),
    [
        ("sft", "slurm", {}, True),
        ("evaluate@rl", "ray", {}, True),
        ("prepare", "slurm", {}, False),
        ("sft", "slurm", {"ANS_JOB": "1"}, False),
        ("sft", "torchrun", {}, False),
    ],
)
def test_gpu_stages_alone_are_submitted_and_once(
    stage: str, launcher: str, environment: dict[str, str], submitted: bool
) -> None:
    assert is_job(stage_named(stage), Launch.model_validate({"launcher": launcher}), environment) == submitted


def test_prepare_is_submitted_where_resources_name_it() -> None:
    launch = Launch.model_validate({"launcher": "ray", "resources": {"prepare": {"cpus": 32}}})
    assert is_job(stage_named("prepare"), launch, {})
    assert not is_job(stage_named("prepare"), launch, {"ANS_JOB": "1"})
    job = Job(
        name="j", task="prepare", words=(), launch=launch, processes=1, distributed=False, gpu=False,
        root=Path(),
    )  # fmt: skip
    assert ray_jobs.workers(job)["each"] == {"CPU": 32, "GPU": 0}
    assert "--cpus-per-task=32" in slurm.options(job)


def test_a_cluster_that_is_not_there_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    for launcher, address, message in (
        ("slurm", "", r"launch\.launcher is slurm, and there is no `squeue` on this machine's PATH"),
        (
            "ray",
            "auto",
            r"launch\.launcher is ray, and RAY_ADDRESS is 'auto': set the address of Ray's jobs API",
        ),
        ("kubernetes", "", r"launch\.launcher is kubernetes, (whose client is not|and no cluster is named)"),
        ("ray", f"http://127.0.0.1:{free_port()}", r"RAY_ADDRESS is .*, and nobody answers there: .*refused"),
    ):
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=message):
            run_job(EVALUATE, Launch.model_validate({"launcher": launcher}), tmp_path, key="k")


def test_a_job_of_ray_asks_for_a_core_and_a_gpu_for_each_process() -> None:
    def request(task: str, processes: int, distributed: bool, **launch: object) -> tuple[object, ...]:
        of = Launch.model_validate({"launcher": "ray", **launch}).of(task)
        job = Job(
            name="j",
            task=task,
            words=(),
            launch=of,
            processes=processes,
            distributed=distributed,
            root=Path(),
        )
        return tuple(ray_jobs.workers(job).values())

    big = {"resources": {"sft": {"nodes": 4, "gpus": 8}, "evaluate": {"gpus": 8}}}
    assert request("sft", 32, True, **big) == (32, {"CPU": 1, "GPU": 1}, False)
    assert request("evaluate", 8, False, **big) == (1, {"CPU": 8, "GPU": 8}, False)
    assert request("rl", 2, True) == (2, {"CPU": 1, "GPU": 1}, False)
    assert request("base", 1, False, device="cpu") == (1, {"CPU": 1, "GPU": 0}, False)
    each = {"resources": {"rl": {"nodes": 2}}, "device": "cpu"}
    assert request("rl", 2, True, **each) == (2, {"CPU": 1, "GPU": 0}, True)
    loaders = {"resources": {"sft": {"nodes": 2, "gpus": 8, "cpus": 96}, "evaluate": {"gpus": 2, "cpus": 16}}}
    assert request("sft", 16, True, **loaders) == (16, {"CPU": 12, "GPU": 1}, False)
    assert request("evaluate", 2, False, **loaders) == (1, {"CPU": 16, "GPU": 2}, False)
    spread = {"resources": {"evaluate": {"nodes": 2, "gpus": 4, "cpus": 32}, "cota": {"nodes": 2}}}
    assert request("evaluate", 8, False, **spread) == (8, {"CPU": 8, "GPU": 1}, False)
    assert request("cota", 2, False, **spread, device="cpu") == (2, {"CPU": 1, "GPU": 0}, True)
    with pytest.raises(ConfigError, match="asks for 4 nodes"):
        request("sft", 1, True, resources={"sft": {"nodes": 4, "cpus": 16}})


@pytest.mark.slow
def test_torch_knows_the_flight_recorders_variables() -> None:
    """It warns at the start of a process group of one that it calls otherwise now."""
    script = (
        "import torch.distributed as dist; from tasks.ports import free_port; dist.init_process_group('gloo', "
        "init_method=f'tcp://127.0.0.1:{free_port()}', rank=0, world_size=1); dist.destroy_process_group()"
    )
    variables = os.environ | FLIGHT_RECORDER | {"TORCH_FR_DUMP_TEMP_FILE": "unused"}
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, env=variables, capture_output=True, text=True, check=True
    )
    assert "deprecated" not in done.stderr


def test_a_ray_whose_nodes_are_starting_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = [
        (500, b"Traceback\nRuntimeError: No available agent to submit job, please try again later."),
        (200, b"[]"),
    ]

    class Starting(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, content = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Starting) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("RAY_ADDRESS", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setattr(jobs, "POLL_S", 0.01)
        assert ray_jobs.ask("") == []
        server.shutdown()
    assert capsys.readouterr().err.startswith("Ray waits: Traceback")


def test_the_first_reason_of_a_failure_is_noted_and_a_broken_set_is_no_cause_to_try_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    note = tmp_path / "note.json"
    monkeypatch.setenv("ANS_NOTE", str(note))
    prepare, sft = stage_named("prepare"), stage_named("sft")
    assert runner.note_failure(prepare, ValueError("set: a.png is broken")) == jobs.USER_ERROR
    begin_s = time.monotonic()
    lost = RuntimeError("[pair.cc:553] Connection closed by peer [127.0.0.1]")
    assert runner.note_failure(prepare, lost) == jobs.FAILED
    assert time.monotonic() - begin_s < 1
    assert json.loads(note.read_text()) == {"status": 2, "message": "ValueError: set: a.png is broken"}
    note.unlink()
    assert runner.note_failure(sft, ValueError("a batch")) == jobs.FAILED  # a retry resumes it
    note.unlink()
    monkeypatch.setattr(runner, "REASON_S", 0.2)
    runner.note_failure(sft, lost)  # nobody else says why
    assert "Connection closed" in json.loads(note.read_text())["message"]
