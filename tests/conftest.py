from __future__ import annotations

import atexit
import fcntl
import gc
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import jaxtyping
import pytest

from tests import RUNS, SHARED

ROOT = Path(__file__).resolve().parents[1]
WITH_SHAPES = [
    ".".join(file.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for file in sorted(ROOT.glob("ans_core/**/*.py"))
    if "jaxtyping" in file.read_text(encoding="utf-8")
]
"""Modules whose types and shapes are checked at each call; mypy checks types everywhere. In all modules it takes a third
of the tests' processor time, in these a quarter."""
jaxtyping.install_import_hook(WITH_SHAPES, "beartype.beartype")

pytest.register_assert_rewrite(
    "tests.forks",
    "tests.golden",
    "tests.job_workspace",
    "tests.ray_cluster",
    "tests.slurm_cluster",
    "tests.workspace",
)

if TYPE_CHECKING:
    from ans_core.model.network import Network

LONGEST = {"test_slurm", "test_ray", "test_stages"}
"""Two modules that wait for most of the ten minutes that they take, and one that would end long after all
others."""


def pytest_configure(config: pytest.Config) -> None:
    """Make the folder of what the processes that run tests make once for all of them."""
    if not hasattr(config, "workerinput"):
        os.environ[SHARED] = tempfile.mkdtemp(prefix="ans-tests-")
        # kernels of another version, or of other instructions (ATEN_CPU_CAPABILITY), are no part of a test
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path(os.environ[SHARED], "inductor"))
        # until this process ends
        fcntl.flock(os.open(Path(os.environ[SHARED], RUNS), os.O_CREAT), fcntl.LOCK_EX)
        atexit.register(shutil.rmtree, os.environ[SHARED], ignore_errors=True)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check shapes in fast tests. In slow ones it takes a tenth of the processor's time, and of the 1,155
    functions that are checked all but 44 are called in fast ones (2026-11-29)."""
    jaxtyping.config.update("jaxtyping_disable", item.get_closest_marker("slow") is not None)


def pytest_sessionstart(session: pytest.Session) -> None:
    """Import what most tests need, where tests are run: with `-n` not in the process that shares them out."""
    if session.config.getoption("numprocesses", None) and not hasattr(session.config, "workerinput"):
        return
    # imports make a million objects that stay; to walk through them again and again takes 5 of 18 seconds
    gc.disable()
    # Third parties first: what ours import under jaxtyping's hook is looked up in a bytecode cache of its own
    # and compiled anew (11 s).
    import datasets  # noqa: F401
    import nltk  # noqa: F401
    import openai  # noqa: F401
    import peft  # noqa: F401
    import torch._dynamo  # noqa: F401
    import transformers.models.internvl.modeling_internvl  # noqa: F401


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put modules with slow tests first, those of LONGEST before them: the many short ones then fill what is
    left of all workers' time."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: (item.path.stem not in LONGEST, item.path not in slow))


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is no garbage: later collections leave it out
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model() -> Network:
    """Shared: a test that changes weights takes `own_model`."""
    from tests import tiny

    return tiny.build()


@pytest.fixture
def own_model() -> Network:
    from tests import tiny

    return tiny.build()


@pytest.fixture
def native_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with bf16 instructions: weights in half precision are loaded as they are stored."""
    from ans_core import precision

    monkeypatch.setattr(precision, "cpu_times", lambda: {"fp32": 2.0, "bf16": 1.0})
