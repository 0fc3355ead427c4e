"""How often progress bars are drawn."""

from __future__ import annotations

import sys


def bar_interval_s() -> float:
    """Return the seconds between updates of a progress bar: half a minute in a log file, a tenth of a second
    in a terminal."""
    return 0.1 if sys.stderr.isatty() else 30.0
