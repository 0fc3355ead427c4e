"""The driver of a job of Ray: it runs a command once in each worker of Ray Train, in ANS's own environment,
and leaves how it ended in files.

    python -P tasks/ray_task.py NOTES     # by Ray's Python, which need not have torch: it imports no ANS
"""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import ray
from ray import train
from ray.train.collective import broadcast_from_rank_zero
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer  # TorchTrainer without torch

RESTARTS = 3
"""After a process, worker or node that is lost. Nodes that Ray drains do not count."""
POLL_S = 2.0
USER_ERROR, FAILED, STOPPED = 2, 1, 128 + signal.SIGTERM


def status_noted(notes: str) -> int | None:
    path = Path(f"{notes}.json")
    return json.loads(path.read_text(encoding="utf-8")).get("status") if path.exists() else None


def work(job: dict) -> None:
    """Run the command in this worker. A settings error ends the job by the next start, which starts nothing:
    Ray Train has no failure that is not tried again, and only a failure ends the other workers at once."""
    context, notes = train.get_context(), job["notes"]
    rank = context.get_world_rank()
    place = None
    if rank == 0 and status_noted(notes) != USER_ERROR and not Path(f"{notes}.stop").exists():
        Path(f"{notes}.json").unlink(missing_ok=True)
        Path(f"{notes}.begun").touch()
        with socket.create_server(("", 0)) as free:  # not tasks.ports, which Ray's Python does not have
            place = (ray.util.get_node_ip_address(), free.getsockname()[1])
    place = broadcast_from_rank_zero(place)
    if place is None:
        return
    environment = job["environment"] | {"ANS_NOTE": f"{notes}.json"}
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        environment["CUDA_VISIBLE_DEVICES"] = os.environ["CUDA_VISIBLE_DEVICES"]
    if "ANS_CORES" in environment:  # Ray may put more workers on a node than the settings do
        environment["ANS_CORES"] = str(job["each"]["CPU"] * context.get_local_world_size())
    if job["workers"] > 1:
        environment |= {
            "RANK": str(rank),
            "LOCAL_RANK": str(context.get_local_rank()),
            "WORLD_SIZE": str(context.get_world_size()),
            "LOCAL_WORLD_SIZE": str(context.get_local_world_size()),
            "MASTER_ADDR": place[0],
            "MASTER_PORT": str(place[1]),
        }
    node = ray.get_runtime_context().get_node_id()
    # of a worker that was killed, the process may still write its state, on the same GPU
    with Path(tempfile.gettempdir(), f"{job['name']}-{node}-{context.get_local_rank()}.lock").open(
        "w", encoding="utf-8"
    ) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        child = subprocess.Popen(
            job["command"],
            cwd=job["root"],
            env=environment,
            stdin=subprocess.DEVNULL,
            pass_fds=[lock.fileno()],
        )
    stopped = False
    while child.poll() is None:
        time.sleep(POLL_S)
        if not stopped and Path(f"{notes}.stop").exists():
            stopped = True
            child.terminate()
    if child.returncode and not stopped:
        raise RuntimeError(f"process {rank} ended with status {child.returncode}")


class Failures(train.UserCallback):
    """Notes in a file that the job waits for its resources again."""

    def __init__(self, begun: Path) -> None:
        self.begun = begun

    def after_exception(self, run_context: object, worker_exceptions: object) -> None:
        self.begun.unlink(missing_ok=True)


def refusal(job: dict, nodes: list[dict]) -> str:
    """Return why no wait would give the job its workers; nothing if one may."""
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    room = 0
    for node in alive:
        here = min(int(node.get(kind, 0) // number) for kind, number in job["each"].items() if number)
        room += min(here, 1) if job["spread"] else here
    if room >= job["workers"]:
        return ""
    wanted = f"{job['workers']} x {words_of(job['each'])}" + ", each on another node" * job["spread"]
    there = "; ".join(words_of({kind: node.get(kind, 0) for kind in job["each"]}) for node in alive)
    return (
        f"the stage wants {wanted}, and Ray's nodes have {there}: correct launch.resources, "
        "launch.processes or launch.device"
    )


def words_of(resources: dict[str, float]) -> str:
    return ", ".join(f"{number:g} {kind}" for kind, number in resources.items())


def run(job: dict) -> int:
    notes = job["notes"]
    ray.init()

    def stop(number: int, frame: object) -> None:
        Path(f"{notes}.stop").touch()
        if not Path(f"{notes}.begun").exists():
            sys.exit(STOPPED)  # it waits for resources

    signal.signal(signal.SIGTERM, stop)
    if message := refusal(job, ray.nodes()):
        Path(f"{notes}.json").write_text(
            json.dumps({"status": USER_ERROR, "message": message}), encoding="utf-8"
        )
        print(message)
        return USER_ERROR
    each, spread = {kind: number for kind, number in job["each"].items() if number}, job["spread"]
    trainer = DataParallelTrainer(
        # not by train_loop_config: Ray may log it
        lambda: work(job),
        scaling_config=train.ScalingConfig(
            num_workers=job["workers"], use_gpu="GPU" in each, resources_per_worker=each,
            placement_strategy="STRICT_SPREAD" if spread else "PACK",
        ),
        run_config=train.RunConfig(
            name=job["name"], storage_path=str(Path(notes).parent / "ray"),
            callbacks=[Failures(Path(f"{notes}.begun"))],
            failure_config=train.FailureConfig(max_failures=RESTARTS),
        ),
    )  # fmt: skip
    try:
        trainer.fit()
    except train.TrainingFailedError as error:
        print(error)
        return FAILED
    if Path(f"{notes}.stop").exists():
        return STOPPED
    return USER_ERROR if status_noted(notes) == USER_ERROR else 0


def main(notes: str) -> int:
    path = Path(f"{notes}.job")
    job = json.loads(path.read_text(encoding="utf-8"))
    path.unlink()  # it has the submitter's keys
    status = FAILED
    try:
        status = run(job)
    finally:
        Path(f"{notes}.exit").write_text(str(status), encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
