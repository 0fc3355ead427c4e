"""The page of `ans demo` in a real browser: upload, ask, switch masks, describe a clicked region, follow a
clip."""

from __future__ import annotations

import copy
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from scipy import ndimage

from ans_core.checkpoints import checkpoint
from ans_core.inference.answer import save_video
from ans_core.inference.prefill import prompt
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.types import Request
from tasks.ports import free_port
from tests import tiny
from tests.browser import CHROMIUM

pytest.importorskip("gradio", reason="gradio is missing: pip install -c requirements/demo.txt -e '.[demo]'")

playwright = pytest.importorskip(
    "playwright.sync_api", reason="the browser's driver is missing: pip install playwright"
)
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]

WAIT_MS = 120_000
QUESTION = "Please segment the red square in this image."


@pytest.fixture
def model(tmp_path: Path, tiny_model: Network) -> Path:
    """A model whose answers are `[SEG]` alone: only this token and the end of a turn have weight, each in the
    state where it is due."""
    talker = copy.deepcopy(tiny_model)
    talker.keep_original_decoder()
    end = talker.tokenizer.convert_tokens_to_ids("<|im_end|>")
    with torch.no_grad():
        prefix = tiny.embeds_of(
            prompt(talker, [Request(frames=(tiny.picture(0),), text=f"<image>\n{QUESTION}")])
        )
        spoken = torch.cat([prefix, talker.embed_text(torch.tensor([talker.seg_token_id]))])
        states = talker.internvl.model.language_model(inputs_embeds=spoken[None]).last_hidden_state[0, -2:]
        talker.internvl.lm_head.weight.zero_()
        talker.internvl.lm_head.weight[[talker.seg_token_id, end]] = F.normalize(states, dim=-1)
    checkpoint.save(talker, tmp_path / "run/model", metadata={})
    return tmp_path / "run/model"


@pytest.fixture
def url(model: Path, tmp_path: Path) -> Iterator[str]:
    port = free_port()
    log = (tmp_path / "page.log").open("w+")
    command = [
        sys.executable,
        "-m",
        "flows.cli",
        "demo",
        str(model),
        "--against",
        str(model.parent / "other"),
        "--port",
        str(port),
    ]
    shutil.copytree(model, model.parent / "other")
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        assert line == f"ans demo: http://127.0.0.1:{port}/ (Ctrl-C ends it)\n", (
            line,
            (tmp_path / "page.log").read_text(),
        )
        yield f"http://127.0.0.1:{port}/"
    finally:
        server.terminate()
        server.wait(30)


@pytest.fixture
def page(url: str) -> Iterator[Any]:
    """A tab that loads nothing from another host."""
    foreign: list[str] = []
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else []
        )
        tab = browser.new_page(viewport={"width": 1280, "height": 900})
        tab.set_default_timeout(WAIT_MS)
        tab.on(
            "request",
            lambda request: (
                foreign.append(request.url) if not request.url.startswith((url, "data:", "blob:")) else None
            ),
        )
        tab.goto(url)
        tab.wait_for_selector("#question textarea")
        yield tab
        browser.close()
    assert foreign == []


def test_a_picture_and_a_clip_are_asked_about_in_a_browser(page: Any, tmp_path: Path) -> None:
    keeps_to_itself(page)
    page.wait_for_selector("#stage-0 .empty")
    # of a checkpoint without samples
    assert page.inner_text("#stage-0") == "No picture yet: drop a picture or a clip."
    upload(page, tmp_path / "notes.txt", b"hello")
    page.wait_for_selector("#note .error")
    assert page.inner_text("#note").startswith("notes.txt is neither a picture")

    upload(page, tmp_path / "still.png", tiny.picture(0))
    page.wait_for_selector("#stage-0 img")
    plain, before = source(page), pixels(page)
    page.fill("#question textarea", QUESTION)
    page.click("#ask")
    answered(page, 1)
    assert page.inner_text("#chat mark >> nth=0") == "mask 1"
    with page.expect_download() as downloaded:
        page.click("#rle-0")
    told = json.loads(Path(downloaded.value.path()).read_text())
    # the page shows 64 pixels as 640
    mask = np.kron(rle.decode(told["masks"][0][0]), np.ones((10, 10), bool))
    changed = np.abs(pixels(page) - before).max(-1) > 20
    assert told["asked"] == QUESTION
    # away from the contour and its JPEG blocks
    inside, outside = (ndimage.binary_erosion(part, iterations=9) for part in (mask, ~mask))
    assert changed[inside].mean() > 0.5
    assert changed[outside].mean() < 0.02
    page.uncheck("#masks-0 input")
    page.wait_for_function("source => document.querySelector('#stage-0 img').src === source", arg=plain)

    describe_a_clicked_region(page)
    follow_a_clip(page, tmp_path)


def keeps_to_itself(page: Any) -> None:
    """It answers no other name, gives out no other file, and lets the browser load nothing from elsewhere."""
    assert page.request.get(page.url, headers={"Host": "evil.example"}).status == 400
    assert page.request.get(f"{page.url}gradio_api/file={Path(__file__).resolve()}").status == 403
    assert page.request.get(page.url).headers["content-security-policy"].startswith("default-src 'self' ")


def describe_a_clicked_region(page: Any) -> None:
    """A stroke of the brush, then a click, become region1 and region2; cleared, and clicked again, the region
    is described."""
    box = page.locator("#stage-0 svg").bounding_box()
    left, right, y = (
        box["x"] + 0.2 * box["width"],
        box["x"] + 0.35 * box["width"],
        box["y"] + 0.25 * box["height"],
    )
    plain = source(page)
    page.check("#prompt-kind input[value=brush]")
    page.mouse.move(left, y)
    page.mouse.down()
    page.mouse.move(right, y, steps=4)
    page.mouse.up()
    painted = changed_from(page, plain)
    white = (pixels(page) > 200).all(-1)
    assert white[140:180, 120:240].any(), "the stroke has no outline"
    page.check("#prompt-kind input[value=click]")
    page.mouse.click(left, y)
    changed_from(page, painted)
    page.click("#clear")
    page.wait_for_function("source => document.querySelector('#stage-0 img').src === source", arg=plain)
    page.mouse.click(left, y)
    changed_from(page, plain)
    page.click("#describe-region")
    answered(page, 2)
    assert page.inner_text("#chat .question >> nth=1").endswith(
        "the region in the picture marked by region1."
    )
    assert page.inner_text("#chat .answer >> nth=1")


def changed_from(page: Any, before: str) -> str:
    """Wait for another picture and return it."""
    page.wait_for_function("source => document.querySelector('#stage-0 img').src !== source", arg=before)
    return source(page)


def follow_a_clip(page: Any, tmp_path: Path) -> None:
    save_video(
        (transforms.open_image(frame) for frame in tiny.clip(0, frames=6).frames),
        tmp_path / "clip.mp4",
        fps=4.0,
    )
    upload(page, tmp_path / "clip.mp4", None)
    page.wait_for_selector("#player-0 video")
    page.click("#against input")
    page.locator("[role=option]").nth(1).click()
    page.wait_for_selector("#stage-1 img")
    for mode in ("sa2va", "auto"):
        page.check(f"#mode input[value={mode}]")
    page.fill("#question textarea", QUESTION)
    page.click("#ask")
    answered(page, 2)
    assert page.locator("#chat .who").all_inner_texts() == ["run/model", "run/other"]
    for place in range(2):
        page.wait_for_selector(f"#player-{place} video")
        page.wait_for_function(f"document.querySelector('#player-{place} video').currentTime > 0.1")
        assert page.evaluate(f"document.querySelector('#player-{place} video').duration") == pytest.approx(
            1.5, abs=0.1
        )


def upload(page: Any, path: Path, content: bytes | None) -> None:
    if content is not None:
        path.write_bytes(content)
    if (
        remove := page.locator("#upload button[aria-label*=lear], #upload button[aria-label*=emove]")
    ).count():
        remove.first.click()
    page.set_input_files("#upload input[type=file]", path)


def answered(page: Any, count: int) -> None:
    """Wait until the chat has `count` answers and nothing is at work."""
    page.wait_for_function(
        f"document.querySelectorAll('#chat .answer').length === {count} && document.querySelector('#stop').disabled"
    )


def source(page: Any) -> str:
    """Return the picture's data URI."""
    return page.get_attribute("#stage-0 img", "src")


def pixels(page: Any) -> np.ndarray:
    """Return what the browser paints of the picture, at 640 x 640."""
    painted = Image.open(io.BytesIO(page.locator("#stage-0 .stage").screenshot())).convert("RGB")
    return np.asarray(painted.resize((640, 640), Image.Resampling.NEAREST)).astype(int)
