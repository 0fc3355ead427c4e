"""Calls -> observations: `Toolbox` runs operations within their time limit, `Episode` keeps an episode's
workspace, calls and counts."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import cachetools
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ans_core.agent import protocol
from ans_core.agent.operations import OPERATIONS, Operation, Result, Tools
from ans_core.agent.operations.base import Arguments
from ans_core.agent.refusal import ErrorKind, Refused
from ans_core.agent.worker import Worker
from ans_core.agent.workspace import Workspace
from ans_core.model.network import Network

TILE = 96
"""Of tools without a model: that of the `tiny` profile."""
REMEMBERED = 1024
"""Results of operations with a model that a toolbox keeps; one of a long clip has some 60 KB."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What a call gave, or why it gave nothing."""

    call: protocol.Call | None
    """None where the turn held no well-formed one."""
    text: str
    values: dict[str, Any] = field(default_factory=dict)
    pictures: tuple[str, ...] = ()
    """Images of the workspace that are shown with it."""
    error: ErrorKind | None = None

    @property
    def ok(self) -> bool:
        return self.error is None

    def turn(self) -> str:
        """As the user's next turn; every `<image>` stands for one of `pictures`, in order. Text that was read
        in a picture, or that a call is quoted with, can't pass for a token of the template."""
        text = protocol.without_tokens(self.text)
        return "<image>\n" * len(self.pictures) + (text if self.ok else f"Error: {text}")


class Toolbox:
    """Operations ready to run. Those without a model run in a process of their own, started when first needed
    and killed at the limit; the others run here, on frozen weights, and stop at the next module of the
    network after the limit. The last results of these are kept: the rollouts of a group make many calls
    alike, and the same call on the same workspace gives the same. For one thread."""

    def __init__(
        self,
        model: Network | None = None,
        *,
        adapters_off: Callable[[], AbstractContextManager[object]] = nullcontext,
        operations: Mapping[str, Operation] = OPERATIONS,
        seconds: float = 10.0,
        reader: str = "rapidocr",
        segmenter: Network | None = None,
    ) -> None:
        """`adapters_off`: inside it `model` is the base, whatever is trained on it
        (`Policies.using("reference")`, PEFT's `disable_adapter`). Without a model, operations that need one
        are not offered. `reader`: of READ_TEXT (`ocr.Reader`). `segmenter`: another model that draws and
        follows masks in the place of `model`, also where that is None; it is never trained."""
        self.operations = {
            name: o for name, o in operations.items() if (segmenter or model) is not None or not o.needs_model
        }
        self.seconds, self.reader = seconds, reader
        self._model, self._adapters_off, self._worker = segmenter or model, adapters_off, Worker()
        self._results: cachetools.LRUCache[tuple[str, ...], Result] = cachetools.LRUCache(REMEMBERED)
        self.tile = TILE if model is None else model.backbone.crop_side

    def __enter__(self) -> Toolbox:
        return self

    def __exit__(self, *args: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the process; another call starts one again."""
        self._worker.close()

    def call(self, workspace: Workspace, call: protocol.Call) -> tuple[Observation, Workspace]:
        """What it gives, and the workspace with its new handles. Whatever a model can get wrong is an
        observation; what is raised is a defect of an operation, or of the frames' files."""
        try:
            operation, arguments = protocol.checked(call, self.operations)
            result = self._run(operation, workspace, arguments)
        except Refused as refused:
            return Observation(call=call, text=refused.message, error=refused.kind), workspace
        observation = Observation(call=call, text=result.text, values=result.values, pictures=result.pictures)
        return observation, workspace.add(result.handles)

    def _run(self, operation: Operation, workspace: Workspace, arguments: Arguments) -> Result:
        if not operation.needs_model:
            tools = Tools(tile=self.tile, ocr=self.reader)
            if operation.load is not None:
                self._worker.load(operation.load, tools)
            result = self._worker.call(operation.run, workspace, arguments, tools, seconds=self.seconds)
            assert isinstance(result, Result)
            return result
        return self._run_with_model(operation, workspace, arguments)

    @cachetools.cachedmethod(
        lambda self: self._results,
        key=lambda self, operation, workspace, arguments: (
            operation.name,
            arguments.model_dump_json(),
            workspace.fingerprint(),
        ),
    )
    def _run_with_model(self, operation: Operation, workspace: Workspace, arguments: Arguments) -> Result:
        tools = Tools(tile=self.tile, ocr=self.reader, model=self._model)
        with stopped_after(self.seconds), self._adapters_off():
            return operation.run(workspace, arguments, tools)


@contextmanager
def stopped_after(seconds: float) -> Iterator[None]:
    """Inside, this thread's networks raise Refused at the first module that starts after the limit. (An
    exception from outside, as a signal or another thread raises it, could hit where an adapter is being
    switched.)"""
    end, here = time.monotonic() + seconds, threading.get_ident()

    def check(module: nn.Module, inputs: object) -> None:
        if threading.get_ident() == here and time.monotonic() > end:
            raise Refused("time_limit", f"stopped after {seconds:g} s; try a smaller part or a shorter clip")

    hook = register_module_forward_pre_hook(check)
    try:
        yield
    finally:
        hook.remove()


class Episode:
    """One question's turns: what was said, what came back, and what is known by now."""

    def __init__(self, toolbox: Toolbox, workspace: Workspace, *, max_calls: int = 4) -> None:
        self.toolbox, self.workspace, self.max_calls = toolbox, workspace, max_calls
        self.observations: list[Observation] = []
        self.answer: str | None = None

    def turn(self, text: str) -> Observation | None:
        """What comes back; None when this was the answer. A turn that holds a call, or tries to, counts as a
        call."""
        assert self.answer is None, "the episode has its answer"
        call: protocol.Call | None = None
        try:
            thought, call = protocol.parse(text)
            if call is None:
                self.answer = thought
                return None
            if len(self.observations) >= self.max_calls:
                raise Refused("call_limit", f"all {self.max_calls} calls are used; answer now")
            observation, self.workspace = self.toolbox.call(self.workspace, call)
        except Refused as refused:
            observation = Observation(call=call, text=refused.message, error=refused.kind)
        self.observations.append(observation)
        return observation

    @property
    def counts(self) -> Counter[str]:
        """Calls, those that worked (`ok`), and errors by kind."""
        return Counter({"calls": len(self.observations)}) + Counter(
            o.error or "ok" for o in self.observations
        )
