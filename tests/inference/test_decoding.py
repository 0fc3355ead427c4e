"""The loop that says one token after another: what transformers' own `generate` says, without a read of the
device."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.inference import decoding
from ans_core.inference.decoding import decode
from ans_core.inference.generation import stopping
from ans_core.inference.prefill import PrefilledBatch, prompt, read_ahead
from ans_core.model import adapters
from ans_core.model.checkpointing import layers_of
from ans_core.model.network import Network
from ans_core.rl.rollout import Reader, SampledAnswer, exact_head, sample
from tests import tiny
from tests.device_reads import DeviceReads

CPU = torch.device("cpu")


def prompted(model: Network, count: int = 2) -> PrefilledBatch:
    samples = [tiny.region(i, "a red square") for i in range(count)]
    with torch.no_grad():
        return prompt(model, [caption_request(s, true_mask(s)) for s in samples])


def sampled(model: Network, *, max_tokens: int = 12) -> list[SampledAnswer]:
    reader = Reader(temperature=1.0, forbidden=[model.image_token_id], guard="guard")
    with (
        torch.no_grad(),
        torch.autocast(model.device.type, torch.bfloat16, enabled=model.dtype != torch.float32),
    ):
        return sample(model, prompted(model), group=4, max_tokens=max_tokens, reader=reader, seeds=range(8))


def test_tokens_and_logits_are_those_of_transformers_generate(own_model: Network) -> None:
    batch, model = read_ahead(own_model, prompted(own_model, 3)), own_model
    rows = torch.arange(3)
    attention = torch.cat([batch.prefix_attention, batch.attention], dim=1)
    reference = model.vlm.generate(
        inputs_embeds=torch.cat([batch.prefixes, batch.embeds], dim=1),
        attention_mask=attention.long(),
        position_ids=batch.positions(attention, rows),
        past_key_values=batch.cache(rows),
        max_new_tokens=20,
        eos_token_id=None,
        pad_token_id=0,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    logits: list[Tensor] = []

    def likeliest(raw: Tensor, count: Tensor) -> Tensor:
        assert int(count) == len(logits)
        logits.append(raw)
        return raw.argmax(1)

    out = decode(model, batch, answers=1, max_tokens=20, choose=likeliest, stops=[])
    assert torch.equal(out, reference.sequences)
    assert (torch.stack(logits) - torch.stack(reference.logits)).abs().max() < 1e-4


def test_a_token_reads_nothing_but_whether_all_have_ended(own_model: Network) -> None:
    """On a GPU that is asked every eighth token."""
    model, batch = own_model, read_ahead(own_model, prompted(own_model))
    reader = Reader(temperature=1.0, forbidden=[model.image_token_id], guard="guard")
    with DeviceReads() as reads:
        decode(
            model,
            batch,
            answers=4,
            max_tokens=16,
            choose=lambda raw, count: reader(raw).argmax(1),
            **stopping(model) | {"stops": []},
        )
    assert {place.partition(":")[0] for place in reads.places} == {"inference/decoding.py"}
    assert list(reads.places.values()) == [16]


class Operations(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.slow
def test_adapters_are_cast_once_and_not_for_every_token(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own_model.to(torch.bfloat16)
    adapters.Policies(model, adapters.rl_config(rank=4, alpha=8, dropout=0.0, modules=[]), seed=0)
    factors = 2 * 7 * len(layers_of(model.vlm.model.language_model))

    def casts_a_token() -> float:
        casts = []
        for length in (4, 14):
            with Operations() as seen:
                sampled(model, max_tokens=length)
            casts.append(seen.count["_to_copy"])
        return (casts[1] - casts[0]) / 10

    once = casts_a_token()
    monkeypatch.setattr(decoding, "_half_adapters", lambda model: decoding.nullcontext())
    assert casts_a_token() - once >= factors


@pytest.mark.slow
def test_casting_the_adapters_first_changes_no_bit_and_they_come_back(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = own_model.to(torch.bfloat16)
    policies = adapters.Policies(model, adapters.rl_config(rank=4, alpha=8, dropout=0.0, modules=[]), seed=0)
    exact_head(model)
    for number, (name, p) in enumerate(policies.parameters("policy").items()):
        if "lora_B" in name:
            p.data.normal_(std=0.1, generator=torch.Generator().manual_seed(number))
    before = {name: (p.data_ptr(), p.dtype) for name, p in policies.parameters("policy").items()}
    first = sampled(model)
    assert {name: (p.data_ptr(), p.dtype) for name, p in policies.parameters("policy").items()} == before
    monkeypatch.setattr(decoding, "_half_adapters", lambda model: decoding.nullcontext())
    assert sampled(model) == first
    assert {dtype for _, dtype in before.values()} == {torch.float32}


COMPILED = """
import json
import torch
from torch._dynamo.utils import counters
from ans_core.model import adapters, compiling
from tests import tiny
from tests.inference.test_decoding import sampled

compiling.BACKEND = "eager"
torch._dynamo.config.fail_on_recompile_limit_hit = True
model = tiny.build()
policies = adapters.Policies(model, adapters.rl_config(rank=4, alpha=8, dropout=0.0, modules=[]), seed=0)
with torch.no_grad():
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
worst = 0.0
for length in (6, 20, 70):
    for name in ("policy", "teacher", "reference"):
        answers = []
        for model.compiled in (True, False):
            with policies.using(name):
                answers.append(sampled(model, max_tokens=length))
        assert [a.ids for a in answers[0]] == [a.ids for a in answers[1]]
        pairs = [pair for a, b in zip(*answers) for pair in zip(a.logps, b.logps)]
        worst = max(worst, max(abs(a - b) for a, b in pairs))
print(json.dumps({"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"]), "worst": worst}))
"""


@pytest.mark.slow
def test_compiled_layers_say_the_same_by_one_graph_an_adapter_whatever_the_length() -> None:
    done = subprocess.run(
        [sys.executable, "-c", COMPILED],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["breaks"] == {}
    assert result["graphs"] == 4  # of three adapters, and of the noise
    assert result["worst"] < 1e-4


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_replayed_graph_says_what_its_steps_say_and_sees_new_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = tiny.build().to("cuda", torch.bfloat16)
    model.norms_in_fp32()
    policies = adapters.Policies(model, adapters.rl_config(rank=4, alpha=8, dropout=0.0, modules=[]), seed=0)
    exact_head(model)
    for number in range(2):
        for name, p in policies.parameters("policy").items():
            if "lora_B" in name:
                p.data.normal_(std=0.1 * (1 + number))
        replayed = sampled(model, max_tokens=40)
        with monkeypatch.context() as plain:
            plain.setattr(decoding, "_can_be_a_graph", lambda model: False)
            assert sampled(model, max_tokens=40) == replayed
