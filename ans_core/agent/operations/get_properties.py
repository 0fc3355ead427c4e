"""GET_PROPERTIES: masks -> what can be measured on them: size, place, form, colour, texture, and their order
by area."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

import numpy as np
from jaxtyping import Bool
from pydantic import Field

from ans_core.agent import shapes
from ans_core.agent.operations.base import Arguments, MaskName, Operation, Result, Tools
from ans_core.agent.workspace import THOUSAND, Workspace, box_of, opened

Property = Literal[
    "area", "rank", "box", "centroid", "eccentricity", "orientation", "solidity", "extent", "parts", "lab",
    "colour", "texture",
    "period", "contrast",
]  # fmt: skip
"""area: percent of the picture. rank: place by area among the masks asked about, 1 = largest. box, centroid:
thousandths of the picture. extent: area over that of the box. lab: mean CIELAB. period: pixels. The others:
ans_core/agent/shapes.py."""
MOST_MASKS = 8


class GetProperties(Arguments):
    masks: Annotated[list[MaskName], Field(min_length=1, max_length=MOST_MASKS)]
    properties: Annotated[list[Property], Field(min_length=1, description="default: all")] | None = None


def run(workspace: Workspace, arguments: GetProperties, tools: Tools) -> Result:
    requested = arguments.properties or list(get_args(Property))
    pixels = {name: workspace.pixels(name) for name in dict.fromkeys(arguments.masks)}
    # equal areas keep the order they are asked in
    order = sorted(pixels, key=lambda name: -int(pixels[name].sum()))
    values = {}
    for name, mask in pixels.items():
        measured = measure(np.asarray(opened(workspace.frames[workspace.mask(name).frame])), mask) | {
            "rank": order.index(name) + 1
        }
        values[name] = {key: measured[key] for key in requested}
    text = "; ".join(
        f"{name}: " + ", ".join(f"{key} {value}" for key, value in facts.items())
        for name, facts in values.items()
    )
    return Result(text=text, values=values)


def measure(picture: np.ndarray, mask: Bool[np.ndarray, "H W"]) -> dict[str, Any]:
    """All properties but the rank, rounded as they are told. Only the mask's box is looked at."""
    height, width = mask.shape
    x1, y1, x2, y2 = box_of(mask)
    rows, columns = np.nonzero(mask)
    inside, around = mask[y1:y2, x1:x2], picture[y1:y2, x1:x2]
    eccentricity, orientation = shapes.eccentricity_and_orientation(inside)
    colours = shapes.lab(around)
    colour = colours[inside].mean(0)
    direction, period, contrast = shapes.texture(colours[..., 0], inside)
    return {
        "area": round(100 * float(mask.mean()), 2),
        "box": [
            round(THOUSAND * v / side) for v, side in zip((x1, y1, x2, y2), (width, height) * 2, strict=True)
        ],
        "centroid": [
            round(THOUSAND * (float(columns.mean()) + 0.5) / width),
            round(THOUSAND * (float(rows.mean()) + 0.5) / height),
        ],
        "eccentricity": round(eccentricity, 2),
        "orientation": round(orientation),
        "solidity": round(shapes.solidity(inside), 2),
        "extent": round(float(inside.mean()), 2),
        "parts": shapes.parts(inside),
        "lab": [round(float(v)) for v in colour],
        "colour": shapes.colour_name(colour),
        "texture": direction,
        "period": round(period, 1),
        "contrast": round(contrast, 1),
    }


GET_PROPERTIES = Operation(
    name="get_properties",
    sentence="Measures masks: area, rank by area, place, form, colour, texture.",
    arguments=GetProperties,
    run=run,
    call_pieces=('{"masks": ["mask_', '", "mask_', '"], "properties": ["', '"]}'),
)
