import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from typing import Any

import psutil
import pytest

from ans_core.config import Config, resolve
from tasks import stage_run
from tasks.process import held, holder_of, imports_without_collector
from tasks.stage_run import Record, StageRun
from tasks.tracker import TrackedRun
from tasks.tracking import (
    client,
    clock,
    close_stuck_runs,
    experiment_id,
    find_runs,
    flat,
    log_finished,
    metric_name,
    pipeline_metrics,
    run_name,
    works_since,
)

ASK = """
import sys, urllib.request
import tasks
import httpx, requests
address = f"http://{sys.argv[2]}:{sys.argv[1]}/"
print(urllib.request.urlopen(address).read().decode(), requests.get(address).text, httpx.get(address).text)
print(httpx.get("http://192.0.2.1/").text)
"""
HOLD = """
import sys, time
from pathlib import Path
from tasks.process import held
with held(Path(sys.argv[1]), "first"):
    print("held", flush=True)
    time.sleep(60)
"""
ROOT = Path(__file__).resolve().parents[2]


UNREAD = """
import sys
from tqdm import tqdm
from tasks.process import outlive_readers
outlive_readers()
sys.stdin.readline()
for step in tqdm(range(3), mininterval=0):
    print("step", step, file=sys.stderr, flush=True)
open(sys.argv[1], "w").write("done")
"""

NAMESPACE = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc"]
PROCESS_1 = """
import os, time
from tasks.process import die_with_parent

def be_adopted():
    os.setsid()
    if os.fork():
        os._exit(0)
    while os.getppid() != 1:
        time.sleep(0.01)

for prepare in (lambda: None, os.setsid, be_adopted):  # torchrun and Prefect start each process in a new session
    if os.fork() == 0:
        prepare()
        die_with_parent()
        os.write(1, b"works\\n")
        os._exit(0)
for _ in range(4):
    os.wait()
"""


class Answer(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(self.path.encode())

    def log_message(self, *_words: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(
    ("host", "excepted"),
    [("127.0.0.1", {}), ("localhost", {"no_proxy": "example.org", "ALL_PROXY": "socks5://127.0.0.1:9"})],
)
def test_this_machines_servers_are_reached_past_a_proxy(host: str, excepted: dict[str, str]) -> None:
    servers = [ThreadingHTTPServer(("127.0.0.1", 0), Answer) for _ in range(2)]
    for server in servers:
        Thread(target=server.serve_forever, daemon=True).start()
    (own, _), (proxy, _) = ((server.server_address[1], server) for server in servers)
    environ = {key: value for key, value in os.environ.items() if not key.lower().endswith("_proxy")}
    environ |= {
        "HTTP_PROXY": f"http://127.0.0.1:{proxy}",
        "http_proxy": f"http://127.0.0.1:{proxy}",
        **excepted,
    }
    asked = subprocess.run(
        [sys.executable, "-c", ASK, str(own), host],
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
    )
    for server in servers:
        server.shutdown()
        server.server_close()
    # a proxy is asked for the whole address
    assert asked.stdout == "/ / /\nhttp://192.0.2.1/\n", asked.stderr


def test_a_holder_is_named_and_a_second_gets_the_lock_when_the_first_is_killed(
    tmp_path: Path,
) -> None:
    lock = tmp_path / "x.lock"
    first = subprocess.Popen([sys.executable, "-c", HOLD, str(lock)], stdout=subprocess.PIPE, cwd=ROOT)
    assert first.stdout is not None
    assert first.stdout.readline() == b"held\n"
    assert holder_of(lock).startswith(f"first (pid {first.pid}, ")
    first.kill()
    first.wait()
    start_s = time.monotonic()
    with held(lock, "second"):
        assert time.monotonic() - start_s < 60


def test_a_killed_process_that_nobody_waited_for_is_not_at_work() -> None:
    started_s = time.time()
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    assert works_since(process.pid, time.time())
    assert not works_since(process.pid, started_s - 60)  # the number was another's then
    process.kill()
    deadline_s = time.monotonic() + 10
    while works_since(process.pid, time.time()) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not works_since(process.pid, time.time())
    process.wait()
    assert not works_since(process.pid, time.time())


def test_mlflow_gets_names_it_allows() -> None:
    assert metric_name("video/val/J&F") == "video/val/J_F"
    assert metric_name("referring/val/gIoU") == "referring/val/gIoU"


def test_parameters_are_flattened_to_dotted_names() -> None:
    assert flat({"sft": {"optim": {"lr": 0.1}, "frames": 4}}) == {"sft.optim.lr": "0.1", "sft.frames": "4"}


@pytest.mark.slow
def test_a_stage_whose_data_has_any_name_is_recorded_and_what_can_not_be_sent_stops_no_other(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mlflow = client(tmp_path)
    log_finished(tmp_path, "a", tags={"ans.kind": "a"}, params={"sft.mixture.R&D": "0.5"}, metrics={})
    (run,) = find_runs(mlflow, experiment_id(mlflow, tmp_path), {"ans.kind": "a"})
    assert run.data.params == {"sft.mixture.R_D": "0.5"}

    record = Record(
        stage="sft", profile="tiny", pipeline="p", in_flow=False, owner=os.getpid(), tags={"ans.stage": "sft"}, params={},
        settings={}, data={}, start_ms=1, end_ms=2, status="FINISHED",
    )  # fmt: skip
    left = asdict(record)
    unsent = tmp_path / ".ans/unsent"
    unsent.mkdir(parents=True)
    for name, record in {
        "1": left | {"of_another_version": 1},
        "2": left | {"metrics": [["a&b", 0.5, 0, 0]]},
        "3": left,
    }.items():
        (unsent / f"{name}.json").write_text(json.dumps(record))
    stage_run.send_left(tmp_path, mlflow, experiment_id(mlflow, tmp_path))
    assert sorted(path.name for path in unsent.iterdir()) == ["1.refused", "2.refused"]
    assert "put aside as" in capfd.readouterr().err


def test_a_pipelines_run_shows_results_and_neither_curves_nor_the_machines_load() -> None:
    def shown(stage: str, *names: str) -> dict[str, float]:
        return pipeline_metrics(stage, dict.fromkeys(names, 0.5))

    assert set(shown("evaluate@rl", "eval/video/val/J_F", "system/cpu", "duration_s")) == {"rl/video/val/J_F"}
    assert set(shown("sft", "sft/loss", "mixture/drawn/rows", "train/loss")) == {"train/sft/loss"}
    assert set(shown("report", "rl/video/val/J_F", "system/cpu")) == {"rl/video/val/J_F"}
    assert set(shown("prepare", "samples/drawn/train", "duration_s")) == set()
    assert set(shown("convert", "parity/texts", "duration_s")) == {"convert/parity/texts"}


def test_a_run_is_named_by_what_tells_it_from_others() -> None:
    settings = flat(Config.model_validate(resolve(ROOT / "profiles/tiny.yaml", ())).model_dump(mode="json"))
    assert run_name("tiny", settings, ROOT, 0) == f"tiny {clock(0)}"
    changed = settings | {
        "launch.processes": "2",
        "rl.kl": "0.5",
        "prepare.sources": "[" + "x" * 80,
        "seed": "7",
    }
    assert run_name("tiny", changed, ROOT, 0) == f"tiny seed=7 prepare.sources +1 {clock(0)}"
    assert run_name("my-own", settings, ROOT, 0) == f"my-own {clock(0)}"


def test_training_waits_for_no_answer_and_nothing_of_what_it_logs_is_lost() -> None:
    answering, got = Event(), []

    class Slow:
        def log(self, metrics: dict[str, float], step: int) -> None:
            assert answering.wait(60)
            got.append((metrics, step))

        def end(self, *, ok: bool) -> None:
            got.append(ok)

    run, metrics = TrackedRun(Slow), {"loss": 0.5}  # type: ignore[arg-type]
    run.log(metrics, 0)
    metrics["loss"] = 0.25
    run.log(metrics, 1)
    assert got == []
    answering.set()
    run.end(ok=True)
    assert got == [({"loss": 0.5}, 0), ({"loss": 0.25}, 1), True]


TRACKED = """
import signal, sys, time
from pathlib import Path
from ans_core import stop
from tasks.tracker import stage_run
stop.exit_on_signals((signal.SIGTERM,))
given = {"stage": "sft", "version": "1", "profile": "tiny", "state_key": "k", "params": {"steps": 3}, "settings": {}, "data": {}}
with stage_run(Path(sys.argv[1]), **given) as run:
    run.log({"loss": 0.5}, 7)
    print("running", flush=True)
    time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_stage_logged_outlives_it_and_its_tracker_does_not(
    tmp_path: Path, way: signal.Signals
) -> None:
    mlflow = client(tmp_path)
    experiment = experiment_id(mlflow, tmp_path)
    stage = subprocess.Popen(
        [sys.executable, "-c", TRACKED, str(tmp_path)],
        stdout=subprocess.PIPE,
        cwd=ROOT,
        start_new_session=True,
    )
    assert stage.stdout is not None
    assert stage.stdout.readline() == b"running\n"
    deadline_s = time.monotonic() + 120
    while (
        not (found := find_runs(mlflow, experiment, {"ans.kind": "stage"}))
        or "loss" not in found[0].data.metrics
    ):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
    (tracker,) = psutil.Process(stage.pid).children()  # a thread started it; it may have been after "running"
    os.killpg(stage.pid, way)
    stage.wait()
    tracker.wait(120)
    (run,) = find_runs(mlflow, experiment, {"ans.kind": "stage"})
    assert run.data.tags["ans.pid"] == str(stage.pid)
    assert run.data.params == {"steps": "3"}
    assert run.data.metrics["loss"] == 0.5
    assert run.info.status == "FAILED"
    assert close_stuck_runs(tmp_path) == []  # the pipeline's, too, is closed


@pytest.mark.slow
def test_what_is_logged_while_the_store_is_away_is_sent_by_the_next_stage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    asked, away = Event(), True
    log_batch = MlflowClient.log_batch

    def sometimes(*words: Any, **named: Any) -> None:
        asked.set()
        if away:
            raise MlflowException("connection refused\nand a page of SQL")
        log_batch(*words, **named)

    def start(stage: str) -> StageRun:
        given = {
            "version": "1",
            "profile": "tiny",
            "state_key": "k",
            "params": {},
            "settings": {"seed": 0},
            "data": {"data": "a" * 32 + ".dir"},
        }
        return StageRun(tmp_path, stage=stage, pid=os.getpid(), pipeline={}, **given)

    monkeypatch.setattr(MlflowClient, "log_batch", sometimes)
    monkeypatch.setattr(stage_run, "RETRY_S", 0.1)
    run = start("sft")
    for step in range(3):
        run.log({"loss": step / 2}, step)
    assert asked.wait(120)
    # the first end counts
    said = [run.log_result({"train/loss": 0.5}, tmp_path), run.end(ok=True), run.end(ok=False)]
    (message,) = filter(None, said)
    assert message.startswith("MLflow takes nothing at present; the stage goes on")
    assert len(list((tmp_path / ".ans/unsent").iterdir())) == 1

    away = False
    start("rl").end(ok=True)
    assert not list((tmp_path / ".ans/unsent").iterdir())
    mlflow = client(tmp_path)
    experiment = mlflow.get_experiment_by_name("ans")
    assert experiment.tags["mlflow.experimentKind"] == "custom_model_development"
    (sft,) = find_runs(mlflow, experiment.experiment_id, {"ans.stage": "sft"})
    assert (sft.info.status, sft.info.end_time) == ("FINISHED", run.record.end_ms)
    assert [(found.step, found.value) for found in mlflow.get_metric_history(sft.info.run_id, "loss")] == [
        (0, 0.0),
        (1, 0.5),
        (2, 1.0),
    ]
    assert "system/system_memory_usage_percentage" in sft.data.metrics
    parent = mlflow.get_run(sft.data.tags["mlflow.parentRunId"])
    for one in (sft, parent):
        (data,) = one.inputs.dataset_inputs
        assert (data.dataset.name, data.dataset.digest) == ("data", "a" * 32 + ".dir")
    assert (parent.info.status, parent.data.params, parent.data.metrics) == (
        "FINISHED",
        {"seed": "0"},
        {"train/sft/loss": 0.5},
    )
    assert {
        "mlflow.user",
        "mlflow.source.git.commit",
        "git.dirty",
        "dvc.lock",
        "version.torch",
        "hardware.cpu",
    } <= parent.data.tags.keys()
    assert (
        f"- [sft](#/experiments/{experiment.experiment_id}/runs/{sft.info.run_id}): ran, "
        in parent.data.tags["mlflow.note.content"]
    )
    assert (sft.info.run_name, parent.info.run_name) == tuple(
        f"{part}tiny {clock(run.record.start_ms)}" for part in ("sft ", "")
    )


@pytest.mark.slow
def test_a_tracker_whose_stage_is_gone_before_it_is_up_ends() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "tasks.tracker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    process.communicate("00" * 32 + "\n", timeout=60)
    assert process.returncode == 0


def test_imports_are_made_without_the_collector_and_what_they_left_is_not_looked_at_later() -> None:
    with imports_without_collector():
        kept = [Path()]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not any(found is kept for found in gc.get_objects())


def test_a_process_goes_on_where_nobody_reads_its_output_any_more(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", UNREAD, tmp_path / "out"], cwd=ROOT, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdout.close()
    process.stdin.write("go on\n")
    process.stdin.close()
    assert process.wait(60) == 0
    assert (tmp_path / "out").read_text() == "done"


def test_process_1_of_a_container_starts_children_and_adopts_others() -> None:
    if not shutil.which("unshare") or subprocess.run([*NAMESPACE, "true"], check=False).returncode:
        pytest.skip("this kernel lets users make no namespaces, or `unshare` is missing")
    words = [*NAMESPACE, sys.executable, "-c", PROCESS_1]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    assert done.stdout == "works\nworks\n", done.stderr
    assert done.stderr == "the process that started this one is gone\n"
