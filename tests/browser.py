"""Pages as Chromium shows them, where this machine has one."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def chromium() -> str:
    """Return the program; without one, skip the test."""
    if CHROMIUM is None:
        pytest.skip("no chromium on this machine")
    return CHROMIUM


def found_by_probe(url: str, folder: Path, *words: str) -> Any:
    """Return what a script of the page has written as JSON into `<pre id="found">`. The page may log nothing.
    `words`: more options of Chromium."""
    done = subprocess.run(
        [chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", "--enable-logging=stderr",
         "--virtual-time-budget=20000", f"--user-data-dir={folder / 'profile'}", *words, url],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert [line for line in done.stderr.splitlines() if "CONSOLE" in line] == []
    return json.loads(html.unescape(re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)[-1]))
