"""The CPU's name. By itself, so that a process that only names it loads no torch."""

from __future__ import annotations

import platform
import re
from pathlib import Path


def processor() -> str:
    info = Path("/proc/cpuinfo")
    model = (
        re.search(r"model name\s*:\s*(.+)", info.read_text(encoding="utf-8", errors="replace"))
        if info.exists()
        else None
    )
    return model[1] if model else platform.processor() or platform.machine()
