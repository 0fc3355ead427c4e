"""`ans run` and `ans server`: the flow on a temporary Prefect server with a table at the end; a lasting server with a worker."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

from flows.paths import environment
from tasks.stages import ROWS, SUMMARY

SHOWN = (
    "referring/val/gIoU", "referring/val/cIoU", "referring/val/gIoU_shuffled_text", "region_caption/val/METEOR",
    "region_caption/val/attribute_accuracy", "loop1/val/IoU", "loop2/val/METEOR", "video/val/J&F",
)  # fmt: skip
POOL = "ans"
HEALTH_TRIES = 120


def quiet_prefect(here: Path) -> None:
    """Settings of a run without a server of one's own; must come before prefect is imported."""
    os.environ.setdefault("PREFECT_HOME", str(here / ".ans/prefect"))
    Path(os.environ["PREFECT_HOME"]).mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")  # 20 s are too few on a loaded machine
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "15")  # 60: one request in some runs is never answered, and asked again then
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")  # a stage says itself what went wrong; Prefect would add tracebacks
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
    os.environ.setdefault("PREFECT_CLI_PROMPT", "false")


def end_orphan_servers(here: Path) -> int:
    """Ends the temporary Prefect servers of this workspace whose `ans run` was killed (they outlive it, with 230 MB each)."""
    import psutil

    home, ended = str(here / ".ans/prefect"), 0
    for process in psutil.process_iter(["ppid", "cmdline"]):
        if process.info["ppid"] == 1 and "uvicorn" in (process.info["cmdline"] or []):
            try:
                if process.environ().get("PREFECT_HOME") == home:
                    process.terminate()
                    ended += 1
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # ended by itself, or another user's
                continue
    return ended


def run_pipeline(here: Path) -> int:
    os.chdir(here)
    quiet_prefect(here)
    end_orphan_servers(here)
    from ans_core.config import load

    profile = load(here / "params.yaml").profile
    start_s = time.monotonic()
    from flows.child import StageFailedError
    from flows.pipeline import full_pipeline

    try:
        rows = full_pipeline()
    except (StageFailedError, TimeoutError) as error:
        print(f"\nans: {error}\nThe same command resumes where it stopped.", file=sys.stderr)
        return 1
    print_result(rows, here, profile, time.monotonic() - start_s)
    return 0


def print_result(rows: list[tuple[str, str, float]], here: Path, profile: str, took_s: float) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    stages = Table(title=f"full-pipeline, profile {profile}: {took_s:.0f} s")
    for heading in ("stage", "", "time"):
        stages.add_column(heading, justify="right" if heading == "time" else "left")
    for name, how, seconds in rows:
        stages.add_row(name, how, f"{seconds:.1f} s")
    console.print(stages)

    summary = json.loads((here / SUMMARY).read_text(encoding="utf-8"))
    metrics = Table(title="held-out metrics")
    metrics.add_column("metric")
    for row in ROWS:
        metrics.add_column(row, justify="right")
    for name in SHOWN:
        values = [summary.get(row, {}).get(name) for row in ROWS]
        metrics.add_row(name, *("-" if value is None else f"{value:.3f}" for value in values))
    console.print(metrics)
    binaries = Path(sys.executable).parent
    where = binaries.relative_to(here) if binaries.is_relative_to(here) else binaries
    print(f"report:    {here / 'runs' / profile / 'report/report.html'}")
    print(f"runs:      {where}/mlflow ui --backend-store-uri sqlite:///.ans/mlflow.db     (http://127.0.0.1:5000)")
    print(f"changes:   {where}/dvc metrics diff")
    print(f"schedule:  {where}/ans server     (Prefect server, deployments and a worker; or `prefect server start`)")


def wait_for(url: str) -> None:
    for _ in range(HEALTH_TRIES):
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, ConnectionError, TimeoutError):
            time.sleep(0.5)
    raise TimeoutError(f"{url} did not answer within {HEALTH_TRIES // 2} s; `prefect server start` shows why")


def serve(here: Path, *, port: int) -> int:
    """Starts three things and ends them together: server, deployments, worker."""
    api = f"http://127.0.0.1:{port}/api"
    env = {**environment(), "PREFECT_API_URL": api, "ANS_HOME": str(here), "PREFECT_CLI_PROMPT": "false"}
    prefect = [sys.executable, "-m", "prefect"]
    started = [subprocess.Popen([*prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port)], cwd=here, env=env)]
    try:
        wait_for(f"{api}/health")
        subprocess.run([*prefect, "work-pool", "create", POOL, "--type", "process", "--overwrite"], cwd=here, env=env, check=True)
        subprocess.run([*prefect, "deploy", "--all"], cwd=here, env=env, check=True)
        print(f"\nPREFECT_API_URL={api} prefect deployment run full-pipeline/tiny\n", flush=True)
        started.append(subprocess.Popen([*prefect, "worker", "start", "--pool", POOL, "--limit", "1"], cwd=here, env=env))
        return started[-1].wait()
    finally:
        for process in reversed(started):  # the worker is gone before its server: without one it waits long for an answer
            process.send_signal(signal.SIGTERM)
            process.wait()
