"""Similarity of two phrases by a text encoder (GranD-f's recall uses BERT base uncased)."""

from __future__ import annotations

import functools
import math


class PhraseEncoder:
    """Cosine of two phrases' vectors: the mean of the encoder's last hidden states, special tokens included,
    as GLaMM's evaluation does."""

    def __init__(self, model: str) -> None:
        """Load `model`: a folder or hub id that AutoModel and AutoTokenizer know."""
        from transformers import AutoModel, AutoTokenizer

        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.model = AutoModel.from_pretrained(model).eval()
        self.vector = functools.lru_cache(maxsize=100_000)(self._vector)

    def _vector(self, phrase: str) -> tuple[float, ...]:
        import torch

        with torch.inference_mode():
            tokens = self.tokenizer(phrase, return_tensors="pt", max_length=512, truncation=True)
            return tuple(self.model(**tokens).last_hidden_state[0].mean(0).tolist())

    def __call__(self, one: str, other: str) -> float:
        a, b = self.vector(one), self.vector(other)
        norm = math.hypot(*a) * math.hypot(*b)
        return sum(x * y for x, y in zip(a, b, strict=True)) / norm if norm else 0.0
