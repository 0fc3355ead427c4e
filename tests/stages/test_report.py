import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ans_core import rle
from ans_core.config import Config
from ans_core.overlay import save_animation, side_by_side
from ans_core.stages.report import HEADLINE, ROWS, _curves, run

BENCHMARKS = ("referring", "region_caption", "grounded_caption", "video")


def disk(y: float, x: float, radius: float) -> np.ndarray:
    grid_y, grid_x = np.mgrid[:128, :128]
    return (grid_y - y) ** 2 + (grid_x - x) ** 2 < radius**2


def picture(rng: np.random.Generator, *, right: bool, shift: float = 0) -> Image.Image:
    y, x = rng.uniform(30, 98, 2)
    other = rng.uniform(30, 98, 2)
    pixels = np.full((128, 128, 3), 150, np.uint8) + rng.integers(0, 25, (128, 128, 3), np.uint8)
    pixels[disk(y, x + shift, 18)], pixels[disk(*other, 14)] = (200, 40, 40), (40, 60, 200)
    truth = [rle.encode(disk(y, x + shift, 18))]
    drawn = [rle.encode(disk(y + 1, x + shift - 1, 17) if right else disk(*other, 14))]
    return side_by_side(
        Image.fromarray(pixels),
        truth=truth,
        prediction=drawn,
        question="Please segment the large red circle on the left in this image.",
        truth_text="It is [SEG].",
        prediction_text="Sure, the segmentation result is [SEG].",
    )


def write_evaluation(folder: Path, level: int, *, pictures: int) -> None:
    rng = np.random.default_rng(level)
    grades = {name: round(min(0.99, 0.1 + 0.22 * level + 0.05 * (i % 5)), 4) for i, name in enumerate(HEADLINE)}
    grades |= {"referring/val/gIoU_shuffled_text": 0.2, "referring/val/samples": 530, "referring/val/gIoU/relation": 0.2 * level}
    (folder / "overlays").mkdir(parents=True)
    (folder / "metrics.json").write_text(json.dumps(grades))
    index = []
    for benchmark in BENCHMARKS:
        for i in range(pictures):
            right = i % 2 == 0
            file = f"{benchmark}-{i}.{'gif' if benchmark == 'video' else 'png'}"
            if benchmark == "video":
                start = rng.integers(1000)
                frames = [picture(np.random.default_rng(start), right=right, shift=4 * t) for t in range(4)]
                save_animation(frames, folder / "overlays" / file, sample=frames, fps=4.0)
            else:
                picture(rng, right=right).save(folder / "overlays" / file)
            score, verdict = (0.91, "right") if right else (0.07, "wrong")
            entry = {"file": file, "benchmark": benchmark, "sample_id": f"scene-{i}.0", "score": score, "verdict": verdict}
            index.append(entry | {"text": "Sure, [SEG].", "truth": "the <red> circle"})
    (folder / "overlays" / "index.json").write_text(json.dumps(index))


def write_training(folder: Path, names: tuple[str, ...], steps: int) -> None:
    rng = np.random.default_rng(steps)
    folder.mkdir(parents=True)
    rows = [f"{step},{name},{(k + 1) * np.exp(-step / 200) + 0.05 * rng.random()}" for k, name in enumerate(names) for step in range(steps)]
    (folder / "curves.csv").write_text("\n".join(["step,name,value", *rows]) + "\n")


def example(root: Path, *, pictures: int = 2) -> dict[str, Path]:
    inputs = {f"evaluate/{row}": root / "evaluate" / row for row in ROWS} | {name: root / name for name in ("base", "sft", "rl")}
    for level, row in enumerate(ROWS):
        write_evaluation(inputs[f"evaluate/{row}"], level, pictures=pictures)
    write_training(inputs["base"], ("sam/loss", "sam/dice", "language/loss"), 700)
    write_training(inputs["sft"], ("loss/text", "loss/mask_bce", "loss/mask_dice", "lr", "val/gIoU"), 600)
    write_training(inputs["rl"], ("loop1/kl", "loop2/kl", "loop1/degenerate_groups", "grad_norm"), 150)
    rng = np.random.default_rng(0)
    steps = [np.clip(rng.normal(0.5 + 0.002 * step, 0.15, 48), 0, 1).round(3).tolist() for step in range(150)]
    (inputs["rl"] / "rewards.json").write_text(json.dumps({"loop1/iou": steps, "loop2/meteor": steps}))
    (inputs["rl"] / "samples").mkdir()
    for rollout in range(0, 200, 25):
        for loop in ("loop1", "loop2"):
            name = f"{rollout:06d}-{loop}"
            Image.new("RGB", (70, 20), (rollout, 40, 40)).save(inputs["rl"] / "samples" / f"{name}.png")
            (inputs["rl"] / "samples" / f"{name}.json").write_text(json.dumps({"asked": f"the <thing> of {name}"}))
    inputs["versions"] = root / "versions.json"
    inputs["versions"].write_text(json.dumps({"git": "0123abc", "dvc_lock": "d41d8cd98f00b204e9800998ecf8427e"}))
    return inputs


class Page(HTMLParser):
    """Collects what the browser would fetch, and checks that tags pair up."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attributes if name in {"src", "href", "xlink:href"} and tag != "a"]
        if tag not in {"meta", "img", "br", "path", "use", "rect", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in {"path", "use", "rect"}:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attributes if name in {"src", "href", "xlink:href"}]

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def report(inputs: dict[str, Path], out: Path, **settings: object) -> tuple[Page, dict[str, float]]:
    cfg = Config.model_validate({"profile": "smoke"} | settings)
    metrics = run(cfg, inputs=inputs, out=out, scratch=out, log=lambda metrics, step: None)
    page = Page()
    page.feed((out / "report.html").read_text())
    assert page.open == []
    return page, metrics


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return example(tmp_path_factory.mktemp("runs"))


def test_the_page_loads_nothing_from_elsewhere(inputs: dict[str, Path], tmp_path: Path):
    page, _ = report(inputs, tmp_path)
    assert len([s for s in page.sources if s.startswith("data:image/png")]) == 4 * 3 * 2 + 10
    assert len([s for s in page.sources if s.startswith("data:image/gif")]) == 4 * 2
    assert all(source.startswith(("data:image/", "#")) for source in page.sources)
    text = (tmp_path / "report.html").read_text()
    assert "@import" not in text
    assert "url(http" not in text


def test_the_summary_holds_every_stages_metrics(inputs: dict[str, Path], tmp_path: Path):
    _, metrics = report(inputs, tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    for row in ROWS:
        assert summary[row] == json.loads((inputs[f"evaluate/{row}"] / "metrics.json").read_text())
        assert metrics[f"{row}/referring/val/gIoU"] == summary[row]["referring/val/gIoU"]


def test_best_values_are_marked_and_changes_are_given(inputs: dict[str, Path], tmp_path: Path):
    report(inputs, tmp_path)
    lines = (tmp_path / "report.html").read_text().splitlines()
    giou = next(line for line in lines if line.startswith("<tr><td>referring/val/gIoU</td>"))
    assert giou.count('class="best"') == 1
    assert '<td class="best">0.760<span class="gain up">+0.220</span>' in giou
    shuffled = next(line for line in lines if "gIoU_shuffled_text</td>" in line)
    assert "best" not in shuffled  # lower is better there, and it is a control, not a grade


def test_texts_are_escaped(inputs: dict[str, Path], tmp_path: Path):
    report(inputs, tmp_path)
    assert "the &lt;red&gt; circle" in (tmp_path / "report.html").read_text()


def test_missing_pieces_are_named_and_nothing_is_invented(inputs: dict[str, Path], tmp_path: Path):
    page, metrics = report({"evaluate/sft": inputs["evaluate/sft"]}, tmp_path)
    words = " ".join(page.words)
    for absent in ("metrics of untrained, base, rl", "sft/curves.csv", "rl/rewards.json", "evaluate/rl/overlays/index.json"):
        assert f"Not there: {absent}" in words
    assert {name.partition("/")[0] for name in metrics} == {"sft"}
    assert list(json.loads((tmp_path / "summary.json").read_text())) == ["sft"]


def test_the_number_of_pictures_follows_the_setting(inputs: dict[str, Path], tmp_path: Path):
    page, _ = report(inputs, tmp_path, report={"overlays": 1})
    assert len([s for s in page.sources if s.startswith("data:image/")]) == 4 * 8 + 10  # at least one per benchmark and verdict


def test_pictures_of_rollouts_are_the_first_the_last_and_some_between_of_each_loop(inputs: dict[str, Path], tmp_path: Path):
    page, _ = report(inputs, tmp_path)
    shown = [word for word in page.words if "asked: the <thing>" in word]
    assert [word.split("of ")[1] for word in shown] == [
        f"{rollout:06d}-{loop}" for loop in ("loop1", "loop2") for rollout in (0, 25, 75, 125, 175)
    ]  # fmt: skip


def test_two_reports_of_the_same_inputs_are_the_same_bytes(inputs: dict[str, Path], tmp_path: Path):
    report(inputs, tmp_path / "one")
    report(inputs, tmp_path / "two")
    assert (tmp_path / "one" / "report.html").read_bytes() == (tmp_path / "two" / "report.html").read_bytes()


def test_without_any_metrics_there_is_no_report(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="evaluate first"):
        report({"evaluate/sft": tmp_path}, tmp_path)


def test_a_broken_file_is_named(tmp_path: Path):
    (tmp_path / "metrics.json").write_text("{")
    with pytest.raises(ValueError, match=r"metrics\.json is not JSON"):
        report({"evaluate/sft": tmp_path}, tmp_path)


def test_a_broken_line_of_curves_is_named(inputs: dict[str, Path], tmp_path: Path):
    (tmp_path / "curves.csv").write_text("step,name,value\n1,loss,0.5\n2,loss,high\n")
    with pytest.raises(ValueError, match=r"curves\.csv line 3"):
        report({"evaluate/sft": inputs["evaluate/sft"], "sft": tmp_path}, tmp_path)


def test_what_the_loop_adds_has_charts_of_its_own_and_skipped_steps_only_where_there_are_any(tmp_path: Path):
    def titles(skipped: float) -> list[str]:
        values = {"loss": 1.0, "text": 2.0, "grad_norm": 50.0, "skipped": skipped}
        rows = [f"{step},sft/{name},{value}" for step in (0, 1) for name, value in values.items()]
        (tmp_path / "curves.csv").write_text("\n".join(["step,name,value", *rows]) + "\n")
        return [re.findall(r">\s*(sft[^<]*?)\s*</text>", chart)[0] for chart in _curves(tmp_path)]

    assert titles(0.0) == ["sft", "sft/grad_norm"]
    assert titles(1.0) == ["sft", "sft/grad_norm", "sft/skipped"]
