"""The contents of a model folder's config.json: the sizes of both parts, and how text and pictures are prepared for them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ans_core.model.grounding import GroundingConfig

VideoMode = Literal["sa2va", "sa2va-i"]
"""How masks go through a clip. `sa2va`: the seen frames are decoded from the seg embedding and the trained decoder propagates their masks.
`sa2va-i`: their masks prompt SAM2 as it was before training (kumuji/Sa2VA-i), which scores higher with the same weights."""


FrameChoice = Literal["first", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Sa2VAConfig:
    """The contents of config.json."""

    internvl: dict[str, Any]
    """transformers' InternVLConfig as a dict."""
    grounding: GroundingConfig
    template: str
    max_tiles: int = 12
    """Most tiles of an image (dynamic tiling); 1 = always one tile. A frame of a video is one tile."""
    video_frames: int = 5
    """Number of frames of a video that the language model sees and that condition the masks."""
    frame_choice: FrameChoice = "uniform"
    """Which frames these are in video mode `sa2va`: the first ones (upstream's inference) or evenly spread ones (closer to training, which
    samples the whole clip). Mode `sa2va-i` always spreads them."""

    def as_dict(self) -> dict[str, Any]:
        return {"model_type": "ans_sa2va", **asdict(self)}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sa2VAConfig:
        values = {k: v for k, v in values.items() if k != "model_type"}
        check_frames(values.get("video_frames", 1), values.get("frame_choice", "first"))
        sizes: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.pop("grounding").items()}
        return cls(grounding=GroundingConfig(**sizes), **values)


def check_frames(count: object, choice: object) -> None:
    """Raise ValueError unless `count` and `choice` are valid for the seen frames of a clip."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{count!r} frames of a clip; give a whole number from 1")
    if choice not in get_args(FrameChoice):
        raise ValueError(f"frame choice {choice!r}; there are {', '.join(get_args(FrameChoice))}")
