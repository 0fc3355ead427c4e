"""tasks/stages.py in, every group's dvc.yaml out: `python -m tasks.deps --write`, or `--check` it."""

from __future__ import annotations

import argparse
import ast
import sys
from pathlib import Path
from typing import Any

import yaml

from ans_core.config import Config
from tasks import code
from tasks.stages import GROUPS, MAIN, TABLE, Stage, dvc_file

# Which settings don't decide a result: `launch` says where things run, `profile` is part of every path.
FREE_SECTIONS = {"launch", "profile"}

HEADER = """\
# Written by `make dvc` (python -m tasks.deps --write) from tasks/stages.py; a test keeps it true.
"""


def settings_read(file: Path) -> set[str]:
    """Return the settings that a stage reads: `sft` for `cfg.sft`, `sft.optim` for `cfg.sft.optim` (no
    deeper)."""
    tree = ast.parse(file.read_text(encoding="utf-8"), filename=str(file))
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read = set()
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        match node.value:
            case ast.Name(id="cfg") if id(node) not in inner:
                read.add(node.attr)
            case ast.Attribute(value=ast.Name(id="cfg"), attr=section):
                read.add(f"{section}.{node.attr}")
    return {name for name in read if name.partition(".")[0] in Config.model_fields}


def unlisted_settings(stage: Stage, root: Path = Path()) -> set[str]:
    """Return settings that a stage reads but its row of the table lacks: changing them would not run the
    stage again."""
    file = root / f"ans_core/stages/{stage.task}.py"
    listed = FREE_SECTIONS | set(stage.sections)
    return (
        {name for name in settings_read(file) if not {name, name.partition(".")[0]} & listed}
        if file.exists()
        else set()
    )


def code_stage() -> dict[str, Any]:
    return {
        "cmd": "exec python -m tasks.code",
        "deps": list(code.DEPENDENCIES),
        "outs": [{code.FILE.as_posix(): {"cache": False}}],
    }


def parameters(stage: Stage) -> list[Any]:
    """Return what dvc.yaml calls a stage's parameters: its settings, and the hash of its code."""
    return [*stage.sections, {code.FILE.as_posix(): [stage.task]}]


def dvc_stage(stage: Stage) -> dict[str, Any]:
    if stage.row:
        raise AssertionError(f"{stage.name} is written by dvc_rows")
    entry: dict[str, Any] = {"cmd": stage.command}
    if stage.inputs:
        entry["deps"] = [dvc_input(stage, name) for name in stage.inputs]
    entry["params"] = parameters(stage)
    entry["outs"] = [f"runs/${{profile}}/{stage.out}", *(place for _, place in stage.copies)]
    if stage.in_git:
        entry["metrics"] = [{place: {"cache": False}} for _, place in stage.in_git]
    return entry


def dvc_input(stage: Stage, name: str) -> str:
    return stage.input_path(name, profile="${profile}", base="${agent.base}")


def dvc_rows(rows: list[Stage]) -> dict[str, Any]:
    """Return the rows of one task as a DVC `foreach`: named task@row, equal except for the folder they start
    from (`item`)."""
    shared = [name for name in rows[0].inputs if all(name in row.inputs for row in rows)]
    items = {str(row.row): row.item for row in rows if row.item is not None}
    key = "${key}" if items else "${item}"
    return {
        "foreach": items or [row.row for row in rows],
        "do": {
            "cmd": f"exec python -m tasks {rows[0].task}@{key}",
            "deps": [
                *(dvc_input(rows[0], name) for name in shared),
                *(["runs/${profile}/${item}"] if items else []),
            ],
            "params": parameters(rows[0]),
            "outs": [f"runs/${{profile}}/{Path(rows[0].out).parent.as_posix()}/{key}"],
        },
    }


def dvc_yaml(group: str = MAIN) -> str:
    """Return the dvc.yaml of a group. One that lies in a folder of its own runs its stages in the folder
    above."""
    stages: dict[str, Any] = {code.NAME: code_stage()} if group == MAIN else {}
    for stage in TABLE:
        if stage.group == group and stage.task not in stages:
            rows = [other for other in TABLE if other.row and other.task == stage.task]
            stages[stage.task] = dvc_rows(rows) if rows else dvc_stage(stage)
    if group == MAIN:
        return HEADER + yaml.safe_dump({"stages": stages, "plots": plots()}, sort_keys=False, width=132)
    for entry in stages.values():
        entry.get("do", entry)["wdir"] = ".."
    return HEADER + yaml.safe_dump(
        {"vars": ["../params.yaml:profile,agent"], "stages": stages}, sort_keys=False, width=132
    )


def plots() -> list[dict[str, Any]]:
    """Return what `dvc plots` draws: the curves of every stage of the main group that has some, a chart per
    name (.dvc/plots/curves.json)."""
    return [
        {
            f"{stage.name} curves": {
                "x": "step",
                "y": {f"runs/${{profile}}/{stage.out}/curves.csv": "value"},
                "template": "curves",
            }
        }
        for stage in TABLE
        if stage.curves and stage.group == MAIN
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--write", action="store_true")
    group.add_argument("--check", action="store_true")
    arguments = parser.parse_args()
    for stage in TABLE:
        if missing := unlisted_settings(stage):
            sys.exit(
                f"{stage.name} reads {sorted(missing)} of the settings: list them in tasks/stages.py, "
                "or it will not run again when they change"
            )
    for name in GROUPS:
        path, text = dvc_file(name), dvc_yaml(name)
        if arguments.write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            sys.exit(f"{path} is not what tasks/stages.py says: run `make dvc`")


if __name__ == "__main__":
    main()
