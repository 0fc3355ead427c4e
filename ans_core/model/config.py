"""The contents of a model folder's config.json: the sizes of both parts, and how text and pictures are
prepared for them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal, get_args

from ans_core.model.backbones import BACKBONES
from ans_core.model.grounding import GroundingConfig

VideoMode = Literal["sa2va", "sa2va-i", "keyframe"]
"""How masks go through a clip. `sa2va`: the seen frames are decoded from the seg embedding and the trained
decoder propagates their masks. `sa2va-i`: their masks prompt SAM2 as it was before training (kumuji/Sa2VA-i),
which scores higher with the same weights. `keyframe`: the trained decoder propagates the mask of one seen
frame, the one whose track agrees best with those of the others."""


FrameChoice = Literal["first", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Sa2VAConfig:
    """The contents of config.json."""

    kind: str = "internvl"
    """Kind of the vision-language model, one of BACKBONES; in the file, the name of `backbone`. (PEFT takes a
    config with a `model_type` for transformers' own.)"""
    backbone: dict[str, Any]
    """transformers' configuration of it as a dict."""
    grounding: GroundingConfig
    template: str
    max_tiles: int | None = None
    """InternVL: most tiles of an image (dynamic tiling); 1 = always one tile. A frame of a video is one
    tile."""
    min_tiles: int | None = None
    """InternVL: fewest tiles of an image; None = 1."""
    min_pixels: int | None = None
    """Qwen-VL: an image is enlarged to so many pixels, a frame of a clip to a quarter of them; None =
    upstream's number."""
    max_pixels: int | None = None
    """Qwen-VL: the most pixels, likewise."""
    video_frames: int = 5
    """Number of frames of a video that the language model sees and that condition the masks."""
    frame_choice: FrameChoice = "uniform"
    """Which frames these are in video mode `sa2va`: the first ones (upstream's inference) or evenly spread
    ones (closer to training, which samples the whole clip). The other modes always spread them."""
    seg_object_score: bool = False
    """Whether the object score was trained for `[SEG]` (sft.object_weight): its masks are then blank where
    the score is negative. Upstream's was not."""

    def as_dict(self) -> dict[str, Any]:
        values = {key: value for key, value in asdict(self).items() if value is not None}
        return {"model_type": "ans_sa2va", values.pop("kind"): values.pop("backbone"), **values}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Sa2VAConfig:
        values = {k: v for k, v in values.items() if k != "model_type"}
        check_frames(values.get("video_frames", 1), values.get("frame_choice", "first"))
        sizes: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in values.pop("grounding").items()
        }
        kinds = [key for key in values if key in BACKBONES]
        if len(kinds) != 1:
            raise ValueError(
                f"it holds the sizes of {len(kinds)} vision-language models; give those of one: "
                f"{', '.join(BACKBONES)}"
            )
        return cls(grounding=GroundingConfig(**sizes), kind=kinds[0], backbone=values.pop(kinds[0]), **values)


def check_frames(count: object, choice: object) -> None:
    """Raise ValueError unless `count` and `choice` are valid for the seen frames of a clip."""
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ValueError(f"{count!r} frames of a clip; give a whole number from 1")
    if choice not in get_args(FrameChoice):
        raise ValueError(f"frame choice {choice!r}; there are {', '.join(get_args(FrameChoice))}")
