"""The registry of checkpoints in MLflow: one registered model per profile, whose versions name a converted
checkpoint by DVC's hash.

No weights are copied: `flows.dvc_state.check_out` brings a version back from DVC's cache. The alias
`challenger` is the newest version, `champion` the best so far.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.tracking import client, last_run

if TYPE_CHECKING:
    from mlflow import MlflowClient

HASH = "dvc.md5"


@dataclass(frozen=True, kw_only=True)
class Version:
    number: str
    md5: str
    """DVC's hash of the checkpoint's folder."""


def model_name(profile: str) -> str:
    return f"ans-{profile}"


def register(root: Path, profile: str, md5: str, key: str) -> Version:
    """Register a converted checkpoint as challenger, with the run of `convert` that has this state key, if MLflow
    knows one. A checkpoint that is registered already keeps its version."""
    from mlflow.exceptions import MlflowException

    mlflow, name = client(root), model_name(profile)
    try:
        mlflow.create_registered_model(
            name, description="Checkpoints of this profile; the tag dvc.md5 names the folder in DVC's cache."
        )
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    made = versions(mlflow, name).get(md5)
    if made is None:
        run = last_run(root, {"ans.stage": "convert", "ans.key": key})
        run_id = run.info.run_id if run else None
        # a server takes no source without the slash
        made = mlflow.create_model_version(name, f"dvc:/{md5}", run_id=run_id, tags={HASH: md5})
    mlflow.set_registered_model_alias(name, "challenger", made.version)
    return Version(number=str(made.version), md5=md5)


def versions(mlflow: MlflowClient, name: str) -> dict[str | None, Any]:
    """Return a model's versions by DVC's hash."""
    return {version.tags.get(HASH): version for version in mlflow.search_model_versions(f"name = '{name}'")}


def is_registered(root: Path, profile: str, md5: str) -> bool:
    return md5 in versions(client(root), model_name(profile))


def version_of(root: Path, profile: str, wanted: str) -> Version | None:
    """Return a version by its alias or number; None if there is none. Raises what MLflow raises where it does not
    answer."""
    mlflow, of_model = client(root), f"name = '{model_name(profile)}'"
    for model in mlflow.search_registered_models(of_model):
        wanted = str(model.aliases.get(wanted, wanted))
    for version in mlflow.search_model_versions(of_model):
        if str(version.version) == wanted:
            return Version(number=wanted, md5=version.tags[HASH])
    return None


def promote(root: Path, profile: str, version: Version) -> None:
    """Make a version the champion."""
    client(root).set_registered_model_alias(model_name(profile), "champion", version.number)
