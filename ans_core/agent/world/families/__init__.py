"""Families of questions: one file and one line here each."""

from __future__ import annotations

from ans_core.agent.world.families.easy import EASY
from ans_core.agent.world.families.larger import LARGER
from ans_core.agent.world.families.moves import MOVES
from ans_core.agent.world.families.pattern import PATTERN
from ans_core.agent.world.families.text import TEXT
from ans_core.agent.world.question import Family

FAMILIES: dict[str, Family] = {
    "easy": EASY,
    "pattern": PATTERN,
    "text": TEXT,
    "larger": LARGER,
    "moves": MOVES,
}
OPERATED = tuple(name for name, family in FAMILIES.items() if family.needs_operation)
"""Those whose questions need an operation: they have traps and self-corrections among their traces."""
