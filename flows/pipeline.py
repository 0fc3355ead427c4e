"""The `full-pipeline` flow: the stages of tasks/stages.py in order, each one a Prefect task; DVC decides
whether it runs."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from prefect import flow, runtime, task
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger
from prefect.states import Completed, State

from ans_core.config import Config, ConfigError, load
from ans_core.config.section import nearest
from flows import durations, progress
from flows.child import BUSY_RETRY_S, Say, SettingsError, StageFailedError, repro
from flows.dvc_state import are_up_to_date, output_hash
from flows.kept import at_work, settings_of_run
from flows.params import differing
from flows.paths import root
from flows.pipeline_run import PipelineRun
from tasks.code import Code
from tasks.jobs import answer
from tasks.launcher import check_sharding, check_shares
from tasks.process import die_with_parent, write_error
from tasks.runner import state_key
from tasks.stages import AGENT, MAIN, MEMORY, ONLINE, STAGES, TABLE, Stage, maker_of, needed_for, stage_named

RETRY_DELAY_S = 5
REPORT = "report/report.html"
Row = tuple[str, str, float]
"""A stage, `ran` or `cached`, and the seconds it took (for a cached one: when it ran)."""


class PlainErrors(logging.Filter):
    """Let Prefect log a mistake that its user can mend as the sentence that it is, as commands do;
    ANS_TRACEBACK=1 shows where it was raised."""

    def filter(self, record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, (ValueError, OSError, StageFailedError)) or os.environ.get("ANS_TRACEBACK"):
            return True
        record.msg, record.args, record.exc_info = str(error), (), None
        # which logs the error of a flow once more, as its process ends
        return record.name != "prefect.engine"


for prefect_logger in ("prefect.flow_runs", "prefect.task_runs", "prefect.engine"):
    logging.getLogger(prefect_logger).addFilter(PlainErrors())


@dataclass(frozen=True, kw_only=True)
class Clock:
    """Progress messages about a stage's place in the run. `durations_s`: how long each stage took when it
    last ran. `done_s`: how long those took that this run executed."""

    start_s: float
    profile: str
    stages: tuple[Stage, ...]
    durations_s: dict[str, float]
    done_s: dict[str, float] = field(default_factory=dict)

    def place(self, stage: Stage) -> str:
        """Return the message. It tells the time left if every remaining stage has run before, or if what is
        done tells how fast this machine is; later stages may turn out to be cached."""
        index = self.stages.index(stage)
        names = [other.name for other in self.stages[index:]]
        left = durations.left_s(self.profile, self.done_s, names)
        if self.durations_s.keys() >= set(names):
            left = sum(self.durations_s[name] for name in names)
        remaining = [f"at most about {clock_text(left)} left"] if left else []
        times = [f"{clock_text(time.monotonic() - self.start_s)} elapsed", *remaining]
        return f"stage {index + 1} of {len(self.stages)}: {stage.name} ({', '.join(times)})"


def clock_text(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def is_worth_a_retry(_task: Any, _run: Any, state: State[Any]) -> bool:
    """Retry unless the settings are wrong, or an input is."""
    return not isinstance(state.result(raise_on_failure=False), (SettingsError, ValueError))


def run_stage(
    stage: Stage, here: Path, tracked: Callable[[], dict[str, str]], clock: Clock, force: bool
) -> State[None]:
    if not force and answer(
        lambda: are_up_to_date([stage.target], here), BlockingIOError, stage.name, retry_s=BUSY_RETRY_S
    ):
        return Completed(name="Cached", message=f"{stage.name} is up to date (dvc.lock)")
    with progress.shown(stage.name, log_lines()) as say:
        say(f"{clock.place(stage)}\n")
        metrics = repro(
            stage.target,
            root=here,
            timeout_s=stage.timeout_s,
            extra_environment=tracked(),
            force=force,
            say=say,
        )
    if metrics is None:
        return Completed(name="Cached", message=f"{stage.name} came from DVC's run cache")
    with suppress(httpx.HTTPError):  # the server is away, and the stage is done all the same
        create_table_artifact(
            [{"metric": key, "value": value} for key, value in metrics.items()],
            key=progress.key_of(stage.name),
        )
    return Completed(message=f"{stage.name} ran")


def log_lines() -> Say:
    """Return what takes a stage's output: the log of its Prefect task, or standard error where Prefect is
    quiet (`ans run`)."""
    logger = get_run_logger()
    if not logger.isEnabledFor(logging.INFO):
        return write_error
    return lambda lines: [logger.info("%s", line) for line in lines.splitlines()]


def prefect_task(stage: Stage, version: str) -> Any:
    """Make a stage's task. Prefect's own caching is off: dvc.lock is the only cache."""
    make = task(
        name=stage.name, version=version, retries=stage.retries, retry_delay_seconds=RETRY_DELAY_S,
        retry_condition_fn=is_worth_a_retry, cache_policy=NO_CACHE,
    )  # fmt: skip
    return make(run_stage)


def run_stages(
    stages: tuple[Stage, ...], here: Path, force: Collection[str] = (), page: str = REPORT
) -> list[Row]:
    """Run stages under one MLflow run and with one Prefect artifact; stop at the first that fails. Those in
    `force` run even if they are up to date. `page`: what the artifact links to, under runs/<profile>. Raises
    ConfigError for stages that the settings can't start."""
    config = load(here / "params.yaml")
    for stage in stages:
        check_sharding(stage, config)
        check_shares(stage, config)
    check_base(stages, config, here)
    check_traces(stages, config, here)
    check_agent_sources(stages, config, here)
    check_agent_reader(stages, config)
    check_sam2_alone(stages, config)
    run = PipelineRun(here, config, f"flow-{runtime.flow_run.id or os.getpid()}")
    run.start(str(runtime.flow_run.id))
    clock = Clock(
        start_s=time.monotonic(), profile=config.profile, stages=stages, durations_s=run.durations_s()
    )
    rows: list[Row] = []
    ok = False
    try:
        for stage in stages:
            check_unchanged(config, here)
            start_s = time.monotonic()
            state = prefect_task(stage, Code(here).version_of(stage))(
                stage, here, run.environment, clock, stage.name in force, return_state=True
            )
            if state.is_failed():
                publish(rows, here, config.profile, page, failure=str(state.message))
            state.result()  # raises what the task raised
            if state.name == "Cached":
                rows.append((stage.name, "cached", run.cached(stage, state_key(stage, config, here))))
            else:
                clock.done_s[stage.name] = time.monotonic() - start_s
                rows.append((stage.name, "ran", clock.done_s[stage.name]))
        check_unchanged(config, here)
        ok = True
    finally:
        run.end(ok=ok)
    publish(rows, here, config.profile, page)
    convert = stage_named("convert")
    if convert in stages and (md5 := output_hash(convert.out_path(config.profile).as_posix(), here)):
        run.register(md5, state_key(convert, config, here))  # nightly-evals compares it with the champion
    return rows


def check_base(stages: tuple[Stage, ...], config: Config, here: Path) -> None:
    """Raise ConfigError if these stages need an agent's base that is not there and that no stage makes."""
    base = here / config.agent.base
    if any(stage.group != MAIN for stage in stages) and not base.is_dir() and not maker_of(base, config):
        raise ConfigError(
            f"agent.base = {config.agent.base!r} is no folder; name one that holds a Sa2VA (`ans pull REPO "
            "DIR` fetches one from the hub), or leave it empty for what this pipeline makes"
        )
    segmenter = config.agent.segmenter
    if (
        segmenter
        and any(stage.group in (AGENT, ONLINE) for stage in stages)
        and not (here / segmenter).is_dir()
    ):
        raise ConfigError(
            f"agent.segmenter = {segmenter!r} is no folder; name one that holds a Sa2VA, or leave it empty"
        )


def check_traces(stages: tuple[Stage, ...], config: Config, here: Path) -> None:
    """Raise ConfigError if these stages learn from own traces that are not there, and DataError if these have
    faults."""
    if not config.agent.sft.traces or all(stage.task != "agent_sft" for stage in stages):
        return
    # loads the operations, which runs without own traces do without
    from ans_core.agent.world.trace_file import FILE, read_traces

    folder = here / config.agent.sft.traces
    if not (folder / FILE).is_file():
        raise ConfigError(
            f"agent.sft.traces = {config.agent.sft.traces!r} has no {FILE}; name a folder that has one, or "
            "leave it empty for the traces of the stage cota"
        )
    read_traces(folder)


def check_agent_sources(stages: tuple[Stage, ...], config: Config, here: Path) -> None:
    """Raise ValueError (DataError for a faulty record) if these stages ask about pictures of `agent.sources`
    that can't be read, or of which none has words and masks or a short answer."""
    if not config.agent.sources or all(stage.name != "cota" for stage in stages):
        return
    from ans_core import data
    from ans_core.agent.world import annotated_clips, question_sets, things
    from ans_core.stages.sources import agent_entries

    sources = [s.model_copy(update={"path": str(here / s.path)}) for s in config.agent.sources]
    for entry in agent_entries(tuple(sources), alone=not config.agent.families):
        asked = sum(
            any(kind.askable(sample) for kind in (things, annotated_clips, question_sets))
            for sample in data.samples_of(entry)
        )
        if not asked and entry.split == "train":
            raise ConfigError(
                f"agent.sources: {entry.name!r} has no picture with words and masks, and no question with a short "
                f"answer, in {entry.split!r}; questions need `referring` records of single pictures or of clips, or "
                "`conversation` records"
            )


def check_agent_reader(stages: tuple[Stage, ...], config: Config) -> None:
    """Raise ConfigError if these stages read text with a package that is not installed."""
    if all(stage.group not in (AGENT, ONLINE) for stage in stages):
        return
    from ans_core.agent.ocr import check_reader

    try:
        check_reader(config.agent.reader)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def check_sam2_alone(stages: tuple[Stage, ...], config: Config) -> None:
    """Raise ConfigError for stages that need a language model where the base is a SAM2 alone."""
    if config.base.source == "sam2" and (
        others := [stage.name for stage in stages if stage not in needed_for(MEMORY, config)]
    ):
        raise ConfigError(
            f"base.source is sam2, a SAM2 without a language model, which {others[0]} needs; run `ans run` "
            "or the deployment"
            " memory-pipeline/sam2-memory, which end with its memory, or take another profile"
        )


def check_unchanged(config: Config, here: Path) -> None:
    """Raise SettingsError if params.yaml has other settings than when the run began: later stages would be of
    another experiment, under the name of this one."""
    before, now = (one.model_dump(mode="json") for one in (config, load(here / "params.yaml")))
    if keys := differing(before, now):
        raise SettingsError(
            f"params.yaml was changed while this run was at work: {', '.join(keys[:8])}. The stages before "
            "are done; start it again to go "
            "on with the new settings, or put the old ones back first. Prepare other runs in a clone"
        )


def publish(rows: list[Row], here: Path, profile: str, page: str, failure: str = "") -> None:
    """Show the run as a page in Prefect: its stages, the report's path, and what failed."""
    lines = [f"# {runtime.flow_run.flow_name}, profile {profile}", "| stage | | time |", "|-|-|-:|"]
    lines += [f"| {name} | {how} | {clock_text(seconds)} |" for name, how, seconds in rows]
    report = here / "runs" / profile / page
    lines += ["", f"```\n{failure}\n```"] if failure else ["", f"Report: [{report}]({report.as_uri()})"]
    create_markdown_artifact("\n".join(lines), key="pipeline-run", description=f"{runtime.flow_run.name}")


@contextmanager
def flow_at_work(name: str) -> Iterator[Path]:
    """Go to the checkout and hold its lock for the flow of this name. The run ends, as Crashed, when the worker
    that started it dies; otherwise it would stay open, and later runs would wait for its place."""
    if "PREFECT__FLOW_RUN_ID" in os.environ:
        die_with_parent()
    here = root()
    os.chdir(here)
    with at_work(here, name):
        yield here


def run_name() -> str:
    """Name a flow run: profile and time."""
    path = root() / "params.yaml"
    profile = runtime.flow_run.parameters.get("profile") or (
        load(path).profile if path.exists() else "no params.yaml"
    )
    return f"{profile} {time.strftime('%Y-%m-%d %H:%M')}"


@flow(name="full-pipeline", flow_run_name=run_name, retries=0, log_prints=False)
def full_pipeline(
    profile: str | None = None,
    overrides: dict[str, Any] | None = None,
    stages: list[str] | None = None,
    force: list[str] | None = None,
    data: list[str] | None = None,
) -> list[Row]:
    """Run everything from raw annotations to the report, or some `stages`.

    profile: its settings, or those of params.yaml if that holds this profile; None takes params.yaml as it
    is. overrides: settings on top, as in {"sft.optim.lr": 0.0001}. stages, force: names of tasks/stages.py,
    as evaluate@rl. Forced stages run even if they are up to date. data: folders of data sets to add to
    prepare.sources. Profile, overrides and data belong to this run: params.yaml is as before when it ends.
    Raises ConfigError for an unknown or impossible setting and ValueError for an unknown stage, before any
    stage runs.
    """
    chosen, forced = stages_named(stages), {stage.name for stage in stages_named(force or ())}
    with (
        flow_at_work("full-pipeline") as here,
        settings_of_run(here, profile=profile, overrides=overrides, data=data),
    ):
        return run_stages(chosen, here, forced)


@flow(name="agent-pipeline", flow_run_name=run_name, retries=0, log_prints=False)
def agent_pipeline(
    profile: str | None = None, overrides: dict[str, Any] | None = None, force: list[str] | None = None
) -> list[Row]:
    """Run the pixel-space agent's stages and all that they need (docs/agent.md). Parameters as those of
    `full_pipeline`."""
    return run_group(AGENT, profile, overrides, force, page="agent/report/episodes.html")


@flow(name="online-pipeline", flow_run_name=run_name, retries=0, log_prints=False)
def online_pipeline(
    profile: str | None = None, overrides: dict[str, Any] | None = None, force: list[str] | None = None
) -> list[Row]:
    """Run the simulation of learning online and all that it needs (docs/online-learning.md). Parameters as
    those of `full_pipeline`."""
    return run_group(ONLINE, profile, overrides, force, page="agent/online/online.json")


@flow(name="memory-pipeline", flow_run_name=run_name, retries=0, log_prints=False)
def memory_pipeline(
    profile: str | None = None, overrides: dict[str, Any] | None = None, force: list[str] | None = None
) -> list[Row]:
    """Train the memory of a SAM2 alone (docs/video.md). Parameters as those of `full_pipeline`."""
    return run_group(MEMORY, profile, overrides, force, page="memory/metrics.json")


def run_group(
    group: str, profile: str | None, overrides: dict[str, Any] | None, force: list[str] | None, *, page: str
) -> list[Row]:
    """Run what `needed_for` returns of this group, which is not the main one."""
    stages_named(force or (), table=TABLE)
    with (
        flow_at_work(f"{group}-pipeline") as here,
        settings_of_run(here, profile=profile, overrides=overrides),
    ):
        needed = needed_for(group, load(here / "params.yaml"))
        forced = {stage.name for stage in stages_named(force or (), table=needed)}
        return run_stages(needed, here, forced, page=page)


def stages_named(names: Collection[str] | None, table: tuple[Stage, ...] = STAGES) -> tuple[Stage, ...]:
    """Return these stages in the pipeline's order; None: all. Raises ValueError for a name that is none of
    the `table`."""
    there = [stage.name for stage in table]
    for name in names or ():
        if name not in there:
            raise ValueError(f"no stage {name!r}{nearest(name, there)}; there are {there}")
    return tuple(stage for stage in table if names is None or stage.name in names)
