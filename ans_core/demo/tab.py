"""One browser tab: its chat, the checkpoints that answer it, and the files it may fetch."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from ans_core.demo import exports, pictures
from ans_core.demo.chat import Chat
from ans_core.demo.checkpoints import Load
from ans_core.demo.sources import Source
from ans_core.model.network import Network


@dataclass(kw_only=True)
class Tab:
    folder: Path
    """Of its files. They get new names each time, since a browser keeps what it has seen."""
    loads: dict[str, Load]
    """Checkpoints that answer, the page's own first."""
    current: Chat | None = None
    clips: dict[str, Path] = field(default_factory=dict)
    """MP4 of the clip with the last answer's masks, by checkpoint."""
    exported: dict[str, dict[str, Path]] = field(default_factory=dict)
    """Files of the last answer with masks, by checkpoint and form."""

    @property
    def chat(self) -> Chat:
        if self.current is None:
            raise ValueError("there is no picture yet: drop a picture or a clip, or choose a sample")
        return self.current

    def models(self) -> dict[str, Network]:
        return {name: load() for name, load in self.loads.items()}

    def open(self, source: Source) -> None:
        self.current = Chat(source=source)
        self.write_files()

    def compare(self, loads: dict[str, Load]) -> None:
        self.loads = loads
        if self.current:
            self.write_files()

    def write_files(self) -> None:
        self.write_clips()
        answers = {name: answer for name in self.loads if (answer := self.chat.last(name)) and answer.masks}
        self.exported = {
            name: exports.write_all(
                self.chat.source, self.chat.turns[-1].question, answer, self._new_folder()
            )
            for name, answer in answers.items()
        }

    def write_clips(self) -> None:
        """Draw the clip again, after masks were found or switched."""
        source = self.chat.source
        names = self.loads if source.is_clip else ()
        self.clips = {
            name: pictures.write_clip(source, self.chat.last(name), self._new_folder() / "clip.mp4")
            for name in names
        }

    def stopped(self) -> str:
        """Return how far a clip was followed that was stopped, else nothing."""
        if not (self.chat.stop.is_set() and self.chat.turns):
            return ""
        done = max((answer.followed for answer in self.chat.turns[-1].answers.values()), default=0)
        if not done:
            return "Stopped: no frame was followed."
        return f"Stopped after {done} of {len(self.chat.source.frames)} frames: the player shows these."

    def _new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))
