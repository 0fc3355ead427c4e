"""Long packed rows are read without a dense mask, with the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ans_core.data.branches import branch_places
from ans_core.model import attention
from ans_core.model.network import Network
from ans_core.model.packing import Packed, branch_attention

ROWS = torch.tensor([
    [0] * 5 + [1] * 4 + [2] * 3 + [3] * 1,
    [0] * 4 + [1] * 3 + [-1] * 6,  # padded, one branch
    [0] * 9 + [-1] * 4,  # no question
    [1] * 2 + [2] * 8 + [-1] * 3,  # no picture
])  # fmt: skip


def last_states(model: Network) -> tuple[Tensor, Tensor]:
    """Hidden states of everything but the padding, and the embeddings' gradient."""
    ids = torch.randint(5, 100, ROWS.shape, generator=torch.Generator().manual_seed(0))
    places = torch.arange(ROWS.shape[1]).expand_as(ROWS)
    table = model.internvl.get_input_embeddings().weight.requires_grad_()
    packed = Packed(
        input_ids=ids, position_ids=places, branch=ROWS, loss_mask=torch.zeros_like(ids, dtype=torch.bool)
    )
    hidden = model.hidden_states(packed, [None] * len(ROWS))[ROWS >= 0]
    table.grad = None
    (hidden * torch.linspace(-1, 1, hidden.shape[1])).sum().backward()
    assert table.grad is not None
    return hidden.detach(), table.grad


@pytest.mark.parametrize("most", [0, 100, 500])
def test_rows_read_branch_by_branch_have_the_states_and_gradients_of_the_dense_mask(
    own_model: Network, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """`most`: elements of a mask; later branches are read one by one, and all together."""
    shapes: list[torch.Size] = []
    first = own_model.internvl.model.language_model.layers[0].self_attn
    first.register_forward_pre_hook(
        lambda module, args, given: shapes.append(given["attention_mask"].shape), with_kwargs=True
    )
    monkeypatch.setattr(attention, "DENSE", most)
    apart = last_states(own_model)
    with monkeypatch.context() as patched:
        choose = attention.attention_of
        patched.setattr(
            "ans_core.model.network.attention_of",
            lambda model, branch, places, **options: choose(model, branch, places, dense=True),
        )
        dense = last_states(own_model)
    assert shapes == [(4, 1, 1, 13), (4, 1, 13, 13)]
    for found, wanted in zip(apart, dense, strict=True):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    own_model.internvl.set_attn_implementation("eager")  # a user's choice stays: it reads dense masks alone
    eager = last_states(own_model)
    assert shapes[2] == (4, 1, 13, 13)
    assert (eager[0] - dense[0]).abs().max() <= 1e-5 * dense[0].abs().max()


def test_short_rows_are_read_by_branch_where_that_halves_the_scores(own_model: Network) -> None:
    def mask(branch: Tensor) -> Tensor:
        return attention.attention_of(own_model.internvl.model.language_model, branch, branch_places(branch))[
            "attention_mask"
        ]

    # 8 x 8 and 7 times 4 x 8 of 36 x 36 scores
    many = torch.tensor([[0] * 4 + [number for number in range(1, 9) for _ in range(4)]] * 2)
    assert mask(many).shape == (2, 1, 1, 36)
    # padded as if both had both
    unlike = torch.tensor([[0] * 32 + [1, 1, 2, 2], [0, 0] + [1] * 17 + [2] * 17])
    assert mask(unlike).shape == (2, 1, 36, 36)


def test_a_batch_without_a_second_branch_is_plainly_causal() -> None:
    branch = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, -1, -1]])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    found, _ = attention.attend(torch.nn.Module(), query, key, value, None, branch_places(branch))
    repeated = (x.repeat_interleave(2, dim=1) for x in (key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(
        query, *repeated, attn_mask=branch_attention(branch)[:, None]
    ).transpose(1, 2)
    assert (found - wanted)[branch >= 0].abs().max() <= 1e-6
    assert (found[branch < 0] == 0).all()


@pytest.mark.parametrize("multiple", [1, 8])
def test_heads_that_share_keys_are_read_as_one_query_with_the_same_result(
    monkeypatch: pytest.MonkeyPatch, multiple: int
) -> None:
    """What a GPU and compiled layers run. `multiple`: sizes are rounded up, and a batch without later
    branches gets two empty ones."""
    generator = torch.Generator().manual_seed(0)
    for branch in (ROWS, ROWS[1:3]):
        query, key, value = (
            torch.randn(len(branch), heads, 13, 8, generator=generator).requires_grad_()
            for heads in (4, 2, 2)
        )
        found = []
        for packed in (False, True):
            monkeypatch.setattr(torch.compiler, "is_compiling", lambda packed=packed: packed)
            out = attention.by_branch(
                query, key, value, branch_places(branch, multiple=multiple if packed else 1)
            )
            found.append(
                (out, *torch.autograd.grad((out * torch.linspace(-1, 1, 8)).sum(), (query, key, value)))
            )
        for apart, together in zip(*found, strict=True):
            assert (apart - together).abs().max() <= 1e-6 * apart.abs().max()


def test_no_place_is_counted_where_every_layer_would_wait_for_it() -> None:
    """The same tensors serve all layers; every token is read once, padding never."""
    places = branch_places(ROWS, multiple=4)
    assert [x.shape[-1] % 4 for x in (places.first, places.prefix, places.later)] == [0, 0, 0]
    read = torch.cat([places.first[places.first >= 0], places.later[places.later >= 0]]).sort().values
    assert read.tolist() == (ROWS.flatten() >= 0).nonzero()[:, 0].tolist()
    assert (places.back[ROWS.flatten() < 0] == places.first.numel() + places.later.numel()).all()
