from __future__ import annotations

# ruff: noqa: I001, F401, E402
import gc

gc.disable()  # imports make a million objects that stay; to walk through them again and again takes 5 of 18 seconds

# Third parties first: what ours import under jaxtyping's hook is looked up in a bytecode cache of its own and compiled anew (11 s).
import datasets
import nltk
import openai
import peft
import torch._dynamo
import transformers.models.internvl.modeling_internvl

import pytest

from ans_core.model import Sa2VA
from tests import tiny


def pytest_collection_finish() -> None:
    gc.freeze()  # what was imported is no garbage: later collections leave it out
    gc.enable()


@pytest.fixture(scope="session")
def tiny_model() -> Sa2VA:
    """Shared: a test that changes weights takes `own_model`."""
    return tiny.build()


@pytest.fixture
def own_model() -> Sa2VA:
    return tiny.build()
