"""A PrefilledBatch -> token ids of answers by greedy search, their text, and the embeddings of their `[SEG]`
tokens."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core import prompts
from ans_core.inference.decoding import decode
from ans_core.inference.prefill import PrefilledBatch, left_padded
from ans_core.model.network import Network


def generate(
    model: Network, prompted: PrefilledBatch, *, max_tokens: int, forbidden: Sequence[int] = ()
) -> list[list[int]]:
    """Generate the token ids of every answer by greedy search. The end-of-turn token is included if the
    answer reached it.

    Image slots are suppressed: no picture could fill them when the answer is read again. So are `forbidden`
    tokens.
    """
    banned = torch.tensor([model.image_token_id, *forbidden], device=model.device)

    def likeliest(logits: Float[Tensor, "R V"], count: Tensor) -> Tensor:
        return logits.index_fill(1, banned, -torch.inf).argmax(1)

    out = decode(model, prompted, answers=1, max_tokens=max_tokens, choose=likeliest, **stopping(model))
    return [cut_at_stop(model, row)[0] for row in out.tolist()]


def stop_ids(model: Network) -> list[int]:
    """Return the ids that end an answer: the tokenizer's end of text and the template's stop words that are
    one token. (One that the tokenizer does not know may be its token for that: it comes back as another
    text. Qwen's own token for that, `<|endoftext|>`, is a stop word.)"""
    tokenizer = model.tokenizer
    single = {
        ids[0] for word, ids in _stop_words(model).items() if len(ids) == 1 and tokenizer.decode(ids) == word
    }
    return sorted({*single, tokenizer.eos_token_id} - {None})


def _stop_texts(model: Network) -> list[str]:
    """Return the template's stop words that are several tokens, such as those of `phi3_chat` for Sa2VA-4B's
    Qwen tokenizer."""
    return [word for word, ids in _stop_words(model).items() if len(ids) > 1]


def _stop_words(model: Network) -> dict[str, list[int]]:
    words = prompts.TEMPLATES[model.config.template].stop_words
    return {word: model.tokenizer.encode(word, add_special_tokens=False) for word in words}


def stopping(model: Network) -> dict[str, Any]:
    """Return the arguments of `decode` that say where an answer ends."""
    texts = _stop_texts(model)
    return {
        "stops": stop_ids(model),
        "ended": (lambda rows: [cut_at_stop(model, row)[1] for row in rows]) if texts else None,
    }


def cut_at_stop(model: Network, ids: list[int]) -> tuple[list[int], bool]:
    """Cut generated ids after the token that ends the answer. Also return whether there was one."""
    stops, texts = stop_ids(model), _stop_texts(model)

    def holds_stop(length: int) -> bool:
        decoded = str(model.tokenizer.decode(ids[:length]))
        return any(text in decoded for text in texts)

    by_text = (
        bisect_left(range(len(ids)), True, key=lambda place: holds_stop(place + 1)) if texts else len(ids)
    )
    end = next((place for place, token in enumerate(ids[:by_text]) if token in stops), by_text)
    return ids[: end + 1], end < len(ids)


def text_of(model: Network, ids: list[int]) -> str:
    """Decode ids. Special tokens are kept; a stop word of several tokens is cut from the end."""
    text = model.tokenizer.decode(ids)
    assert isinstance(text, str)
    for stop in _stop_texts(model):
        text = text.removesuffix(stop)
    return text


def spoken_ids(model: Network, ids: list[int]) -> list[int]:
    """Remove the end-of-turn token. A stop word of several tokens stays: its first token may hold the
    answer's last letters."""
    return ids[:-1] if ids and ids[-1] in stop_ids(model) else ids


def seg_embeddings_of(
    model: Network, prompted: PrefilledBatch, ids: list[list[int]]
) -> list[Float[Tensor, "_ C"]]:
    """Compute the seg embeddings of every row in one forward pass over prompt and answer, so that the states
    are those of training."""
    drawing = [
        torch.cat(
            [
                prompted.segs[i][prompted.attention[i]],
                torch.tensor(row, device=model.device) == model.seg_token_id,
            ]
        )
        for i, row in enumerate(ids)
    ]
    rows = [i for i, segs in enumerate(drawing) if segs.any()]
    empty = torch.zeros(0, model.config.grounding.width, device=model.device)
    embeddings = [empty] * len(ids)
    if not rows:
        return embeddings
    answer_embeds = [
        model.embed_text(torch.tensor(row, dtype=torch.long, device=model.device)) for row in ids
    ]
    rest = left_padded(
        [torch.cat([prompted.embeds[i][prompted.attention[i]], answer_embeds[i]]) for i in rows]
    )
    begun = prompted.prefix_of[rows]
    attention = torch.cat([prompted.prefix_attention[begun], rest["attention"]], dim=1)
    hidden, _ = model.backbone.language_model(
        rest["embeds"],
        attention_mask=attention.long(),
        position_ids=prompted.positions(attention, begun)[:, prompted.prefixes.shape[1] :],
        cache=prompted.cache(begun),
    )
    for place, i in enumerate(rows):
        embeddings[i] = model.seg_embeddings(hidden[place, -len(drawing[i]) :][drawing[i]])
    return embeddings
