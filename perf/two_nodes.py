"""The stages `sft` and `rl` of `smoke` on two nodes of a real Slurm or Ray, against two processes of one machine
and against one process: are the weights the same?

    python -m perf.two_nodes --launcher slurm     # also ray; python -m tests.slurm_cluster (ray_cluster) fetches it; 10 minutes on 2 cores

The nodes are processes of this machine. The checkout is a clone in --folder of what is committed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import load_file

from tests import ray_cluster, slurm_cluster
from tests.workspace import ROOT, dvc, environment, run

STAGES = ("sft", "rl")
RESULTS = Path(__file__).parent / "results"


@contextmanager
def nodes_of(launcher: str, folder: Path) -> Iterator[tuple[dict[str, str], tuple[str, ...]]]:
    """Start two nodes; yield the variables that name them, and the settings."""
    nodes = "launch.resources={sft: {nodes: 2}, rl: {nodes: 2}}"
    if launcher == "slurm":
        with slurm_cluster.cluster(folder / "slurm") as variables:
            yield variables, (nodes, "launch.slurm=[--ntasks-per-node=1]")
    else:
        with ray_cluster.cluster() as cluster:
            yield cluster.variables, (nodes, f"launch.ray_python={ray_cluster.PYTHON}")


def weights(checkout: Path, stage: str) -> dict[str, torch.Tensor]:
    (file,) = (checkout / "runs/smoke" / stage).glob("*.safetensors")
    return load_file(file)


def trained(checkout: Path, *settings: str, **variables: str) -> dict[str, dict[str, torch.Tensor]]:
    """Train both stages anew under settings of `launch`, and return their weights."""
    run(checkout, "-m", "flows.cli", "profile", "smoke", "launch.device=cpu", *settings, "--force")
    for stage in STAGES:
        dvc(checkout, "repro", "--force", "--single-item", "--no-run-cache", stage, **variables)
    return {stage: weights(checkout, stage) for stage in STAGES}


def difference(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """Return the largest difference of a weight; 0 for equal bytes."""
    assert one.keys() == other.keys()
    return max(float((one[name].double() - other[name].double()).abs().max()) for name in one)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--launcher", choices=("slurm", "ray"), default="slurm")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/ans-two-nodes"))
    arguments = parser.parse_args()
    checkout = arguments.folder / "ans"
    shutil.rmtree(arguments.folder, ignore_errors=True)
    subprocess.run(["git", "clone", "-q", ROOT, checkout], check=True)
    run(checkout, "-m", "flows.cli", "profile", "smoke", "launch.device=cpu", "--force")
    dvc(checkout, "repro", "sft", "judge_questions")  # all that `sft` and `rl` need
    one = trained(checkout)
    two = trained(checkout, "launch.processes=2")
    with nodes_of(arguments.launcher, arguments.folder) as (variables, settings):
        path = f"{environment(checkout)['PATH']}:{variables.get('PATH', '')}"
        words = (f"launch.launcher={arguments.launcher}", "launch.processes=2", *settings)
        apart = trained(checkout, *words, **{**variables, "PATH": path})
    result = {
        "launcher": arguments.launcher,
        "two nodes against two processes": {name: difference(apart[name], two[name]) for name in STAGES},
        "two processes against one": {name: difference(two[name], one[name]) for name in STAGES},
    }
    text = json.dumps(result, indent=1) + "\n"
    (RESULTS / f"two-nodes-{arguments.launcher}.json").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
