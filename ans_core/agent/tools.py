"""One of the agent's operations on a picture or a clip -> a folder: observation.json, and the pictures, masks
or track that it made."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from ans_core.agent import protocol
from ans_core.agent.episode import Observation, Toolbox
from ans_core.agent.ocr import check_reader
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.refusal import Refused
from ans_core.agent.workspace import ImageHandle, MaskHandle, TrackHandle, Workspace
from ans_core.config.section import nearest
from ans_core.inference.answer import write_masks, write_overlay
from ans_core.inference.sa2va import Sa2VA
from ans_core.pictures import media, transforms

SECONDS = 600.0
"""For one operation: somebody waits for it, no training does."""
FPS = 8.0


def list_operations() -> str:
    """A line for each, and what it takes."""
    lines = []
    for operation in OPERATIONS.values():
        takes = [
            name + ("" if field.is_required() else "?")
            for name, field in operation.arguments.model_fields.items()
        ]
        lines.append(f"{operation.name:<18} {', '.join(takes):<34} {operation.sentence}")
    return "\n".join(lines)


def run_operation(arguments: argparse.Namespace, *, out: Path, newest_model: Callable[[], Path]) -> str:
    """What the model would read, and where the files are. Raises ValueError for a call that would be an error
    to the model."""
    if arguments.name not in OPERATIONS:
        raise ValueError(
            f"no operation named {arguments.name!r}{nearest(arguments.name, OPERATIONS)}; there are "
            f"{', '.join(OPERATIONS)}"
        )
    if arguments.source is None:
        raise ValueError(f"ans tools {arguments.name} IMAGE key=value ...: IMAGE is missing")
    call = protocol.Call(name=arguments.name, arguments=parse_settings(arguments.settings))
    try:  # before a model is loaded
        protocol.checked(call, OPERATIONS)
    except Refused as refused:
        raise ValueError(refused.message) from None
    if arguments.name == "read_text":
        check_reader(arguments.reader, setting="--reader")
    for path in arguments.mask or ():
        transforms.check_image(Path(path))
    folder = Path(arguments.out or out / arguments.name)
    folder.mkdir(parents=True, exist_ok=True)
    masks = [np.asarray(Image.open(path).convert("L")) > 0 for path in arguments.mask or ()]
    model = None
    if OPERATIONS[arguments.name].needs_model:
        model = Sa2VA.from_pretrained(arguments.model or newest_model(), device_map="auto")
    toolbox = Toolbox(model, seconds=SECONDS, reader=arguments.reader)
    with media.frames(Path(arguments.source), scratch=folder) as frames, toolbox:
        before = Workspace.of(frames, masks=masks)
        observation, after = toolbox.call(before, call)
        if not observation.ok:
            raise ValueError(observation.text)
        files = write(
            observation,
            after,
            [name for name, _ in after.handles[len(before.handles) :]],
            frames,
            folder,
            toolbox.tile,
        )
    return f"{observation.text}\n{', '.join(map(str, files))}"


def parse_settings(words: Sequence[str]) -> dict[str, Any]:
    """`bbox_2d=[250,500,500,750]`, `text=the red circle`: values as YAML has them."""
    settings = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"{word!r} is no key=value")
        try:
            settings[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise ValueError(f"{word!r}: the value can't be read; write texts in quotes") from None
    return settings


def write(
    observation: Observation,
    workspace: Workspace,
    made: Sequence[str],
    frames: Sequence[Path],
    folder: Path,
    tile: int,
) -> list[Path]:
    """observation.json, and for each new handle its picture: a crop, or the frame (the clip) with the mask on
    it."""
    assert observation.call is not None
    record = {
        "name": observation.call.name,
        "arguments": observation.call.arguments,
        "text": observation.text,
        "values": observation.values,
    }
    files = [folder / "observation.json"]
    files[0].write_text(json.dumps(record, indent=1) + "\n")
    handles = dict(workspace.handles)
    for name in made:
        handle = handles[name]
        if isinstance(handle, ImageHandle):
            files.append(folder / f"{name}.png")
            workspace.picture(name, least=tile).save(files[-1])
        elif isinstance(handle, MaskHandle):
            write_masks([(0, [workspace.pixels(name)])], folder / "masks")
            files.append(write_overlay([frames[handle.frame]], [[workspace.rle(name)]], folder, fps=FPS))
        elif isinstance(handle, TrackHandle):
            files.append(write_overlay(frames, [workspace.masklet(name)], folder, fps=FPS))
    return files
