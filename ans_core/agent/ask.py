"""A question to a trained agent about pictures or a clip -> its episode, printed turn by turn, and a folder.

The folder holds episode.json, which grows with every turn, and turn_<n> with what that turn's call made.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

from ans_core.agent import asking, tools
from ans_core.agent.episode import Toolbox
from ans_core.agent.evaluation import operations_told
from ans_core.agent.ocr import check_reader
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.play import Ended, PlayedTurn, play
from ans_core.agent.policy import load_policy, reader_of
from ans_core.agent.workspace import Workspace
from ans_core.checkpoints import folder
from ans_core.checkpoints.checkpoint import DELTA, present_device
from ans_core.config import load
from ans_core.inference import answer
from ans_core.inference.sa2va import Sa2VA
from ans_core.pictures import media
from ans_core.precision import inference_dtype
from ans_core.types import Request

FILE = "episode.json"
TRAINED = ("rft", "sft/tools")
"""Folders of trained agents under runs/<profile>/agent, the last stage first."""
LIMITS: dict[Ended, str] = {
    "turn_tokens": "its answer came to no end within a turn's tokens (agent.episode.turn_tokens)",
    "calls": "it went on calling after its last call (agent.episode.calls)",
    "pictures": "it has seen as many pictures as it may (agent.episode.pictures)",
    "tokens": "it has no tokens left (agent.episode.tokens)",
}
"""Why an episode has no answer."""


def ask(arguments: argparse.Namespace, root: Path) -> int:
    """Return 1 where the episode ended without an answer. Raises ValueError for what can't be asked, before a
    model is loaded."""
    question = asking.checked(arguments.text)
    config = load(root / "params.yaml")
    sources, run = [Path(source) for source in arguments.source], root / "runs" / config.profile
    # before the base: it says what makes both
    trained = Path(arguments.agent) if arguments.agent else last_trained(run / "agent")
    reader = reader_of(trained, arguments.reader)
    check_reader(reader, setting="--reader")
    base = folder.local_folder(arguments.model or root / config.agent.base)
    device, out = (
        present_device(arguments.device),
        Path(arguments.out or root / ".ans/episodes" / sources[0].stem),
    )
    old = former(out)
    with shown(sources, scratch=out) as frames:
        stills = len(sources) > 1
        answer.check([*sources, *frames], frames, old, earlier="an earlier question", alike=not stills)
        policy = load_policy(
            base, trained, operations=OPERATIONS, device=device, dtype=inference_dtype(device), reader=reader
        )
        segmenter = (
            Sa2VA.from_pretrained(arguments.segmenter, device_map=str(device))
            if arguments.segmenter
            else None
        )
        with Toolbox(
            policy.model, adapters_off=policy.base, seconds=tools.SECONDS, reader=reader, segmenter=segmenter
        ) as toolbox:
            answer.remove(old)
            diary = Diary(
                out=out,
                frames=frames,
                tile=toolbox.tile,
                about={"source": " ".join(map(str, sources)), "asked": question, "agent": str(trained)},
                handle_count=len(sources),
            )
            operations = operations_told(
                toolbox, policy.lists_operations(config.agent.episode.operations_told)
            )
            text = asking.first_turn(question, operations, pictures=len(sources))
            request = Request(frames=frames, text=text, stills=stills)
            (played,) = play(policy.model, toolbox, [request], limits=config.agent.episode, watch=diary.add)
        diary.end(played.answer, played.ended)
    return 0 if played.answer is not None else 1


@contextmanager
def shown(sources: Sequence[Path], *, scratch: Path) -> Iterator[tuple[Path, ...]]:
    """Yield the frames of one source (see `media.frames`), or several pictures. Raises ValueError for a clip
    among several."""
    with ExitStack() as opened:
        frames = [opened.enter_context(media.frames(source, scratch=scratch)) for source in sources]
        for source, some in zip(sources, frames, strict=True):
            if len(sources) > 1 and some != (source,):
                raise ValueError(f"{source} is a clip; a question is about one clip, or about pictures")
        yield tuple(chain.from_iterable(frames))


def last_trained(runs: Path) -> Path:
    trained = next((runs / name for name in TRAINED if (runs / name / DELTA).is_file()), None)
    if trained is None:
        raise ValueError(
            f"{runs} holds no trained agent; `ans run --agent` trains one, --agent FOLDER names another"
        )
    return trained


def former(out: Path) -> list[Path]:
    """List the files of an earlier episode in a folder."""
    if not (out / FILE).is_file():
        return []
    try:
        turns = len(json.loads((out / FILE).read_text(encoding="utf-8"))["turns"])
    except (ValueError, LookupError, TypeError):
        raise ValueError(f"{out / FILE} is no earlier episode's; give another --out") from None
    made = (path for number in range(1, turns + 1) for path in sorted((out / f"turn_{number}").rglob("*")))
    return [*(path for path in made if path.is_file()), out / FILE, *out.glob(f"{media.SCRATCH}*/")]


@dataclass(kw_only=True)
class Diary:
    """Prints and writes an episode while it is played."""

    out: Path
    frames: Sequence[Path]
    tile: int
    about: dict[str, Any]
    turns: list[dict[str, Any]] = field(default_factory=list)
    handle_count: int
    """Handles of the workspace before the turn: at first the pictures of the question."""

    def add(self, turn: PlayedTurn, workspace: Workspace) -> None:
        """Tell one turn: what was said, what came back, and the files of what it made."""
        record: dict[str, Any] = {"said": turn.text}
        lines = [f"turn {len(self.turns) + 1}: {turn.text.strip()}"]
        if turn.shown is not None:
            observation = turn.shown.observation
            record |= {
                "observed": observation.text,
                "error": observation.error,
                "files": self._write(turn, workspace),
            }
            came_back = observation.text if observation.ok else f"Error: {observation.text}"
            lines += [f"  {line}" for line in came_back.splitlines()]
            lines += [f"  {name}" for name in record["files"]]
        self.handle_count = len(workspace.handles)
        self.turns.append(record)
        self._save()
        print("\n".join(lines), flush=True)

    def end(self, text: str | None, ended: Ended) -> None:
        self.about |= {"answer": text, "ended": ended}
        self._save()
        last = f"answer: {text}" if text is not None else f"no answer: {LIMITS[ended]}"
        print(f"{last}\n{self.out / FILE}", flush=True)

    def _write(self, turn: PlayedTurn, workspace: Workspace) -> list[str]:
        assert turn.shown is not None
        if not turn.shown.observation.ok:
            return []
        made = [name for name, _ in workspace.handles[self.handle_count :]]
        into = self.out / f"turn_{len(self.turns) + 1}"
        into.mkdir(parents=True, exist_ok=True)
        return [
            str(path)
            for path in tools.write(turn.shown.observation, workspace, made, self.frames, into, self.tile)
        ]

    def _save(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / FILE).write_text(
            json.dumps(self.about | {"turns": self.turns}, indent=1), encoding="utf-8"
        )
