"""Gradient checkpointing and logits in pieces change no gradient."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.model import adapters, checkpointing
from ans_core.model.network import Network
from ans_core.model.supervised import Supervised
from tests import tiny

TURNS = (
    Turn(
        question="Please segment the red square.",
        answer="It is [SEG].",
        masks=((tiny.square(8, 8, 24, 24),),),
    ),
    Turn(
        question="Describe region1.",
        answer="a small green square left of a blue square.",
        regions=(tiny.square(0, 0, 40, 40),),
    ),
)


def step(model: Network) -> tuple[float, dict[str, Tensor]]:
    """The loss and every gradient of a step of SFT, dropout included."""
    batch = collate([tiny.row(*TURNS)], model.tokenizer, tiny.layout(model))
    model.zero_grad()
    torch.manual_seed(0)
    loss, _ = Supervised(model, mask_weight=2.0, dice_weight=0.5, points=64)(batch)
    loss.backward()
    return float(loss.detach()), {
        name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("layers", [1, None])
@pytest.mark.parametrize("vision", [False, True])
def test_recomputed_layers_give_the_same_gradients(own_model: Network, vision: bool, layers: int | None):
    """To the bit, however many layers are. The vision tower's layers are recomputed where it is trained, and
    are computed once, without a graph, where it is not."""
    adapters.prepare_sft(own_model, adapters.lora_config(rank=4, alpha=8, dropout=0.3), seed=0)
    with torch.no_grad():
        for name, p in own_model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
    inner = own_model.internvl.model
    inner.vision_tower.requires_grad_(vision)
    plain = step(own_model)
    ran = {"language": 0, "language, last": 0, "vision": 0}

    def count(name: str):  # type: ignore[no-untyped-def]
        return lambda *_: ran.update({name: ran[name] + 1})

    inner.language_model.layers[0].self_attn.register_forward_hook(count("language"))
    inner.language_model.layers[-1].self_attn.register_forward_hook(count("language, last"))
    inner.vision_tower.encoder.layer[0].attention.register_forward_hook(count("vision"))
    own_model.checkpointing = layers
    again = step(own_model)
    assert ran == {"language": 2, "language, last": 2 if layers is None else 1, "vision": 2 if vision else 1}
    assert again[0] == plain[0]
    assert again[1].keys() == plain[1].keys()
    assert any("vision_tower" in name for name in plain[1]) == vision
    for name, gradient in plain[1].items():
        assert torch.equal(again[1][name], gradient), name


@pytest.mark.slow
def test_logits_in_pieces_give_the_same_loss_and_gradients(
    own_model: Network, monkeypatch: pytest.MonkeyPatch
):
    """13 or so learned tokens, three at a time."""
    adapters.prepare_sft(own_model, adapters.lora_config(rank=4, alpha=8, dropout=0.0), seed=0)
    head, rows = own_model.internvl.lm_head, []
    head.register_forward_hook(lambda module, args, out: rows.append(len(out)))
    whole = step(own_model)
    assert len(rows) == 1
    assert rows[0] > 9
    monkeypatch.setattr(checkpointing, "LOGITS", 3 * head.out_features)
    pieces = step(own_model)
    assert max(rows[1:]) == 3
    assert sum(rows[1:]) == 2 * rows[0]  # forward, and again in backward
    assert pieces[0] == pytest.approx(whole[0], rel=1e-6)
    for name, gradient in whole[1].items():
        assert torch.allclose(pieces[1][name], gradient, atol=1e-6), name
