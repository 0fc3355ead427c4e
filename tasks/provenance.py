"""What the report says of a run: code and data, the stages with times and machines, and the settings that
differ from the profile."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

from ans_core.config import PROFILES, Config, resolve
from tasks.surroundings import git_tags, lock_hash
from tasks.tracking import flat, last_run, store_faults, warn

Differing = dict[str, tuple[str, str]]


def write(path: Path, config: Config, stages: dict[str, dict[str, str]], root: Path) -> Path:
    """Write {versions, stages, settings} as JSON. `stages`: what `facts` returns."""
    record = {
        "versions": git_tags(root) | {"dvc.lock sha256": lock_hash(root)},
        "stages": stages,
        "settings": differing(config, root),
    }
    path.write_text(json.dumps(record), encoding="utf-8")
    return path


def facts(keys: dict[str, str], root: Path) -> dict[str, dict[str, str]]:
    """Return when, how long, where and from which commit each stage ran; a stage that MLflow does not know
    (it came from DVC's cache) is left out. `keys`: the state key of each stage, which finds the run that made
    its output."""
    found: dict[str, dict[str, str]] = {}
    try:
        for name, key in keys.items():
            if run := last_run(root, {"ans.stage": name, "ans.key": key}):
                seconds = round(
                    run.data.metrics.get("duration_s", (run.info.end_time - run.info.start_time) / 1000)
                )
                tags = run.data.tags
                found[name] = {
                    "began": time.strftime("%Y-%m-%d %H:%M", time.localtime(run.info.start_time / 1000)),
                    "took": f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02}",
                    "on": tags.get("ans.host", ""),
                    "precision": {1.0: "bf16", 0.0: "fp32"}.get(
                        run.data.metrics.get("precision/bf16", math.nan), ""
                    ),
                    "commit": tags.get("git.sha", "")[:10] + ("*" if tags.get("git.dirty") == "true" else ""),
                }
    except store_faults() as error:
        warn(f"the report has no times of the stages, since MLflow does not answer: {error}")
    return found


def differing(config: Config, root: Path) -> Differing | None:
    """Return (the profile's value, the run's) of settings that differ; None if the profile's file is not
    there."""
    profile = root / PROFILES / f"{config.profile}.yaml"
    if not profile.is_file():
        return None
    before, now = (flat(values) for values in (resolve(profile), config.model_dump(mode="json")))
    return {
        key: (before.get(key, "–"), now.get(key, "–"))
        for key in before | now
        if before.get(key) != now.get(key)
    }
