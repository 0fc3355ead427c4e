"""The page's components, and what each of them shows of a tab."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, get_args

import gradio as gr

from ans_core.demo import pictures, words
from ans_core.demo.chat import BRUSH_WIDTH, Answer, Chat
from ans_core.demo.samples import Example
from ans_core.demo.tab import Tab
from ans_core.model.config import VideoMode
from ans_core.pictures import overlay

HERE = Path(__file__).parent
COLUMNS = 2
"""Checkpoints side by side, at most."""
FORMS = ("PNG", "RLE")
ALONE = "no other checkpoint"
STAGE = """${value ? `<div class="stage ${value.form}"><img src="${value.src}" alt="${value.alt}" draggable="false">
<svg viewBox="0 0 ${value.width} ${value.height}" preserveAspectRatio="none"><rect/><polyline stroke-width="${value.brush}"/></svg></div>`
: `<div class="stage empty">No picture yet: %s.</div>`}"""
"""`%s`: what to do for one."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """The components of one checkpoint."""

    column: gr.Column
    title: gr.HTML
    player: gr.Video
    stage: gr.HTML
    masks: gr.CheckboxGroup
    files: dict[str, gr.DownloadButton]

    @property
    def outputs(self) -> list[Any]:
        return [self.column, self.title, self.player, self.stage, self.masks, *self.files.values()]


@dataclass(frozen=True, kw_only=True)
class Layout:
    tab: gr.State
    columns: list[Column]
    clear: gr.Button
    upload: gr.File
    chat: gr.HTML
    note: gr.HTML
    question: gr.Textbox
    ask: gr.Button
    stop: gr.Button
    describe_region: gr.Button
    describe_picture: gr.Button
    new_chat: gr.Button
    against: gr.Dropdown
    mode: gr.Radio
    samples: gr.HTML

    @property
    def outputs(self) -> list[Any]:
        """Everything that an event may change, in the order of `shown`."""
        return [
            *(one for column in self.columns for one in column.outputs),
            self.chat,
            self.note,
            self.mode,
            self.stop,
            self.question,
        ]

    def shown(
        self, tab: Tab, note: str = "", *, at: int | None = None, question: str | None = None
    ) -> list[Any]:
        """Return the value of every output. note: HTML. at: the frame that a clip has been followed to, while
        it is. question: None leaves the box as it is."""
        chat = tab.current
        values = [
            value
            for place, column in enumerate(self.columns)
            for value in _column_values(tab, place, column, at=at)
        ]
        return [
            *values,
            words.chat_html(chat.turns if chat else ()),
            note,
            gr.Radio(visible=chat is not None and chat.source.is_clip),
            gr.Button(interactive=at is not None),
            gr.skip() if question is None else question,
        ]


def css() -> str:
    """Return the page's style, with the objects' colours at their switches."""
    count = len(overlay.COLOURS)
    swatches = [
        f".masks label:nth-child({count}n + {n + 1}) {{ --object: {words.colour(n)}; }}" for n in range(count)
    ]
    return "\n".join([(HERE / "page.css").read_text(encoding="utf-8"), *swatches])


def lay_out(names: Sequence[str], examples: Sequence[Example]) -> Layout:
    """names: of the checkpoints on offer, the page's own first."""
    gr.HTML(f'<div id="head"><h1>ANS</h1><span>{escape(names[0])}</span></div>')
    with gr.Row():
        with gr.Column(scale=3, min_width=320):
            with gr.Row(elem_classes="tools"):
                kinds = [("Click", "click"), ("Box", "box"), ("Brush", "brush")]
                gr.Radio(
                    kinds,
                    value="click",
                    container=False,
                    interactive=True,
                    scale=3,
                    min_width=200,
                    elem_id="prompt-kind",
                )
                clear = gr.Button("Clear regions", size="sm", scale=1, min_width=110, elem_id="clear")
            with gr.Row():
                columns = [_column(place, samples=bool(examples)) for place in range(COLUMNS)]
        with gr.Column(scale=2, min_width=320):
            talk = _talk(names)
    return Layout(tab=gr.State(), columns=columns, clear=clear, samples=_samples(examples), **talk)


def _talk(names: Sequence[str]) -> dict[str, Any]:
    """The components of asking."""
    components: dict[str, Any] = {
        "upload": gr.File(label="Picture or clip", file_count="single", height=140, elem_id="upload"),
        "chat": gr.HTML(words.chat_html(()), elem_id="chat", autoscroll=True, max_height=440),
        "note": gr.HTML("", elem_id="note"),
        "question": gr.Textbox(
            placeholder="Please segment the red circle in this image.",
            show_label=False,
            lines=2,
            max_lines=5,
            elem_id="question",
        ),
    }
    with gr.Row():
        components["ask"] = gr.Button("Ask", variant="primary", scale=3, min_width=120, elem_id="ask")
        components["stop"] = gr.Button(
            "Stop", variant="stop", scale=1, min_width=80, interactive=False, elem_id="stop"
        )
    with gr.Row(elem_classes="tools"):
        components["describe_region"] = gr.Button(
            "Describe region", size="sm", min_width=110, elem_id="describe-region"
        )
        components["describe_picture"] = gr.Button(
            "Describe picture", size="sm", min_width=110, elem_id="describe-picture"
        )
        components["new_chat"] = gr.Button("New chat", size="sm", min_width=80, elem_id="new-chat")
    with gr.Row():
        components["against"] = gr.Dropdown(
            [ALONE, *names[1:]],
            value=ALONE,
            label="Side by side",
            min_width=150,
            filterable=False,
            visible=len(names) > 1,
            elem_id="against",
        )
        components["mode"] = gr.Radio(
            ["auto", *get_args(VideoMode)],
            value="auto",
            label="Video mode",
            min_width=210,
            elem_id="mode",
            visible=False,
        )
    return components


def _column(place: int, *, samples: bool) -> Column:
    advice = (
        "drop a picture or a clip, or choose one of the samples below"
        if samples
        else "drop a picture or a clip"
    )
    with gr.Column(visible=place == 0, min_width=260) as column:
        title = gr.HTML("", visible=False)
        player = gr.Video(
            visible=False,
            interactive=False,
            show_label=False,
            autoplay=True,
            loop=True,
            buttons=[],
            elem_id=f"player-{place}",
        )
        script = (HERE / "stage.js").read_text(encoding="utf-8")
        stage = gr.HTML("", html_template=STAGE % advice, js_on_load=script, elem_id=f"stage-{place}")
        masks = gr.CheckboxGroup(
            visible=False, show_label=False, container=False, elem_classes="masks", elem_id=f"masks-{place}"
        )
        with gr.Row(elem_classes="tools"):
            files = {form: _download(form, place) for form in FORMS}
    return Column(column=column, title=title, player=player, stage=stage, masks=masks, files=files)


def _download(form: str, place: int) -> gr.DownloadButton:
    return gr.DownloadButton(form, size="sm", min_width=70, visible=False, elem_id=f"{form.lower()}-{place}")


def _samples(examples: Sequence[Example]) -> gr.HTML:
    """A strip of thumbnails; a click on one is the event `select` with its index."""
    buttons = [
        f'<button data-index="{number}"><img alt="" src="{pictures.data_uri(pictures.thumbnail(example.source, example.regions))}">'
        f"<span>{escape(example.caption)}</span></button>"
        for number, example in enumerate(examples)
    ]
    script = """element.addEventListener("click", (event) => {
  const button = event.target.closest("button");
  if (button) trigger("select", { index: Number(button.dataset.index) });
});"""
    strip = f'<h2>Held-out samples of this run</h2><div class="samples">{"".join(buttons)}</div>'
    return gr.HTML(strip, js_on_load=script, elem_id="samples", visible=bool(examples))


def _column_values(tab: Tab, place: int, column: Column, *, at: int | None) -> list[Any]:
    if tab.current is None or place >= len(tab.loads):
        hidden = [gr.HTML(visible=False), gr.Video(None, visible=False), "", gr.CheckboxGroup(visible=False)]
        return [
            gr.Column(visible=place == 0),
            *hidden,
            *(gr.DownloadButton(visible=False) for _ in column.files),
        ]
    name = list(tab.loads)[place]
    answer, files, clip = tab.current.last(name), tab.exported.get(name, {}), tab.clips.get(name)
    return [
        gr.Column(visible=True),
        gr.HTML(f'<div class="who">{escape(name)}</div>', visible=len(tab.loads) > 1),
        gr.Video(str(clip) if clip else None, visible=clip is not None and at is None),
        _stage(tab.current, answer, at),
        _switches(answer),
        *(
            gr.DownloadButton(value=str(files[form]) if form in files else None, visible=form in files)
            for form in column.files
        ),
    ]


def _stage(chat: Chat, answer: Answer | None, at: int | None) -> dict[str, Any]:
    """Return the picture with masks and regions, in the template's terms; of a clip, the first frame, or the
    one it is followed to."""
    frame = min(at or 0, max(0, answer.followed - 1)) if answer else 0
    picture = pictures.frame_picture(
        chat.source, frame, answer.shown(frame) if answer else [], () if frame else chat.regions
    )
    width, height = chat.source.size
    brush = max(chat.source.size) * BRUSH_WIDTH
    form = "first-frame" if chat.source.is_clip and at is None else ""
    return {
        "src": pictures.data_uri(picture),
        "alt": escape(chat.source.name),
        "form": form,
        "width": width,
        "height": height,
        "brush": brush,
    }


def _switches(answer: Answer | None) -> gr.CheckboxGroup:
    if answer is None or not answer.masks:
        return gr.CheckboxGroup(choices=[], value=[], visible=False)
    choices: list[Any] = [(f"{number + 1} {name}", number) for number, name in enumerate(answer.names)]
    return gr.CheckboxGroup(
        choices=choices, value=[n for n in range(len(choices)) if n not in answer.hidden], visible=True
    )
