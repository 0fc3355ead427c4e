"""A command as a job of Slurm: one job by name in a workspace, followed to its end; its exit status and the
reason of a failure come back.

    python -m tasks.slurm NAME STAGE WORD...     # a module's words, with the resources of that stage in params.yaml

A job outlives whoever submitted it by kill -9. Who starts the same thing again finds the job by its name and
waits for it.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from ans_core import stop
from ans_core.config import ConfigError, Launch, load
from tasks.process import die_with_parent, held, leave_note, read_note
from tasks.slurm_task import ASKED

IN_JOB = "ANS_JOB"
"""Set in a job of Slurm or Ray: the stage in there starts its processes itself."""
LOCAL_ONLY = ("ANS_NOTE", "ANS_PARENT_PID", "ANS_TRACKER")
"""Variables about this machine's files and processes."""
POLL_S = 5.0
SEEN_S = 60.0
"""Most that a shared folder takes to show what another node has written."""
USER_ERROR, FAILED = 2, 1
ENDS = {
    "COMPLETED",
    "FAILED",
    "CANCELLED",
    "TIMEOUT",
    "NODE_FAIL",
    "PREEMPTED",
    "OUT_OF_MEMORY",
    "BOOT_FAIL",
    "DEADLINE",
}
"""States after which a job runs no more, unless Slurm queues it again."""
AWAY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "slurm_load_jobs error: Zero Bytes",
)
"""What Slurm's commands say while the controller does not answer."""
SCRIPT = """
note={notes}-$SLURM_JOB_ID
rm -f "$note.json" "$note.exit"
export ANS_JOB=1 ANS_NOTE="$note.json" PET_NNODES=$SLURM_NNODES PET_MASTER_PORT=$({python} -c {port})
export PET_MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
trap : TERM
srun --kill-on-bad-exit=1 --nodes=$SLURM_NNODES --ntasks-per-node=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {task}
status=$?
if [ $status = {asked} ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
  scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
echo $status > "$note.exit"
exit $status
"""
"""The job. It runs on the first node, so that a port which is free here is free for the meeting of the
processes. TERM and USR1 go to all processes of the job, which write a state and end. A job that still runs
then, since nobody has cancelled it and its time is not over, but Slurm wants its place (preemption) or said
that its time is nearly over (--signal), is queued again and goes on."""
PORT = "import socket; s = socket.socket(); s.bind(('', 0)); print(s.getsockname()[1])"


@dataclass(frozen=True, kw_only=True)
class Job:
    """A job that is to run. `words` follow Python; `options` are sbatch's."""

    name: str
    words: tuple[str, ...]
    options: tuple[str, ...]
    root: Path
    """A folder that all nodes share."""

    @property
    def notes(self) -> Path:
        return self.root / ".ans/jobs" / self.name

    def log(self, number: str) -> Path:
        return self.root / ".ans/logs" / f"{self.name}-{number}.log"


def options(launch: Launch, task: str, *, several: bool) -> tuple[str, ...]:
    """Return sbatch's options for a stage. Of options that come twice Slurm takes the last."""
    wanted = launch.resources.get(task)
    flags = [f"--signal=USR1@{stop.LONGEST_S}", *launch.slurm]
    if wanted:
        flags += [
            f"--nodes={wanted.nodes}",
            *([f"--gpus-per-node={wanted.gpus}"] if wanted.gpus else []),
            *wanted.options,
        ]
    elif not several:
        flags.append("--nodes=1")
    return tuple(flags)


def sbatch_words(job: Job) -> list[str]:
    """Return the command that submits the job and prints its number."""
    script = SCRIPT.format(
        notes=shlex.quote(str(job.notes)), python=shlex.quote(sys.executable), port=shlex.quote(PORT),
        asked=ASKED, task=shlex.join([sys.executable, "-m", "tasks.slurm_task", *job.words]),
    )  # fmt: skip
    about = [f"--job-name={job.name}", f"--chdir={job.root}", f"--output={job.log('%j')}"]
    return [
        "sbatch",
        "--parsable",
        "--requeue",
        "--open-mode=append",
        "--export=ALL",
        *about,
        *job.options,
        f"--wrap={script}",
    ]


def run(job: Job) -> int:
    """Wait for the workspace's job of this name, which is submitted unless it waits or runs; return its exit
    status. A TERM to this process cancels the job. Raises ConfigError for a job that Slurm refuses."""
    job.notes.parent.mkdir(parents=True, exist_ok=True)
    job.log("").parent.mkdir(parents=True, exist_ok=True)
    number = None
    try:
        with held(Path(f"{job.notes}.lock"), f"the start of {job.name}"):
            number = job_number(job)
            how = "goes on" if number else "is submitted"
            number = number or submitted(job)
        print(f"{job.name}: job {number} {how}; log: {job.log(number)}", file=sys.stderr, flush=True)
        return followed(job, number)
    except (SystemExit, KeyboardInterrupt):
        if number := number or job_number(job):
            subprocess.run(["scancel", number], check=False)
        raise


def job_number(job: Job) -> str | None:
    """Return the number of the user's job of this name and workspace; None if there is none."""
    lines = ask(["squeue", "--me", "--noheader", f"--name={job.name}", "--format=%A|%Z"]).splitlines()
    numbers = [
        number for number, _, folder in (line.partition("|") for line in lines) if folder == str(job.root)
    ]
    return numbers[0] if numbers else None


def submitted(job: Job) -> str:
    environment = {key: value for key, value in os.environ.items() if key not in LOCAL_ONLY}
    return ask(sbatch_words(job), environment=environment).strip().partition(";")[0]


def ask(words: list[str], environment: dict[str, str] | None = None) -> str:
    """Run one of Slurm's commands and return its output; wait while the controller does not answer. Raises
    ConfigError where it refuses."""
    away = False
    while True:
        try:
            done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            raise ConfigError(
                f"launch.launcher is slurm, and there is no `{words[0]}` on this machine's PATH"
            ) from None
        if done.returncode == 0:
            return done.stdout
        if not any(line in done.stderr for line in AWAY):
            command = shlex.join(word for word in words if not word.startswith("--wrap"))
            raise ConfigError(
                f"Slurm refuses `{command}` ({done.stderr.strip()}); correct launch.slurm or launch.resources"
            )
        if not away:
            print(f"{words[0]} waits: {done.stderr.strip()}", file=sys.stderr, flush=True)
        away = True
        time.sleep(POLL_S)


def state(number: str) -> tuple[str, str]:
    """Return a job's state and what it waits for; nothing of a job that Slurm has forgotten."""
    try:
        line = ask(["squeue", "--noheader", "--states=all", "--format=%T|%r", f"--jobs={number}"]).strip()
    except ConfigError as error:
        if "Invalid job id" in str(error):
            return "", ""
        raise
    name, _, reason = line.partition("|")
    return name, reason


def followed(job: Job, number: str) -> int:
    """Show the job's log as it grows, until the job has ended; return its exit status, and note the reason of
    a failure."""
    shown, queued_s, waits_for, ended = 0, 0.0, "", 0
    now_s = time.monotonic()
    while ended < 2:  # a job that is to be queued again has ended for a moment
        before_s, now_s = now_s, time.monotonic()
        name, reason = state(number)
        ended = ended + 1 if name in ENDS or not name else 0
        if name in {
            "PENDING",
            "CONFIGURING",
            "SUSPENDED",
            "REQUEUED",
            "REQUEUE_FED",
            "REQUEUE_HOLD",
            "SPECIAL_EXIT",
        }:
            queued_s += now_s - before_s
            leave_note(queued_s=queued_s)
            if reason != waits_for:
                print(f"{job.name}: job {number} waits ({reason})", file=sys.stderr, flush=True)
            waits_for = reason
        shown = show(job.log(number), shown)
        if ended < 2:
            time.sleep(POLL_S)
    show(job.log(number), shown)
    return result(job, number, name)


def show(log: Path, start: int) -> int:
    """Show what a log has from a place on; return the place up to which it has been shown."""
    if not log.exists():
        return start
    with log.open("rb") as file:
        file.seek(start)
        sys.stderr.buffer.write(file.read())
        sys.stderr.buffer.flush()
        return file.tell()


def result(job: Job, number: str, name: str) -> int:
    """Return the exit status of a job that ended in this state, and pass on what its stage noted."""
    note, status = Path(f"{job.notes}-{number}.json"), Path(f"{job.notes}-{number}.exit")
    deadline_s = time.monotonic() + SEEN_S
    while name in {"", "COMPLETED", "FAILED"} and not status.exists() and time.monotonic() < deadline_s:
        time.sleep(POLL_S)
    noted = read_note(note)
    log = noted.get("log", str(job.log(number)))
    if status.exists() and status.read_text().strip() == "0":
        leave_note(log=log, **({"metrics": noted["metrics"]} if "metrics" in noted else {}))
        return 0
    cancelled = name == "CANCELLED"  # by somebody: no retry
    how = f"job {number} ended as {name or 'one that Slurm has forgotten'} (Slurm's log: {job.log(number)})"
    code = USER_ERROR if cancelled else noted.get("status", FAILED)
    leave_note(log=log, status=code, message=f"{noted['message']}; {how}" if "message" in noted else how)
    print(f"{job.name}: {how}", file=sys.stderr, flush=True)
    return USER_ERROR if code == USER_ERROR else FAILED


def main(name: str, task: str, *words: str) -> int:
    die_with_parent()
    stop.exit_on_signals()
    root = Path.cwd()
    try:
        launch = load(root / "params.yaml").launch
        return run(
            Job(name=name, words=words, options=options(launch, task, several=False), root=root.resolve())
        )
    except ConfigError as error:
        leave_note(status=USER_ERROR, message=str(error))
        print(f"{name}: {error}", file=sys.stderr)
        return USER_ERROR


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
