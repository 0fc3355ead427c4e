"""Names of the family's published data sets and weights (catalogue.yaml): where each is on the Hugging Face
hub, which of its files are needed.

Sizes are asked of the hub when something is fetched; so is the licence, where the repository's card states
one.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from typing import Any, Literal

import yaml

UNKNOWN = "unknown"


@dataclass(frozen=True, kw_only=True)
class Published:
    """One data set or release. `files`: patterns of the files that are needed (none: all)."""

    repo: str
    files: tuple[str, ...] = ()
    licence: str = UNKNOWN
    """Where the hub's card says nothing."""
    into: str
    """Folder, from the checkout."""
    then: str = ""
    """What to do with it once it is there."""

    @property
    def kind(self) -> Literal["dataset", "model"]:
        return "dataset" if self.into.partition("/")[0] == "data" else "model"


def _published(entry: dict[str, Any]) -> Published:
    """Read an entry. Weights go into a folder of the repository's name."""
    into = entry.get("into", f"weights/{entry['repo'].partition('/')[2]}")
    then = entry.get("then", "").format(into=into)
    return Published(**entry | {"into": into, "then": then, "files": tuple(entry.get("files", ()))})


_FILE = yaml.safe_load(resources.files("ans_core.hub").joinpath("catalogue.yaml").read_text(encoding="utf-8"))
DATA, WEIGHTS = (
    {name: _published(entry) for name, entry in _FILE[part].items()} for part in ("data", "weights")
)
