"""READ_TEXT's readers: words in five fonts, two sizes and turned, rendered on photographs; order, boxes, and
what is missing."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import matplotlib
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from ans_core.agent import ocr
from ans_core.agent.episode import Toolbox
from ans_core.agent.ocr import Line, check_reader, in_reading_order, read_lines
from ans_core.agent.protocol import Call
from ans_core.agent.workspace import Workspace
from tests.agent.test_operations import edits
from tests.golden import REFERENCE

PHOTOGRAPHS = REFERENCE / "data/tiny_coco/val2017"
FONTS = ("DejaVuSans.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSansMono.ttf", "STIXGeneral.ttf", "cmss10.ttf")
TEXTS = ("STOP sign 42 HELLO", "Exit 27 North", "Coffee and Cake", "Platform 9 closed", "OPEN 8:30 to 17:00")
WITHOUT_TEXT = (
    "000000006818", "000000017627", "000000037777", "000000041888", "000000153299",
    "000000181666", "000000184321", "000000184791", "000000219578", "000000233771",
)  # fmt: skip
"""Photographs in which nothing is written."""
installed = pytest.mark.skipif(
    find_spec("rapidocr") is None, reason="rapidocr is not installed (the extra ocr)"
)


def rendered(picture: Image.Image, text: str, font: str, size: int, *, turned: float = 0) -> Image.Image:
    """White letters with a dark edge, in the middle."""
    face = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf" / font), size)
    strip = Image.new("RGBA", (int(face.getlength(text)) + size, 2 * size), (0, 0, 0, 0))
    middle, edge = (strip.width // 2, strip.height // 2), max(1, size // 10)
    drawing = ImageDraw.Draw(strip)
    drawing.text(middle, text, font=face, fill="white", anchor="mm", stroke_width=edge, stroke_fill="black")
    strip = strip.rotate(turned, expand=True, resample=Image.Resampling.BICUBIC)
    picture = picture.convert("RGB")
    picture.paste(strip, ((picture.width - strip.width) // 2, (picture.height - strip.height) // 2), strip)
    return picture


def right_characters(size: int, *, turned: float) -> float:
    """Share of the characters, spaces aside; a line that nobody wrote costs its characters."""
    wrong = count = 0
    for number, name in enumerate(WITHOUT_TEXT):
        text, font = TEXTS[(number + number // 5 + size // 16) % 5], FONTS[number % 5]
        lines = read_lines(
            rendered(Image.open(PHOTOGRAPHS / f"{name}.jpg"), text, font, size, turned=turned), by="rapidocr"
        )
        said = "".join(line.text for line in lines).replace(" ", "")
        wanted = text.replace(" ", "")
        wrong += min(len(wanted), edits(said, wanted))
        count += len(wanted)
    return 1 - wrong / count


@installed
@pytest.mark.slow
@pytest.mark.skipif(not PHOTOGRAPHS.is_dir(), reason=f"no photographs at {PHOTOGRAPHS} (set ANS_REFERENCE)")
@pytest.mark.parametrize(("turned", "least"), [(0, 0.95), (10, 0.6)])
def test_words_on_photographs_are_read(turned: float, least: float) -> None:
    for size in (16, 32):
        assert right_characters(size, turned=turned) >= least, size


@installed
@pytest.mark.slow
def test_lines_have_their_places_their_order_and_a_confidence_and_no_text_is_an_observation() -> None:
    canvas = Image.new("RGB", (400, 300), (200, 190, 90))
    for text, place in (("left", (40, 60)), ("right", (260, 57)), ("below it 27", (40, 200))):
        ImageDraw.Draw(canvas).text(place, text, fill=(0, 0, 0), font=ImageFont.load_default(size=28))
    workspace = Workspace.of([canvas, Image.new("RGB", (400, 300), (90, 90, 90))])
    with Toolbox() as toolbox:
        seen, _ = toolbox.call(workspace, Call(name="read_text", arguments={}))
        _, workspace = toolbox.call(workspace, Call(name="select_frames", arguments={"frames": [1]}))
        nothing, _ = toolbox.call(workspace, Call(name="read_text", arguments={"image": "image_2"}))
    lines = seen.values["lines"]
    assert [line["text"] for line in lines] == ["left", "right", "below it 27"]
    assert all(0.8 < line["confidence"] <= 1 for line in lines)
    below, right = lines[2]["bbox_2d"], lines[1]["bbox_2d"]
    assert np.allclose(below[:2], [100, 700], atol=40)
    assert 300 < below[2] < 600 < right[0]
    assert nothing.error == "nothing_found"


def test_a_line_that_is_a_little_higher_stays_in_its_row() -> None:
    boxes = {
        "b": (50, 8, 90, 18),
        "a": (0, 10, 40, 20),
        "d": (50, 30, 90, 44),
        "c": (0, 32, 40, 42),
        "e": (0, 50, 40, 60),
    }
    lines = [Line(text=name, box=box, confidence=1.0) for name, box in boxes.items()]
    assert "".join(line.text for line in in_reading_order(lines)) == "abcde"


def test_a_reader_that_is_missing_or_unknown_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ocr, "find_spec", lambda name: None)
    check_reader("template")
    with pytest.raises(
        ValueError,
        match=r"to be installed: rapidocr, onnxruntime; `pip install -e '.\[ocr\]'`, or take the reader `temp",
    ):
        check_reader("rapidocr")
    with pytest.raises(ValueError, match="no reader named 'tesseract'; there are rapidocr, template"):
        check_reader("tesseract", setting="--reader")


@pytest.mark.parametrize(("setting", "threads"), [(None, -1), ("", -1), ("3", 3), ("4,2", 4)])
def test_rapidocr_takes_as_many_threads_as_the_first_level_of_openmp(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, threads: int
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if setting is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", setting)
    assert ocr._threads() == threads
