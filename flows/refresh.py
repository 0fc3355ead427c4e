"""The `data-refresh` flow: look through the user's data sets, then run what depends on those that changed."""

from __future__ import annotations

from pathlib import Path

from prefect import flow, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE

from ans_core.config import load
from flows.child import StageFailedError, run_once
from flows.kept import print_lines
from flows.params import watch_sources
from flows.pipeline import Row, flow_at_work, run_name, run_stages
from tasks.stages import STAGES

CHECK_S = 24 * 3600


@flow(name="data-refresh", flow_run_name=run_name, retries=0)
def data_refresh() -> list[Row]:
    """Check every data set of params.yaml; a faulty one stops the flow before anything is computed. Then run
    the stages that changed."""
    with flow_at_work("data-refresh") as here:
        config = load(here / "params.yaml")
        sources = {
            source.path: source.format
            for source in (*config.prepare.sources, *config.evaluate.sources, *config.agent.sources)
        }
        checks = {path: is_sound.with_options(name=f"check {path}") for path in sources}
        faulty = [path for path, form in sources.items() if not checks[path](path, form, here)]
        lines = [
            f"- {path} ({form}): {'faulty' if path in faulty else 'no fault found'}"
            for path, form in sources.items()
        ]
        create_markdown_artifact(
            "\n".join(["# data-refresh", *(lines or ["no data sets of your own"])]), key="data-refresh"
        )
        if faulty:
            raise ValueError(
                f"faults in {', '.join(faulty)}: they are listed above, by file and record; `ans data "
                "check` lists them again"
            )
        print_lines(watch_sources(here))
        return run_stages(STAGES, here)


@task(cache_policy=NO_CACHE)
def is_sound(path: str, form: str, here: Path) -> bool:
    """Tell whether a data set can be trained on; its faults are printed."""
    status = run_once(
        ["-m", "flows.cli", "data", "check", path, "--format", form],
        root=here,
        timeout_s=CHECK_S,
    )
    if status not in {0, 1}:
        raise StageFailedError(f"`ans data check {path}` ended with status {status}")
    return status == 0
