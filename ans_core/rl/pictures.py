"""Draw what a loop tried on one sample (masks, texts, rewards) as a picture, with the same content in JSON,
for people to look at."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from matplotlib.figure import Figure

from ans_core.pictures import overlay, transforms
from ans_core.rl.experience import Experience
from ans_core.rl.step import RolloutStep

PANEL_INCHES = 2.2


def save(folder: Path, name: str, step: RolloutStep, done: Experience) -> None:
    """Write `<folder>/<name>.png` and `.json` for a batch's first sample: truth on the left, then the G
    rollouts with their rewards."""
    assert done.advantage is not None, "pictures come after the rewards"
    sample, size = step.batch.samples[0], step.settings.group
    image = transforms.open_image(sample.frames[0])
    truth = [masklet[0] for masklet in sample.masks if masklet[0] is not None]
    earned = [{part: values[0, g].item() for part, values in done.rewards.items()} for g in range(size)]
    rollouts = [
        {"text": done.texts[g], "rewards": earned[g], "advantage": done.advantage[0, g].item()}
        for g in range(size)
    ]
    record = {
        "sample": sample.sample_id,
        "dataset": sample.dataset,
        "asked": step.batch.asked[0],
        "truth": sample.text,
        "rollouts": rollouts,
    }
    panels = [(truth, f"truth: {sample.text}")]
    for g, text in enumerate(done.texts[:size]):
        parts = "  ".join(f"{part} {value:.2f}" for part, value in earned[g].items())
        panels.append(
            (
                [done.masks[g]] if done.masks else [],
                f"{text}\n{parts}\nadvantage {done.advantage[0, g].item():+.2f}",
            )
        )
    figure = Figure(figsize=(PANEL_INCHES * len(panels), PANEL_INCHES * 1.6), layout="constrained")
    for axes, (masks, words) in zip(figure.subplots(1, len(panels)), panels, strict=True):
        axes.imshow(overlay.draw(image, masks))
        lines = [line for part in words.split("\n") for line in textwrap.wrap(part, 26)[:4]]
        axes.set_xlabel(
            "\n".join(
                "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in line) for line in lines
            ),
            fontsize=8,
        )
        axes.set_xticks([])
        axes.set_yticks([])
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / f"{name}.png", dpi=80, metadata={"Software": None})
    (folder / f"{name}.json").write_text(json.dumps(record, indent=1))
