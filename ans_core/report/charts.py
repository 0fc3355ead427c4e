"""Draw numbers as small SVG charts for an HTML page; axes and words take the page's text colour."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

PALETTE = ("#2f6fde", "#e0653a", "#2a9d6f", "#a259c4", "#c99a1d", "#d14a7c", "#4aa3b8", "#7a7a7a")
INK = "#010203"
"""Placeholder for the page's text colour until the SVG is written."""
_STYLE: Any = {
    "svg.fonttype": "none", "font.family": "sans-serif", "font.size": 9, "axes.titlesize": 10,
    "legend.fontsize": 8, "axes.spines.top": False, "axes.spines.right": False, "axes.edgecolor": INK,
    "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.grid": True,
    "grid.alpha": 0.15, "grid.color": INK, "lines.linewidth": 1.6,
}  # fmt: skip

Curve = Sequence[tuple[float, float]]
"""(step, value) pairs, steps ascending."""


def lines(title: str, curves: Mapping[str, Curve]) -> str:
    """Draw one line per name. A long noisy curve is drawn pale, with its running mean over it."""

    def draw(axes: Axes) -> None:
        for colour, (name, points) in zip(_colours(len(curves)), curves.items(), strict=True):
            steps, values = (np.array(column, float) for column in zip(*points, strict=True))
            smooth = _running_mean(values)
            if smooth is not values:
                axes.plot(steps, values, color=colour, alpha=0.25, linewidth=0.8)
            axes.plot(steps, smooth, color=colour, label=name, marker="." if len(steps) == 1 else None)
        axes.set_xlabel("step")
        if len(curves) > 1:
            axes.legend(frameon=False, labelcolor=INK)

    ends = [f"{name} from {points[0][1]:.3g} to {points[-1][1]:.3g}" for name, points in curves.items()]
    return _svg(title, draw, description=f"Lines over steps: {', '.join(ends)}.")


def band(title: str, per_step: Sequence[Sequence[float]]) -> str:
    """Draw the mean of each step with one standard deviation around it."""

    def draw(axes: Axes) -> None:
        means, deviations = np.array([np.mean(v) for v in per_step]), np.array([np.std(v) for v in per_step])
        steps, means, deviations = (
            np.arange(1, len(means) + 1),
            _running_mean(means),
            _running_mean(deviations),
        )
        axes.fill_between(
            steps, means - deviations, means + deviations, color=PALETTE[0], alpha=0.2, linewidth=0
        )
        axes.plot(steps, means, color=PALETTE[0])
        axes.set_xlabel("step")

    return _svg(
        title,
        draw,
        description=(
            f"Mean from {np.mean(per_step[0]):.3g} to {np.mean(per_step[-1]):.3g} over {len(per_step)} steps."
        ),
    )


def histogram(title: str, groups: Mapping[str, Sequence[float]]) -> str:
    """Draw shares of values in [0, 1], in 20 bins, one outline per group."""

    def draw(axes: Axes) -> None:
        for colour, (name, values) in zip(_colours(len(groups)), groups.items(), strict=True):
            weights = np.full(len(values), 1 / len(values))
            axes.hist(values, bins=20, range=(0, 1), weights=weights, color=colour, alpha=0.3)
            axes.hist(
                values, bins=20, range=(0, 1), weights=weights, color=colour, histtype="step", label=name
            )
        axes.set_xlabel("reward")
        axes.set_ylabel("share")
        axes.legend(frameon=False, labelcolor=INK)

    means = [f"{name} {np.mean(values):.3g}" for name, values in groups.items()]
    return _svg(title, draw, description=f"Histogram; means: {', '.join(means)}.")


def _svg(title: str, draw: Callable[[Axes], None], *, description: str) -> str:
    """Return the SVG of a chart. `description`: its content in words, for people who can't see it."""
    # the salt makes ids unique on a page, and the same every time
    with matplotlib.rc_context({**_STYLE, "svg.hashsalt": title}):
        figure = Figure(figsize=(3.9, 2.5), layout="constrained")
        axes = figure.add_subplot()
        draw(axes)
        axes.set_title(title, loc="left")
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    svg = text.getvalue().replace(INK, "currentColor")
    spoken = html.escape(f"{title}. {description}", quote=True)
    return f'<svg role="img" aria-label="{spoken}"' + svg[svg.index("<svg") + len("<svg") :]


def _colours(count: int) -> list[str]:
    return [PALETTE[i % len(PALETTE)] for i in range(count)]


def _running_mean(values: np.ndarray) -> np.ndarray:
    """Average over a fiftieth of the curve to each side; short curves stay as they are."""
    reach = len(values) // 50
    if not reach:
        return values
    sums = np.concatenate([[0.0], np.cumsum(values)])
    at = np.arange(len(values))
    low, high = np.maximum(0, at - reach), np.minimum(len(values), at + reach + 1)
    return (sums[high] - sums[low]) / (high - low)
