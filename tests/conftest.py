from __future__ import annotations

import pytest

from ans_core.model import Sa2VA
from tests import tiny


@pytest.fixture(scope="session")
def tiny_model() -> Sa2VA:
    """Shared: a test that changes weights takes `own_model`."""
    return tiny.build()


@pytest.fixture
def own_model() -> Sa2VA:
    return tiny.build()
