"""Token after token: the one loop in which a language model continues the requests of a PrefilledBatch.

All that a token needs lies on the device, and nothing is read back until CHECK_EVERY tokens are there. Keys
and values have their room from the start, so every token is the same computation on the same memory, which a
GPU records once as a CUDA graph and repeats: at 64 rows a 4B model launches some 2,500 kernels for a token,
and launching them takes longer than they do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from ans_core.inference.prefill import PrefilledBatch, read_ahead
from ans_core.model.adapters import lora_in
from ans_core.model.attention import Memory
from ans_core.model.compiling import compiled
from ans_core.model.network import Network

CHECK_EVERY = 8
"""Tokens after which a GPU, or a tokenizer that must look for a stop word, is asked which answers have
ended."""
EVEN = 16
"""Of which the lengths of prompts and answers are multiples: a GPU's matrix products are slow on odd ones."""
FIXED_ROPE = ("default", "linear", "yarn", "llama3")
"""Rotary embeddings whose frequencies don't depend on the longest row; others (dynamic NTK of InternLM2,
longrope) read it from the device for each token, which no graph can."""

Choose = Callable[[Float[Tensor, "R V"], Int[Tensor, " 1"]], Int[Tensor, " R"]]
"""Logits in fp32 and the number of this token -> the token of each row. It must not read the device."""


@torch.no_grad()
def decode(
    model: Network,
    prompted: PrefilledBatch,
    *,
    answers: int,
    max_tokens: int,
    choose: Choose,
    stops: list[int],
    ended: Callable[[list[list[int]]], list[bool]] | None = None,
) -> Int[Tensor, "R L"]:
    """Continue each of the B requests `answers` times: R = B x answers rows, in request order.

    Ends after `max_tokens`, or when every row has one of `stops` or is said to have `ended`: asked every
    CHECK_EVERY tokens, on a CPU `stops` after each. A row goes on behind its end until all have ended; what
    it says there means nothing.
    """
    prompted = read_ahead(model, prompted)
    text = _Text.begin(model, prompted, answers=answers, max_tokens=max_tokens)
    stop = torch.tensor(stops, device=model.device)

    def one_token() -> None:
        states, _ = model.backbone.language_model(
            text.embeds,
            attention_mask=text.prompt,
            position_ids=text.positions,
            use_cache=False,
            count=text.count,
        )
        token = choose(model.logits(states[:, -1]), text.count)
        text.ids.index_copy_(1, text.count, token[:, None])
        text.stopped.logical_or_(torch.isin(token, stop))
        text.embeds.copy_(model.vlm.get_input_embeddings()(token)[:, None])
        text.positions.add_(1)
        text.count.add_(1)

    every = CHECK_EVERY if model.device.type == "cuda" else 1
    compiled_layers = compiled(
        model.vlm.model.language_model, on=model.compiled, each=[{"memory": memory} for memory in text.memory]
    )
    with _half_adapters(model), compiled_layers, _repeated(one_token, graph=_can_be_a_graph(model)) as step:
        for count in range(1, max_tokens + 1):
            step()
            if count % every == 0 and bool(text.stopped.all()):
                break
            if ended is not None and count % CHECK_EVERY == 0:
                by_text = torch.tensor(ended(text.ids[:, :count].tolist()), device=model.device)
                if bool((text.stopped | by_text).all()):
                    break
    return text.ids[:, :count]


@dataclass(frozen=True, kw_only=True)
class _Text:
    """What R rows have said so far, in memory that stays. Everything is changed in place."""

    memory: list[Memory]
    """Of every layer."""
    prompt: Bool[Tensor, "B 1 1 P"]
    """The places of the prompts that hold a token."""
    count: Int[Tensor, " 1"]
    """Number of the next token in the answer."""
    positions: Int[Tensor, "R 1"]
    """Its rotary position."""
    embeds: Float[Tensor, "R 1 D"]
    """Its embedding: of the prompt's last token at first, then of the token said last."""
    ids: Int[Tensor, "R L"]
    stopped: Bool[Tensor, " R"]

    @staticmethod
    def begin(model: Network, prompted: PrefilledBatch, *, answers: int, max_tokens: int) -> _Text:
        """Make room for the answers; all of a prompt but its last token has been read."""
        prefix, device = prompted.prefix_of, model.device
        prompt = prompted.prefix_attention[prefix]
        last = prompted.positions(torch.cat([prompt, prompted.attention], dim=1), prefix)[:, -1:]
        layers: list[Any] = prompted.prefix_cache.layers
        request = torch.arange(len(last), device=device).repeat_interleave(answers)  # of every row
        rows, size, uneven = len(request), -(-max_tokens // EVEN) * EVEN, -prompt.shape[1] % EVEN

        def memory(keys: Float[Tensor, "_ K _ d"], values: Float[Tensor, "_ K _ d"]) -> Memory:
            # Rotated keys are fp32 where the residual stream is; autocast would cast all of them for every
            # token.
            dtype = _autocast_dtype(model) or keys.dtype
            # zeros: what is not read yet must not be NaN
            room = keys.new_zeros(2, rows, keys.shape[1], size, keys.shape[3], dtype=dtype)
            of_prompts = (F.pad(x[prefix].to(dtype), (0, 0, uneven, 0)) for x in (keys, values))
            return *of_prompts, *room

        return _Text(
            memory=[memory(layer.keys, layer.values) for layer in layers],
            prompt=F.pad(prompt, (uneven, 0))[:, None, None],
            count=torch.zeros(1, dtype=torch.long, device=device),
            positions=last[request],
            embeds=prompted.embeds[request, :, : model.vlm.config.text_config.hidden_size],
            ids=torch.zeros(rows, max_tokens, dtype=torch.long, device=device),
            stopped=torch.zeros(rows, dtype=torch.bool, device=device),
        )


def _half_adapters(model: Network) -> AbstractContextManager[None]:
    """Cast LoRA's fp32 factors once, not for every token, where autocast would cast them."""
    dtype = _autocast_dtype(model)
    return nullcontext() if dtype is None else lora_in(dtype, model)


def _autocast_dtype(model: Network) -> torch.dtype | None:
    kind = model.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


def _can_be_a_graph(model: Network) -> bool:
    rope: dict[str, object] = getattr(model.vlm.config.text_config, "rope_parameters", None) or {}
    return model.device.type == "cuda" and rope.get("rope_type", "default") in FIXED_ROPE


@contextmanager
def _repeated(step: Callable[[], None], *, graph: bool) -> Iterator[Callable[[], None]]:
    """Return what does a step. As a graph: the first call computes it, the second records it, and from there
    on it is replayed."""
    if not graph:
        yield step
        return
    recorded = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    calls = 0

    def replayed() -> None:
        nonlocal calls
        calls += 1
        if calls == 1:  # makes what libraries make at a first call: handles, workspaces, compiled kernels
            step()
        else:
            if calls == 2:
                # a loader's thread may pin memory meanwhile
                recorded.capture_begin(capture_error_mode="thread_local")
                step()
                recorded.capture_end()
            recorded.replay()

    # A weight that autocast casts while recording would lie in the graph's memory, and outside of it be read
    # as if it were whole.
    cached = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.cuda.stream(stream):
            yield replayed
    finally:
        torch.set_autocast_cache_enabled(cached)
        stream.synchronize()  # before the graph's memory goes
