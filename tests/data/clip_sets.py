"""Drawn clips, written as video data sets are published."""

from __future__ import annotations

import json
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import av
import numpy as np
from PIL import Image

from ans_core.pictures import rle
from ans_core.types import RLE

HEIGHT, WIDTH, FRAMES = 24, 32, 6
NAMES = [f"{5 * frame:05d}" for frame in range(FRAMES)]


@dataclass(frozen=True)
class Drawn:
    """Two squares on grey: object 1 goes right and is hidden in frame 3; object 2 enters in frame 2."""

    pictures: np.ndarray
    masks: dict[int, np.ndarray]

    def runs(self, number: int) -> list[RLE | None]:
        return [rle.encode(m) if m.any() else None for m in self.masks[number]]

    def numbers(self, frame: int) -> np.ndarray:
        return sum(
            (self.masks[n][frame].astype(np.uint8) * n for n in self.masks),
            np.zeros((HEIGHT, WIDTH), np.uint8),
        )


def draw(shift: int = 0) -> Drawn:
    masks = {n: np.zeros((FRAMES, HEIGHT, WIDTH), bool) for n in (1, 2)}
    pictures = np.full((FRAMES, HEIGHT, WIDTH, 3), 90 + shift, np.uint8)
    for frame in range(FRAMES):
        if frame != 3:
            masks[1][frame, 2:8, 2 + 3 * frame : 8 + 3 * frame] = True
        if frame >= 2:
            masks[2][frame, 14:20, 4:10] = True
        pictures[frame][masks[1][frame]] = (200, 30, 30)
        pictures[frame][masks[2][frame]] = (30, 30, 200)
    return Drawn(pictures, masks)


def write_frames(folder: Path, drawn: Drawn, names: list[str] = NAMES, suffix: str = ".jpg") -> None:
    folder.mkdir(parents=True)
    for name, picture in zip(names, drawn.pictures, strict=True):
        Image.fromarray(picture).save(folder / f"{name}{suffix}")


def write_palettes(folder: Path, drawn: Drawn, names: list[str] = NAMES) -> None:
    folder.mkdir(parents=True)
    for frame, name in enumerate(names):
        save_numbers(folder / f"{name}.png", drawn.numbers(frame))


def save_numbers(file: Path, numbers: np.ndarray) -> None:
    picture = Image.fromarray(numbers, "P")
    picture.putpalette([0, 0, 0, 200, 0, 0, 0, 0, 200])
    picture.save(file)


def write_json(file: Path, content: Any) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content))


def write_video(file: Path, pictures: np.ndarray) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(file), "w") as container:
        stream = container.add_stream("mpeg4", rate=24)
        stream.height, stream.width = pictures.shape[1:3]
        stream.codec_context.thread_count = 1
        for picture in pictures:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())


def write_gif(file: Path, pictures: Sequence[np.ndarray]) -> None:
    first, *others = (Image.fromarray(picture) for picture in pictures)
    first.save(file, save_all=True, append_images=others)


def davis(root: Path) -> Path:
    for number, clip in enumerate(("bear", "dogs")):
        write_frames(root / "JPEGImages/480p" / clip, draw(number))
        write_palettes(root / "Annotations/480p" / clip, draw(number))
    (root / "ImageSets/2017").mkdir(parents=True)
    (root / "ImageSets/2017/train.txt").write_text("bear\n")
    (root / "ImageSets/2017/val.txt").write_text("dogs\n")
    return root


def mose(root: Path) -> Path:
    write_frames(root / "train/JPEGImages/0a1b", draw())
    write_palettes(root / "train/Annotations/0a1b", draw())
    write_frames(root / "valid/JPEGImages/9c9d", draw())
    write_palettes(root / "valid/Annotations/9c9d", draw())
    for file in sorted((root / "valid/Annotations/9c9d").iterdir())[1:]:
        file.unlink()
    return root


def sav(root: Path) -> Path:
    drawn = draw()
    video = np.repeat(drawn.pictures, 4, 0)[:-3]  # 21 frames, the last of which is annotated
    write_video(root / "sav_000/sav_000001.mp4", video)
    masklet = [[rle.encode(drawn.masks[n][frame]) for n in (1, 2)] for frame in range(FRAMES)]
    record = {
        "video_id": "sav_000001",
        "video_height": float(HEIGHT),
        "video_width": float(WIDTH),
        "masklet": masklet,
        "masklet_id": [0, 1],
    }
    write_json(root / "sav_000/sav_000001_manual.json", record)
    return root


def sav_held_out(root: Path) -> Path:
    drawn, names = draw(), [f"{frame:05d}" for frame in range(FRAMES)]
    write_frames(root / "sav_val/JPEGImages_24fps/sav_9", drawn, names)
    for number in (1, 2):
        folder = root / f"sav_val/Annotations_6fps/sav_9/{number - 1:03d}"
        folder.mkdir(parents=True)
        for frame in (0, 4):
            save_numbers(folder / f"{names[frame]}.png", drawn.masks[number][frame].astype(np.uint8))
    return root


def youtube_vis(root: Path) -> Path:
    drawn = draw()
    write_frames(root / "train/JPEGImages/0043f", drawn)
    video = {
        "id": 1,
        "file_names": [f"0043f/{n}.jpg" for n in NAMES],
        "height": HEIGHT,
        "width": WIDTH,
        "length": FRAMES,
    }
    annotations = [
        {
            "id": n,
            "video_id": 1,
            "category_id": 7,
            "segmentations": drawn.runs(n),
            "bboxes": [None] * FRAMES,
            "iscrowd": 0,
        }
        for n in (1, 2)
    ]
    categories = [{"id": 7, "name": "giant_panda"}]
    write_json(
        root / "train/instances.json",
        {"videos": [video], "annotations": annotations, "categories": categories},
    )
    return root


def coco_video(root: Path) -> Path:
    """No annotation in frames 0 and 3; frame 0 says that it is annotated nevertheless. Written in no
    order."""
    drawn = draw()
    write_frames(root / "images/clip", drawn)
    images = [
        {
            "id": 50 - f,
            "file_name": f"clip/{NAMES[f]}.jpg",
            "video_id": "v",
            "frame_id": f,
            "height": HEIGHT,
            "width": WIDTH,
        }
        for f in reversed(range(FRAMES))
    ]
    images[-1]["is_det_keyframe"] = True
    annotations = [
        {
            "id": 10 * f + n,
            "image_id": 50 - f,
            "category_id": n,
            "instance_id": n,
            "segmentation": drawn.runs(n)[f],
        }
        for f in range(FRAMES)
        for n in (1, 2)
        if f not in (0, 3) and drawn.masks[n][f].any()
    ]
    categories = [{"id": 1, "name": "car"}, {"id": 2, "name": "person"}]
    write_json(
        root / "demo_train.json", {"images": images, "annotations": annotations, "categories": categories}
    )
    return root


EXPRESSIONS = {"0": ([1], "the red square"), "1": ([1, 2], "all squares"), "2": ([], "a circle")}


def mask_dict(drawn: Drawn) -> dict[str, Any]:
    return {str(n): drawn.runs(n) for n in (1, 2)}


def mevis(root: Path, *, version: int = 2) -> Path:
    write_frames(root / "train/JPEGImages/0ab4", draw())
    asked = {
        n: {"exp": text, "obj_id": ids, "anno_id": ids}
        for n, (ids, text) in EXPRESSIONS.items()
        if ids or version == 2
    }
    file = root / "train" / ("meta_expressions_v2.json" if version == 2 else "meta_expressions.json")
    write_json(file, {"videos": {"0ab4": {"frames": NAMES, "expressions": asked}}})
    write_json(root / "train/mask_dict.json", mask_dict(draw()))
    return root


def revos(root: Path) -> Path:
    """One video is a folder of frames, the other a file."""
    asked = {
        n: {"exp": text, "obj_id": ids, "anno_id": ids, "type_id": kind}
        for (n, (ids, text)), kind in zip(EXPRESSIONS.items(), (0, 1, 2), strict=True)
    }
    asked["1"]["exp"] = "Which things can stand on a table?"
    write_frames(root / "LVVIS/train/1", draw())
    write_video(root / "MOSE/2.mp4", np.repeat(draw().pictures, 5, 0))
    videos = {video: {"frames": NAMES, "expressions": asked} for video in ("LVVIS/train/1", "MOSE/2")}
    write_json(root / "meta_expressions_train_.json", {"videos": videos})
    write_json(root / "mask_dict.json", mask_dict(draw()))
    return root


def ref_youtube_vos(root: Path, *, pickled: bool = False) -> Path:
    write_frames(root / "train/JPEGImages/0062", draw())
    asked = {
        "0": {"exp": "a red square", "obj_id": "1"},
        "10": {"exp": "the blue one", "obj_id": "2"},
        "2": {"exp": "it moves", "obj_id": "1"},
    }
    write_json(
        root / "meta_expressions/train/meta_expressions.json",
        {"videos": {"0062": {"frames": NAMES, "expressions": asked}}},
    )
    if pickled:
        masks = {
            str(n): [
                None if m is None else m | {"counts": m["counts"].encode()}
                for m in draw().runs(int(asked[number]["obj_id"]))
            ]
            for n, number in enumerate(("0", "10", "2"))
        }
        (root / "mask_dict.pkl").write_bytes(pickle.dumps(masks))
    else:
        write_palettes(root / "train/Annotations/0062", draw())
    return root


def ref_davis17(root: Path) -> Path:
    davis(root / "DAVIS")
    (root / "davis_text_annotations").mkdir()
    for number in (1, 2):
        for part in ("", "_full_video"):
            said = [
                f'{clip} {n} "the {word} {number}{part}"'
                for clip in ("bear", "dogs")
                for n, word in ((1, "red"), (2, "café"))
            ]
            file = root / f"davis_text_annotations/Davis17_annot{number}{part}.txt"
            file.write_text("\n".join(said), encoding="utf-8" if number == 1 else "latin-1")
    return root


def ref_sav(root: Path) -> Path:
    sav(root / "sam_v_full/sav_train")
    objects = {
        "0": {"formated": "A red square slides right.", "short_caps": ["a red square"]},
        "1": {"formated": "A blue square appears."},
    }
    paths = {
        "video_path": "sav_000/sav_train/sav_000/sav_000001.mp4",
        "anno_path": "sav_000/sav_train/sav_000/sav_000001_manual.json",
    }
    write_json(root / "Ref-SAV.json", {"sav_000001": {**paths, "objects": objects}})
    return root


def chat_univi(root: Path) -> Path:
    write_video(root / "Activity_Videos/v_1.mp4", draw().pictures)
    said = ("<image>\nWhat moves?", "A red square.", "Where to?", "To the right.")
    turns = [{"from": "gpt" if n % 2 else "human", "value": text} for n, text in enumerate(said)]
    records = [
        {"id": "a", "video": "v_1.mkv", "conversations": turns},
        {"id": "b", "video": "v_1.mp4", "conversations": turns[:2]},
    ]
    write_json(root / "video_chat.json", records)
    return root
