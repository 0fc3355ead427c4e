"""Compiled layers: no graph is broken, rows of all lengths share few graphs, and losses and gradients are
those of eager layers. The backend "eager" shows graphs and breaks alone, in half the time of "aot_eager", which traces
gradients, too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import json, sys
from random import Random
import torch
from torch._dynamo.utils import counters
from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.model import adapters, compiling
from ans_core.model.supervised import Supervised
from tests import tiny

torch._dynamo.config.fail_on_recompile_limit_hit = True
compiling.BACKEND, dropout, checkpointing = sys.argv[1], float(sys.argv[2]), json.loads(sys.argv[3])
steps = range(*map(int, sys.argv[4:]))
model = tiny.build()
adapters.prepare_sft(model, adapters.lora_config(rank=4, alpha=8, dropout=dropout), seed=0)
with torch.no_grad():
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
model.train()
model.checkpointing = checkpointing
module = Supervised(model, mask_weight=2.0, dice_weight=0.5, points=0)
rng = Random(0)
box = (tiny.square(8, 8, 24, 24),)

def rows(step):
    def turns():
        return tuple(
            Turn(question="a red circle " * rng.randint(1, 40), answer="a red circle " * rng.randint(1, 9))
            for _ in range(rng.randint(0, 4))
        )
    drawn = Turn(question="Please segment the red square in this image.", answer="It is [SEG].", masks=(box,))
    return [tiny.row(drawn, *turns(), number=i, seed=i) for i in range(1 + step % 3)]

def gradients(some, compiled):
    model.compiled = compiled
    model.zero_grad()
    layout = tiny.layout(model, max_length=1024)
    loss, _ = module(collate(some, model.tokenizer, layout))
    loss.backward()
    return loss.detach(), torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

differences, lengths = [], set()
for step in steps:
    some = rows(step)
    loss, found = gradients(some, True)
    lengths.add(collate(some, model.tokenizer, tiny.layout(model, max_length=1024)).input_ids.shape)
    if not dropout:
        wanted_loss, wanted = gradients(some, False)
        differences.append(max(float((loss - wanted_loss).abs() / wanted_loss), float((found - wanted).abs().max() / wanted.abs().max())))
if compiling.BACKEND != "inductor":  # a third graph, 15 s of compiling C++
    with torch.no_grad():
        model.compiled = True
        module(collate(rows(1), model.tokenizer, tiny.layout(model, max_length=1024)))
print(json.dumps({"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"]), "lengths": len(lengths),
                  "worst": max(differences, default=0.0)}))
"""


ADAPTERS = """
import json
import torch
from torch._dynamo.utils import counters
from ans_core.model import adapters, compiling
from ans_core.model.packing import Packed
from tests import tiny

torch._dynamo.config.fail_on_recompile_limit_hit = True
compiling.BACKEND = "eager"
model = tiny.build()
lora = adapters.rl_config(rank=4, alpha=8, dropout=0.0, modules=adapters.policy_modules(model, drawing=True))
policies = adapters.Policies(model, lora, seed=0)
with torch.no_grad():
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
model.checkpointing = None

def states(rows, prefix, answers, length):
    branch = torch.tensor([0] * prefix + [n for n in range(1, answers + 1) for _ in range(length)]).expand(rows, -1)
    ids = torch.randint(5, 100, branch.shape, generator=torch.Generator().manual_seed(prefix))
    places = torch.arange(branch.shape[1]).expand_as(branch)
    packed = Packed(input_ids=ids, position_ids=places, branch=branch, loss_mask=torch.zeros_like(ids, dtype=torch.bool))
    return model.hidden_states(packed, [None] * rows)

worst = 0.0
for size in [(1, 20, 3, 7), (2, 90, 2, 30), (3, 64, 4, 64), (1, 150, 8, 20), (2, 20, 1, 9), (3, 200, 3, 70)]:
    for name in ("policy", "reference", "teacher"):
        found = []
        for model.compiled in (True, False):
            model.zero_grad()
            with policies.using(name), torch.set_grad_enabled(name == "policy"):
                hidden = states(*size)
                if name == "policy":
                    hidden.sum().backward()
            found.append(hidden.detach())
        worst = max(worst, float((found[0] - found[1]).abs().max() / found[1].abs().max()))
print(json.dumps({"graphs": counters["stats"]["unique_graphs"], "breaks": dict(counters["graph_break"]), "worst": worst}))
"""


def run(*arguments: str, script: str = SCRIPT) -> dict[str, object]:
    """Run a script in a process of its own, without the tests' type checks, which torch.compile can't
    read."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        timeout=550,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, object] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_rows_of_all_lengths_share_few_graphs_and_have_the_gradients_of_eager_layers() -> None:
    found = run("aot_eager", "0.0", "1", "10")
    assert found["breaks"] == {}
    assert found["lengths"] >= 6  # shapes that a compiler of static sizes would each have met
    assert found["graphs"] <= 6  # checkpointed layers have graphs of their own
    assert found["worst"] <= 1e-5


@pytest.mark.slow
def test_dropout_breaks_no_graph() -> None:
    found = run("eager", "0.05", "0", "10")
    assert found["breaks"] == {}
    assert found["lengths"] >= 6
    assert found["graphs"] <= 4


@pytest.mark.slow
def test_torchs_own_backend_compiles_them_here() -> None:
    """Batches of two rows and of three: a single row would need a third graph, 20 s of compiling C++."""
    found = run("inductor", "0.0", "null", "1", "3")
    assert found["breaks"] == {}
    assert found["graphs"] <= 4
    assert found["worst"] <= 1e-5


@pytest.mark.slow
def test_policy_reference_and_teacher_of_rl_share_them_too() -> None:
    """Six sizes of rows and rollouts, each read by three adapters, the policy with gradients and recomputed
    layers."""
    found = run(script=ADAPTERS)
    assert found["breaks"] == {}
    assert found["graphs"] <= 8
    assert found["worst"] <= 1e-5


@pytest.mark.slow
def test_no_float_of_a_layer_is_computed_on_the_cpu() -> None:
    """LoRA's scaling, dropout and epsilons as inputs are 0-d tensors on the CPU, for which a GPU's compiler
    builds C++."""
    script = """
import json
import torch
from ans_core.model import adapters, compiling
from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.model.supervised import Supervised
from tests import tiny

inputs = []
def look(graph, given):
    inputs.extend(node for node in graph.graph.nodes if node.op == "placeholder")
    return graph

compiling.BACKEND = look
model = tiny.build()
adapters.prepare_sft(model, adapters.lora_config(rank=4, alpha=8, dropout=0.05), seed=0)
model.train().compiled = True
row = tiny.row(Turn(question="a red circle", answer="a square"), number=0, seed=0)
Supervised(model, mask_weight=2.0, dice_weight=0.5, points=0)(collate([row], model.tokenizer, tiny.layout(model)))
values = [node.meta["example_value"] for node in inputs]
print(json.dumps({"inputs": len(inputs), "floats": sum(isinstance(v, torch.Tensor) and v.dim() == 0 for v in values)}))
"""
    found = run(script=script)
    assert found["floats"] == 0
    assert found["inputs"]


@pytest.mark.slow
def test_a_model_that_was_compiled_is_freed() -> None:
    script = """
import gc, json, weakref
import torch
from ans_core.model import compiling
from tests import tiny

model = tiny.build()
model.eval()
layer = weakref.ref(model.internvl.model.language_model.layers[0])
with compiling.compiled(model.internvl.model.language_model, on=True):
    pass
del model
gc.collect()
print(json.dumps({"freed": layer() is None}))
"""
    assert run(script=script)["freed"]
