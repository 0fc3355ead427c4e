"""Controls: what must take an agent's gain away, if it comes from what the operations show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

from ans_core.agent.crops import grey
from ans_core.agent.episode import Observation, Toolbox
from ans_core.agent.operations.locate import LOCATE
from ans_core.agent.operations.segment_object_at import SEGMENT_OBJECT_AT
from ans_core.agent.operations.zoom_in import ZOOM_IN
from ans_core.agent.play import Shown
from ans_core.agent.protocol import Call
from ans_core.agent.workspace import FIRST, THOUSAND, Workspace
from ans_core.dist import rng_of
from ans_core.model.network import Network


class RandomCalls(Toolbox):
    """Runs every call at a random place: boxes keep their size, points and words become a random point.
    `locate` gives the mask at a random point and the crop around it.

    The place is a function of the seed, the first frame and the call, so it does not depend on other episodes
    nor on their order. The same call about the same picture runs at the same place."""

    def __init__(self, model: Network | None, *, seed: int, **options: Any) -> None:
        super().__init__(model, **options)
        self._seed = seed

    def call(self, workspace: Workspace, call: Call) -> tuple[Observation, Workspace]:
        rng = rng_of(self._seed, "random calls", workspace.digest(FIRST), call)
        arguments = _moved(call.arguments, rng)
        if call.name != LOCATE.name or "point_2d" not in arguments:
            return super().call(workspace, Call(name=call.name, arguments=arguments))
        mask, shown = super().call(workspace, Call(name=SEGMENT_OBJECT_AT.name, arguments=arguments))
        if not mask.ok:
            return mask, workspace
        zoom = Call(name=ZOOM_IN.name, arguments={"mask": mask.values["mask"]})
        crop, shown = super().call(shown, zoom)
        if not crop.ok:
            return crop, workspace
        values = mask.values | {"image": crop.values["image"]}
        text = f"{mask.text}; {crop.text}"
        return Observation(call=call, text=text, values=values, pictures=crop.pictures), shown


def _moved(arguments: dict[str, Any], rng: Random) -> dict[str, Any]:
    box = arguments.get("bbox_2d")
    if (
        isinstance(box, list)
        and len(box) == 4
        and all(isinstance(v, int) and 0 <= v <= THOUSAND for v in box)
    ):
        x, y = (rng.randint(0, THOUSAND - abs(box[i + 2] - box[i])) for i in (0, 1))
        return arguments | {"bbox_2d": [x, y, x + abs(box[2] - box[0]), y + abs(box[3] - box[1])]}
    if arguments.keys() & {"point_2d", "text"}:
        others = {name: value for name, value in arguments.items() if name not in ("point_2d", "text")}
        return others | {"point_2d": [rng.randint(0, THOUSAND) for _ in range(2)]}
    return arguments


def shuffled(shown: Sequence[Shown]) -> list[Shown]:
    """Show every episode what the next one got by the same operation, or a blank observation where no other
    one called it in this turn; all are of one family, or it would be told by what is shown. Errors stay where
    they are."""
    alike: dict[str, list[int]] = defaultdict(list)
    for place, item in enumerate(shown):
        if item.observation.ok and item.observation.call is not None:
            alike[item.observation.call.name].append(place)
    exchanged = list(shown)
    for places in alike.values():
        if len(places) == 1:  # an episode that is shown its own observation would be under no control
            exchanged[places[0]] = _blank(shown[places[0]])
            continue
        for place, other in zip(places, [*places[1:], places[0]], strict=True):
            exchanged[place] = shown[other]
    return exchanged


def blank(shown: Sequence[Shown]) -> list[Shown]:
    """Show grey pictures, and of texts the new names alone."""
    return [_blank(item) if item.observation.ok else item for item in shown]


def _blank(item: Shown) -> Shown:
    values = item.observation.values
    names = ", ".join(str(values[kind]) for kind in ("image", "mask", "track") if kind in values) or "done"
    crops = (grey(32),) * len(item.crops)
    return replace(item, text="<image>\n" * len(crops) + names, crops=crops)
