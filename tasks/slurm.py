"""A job of tasks/jobs.py as one of Slurm."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from ans_core import stop
from ans_core.config import ConfigError
from tasks.jobs import Job, State, answer, unless_ending
from tasks.slurm_task import ASKED, FAILED, LATE

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
WAITS = {
    "PENDING",
    "CONFIGURING",
    "SUSPENDED",
    "REQUEUED",
    "REQUEUE_FED",
    "REQUEUE_HOLD",
    "SPECIAL_EXIT",
}
AWAY = (
    "Unable to contact slurm controller",
    "Socket timed out",
    "Connection refused",
    "slurm_load_jobs error: Zero Bytes",
)
"""What Slurm's commands say while the controller does not answer."""
LASTING = {
    reason: f"{reason}: maybe for ever; if the request is too large, correct launch.resources or launch.slurm, "
    "scancel the job, and start again"
    for reason in (
        "PartitionNodeLimit",
        "PartitionTimeLimit",
        "PartitionConfig",
        "BadConstraints",
        "InvalidAccount",
        "InvalidQOS",
    )
}
"""What a job waits for that no other one's end gives it."""
SCRIPT = """
note={notes}-$SLURM_JOB_ID
rm -f "$note.json" "$note.exit" "$note.{asked}" "$note.{late}" "$note.{failed}"
export ANS_JOB=1 ANS_NOTE="$note.json" PET_NNODES=$SLURM_NNODES PET_MASTER_PORT=$({python} -c {port})
export PET_MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
trap : TERM
srun --kill-on-bad-exit=1 --nodes=$SLURM_NNODES --ntasks-per-node=1 ${{SLURM_CPUS_PER_TASK:+--cpus-per-task=$SLURM_CPUS_PER_TASK}} {task}
status=$?
for asked in {asked} {late}; do
  [ $status = 137 ] && [ -e "$note.$asked" ] && [ ! -e "$note.{failed}" ] && status=$asked
done
if [ $status = {asked} ] || [ $status = {late} ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
  if [ $status = {asked} ] || {late_command} "$note.json"; then
    scontrol requeue "$SLURM_JOB_ID" && exit 0
  fi
fi
echo $status > "$note.exit"
exit $status
"""
"""The job. It runs on the first node, so that a port which is free here is free for the meeting of the
processes. TERM and USR1 go to all processes of the job, which write a state and end. A job that still runs
then, since nobody has cancelled it and its time is not over, but Slurm wants its place (preemption) or said
that its time is nearly over (--signal), is queued again and goes on; also where one node waited for another that
was asked to end, until Slurm killed it. One whose time is over again and again, without a step in between, ends."""
PORT = "from tasks.ports import EVERYWHERE, free_port; print(free_port(host=EVERYWHERE))"


def options(job: Job) -> tuple[str, ...]:
    """Return sbatch's options for a stage. Of options that come twice Slurm takes the last."""
    wanted = job.launch.resources.get(job.task)
    flags = [f"--signal=USR1@{stop.LONGEST_S}", *job.launch.slurm]
    if wanted:
        flags += [
            f"--nodes={wanted.nodes}",
            *([f"--gpus-per-node={wanted.gpus}"] if wanted.gpus else []),
            *([f"--cpus-per-task={wanted.cpus}"] if wanted.cpus else []),
            *wanted.options,
        ]
    elif not job.distributed:
        flags.append("--nodes=1")
    return tuple(flags)


def sbatch_words(job: Job) -> list[str]:
    """Return the command that submits the job and prints its number."""
    script = SCRIPT.format(
        notes=shlex.quote(str(job.notes)), python=shlex.quote(sys.executable), port=shlex.quote(PORT),
        asked=ASKED, late=LATE, failed=FAILED, late_command=shlex.join([sys.executable, "-m", "tasks.slurm_late"]),
        task=shlex.join([sys.executable, "-m", "tasks.slurm_task", *job.words]),
    )  # fmt: skip
    about = [f"--job-name={job.name}", f"--chdir={job.root}", f"--output={job.log('%j')}"]
    return [
        "sbatch",
        "--parsable",
        "--requeue",
        "--open-mode=append",
        "--export=ALL",
        *about,
        *options(job),
        f"--wrap={script}",
    ]


def find(job: Job) -> str | None:
    """Return the number of the live job; one that is ending, unless it ended well, is waited for."""

    def live() -> list[tuple[str, str]]:
        words = ["squeue", "--me", "--noheader", f"--name={job.name}", "--format=%A|%T|%Z"]
        lines = [line.split("|", 2) for line in ask(words).splitlines()]
        return [(number, state) for number, state, folder in lines if folder == str(job.root)]

    def is_ending(other: tuple[str, str]) -> bool:
        status = Path(f"{job.notes}-{other[0]}.exit")
        return other[1] == "COMPLETING" and not (
            status.exists() and status.read_text(encoding="utf-8").strip() == "0"
        )

    other = unless_ending(job, live, is_ending)
    return other and other[0]


def submit(job: Job, environment: dict[str, str]) -> str:
    """Submit it; where the controller's answer was lost, look for the job before it is submitted again."""
    asked = False

    def once() -> str:
        nonlocal asked
        number = find(job) if asked else None
        asked = True
        return number or _run(sbatch_words(job), environment).strip().partition(";")[0]

    return answer(once, Away, "sbatch")


def cancel(job: Job, number: str) -> None:
    subprocess.run(["scancel", number], check=False)


def state(job: Job, number: str) -> State:
    """Return a job's state; it has no name where Slurm has forgotten the job."""
    try:
        line = ask(["squeue", "--noheader", "--states=all", "--format=%T|%r", f"--jobs={number}"]).strip()
    except ConfigError as error:
        if "Invalid job id" not in str(error):
            raise
        line = ""
    name, _, reason = line.partition("|")
    return State(
        name=name,
        waits_for=(LASTING.get(reason) or (reason if reason != "None" else name)) if name in WAITS else "",
        ended=name in {"", *ENDS},
        by_itself=name in {"", "COMPLETED", "FAILED"},
        cancelled=name == "CANCELLED",
    )


class Away(Exception):
    """The controller does not answer."""


def ask(words: list[str]) -> str:
    """Run one of Slurm's commands and return its output; wait while the controller does not answer. Raises
    ConfigError where it refuses."""
    return answer(lambda: _run(words), Away, words[0])


def _run(words: list[str], environment: dict[str, str] | None = None) -> str:
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ConfigError(
            f"launch.launcher is slurm, and there is no `{words[0]}` on this machine's PATH"
        ) from None
    if done.returncode == 0:
        return done.stdout
    if any(line in done.stderr for line in AWAY):
        raise Away(done.stderr.strip())
    command = shlex.join(word for word in words if not word.startswith("--wrap"))
    raise ConfigError(
        f"Slurm refuses `{command}` ({done.stderr.strip()}); correct launch.slurm or launch.resources"
    )
