"""Every program in perf/ against today's code: a renamed or removed name must not stay unseen until somebody
measures again."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"
PROJECT = ("ans_core", "tests", "perf", "tasks", "flows")


def imports(tree: ast.AST) -> list[tuple[str, str]]:
    """Return (module, name) of everything that a program takes from this project, at its top or inside its
    functions."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return [
        (node.module, alias.name)
        for node in found
        if node.module.split(".")[0] in PROJECT
        for alias in node.names
    ]


def exists(module: str, name: str) -> bool:
    found = import_module(module)
    return hasattr(found, name) or (hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None)


@pytest.mark.parametrize("script", sorted(PERF.glob("*.py")), ids=lambda path: path.stem)
def test_everything_that_a_program_in_perf_imports_from_the_project_is_there(script):
    assert [
        f"{module}.{name}"
        for module, name in imports(ast.parse(script.read_text()))
        if not exists(module, name)
    ] == []
