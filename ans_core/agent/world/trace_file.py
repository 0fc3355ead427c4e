"""A folder of traces: `traces.jsonl`, a record a line, and the pictures it names. Written by the stage's
generator, or by people.

{"trace_id": "mine/1", "kind": "golden", "question": "Which pattern is on the red square?", "answer":
"checked",
 "frames": ["pictures/1.png"], "turns": [
   {"role": "user", "text": "<image>\\nWhich pattern is on the red square?", "pictures": ["pictures/1.png"]},
   {"role": "assistant", "text": "<tool_call>{...}</tool_call>", "trainable": true},
   {"role": "user", "text": "<image>\\nimage_2: [250, 150, 650, 550]", "pictures": ["pictures/1_image_2.png"]},
   {"role": "assistant", "text": "checked", "trainable": true}],
 "provenance": {"source": "drawn"}}
"""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ans_core.agent import protocol
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.operations.base import SMALLEST, check_frames, check_point, part_of
from ans_core.agent.protocol import IMAGE, Call
from ans_core.agent.refusal import ErrorKind, Refused
from ans_core.agent.workspace import FIRST, ImageHandle
from ans_core.agent.world.annotated_clips import FAMILIES_OF_PICTURES
from ans_core.agent.world.families import FAMILIES
from ans_core.agent.world.question import same_answer
from ans_core.data.formats import checks
from ans_core.written import write_atomically

FILE = "traces.jsonl"
Kind = Literal["golden", "trap", "self_correction"]
Fault = Literal["perceptual", "logical"]
Difficulty = Literal["simple", "medium", "hard"]
SHARES: dict[Kind, float] = {"golden": 0.6, "trap": 0.2, "self_correction": 0.2}
TOLERANCE = 0.05
"""That a share may be off."""
LONGEST_TURN = 4000
"""Characters."""
HANDLE = re.compile(r"(?:image|mask|track)_\d+")
"""Names of images, masks and tracks."""
TEMPLATE = ("<|im_start|>", "<|im_end|>")
"""Tokens that begin and end a turn."""


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Turn(Record):
    role: Literal["user", "assistant"]
    text: str = Field(min_length=1, max_length=LONGEST_TURN)
    pictures: tuple[str, ...] = ()
    """Files, one for each `<image>` of the text, in its order."""
    trainable: bool = False
    """Whether the turn is a target of SFT."""
    error: ErrorKind | None = None
    """Of an observation: why the call before it gave nothing."""


class Trace(Record):
    """Turns of one question: question, call, observation, call, observation, ..., answer."""

    trace_id: str
    kind: Kind
    fault: Fault | None = None
    """Of a trap: the observation was misread, or the conclusion is wrong."""
    question: str
    answer: str
    """The true one, also of a trap."""
    frames: tuple[str, ...] = Field(min_length=1)
    """The native picture, or the frames of the clip: what operations work on."""
    turns: tuple[Turn, ...] = Field(min_length=2)
    provenance: dict[str, Any]
    """At least {"source": ...}."""
    family: str = ""
    difficulty: Difficulty = "simple"

    @property
    def final_answer(self) -> str:
        """The final answer."""
        return self.turns[-1].text


def pictures_of(trace: Trace) -> set[str]:
    """Return the files of its frames and of what its turns show."""
    return {*trace.frames, *(name for turn in trace.turns for name in turn.pictures)}


def readers_of(traces: Iterable[Trace]) -> set[str]:
    """Return the readers (`ans_core.agent.ocr.Reader`) of the traces that call READ_TEXT and say which one
    they had."""
    calling = [
        trace
        for trace in traces
        if any('"read_text"' in turn.text for turn in trace.turns if turn.role == "assistant")
    ]
    return {str(trace.provenance["ocr"]) for trace in calling if "ocr" in trace.provenance}


def check_new(folder: Path) -> None:
    """Raise ValueError for a folder that holds traces."""
    if (folder / FILE).exists():
        raise ValueError(f"{folder / FILE} exists; write into another folder, or remove it")


def write_pictures(folder: Path, pictures: Mapping[str, bytes]) -> None:
    """Write pictures (file -> encoded picture) that records are going to name."""
    for name, encoded in pictures.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(encoded)


def write_traces(folder: Path, traces: Iterable[Trace]) -> None:
    """Write records whose pictures are there. The file gets its name when it is whole; the folder must not
    hold traces yet."""
    check_new(folder)
    folder.mkdir(parents=True, exist_ok=True)
    records = "".join(trace.model_dump_json(exclude_defaults=True) + "\n" for trace in traces)
    write_atomically(folder / FILE, records)


def read_traces(folder: Path) -> list[Trace]:
    """Checked: fields and types, that ids are unique, pictures are in the folder and as many as `<image>`s,
    the question shows the first frame, only the user shows pictures, no text holds a token that stands for
    pixels or ends a turn, turns alternate and begin with the question, calls are well-formed and possible
    where they are targets, and that something is a target and nothing wrong is. A family is one of FAMILIES,
    or empty. Raises DataError naming file and line of every wrong record; pixels are not read."""
    file = folder / FILE
    traces: dict[str, Trace] = {}
    faults = checks.Faults(file)
    for line, values in checks.load_json_lines(file):
        with faults:
            where = f"{file}: line {line}"
            try:
                trace = Trace.model_validate(values)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                message = f"{'.'.join(map(str, first['loc'])) or 'the record'}: {first['msg']}"
                raise checks.DataError(f"{where}: {message}; correct it") from None
            where = f"{where} ({trace.trace_id})"
            if trace.trace_id in traces:
                raise checks.DataError(
                    f"{where}: this trace_id stands in an earlier line; ids must be unique"
                )
            traces[trace.trace_id] = trace
            for fault in _faults(trace, folder, where):
                raise checks.DataError(fault)
    faults.tell()
    return list(traces.values())


def _faults(trace: Trace, folder: Path, where: str) -> Iterator[str]:
    """Yield what is wrong with a record. What follows a fault may be of no meaning: only the first one counts."""
    if "source" not in trace.provenance:
        yield f'{where}: provenance needs a "source": where the trace is from'
    families = (*FAMILIES, *FAMILIES_OF_PICTURES)
    if trace.family and trace.family not in families:
        near = difflib.get_close_matches(trace.family[:40].lower(), families, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        yield (
            f"{where}: no family named {trace.family!r}; there are {', '.join(families)}, or leave it "
            f"out{hint}"
        )
    for name, text in (("question", trace.question), ("answer", trace.answer)):
        if not checks.visible(text):
            yield f"{where}: the {name} is {text!r}; write it, or leave the record out"
    sizes = {
        checks.shown_size(checks.inside(folder, name, where=where), where=where) for name in trace.frames
    }
    if len(sizes) != 1:
        yield f"{where}: frames of sizes {sorted(sizes)}; bring them to one size"
    ((height, width),) = sizes
    first, handles = ImageHandle(frame=0, box=(0, 0, width, height)), {FIRST}
    for number, turn in enumerate(trace.turns):
        here, role = f"{where}, turn {number}", ("user", "assistant")[number % 2]
        if turn.role != role:
            yield f"{here} is the {turn.role}'s; turns alternate and begin with the user"
        yield from _picture_faults(turn, folder, here)
        if turn.role == "user" and turn.trainable:
            yield f"{here} is the user's and trainable; only what the model says is a target"
        if number == 0 and (question := turn.text.replace(IMAGE, "").strip()) != trace.question.strip():
            yield f"{here} asks {question!r}, the trace's question is {trace.question!r}; write the same"
        if number == 0 and turn.pictures != trace.frames[:1]:
            yield (
                f"{here} shows {list(turn.pictures)}; a question shows the first of its frames and nothing "
                f"else: {[trace.frames[0]]}"
            )
        if turn.role == "assistant":
            failed = number + 1 < len(trace.turns) and trace.turns[number + 1].error is not None
            last, frames = number == len(trace.turns) - 1, len(trace.frames)
            yield from _assistant_faults(
                turn, last=last, failed=failed, first=first, frames=frames, handles=handles, where=here
            )
        else:
            handles |= set(HANDLE.findall(turn.text))
    if len(trace.turns) % 2:
        yield f"{where}: the last turn is the user's; a trace ends with the answer"
    yield from _target_faults(trace, where)


def _picture_faults(turn: Turn, folder: Path, where: str) -> Iterator[str]:
    """Check that a turn shows as many pictures as it says, that they are there, and that its text holds no
    other token for pixels."""
    marks = turn.text.count(IMAGE)
    if turn.role == "assistant" and (marks or turn.pictures):
        yield f"{where} is the model's and shows pictures; only the user's turns show some"
    if marks != len(turn.pictures):
        yield f"{where} has {marks} {IMAGE} and {len(turn.pictures)} pictures; write one for each"
    checks.without_reserved(turn.text.replace(IMAGE, ""), where=where)
    if token := next((token for token in TEMPLATE if token in turn.text), None):
        yield f"{where} holds {token!r}, which begins or ends a turn; take it out"
    for name in turn.pictures:
        checks.shown_size(checks.inside(folder, name, where=where), where=where)


def _assistant_faults(
    turn: Turn, *, last: bool, failed: bool, first: ImageHandle, frames: int, handles: Set[str], where: str
) -> Iterator[str]:
    """A call in every turn but the last; where it is a target, a well-formed one that worked. handles: the
    handles told of so far."""
    try:
        _, call = protocol.parse(turn.text)
        if call is not None:
            protocol.checked(call, OPERATIONS)
            _check_possible(call, first, frames, handles)
    except Refused as refused:
        if turn.trainable or not failed:
            yield f"{where}: {refused.message}; correct the call, or mark the next turn with its error"
        return
    if last and call is not None:
        yield f"{where}: a trace ends with an answer, not with a call"
    if not last and call is None:
        yield f"{where}: no call, but turns follow; remove them or write the call"
    if turn.trainable and failed:
        yield f"{where}: a call that failed is trainable; a model would learn to make it"


def _check_possible(call: Call, first: ImageHandle, frames: int, handles: Set[str]) -> None:
    """Raise Refused for what an operation would refuse whatever it sees: a handle that no turn told of, or of
    another kind, a clip's operation on a picture, a box, a point or a frame outside. How large other images than
    the first are is not known here."""
    arguments = call.arguments
    masks = [arguments.get("mask"), *(arguments.get("masks") or ())]
    for kind, name in (("image", arguments.get("image")), *(("mask", mask) for mask in masks)):
        if name is None:
            continue
        if name not in handles:
            raise Refused(
                "unknown_handle",
                f"no turn before it tells of {name[:40]!r}; there is {', '.join(sorted(handles))}",
            )
        if not name.startswith(kind):
            raise Refused("unknown_handle", f"{name!r} is no {kind}; name one of {kind}_1, {kind}_2, ...")
    if OPERATIONS[call.name].for_clips and frames == 1:
        raise Refused("not_a_clip", f"{call.name} needs a clip; the trace has a single frame")
    if box := arguments.get("bbox_2d"):
        image = arguments.get("image") or FIRST
        part_of(first, image, box, smallest=SMALLEST if image == FIRST else 1)
    check_point(arguments.get("point_2d") or (), arguments.get("image") or FIRST)
    check_frames(arguments.get("frames") or (), frames)


def _target_faults(trace: Trace, where: str) -> Iterator[str]:
    assistant_turns = [turn for turn in trace.turns if turn.role == "assistant"]
    right = same_answer(trace.final_answer, trace.answer)
    if trace.kind == "trap" and (right or any(turn.trainable for turn in assistant_turns)):
        yield f"{where}: a trap ends in a wrong answer and nothing of it is trainable"
    if trace.kind != "trap" and not right:
        yield (
            f"{where}: ends in {trace.final_answer!r}, the answer is {trace.answer!r}; only a trap may end "
            "wrong"
        )
    if trace.kind != "trap" and not any(turn.trainable for turn in assistant_turns):
        numbers = ", ".join(str(number) for number in range(1, len(trace.turns), 2))
        yield (
            f"{where}: nothing of it is trainable, so nothing can be learned; mark turns (of {numbers}), or "
            "leave it out"
        )
    if trace.kind == "self_correction" and (
        len(assistant_turns) < 3 or any(turn.trainable for turn in assistant_turns[:-2])
    ):
        yield (
            f"{where}: of a self-correction (two calls at least) only the last call and the answer are "
            "trainable"
        )


def mix(traces: Iterable[Trace]) -> dict[str, float]:
    """Share of every kind (at least one trace)."""
    counts = Counter(trace.kind for trace in traces)
    return {kind: counts[kind] / counts.total() for kind in SHARES}


def check_mix(traces: Sequence[Trace], wanted: Sequence[Kind]) -> None:
    """Raises ValueError where nothing is left, or a kind's share is more than TOLERANCE off that of the kinds
    that were `wanted`: the filter may have dropped too many of one."""
    if not traces:
        raise ValueError(f"no trace is left of {len(wanted)} questions that need an operation")
    shares, before = mix(traces), {kind: wanted.count(kind) / len(wanted) for kind in SHARES}
    if any(abs(shares[kind] - share) > TOLERANCE for kind, share in before.items()):
        differences = ", ".join(
            f"{kind} {shares[kind]:.2f} instead of {share:.2f}" for kind, share in before.items()
        )
        raise ValueError(
            f"the mix of traces is off: {differences}; draw more questions, or look at what the filter "
            "dropped"
        )
