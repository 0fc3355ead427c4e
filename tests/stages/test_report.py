import html
import json
import re
import shutil
import subprocess
from collections import defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ans_core import rle
from ans_core.config import Config
from ans_core.overlay import save_animation, side_by_side
from ans_core.report import gallery
from ans_core.report.figures import by_scale, curves
from ans_core.report.metrics import MAIN, ROWS
from ans_core.stages.report import run

BENCHMARKS = {"referring": "gIoU_all", "region_caption": "METEOR", "grounded_caption": "mIoU_all_objects", "video": "J&F"}
SAMPLES = 40


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
    names = [f"{task}/val/{metric}" for task, metrics in MAIN.items() for metric in metrics]
    grades = {name: round(min(0.99, 0.1 + 0.22 * level + 0.05 * (i % 5)), 4) for i, name in enumerate(names)}
    grades |= {"referring/val/gIoU_shuffled_text": 0.2, "referring/val/samples": 530, "referring/val/gIoU/relation": 0.2 * level}
    (folder / "overlays").mkdir(parents=True)
    index, lines = [], []
    for benchmark, metric in BENCHMARKS.items():
        # sample 0 and 2 are right in every row, sample 1 in none; sample 3 from SFT on; video does not move
        start = np.random.default_rng(7).uniform(0.05, 0.3, SAMPLES)
        scores = np.clip(start + (0.2 * level if benchmark != "video" else 0) + rng.uniform(-0.02, 0.02, SAMPLES), 0, 1).round(4)
        scores[:4] = 0.91, 0.07, 0.91, 0.91 if level >= 2 else 0.07
        grades[f"{benchmark}/val/{metric}"] = float(scores.mean())
        for i, score in enumerate(scores):
            record = {"benchmark": f"{benchmark}/val", "dataset": "scenes", "sample_id": f"scene-{i}.0", "asked": f"the circle {i}"}
            lines.append(record | {"score": score, "text": "Sure, [SEG].", "masks": []})
        for i in range(pictures):
            right = scores[i] >= 0.5
            file = f"{benchmark}-{i}.{'gif' if benchmark == 'video' else 'png'}"
            if benchmark == "video":
                start = rng.integers(1000)
                frames = [picture(np.random.default_rng(start), right=right, shift=4 * t) for t in range(4)]
                save_animation(frames, folder / "overlays" / file, sample=frames, fps=4.0)
            else:
                picture(rng, right=right).save(folder / "overlays" / file)
            verdict = "right" if right else "wrong"
            entry = {"file": file, "benchmark": f"{benchmark}/val", "sample_id": f"scene-{i}.0", "score": scores[i], "verdict": verdict}
            index.append(entry | {"text": "Sure, [SEG].", "truth": "the <red> circle [SEG]"})
    (folder / "metrics.json").write_text(json.dumps(grades))
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "overlays" / "index.json").write_text(json.dumps(index))


def write_training(folder: Path, names: tuple[str, ...], steps: int) -> None:
    rng = np.random.default_rng(steps)
    folder.mkdir(parents=True)
    rows = [f"{step},{name},{(k + 1) * np.exp(-step / 200) + 0.05 * rng.random()}" for k, name in enumerate(names) for step in range(steps)]
    (folder / "curves.csv").write_text("\n".join(["step,name,value", *rows]) + "\n")


PROBE = """<iframe src="report.html" width="400" height="800" style="border: 0"></iframe><script>
const frame = document.querySelector("iframe");
frame.onload = () => {
  const page = frame.contentDocument, form = page.getElementById("filters"), shown = {};
  const count = () => [...page.querySelectorAll(".gallery figure")].filter((figure) => figure.offsetParent).length;
  const choose = (name, value) => {
    form.elements[name].value = value;
    form.dispatchEvent(new Event("input"));
    return count();
  };
  page.querySelectorAll("details").forEach((one) => { one.open = true; });
  shown.start = count();
  shown.all = choose("row", "");
  shown.changed = choose("show", "changed");
  shown.wrong = choose("show", "wrong");
  shown.none = choose("show", "unchecked");
  choose("show", "");
  const wide = [...page.querySelectorAll("body *")].filter((one) => !one.closest(".scroll > *, pre, thead, .skip, .choice input, svg *"))
    .filter((one) => one.getBoundingClientRect().right > 401 || (one.closest("table") && one.scrollWidth > one.clientWidth + 1));
  const found = { width: frame.contentWindow.innerWidth, wide: wide.map((one) => one.outerHTML.slice(0, 80)), shown };
  document.body.insertAdjacentHTML("beforeend", '<pre id="found"></pre>');
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


def example(root: Path, *, pictures: int = 4) -> dict[str, Path]:
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
            earned = {"rewards": {"iou": 0.4, "meteor": 0.7}, "advantage": -0.25}
            record = {"asked": f"the <thing> of {name}", "rollouts": [{"text": "a red ring"} | earned]}
            (inputs["rl"] / "samples" / f"{name}.json").write_text(json.dumps(record))
    inputs["versions"] = root / "versions.json"
    inputs["versions"].write_text(json.dumps({"git": "0123abc", "dvc_lock": "d41d8cd98f00b204e9800998ecf8427e"}))
    return inputs


Attributes = dict[str, str]


class Page(HTMLParser):
    """Collects what the browser would fetch and show, and checks that tags pair up."""

    VOID = ("meta", "img", "br", "input", "path", "use", "rect", "link")

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[str] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: dict[str, list[Attributes]] = defaultdict(list)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_startendtag(tag, attributes)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.sources += [value or "" for name, value in attributes if name in {"src", "href", "xlink:href"} and tag != "a"]
        self.tags[tag].append({name: value or "" for name, value in attributes})

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


@pytest.mark.slow
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
    giou = next(line for line in lines if '<th role="rowheader" scope="row">gIoU</th>' in line)
    assert giou.count('class="best"') == 1
    assert 'data-label="rl" class="best">0.760<span class="gain up">+0.220</span>' in giou
    shuffled = next(line for line in lines if '">gIoU_shuffled_text</th>' in line)
    assert "best" not in shuffled  # lower is better there, and it is a control, not a grade


def test_texts_are_escaped(inputs: dict[str, Path], tmp_path: Path):
    report(inputs, tmp_path)
    assert "the &lt;red&gt; circle [SEG]" in (tmp_path / "report.html").read_text()


def test_missing_pieces_are_named_and_nothing_is_invented(inputs: dict[str, Path], tmp_path: Path):
    page, metrics = report({"evaluate/sft": inputs["evaluate/sft"]}, tmp_path)
    words = " ".join(page.words)
    for absent in ("metrics of untrained, base, rl", "sft/curves.csv", "rl/rewards.json", "evaluate/rl/overlays/index.json"):
        assert f"Not there: {absent}" in words
    assert {name.partition("/")[0] for name in metrics} == {"sft"}
    assert list(json.loads((tmp_path / "summary.json").read_text())) == ["sft"]


@pytest.mark.slow
def test_the_number_of_pictures_follows_the_setting(inputs: dict[str, Path], tmp_path: Path):
    for setting, shown in ((1, 4 * 4 * 2), (32, 4 * 4 * 4)):  # at least one per row, benchmark and verdict; all there are
        page, _ = report(inputs, tmp_path, report={"overlays": setting})
        assert len([s for s in page.sources if s.startswith("data:image/")]) == shown + 10


def test_pictures_of_rollouts_are_the_first_the_last_and_some_between_of_each_loop(inputs: dict[str, Path], tmp_path: Path):
    page, _ = report(inputs, tmp_path)
    shown = [word for word in page.words if "asked: the <thing>" in word]
    assert [word.split("of ")[1] for word in shown] == [
        f"{rollout:06d}-{loop}" for loop in ("loop1", "loop2") for rollout in (0, 25, 75, 125, 175)
    ]  # fmt: skip


@pytest.mark.slow
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
        return [re.findall(r">\s*(sft[^<]*?)\s*</text>", chart)[0] for chart in curves(tmp_path)]

    assert titles(0.0) == ["sft", "sft/grad_norm"]
    assert titles(1.0) == ["sft", "sft/grad_norm", "sft/skipped"]


def test_curves_share_an_axis_with_those_of_their_own_scale():
    largest = {"kl": 0.01, "ratio": 1.0, "reward": 0.6, "length": 12.0, "zero": 0.0, "gap": -0.05}
    assert by_scale({name: [(0.0, 0.0), (1.0, value)] for name, value in largest.items()}) == [
        ["gap", "kl", "zero"], ["ratio", "reward"], ["length"],
    ]  # fmt: skip


def test_the_verdict_comes_first_and_says_what_got_better_and_what_did_not_move(inputs: dict[str, Path], tmp_path: Path):
    page, _ = report(inputs, tmp_path)
    assert [tag["id"] for tag in page.tags["section"]][:3] == ["verdict", "metrics", "gallery"]
    text = (tmp_path / "report.html").read_text()
    lines = {verdict: re.findall(rf'data-verdict="{verdict}">(.*?)</ul>', text, re.DOTALL)[0] for verdict in ("better", "worse", "unclear")}
    moved = ("Referring segmentation · val, gIoU_all", "Region captions · val, METEOR", "Grounded captions · val, mIoU_all_objects")
    assert all(name in lines["better"] for name in moved)
    assert "nothing beyond chance" in lines["worse"]
    assert "Video segmentation · val, J&amp;F" in lines["unclear"]


def test_pictures_carry_what_the_filters_ask_for_and_the_filters_offer_it(inputs: dict[str, Path], tmp_path: Path):
    """Sample 3 is wrong before SFT and right from then on; the others never change."""
    page, _ = report(inputs, tmp_path)
    pictures = [tag for tag in page.tags["figure"] if "data-verdict" in tag]
    assert {picture["data-verdict"] for picture in pictures} == {"right", "wrong"}
    assert [picture["data-row"] for picture in pictures if picture["data-changed"]] == ["sft"] * 4
    assert {picture["data-changed"] for picture in pictures} == {"", "better"}
    assert {picture["data-benchmark"] for picture in pictures} <= set(page.words)  # as options
    assert [tag["name"] for tag in page.tags["select"]] == ["row", "benchmark"]
    assert [tag["value"] for tag in page.tags["input"]] == ["", "right", "wrong", "changed", "unchecked"]
    assert all(tag.get("alt") for tag in page.tags["img"])
    assert all(tag["aria-label"] for tag in page.tags["svg"])


@pytest.mark.parametrize(
    ("answer", "verdict"), [("There is no such object.", "right"), ("the the the", "unchecked"), ("Sure, [SEG].", "unchecked")]
)
def test_other_words_than_a_denial_are_not_called_right_where_nothing_is_meant(tmp_path: Path, answer: str, verdict: str):
    folder = tmp_path / "evaluate"
    (folder / "overlays").mkdir(parents=True)
    (folder / "metrics.json").write_text('{"referring/val/N_acc": 1.0}')
    Image.new("RGB", (8, 8)).save(folder / "overlays" / "a.png")
    entry = {"file": "a.png", "benchmark": "referring/val", "sample_id": "1", "text": answer, "truth": "There is no such object."}
    (folder / "overlays" / "index.json").write_text(json.dumps([entry | {"score": 1.0, "verdict": "right"}]))
    page, _ = report({"evaluate/rl": folder}, tmp_path)
    assert [tag["data-verdict"] for tag in page.tags["figure"]] == [verdict]
    assert answer in page.words
    assert (gallery.UNCHECKED in page.words) == (verdict == "unchecked")


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
def test_a_page_of_400_pixels_clips_nothing_and_its_filters_hide_pictures(inputs: dict[str, Path], tmp_path: Path):
    """In a frame of 400 pixels: nothing reaches beyond it but what scrolls by itself; of each choice, the pictures shown."""
    report(inputs, tmp_path)
    (tmp_path / "frame.html").write_text(PROBE)
    command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'frame.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = json.loads(html.unescape(re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)[-1]))
    assert (found["width"], found["wide"]) == (400, [])
    assert found["shown"] == {"start": 8, "all": 32, "changed": 4, "wrong": 16, "none": 0}
