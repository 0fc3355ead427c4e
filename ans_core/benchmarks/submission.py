"""Write samples and predictions as the files that benchmark servers and public scorers take."""

from __future__ import annotations

import io
import json
import re
import zipfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from ans_core import rle
from ans_core.benchmarks.score import check_pairs
from ans_core.metrics.grounding import phrases, plain_caption
from ans_core.types import Prediction, Sample


def write_video_zip(path: Path, samples: Sequence[Sample], predictions: Sequence[Prediction]) -> None:
    """Write MeViS val, Ref-YouTube-VOS: `Annotations/<video>/<expression>/<frame>.png`, grey, 0 or 255. The first `[SEG]` counts; none =
    empty masks. Sample ids are <video>_<expression>, as the format's reader gives them."""
    check_pairs(samples, predictions)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:  # PNG is already compressed
        for sample, prediction in zip(samples, predictions, strict=True):
            expression = sample.sample_id.removeprefix(f"{sample.image_id}_")
            nothing = rle.empty(sample.height, sample.width)
            masks = prediction.masks[0] if prediction.masks else (nothing,) * len(sample.frames)
            for frame, mask in zip(sample.frames, masks, strict=True):
                if not isinstance(frame, Path):
                    raise ValueError(f"sample {sample.sample_id}: a frame without a file name; the server asks for it")
                png = io.BytesIO()
                Image.fromarray(rle.decode(mask or nothing) * np.uint8(255)).save(png, "PNG")
                archive.writestr(f"Annotations/{sample.image_id}/{expression}/{frame.stem}.png", png.getvalue())


def write_gcg_folder(folder: Path, samples: Sequence[Sample], predictions: Sequence[Prediction]) -> None:
    """Write GranD-f: `<image_id>.json` {"image_id", "caption", "phrases", "pred_masks"}, one phrase per mask."""
    check_pairs(samples, predictions)
    folder.mkdir(parents=True, exist_ok=True)
    for sample, prediction in zip(samples, predictions, strict=True):
        if not re.fullmatch(r"[\w.-]+", sample.image_id):
            raise ValueError(f"sample {sample.sample_id}: image id {sample.image_id!r} is no file name")
        nothing = rle.empty(sample.height, sample.width)
        record = {
            "image_id": sample.image_id,
            "caption": plain_caption(prediction.text),
            "phrases": phrases(prediction.text),
            "pred_masks": [masklet[0] or nothing for masklet in prediction.masks],
        }
        (folder / f"{sample.image_id}.json").write_text(json.dumps(record), encoding="utf-8")
