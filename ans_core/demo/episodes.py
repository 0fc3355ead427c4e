"""The agent's episodes of a run, turn by turn: the folders that `agent_evaluate` writes in, what the page
shows of them out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import gradio as gr

from ans_core.report.episodes import album

Episode = Mapping[str, Any]
"""A record of episodes.json, its pictures as data URIs."""
Albums = Mapping[str, Sequence[Episode]]
"""Episodes by row."""
ROWS = ("rft", "sft", "direct")
"""Of `agent_evaluate`, the most trained one first. The row `oracle` keeps no episodes."""
QUIET: dict[str, Any] = {"show_progress": "hidden"}


def albums_of(model: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the episodes of the run that made `model`; empty if its agent was not evaluated."""
    folder = model.parent / "agent/evaluate"
    return {row: episodes for row in ROWS if (episodes := album(folder / row / "episodes"))}


def labels(episodes: Sequence[Episode]) -> list[tuple[str, int]]:
    """Return (what the list of episodes says, number)."""
    return [
        (f"{'✓' if one['right'] else '✗'} {one['family']}: {one['question']}", number)
        for number, one in enumerate(episodes)
    ]


def episode_html(episode: Episode, turns: int) -> str:
    """Show the picture and the first so many turns; behind the last one the answer and the truth. Everything
    that was said is escaped."""
    parts = [
        f'<li><img src="{episode["picture"]}" alt="The picture asked about"><p>what is asked about (of a clip, the first frame)</p></li>'
    ]
    parts += [_turn_html(turn, number) for number, turn in enumerate(episode["turns"][:turns], start=1)]
    if turns >= len(episode["turns"]):
        parts.append(_end_html(episode))
    return f'<div class="episode"><h2>{escape(episode["question"])}</h2><ol>{"".join(parts)}</ol></div>'


def _turn_html(turn: Mapping[str, Any], number: int) -> str:
    text = escape(turn["said"]) or "<i>nothing</i>"
    parts = [f"<p><b>{number}. {'given' if turn['given'] else 'said'}</b> <code>{text}</code></p>"]
    if "shown" in turn:
        parts.append(f"<p><b>{'refused' if turn['error'] else 'came back'}</b> {escape(turn['shown'])}</p>")
        parts += [f'<img src="{picture}" alt="{escape(turn["shown"])}">' for picture in turn["pictures"]]
        parts.append(f'<div class="stills">{"".join(map(_still_html, turn["masks"]))}</div>')
    return f'<li class="turn">{"".join(parts)}</li>'


def _still_html(still: Mapping[str, str]) -> str:
    label = escape(still["label"])
    return f'<figure><img src="{still["picture"]}" alt="The mask on {label}"><figcaption>{label}</figcaption></figure>'


def _end_html(episode: Episode) -> str:
    answer = (
        escape(str(episode["answer"]))
        if episode["answer"] is not None
        else f"<i>none: {escape(str(episode['ended']))}</i>"
    )
    verdict = "right" if episode["right"] else "wrong"
    looked = "<p>right without having looked</p>" if episode["right"] and not episode["evidence"] else ""
    ends = f"<p><b>answer</b> {answer}</p><p><b>truth</b> {escape(str(episode['truth']))}</p>"
    return f'<li class="end">{ends}<p class="{verdict}">{verdict}</p>{looked}</li>'


def lay_out(albums: Albums) -> None:
    """Make the tab's components and connect them: a row, an episode, and how many turns of it are shown."""
    first = next(iter(albums))
    with gr.Row():
        row = gr.Dropdown(
            list(albums),
            value=first,
            label="Row",
            filterable=False,
            scale=1,
            min_width=120,
            elem_id="episode-row",
        )
        which = gr.Dropdown(
            labels(albums[first]), value=0, label="Episode", scale=4, min_width=260, elem_id="episode-which"
        )
    with gr.Row(elem_classes="tools"):
        back = gr.Button("Back", size="sm", min_width=80, elem_id="episode-back")
        forth = gr.Button("Next turn", variant="primary", size="sm", min_width=110, elem_id="episode-next")
        all_turns = gr.Button("All turns", size="sm", min_width=100, elem_id="episode-all")
    turns = gr.State(0)
    shown = gr.HTML(episode_html(albums[first][0], 0), elem_id="episode")

    def show(name: str, number: int, count: int) -> tuple[int, str, Any, Any]:
        episode = albums[name][number]
        most = len(episode["turns"])
        count = max(0, min(count, most))
        return (
            count,
            episode_html(episode, count),
            gr.Button(interactive=count > 0),
            gr.Button(interactive=count < most),
        )

    outputs = [turns, shown, back, forth]
    row.input(lambda name: gr.Dropdown(labels(albums[name]), value=0), row, which, **QUIET).then(
        lambda name: show(name, 0, 0), row, outputs, **QUIET
    )
    which.input(lambda name, number: show(name, number, 0), [row, which], outputs, **QUIET)
    back.click(
        lambda name, number, count: show(name, number, count - 1), [row, which, turns], outputs, **QUIET
    )
    forth.click(
        lambda name, number, count: show(name, number, count + 1), [row, which, turns], outputs, **QUIET
    )
    all_turns.click(
        lambda name, number: show(name, number, len(albums[name][number]["turns"])),
        [row, which],
        outputs,
        **QUIET,
    )
