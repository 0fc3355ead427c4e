"""What a run prints at its end: its stages, its most important figures, and where to read on."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml
from rich.console import Console
from rich.table import Column, Table

from ans_core.report.files import read_json
from ans_core.report.metrics import short
from tasks.stages import AGENT, AGENT_FIGURES, MAIN, MEMORY, ONLINE, ONLINE_FIGURES, ROWS, SUMMARY
from tasks.surroundings import git

SHOWN = (
    "referring/gIoU", "referring/cIoU", "referring/gIoU_shuffled_text", "region_caption/METEOR",
    "region_caption/exact_match", "grounded_caption/mIoU_all_objects", "loop1/IoU", "loop2/METEOR",
    "video/J&F",
)  # fmt: skip
Shown = tuple[str, Mapping[str, Mapping[str, float]], Sequence[str], list[str]]
"""A title, figures by column (a row of `evaluate`, an arm) and name, the names that have a line, and what
follows the table."""


def print_result(
    rows: Sequence[tuple[str, str, float]], here: Path, profile: str, took_s: float, *, group: str = MAIN
) -> None:
    """Print a run's stages (each with `ran` or `cached` and its seconds) and the figures of its group."""
    console = Console()
    flow = "full-pipeline" if group == MAIN else f"{group}-pipeline"
    time = Column("time", justify="right")
    stages = Table("stage", "", time, title=f"{flow}, profile {profile}: {took_s:.0f} s")
    for name, how, seconds in rows:
        stages.add_row(name, how, f"{seconds:.1f} s" if seconds else "")
    console.print(stages)
    of_group = {MAIN: main_figures, AGENT: agent_figures, ONLINE: online_figures, MEMORY: memory_figures}
    title, figures, names, remarks = of_group[group](here, profile)
    table = Table("metric", *(Column(column, justify="right") for column in figures), title=title)
    for name in names:
        values = [of_column.get(name) for of_column in figures.values()]
        table.add_row(name, *("-" if value is None else f"{value:.3f}" for value in values))
    console.print(table)
    print("\n".join(remarks))


def main_figures(here: Path, profile: str) -> Shown:
    summary = read_json(here / SUMMARY)
    binaries = Path(sys.executable).parent
    where = binaries.relative_to(here) if binaries.is_relative_to(here) else binaries
    remarks = [
        f"report:    {here / 'runs' / profile / 'report/report.html'}",
        "runs:      make ui     (MLflow; it prints the address of their table)",
        f"changes:   {where}/dvc metrics diff     (against the last commit)",
        f"schedule:  {where}/ans server     (Prefect server, deployments and a worker)",
    ]
    if committed_profile(here) != profile:
        del remarks[2]
    return "held-out metrics", {row: short(summary.get(row, {})) for row in ROWS}, SHOWN, remarks


def committed_profile(here: Path) -> str:
    """Return the profile of the last commit's params.yaml, and so of its figures; nothing without git."""
    return str((yaml.safe_load(git(here, "show", "HEAD:params.yaml")) or {}).get("profile", ""))


def agent_figures(here: Path, profile: str) -> Shown:
    """Return accuracy and RaPR by family, and accuracy under the controls."""
    figures = read_json(here / AGENT_FIGURES)
    names = dict.fromkeys(name for row_figures in figures.values() for name in row_figures)
    shown = [name for name in names if name.count("/") == 1 and name.endswith(("/accuracy", "/RaPR"))]
    shown += [name for name in names if name.count("/") == 2 and name.endswith("needed/accuracy")]
    page = here / "runs" / profile / "agent/report/episodes.html"
    return "held-out questions", figures, shown, [f"episodes:  {page}"]


def online_figures(here: Path, profile: str) -> Shown:
    """Return every arm's accuracy on the shifted questions and on those without a shift, and what became of its
    labels."""
    figures = read_json(here / ONLINE_FIGURES)
    arms = {"frozen": figures.pop("frozen"), **figures}
    of_labels = ("admitted", "labels_right", "rewards_right", "vote_share", "answer_entropy")
    shown = ("target", "source", "updates", *of_labels, "roll_backs", "store/frozen")
    curves = here / "runs" / profile / "agent/online/curves.csv"
    return "held-out questions after the stream", arms, shown, [f"curves:    {curves}"]


def memory_figures(here: Path, profile: str) -> Shown:
    """Return J&F of the held-out clips, with and without memory."""
    folder, names = here / "runs" / profile / "memory", ("J&F with memory", "J&F without memory")
    measured = read_json(folder / "metrics.json")
    columns = {"base": "J&F", "before training": "J&F/before", "best epoch": "J&F/best"}
    figures = {
        column: {names[0]: measured[name], names[1]: measured[f"{name}_without_memory"]}
        for column, name in columns.items()
        if name in measured
    }
    remarks = [f"figures:   {folder / 'metrics.json'}", f"clips:     {folder / 'clips'}"]
    return "held-out clips", figures, names, remarks
