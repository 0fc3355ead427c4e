"""A workspace whose sft is a short training on two processes, for tests of jobs on a cluster."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ans_core.data import shard
from ans_core.data.scene_write import write_scenes
from tests.workspace import (
    LIMIT_S,
    ROOT,
    ans,
    dvc,
    environment,
    executed,
    is_stage,
    living,
    make,
    run,
)

RESULT = "runs/smoke/sft/result.txt"
TRAINING = '''
"""A training of a few steps on gloo, in place of sft."""

import os
import time

import torch
from torch import nn

from ans_core import dist
from ans_core.config import ConfigError
from ans_core.train import loop, states


class Batch:
    def __init__(self, x):
        self.x = x

    def to(self, device):
        return self


class Squares(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 1)

    def forward(self, batch):
        loss = self.layer(batch.x).pow(2).mean() + torch.rand(())
        return loss, {}


def run(cfg, *, inputs, out, scratch, log, row=None):
    if "FAKE_SETTINGS" in os.environ:
        raise ConfigError("sft.lora.rank is 7, no multiple of 4; set 8")
    machine = loop.Machine(device=torch.device("cpu"))
    loop.let_processes_talk(machine)
    with open("executed.txt", "a") as file:
        file.write(f"process {dist.rank()} of {dist.world_size()} on {os.environ.get('SLURMD_NODENAME') or os.environ['LOCAL_RANK']}\\n")

    def make(step, micro):
        time.sleep(float(os.environ.get("FAKE_PAUSE", "0")))
        return Batch(torch.full((2, 4), step + dist.rank() + 1.0))

    save_every = int(os.environ.get("FAKE_SAVE", "1000"))
    schedule = loop.Schedule(steps=20, lr=0.01, weight_decay=0.0, warmup=0.0, clip_grad=1.0, accumulate=1, save_every=save_every)
    module = Squares()
    curves = loop.train(module, make, name="sft", schedule=schedule, machine=machine, seed=1, scratch=scratch, log=log)
    if dist.rank() == 0:
        (out / "result.txt").write_text(str([p.tolist() for p in module.parameters()]) + str(curves))
    dist.wait_for_all()
    return {"final/score": 0.5}
'''


def trained_by_jobs(folder: Path, *words: str) -> Path:
    """Return a workspace with these settings in which all ran that sft needs, whose sft trains for two
    seconds on two processes."""
    make(folder)
    dvc(folder, "repro", "memory")
    (folder / "ans_core/stages/sft.py").write_text(TRAINING)
    ans(folder, "profile", "smoke", *words)
    executed(folder)
    return folder


def result_of_torchrun(folder: Path, *words: str) -> str:
    """Return the result of torchrun on one node: that of two nodes is the same, byte for byte. The settings
    are then those of `words`."""
    ans(folder, "profile", "smoke", "launch.processes=2")
    dvc(folder, "repro", "--single-item", "--force", "--no-run-cache", "sft")
    result = (folder / RESULT).read_text()
    ans(folder, "profile", "smoke", *words)
    forget(folder)
    return result


def forget(folder: Path) -> None:
    """Let the next start train anew: a finished training computes nothing."""
    for scratch in (folder / ".ans/scratch").glob("*/sft"):
        shutil.rmtree(scratch)
    executed(folder)


def until(condition: Callable[[], object], what: str) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.2)


def begun(folder: Path) -> bool:
    path = folder / "executed.txt"
    return path.exists() and len(path.read_text().splitlines()) == 2


def start(folder: Path, variables: dict[str, str], **extra: str) -> subprocess.Popen[str]:
    """Start sft by `dvc repro`; return once both of its processes have begun."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dvc", "repro", "--single-item", "--force", "sft"], cwd=folder,
        start_new_session=True, text=True, env=variables_of(folder, variables, **extra),
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    until(lambda: begun(folder) or process.poll() is not None, "sft does not begin")
    assert process.poll() is None, process.communicate()[0]
    until(lambda: "step 2 " in newest_log(folder), "sft makes no step")
    return process


def variables_of(folder: Path, variables: dict[str, str], **extra: str) -> dict[str, str]:
    of_workspace = environment(folder)
    return {
        **of_workspace,
        **variables,
        "PATH": f"{Path(sys.executable).parent}:{variables.get('PATH', of_workspace['PATH'])}",
        **extra,
    }


def again(folder: Path, variables: dict[str, str]) -> str:
    """Run sft by `dvc repro` to its end; return what it printed."""
    words = ("-m", "dvc", "repro", "--single-item", "--force", "sft")
    return run(folder, *words, **variables_of(folder, variables))


def submitter(folder: Path) -> psutil.Process:
    (process,) = [p for p in trainings(folder) if "ANS_JOB" not in p.environ()]
    return process


def trainings(folder: Path) -> list[psutil.Process]:
    return [p for p in living(folder) if is_stage(p, "sft")]


def newest_log(folder: Path) -> str:
    """The log of the first process of the stage's last start."""
    return ([""] + [path.read_text() for path in logs_of_starts(folder)])[-1]


def logs_of_starts(folder: Path) -> list[Path]:
    """The logs of the first process, by the stage's starts."""
    paths = [path for path in (folder / ".ans/logs").glob("smoke-sft-*.log") if "process" not in path.name]
    return sorted(paths, key=lambda path: path.stat().st_mtime)


def steps(log: str) -> list[int]:
    """The steps of which a training's log tells."""
    return [int(step) for step in re.findall(r" step (\d+) ", log)]


def saved_steps(folder: Path) -> list[int]:
    """The steps of the states that are written, and not lost."""
    return sorted(int(path.name[5:]) for path in (folder / ".ans/scratch").glob("*/sft/**/step-*[0-9]"))


def logs(folder: Path) -> str:
    return "".join(path.read_text() for path in (folder / ".ans/logs").glob("*.log"))


def check_an_evaluation_of_two_processes(folder: Path, variables: dict[str, str]) -> None:
    """Evaluate a checkpoint outside of the pipeline, as a job, whose two processes share a node."""
    (folder / "mine").mkdir()
    (folder / "mine/result.txt").write_text("a checkpoint")
    script = (
        "from pathlib import Path; from ans_core.config import load; from flows.checkpoint_eval import evaluated;"
        "print(evaluated(Path('mine'), 'content', Path.cwd(), load(Path('params.yaml'))))"
    )
    lines = run(folder, "-c", script, **variables)
    assert "ans-eval-mine-" in lines
    assert json.loads((Path(lines.strip().splitlines()[-1]) / "metrics.json").read_text())
    assert executed(folder) == ["evaluate@rl from 0"] * 2


def check_that_an_evaluation_shares_two_nodes(
    folder: Path, variables: dict[str, str], *words: str, second: str
) -> None:
    """Evaluate as a stage, by a process of each node. words: settings of the cluster. second: the local rank of
    the second process."""
    stage = folder / "ans_core/stages/evaluate.py"
    shown = '    print("rank", os.environ["RANK"], "there", os.environ["LOCAL_RANK"], flush=True)\n    name ='
    stage.write_text(stage.read_text().replace("    name =", shown, 1))
    ans(folder, "profile", "smoke", *words, "launch.resources={sft: {nodes: 2}, evaluate: {nodes: 2}}")
    lines = run(folder, "-m", "dvc", "repro", "--single-item", "--force", "evaluate@untrained", **variables)
    assert {*re.findall(r"rank (\d) there (\d)", lines)} == {("0", "0"), ("1", second)}
    assert executed(folder) == ["evaluate@untrained from 0"] * 2
    ans(folder, "profile", "smoke", *words)


def check_that_prepare_is_a_job_on_one_core(folder: Path, variables: dict[str, str], *words: str) -> None:
    """Prepare data on a cluster; one core of two tells what the job may use. words: settings of the cluster."""
    stage = folder / "ans_core/stages/prepare.py"
    shown = '    print("in job", os.environ["ANS_JOB"], "with cores:", cores())\n    name ='
    content = stage.read_text().replace("    name =", shown, 1)
    stage.write_text(content.replace("import json", "import json\nfrom ans_core.processes import cores", 1))
    ans(folder, "profile", "smoke", *words, "launch.resources={prepare: {cpus: 1}, sft: {nodes: 2}}")
    lines = run(folder, "-m", "dvc", "repro", "prepare", **variables)
    assert re.search(r"ans-prepare-\w+: job \w+ is submitted", lines)
    assert "in job 1 with cores: 1" in lines
    assert executed(folder) == ["prepare from 0"]
    ans(folder, "profile", "smoke", *words)


def check_that_the_reason_comes_back_once(folder: Path, variables: dict[str, str]) -> None:
    """Prepare shards with a broken picture on two nodes: that is said, and not that one of them lost the other."""
    broken = sorted((folder / "shards/train").iterdir())[20]
    with tarfile.open(broken) as tar:
        picture = tar.getmembers()[0]
    with broken.open("r+b") as file:
        file.seek(picture.offset_data)
        file.write(bytes(picture.size))
    before = {*(folder / ".ans/logs").glob("smoke-prepare-*.log")}
    words = ("-m", "dvc", "repro", "--single-item", "--force", "prepare")
    lines = run(folder, *words, status=None, **variables)
    assert re.search("prepare failed: DataError: .*cannot read the image", lines), lines
    assert "onnection closed" not in lines
    logs = {*(folder / ".ans/logs").glob("smoke-prepare-*.log")} - before
    assert len([path for path in logs if "process" not in path.name]) == 1  # it is not tried again


def check_that_prepare_shares_two_nodes(folder: Path, variables: dict[str, str], *words: str) -> None:
    """Prepare a set of shards on two nodes, which parse and decode it together; its index is that of one."""
    data, lock = folder / "runs/smoke/data", folder / "dvc.lock"
    doubles_data, doubles_lock = shutil.copytree(data, folder / "data.before"), lock.read_bytes()
    write_scenes(folder / "drawn", seed=0, counts={"train": 40, "val": 2, "test": 1}, image_size=64)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "SHARD_BYTES", 1000)
        shard.shard(folder / "drawn/refcoco", "refcoco", folder / "shards")
    stage = folder / "ans_core/stages/prepare.py"
    before = {stage: stage.read_text()}
    for name in ("prepare.py", "sources.py"):  # in place of the double
        shutil.copy(ROOT / "ans_core/stages" / name, stage.with_name(name))
    for place, work in (("formats/shards.py", "_parse"), ("pictures.py", "_decode")):
        path = folder / "ans_core/data" / place
        before[path] = content = path.read_text()
        begin = content.index("    ", content.index(":\n", content.index(f"def {work}(")))
        line = f'    import os; open("{work}", "a").write(os.environ.get("RANK", "first") + "\\n")\n'
        path.write_text(re.sub("(?m)^MANY = .*", "MANY = 1", content[:begin] + line + content[begin:]))
    sets = "prepare.sources=[{name: mine, format: shards, path: shards}]"
    indexes = []
    index = folder / "runs/smoke/index/mine-train"
    for resources in ((), ("launch.resources={prepare: {nodes: 2, cpus: 1}}",)):  # here, and there
        shutil.rmtree(index, ignore_errors=True)
        ans(folder, "profile", "smoke", *words, sets, *resources)
        lines = run(folder, "-m", "dvc", "repro", "--single-item", "--force", "prepare", **variables)
        indexes.append((index / "records.jsonl").read_bytes())
        for work in ("_parse", "_decode"):
            worked = folder / work
            assert {*worked.read_text().split()} == ({"first", "1"} if resources else {"first"}), lines
            worked.unlink()
    assert indexes[0] == indexes[1]
    check_that_the_reason_comes_back_once(folder, variables)
    for path, content in before.items():
        path.write_text(content)
    ans(folder, "profile", "smoke", *words)
    shutil.rmtree(data, ignore_errors=True)  # what follows has the double's again
    shutil.copytree(doubles_data, data)
    lock.write_bytes(doubles_lock)
