"""The page: events of its components -> what a tab does, and everything that the page shows of it
afterwards."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import gradio as gr

from ans_core import prompts
from ans_core.demo import words
from ans_core.demo.checkpoints import Load
from ans_core.demo.layout import ALONE, lay_out
from ans_core.demo.samples import Example
from ans_core.demo.sources import read_upload
from ans_core.demo.tab import Tab

REDRAW_S = 0.3
"""Least time between two pictures of a clip that is being followed."""
QUIET: dict[str, Any] = {"show_progress": "hidden"}
ONE_AT_A_TIME: dict[str, Any] = QUIET | {"concurrency_id": "model", "concurrency_limit": 1}
"""Of all events that compute: a model, and a tab's video file, serve one at a time."""
Values = Iterator[list[Any]]
"""What the page shows, again and again while something is computed."""


def build(loads: dict[str, Load], examples: Sequence[Example], folder: Path) -> gr.Blocks:
    """loads: the checkpoints on offer, the page's own first. folder: where tabs keep their files."""
    with gr.Blocks(title="ANS", analytics_enabled=False, fill_width=True) as page:
        _Events(loads, examples, folder).connect(page)
    return page


def sentences(event: Callable[..., Values]) -> Callable[..., Values]:
    """Show what is wrong with an input below the chat; a gradio dialogue would hide the page."""

    @wraps(event)
    def handle(self: _Events, tab: Tab, *values: Any) -> Values:
        try:
            yield from event(self, tab, *values)
        except (ValueError, OSError) as error:
            yield self.layout.shown(tab, words.note_html(str(error), is_error=True))

    return handle


class _Events:
    """The page's events: each changes the tab and yields what the page shows then."""

    def __init__(self, loads: dict[str, Load], examples: Sequence[Example], folder: Path) -> None:
        self.loads, self.examples, self.folder = loads, examples, folder
        self.first = next(iter(loads))
        self.layout = lay_out(list(loads), examples)

    def connect(self, page: gr.Blocks) -> None:
        it = self.layout

        def on(event: Callable[..., Any], function: Callable[..., Values], *inputs: Any) -> None:
            event(function, [it.tab, *inputs], it.outputs, **ONE_AT_A_TIME)

        page.load(self.new_tab, None, it.tab, **QUIET)
        on(it.upload.upload, self.open_upload, it.upload)
        on(it.samples.select, self.open_sample)
        on(it.clear.click, self.clear_regions)
        on(it.new_chat.click, self.new_chat)
        on(it.against.input, self.compare, it.against)
        on(it.ask.click, self.ask, it.question, it.mode)
        on(it.question.submit, self.ask, it.question, it.mode)
        on(it.describe_region.click, self.describe_region, it.mode)
        on(it.describe_picture.click, self.describe_picture, it.mode)
        for place, column in enumerate(it.columns):
            on(column.stage.select, self.mark)
            on(column.masks.input, self.switch, column.masks, gr.State(place))
        it.stop.click(self.stop, it.tab, None, queue=False, **QUIET)

    def new_tab(self) -> Tab:
        return Tab(folder=Path(tempfile.mkdtemp(dir=self.folder)), loads={self.first: self.loads[self.first]})

    def stop(self, tab: Tab) -> None:
        """End what another event is following."""
        if tab.current:
            tab.current.stop.set()

    @sentences
    def open_upload(self, tab: Tab, path: str | None) -> Values:
        if path:
            tab.open(read_upload(Path(path)))
        yield self.layout.shown(tab)

    @sentences
    def open_sample(self, tab: Tab, event: gr.EventData) -> Values:
        example = self.examples[event.index]
        tab.open(example.source)
        tab.chat.regions.extend(example.regions)
        yield self.layout.shown(tab, question=example.question)

    @sentences
    def mark(self, tab: Tab, event: gr.EventData) -> Values:
        tab.chat.mark(self.loads[self.first](), event.kind, [(float(x), float(y)) for x, y in event.points])
        yield self.layout.shown(tab)

    @sentences
    def clear_regions(self, tab: Tab) -> Values:
        tab.chat.regions.clear()
        yield self.layout.shown(tab)

    @sentences
    def new_chat(self, tab: Tab) -> Values:
        tab.open(tab.chat.source)
        yield self.layout.shown(tab)

    @sentences
    def compare(self, tab: Tab, name: str) -> Values:
        tab.compare({key: self.loads[key] for key in (self.first, name) if key != ALONE})
        yield self.layout.shown(tab)

    @sentences
    def switch(self, tab: Tab, on: list[int], place: int) -> Values:
        """Show the masks `on` of a column, and no other."""
        if answer := tab.chat.last(list(tab.loads)[place]):
            answer.hidden = set(range(len(answer.masks))) - set(on)
            tab.write_clips()
        yield self.layout.shown(tab)

    @sentences
    def ask(self, tab: Tab, question: str, mode: Any) -> Values:
        yield from self._answer(tab, question, mode)

    @sentences
    def describe_region(self, tab: Tab, mode: Any) -> Values:
        yield from self._answer(tab, tab.chat.region_question(), mode)

    @sentences
    def describe_picture(self, tab: Tab, mode: Any) -> Values:
        yield from self._answer(tab, prompts.GROUNDED_QUESTIONS[0], mode)

    def _answer(self, tab: Tab, question: str, mode: Any) -> Values:
        chat, redraw_time, tab.exported = tab.chat, 0.0, {}
        yield self.layout.shown(tab, words.note_html("Thinking ...", is_error=False), at=0)
        try:
            for name, answer in chat.ask(tab.models(), question, video_mode=mode):
                if chat.source.is_clip and time.monotonic() - redraw_time > REDRAW_S:
                    redraw_time = time.monotonic()
                    bar = words.progress_html(answer.followed, len(chat.source.frames), name=name)
                    yield self.layout.shown(tab, bar, at=max(0, answer.followed - 1))
        finally:
            tab.write_files()  # of what there is
        yield self.layout.shown(tab, words.note_html(tab.stopped(), is_error=False))
