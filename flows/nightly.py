"""The `nightly-evals` flow: champion against challenger. It evaluates the newest registered checkpoint and
the best so far, and makes the newer one champion only if it is better beyond the bootstrap intervals. It
trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.events import emit_event

from ans_core.config import Config, load
from ans_core.report.changes import Change
from flows.checkpoint_eval import in_child, metrics_of, registered
from flows.compare import folder_changes, page_in_child
from flows.dvc_state import output_hash
from flows.pipeline import flow_at_work, is_worth_a_retry, run_name
from tasks import registry
from tasks.registry import Version
from tasks.runner import state_key
from tasks.stages import stage_named
from tasks.tracking import log_finished

Decision = Literal["first", "promoted", "kept", "same"]
MEANING: dict[Decision, str] = {
    "first": "there was no champion; the challenger is the first",
    "promoted": "the challenger is champion now",
    "kept": "the champion stays: the challenger is not better beyond the intervals, or worse somewhere",
    "same": "the newest checkpoint is the champion",
}


@dataclass(frozen=True, kw_only=True)
class Night:
    """What was decided, on which grounds. `results`: the folder of each role's evaluation. `page`: compares
    them, if there are two."""

    decision: Decision
    profile: str
    versions: dict[str, Version]
    changes: list[Change]
    results: dict[str, Path]
    page: Path | None

    def lines(self) -> list[str]:
        """Return lines for a terminal; the last one names the decision."""
        lines = [
            f"{role}: version {version.number}, evaluated in {self.results[role]}"
            for role, version in self.versions.items()
        ]
        lines += ["  ".join(cells_of(change)) for change in self.changes]
        if self.page:
            lines.append(f"page: {self.page}")
        elif self.changes:
            lines.append(
                f"no page: `ans compare {self.results['champion']} {self.results['challenger']}` says why"
            )
        return [
            *lines,
            f"{MEANING[self.decision]} (profile {self.profile})",
            f"nightly-evals: {self.decision}",
        ]


@flow(name="nightly-evals", flow_run_name=run_name, retries=0)
def nightly_evals() -> Night:
    """Compare and decide. A checkpoint whose settings, data and code did not change since last night is not
    evaluated again."""
    with flow_at_work("nightly-evals") as here:
        config = load(here / "params.yaml")
        profile = config.profile
        challenger = newest(here, config)
        champion = registry.version_of(here, profile, "champion")
        versions = {"challenger": challenger} | ({"champion": champion} if champion else {})
        results = {
            role: evaluate_version.with_options(name=f"evaluate {role}")(version, here)
            for role, version in versions.items()
        }
        differences = compared(results)
        decision = decide(versions, differences)
        if decision in {"first", "promoted"}:
            registry.promote(here, profile, challenger)
        page = comparison_page(results, here) if differences else None
        night = Night(
            decision=decision,
            profile=profile,
            versions=versions,
            changes=differences,
            results=results,
            page=page,
        )
        record(night, here)
    return night


def newest(here: Path, config: Config) -> Version:
    """Return the newest checkpoint: the one in runs/ if nobody has registered it (`dvc repro` does not, nor a
    flow while MLflow was away), else the challenger."""
    convert, profile = stage_named("convert"), config.profile
    path = convert.out_path(profile).as_posix()
    md5, challenger = output_hash(path, here), registry.version_of(here, profile, "challenger")
    if challenger and (md5 is None or registry.is_registered(here, profile, md5)):
        return challenger
    if md5 is None:
        raise ValueError(
            f"nothing is registered for profile {profile}, and dvc.lock has no {path}: run the pipeline "
            "first (`ans run`)"
        )
    return registry.register(here, profile, md5, state_key(convert, config, here))


@task(retries=1, retry_delay_seconds=5, retry_condition_fn=is_worth_a_retry, cache_policy=NO_CACHE)
def evaluate_version(version: Version, here: Path) -> Path:
    """Evaluate a registered checkpoint and return the folder of results."""
    return in_child(registered(version, here), version.md5, here, {})


def compared(results: dict[str, Path]) -> list[Change]:
    """Return the changes from champion to challenger; none without a champion."""
    if "champion" not in results or results["champion"] == results["challenger"]:
        return []
    return folder_changes(results["champion"], results["challenger"])


def decide(versions: dict[str, Version], differences: list[Change]) -> Decision:
    """Promote the challenger if some benchmark is better and none worse beyond its 95 % interval (paired
    bootstrap)."""
    if "champion" not in versions:
        return "first"
    if versions["champion"].md5 == versions["challenger"].md5:
        return "same"
    verdicts = {change.verdict for change in differences}
    return "promoted" if "better" in verdicts and "worse" not in verdicts else "kept"


def comparison_page(results: dict[str, Path], here: Path) -> Path | None:
    """Write the page of `ans compare`, the champion first; None if that fails."""
    names = [results[role].name for role in ("challenger", "champion")]
    both = [str(results["champion"]), str(results["challenger"])]
    return page_in_child(both, here / ".ans/nightly" / "-against-".join(names), here)


def record(night: Night, here: Path) -> None:
    """Show the night in Prefect (a page, and an event that an automation can react to) and in MLflow (a run
    with both results)."""
    decision, profile, differences, versions = night.decision, night.profile, night.changes, night.versions
    named = {role: f"version {version.number}" for role, version in versions.items()}
    lines = [
        f"# nightly-evals, profile {profile}: {decision}",
        "",
        *(f"- {role}: {name}" for role, name in named.items()),
    ]
    if differences:
        lines += [
            "",
            "| benchmark | metric | champion | challenger | difference | 95 % | |",
            "|-|-|-:|-:|-:|-|-|",
        ]
        lines += [f"| {' | '.join(cells_of(change))} |" for change in differences]
    if night.page:
        lines += ["", f"Answers side by side: [{night.page}]({night.page.as_uri()})"]
    create_markdown_artifact("\n".join(lines), key="nightly-evals", description=f"{profile}: {decision}")
    emit_event(
        event=f"ans.nightly.{decision}",
        resource={
            "prefect.resource.id": f"ans.model.{profile}",
            "prefect.resource.name": registry.model_name(profile),
        },
        payload={
            "challenger": versions["challenger"].number,
            "worse": [change.title for change in differences if change.verdict == "worse"],
        },
    )
    tags = {
        "ans.kind": "nightly",
        "ans.profile": profile,
        "ans.decision": decision,
        **{f"ans.{role}": v for role, v in named.items()},
    }
    figures: dict[str, float] = {}
    for role, folder in night.results.items():
        for group in (role, "eval") if role == "challenger" else (role,):
            figures |= {f"{group}/{name}": value for name, value in metrics_of(folder).items()}
    log_finished(here, f"nightly {profile}: {decision}", tags=tags, params={}, metrics=figures)


def cells_of(change: Change) -> list[str]:
    """Return what a table's row says of a change, the champion's figure first."""
    interval = f"{change.interval[0]:+.3f} to {change.interval[1]:+.3f}" if change.interval else "no interval"
    figures = [f"{change.before:.3f}", f"{change.after:.3f}", f"{change.difference:+.3f}"]
    return [change.title, change.metric, *figures, interval, change.verdict]
