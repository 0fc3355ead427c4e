"""A throw-away checkout of the orchestration with cheap stages, for tests that run the real dvc, Prefect and
MLflow."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import psutil

from ans_core.config import PROFILES, dump, resolve
from tasks.stages import TABLE
from tests import SHARED, forks

ROOT = Path(__file__).resolve().parents[1]
TOLD = ".ans/told.txt"
LIMIT_S = 3000.0
"""Of one command. Not a measurement: a machine with other work on it takes ten times as long, and no test
fails for that."""
PARTS = (
    "tasks",
    "flows",
    "profiles",
    "requirements",
    ".dvcignore",
    ".gitignore",
    "prefect.yaml",
    "prefect.toml",
    "constraints.txt",
)

TABLES = (
    ("-c", "from mlflow import MlflowClient; MlflowClient('sqlite:///.ans/mlflow.db').search_experiments()"),
    ("-m", "prefect", "server", "database", "upgrade", "--yes"),
)

FAKE_STAGE = '''
"""A cheap stage: its result depends on settings and inputs; it resumes, and fails or stalls where a test asks for it."""

import hashlib
import json
import os
import signal
import sys
import time

from tqdm import tqdm

from ans_core.config import Config

STEPS = 6


def run(cfg: Config, *, inputs, out, scratch, log, row=None):
    name = "{task}" + (f"@{{row}}" if row else "")
    versions = inputs.pop("versions", None)  # of the report: a file, and no input to the result
    assert versions is None or "git.sha" in versions.read_text()
    assert all(path.is_dir() for path in inputs.values()), inputs
    values = cfg.model_dump(mode="json")
    text = json.dumps([values[section.partition(".")[0]] for section in {sections!r}])
    text += str(sorted((path / "result.txt").read_text() for path in inputs.values()))
    rank = os.environ.get("RANK", "0")
    state = scratch / ("step" if rank == "0" else f"step{{rank}}")  # a process that starts late takes no other's state for its own
    start = int(state.read_text()) if state.exists() else 0
    with open("executed.txt", "a") as file:
        file.write(f"{{name}} from {{start}}\\n")
    if rank != "0":
        state.with_name(f"came{{rank}}").touch()
        return {{}}
    others = [state.with_name(f"came{{other}}") for other in range(1, int(os.environ.get("WORLD_SIZE", "1")))]
    while not all(path.exists() for path in others):  # a stage waits for the shares of all
        time.sleep(0.05)
    if os.environ.get("FAKE_BAR") == name:
        bar = tqdm(range(400), desc="a bar", mininterval=0.1 if sys.stderr.isatty() else 30)
        for i in bar:
            bar.set_postfix_str(f"loss {{i}}")  # shown at once, whatever the interval
            time.sleep(0.002)
    for step in range(start, STEPS):
        log({{"loss": 1 / (step + 1)}}, step)
        state.with_name("partial").write_text(str(step + 1))
        state.with_name("partial").replace(state)
        if os.environ.get("FAKE_STALL") == f"{{name}}:{{step}}":
            signal.signal(signal.SIGUSR1, lambda *_: None)
            signal.pause()
        if os.environ.get("FAKE_FAIL") == f"{{name}}:{{step}}" and start == 0:
            raise ValueError("refs.json:7: no mask of ref 12; delete the line")
    if os.environ.get("FAKE_STOP") == name:
        raise ValueError("stopped here")
    (out / "result.txt").write_text(hashlib.sha256(text.encode()).hexdigest())
    (out / "about.json").write_text(text)
    if row:
        score = float(os.environ.get("FAKE_SCORE", "0.5"))
        (out / "metrics.json").write_text(json.dumps({{"referring/val/gIoU_all": score}}))
        record = {{"benchmark": "referring/val", "dataset": "drawn", "asked": "it"}}
        scored = [record | {{"sample_id": str(i), "score": score + (i % 3 - 1) / 100}} for i in range(30)]
        (out / "predictions.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in scored))
    if name == "base":
        for part in ("untrained", "base"):
            (out / part).mkdir(exist_ok=True)
            (out / part / "weights.txt").write_text(part)
    if name == "cota":
        (out / "val").mkdir()
        (out / "val" / "traces.jsonl").write_text("")
    if name == "agent_report":
        (out / "agent.json").write_text(json.dumps({{row: {{"needed/accuracy": 0.5}} for row in ("direct", "oracle", "sft")}}))
    if name == "memory":
        scores = {{"J&F/before": 0.1, "J&F/best": 0.4, "J&F/before_without_memory": 0.2, "J&F/best_without_memory": 0.3}}
        (out / "metrics.json").write_text(json.dumps(scores))
    if name == "online":
        (out / "online.json").write_text(json.dumps({{arm: {{"target": 0.5}} for arm in ("frozen", "guard")}}))
    if name == "report":
        rows = ("untrained", "base", "sft", "rl")
        summary = {{row: {{"referring/val/gIoU": 0.1 * i, "video/val/J&F": 0.5}} for i, row in enumerate(rows)}}
        (out / "summary.json").write_text(json.dumps(summary))
        (out / "headline.json").write_text(json.dumps({{row: {{"referring/gIoU": 0.1}} for row in ("sft", "rl")}}))
        (out / "report.html").write_text("<html></html>")
    return {{"final/score": 0.5}}
'''


def make(folder: Path) -> Path:
    """A git and DVC repository in `folder`, on the smoke profile, with the databases of Prefect and MLflow:
    to make all that takes 15 s of processor time, to copy it none."""
    return shutil.copytree(template(), folder, dirs_exist_ok=True)


def make_finished(folder: Path) -> Path:
    """One of these after `ans run`, whose output is in TOLD."""
    made = once("finished", run_all)
    shutil.copytree(made, folder, dirs_exist_ok=True)
    with closing(sqlite3.connect(folder / ".ans/mlflow.db")) as database, database:  # it names its folder
        for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
            database.execute(
                f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (f"{made}/", f"{folder}/")
            )
    return folder


def run_all(folder: Path) -> None:
    make(folder)
    shutil.rmtree(folder / ".ans")  # as a new checkout, which has no databases yet
    (folder / TOLD).write_text(ans(folder, "run", FAKE_BAR="prepare"))


def template() -> Path:
    return once("template", fill)


def once(name: str, fill: Callable[[Path], None]) -> Path:
    """Whichever process of this pytest run asks first makes it."""
    folder = Path(os.environ[SHARED], name)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole = folder.with_suffix(".whole")  # a database in it may name the folder, which can't be renamed
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            fill(folder)
            whole.touch()
    return folder


def fill(folder: Path) -> None:
    folder.mkdir()
    for part in PARTS:
        source = ROOT / part
        copy = shutil.copytree if source.is_dir() else shutil.copyfile
        copy(source, folder / part)
    shutil.copytree(ROOT / "ans_core", folder / "ans_core", ignore=shutil.ignore_patterns("stages"))
    (folder / "ans_core/stages").mkdir()
    (folder / "ans_core/stages/__init__.py").touch()
    for stage in TABLE:
        fake = FAKE_STAGE.format(task=stage.task, sections=stage.sections)
        (folder / f"ans_core/stages/{stage.task}.py").write_text(fake)
    shutil.copytree(ROOT / ".dvc", folder / ".dvc", ignore=shutil.ignore_patterns("cache", "tmp"))
    (folder / "metrics").mkdir()
    run(folder, "-m", "compileall", "-q", ".")  # else each process of each copy may do so
    run(folder, "-m", "tasks.deps", "--write")
    ans(folder, "profile", "smoke")
    for words in (
        ["init", "-q"],
        ["add", "-A"],
        ["-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start"],
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    for words in TABLES:
        run(folder, *words, PREFECT_HOME=str(folder / ".ans/prefect"))


def tiny_params(folder: Path) -> Path:
    """Write params.yaml of `tiny` into a folder. The checkout's own is its user's, and may be of any
    profile."""
    path = folder / "params.yaml"
    path.write_text(dump(resolve(ROOT / PROFILES / "tiny.yaml")))
    return path


def environment(folder: Path, **extra: str) -> dict[str, str]:
    kept = {
        key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_", "ANS_"))
    }
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**kept, "PATH": path, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", **extra}


def run(folder: Path, *words: str, status: int | None = 0, **extra: str) -> str:
    """`python WORDS` in the workspace; its output. `status` None takes any."""
    process = subprocess.Popen(
        [sys.executable, *words], cwd=folder, env=environment(folder, **extra), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        told, _ = process.communicate(timeout=LIMIT_S)
    finally:  # also when the test is ended: what it started ends with it
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    assert status is None or process.returncode == status, (
        f"exit status {process.returncode} of {words}:\n{told}"
    )
    return told


def living(folder: Path) -> list[psutil.Process]:
    """Processes that work in this folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
            if process.cwd() == str(folder) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def is_stage(process: psutil.Process, name: str) -> bool:
    return words_of(process)[-3:] == ["-m", "tasks", name]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; empty if it has just ended."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def end_all(folder: Path) -> None:
    """For the end of a test, whatever became of it."""
    for process in living(folder):
        with suppress(psutil.NoSuchProcess):
            process.kill()


def launch(script: Path, *words: str, processes: int = 2) -> None:
    """`python SCRIPT WORDS` on the CPU in so many processes that know of each other."""
    ended = forks.run(script, *words, processes=processes)
    assert not any(one.status for one in ended), "\n".join(
        f"exit status {one.status}: {one.said[-3000:]}" for one in ended
    )


def ans(folder: Path, *words: str, status: int | None = 0, **extra: str) -> str:
    return run(folder, "-m", "flows.cli", *words, status=status, **extra)


COMMANDS = """
import json, os, sys
from pathlib import Path
from flows.launch import prefect_api
with prefect_api(Path.cwd()):
    print(json.dumps({key: os.environ[key] for key in ("PREFECT_API_URL", "PREFECT_API_AUTH_STRING")}), flush=True)
    from flows.cli import main
    home, own = Path.cwd(), dict(os.environ)
    for line in sys.stdin:
        folder, sys.argv[1:], extra = json.loads(line)
        os.chdir(folder)
        os.environ.update(extra)
        try:
            main()
        except SystemExit as end:
            print(f"exit status {end.code}", flush=True)
        os.chdir(home)
        os.environ.clear()
        os.environ.update(own)
"""


class Commands:
    """One process for commands of `ans`, with one Prefect server, for tests of neither: both take 10 s of
    processor time to start."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._start()

    def _start(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMANDS], cwd=self._home, env=environment(self._home), text=True,
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        assert self._process.stdout is not None
        self._server: dict[str, str] = json.loads(self._process.stdout.readline())

    def _restart_if_ended(self) -> None:
        """A test that kills what it started may have hit this process; the next test shall not suffer for
        it."""
        if (status := self._process.poll()) is not None:
            warnings.warn(
                f"the process for commands had ended (status {status}); another one takes its place",
                stacklevel=2,
            )
            self._start()

    @property
    def server(self) -> dict[str, str]:
        """What names the server to other processes."""
        self._restart_if_ended()
        return self._server

    def ans(self, folder: Path, *words: str, status: int | None = 0, **extra: str) -> str:
        """Run `ans WORDS` in a workspace; return what it printed. `status` None takes any."""
        self._restart_if_ended()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), words, extra]), file=self._process.stdin, flush=True)
        told = ""
        for line in self._process.stdout:
            if line.startswith("exit status "):
                assert status is None or line == f"exit status {status}\n", line + told
                return told
            told += line
        raise AssertionError(f"the commands ended: {told}")


def dvc(folder: Path, *words: str, status: int | None = 0, **extra: str) -> str:
    return run(folder, "-m", "dvc", *words, status=status, **extra)


def executed(folder: Path) -> list[str]:
    """Which stages ran since the last call, in order, each with the step it started from."""
    path = folder / "executed.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    path.unlink(missing_ok=True)
    return lines
