"""`ans run`: the flow on a temporary Prefect server, with a table at the end. `ans server`: a lasting server
with a worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from ans_core import stop
from flows.child import LAUNCH, SettingsError, StageFailedError, end_group
from flows.dvc_state import are_up_to_date
from flows.kept import FILES, at_work, print_lines, settings_of_run
from flows.paths import deployment_names, environment, root
from flows.prefect_server import deployment_command, prefect_server
from flows.services import running
from tasks.process import imports_without_collector, write_error
from tasks.stage_run import import_store
from tasks.stages import AGENT, MAIN, MEMORY, ONLINE, STAGES, Stage, needed_for
from tasks.surroundings import git


def quiet_prefect(here: Path) -> None:
    """Set Prefect up for runs without a user's server; must come before prefect is imported."""
    os.environ["PREFECT_HOME"] = str(here / ".ans/prefect")
    # default 60: in some runs a request is never answered, only its retry
    os.environ.setdefault("PREFECT_API_REQUEST_TIMEOUT", "15")
    # stages report their own errors; Prefect would add tracebacks
    os.environ.setdefault("PREFECT_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_SERVER_LOGGING_LEVEL", "CRITICAL")
    os.environ.setdefault("PREFECT_LOGGING_TO_API_WHEN_MISSING_FLOW", "ignore")
    os.environ.setdefault("PREFECT_CLI_PROMPT", "false")


def run_pipeline(here: Path, *, group: str = MAIN, overrides: dict[str, Any] | None = None) -> int:
    """Run the pipeline, or the stages of another group and all that they need. The pipeline of a SAM2 alone
    ends with its memory."""
    os.chdir(here)
    from ans_core.config import load

    start_s = time.monotonic()
    with exit_if_a_stage_fails():
        name = "full-pipeline" if group == MAIN else f"{group}-pipeline"
        with at_work(here, name), settings_of_run(here, overrides=overrides):
            config = load(here / "params.yaml")
            if group == MAIN and config.base.source == "sam2":
                group = MEMORY
            rows = nothing_to_do(here, STAGES if group == MAIN else needed_for(group, config))
        rows = rows or run_flow(here, group, overrides)
    took_s = time.monotonic() - start_s
    from flows.result_tables import print_result

    print_result(rows, here, config.profile, took_s, group=group)
    print_lines(before_a_pull(here))
    return 0


@contextmanager
def exit_if_a_stage_fails(resume: str = "\nThe same command resumes where it stopped.") -> Iterator[None]:
    """End this process with a sentence if a stage fails, whose own message is already printed."""
    try:
        yield
    except (StageFailedError, TimeoutError) as error:
        resume = "" if isinstance(error, SettingsError) else resume  # something is to be mended first
        print(f"\nans: {str(error).splitlines()[0]}{resume}", file=sys.stderr)
        sys.exit(1)


def nothing_to_do(here: Path, stages: tuple[Stage, ...]) -> list[tuple[str, str, float]]:
    """Return all stages as cached if none would run, else nothing: server, Prefect and MLflow take 20 s of
    processor time to find out the same."""
    try:
        up_to_date = are_up_to_date([stage.target for stage in stages], here)
        return [(stage.name, "cached", 0.0) for stage in stages] if up_to_date else []
    except BlockingIOError:  # the flow waits for it
        return []


def run_flow(here: Path, group: str, overrides: dict[str, Any] | None) -> list[tuple[str, str, float]]:
    with prefect_api(here):
        with imports_without_collector():
            from flows.pipeline import agent_pipeline, full_pipeline, memory_pipeline, online_pipeline
        import_store()

        flow: Any = {
            MAIN: full_pipeline,
            AGENT: agent_pipeline,
            ONLINE: online_pipeline,
            MEMORY: memory_pipeline,
        }[group]
        rows: list[tuple[str, str, float]] = flow(overrides=overrides)
        return rows


@contextmanager
def prefect_api(here: Path) -> Iterator[None]:
    """Use the server that PREFECT_API_URL names, else that of `ans up` here, else a temporary one. Import
    flows inside."""
    quiet_prefect(here)
    with ExitStack() as stack:
        if url := os.environ.get("PREFECT_API_URL"):
            check_server(
                f"PREFECT_API_URL names {url}",
                "start it (`ans server`), or unset PREFECT_API_URL for a temporary server",
            )
        elif up := next((service for service in running(here) if service.key), None):
            os.environ |= {"PREFECT_API_URL": f"{up.url}/api", "PREFECT_API_AUTH_STRING": up.key}
            check_server(
                f"`ans up` started a server at {up.url}",
                "`ans down` ends it; then `ans up`, or a temporary server",
            )
        else:
            os.environ.update(stack.enter_context(prefect_server(here, temporary=True)))
        yield


def check_server(which: str, remedy: str) -> None:
    """Raise OSError if no Prefect server answers at PREFECT_API_URL (`remedy` says what then), or if it wants
    another key."""
    import httpx
    from prefect.client.orchestration import get_client

    try:
        with get_client(sync_client=True) as client:
            client.raise_for_api_version_mismatch()
    except (RuntimeError, httpx.HTTPError) as error:
        if isinstance(error, httpx.HTTPStatusError):
            remedy = "set PREFECT_API_AUTH_STRING to the key that `ans server` printed"
        raise OSError(f"{which}: {str(error.__cause__ or error).splitlines()[0]}; {remedy}") from error


def before_a_pull(here: Path) -> list[str]:
    """Return what lets `git pull` work again after a run, whose settings, lock and figures are files of git;
    nothing if it changed none."""
    changed = git(here, "diff", "--name-only", "--relative", "HEAD", "--", *FILES).split()
    return (
        [f"git pull:  needs `git stash push -- {' '.join(changed)}` first; runs/ and the cache keep what ran"]
        if changed
        else []
    )


def serve(here: Path, *, port: int) -> int:
    """Start server, deployments and worker, and end them together, however this process ends."""
    stop.exit_on_signals((signal.SIGTERM,))
    with prefect_server(here, port=port) as client:
        env = environment() | client | deployment_names(here, shared=False)
        deploy(here, env)
        api, key = client["PREFECT_API_URL"], client["PREFECT_API_AUTH_STRING"]
        print(f"\nIn the browser: {api.removesuffix('/api')}, which asks for this key: {key}")
        print(f"{deployment_command(api, key)}\n", flush=True)
        close_open_runs(client, env["ANS_POOL"])
        while (status := run_worker(here, env)) < 0:
            close_open_runs(client, env["ANS_POOL"])
            write_error(f"the worker was killed (signal {-status}), another one takes its place\n")
        return status


def deploy(here: Path, env: Mapping[str, str]) -> None:
    """Make the checkout's pool and the deployments of prefect.yaml on the server that `env` names."""
    prefect = [sys.executable, "-m", "prefect", "--no-prompt"]
    pool = [*prefect, "work-pool", "create", env["ANS_POOL"], "--type", "process", "--overwrite"]
    for command in (pool, [*prefect, "deploy", "--all"]):
        subprocess.run(command, cwd=here, env=env, check=True)


def close_open_runs(client: dict[str, str], pool: str) -> None:
    """Set the pool's open flow runs to Crashed. To be called when no worker lives: what it started ends with
    it, but a flow can't always say so itself, and the next runs of its deployment would wait for its
    place."""
    import httpx

    user, password = client["PREFECT_API_AUTH_STRING"].split(":", 1)
    with httpx.Client(base_url=client["PREFECT_API_URL"], auth=(user, password), timeout=60) as api:
        is_open = {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}}
        response = api.post(
            "flow_runs/filter", json={"flow_runs": is_open, "work_pools": {"name": {"any_": [pool]}}}
        )
        crashed = {
            "state": {"type": "CRASHED", "name": "Crashed", "message": "its worker was killed"},
            "force": True,
        }
        for run in response.raise_for_status().json():
            api.post(f"flow_runs/{run['id']}/set_state", json=crashed).raise_for_status()


def run_worker(here: Path, env: dict[str, str]) -> int:
    worker = subprocess.Popen(
        [sys.executable, "-c", LAUNCH, sys.executable, "-m", "prefect", "worker", "start", "--pool", env["ANS_POOL"], "--limit", "1"],
        cwd=here, env=env | {"ANS_PARENT_PID": str(os.getpid())}, start_new_session=True,
    )  # fmt: skip
    try:
        return worker.wait()
    finally:
        end_group(worker)  # before its server: without it the worker waits long for an answer


def main() -> None:
    """Deploy to the server at PREFECT_API_URL, which other checkouts may share."""
    names = deployment_names(root(), shared=True)
    deploy(root(), environment() | names)
    print(f"deployed as full-pipeline/current{names['ANS_SUFFIX']} and so on")
    print(f"a worker for them: prefect worker start --pool {names['ANS_POOL']} --limit 1")


if __name__ == "__main__":
    main()
