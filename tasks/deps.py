"""tasks/stages.py and the imports of ans_core in, every group's dvc.yaml out: `python -m tasks.deps --write`, or `--check` it."""

from __future__ import annotations

import argparse
import ast
import functools
import sys
from pathlib import Path
from typing import Any

import yaml

from ans_core.config import Config
from tasks.stages import GROUPS, MAIN, TABLE, Stage, dvc_file

# The values of settings reach a stage as parameters, which dvc.yaml lists: a changed default changes nothing until params.yaml has it.
SETTINGS = Path("ans_core/config")
# Which settings don't decide a result: `launch` says where things run, `profile` is part of every path.
FREE_SECTIONS = {"launch", "profile"}

HEADER = """\
# Written by `make dvc` (python -m tasks.deps --write) from tasks/stages.py and the imports of ans_core; a test keeps it true.
"""


def module_file(module: str, root: Path) -> Path | None:
    """Return the file of a dotted name below `root`, or None if the name is no module there (a function, say)."""
    path = root / Path(*module.split("."))
    if (path / "__init__.py").is_file():
        return path / "__init__.py"
    return path.with_suffix(".py") if path.with_suffix(".py").is_file() else None


def imported_names(file: Path, root: Path) -> frozenset[str]:
    """Return dotted names that `file` may import, also inside functions. `from a import b` gives `a` and `a.b`."""
    return _imported(file, file.read_text(), file.relative_to(root).parent.parts)


@functools.cache
def _imported(file: Path, text: str, package: tuple[str, ...]) -> frozenset[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(text, filename=str(file))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            anchor = package[: len(package) - node.level + 1] if node.level else ()
            source = ".".join((*anchor, *([node.module] if node.module else [])))
            names |= {source} | {f"{source}.{alias.name}" for alias in node.names}
    return frozenset(names)


def package_data(folder: Path) -> set[Path]:
    """Return a package's files that are not Python (word lists, templates), also in sub-folders without modules."""
    found = {path for path in folder.iterdir() if path.is_file() and path.suffix not in {".py", ".pyc"}}
    for child in folder.iterdir():
        if child.is_dir() and child.name != "__pycache__" and not any(child.rglob("*.py")):
            found |= {path for path in child.rglob("*") if path.is_file()}
    return found


def code_files(module: str, root: Path = Path(), package: str = "ans_core") -> list[Path]:
    """Return the files of `package` that importing `module` reads, relative to `root`, sorted; includes parents' __init__.py and the
    package data that these modules name."""
    todo, files = [module], set[Path]()
    while todo:
        name = todo.pop()
        parts = name.split(".")
        if parts[0] != package:
            continue
        for length in range(1, len(parts) + 1):
            file = module_file(".".join(parts[:length]), root)
            if file is None or file in files:
                continue
            files.add(file)
            todo += imported_names(file, root)
    data = {path for file in files for path in package_data(file.parent) if path.name in file.read_text()}
    relative = {path.relative_to(root) for path in files | data}
    return sorted(path for path in relative if not path.is_relative_to(SETTINGS) and (root / path).stat().st_size > 0)


def settings_read(file: Path) -> set[str]:
    """Return the settings that a stage reads: `sft` for `cfg.sft`, `sft.optim` for `cfg.sft.optim` (no deeper)."""
    tree = ast.parse(file.read_text(), filename=str(file))
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
    """Return settings that a stage reads but its row of the table lacks: changing them would not run the stage again."""
    file = root / f"ans_core/stages/{stage.task}.py"
    listed = FREE_SECTIONS | set(stage.sections)
    return {name for name in settings_read(file) if not {name, name.partition(".")[0]} & listed} if file.exists() else set()


def dvc_stage(stage: Stage, root: Path) -> dict[str, Any]:
    files = [path.as_posix() for path in code_files(f"ans_core.stages.{stage.task}", root)]
    if stage.row:
        raise AssertionError(f"{stage.name} is written by dvc_rows")
    entry: dict[str, Any] = {"cmd": stage.command, "deps": [*(dvc_input(stage, name) for name in stage.inputs), *files]}
    if stage.sections:
        entry["params"] = list(stage.sections)
    entry["outs"] = [f"runs/${{profile}}/{stage.out}", *(place for _, place in stage.copies)]
    if stage.in_git:
        entry["metrics"] = [{place: {"cache": False}} for _, place in stage.in_git]
    return entry


def dvc_input(stage: Stage, name: str) -> str:
    return stage.input_path(name, profile="${profile}", base="${agent.base}")


def dvc_rows(rows: list[Stage], root: Path) -> dict[str, Any]:
    """Return the rows of one task as a DVC `foreach`: named task@row, equal except for the folder they start from (`item`)."""
    shared = [name for name in rows[0].inputs if all(name in row.inputs for row in rows)]
    items = {str(row.row): row.item for row in rows if row.item is not None}
    key = "${key}" if items else "${item}"
    files = [path.as_posix() for path in code_files(f"ans_core.stages.{rows[0].task}", root)]
    return {
        "foreach": items or [row.row for row in rows],
        "do": {
            "cmd": f"exec python -m tasks.{rows[0].task} {key}",
            "deps": [*(dvc_input(rows[0], name) for name in shared), *(["runs/${profile}/${item}"] if items else []), *files],
            "params": list(rows[0].sections),
            "outs": [f"runs/${{profile}}/{Path(rows[0].out).parent.as_posix()}/{key}"],
        },
    }


def dvc_yaml(root: Path = Path(), group: str = MAIN) -> str:
    """Return the dvc.yaml of a group. One that lies in a folder of its own runs its stages in the folder above."""
    stages: dict[str, Any] = {}
    for stage in TABLE:
        if stage.group == group and stage.task not in stages:
            rows = [other for other in TABLE if other.row and other.task == stage.task]
            stages[stage.task] = dvc_rows(rows, root) if rows else dvc_stage(stage, root)
    if group == MAIN:
        return HEADER + yaml.safe_dump({"stages": stages, "plots": plots()}, sort_keys=False, width=132)
    for entry in stages.values():
        entry.get("do", entry)["wdir"] = ".."
    return HEADER + yaml.safe_dump({"vars": ["../params.yaml:profile,agent"], "stages": stages}, sort_keys=False, width=132)


def plots() -> list[dict[str, Any]]:
    """Return what `dvc plots` draws: the curves of every stage of the main group that has some, a chart per name
    (.dvc/plots/curves.json)."""
    return [
        {f"{stage.name} curves": {"x": "step", "y": {f"runs/${{profile}}/{stage.out}/curves.csv": "value"}, "template": "curves"}}
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
        path, text = dvc_file(name), dvc_yaml(group=name)
        if arguments.write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            sys.exit(f"{path} is not what tasks/stages.py and the imports of ans_core say: run `make dvc`")


if __name__ == "__main__":
    main()
