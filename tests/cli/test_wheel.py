"""The wheel without the checkout: built, installed, and its commands run."""

from __future__ import annotations

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from ans_core.checkpoints import checkpoint
from tests import tiny
from tests.benchmarks.public.drawn import coded, write
from tests.data.test_prepare import own_data

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel, and with the libraries that are installed here; no path of it leads to
    the checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "ans_core", source / "ans_core", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("flows", "tasks", "requirements"):  # the first two must stay out of the wheel
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source)
    done(
        *PIP,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--wheel-dir",
        str(folder),
        str(source),
        cwd=folder,
    )
    shutil.rmtree(source)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python = folder / "venv/bin/python"
    packages = Path(
        done(str(python), "-c", "import site; print(site.getsitepackages()[0])", cwd=folder).strip()
    )
    # The .pth files of a folder that is itself named in one are not read, so the editable install is not
    # found.
    (packages / "libraries.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    (wheel,) = folder.glob("ans-*.whl")
    done(
        *PIP, "--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(wheel), cwd=folder
    )
    return folder


def done(*command: str, cwd: Path, status: int = 0) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ended = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == status, ended.stdout + ended.stderr
    return ended.stdout + ended.stderr


@pytest.mark.slow
def test_the_wheels_commands_run_without_the_checkout(home: Path, tmp_path: Path) -> None:
    def ans(*words: object, status: int = 0) -> str:
        return done(str(home / "venv/bin/ans"), *map(str, words), cwd=tmp_path, status=status)

    python = str(home / "venv/bin/python")
    where = done(
        python,
        "-c",
        "import ans_core, importlib.util as u; print(ans_core.__file__, u.find_spec('flows'))",
        cwd=tmp_path,
    )
    assert where.split() == [
        str(next(home.glob("venv/lib/*/site-packages")) / "ans_core/__init__.py"),
        "None",
    ]
    told = ans("--help")
    assert "    predict " in told
    assert "    sweep " not in told

    checkpoint.save(tiny.build(), tmp_path / "model", metadata={})
    (tmp_path / "photo.png").write_bytes(tiny.picture(0))
    ans("predict", "photo.png", "the square", "--model", "model", "--max-tokens", "2", "--out", "answer")
    assert set(json.loads((tmp_path / "answer/answer.json").read_text())) >= {"asked", "text", "masks"}
    assert "--model is missing" in ans("predict", "photo.png", "the square", status=2)

    assert "wrote upstream" in ans("convert", "model", "upstream", "--to", "upstream")
    assert "every tensor is known" in ans("convert", "--check", "upstream")

    truth = write(tmp_path / "truth.jsonl", [{"id": "a", "mask": coded(0, 4)}])
    drawn = write(tmp_path / "drawn.jsonl", [{"id": "a", "mask": coded(0, 5)}])
    assert "0.800000" in ans("eval", "score", "refcoco", "--predictions", drawn, "--data", truth)
    assert "need the checkout of ANS" in ans("eval", "model", status=2)

    (tmp_path / "set").mkdir()
    assert "no fault found" in ans("data", "check", own_data(tmp_path / "set").path)
