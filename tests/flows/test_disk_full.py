"""A disk that fills up in the middle of a stage, under the real Prefect, DVC and MLflow: a file system of
memory in a namespace of its own, which a user may mount (where the kernel lets users make namespaces)."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.flows.test_pipeline import mlflow_runs, start_stalled, until
from tests.workspace import LIMIT_S, ROOT, dvc, end_all, executed, is_stage, living, make

NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
WHOLE = "700m"
SCENARIO = "import sys; from pathlib import Path; from tests.flows import test_disk_full as test; test.scenario(Path(sys.argv[1]))"


def may_mount(folder: Path) -> bool:
    words = [*NAMESPACE, "mount", "-t", "tmpfs", "none", str(folder)]
    try:
        return subprocess.run(words, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def resize(folder: Path, size: str) -> None:
    subprocess.run(["mount", "-o", f"remount,size={size}", str(folder)], check=True)


def fill(folder: Path) -> None:
    """Make the disk as small as what it holds."""
    used = subprocess.run(
        ["df", "--output=used", "-B1", str(folder)], check=True, capture_output=True, text=True
    ).stdout.split()[-1]
    resize(folder, used)


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
def test_a_run_on_a_full_disk_ends_and_with_room_again_resumes_to_the_same_result(tmp_path: Path) -> None:
    if not may_mount(tmp_path):
        pytest.skip(
            "no file system of memory: this kernel lets users make no namespaces, or `unshare` is missing"
        )
    done = subprocess.run(
        [*NAMESPACE, sys.executable, "-c", SCENARIO, str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def scenario(folder: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={WHOLE}", "none", str(folder)], check=True)
    make(folder)
    try:
        process = start_stalled(folder, ["-m", "flows.cli", "run"], "prepare:2")
        fill(folder)
        for stage in (other for other in living(folder) if is_stage(other, "prepare")):
            stage.send_signal(signal.SIGUSR1)  # goes on
        assert process.wait(LIMIT_S) != 0
        until(lambda: not living(folder), "something outlives the run")
        resize(folder, WHOLE)
        executed(folder)
        dvc(folder, "repro", "prepare")
        assert executed(folder) == ["prepare from 3"]
        resumed = (folder / "runs/smoke/data/result.txt").read_text()
        dvc(folder, "repro", "--single-item", "--force", "--no-run-cache", "prepare")
        assert (folder / "runs/smoke/data/result.txt").read_text() == resumed
        assert {run["status"] for run in mlflow_runs(folder)} == {"FINISHED", "FAILED"}
    finally:
        end_all(folder)
