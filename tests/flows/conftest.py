from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.workspace import Commands, end_all, make


@pytest.fixture(scope="session")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    home = make(tmp_path_factory.mktemp("commands"))
    yield Commands(home)
    end_all(home)
