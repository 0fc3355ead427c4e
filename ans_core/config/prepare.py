"""Settings of the stage `prepare`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from ans_core.config.names import FormatName
from ans_core.config.section import LARGEST, Count, Impossible, Listed, Name, Positive, Section


def _splits(value: Any) -> Any:
    names = value if isinstance(value, list | tuple) else [value]
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"{value!r} is neither a name of a split nor a list of names")
    return tuple(value) if isinstance(value, list) else value


class DataSource(Section):
    """One annotated data set on disk, in one of the formats of ans_core/data/formats."""

    name: Name
    format: FormatName
    path: Name
    split: Annotated[Name | tuple[Name, ...], BeforeValidator(_splits)] = "train"
    """One of the set's splits, which keeps its name; or a list of its splits (patterns too, as "Part*"),
    which are trained on as one."""
    repeats: Positive = 1
    """Factor on the set's size when data sets divide their share of the mixture: its epochs relative to those
    of a set with 1."""
    hold_out: Annotated[float, Field(ge=0, le=0.5)] = 0.0
    """Share of the pictures to evaluate on, as split `val` of a set that has no such split (Grasp-Any-Region,
    describe-anything); a hash of the picture's name chooses them, and training does not see them."""
    files: str = ""
    """Fingerprint of the files, written by `ans run` when it last saw them; it tells DVC that they
    changed."""

    @property
    def role(self) -> str:
        """The split that stages find the samples in."""
        return self.split if isinstance(self.split, str) else "train"

    @property
    def parts(self) -> tuple[str, ...]:
        """The set's splits that are trained on as one; empty: the one of its role."""
        return () if isinstance(self.split, str) else self.split


class Prepare(Section):
    """Draws the embedded world (unless scenes = 0) and checks every data set before anything is trained."""

    scenes: Count = 6000
    """Still training scenes to draw; 0 draws none (full-size runs on real data)."""
    val_scenes: Count = 300
    test_scenes: Count = 300
    clips: Count = 300
    val_clips: Count = 60
    test_clips: Count = 60
    clip_frames: Positive = 8
    caption_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the drawn training pictures whose captions (of regions and of the picture) are known. Of the
    others there are masks alone, which the stage `rl` can practise captions on, if `rl.rewards_caption`
    compares with no true caption."""
    mask_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of the drawn training pictures whose masks are known, from the last one on (captions: from the
    first one on). Of the others there are captions of things alone, no expressions and no caption of the
    picture. The stage `rl` can practise masks on them, if `rl.rewards_mask` compares with no true mask and
    `rl.mask_weight` is 0; otherwise they serve nothing."""
    image_size: Annotated[int, Field(ge=16, le=LARGEST)] = 128
    """Side of a drawn scene in pixels."""
    world: Literal["full", "small"] = "full"
    """small: three shapes, four colours and no textures, which a model learns in minutes."""
    sources: Listed[DataSource] = ()
    """Real data sets, in addition to or instead of the drawn ones: trained on together, evaluated
    separately."""

    @model_validator(mode="after")
    def _some_have_both(self) -> Prepare:
        if (both := self.caption_share + self.mask_share) <= 1:
            raise Impossible(
                "mask_share",
                f"with caption_share it makes {both:g}: no picture has both captions and masks, which "
                "`base` needs",
            )
        return self
