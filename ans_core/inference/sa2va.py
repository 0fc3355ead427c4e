"""The front: a folder or a hub id in, a model that answers about pictures and clips out. `from ans_core.model
import Sa2VA`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from ans_core.checkpoints import checkpoint
from ans_core.data.views import Preparation
from ans_core.inference.clicks import Box, Point, with_clicks
from ans_core.inference.options import Constants, PredictOptions, TinyRegions
from ans_core.inference.predict import Answer, ClipAnswer, answers, follow, in_batches
from ans_core.inference.requests import Region, request_of
from ans_core.model.config import FrameChoice, VideoMode
from ans_core.model.network import Network
from ans_core.pictures import media
from ans_core.types import Request


class Sa2VA(Network):
    """The network with its front: load it, ask it, follow what it finds through a video."""

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        dtype: torch.dtype | str | None = None,
        device_map: torch.device | str | None = None,
        attn_implementation: str | None = None,
        quantize: str | None = None,
        torch_dtype: torch.dtype | str | None = None,
    ) -> Sa2VA:
        """Load a model in eval mode from a folder in our layout or upstream's, or from the hub, whose files
        are then kept in its cache.

        path: a folder, or a hub id such as ByteDance/Sa2VA-4B. dtype: torch's or its name; None and "auto"
        keep what is stored. device_map: one device; "auto" is a GPU if there is one. attn_implementation:
        transformers' name ("sdpa", "eager"); None is its choice. quantize: "int8" or "fp8", the language
        model's layers in 8 bits by torchao (an extra); SAM2, the vision tower, embeddings and heads stay as
        they are. For inference alone. torch_dtype: transformers' older name of `dtype`. Raises ValueError for
        a dtype that holds no weights or is given twice, a device that is not there or can't do it, and a
        folder that is no Sa2VA.
        """
        if torch_dtype is not None:
            if dtype is not None:
                raise ValueError(
                    f"dtype {dtype!r} and torch_dtype {torch_dtype!r} are the same setting: give one of them"
                )
            dtype = torch_dtype
        return checkpoint.from_pretrained(
            cls,
            path,
            dtype=dtype,
            device_map=device_map,
            attn_implementation=attn_implementation,
            quantize=quantize,
        )

    def predict(
        self,
        *,
        text: str,
        image: media.Picture | None = None,
        video: media.Video | None = None,
        past: Sequence[tuple[str, str]] | None = None,
        mask_prompts: Sequence[Region] | np.ndarray | None = None,
        point_prompts: Sequence[Point] = (),
        box_prompts: Sequence[Box] = (),
        max_tokens: int = 2048,
        video_mode: Literal[VideoMode, "auto"] = "auto",
        constants: Constants = "fp32",
        tiny_regions: TinyRegions = "largest",
        preparation: Preparation = "training",
        frames: int | None = None,
        frame_choice: FrameChoice | None = None,
    ) -> Answer:
        """Answer a question with a text and a mask per `[SEG]` in it: upstream's `predict_forward`.

        text: holds `<image>` where the picture or the frames go. White space at its ends is removed, as in
        training; upstream keeps it. image, video: seen upright as an EXIF tag says, and so are the masks. A
        video is a file, a folder of frames, the frames, or one array (F, H, W, 3). past: (question, answer)
        of the turns before, the first with `<image>`. mask_prompts: regions of the first frame, (H, W),
        called region1, region2, ... in the text. point_prompts, box_prompts: more regions, counting on: the
        objects at (x, y) and in (x1, y1, x2, y2), in pixels, as SAM2 finds them. frames, frame_choice: how
        many frames of a clip the language model sees, and which; None is what the checkpoint says. constants,
        tiny_regions, preparation: see `ans_core.inference.options`; upstream's numbers need "bf16", "none"
        and "upstream". Raises ValueError for a question that makes no sense, naming what does not fit.
        """
        request = request_of(text=text, image=image, video=video, past=past, mask_prompts=mask_prompts)
        request = with_clicks(self, request, request.frames, points=point_prompts, boxes=box_prompts)
        return self.predict_many(
            [request],
            max_tokens=max_tokens,
            video_mode=video_mode,
            constants=constants,
            tiny_regions=tiny_regions,
            preparation=preparation,
            frames=frames,
            frame_choice=frame_choice,
        )[0]

    def predict_many(
        self,
        requests: Sequence[Request],
        *,
        max_tokens: int = 2048,
        batch: int = 8,
        video_mode: Literal[VideoMode, "auto"] = "auto",
        constants: Constants = "fp32",
        tiny_regions: TinyRegions = "largest",
        preparation: Preparation = "training",
        frames: int | None = None,
        frame_choice: FrameChoice | None = None,
    ) -> list[Answer]:
        """Answer any mixture of pictures, clips and plain text as `predict` does. `request_of` of
        ans_core/inference/requests.py makes requests."""
        if max_tokens < 1 or batch < 1:
            raise ValueError(f"max_tokens is {max_tokens} and batch {batch}; give whole numbers above 0")
        mode = self.video_mode(video_mode)
        options = PredictOptions(
            mode=mode,
            constants=constants,
            tiny_regions=tiny_regions,
            preparation=preparation,
            frames=frames,
            frame_choice=frame_choice,
        )
        return in_batches(requests, batch, lambda some: answers(self, some, options, max_tokens=max_tokens))

    def follow(
        self,
        *,
        text: str,
        video: media.Video,
        past: Sequence[tuple[str, str]] | None = None,
        mask_prompts: Sequence[Region] | np.ndarray | None = None,
        point_prompts: Sequence[Point] = (),
        box_prompts: Sequence[Box] = (),
        max_tokens: int = 2048,
        video_mode: Literal[VideoMode, "auto"] = "auto",
        constants: Constants = "fp32",
        tiny_regions: TinyRegions = "largest",
        preparation: Preparation = "training",
        frames: int | None = None,
        frame_choice: FrameChoice | None = None,
    ) -> ClipAnswer:
        """Answer about a video of any length as `predict` does: return the text and an iterator of (index,
        masks (N, H, W)), as `text, masks = model.follow(...)`.

        A few frames of a video file or a folder are held at a time; frames given as pixels are held as long
        as the iterator. In video mode `keyframe` all of them are read, and followed to the end, before the
        first masks come."""
        if max_tokens < 1:
            raise ValueError(f"max_tokens is {max_tokens}; give a whole number above 0")
        seen = media.clip(video)
        request = request_of(text=text, past=past, mask_prompts=mask_prompts)
        request = with_clicks(self, request, seen, points=point_prompts, boxes=box_prompts)
        mode = self.video_mode(video_mode)
        options = PredictOptions(
            mode=mode,
            constants=constants,
            tiny_regions=tiny_regions,
            preparation=preparation,
            frames=frames,
            frame_choice=frame_choice,
        )
        return follow(self, request, seen, options, max_tokens=max_tokens)
