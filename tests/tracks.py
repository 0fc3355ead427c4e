"""All frames of a clip followed at once, where `Grounding.propagate` gives them one by one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from ans_core.model.grounding import FrameFeatures, Grounding, Prompts, in_order


def track(
    sam2: Grounding,
    features: FrameFeatures,
    seg_embeddings: Float[Tensor, "N C"],
    *,
    conditioning: Sequence[int],
) -> Float[Tensor, "N F h4 w4"]:
    """Track N objects through F frames. Those in `conditioning` are decoded from the seg embeddings alone."""
    return propagated(sam2, features, sam2.seg_prompts(seg_embeddings, conditioning), len(seg_embeddings))


def propagated(
    sam2: Grounding, features: FrameFeatures, prompts: Prompts, objects: int
) -> Float[Tensor, "N F h4 w4"]:
    """Return low-resolution mask logits of all frames."""
    frames = len(features.coarse)
    shown = ((index, features[[index]]) for index in in_order(prompts, frames))
    masks = dict(sam2.propagate(shown, prompts, objects=objects, frames=frames))
    return torch.stack([masks[index] for index in range(frames)], dim=1)
