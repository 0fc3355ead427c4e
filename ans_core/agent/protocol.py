"""Turns as text: the operations a model is told of, the calls it says, and what it is told back.

    <tool_call>{"name": "zoom_in", "arguments": {"bbox_2d": [250, 500, 500, 750]}}</tool_call>

A turn that ends in a call waits for its observation, which is a user's turn; a turn without one is the
answer. (The tags are those of Qwen's and Hermes' templates.)
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from ans_core import prompts
from ans_core.agent.operations.base import Arguments, Operation
from ans_core.agent.refusal import Refused

OPEN, CLOSE = "<tool_call>", "</tool_call>"
IMAGE = "<image>"
"""Stands in a user's turn for each picture that it shows."""
NAME_AND = '{{"name": "{name}", "arguments": '
LONGEST_CALL = 2000
"""Characters; json.loads would run into Python's limits on depth and digits with much more."""


@dataclass(frozen=True, kw_only=True)
class Call:
    """A well-formed call; whether operation and arguments exist is another question."""

    name: str
    arguments: dict[str, Any]


def tools_text(operations: Mapping[str, Operation]) -> str:
    """What stands before the first question: a line of JSON for each operation, as function calling has
    it."""
    lines = []
    for operation in operations.values():
        schema = operation.arguments.model_json_schema()
        parameters = {
            "type": "object",
            "properties": {name: _plain(p) for name, p in schema["properties"].items()},
        }
        if required := schema.get("required"):
            parameters["required"] = required
        function = {"name": operation.name, "description": operation.sentence, "parameters": parameters}
        lines.append(json.dumps({"type": "function", "function": function}))
    return "<tools>\n" + "\n".join(lines) + "\n</tools>"


def _plain(schema: Any) -> Any:
    """Without what says nothing to a model: titles, and null as an alternative of what may be left out."""
    if not isinstance(schema, dict):
        return [_plain(s) for s in schema] if isinstance(schema, list) else schema
    schema = {k: v for k, v in schema.items() if k not in ("title", "default")}
    if "anyOf" in schema:
        (alternative,) = [s for s in schema.pop("anyOf") if s != {"type": "null"}]
        schema = alternative | schema
    return {k: _plain(v) for k, v in schema.items() if k != "title"}


def call_text(call: Call) -> str:
    """The one way that calls are written in training data."""
    return f"{OPEN}{NAME_AND.format(name=call.name)}{json.dumps(call.arguments, ensure_ascii=False)}}}{CLOSE}"


def call_tokens(operations: Mapping[str, Operation]) -> list[str]:
    """Pieces of calls for tokenizers that never saw any: as added tokens they make a call 7 to 14 tokens
    instead of 60 to 70. None of them occurs in ordinary text, which is read as before."""
    pieces = {OPEN, CLOSE}
    for operation in operations.values():
        for piece in operation.call_pieces:
            begin = OPEN + NAME_AND.format(name=operation.name) if piece.startswith("{") else ""
            pieces.add(begin + piece + ("}" + CLOSE if piece.endswith("}") else ""))
    return sorted(pieces)


def parse(text: str) -> tuple[str, Call | None]:
    """A turn -> (what is said before the call, the call); (the whole turn, None) for an answer.

    Raises Refused for more than one call, one that isn't closed or isn't at the end of the turn, and one that
    is no JSON object with exactly `name` (a text) and `arguments` (an object).
    """
    opened, closed = text.count(OPEN), text.count(CLOSE)
    if not opened and not closed:
        return text.strip(), None
    if opened > 1:
        raise Refused("several_calls", f"{opened} calls in one turn; make one and wait for what it gives")
    thought, _, rest = text.partition(OPEN)
    body, closing, after = rest.partition(CLOSE)
    if opened != 1 or closed != 1 or not closing:
        raise Refused(
            "broken_call", f"a call is {OPEN}...{CLOSE}; here are {opened} {OPEN} and {closed} {CLOSE}"
        )
    if after.strip():
        raise Refused("broken_call", f"text after {CLOSE}; a turn ends with its call")
    return thought.strip(), _call(body.strip())


def without_tokens(text: str) -> str:
    """Words from a picture or a call, so that they can't pass for tokens of the template: brackets of another
    kind, `[SEG]` in small."""
    return text.replace("<", "‹").replace(">", "›").replace(prompts.SEG, prompts.SEG.lower())


def _call(body: str) -> Call:
    if len(body) > LONGEST_CALL:
        raise Refused("broken_call", f"the call has {len(body)} characters; at most {LONGEST_CALL} are read")
    try:
        value = json.loads(body, object_pairs_hook=_unique, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # half of a character (as \\ud800) is no text
    except (ValueError, RecursionError) as error:  # of json, of the two hooks, of encode
        raise Refused("broken_call", f"the call is no JSON ({str(error)[:80]})") from None
    if not isinstance(value, dict) or value.keys() != {"name", "arguments"}:
        raise Refused("broken_call", 'a call is {"name": ..., "arguments": {...}} and nothing else')
    if not isinstance(value["name"], str) or not isinstance(value["arguments"], dict):
        raise Refused("broken_call", "the name of a call is a text, its arguments are an object")
    return Call(name=value["name"], arguments=value["arguments"])


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        raise ValueError("a key stands twice")
    return made


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no number")


def checked(call: Call, operations: Mapping[str, Operation]) -> tuple[Operation, Arguments]:
    """Raises Refused for an unknown operation or argument, a missing one, and a wrong type."""
    if call.name not in operations:
        near = difflib.get_close_matches(call.name[:40].lower(), operations, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise Refused(
            "unknown_operation",
            f"there is no operation {call.name[:40]!r}; there are {', '.join(operations)}{hint}",
        )
    operation = operations[call.name]
    try:
        return operation, operation.arguments.model_validate(call.arguments)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        unknown = [e for e in errors if e["type"] == "extra_forbidden"]
        details = "; ".join(
            f"{'.'.join(map(str, e['loc']))[:40]}: {e['msg']}" for e in (unknown or errors)[:3]
        )
        takes = ", ".join(operation.arguments.model_fields)
        raise Refused(
            "unknown_argument" if unknown else "wrong_type", f"{details}; {call.name} takes {takes}"
        ) from None
