"""Long packed rows are read without a dense mask, with the same results."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

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
    packed = Packed(input_ids=ids, position_ids=places, branch=ROWS, loss_mask=torch.zeros_like(ids, dtype=torch.bool))
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
    first.register_forward_pre_hook(lambda module, args, given: shapes.append(given["attention_mask"].shape), with_kwargs=True)
    monkeypatch.setattr(attention, "DENSE", most)
    apart = last_states(own_model)
    with monkeypatch.context() as patched:
        patched.setattr("ans_core.model.network.packed_mask", lambda language_model, branch: branch_attention(branch)[:, None])
        dense = last_states(own_model)
    assert shapes == [(4, 1, 1, 13), (4, 1, 13, 13)]
    for found, wanted in zip(apart, dense, strict=True):
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    own_model.internvl.set_attn_implementation("eager")  # a user's choice stays: it reads dense masks alone
    eager = last_states(own_model)
    assert shapes[2] == (4, 1, 13, 13)
    assert (eager[0] - dense[0]).abs().max() <= 1e-5 * dense[0].abs().max()


def test_short_rows_are_read_by_branch_where_that_halves_the_scores(own_model: Network) -> None:
    many = torch.tensor([[0] * 4 + [number for number in range(1, 9) for _ in range(4)]] * 2)  # 8 x 8 and 7 times 4 x 8 of 36 x 36 scores
    assert attention.packed_mask(own_model.internvl.model.language_model, many).shape == (2, 1, 1, 36)
    unlike = torch.tensor([[0] * 32 + [1, 1, 2, 2], [0, 0] + [1] * 17 + [2] * 17])  # padded as if both had both
    assert attention.packed_mask(own_model.internvl.model.language_model, unlike).shape == (2, 1, 36, 36)


def test_a_batch_without_a_second_branch_is_plainly_causal() -> None:
    branch = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, -1, -1]])
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, heads, 5, 8, generator=generator) for heads in (4, 2, 2))
    found, _ = attention.attend(torch.nn.Module(), query, key, value, branch[:, None, None])
    repeated = (x.repeat_interleave(2, dim=1) for x in (key, value))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, *repeated, attn_mask=branch_attention(branch)[:, None]).transpose(1, 2)
    assert (found - wanted)[branch >= 0].abs().max() <= 1e-6
    assert (found[branch < 0] == 0).all()


def test_a_block_mask_allows_what_the_dense_mask_does():
    """257 tokens are three blocks on a side. Of branch 1's rows, the block of the prefix alone is full, and branch 2's is skipped."""
    branch = torch.tensor([[0] * 130 + [1] * 100 + [2] * 27, [0] * 40 + [1] * 20 + [-1] * 197])
    blocks = attention.block_mask(branch)
    assert isinstance(blocks, BlockMask)
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 2, 257, 8, generator=generator) for _ in range(3))
    wanted = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=branch_attention(branch)[:, None])
    assert (flex_attention(query, key, value, block_mask=blocks) - wanted).abs().max() <= 1e-5
    assert blocks.kv_num_blocks[1, 0].tolist() == [1, 1, 1]  # padding reads itself


def test_a_model_reads_the_block_mask_as_it_reads_branches(own_model: Network, monkeypatch: pytest.MonkeyPatch):
    """What a GPU runs, but for the compiled kernel: torch's FlexAttention has no backward pass on a CPU, and compiles for half a minute."""
    ids = torch.randint(5, 100, ROWS.shape, generator=torch.Generator().manual_seed(0))
    places = torch.arange(ROWS.shape[1]).expand_as(ROWS)
    packed = Packed(input_ids=ids, position_ids=places, branch=ROWS, loss_mask=torch.zeros_like(ids, dtype=torch.bool))
    kinds: list[type] = []
    first = own_model.internvl.model.language_model.layers[0].self_attn
    first.register_forward_pre_hook(lambda module, args, given: kinds.append(type(given["attention_mask"])), with_kwargs=True)
    with torch.no_grad():
        apart = own_model.hidden_states(packed, [None] * len(ROWS))
        monkeypatch.setattr("ans_core.model.network.packed_mask", lambda language_model, branch: attention.block_mask(branch))
        with torch.compiler.set_stance("force_eager"):
            blocks = own_model.hidden_states(packed, [None] * len(ROWS))
    assert kinds == [Tensor, BlockMask]
    assert (blocks - apart)[ROWS >= 0].abs().max() <= 1e-5 * apart.abs().max()
