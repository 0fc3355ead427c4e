"""The README's picture: expressions of `test` with the masks that the model drew, from nearly the best to
nearly the worst.

    make pictures PROFILE=quick        after `make demo`; writes docs/images/answers.png

Which ones is decided by rank alone: of all expressions of one thing those at RANKS.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont

from ans_core.pictures import overlay, transforms
from ans_core.report.lookup import samples_of
from ans_core.types import Sample

RANKS = (0.05, 0.25, 0.5, 0.75, 0.9, 0.97)
"""Share of the answers that are better."""
ACROSS = 3
WIDTH, WORDS, GAP = 256, 58, 4
"""Of a panel, of the words below it, and between panels, in pixels."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("run", type=Path, metavar="runs/PROFILE")
    parser.add_argument("--row", default="rl", help="whose answers: sft or rl (default)")
    parser.add_argument("--out", type=Path, default=Path("docs/images"))
    arguments = parser.parse_args()
    lines = (
        (arguments.run / "evaluate" / arguments.row / "predictions.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    records = [json.loads(line) for line in lines]
    stills = ranked([r for r in records if r["benchmark"] == "referring/test" and r["n_targets"] == 1], RANKS)
    wanted = {key_of(record) for record in stills}
    samples, absent = samples_of(wanted, prepared=arguments.run / "data", split="test", sources=())
    if absent:
        raise SystemExit(f"{arguments.run}: {absent}")
    panels = [panel(record, samples[key_of(record)]) for record in stills]
    sheet(panels).save(arguments.out / "answers.png", optimize=True)
    for record in stills:
        print(f"{record['score']:.2f}  {record['asked']}")


def key_of(record: dict[str, Any]) -> tuple[str, str, str]:
    return record["dataset"], record["sample_id"], record["asked"]


def ranked(records: list[dict[str, Any]], shares: tuple[float, ...]) -> list[dict[str, Any]]:
    """Return the records that so large a share of the others is better than."""
    order = sorted(records, key=lambda record: (-record["score"], record["sample_id"]))
    return [order[min(int(share * len(order)), len(order) - 1)] for share in shares]


def panel(record: dict[str, Any], sample: Sample) -> Image.Image:
    """Draw a picture, enlarged by whole pixels, with what was asked and the score below it."""
    picture = transforms.open_image(sample.frames[0])
    drawn = overlay.draw(picture, [masklet[0] for masklet in record["masks"]])
    scale = max(1, round(WIDTH / picture.width))
    drawn = drawn.resize((picture.width * scale, picture.height * scale), Image.Resampling.NEAREST)
    whole = Image.new("RGB", (drawn.width, drawn.height + WORDS), "white")
    whole.paste(drawn, (0, 0))
    lines = [*textwrap.wrap(record["asked"], 36)[:2], f"IoU {record['score']:.2f}"]
    font = ImageFont.load_default(size=14)
    ImageDraw.Draw(whole).multiline_text(
        (2, drawn.height + 2), "\n".join(lines), fill=(20, 20, 20), font=font, spacing=3
    )
    return whole


def sheet(panels: list[Image.Image]) -> Image.Image:
    width, height = panels[0].size
    rows = -(-len(panels) // ACROSS)
    whole = Image.new("RGB", (ACROSS * (width + GAP) - GAP, rows * (height + GAP) - GAP), "white")
    for place, one in enumerate(panels):
        whole.paste(one, (place % ACROSS * (width + GAP), place // ACROSS * (height + GAP)))
    return whole


if __name__ == "__main__":
    main()
