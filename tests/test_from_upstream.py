"""What docs/from-upstream.md and docs/trouble.md call ours exists: settings, commands, classes, curves,
files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from ans_core.config import Config, ConfigError, resolve
from ans_core.config.read import _flat
from ans_core.inference.sa2va import Sa2VA
from flows import cli
from tests.test_docs import ROOT, parsed, words_of

PAGE, TROUBLE = ROOT / "docs/from-upstream.md", ROOT / "docs/trouble.md"
CODE = re.compile(r"`([^`]+)`")
SECTIONS = {name.partition(".")[0] for name in _flat(Config(profile="none").model_dump(mode="json"))}
SETTINGS = _flat(Config(profile="none").model_dump(mode="json"))
SOURCES = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "ans_core").rglob("*.py"))
LOOPS = ("loop1", "loop2", "refer")


def cells(page: Path) -> Iterator[list[str]]:
    """Yield the cells of every row of the page's tables, without heads."""
    for line in page.read_text(encoding="utf-8").splitlines():
        row = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("|") and row[0] not in ("there", "sign", "-"):
            yield row


def fault(code: str) -> str | None:
    """Return what is wrong with a name of ours; None if it exists."""
    name = code.partition("=")[0]
    first = name.partition(".")[0]
    if code.startswith("ans "):
        return None if not isinstance(found := parsed(words_of(code)[1:]), str) else found
    if first in SECTIONS and "/" not in name:
        return (
            None if any(one == name or one.startswith(f"{name}.") for one in SETTINGS) else "no such setting"
        )
    if name.startswith("Sa2VA."):
        return None if hasattr(Sa2VA, name.removeprefix("Sa2VA.")) else "Sa2VA has no such name"
    if name.startswith("make "):
        return (
            None
            if re.search(rf"^{name[5:]}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
            else "no such target"
        )
    if name.startswith(LOOPS):
        last = name.rpartition("/")[2].removesuffix("_std")
        return None if re.search(rf"\b{last}\b", SOURCES) else "no such curve"
    if re.fullmatch(r"[A-Z]\w+", name):
        return None if f"class {name}" in SOURCES else "no such class"
    return "neither a setting nor a command, class or curve"


def test_every_name_of_ours_beside_upstreams_exists() -> None:
    rows = list(cells(PAGE))
    assert len(rows) > 70
    wrong = [
        f"{row[0]}: {code}: {why}" for row in rows for code in CODE.findall(row[1]) if (why := fault(code))
    ]
    assert wrong == []
    assert all(CODE.search(row[1]) or row[1] == "the same command again" for row in rows)


def test_every_setting_that_helps_exists() -> None:
    rows = list(cells(TROUBLE))
    assert len(rows) > 20
    named = [
        code
        for row in rows
        for code in CODE.findall(row[2])
        if re.match(r"\w+\.\w", code) and code.partition(".")[0] in SECTIONS
    ]
    assert len(named) > 30
    assert [f"{code}: {why}" for code in named if (why := fault(code))] == []


def test_a_name_that_is_gone_would_be_found() -> None:
    assert fault("rl.kl_coeff") == "no such setting"
    assert fault("DualLoops") == "no such class"
    assert fault("Sa2VA.predicted") == "Sa2VA has no such name"
    assert fault("ans finetun PATH")
    assert fault("loop1/klx") == "no such curve"


@pytest.mark.slow
def test_upstreams_settings_are_answered_with_ours() -> None:
    """Each flag of the table of RL that is a plain name, typed as a setting."""
    checked = 0
    for row in cells(PAGE):
        flags = re.findall(r"`--(\w+)`", row[0])
        ours = [code.partition("=")[0] for code in CODE.findall(row[1]) if code.partition(".")[0] in SECTIONS]
        for flag in flags if ours else ():
            name = f"rl.{flag}"
            if name in SETTINGS:  # it is called the same
                assert name in ours
                continue
            with pytest.raises(ConfigError, match=r"did you mean|write ") as error:
                resolve(ROOT / "profiles/tiny.yaml", (f"{name}=1",))
            assert any(one.removeprefix("rl.optim.") in str(error.value) for one in ours), (
                flag,
                str(error.value),
            )
            checked += 1
    assert checked > 20


def test_rl_has_the_command_of_the_page() -> None:
    arguments = cli.parse(
        ["rl", "--model", "M", "--data", "A", "--data", "B", "--judge", "http://127.0.0.1/v1", "rl.kl=0.1"]
    )
    assert (arguments.data, arguments.settings) == (["A", "B"], ["rl.kl=0.1"])
