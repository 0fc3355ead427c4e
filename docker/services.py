"""The services of compose.yaml without a container engine: the built image (docker/build.sh) and compose.yaml in, lines
about a run of `full-pipeline/smoke` through them out, during which each service is stopped and started once.

    .venv/bin/python docker/services.py FOLDER     # as root; for logs and volumes, and must not exist

Commands, variables, secrets, volumes and health checks are those of compose.yaml. A service of the image runs in a root
of its own (buildah) as the image's user; every start takes a new one, so that only what is in volumes and databases
stays. Debian's PostgreSQL and moto's S3 server stand in for the images of others. All share one network of their own, in
which the services' names are 127.0.0.1.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
VARIABLES = dict(re.findall(r"^(\w+)=(.*)$", (HERE / "env.example").read_text(), flags=re.MULTILINE))
COMPOSE = yaml.safe_load(
    re.sub(r"\$\{(\w+):\?[^}]*\}", lambda match: VARIABLES[match[1]], (HERE / "compose.yaml").read_text())
)
PASSWORDS = {name: f"{name}'s p@ss:w/rd %#?" for name in COMPOSE["secrets"] if name.endswith("_password")}
"""Letters that an address, a configuration file or a shell could trip over."""
POSTGRES = max(Path("/usr/lib/postgresql").glob("*/bin"), default=Path("/usr/lib/postgresql"))
DEPLOYMENT = "full-pipeline/smoke"
RESTARTS = {
    "base": "postgres",
    "sft": "minio",
    "rl": "prefect",
    "convert": "mlflow",
    "evaluate@untrained": "worker",
}
"""The service that is stopped and started while a stage is at work."""
LIMIT_S = 3600.0
GRACE_S = 120.0
"""From TERM to KILL: the worker's in compose.yaml. The others need it on a busy machine only."""
START = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - START:6.0f} s  {text}", flush=True)


def until(condition: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + LIMIT_S
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what}: not within {LIMIT_S:.0f} s")
        time.sleep(1)
    return value


def output(*command: str, **settings: Any) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, **settings).stdout.strip()


def is_refused(url: str) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, b"{}", {"Content-Type": "application/json"}))
    except urllib.error.HTTPError as error:
        return error.code == 401
    return False


class Service:
    """One of compose.yaml, started anew in a process of its own by each `start`."""

    stop_signal = signal.SIGTERM

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.compose = name, folder, COMPOSE["services"][name]
        self.log = folder / f"{name}.log"
        self.process: subprocess.Popen[bytes] | None = None

    def command(self) -> list[str]:
        raise NotImplementedError

    def is_healthy(self) -> bool:
        raise NotImplementedError

    def settings(self) -> dict[str, Any]:
        return {}

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self.command(), stdout=log, stderr=log, **self.settings())
        until(self._is_up, f"{self.name} is healthy")

    def _is_up(self) -> bool:
        if self.process and (status := self.process.poll()) is not None:
            raise ChildProcessError(f"{self.name} ended with status {status}; see {self.log}")
        return self.is_healthy()

    def stop(self) -> None:
        if self.process:
            self.process.send_signal(self.stop_signal)
            try:
                self.process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            self.process = None


class Postgres(Service):
    stop_signal = signal.SIGINT  # as its image: TERM would wait for the clients to leave

    def __init__(self, name: str, folder: Path) -> None:
        super().__init__(name, folder)
        self.home = folder / "postgres"
        self.variables: dict[str, str] = self.compose["environment"]
        self.home.mkdir()
        (self.home / "password").write_text(PASSWORDS["postgres_password"])
        for path in (self.home, self.home / "password"):
            shutil.chown(path, "postgres", "postgres")
        account = [
            "-U",
            self.variables["POSTGRES_USER"],
            "--auth=scram-sha-256",
            f"--pwfile={self.home / 'password'}",
        ]
        output(str(POSTGRES / "initdb"), "-D", str(self.home / "data"), *account, **self.settings())

    def settings(self) -> dict[str, Any]:
        return {"user": "postgres", "group": "postgres", "extra_groups": [], "cwd": self.home}

    def command(self) -> list[str]:
        return [str(POSTGRES / "postgres"), "-D", str(self.home / "data"), "-k", str(self.home), "-h", "*"]

    def is_healthy(self) -> bool:
        """Run compose's own test, where the server can be found as inside of its container."""
        _, line = self.compose["healthcheck"]["test"]
        path = {"PATH": f"{POSTGRES}:{os.environ['PATH']}", "PGHOST": "127.0.0.1"}
        return not subprocess.run(
            ["sh", "-c", line], env=path, stdout=subprocess.DEVNULL, check=False
        ).returncode

    def create(self) -> None:
        self.sql("postgres", f"CREATE DATABASE {self.variables['POSTGRES_DB']}")
        self.sql("postgres", COMPOSE["configs"]["create_mlflow_database"]["content"])

    def client(self, program: str, *words: str) -> str:
        login = {"PGHOST": "postgres", "PGUSER": "ans", "PGPASSWORD": PASSWORDS["postgres_password"]}
        return output(str(POSTGRES / program), *words, env=os.environ | login)

    def sql(self, database: str, query: str) -> list[list[str]]:
        lines = self.client("psql", "-d", database, "-A", "-t", "-F", "\t", "-c", query).splitlines()
        return [line.split("\t") for line in lines]


class S3(Service):
    """moto's server in MinIO's place. It keeps objects in memory: what it received is played back to it after
    a restart."""

    def command(self) -> list[str]:
        return [str(shutil.which("moto_server")), "-H", "0.0.0.0", "-p", "9000"]

    def settings(self) -> dict[str, Any]:
        record = {"MOTO_RECORDER_FILEPATH": str(self.folder / "s3-requests"), "MOTO_ENABLE_RECORDING": "1"}
        return {"env": {"PATH": os.environ["PATH"], **record}}

    def is_healthy(self) -> bool:
        try:
            urllib.request.urlopen("http://minio:9000", timeout=20)
        except OSError:
            return False
        return True

    def start(self) -> None:
        super().start()
        if (self.folder / "s3-requests").exists():
            urllib.request.urlopen("http://minio:9000/moto-api/recorder/replay-recording", b"")

    def keys(self, bucket: str) -> list[str]:
        found: list[str] = []
        while True:
            url = f"http://minio:9000/{bucket}?list-type=2&start-after={found[-1] if found else ''}"
            page = re.findall(r"<Key>(.*?)</Key>", urllib.request.urlopen(url).read().decode())
            if not page:
                return found
            found += page


class Container(Service):
    """A service of the image: in a new root with the mounts of compose.yaml."""

    id = ""

    def start(self) -> None:
        image = self.compose["image"]
        self.id = output("buildah", "from", "--pull-never", f"localhost/{image}")
        config = json.loads(output("buildah", "inspect", self.id))["Docker"]["config"]
        self.root = Path(output("buildah", "mount", self.id))
        self.user, self.entrypoint = config["User"], config["Entrypoint"]
        self.variables = dict(pair.split("=", 1) for pair in config["Env"]) | {"HOME": "/home/ans"}
        self.variables |= self.compose["environment"]
        secrets = self.folder / f"{self.name}-secrets"
        secrets.mkdir(exist_ok=True)
        for name in self.compose["secrets"]:
            (secrets / name).write_text(PASSWORDS.get(name, ""))
        self.mount(Path("/proc"), "/proc")
        self.mount(Path("/dev"), "/dev")
        self.mount(Path("/etc/hosts"), "/etc/hosts")
        self.mount(secrets, "/run/secrets")
        for volume in self.compose.get("volumes", []):
            source, target, *_ = volume.split(":")
            folder = self.folder / "volumes" / source
            if not folder.exists():
                folder.mkdir(parents=True)
                if (
                    inside := self.root / target[1:]
                ).exists():  # a new volume takes the owner of what it covers
                    os.chown(folder, inside.stat().st_uid, inside.stat().st_gid)
            self.mount(folder, target)
        super().start()

    def mount(self, source: Path, target: str) -> None:
        place = self.root / target[1:]
        if source.is_dir():
            place.mkdir(parents=True, exist_ok=True)
        else:
            place.touch()
        output("mount", "--rbind", str(source), str(place))

    def chroot(self, words: list[str]) -> list[str]:
        return ["chroot", f"--userspec={self.user}", str(self.root), "env", "--chdir=/app", *words]

    def command(self) -> list[str]:
        return self.chroot([*self.entrypoint, *self.compose["command"]])

    def settings(self) -> dict[str, Any]:
        return {"env": self.variables}

    def run(self, *words: str) -> str:
        """Run a command in the container, with the variables of the secrets."""
        return output(*self.chroot([*self.entrypoint, *words]), env=self.variables)

    def is_healthy(self) -> bool:
        _, *words = self.compose["healthcheck"]["test"]
        test = subprocess.run(self.chroot(words), env=self.variables, stderr=subprocess.DEVNULL, check=False)
        return not test.returncode

    def stop(self) -> None:
        """As a container's end: TERM to its process, KILL to whatever is left in it."""
        super().stop()
        if not self.id:
            return
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                if (entry / "root").readlink() == self.root:
                    os.kill(int(entry.name), signal.SIGKILL)
            except OSError:  # it has just ended, or is the kernel's
                continue
        unmount = ["umount", "-R", str(self.root)]  # busy until the last process is gone
        until(
            lambda: not subprocess.run(unmount, stderr=subprocess.DEVNULL, check=False).returncode,
            "unmounted",
        )
        output("buildah", "rm", self.id)
        self.id = ""


def submit(worker: Container) -> str:
    """Return the id of the flow run."""
    printed = worker.run("prefect", "deployment", "run", DEPLOYMENT)
    (run,) = re.findall(r"UUID: ([0-9a-f-]{36})", printed)
    return str(run)


def state(database: Postgres, run: str) -> str:
    return database.sql("prefect", f"SELECT state_type FROM flow_run WHERE id = '{run}'")[0][0]


def restart_in_the_middle(services: dict[str, Service], database: Postgres, run: str) -> None:
    """Stop and start each service while its stage of RESTARTS is at work in a flow run."""
    for stage, name in RESTARTS.items():
        tasks = f"SELECT state_type FROM task_run WHERE flow_run_id = '{run}' AND name LIKE '{stage}-%'"
        until(
            lambda query=tasks: ["RUNNING"] in database.sql("prefect", query) or ended(database, run),
            f"{stage} is at work",
        )
        require(not ended(database, run), f"the run was {state(database, run)} before {stage}")
        began, service = time.monotonic(), services[name]
        service.stop()
        down = [other.name for other in services.values() if other is not service and not other.is_healthy()]
        if service is database:
            require(not service.is_healthy(), "PostgreSQL's health check passes while it is down")
            require({"prefect", "mlflow"} <= set(down), f"without PostgreSQL only {down} are unhealthy")
        service.start()
        duration_s = time.monotonic() - began
        say(
            f"{stage} at work: {name} was away for {duration_s:.0f} s; unhealthy without it: {', '.join(down) or 'none'}"
        )
        for other in services.values():
            until(other.is_healthy, f"{other.name} is healthy again")


def check(folder: Path, stack: ExitStack) -> None:
    database, store = Postgres("postgres", folder), S3("minio", folder)
    prefect, mlflow, worker = (Container(name, folder) for name in ("prefect", "mlflow", "worker"))
    services: dict[str, Service] = {
        service.name: service for service in (database, store, prefect, mlflow, worker)
    }
    for service in services.values():
        stack.callback(service.stop)
        service.start()
        if service is database:
            database.create()
        if service is store:
            for bucket in re.findall(r"store/(\w+)", COMPOSE["services"]["bucket"]["command"][0]):
                urllib.request.urlopen(urllib.request.Request(f"http://minio:9000/{bucket}", method="PUT"))
        say(f"{service.name} is healthy")
    versions = [prefect.run("prefect", "--version"), mlflow.run("mlflow", "--version")]
    say(f"{database.client('psql', '--version')}; Prefect {'; '.join(versions)}")
    for url in (
        "http://prefect:4200/api/flows/filter",
        "http://mlflow:5000/api/2.0/mlflow/experiments/search",
    ):
        require(is_refused(url), f"{url} answers without a password")
    say("Prefect and MLflow answer nobody without a password")

    run = submit(worker)
    restart_in_the_middle(services, database, run)
    say(f"the run whose worker was stopped: {state(database, run)}")
    require(state(database, run) == "CRASHED", "Prefect does not know that its worker ended")
    run = submit(worker)
    end = until(lambda: ended(database, run), "the run ends")
    states = f"SELECT state_name, count(*) FROM task_run WHERE flow_run_id = '{run}' GROUP BY 1 ORDER BY 1"
    say(f"the next run, by the new worker: {end}; its stages: {database.sql('prefect', states)}")
    require(end == "COMPLETED", "it failed")
    runs = database.sql("mlflow", "SELECT status, count(*) FROM runs GROUP BY 1 ORDER BY 1")
    results = [name for name in store.keys("mlflow") if name.endswith("/metrics.json")]
    say(f"runs in MLflow's database: {runs}; files metrics.json in the bucket `mlflow`: {len(results)}")
    require(len(results) > 0, "no results in S3")

    worker.run("ans", "profile", "smoke", "--force")  # the flow's profile ended with it
    worker.run("dvc", "push", "--run-cache")
    for volume in ("runs", "dvc"):
        for path in (folder / "volumes" / volume).iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    worker.run("dvc", "pull", "--run-cache", "dvc.yaml")
    ran = re.findall(r"Running stage '([^']+)'", worker.run("dvc", "repro", "dvc.yaml"))
    told = worker.run("dvc", "status", "dvc.yaml")
    say(
        f"files in the bucket `dvc`: {len(store.keys('dvc'))}; after the loss of runs and cache, and a pull: "
        f"{', '.join(ran)} ran; {told}"
    )
    require(ran == ["code"] and "up to date" in told, "the pull did not bring everything back")

    logs = [*folder.glob("*.log"), *folder.glob("volumes/state/logs/*")]
    texts = [path.read_text(errors="replace") for path in logs]
    texts += [database.client("pg_dump", "--inserts", name) for name in ("prefect", "mlflow")]
    leaks = [name for name, password in PASSWORDS.items() if any(password in text for text in texts)]
    require(not leaks, f"{leaks} in logs or dumps")
    say(f"no password in {len(texts)} logs and dumps")


def require(condition: bool, what: str) -> None:
    if not condition:
        raise RuntimeError(what)


def ended(database: Postgres, run: str) -> str:
    name = state(database, run)
    return name if name not in {"SCHEDULED", "PENDING", "RUNNING"} else ""


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o755)  # PostgreSQL's user goes through
    output("ip", "link", "set", "lo", "up")
    (folder / "hosts").write_text("127.0.0.1 localhost postgres minio prefect mlflow\n")
    output("mount", "--bind", str(folder / "hosts"), "/etc/hosts")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    with ExitStack() as stack:
        check(folder, stack)


if __name__ == "__main__":
    folders = [word for word in sys.argv[1:] if word != "--inside"]
    if len(folders) != 1 or Path(folders[0]).exists() or os.geteuid() != 0:
        sys.exit("usage, as root: docker/services.py FOLDER, a folder that is yet to be made")
    lacking = [name for name in ("buildah", "unshare", "ip", "moto_server") if not shutil.which(name)]
    if lacking or not (POSTGRES / "initdb").exists():
        sys.exit(
            f"{lacking or 'PostgreSQL'} not there; docs/orchestration.md (What was run) says what to install"
        )
    if "--inside" not in sys.argv:  # a network and mounts that end with the processes
        os.execvp("unshare", ["unshare", "--net", "--mount", sys.executable, *sys.argv, "--inside"])
    main(Path(folders[0]).resolve())
