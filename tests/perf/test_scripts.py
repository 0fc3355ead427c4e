"""Every program in perf/ against today's code: a renamed or removed name must not stay unseen until somebody measures again."""

import ast
import importlib
from pathlib import Path

import pytest

PERF = Path(__file__).parents[2] / "perf"
OWN = ("ans_core", "tests", "perf", "tasks", "flows")


def own_imports(tree: ast.AST) -> list[tuple[str, str]]:
    """Return (module, name) of everything that a program imports from this project, at its top or inside its functions."""
    found = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    return [(node.module, alias.name) for node in found if node.module.split(".")[0] in OWN for alias in node.names]


def exists(module: str, name: str) -> bool:
    if hasattr(importlib.import_module(module), name):
        return True
    return importlib.util.find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("script", sorted(PERF.glob("*.py")), ids=lambda path: path.stem)
def test_what_a_measuring_program_imports_from_the_project_is_there(script):
    imported = own_imports(ast.parse(script.read_text()))
    assert [f"{module}.{name}" for module, name in imported if not exists(module, name)] == []
