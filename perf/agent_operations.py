"""The agent's operations against truth: drawn things and clips, photographs and clips with annotated masks,
shapes worked out by hand.

    ANS_REFERENCE=FOLDER python perf/agent_operations.py --model runs/tiny/model      # one core: 5 minutes

Printed, and written to perf/results/agent-operations-seed<N>.json: means over `--each` held-out questions
(`val`) of each family, as many drawn clips and shapes, and all of FOLDER/data/regions (`val`) and
FOLDER/data/videos. A call that fails has an empty mask or text.

- Points are those farthest from the true mask's edge; boxes are its own, rounded to thousandths; words are
  those of the question.
- read_text reads the crop that the oracle zooms in on, and its surest line counts. CER, WER: edits over the
  true texts' characters, words.
- track_object starts at the first frame that shows the thing, from its true mask or from the one that
  segment_object_at draws at a point of
  it. That frame, and frames without annotation, count nowhere.
- zoom_in shows a thing if every pixel of it lies in the crop of the oracle's box.
- Shapes are discs, rings, rotated rectangles and ellipses on a picture of SIDE pixels; errors hold the
  rounding of what is told.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool
from nltk import edit_distance

from ans_core.agent.episode import Observation, Toolbox
from ans_core.agent.protocol import Call
from ans_core.agent.workspace import THOUSAND, Workspace, box_of, mask_handle
from ans_core.agent.world import FAMILIES, draw_question, oracle
from ans_core.agent.world.drawing import SHRINKS, png, zoom
from ans_core.data.clips import draw_clip
from ans_core.data.formats import regions, videos
from ans_core.inference.sa2va import Sa2VA
from ans_core.metrics.video import j_and_f
from ans_core.pictures import rle
from ans_core.tracking.simulator import center
from ans_core.types import ImageRef

RESULTS = Path("perf/results")
FRAMES = 8
"""Of a drawn clip, as in the family `moves`."""
SIDE = 384
KINDS = ("disc", "ring", "rectangle", "ellipse")
Figures = dict[str, list[float]]
"""What was measured -> the numbers that its name lists."""


@dataclass(frozen=True, kw_only=True)
class Thing:
    """One object of a picture."""

    frame: ImageRef
    mask: Bool[np.ndarray, "H W"]
    phrase: str | None = None
    colour: str | None = None


@dataclass(frozen=True, kw_only=True)
class Clip:
    """N objects of F frames; each has a pixel in one that is annotated."""

    frames: Sequence[ImageRef]
    masks: Bool[np.ndarray, "N F H W"]
    annotated: Bool[np.ndarray, " F"]

    @property
    def starts(self) -> list[int]:
        """The first annotated frame of each object."""
        return [int(np.flatnonzero(masks.any((1, 2)) & self.annotated)[0]) for masks in self.masks]


def ask(toolbox: Toolbox, workspace: Workspace, name: str, **arguments: Any) -> tuple[Observation, Workspace]:
    return toolbox.call(workspace, Call(name=name, arguments=arguments))


def drawn_things(*, seed: int, each: int, tile: int) -> list[Thing]:
    asked = [
        draw_question(family, seed=seed, split="val", index=index, tile=tile)
        for family in FAMILIES
        for index in range(each)
    ]
    return [
        Thing(
            frame=question.frames[0],
            mask=rle.decode(target.masks[0]),
            phrase=target.phrase,
            colour=question.answer if question.family == "easy" else None,
        )
        for question in asked
        for target in question.targets
    ]


def drawn_clips(*, seed: int, each: int, tile: int) -> list[Clip]:
    drawn = (
        draw_clip(seed=seed, split="val", index=index, image_size=SHRINKS * tile, frames=FRAMES)
        for index in range(each)
    )
    return [
        Clip(frames=[png(frame) for frame in clip.frames], masks=clip.masks, annotated=np.ones(FRAMES, bool))
        for clip in drawn
    ]


def photographs(folder: Path) -> list[Thing]:
    samples = regions.read(folder, split="val")
    masks = ((sample.frames[0], sample.masks[0][0]) for sample in samples if sample.task == "region_caption")
    return [Thing(frame=frame, mask=rle.decode(mask)) for frame, mask in masks if mask]


def real_clips(folder: Path) -> list[Clip]:
    """Frames count as annotated where every object's mask is known."""
    samples = list(videos.read(folder, name="videos", split="val"))
    clips = []
    for name in dict.fromkeys(sample.image_id for sample in samples):
        objects = [sample for sample in samples if sample.image_id == name]
        empty = np.zeros((objects[0].height, objects[0].width), bool)
        masks = np.stack(
            [[empty if mask is None else rle.decode(mask) for mask in sample.masks[0]] for sample in objects]
        )
        annotated = np.array(
            [all(sample.masks[0][f] is not None for sample in objects) for f in range(masks.shape[1])]
        )
        clips.append(Clip(frames=objects[0].frames, masks=masks, annotated=annotated))
    return clips


def point_in(mask: Bool[np.ndarray, "H W"]) -> list[int]:
    """Return the point farthest from the mask's edge, in thousandths."""
    height, width = mask.shape
    x, y = center(mask)
    return [round(THOUSAND * (x + 0.5) / width), round(THOUSAND * (y + 0.5) / height)]


def segmentation(things: Sequence[Thing], toolbox: Toolbox) -> Figures:
    scores: dict[str, list[tuple[float, float]]] = {}
    for thing in things:
        workspace = Workspace.of([thing.frame])
        ways: dict[str, Any] = {
            "point_2d": point_in(thing.mask),
            "bbox_2d": workspace.thousandths(box_of(thing.mask)),
        }
        for way, value in (ways | ({"text": thing.phrase} if thing.phrase else {})).items():
            seen, after = ask(toolbox, workspace, "segment_object_at", **{way: value})
            mask = after.pixels("mask_1") if seen.ok else np.zeros_like(thing.mask)
            scores.setdefault(f"segment_object_at, {way}: IoU, boundary F", []).append(
                j_and_f(mask, thing.mask)
            )
    return {name: np.mean(values, 0).tolist() for name, values in scores.items()}


def zooms(things: Sequence[Thing], toolbox: Toolbox) -> Figures:
    whole = []
    for thing in things:
        seen, after = ask(
            toolbox, Workspace.of([thing.frame]), "zoom_in", **zoom(rle.encode(thing.mask)).arguments
        )
        x1, y1, x2, y2 = after.image("image_2").box if seen.ok else (0, 0, 0, 0)
        whole.append(bool(thing.mask[y1:y2, x1:x2].sum() == thing.mask.sum()))
    return {"zoom_in: share of crops with the whole thing": [float(np.mean(whole))]}


def reading(toolbox: Toolbox, *, seed: int, each: int) -> Figures:
    asked = [
        draw_question("text", seed=seed, split="val", index=index, tile=toolbox.tile) for index in range(each)
    ]
    pairs = [(oracle(question, toolbox).answer or "", question.answer) for question in asked]
    characters = sum(edit_distance(said, true) for said, true in pairs) / sum(len(true) for _, true in pairs)
    words = sum(edit_distance(said.split(), true.split()) for said, true in pairs) / sum(
        len(true.split()) for _, true in pairs
    )
    return {f"read_text ({toolbox.reader}): CER, WER": [characters, words]}


def follow(clip: Clip, number: int, toolbox: Toolbox, *, from_truth: bool) -> Bool[np.ndarray, "F H W"]:
    """Return the track of one object, empty where a call failed."""
    workspace, start = Workspace.of(clip.frames, clip=True), clip.starts[number]
    mask = clip.masks[number, start]
    if from_truth:
        workspace = workspace.add((mask_handle(mask, frame=start),))
    else:
        _, workspace = ask(toolbox, workspace, "select_frames", frames=[start])
        _, workspace = ask(toolbox, workspace, "segment_object_at", image="image_2", point_2d=point_in(mask))
    seen, workspace = ask(toolbox, workspace, "track_object", mask="mask_1")
    return (
        np.stack([rle.decode(one) for one in workspace.masklet("track_1")])
        if seen.ok
        else np.zeros_like(clip.masks[number])
    )


def tracking(clips: Sequence[Clip], toolbox: Toolbox) -> Figures:
    found: Figures = {}
    for source, from_truth in (("the true mask", True), ("the segmented mask", False)):
        tracks = [
            np.stack([follow(clip, n, toolbox, from_truth=from_truth) for n in range(len(clip.masks))])
            for clip in clips
        ]
        found |= {
            f"track_object from {source}: {name}": values
            for name, values in track_figures(clips, tracks).items()
        }
    return found


def track_figures(clips: Sequence[Clip], tracks: Sequence[Bool[np.ndarray, "N F H W"]]) -> Figures:
    scores = []
    for clip, drawn in zip(clips, tracks, strict=True):
        true, drawn = clip.masks.copy(), drawn.copy()
        for number, start in enumerate(clip.starts):
            true[number, start] = drawn[number, start] = False
            frames = [f for f in np.flatnonzero(clip.annotated) if f != start]
            if frames:
                scores.append(np.mean([j_and_f(drawn[number, f], true[number, f]) for f in frames], 0))
    j, f = np.mean(scores, 0).tolist()
    return {"J&F, J, F": [(j + f) / 2, j, f]}


def shape(rng: np.random.Generator, kind: str) -> tuple[Bool[np.ndarray, "H W"], dict[str, float]]:
    """Return a shape's pixels (those whose centre is inside), and its properties by the closed forms; the
    centre in pixels."""
    a, share, angle = rng.uniform(20, 100), rng.uniform(0.3, 0.8), rng.uniform(-90, 90)
    b, (x, y) = a * share, SIDE / 2 + rng.uniform(-40, 40, 2)
    down, across = np.indices((SIDE, SIDE)) + 0.5
    turn = math.radians(angle)  # positive = rising to the right; y points down
    along = (across - x) * math.cos(turn) - (down - y) * math.sin(turn)
    beside = (across - x) * math.sin(turn) + (down - y) * math.cos(turn)
    radius = np.hypot(along, beside)
    masks = {
        "disc": radius <= a,
        "ring": (radius <= a) & (radius >= b),
        "rectangle": (abs(along) <= a) & (abs(beside) <= b),
        "ellipse": np.hypot(along / a, beside / b) <= 1,
    }
    areas = {
        "disc": math.pi * a * a,
        "ring": math.pi * (a * a - b * b),
        "rectangle": 4 * a * b,
        "ellipse": math.pi * a * b,
    }
    true = {
        "area": areas[kind],
        "x": x,
        "y": y,
        "eccentricity": 0.0,
        "solidity": 1 - share**2 if kind == "ring" else 1.0,
    }
    if kind in ("rectangle", "ellipse"):
        true |= {"eccentricity": math.sqrt(1 - share**2), "orientation": angle}
    return masks[kind], true


def properties(toolbox: Toolbox, *, seed: int, each: int) -> Figures:
    """Return mean and largest errors: area in percent of it, centroid in pixels, orientation in degrees."""
    rng, errors = np.random.default_rng(seed), dict[str, list[float]]()
    for number in range(each):
        mask, true = shape(rng, KINDS[number % len(KINDS)])
        seen, _ = ask(
            toolbox,
            Workspace.of([np.zeros((SIDE, SIDE, 3), np.uint8)], masks=[mask]),
            "get_properties",
            masks=["mask_1"],
        )
        told = seen.values["mask_1"]
        x, y = (SIDE * v / THOUSAND for v in told["centroid"])
        found = {
            "area (%)": abs(100 * (told["area"] / 100 * SIDE**2 / true["area"] - 1)),
            "centroid (pixels)": math.hypot(x - true["x"], y - true["y"]),
            "eccentricity": abs(told["eccentricity"] - true["eccentricity"]),
            "solidity": abs(told["solidity"] - true["solidity"]),
        }
        if "orientation" in true:
            found["orientation (degrees)"] = abs((told["orientation"] - true["orientation"] + 90) % 180 - 90)
        for name, error in found.items():
            errors.setdefault(f"get_properties, {name}: mean, largest error", []).append(error)
    return {name: [float(np.mean(values)), max(values)] for name, values in errors.items()}


def colours(things: Sequence[Thing], toolbox: Toolbox) -> Figures:
    named = [thing for thing in things if thing.colour is not None]
    seen = [
        ask(toolbox, Workspace.of([t.frame], masks=[t.mask]), "get_properties", masks=["mask_1"])[0].values[
            "mask_1"
        ]
        for t in named
    ]
    return {
        "get_properties: share of colours named right": [
            float(np.mean([s["colour"] == t.colour for s, t in zip(seen, named, strict=True)]))
        ]
    }


def on_masks(things: Sequence[Thing], clips: Sequence[Clip], toolbox: Toolbox) -> Figures:
    return segmentation(things, toolbox) | zooms(things, toolbox) | tracking(clips, toolbox)


def table(measured: dict[str, Figures]) -> str:
    rows = list(dict.fromkeys(name for figures in measured.values() for name in figures))
    cells = (
        [", ".join(f"{v:.3g}" for v in figures.get(row, [])) or "-" for figures in measured.values()]
        for row in rows
    )
    lines = [f"| {row} | " + " | ".join(values) + " |" for row, values in zip(rows, cells, strict=True)]
    return "\n".join(["| | " + " | ".join(measured) + " |", "|-" * (len(measured) + 1) + "|", *lines])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--model", default="runs/tiny/model", help="a folder that Sa2VA.from_pretrained takes"
    )
    parser.add_argument("--each", type=int, default=20, help="questions of a family, clips, and shapes")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn")
    given = parser.parse_args()
    if given.each < len(KINDS):
        parser.error(f"--each {given.each}: at least {len(KINDS)}, one of each shape")
    data = Path(os.environ.get("ANS_REFERENCE", Path(__file__).parents[2] / "shared")) / "data"
    real = (photographs(data / "regions"), real_clips(data / "videos")) if data.is_dir() else None
    if real is None:
        print(
            f"{data} is missing: photographs and clips are left out (ANS_REFERENCE names the folder with "
            "`data`)",
            flush=True,
        )
    with Toolbox(Sa2VA.from_pretrained(given.model).eval(), seconds=600, reader="template") as toolbox:
        drawn = {"seed": given.seed, "each": given.each}
        things, clips = drawn_things(**drawn, tile=toolbox.tile), drawn_clips(**drawn, tile=toolbox.tile)
        measured = {"drawn": on_masks(things, clips, toolbox) | reading(toolbox, **drawn)}
        measured["drawn"] |= properties(toolbox, **drawn) | colours(things, toolbox)
        counted = {"things": len(things), "clips": len(clips)}
        if real is not None:
            measured["photographs, clips"] = on_masks(*real, toolbox)
            counted |= {"things of photographs": len(real[0]), "real clips": len(real[1])}
    print(", ".join(f"{number} {name}" for name, number in counted.items()), table(measured), sep="\n\n")
    RESULTS.mkdir(exist_ok=True)
    file = RESULTS / f"agent-operations-seed{given.seed}.json"
    file.write_text(json.dumps({"each": given.each, "counted": counted} | measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
