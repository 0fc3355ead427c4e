"""The store of runs, opened for the first time."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.workspace import ROOT, environment

OPEN = """
import sys
from pathlib import Path
from tasks import tracking

print(tracking.experiment_id(tracking.client(Path(sys.argv[1])), Path(sys.argv[1])) is not None)
"""


@pytest.mark.slow
def test_processes_that_open_a_new_store_at_once_all_can(tmp_path: Path) -> None:
    own = {name: value for name, value in environment(ROOT).items() if name != "MLFLOW_TRACKING_URI"}
    command = [sys.executable, "-c", OPEN, str(tmp_path)]
    started = [
        subprocess.Popen(
            command, cwd=ROOT, env=own, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for _ in range(4)
    ]
    for process in started:
        output, _ = process.communicate(timeout=300)
        assert process.returncode == 0, output[-2000:]
