"""What README.md and docs/ quote: every `ans` command parses, settings, profiles, scripts and make targets
exist, and the site's links lead somewhere."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError

from ans_core.config import Config, resolve
from ans_core.config.read import _flat
from flows import cli
from tasks import settings_page

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ALTERNATIVE = re.compile(r"^([\w./:-]+)(?:\|[\w./:-]+)+$")
OPTIONAL = re.compile(r"(?<=\s)\[((?:[^\[\]]|\[[^\]]*\])*)\](?=\s|$)")
PARSER = cli.parser()
INLINE = re.compile(r"`([^`\n]+)`")


@pytest.fixture(autouse=True)
def _one_parser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "parser", lambda: PARSER)


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, line) of code blocks: fenced ones, and lines indented by four that are no
    list's."""
    fenced = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced or re.match(r"    \S", line):
            yield number, line.strip()


def commands(line: str) -> list[str]:
    """Return the commands of a line of shell, without its comment."""
    bare = re.sub(r"(^|\s)#.*$", "", line)
    return [part.strip() for part in re.split(r"\s&&\s|;\s", bare)]


def quoted(program: str) -> list[tuple[str, str]]:
    """Return (page:line, command) of every call of a program in a code block."""
    found = []
    for page in PAGES:
        for number, line in blocks(page.read_text(encoding="utf-8")):
            calls = [re.sub(r"^(nice -n \d+ |\.venv/bin/)+", "", command) for command in commands(line)]
            found += [(f"{page.name}:{number}", call) for call in calls if call.split()[:1] == [program]]
    return found


def inline() -> list[tuple[str, str]]:
    """Return (page, command) of every `ans ...` in a sentence."""
    texts = (
        (
            page.name,
            re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE),
        )
        for page in PAGES
    )
    return [
        (page, part)
        for page, text in texts
        for code in INLINE.findall(text)
        for part in commands(code)
        if part.startswith("ans ")
    ]


def words_of(command: str) -> list[str]:
    """Return the words of a command as somebody would type it: what stands in [brackets] too, of `one|other`
    the first, a number for N, ID and VERSION, no `...`."""
    while OPTIONAL.search(command):
        command = OPTIONAL.sub(r"\1", command)
    words = [
        "1" if word in ("N", "ID", "VERSION") else word for word in shlex.split(command) if word != "..."
    ]
    return [ALTERNATIVE.sub(r"\1", word) for word in words]


def parsed(words: list[str]) -> argparse.Namespace | str:
    """Return the parser's result, or what it complains of."""
    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        try:
            return cli.parse(words)
        except SystemExit:
            return told.getvalue().splitlines()[-1]


def subcommands() -> dict[str, argparse.ArgumentParser]:
    actions = cli.parser()._actions
    return next(action.choices for action in actions if isinstance(action, argparse._SubParsersAction))


def wrong_settings(arguments: argparse.Namespace) -> str:
    """Say what is wrong with a quoted profile or its settings; nothing of a placeholder in capitals."""
    name = arguments.name
    if name.isupper():
        return ""
    file = ROOT / "profiles" / f"{name}.yaml"
    if not file.exists():
        return f"no profile {name}"
    try:
        Config.model_validate(
            resolve(file, tuple(word for word in arguments.settings if word != "key=value"))
        )
    except (ValidationError, ValueError) as error:
        return str(error)
    return ""


def test_every_quoted_command_parses():
    found = quoted("ans")
    assert len(found) > 60
    wrong = [
        f"{place}: {command}: {told}"
        for place, command in found
        if isinstance(told := parsed(words_of(command)[1:]), str)
    ]
    assert wrong == []


def test_every_quoted_profile_and_setting_exists():
    arguments = [
        (place, parsed(words_of(command)[1:]))
        for place, command in quoted("ans")
        if command.startswith("ans profile")
    ]
    assert len(arguments) > 5
    wrong = [
        f"{place}: {told}"
        for place, given in arguments
        if isinstance(given, argparse.Namespace) and (told := wrong_settings(given))
    ]
    assert wrong == []


def test_every_command_in_a_sentence_names_a_subcommand_and_its_options():
    known, wrong = subcommands(), []
    found = inline()
    assert len(found) > 40
    for page, command in found:
        name, *words = words_of(command)[1:]
        options = known[name]._option_string_actions if name in known else {}
        wrong += [
            f"{page}: {command}: {word}"
            for word in words
            if word.startswith("--") and word.partition("=")[0] not in options
        ]
        wrong += [] if name in known else [f"{page}: {command}: no such command"]
    assert wrong == []


def test_a_stale_command_would_be_found():
    assert parsed(words_of("ans predict photo.jpg"))  # a word is missing
    assert isinstance(parsed(["ask", "photo.jpg"]), str)
    assert isinstance(parsed(words_of('ans predict IMAGE|VIDEO "Text." [--colour red]')[1:]), str)
    assert isinstance(
        parsed(words_of("ans convert SRC DST [--to upstream|sa2va-i|adapter]")[1:]), argparse.Namespace
    )
    assert wrong_settings(cli.parse(["profile", "tiny", "rl.klo=1"]))


def test_every_subcommand_is_quoted_and_run_by_a_test():
    """Quoted: in a block or a sentence. Run: a test of flows/ (or of the services) gives it to the
    program."""
    said = {words_of(command)[1] for _, command in [*quoted("ans"), *inline()]}
    tests = "".join(
        path.read_text(encoding="utf-8")
        for path in [*(ROOT / "tests").rglob("test_*.py"), ROOT / "tests/workspace.py"]
    )
    assert set(subcommands()) - said == set()
    assert {name for name in subcommands() if f'"{name}"' not in tests and f'"{name} ' not in tests} == set()


def test_quoted_scripts_their_options_and_make_targets_exist():
    targets = set(
        re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    )
    wrong = [
        f"{place}: {call}"
        for place, call in quoted("make")
        if not set(re.findall(r"^[a-z]+$", " ".join(call.split()[1:2]))) <= targets
    ]
    texts = [(page.name, page.read_text(encoding="utf-8")) for page in PAGES]
    for page, text in texts:
        for call in re.findall(r"python (perf/\w+\.py[^`\n#&]*)", text):
            script, *words = call.split()
            if not (ROOT / script).exists():
                wrong.append(f"{page}: {script}")
                continue
            code = (ROOT / script).read_text(encoding="utf-8")
            wrong += [
                f"{page}: {call}: {word}"
                for word in words
                if word.startswith("--") and f'"{word}"' not in code
            ]
    assert wrong == []


def test_every_page_is_in_the_sites_contents_and_every_file_that_a_page_names_exists():
    contents = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))["nav"]
    listed = re.findall(r"[\w-]+\.md", str(contents))
    assert sorted(listed) == sorted(page.name for page in (ROOT / "docs").rglob("*.md"))
    for page in PAGES:
        for path in re.findall(
            r"`((?:tests|perf|flows|ans_core|tasks|docker|requirements)/[\w/.-]+\.\w+)`",
            page.read_text(encoding="utf-8"),
        ):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


@pytest.mark.slow
def test_the_site_is_built_without_a_dead_link_and_loads_nothing_from_elsewhere(tmp_path: Path):
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    api = (tmp_path / "site/api.html").read_text(encoding="utf-8")
    assert "predict_many" in api
    assert "Answer a question with a text and a mask per" in api
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(
            r'<(?:script|link|img|iframe)[^>]+(?:src|href)="(https?://[^"]+)"',
            page.read_text(encoding="utf-8"),
        )
        assert loaded == [], page.name


def test_the_page_of_settings_is_what_classes_and_profiles_say() -> None:
    page = settings_page.page(ROOT)
    assert (ROOT / "docs/settings.md").read_text(encoding="utf-8") == page, "run `make dvc`"
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    assert re.fullmatch(
        r"\| `rl.group` \| whole number >= 2 \| `6` \| Rollouts of one sample .* \|.*\|", rows["rl.group"]
    )
    assert "`auto`, `cpu`, `cuda`" in rows["launch.device"]
    assert rows["sft.optim.lr"].count("0.0007") == 1  # the default of this section, not of its class
    assert set(_flat(Config(profile="none").model_dump(mode="json", exclude={"profile"}))) <= rows.keys()


def test_text_has_lines_of_at_most_140_characters() -> None:
    too_long = []
    for page in (*(ROOT / "docs").glob("*.md"), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"):
        text = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8"))
        for line in text.splitlines():
            is_text = not line.startswith(("    ", "|")) and not line.lstrip().startswith("|")
            if is_text and len(re.sub(r"`[^`]+`", "`", line)) > 140:  # a command is not broken
                too_long.append(f"{page.name}: {line[:60]}")
    assert not too_long
