"""Ask a model about a picture or clip and write a folder: answer.json (with masks as RLE), masks/*.png, and
the overlay: PNG or MP4."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Literal

import av
import numpy as np
from av import VideoFrame
from jaxtyping import Bool
from PIL import Image, UnidentifiedImageError
from tqdm import tqdm

from ans_core.data.formats.plain import REGION
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.config import VideoMode
from ans_core.pictures import media, overlay, rle, transforms
from ans_core.types import RLE

MASK = re.compile(r"object\d+_frame\d{5,}\.png")
ANSWER = "answer.json"
OVERLAYS = ("overlay.png", "overlay.mp4")
SLOWEST_FPS, FASTEST_FPS = 0.001, 1000.0
"""Of an MP4, whose rate `save_video` writes as a fraction with a denominator of 1000 at most."""


def write_answer(
    source: Path,
    text: str,
    *,
    checkpoint: Path,
    out: Path,
    max_tokens: int,
    video_mode: Literal[VideoMode, "auto"],
    fps: float,
    past: Sequence[tuple[str, str]] = (),
    masks: Sequence[Path] = (),
    points: Sequence[str] = (),
    boxes: Sequence[str] = (),
    device: str = "auto",
    dtype: str | None = None,
    quantize: str | None = None,
) -> str:
    """Write the answer and return what to print about it. Earlier outputs in `out` are removed first, other
    files are kept. Only a few frames of a clip are in memory at a time.

    If no question has `<image>`, it is put before the first one. masks: pictures as large as the first frame,
    whose regions (all that is not black) are called region1, region2, ...; points ("X,Y"), then boxes
    ("X0,Y0,X1,Y1") in pixels of that frame count on from them. Raises ValueError for frames that differ in
    size, a source or others' files that would be removed, masks that don't fit, points and boxes that are
    none, a question about a region that is not given, and a rate that an overlay can't have.
    """
    check_fps(fps)
    if not text.replace("<image>", "").strip():
        raise ValueError('the question is empty; ask something, as "Please segment the dog."')
    old = former(out)
    with media.frames(source, scratch=out) as frames:
        check([source, *frames], frames, old, earlier="an earlier question")
        if foreign := [
            path for name in (ANSWER, *OVERLAYS) if (path := out / name).exists() and path not in old
        ]:
            raise ValueError(
                f"{foreign[0]} is not what an earlier question left there, and would be replaced; give "
                "another --out"
            )
        regions = read_masks(masks, transforms.image_size(frames[0]))
        clicks = {
            "point_prompts": [coordinates("point", point) for point in points],
            "box_prompts": [coordinates("box", box) for box in boxes],
        }
        text, turns = with_image(text, past)
        check_regions([*(question for question, _ in turns), text], len(masks) + len(points) + len(boxes))
        model = Sa2VA.from_pretrained(checkpoint, device_map=device, dtype=dtype, quantize=quantize)
        mode = model.video_mode(video_mode)
        record: dict[str, object] = {"source": str(source), "asked": text}
        record |= {"past": turns} if turns else {}
        arguments = {
            "text": text,
            "past": turns or None,
            "mask_prompts": regions,
            **clicks,
            "max_tokens": max_tokens,
        }
        mask_stream: Iterable[tuple[int, Iterable[np.ndarray]]]
        if len(frames) > 1:
            print(f"{len(frames)} frames, video mode {mode}")
            clip = model.follow(video=frames, video_mode=mode, **arguments)  # type: ignore[arg-type]
            answer_text, truncated = clip.text, clip.truncated
            mask_stream = iter(tqdm(clip.masks, total=len(frames), desc="frames"))
        else:
            answer = model.predict(image=frames[0], video_mode=mode, **arguments)  # type: ignore[arg-type]
            answer_text, truncated = answer.text, answer.truncated
            mask_stream = [(0, [mask[0] for mask in answer.masks])]
        remove(old)
        rles = write_masks(mask_stream, out / "masks")
        record |= {"text": answer_text, "masks": rles} | ({"video_mode": mode} if len(frames) > 1 else {})
        record |= {"truncated": True} if truncated else {}
        (out / ANSWER).write_text(json.dumps(record))
        shown = write_overlay(frames, rles, out, fps=fps)
    cut = f"the answer is cut after {max_tokens} tokens; more: --max-tokens\n" if truncated else ""
    return (
        f"{answer_text}\n{cut}{len(rles)} masks; {', '.join(map(str, [shown, out / ANSWER, out / 'masks']))}"
    )


def check_regions(questions: Sequence[str], count: int) -> None:
    """Raise ValueError for a question about a region beyond the `count` that are given."""
    for number in (number for question in questions for number in REGION.findall(question)):
        if not 1 <= int(number) <= count:
            raise ValueError(
                f"the question asks about region{number}, and {count} are given: give --mask, --point or --box "
                "for each; they count from 1"
            )


def with_image(text: str, past: Sequence[tuple[str, str]]) -> tuple[str, list[tuple[str, str]]]:
    """Return the question and the turns before it, with `<image>` in the first question of all."""
    questions = [*(question for question, _ in past), text]
    if not any("<image>" in question for question in questions):
        questions[0] = f"<image>\n{questions[0]}"
    return questions[-1], [
        (question, answer) for question, (_, answer) in zip(questions[:-1], past, strict=True)
    ]


def read_masks(paths: Sequence[Path], size: tuple[int, int]) -> np.ndarray | None:
    """Return (N, H, W); None without any. Raises ValueError, naming the file, for an unreadable picture, a
    wrong size, or an all-black mask."""
    regions = []
    for path in paths:
        mask = read_mask(path)
        if mask.shape[::-1] != size:
            raise ValueError(
                f"--mask {path} is {mask.shape[1]} x {mask.shape[0]}, the first frame {size[0]} x "
                f"{size[1]}: bring it to that"
            )
        if not mask.any():
            raise ValueError(f"--mask {path} is black all over: its region is what is not black")
        regions.append(mask)
    return np.stack(regions) if regions else None


def read_mask(path: str | Path | BytesIO, *, name: str = "") -> Bool[np.ndarray, "H W"]:
    """Read a mask: what is not black, or the one object of a PNG whose coloured palette numbers objects from
    1 (0 is black). name: of it in messages; empty = `--mask PATH`. Raises ValueError for several objects, in
    grey values, too, for a picture with transparent parts, and for no picture."""
    name = name or f"--mask {path}"
    try:
        picture = Image.open(path)
        numbered = picture.mode == "P" and _numbers_objects(picture)
        deep = picture.mode.startswith("I")  # 16 or 32 bits, of which conversion would leave 255
        labels = np.asarray(picture if numbered or deep else picture.convert("L"))
        clear = picture.has_transparency_data and bool(
            (np.asarray(picture.convert("RGBA"))[..., 3] < 255).any()
        )
    except UnidentifiedImageError as error:
        raise ValueError(f"{name} is no picture") from error
    except OSError as error:
        raise ValueError(f"{name} can't be read: {error}") from error
    if picture.mode == "F":
        raise ValueError(f"{name} has floating-point numbers; save it with 8 or 16 bits")
    if clear:
        raise ValueError(f"{name} has transparent parts; save it in black and white, the object white")
    objects = np.unique(labels[labels > 0])
    # 1, 2, ... n, as tools for VOS write; no shades
    grey = (deep or picture.mode == "L") and len(objects) == objects.max(initial=0)
    if (numbered or grey) and len(objects) > 1:
        raise ValueError(f"{name} holds the objects {', '.join(map(str, objects))}; give one file an object")
    return labels > 0


def _numbers_objects(picture: Image.Image) -> bool:
    palette = np.reshape(picture.getpalette() or [], (-1, 3))
    return len(palette) > 0 and not palette[0].any() and bool((palette != palette[:, :1]).any())


def coordinates(kind: str, value: str) -> tuple[float, ...]:
    """Read X,Y of a point, or X0,Y0,X1,Y1 of a box. Raises ValueError for anything else."""
    wanted = {"point": 2, "box": 4}[kind]
    try:
        numbers = tuple(float(word) for word in value.split(","))
    except ValueError:
        numbers = ()
    if len(numbers) != wanted or not np.isfinite(numbers).all():
        raise ValueError(
            f"--{kind} {value}: give {wanted} numbers with commas between them, in pixels of the picture"
        )
    return numbers


def former(out: Path) -> list[Path]:
    """List the outputs of earlier questions in a folder, including what a killed run had unpacked."""
    if not out.is_dir():
        return []
    masks = [path for path in out.glob("masks/*.png") if MASK.fullmatch(path.name)]
    files = [path for name in (ANSWER, *OVERLAYS) if (path := out / name).is_file()] if _answered(out) else []
    return [*masks, *files, *out.glob(f"{media.SCRATCH}*/")]


def _answered(out: Path) -> bool:
    """Tell whether the folder's answer.json is of an earlier question: it is written before the overlays."""
    try:
        record = json.loads((out / ANSWER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(record, dict) and {"asked", "text", "masks"} <= record.keys()


def check(
    read: Iterable[Path], frames: Sequence[Path], old: Sequence[Path], *, earlier: str, alike: bool = True
) -> None:
    """Check, before anything is computed or removed, that no file that is read is one of the `old` outputs,
    which are removed, and, if they are to be `alike`, that frames have one size. `earlier`: what left the old
    outputs, for the message."""
    removed = {path.resolve() for path in old}
    for path in read:
        if path.resolve() in removed:
            raise ValueError(f"{path} is what {earlier} left there, and would be removed; give another --out")
    sizes = {path: transforms.image_size(path) for path in frames}
    for path, size in sizes.items():
        if alike and size != (first := sizes[frames[0]]):
            raise ValueError(
                f"{path} is {size[0]} x {size[1]}, {frames[0]} {first[0]} x {first[1]}; bring the frames to "
                "one size"
            )


def remove(paths: Iterable[Path]) -> None:
    for path in paths:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def write_masks(mask_stream: Iterable[tuple[int, Iterable[np.ndarray]]], folder: Path) -> list[list[RLE]]:
    """Write masks as they arrive as (index, masks (N, H, W)); return their RLEs by object and frame."""
    folder.mkdir(parents=True, exist_ok=True)
    rles: list[list[RLE]] = []
    for frame, masks in mask_stream:
        rles = rles or [[] for _ in masks]
        for number, (mask, coded) in enumerate(zip(masks, rles, strict=True), start=1):
            coded.append(rle.encode(mask))
            Image.fromarray(mask).save(folder / f"object{number}_frame{frame:05d}.png")
    return rles


def write_overlay(frames: Sequence[Path], masks: Sequence[Sequence[RLE]], out: Path, *, fps: float) -> Path:
    """Draw the overlay frame by frame, a PNG or an MP4; return its file."""
    drawn = (
        overlay.draw(transforms.open_image(frame), [coded[i] for coded in masks])
        for i, frame in enumerate(frames)
    )
    picture, video = (out / name for name in OVERLAYS)
    if len(frames) == 1:
        next(drawn).save(picture)
        return picture
    save_video(drawn, video, fps=fps)
    return video


def check_fps(fps: float) -> None:
    """Raise ValueError for a rate that an overlay can't have."""
    if not SLOWEST_FPS <= fps <= FASTEST_FPS:
        raise ValueError(
            f"fps {fps:g}: an overlay shows {SLOWEST_FPS:g} to {FASTEST_FPS:g} frames a second; give a rate "
            "between them"
        )


def save_video(frames: Iterable[Image.Image], path: Path, *, fps: float) -> None:
    """Write H.264 in the form that every browser plays: colours are stored for 2 x 2 pixels, so an odd row or
    column is repeated."""
    with av.open(str(path), "w") as file:
        stream = file.add_stream("libx264", rate=Fraction(fps).limit_denominator(1000))
        stream.pix_fmt = "yuv420p"
        for frame in frames:
            pixels = np.pad(
                np.asarray(frame), ((0, frame.height % 2), (0, frame.width % 2), (0, 0)), mode="edge"
            )
            if not stream.codec_context.is_open:
                stream.height, stream.width = pixels.shape[:2]
            file.mux(stream.encode(VideoFrame.from_ndarray(pixels)))
        file.mux(stream.encode())
