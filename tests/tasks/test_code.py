"""What of a stage's code decides whether it runs again."""

import shutil
from pathlib import Path

import pytest

from ans_core import code_hash
from ans_core.code_hash import CodeHashes, tokens
from tasks.code import Code, code_yaml


def package(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_imports_are_followed_with_parents_relatives_and_the_package_data_they_name(tmp_path: Path) -> None:
    root = package(tmp_path, {
        "core/__init__.py": "'''root'''",
        "core/a.py": "def f():\n    from core.sub import b\n    import numpy",
        "core/alone.py": "y = 1",
        "core/config.py": "z = 1",
        "core/sub/__init__.py": "from . import c",
        "core/sub/b.py": "from .c import thing\nopen('lists/x.gz')",
        "core/sub/c.py": "thing = open('words.txt')",
        "core/sub/d.py": "open('page.html')",
        "core/sub/words.txt": "w",
        "core/sub/lists/x.gz": "x",
        "core/sub/page.html": "p",
    })  # fmt: skip
    names = [path.as_posix() for path in CodeHashes(root, package="core").files("core.a")]
    assert names == [
        "core/__init__.py",
        "core/a.py",
        "core/sub/__init__.py",
        "core/sub/b.py",
        "core/sub/c.py",
        "core/sub/lists/x.gz",
        "core/sub/words.txt",
    ]


def test_every_python_cuts_an_f_string_alike() -> None:
    """Python 3.12 and later divide it."""
    source = 'x = f"a{f\'{1!r:>{3}}\'}\xe9" "b"\ny = rf"""\xe9\n{x}\n  """\n'
    strings = [token for token in tokens(source) if '"' in token]
    assert strings == ["f\"a{f'{1!r:>{3}}'}\xe9\"", '"b"', 'rf"""\xe9\n{x}\n  """']


PLAIN = """
'''A module.'''

LIMIT = 3


def double(value):
    '''Double it.'''
    text = "a # b"
    return value * 2 if text else (
        LIMIT
    )
"""


@pytest.mark.parametrize(("before", "after"), [
    ("A module.", "Another sentence."),
    ("    '''Double it.'''\n", ""),
    ("LIMIT = 3\n", "LIMIT = 3  # of tries\n'''Of tries.'''\n\n"),
    ("else (\n        LIMIT\n    )", "else (LIMIT)"),
    ("\n    ", "\n  "),
])  # fmt: skip
def test_words_and_layout_are_no_code(before: str, after: str) -> None:
    edited = PLAIN.replace(before, after)
    assert edited != PLAIN
    compile(edited, "edited", "exec")
    assert tokens(edited) == tokens(PLAIN)


@pytest.mark.parametrize(("before", "after"), [
    ("LIMIT = 3", "LIMIT = 4"),
    ("a # b", "a  # b"),
    ("    return value", "    pass\n    return value"),
    ("    return value", "    if value:\n      return value"),
])  # fmt: skip
def test_everything_else_is(before: str, after: str) -> None:
    assert tokens(PLAIN.replace(before, after)) != tokens(PLAIN)


def test_a_place_in_a_block_is_code() -> None:
    inside, after = "if a:\n    b()\n    c()\n", "if a:\n    b()\nc()\n"
    assert tokens(inside) != tokens(after)


def test_an_edit_is_seen_in_what_imports_it_alone_also_with_what_was_kept_of_the_last_look(
    tmp_path: Path,
) -> None:
    (tmp_path / ".ans").mkdir()
    root = package(
        tmp_path,
        {
            "core/a.py": "from core import b\nx = 1",
            "core/b.py": "y = 1",
            "core/c.py": "z = 1",
            "core/__init__.py": "",
        },
    )

    def hashes() -> list[str]:
        return [CodeHashes(root, package="core").hash_of([f"core.{name}"]) for name in "abc"]

    first = hashes()
    assert len(set(first)) == 3
    assert (root / code_hash.CACHE).is_file()
    assert hashes() == first
    (root / "core/b.py").write_text("y = 2")
    assert [a == b for a, b in zip(hashes(), first, strict=True)] == [False, False, True]
    (root / "core/b.py").write_text("y = 1  # as before")
    assert hashes() == first
    (root / code_hash.CACHE).write_text("{")
    assert hashes() == first


def test_data_that_a_module_names_are_its_code(tmp_path: Path) -> None:
    root = package(
        tmp_path, {"core/__init__.py": "", "core/a.py": "open('words.txt')", "core/words.txt": "w"}
    )
    before = CodeHashes(root, package="core").hash_of(["core.a"])
    (root / "core/words.txt").write_text("v")
    assert CodeHashes(root, package="core").hash_of(["core.a"]) != before


SECTION = """
LARGEST = 9

def _half(value):
    return value / 2

class Rows(Section):
    share: Share = 0.5
    '''Of the rows.'''

    @model_validator(mode="after")
    def _possible(self):
        if self.share > LARGEST:
            raise Impossible("share", "too large")
        return self

    @property
    def rows(self):
        '''Of a step.'''
        return round(_half(self.share) * 10)
"""
CHECKED = SECTION.replace("def rows", "def _rows")


@pytest.mark.parametrize(("text", "before", "after", "is_seen"), [
    (SECTION, "* 10", "* 20", True),
    (SECTION, "value / 2", "value / 3", True),
    (SECTION, "@property\n    def rows(self)", "def rows(self, of=1)", True),
    (SECTION, "= 0.5", "= 0.6", False),
    (SECTION, "    share:", "    more: Share = 0.5\n    share:", False),
    (SECTION, "too large", "larger than 9", False),
    (SECTION, "Of a step.", "Of every step.", False),
    (CHECKED, "* 10", "* 20", False),
])  # fmt: skip
def test_of_settings_what_computes_is_code_and_what_holds_and_checks_values_is_not(
    tmp_path: Path, text: str, before: str, after: str, is_seen: bool
) -> None:
    root = package(tmp_path, {
        "ans_core/__init__.py": "",
        "ans_core/config/__init__.py": "from ans_core.config.rows import Rows",
        "ans_core/config/rows.py": text,
        "ans_core/sft.py": "from ans_core.config import Config",
    })  # fmt: skip
    first = CodeHashes(root).hash_of(["ans_core.sft"])
    assert before in text
    (root / "ans_core/config/rows.py").write_text(text.replace(before, after))
    assert (CodeHashes(root).hash_of(["ans_core.sft"]) != first) == is_seen


def test_a_new_file_of_settings_is_no_code(tmp_path: Path) -> None:
    files = {"ans_core/config/__init__.py": "", "ans_core/sft.py": "from ans_core.config import Config"}
    first = CodeHashes(package(tmp_path, files)).hash_of(["ans_core.sft"])
    files |= {
        "ans_core/config/__init__.py": "from ans_core.config import new",
        "ans_core/config/new.py": CHECKED,
    }
    assert CodeHashes(package(tmp_path, files)).hash_of(["ans_core.sft"]) == first


@pytest.mark.slow
def test_every_stage_has_its_version_and_hash(tmp_path: Path) -> None:
    for part in ("ans_core", "tasks"):
        shutil.copytree(Path(part), tmp_path / part, ignore=shutil.ignore_patterns("__pycache__"))
    before = code_yaml(tmp_path)
    assert before == code_yaml(Path())
    loop = tmp_path / "ans_core/train/loop.py"
    loop.write_text(loop.read_text() + "\nMORE = 1\n")
    changed = {
        a.partition(":")[0]
        for a, b in zip(before.splitlines(), code_yaml(tmp_path).splitlines(), strict=True)
        if a != b
    }
    assert {"sft", "rl", "memory"} <= changed
    assert not changed & {"prepare", "judge_questions"}


@pytest.mark.slow
def test_how_questions_are_answered_is_code_of_what_asks_them_and_not_of_training() -> None:
    files = {
        task: Code().files(f"ans_core.stages.{task}") for task in ("base", "sft", "rl", "evaluate", "convert")
    }
    inference = Path("ans_core/inference")
    assert not any(file.is_relative_to(inference) for task in ("base", "sft") for file in files[task])
    assert {inference / "predict.py", inference / "video.py"} <= set(files["evaluate"])
    assert inference / "generation.py" in files["rl"]
    assert inference / "sa2va.py" in files["convert"]  # it loads what it wrote by the public name
