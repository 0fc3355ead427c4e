import torch
import torch.nn.functional as F
from torch import nn

from ans_core.precision import autocast

CPU = torch.device("cpu")


def test_a_cpu_computes_attention_in_fp32_and_matrix_products_in_bf16():
    torch.manual_seed(0)
    linear, q = nn.Linear(8, 8), torch.randn(2, 2, 5, 8, requires_grad=True)
    mask = torch.zeros(2, 1, 5, 5, dtype=torch.bfloat16)
    with autocast(CPU, torch.bfloat16):
        hidden = linear(q)
        attended = F.scaled_dot_product_attention(hidden, hidden, hidden, attn_mask=mask)
    assert (hidden.dtype, attended.dtype) == (torch.bfloat16, torch.float32)
    wide = hidden.detach().float()
    assert torch.equal(attended, F.scaled_dot_product_attention(wide, wide, wide, attn_mask=mask.float()))
    attended.sum().backward()
    assert q.grad is not None
    assert q.grad.dtype == torch.float32
    assert bool(q.grad.any())


def test_options_of_attention_arrive():
    torch.manual_seed(0)
    q, kv = torch.randn(1, 4, 6, 8), torch.randn(1, 2, 6, 8)
    with autocast(CPU, torch.bfloat16):
        attended = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, scale=0.5, enable_gqa=True)
    assert torch.equal(attended, F.scaled_dot_product_attention(q, kv, kv, is_causal=True, scale=0.5, enable_gqa=True))


def test_fp32_is_no_autocast():
    with autocast(CPU, torch.float32):
        assert nn.Linear(2, 2)(torch.ones(1, 2)).dtype == torch.float32
