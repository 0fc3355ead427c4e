"""The `evaluate` flow: one checkpoint on chosen benchmarks, with the data sets of the current run."""

from __future__ import annotations

from pathlib import Path

from prefect import flow
from prefect.artifacts import create_markdown_artifact

from ans_core.config import load
from flows.checkpoint_eval import content_of, in_child, metrics_of, registered
from flows.pipeline import flow_at_work, run_name
from tasks import registry


@flow(name="evaluate", flow_run_name=run_name, retries=0)
def evaluate(
    checkpoint: str = "challenger",
    benchmarks: list[str] | None = None,
    split: str | None = None,
    limit: int | None = None,
) -> str:
    """Evaluate and return the folder of results; params.yaml stays as it is.

    checkpoint: a model folder, an alias of the registry (champion, challenger), or a version's number.
    benchmarks, split, limit: as in the section `evaluate`; None: as params.yaml has them.
    Raises ConfigError for a setting that is not possible and ValueError for a checkpoint that is not there.
    """
    overrides = {"benchmarks": benchmarks, "split": split, "limit": limit}
    changes = {name: value for name, value in overrides.items() if value is not None}
    with flow_at_work("evaluate") as here:
        out = in_child(*resolve_checkpoint(checkpoint, here), here, changes)
    lines = [
        f"# evaluate {checkpoint}",
        "| metric | |",
        "|-|-:|",
        *(f"| {name} | {value:.4f} |" for name, value in sorted(metrics_of(out).items())),
    ]
    create_markdown_artifact(
        "\n".join([*lines, "", f"Predictions and overlays: `{out}`"]), key="evaluate", description=checkpoint
    )
    return str(out)


def resolve_checkpoint(checkpoint: str, here: Path) -> tuple[Path, str]:
    """Return (folder, content hash) of a checkpoint."""
    if Path(checkpoint).is_dir():
        return Path(checkpoint).resolve(), content_of(Path(checkpoint))
    profile = load(here / "params.yaml").profile
    if version := registry.version_of(here, profile, checkpoint):
        return registered(version, here), version.md5
    raise ValueError(
        f"no checkpoint {checkpoint!r}: it is no folder and no version or alias of "
        f"{registry.model_name(profile)}"
    )
