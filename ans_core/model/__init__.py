"""The model: `from ans_core.model import Sa2VA`."""

from ans_core.model.sa2va import Sa2VA

__all__ = ["Sa2VA"]
