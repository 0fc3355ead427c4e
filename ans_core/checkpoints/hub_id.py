"""Names of models: folders and files here, ids of the hub. Imports nothing heavy."""

from __future__ import annotations

import re
from pathlib import Path

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
ADVICE = "give a local folder or a hub id such as ByteDance/Sa2VA-4B"


def check(name: str) -> None:
    """Raise ValueError for what is neither there nor can be a hub id. A name in a folder that is there is
    none."""
    if not (name and Path(name).exists()) and (not HUB_ID.fullmatch(name) or Path(name).parent.is_dir()):
        raise ValueError(f"no folder {name!r}; {ADVICE}")
