"""The `nightly-evals` flow: champion against challenger. It evaluates the newest registered checkpoint and the best so far, and makes the
newer one champion only if it is better beyond the bootstrap intervals. It trains nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Literal

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from ans_core.config import load
from ans_core.report.changes import Change, changes, read_answers
from flows.checkpoint_eval import METRICS, in_child, registered
from flows.dvc_state import output_hash
from flows.paths import root
from flows.pipeline import end_with_worker, run_name
from tasks import registry
from tasks.process import held
from tasks.registry import Version
from tasks.stages import stage_named
from tasks.tracking import client, experiment_id, last_run, metric_name

Decision = Literal["first", "promoted", "kept", "same"]
"""first: there was no champion. same: the newest checkpoint is the champion."""


@flow(name="nightly-evals", flow_run_name=run_name, retries=0)
def nightly_evals() -> Decision:
    """Return what was decided. A checkpoint whose settings, data and code did not change since last night is not evaluated again."""
    end_with_worker()
    here = root()
    os.chdir(here)
    with held(here / ".ans/flow.lock", "nightly-evals"):
        profile = load(here / "params.yaml").profile
        challenger = newest(here, profile)
        champion = registry.version_of(here, profile, "champion")
        versions = {"challenger": challenger} | ({"champion": champion} if champion else {})
        results = {role: evaluation_task(role)(version, here) for role, version in versions.items()}
        found = compared(results)
        decision = decide(versions, found)
        if decision in {"first", "promoted"}:
            registry.promote(here, profile, challenger)
        record(decision, found, versions, results, here, profile)
    return decision


def newest(here: Path, profile: str) -> Version:
    """Return the newest checkpoint: the one in runs/ if nobody has registered it (`dvc repro` does not, nor a flow while MLflow was away),
    else the challenger."""
    path = stage_named("convert").out_path(profile).as_posix()
    md5, challenger = output_hash(path, here), registry.version_of(here, profile, "challenger")
    if challenger and (md5 is None or registry.is_registered(here, profile, md5)):
        return challenger
    if md5 is None:
        raise ValueError(f"nothing is registered for profile {profile}, and dvc.lock has no {path}: run the pipeline first (`ans run`)")
    run = last_run(here, {"ans.stage": "convert", "ans.profile": profile})
    return registry.register(here, profile, md5, run_id=run.info.run_id if run else None)


def evaluation_task(role: str):  # type: ignore[no-untyped-def]
    return task(name=f"evaluate {role}", retries=1, retry_delay_seconds=5, cache_policy=NO_CACHE)(evaluate_version)


def evaluate_version(version: Version, here: Path) -> Path:
    """Evaluate a registered checkpoint and return the folder of results."""
    return in_child(registered(version, here), version.md5, here, {})


def compared(results: dict[str, Path]) -> list[Change]:
    """Return the changes from champion to challenger; none without a champion."""
    if "champion" not in results or results["champion"] == results["challenger"]:
        return []
    summary = {role: json.loads((folder / METRICS).read_text(encoding="utf-8")) for role, folder in results.items()}
    answers = {role: read_answers(folder) for role, folder in results.items()}
    return changes(summary, answers, "champion", "challenger")


def decide(versions: dict[str, Version], found: list[Change]) -> Decision:
    """Promote the challenger if some benchmark is better and none worse beyond its 95 % interval (paired bootstrap)."""
    if "champion" not in versions:
        return "first"
    if versions["champion"].md5 == versions["challenger"].md5:
        return "same"
    verdicts = {change.verdict for change in found}
    return "promoted" if "better" in verdicts and "worse" not in verdicts else "kept"


def record(
    decision: Decision, found: list[Change], versions: dict[str, Version], results: dict[str, Path], here: Path, profile: str
) -> None:
    """Show the night in Prefect (a page, and an event that an automation can react to) and in MLflow (a run with both results)."""
    named = {role: f"version {version.number}" for role, version in versions.items()}
    lines = [f"# nightly-evals, profile {profile}: {decision}", "", *(f"- {role}: {name}" for role, name in named.items())]
    if found:
        lines += ["", "| benchmark | metric | champion | challenger | difference | 95 % | |", "|-|-|-:|-:|-:|-|-|"]
        lines += [row_of(change) for change in found]
    create_markdown_artifact("\n".join(lines), key="nightly-evals", description=f"{profile}: {decision}")
    emit_event(
        event=f"ans.nightly.{decision}",
        resource={"prefect.resource.id": f"ans.model.{profile}", "prefect.resource.name": registry.model_name(profile)},
        payload={"challenger": versions["challenger"].number, "worse": [change.title for change in found if change.verdict == "worse"]},
    )
    mlflow = client(here)
    tags = {"ans.kind": "nightly", "ans.profile": profile, "ans.decision": decision, **{f"ans.{role}": v for role, v in named.items()}}
    run = mlflow.create_run(experiment_id(mlflow, here), tags=tags, run_name=f"nightly {profile}: {decision}").info.run_id
    for role, folder in results.items():
        for name, value in json.loads((folder / METRICS).read_text(encoding="utf-8")).items():
            mlflow.log_metric(run, metric_name(f"{role}/{name}"), value)
            if role == "challenger":
                mlflow.log_metric(run, metric_name(f"eval/{name}"), value)
    mlflow.set_terminated(run, "FINISHED")


def row_of(change: Change) -> str:
    interval = f"{change.interval[0]:+.3f} to {change.interval[1]:+.3f}" if change.interval else "no interval"
    cells = [
        change.title,
        change.metric,
        f"{change.before:.3f}",
        f"{change.after:.3f}",
        f"{change.difference:+.3f}",
        interval,
        change.verdict,
    ]
    return "| " + " | ".join(cells) + " |"
