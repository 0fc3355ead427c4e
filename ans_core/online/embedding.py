"""A question and its overview -> the hybrid vector by which experiences are neighbours, of the frozen base
alone."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.agent.crops import Crop, CropFeatures, pooled, pooled_grey
from ans_core.agent.policy import AgentPolicy
from ans_core.online.neighbours import hybrid

KIND = "3 x 3 cells against grey, words, 128 + 128, 1"
"""Part of an encoder's name: another way to make vectors would be another encoder."""
SIZE = 128


def encoder_name(base_hash: str) -> str:
    return f"{base_hash}: {KIND}"


class Encoder:
    """Makes vectors with a policy's base; its adapters are off. For one thread."""

    def __init__(self, policy: AgentPolicy, features: CropFeatures) -> None:
        self.policy, self.features = policy, features
        self._grey = pooled_grey(features)

    @torch.no_grad()
    def vector(self, question: str, overview: Crop) -> Float[np.ndarray, " K"]:
        """Return [visual, text]. Visual: the vision tower's cells of the overview (of a tiled picture, of its
        thumbnail), pooled to 3 x 3, less those of a grey picture: what all pictures have in common would make
        any two alike. Text: the tokens' mean embedding."""
        (seen,) = self.features.of([overview])
        model = self.policy.model
        ids = model.tokenizer.encode(question, add_special_tokens=False)
        with self.policy.base():
            words = model.vlm.get_input_embeddings()(torch.tensor(ids, device=model.device, dtype=torch.long))
        return hybrid(
            _projected((pooled(seen) - self._grey).flatten(), "visual"),
            _projected(words.float().mean(0).cpu(), "text"),
        )


def _projected(values: Float[Tensor, " C"], kind: str) -> Float[np.ndarray, " K"]:
    return np.asarray(values.numpy() @ _projection(len(values), kind))


@lru_cache(maxsize=4)
def _projection(size: int, kind: str) -> Float[np.ndarray, "C K"]:
    """A fixed Gaussian map: cosines stay as they are, but for about 1 / sqrt(128) (Johnson and
    Lindenstrauss)."""
    rng = np.random.default_rng([size, len(kind)])
    return (rng.standard_normal((size, SIZE)) / np.sqrt(SIZE)).astype(np.float32)
