"""Visual operations: one file and one line here each. Order is the prompt's."""

from __future__ import annotations

from ans_core.agent.operations.base import Operation, Result, Tools
from ans_core.agent.operations.get_properties import GET_PROPERTIES
from ans_core.agent.operations.locate import LOCATE
from ans_core.agent.operations.read_text import READ_TEXT
from ans_core.agent.operations.segment_object_at import SEGMENT_OBJECT_AT
from ans_core.agent.operations.select_frames import SELECT_FRAMES
from ans_core.agent.operations.track_object import TRACK_OBJECT
from ans_core.agent.operations.zoom_in import ZOOM_IN

OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        ZOOM_IN,
        SEGMENT_OBJECT_AT,
        GET_PROPERTIES,
        READ_TEXT,
        TRACK_OBJECT,
        SELECT_FRAMES,
        LOCATE,
    )
}

__all__ = ["OPERATIONS", "Operation", "Result", "Tools"]
