import base64
import html
import io
import json
import re
import shutil
import subprocess
from collections import Counter, defaultdict
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from ans_core.config import Config
from ans_core.pictures import rle
from ans_core.report import gallery
from ans_core.report.changes import Answer, Answers
from ans_core.report.figures import by_scale, curves
from ans_core.report.metrics import MAIN, ROWS
from ans_core.stages.report import run
from ans_core.types import Sample
from tests.browser import chromium

BENCHMARKS = {
    "referring": "gIoU_all",
    "region_caption": "METEOR",
    "grounded_caption": "mIoU_all_objects",
    "video": "J&F",
}
SETS = {"referring": "photos", "region_caption": "regions", "grounded_caption": "gone", "video": "clips"}
SAMPLES = 40
H, W, FRAMES = 12, 16, 4
OVERLAYS = 16
"""Four a benchmark."""


def box(left: int) -> dict[str, object]:
    mask = np.zeros((H, W), bool)
    mask[4:8, left : left + 4] = True
    return rle.encode(mask)


def write_data(root: Path) -> Path:
    """Three data sets of a user's, with SAMPLES samples each; the fourth one, which has predictions, is
    gone."""
    entries = []
    for name, form in (("photos", "annotations"), ("regions", "annotations"), ("clips", "videos")):
        folder = root / name
        folder.mkdir(parents=True)
        for place in range(FRAMES):
            pixels = np.full((H, W, 3), 100, np.uint8)
            pixels[4:8, place : place + 4] = 200, 40, 40
            Image.fromarray(pixels).save(folder / f"{place}.png")
        task = "region_caption" if name == "regions" else "referring"
        records = [
            {
                "image": "0.png",
                "text": f"the <red> circle {i}",
                "masks": [box(0)],
                "task": task,
                "split": "val",
            }
            for i in range(SAMPLES)
        ]
        if name == "regions":
            records = [record | {"masks": [box(i % 8)]} for i, record in enumerate(records)]
        if form == "annotations":
            (folder / "annotations.json").write_text(json.dumps(records))
        else:
            clip = {
                "frames": [{"file": f"{place}.png"} for place in range(FRAMES)],
                "masks_file": "masks.json",
            }
            clips = [
                clip | {"video_id": f"clip{i}", "objects": [{"obj_id": 1, "name": record["text"]}]}
                for i, record in enumerate(records)
            ]
            (folder / "manifest.jsonl").write_text("".join(json.dumps(line) + "\n" for line in clips))
            (folder / "masks.json").write_text(
                json.dumps({"masks": {"1": [box(place) for place in range(FRAMES)]}})
            )
        entries.append({"name": name, "format": form, "path": str(folder), "split": "val", "kind": "extra"})
    (root / "data").mkdir()
    (root / "data/datasets.json").write_text(json.dumps(entries))
    return root / "data"


def write_evaluation(folder: Path, level: int) -> None:
    rng = np.random.default_rng(level)
    names = [f"{task}/val/{metric}" for task, metrics in MAIN.items() for metric in metrics]
    grades = {name: round(min(0.99, 0.1 + 0.22 * level + 0.05 * (i % 5)), 4) for i, name in enumerate(names)}
    grades |= {
        "referring/val/gIoU_shuffled_text": 0.2,
        "referring/val/samples": 530,
        "referring/val/gIoU/relation": 0.2 * level,
    }
    folder.mkdir(parents=True)
    lines = []
    for benchmark, metric in BENCHMARKS.items():
        # sample 0 and 2 are right in every row, sample 1 in none; sample 3 from SFT on; video does not move
        start = np.random.default_rng(7).uniform(0.05, 0.3, SAMPLES)
        scores = np.clip(
            start + (0.2 * level if benchmark != "video" else 0) + rng.uniform(-0.02, 0.02, SAMPLES), 0, 1
        ).round(4)
        scores[:4] = 0.91, 0.07, 0.91, 0.91 if level >= 2 else 0.07
        grades[f"{benchmark}/val/{metric}"] = float(scores.mean())
        for i, score in enumerate(scores):
            sample_id = f"clip{i}_1" if benchmark == "video" else str(i)
            record = {
                "benchmark": f"{benchmark}/val",
                "dataset": SETS[benchmark],
                "sample_id": sample_id,
                "asked": f"the <red> circle {i}",
            }
            masks = (
                [[box(place + 1) for place in range(FRAMES if benchmark == "video" else 1)]]
                if benchmark != "region_caption"
                else []
            )
            lines.append(record | {"n_targets": 1, "score": score, "text": "Sure, [SEG].", "masks": masks})
    (folder / "metrics.json").write_text(json.dumps(grades))
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_training(folder: Path, names: tuple[str, ...], steps: int) -> None:
    rng = np.random.default_rng(steps)
    folder.mkdir(parents=True)
    rows = [
        f"{step},{name},{(k + 1) * np.exp(-step / 200) + 0.05 * rng.random()}"
        for k, name in enumerate(names)
        for step in range(steps)
    ]
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
  shown.none = choose("show", "worse");
  choose("show", "");
  page.querySelector(".gallery figure .open").click();
  shown.large = page.querySelectorAll("dialog[open] img").length;
  page.getElementById("large").close();
  const wide = [...page.querySelectorAll("body *")].filter((one) => !one.closest(".scroll > *, pre, thead, .skip, .choice input, svg *"))
    .filter((one) => one.getBoundingClientRect().right > 401 || (one.closest("table") && one.scrollWidth > one.clientWidth + 1));
  const found = { width: frame.contentWindow.innerWidth, wide: wide.map((one) => one.outerHTML.slice(0, 80)), shown };
  document.body.insertAdjacentHTML("beforeend", '<pre id="found"></pre>');
  document.getElementById("found").textContent = JSON.stringify(found);
};
</script>"""


def example(root: Path) -> dict[str, Path]:
    inputs = {f"evaluate/{row}": root / "evaluate" / row for row in ROWS} | {
        name: root / name for name in ("base", "sft", "rl")
    }
    for level, row in enumerate(ROWS):
        write_evaluation(inputs[f"evaluate/{row}"], level)
    inputs["data"] = write_data(root)
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
    sft = {"began": "2026-01-02 03:04", "took": "0:05:06", "on": "node7", "commit": "0123abc"}
    told = {"versions": {"git": "0123abc"}, "stages": {"sft": sft}, "settings": {"rl.kl": ["0.02", "0.05"]}}
    inputs["versions"].write_text(json.dumps(told))
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
        self.sources += [
            value or "" for name, value in attributes if name in {"src", "href", "xlink:href"} and tag != "a"
        ]
        self.tags[tag].append({name: value or "" for name, value in attributes})

    def handle_data(self, data: str) -> None:
        self.words.append(data.strip())


def report(inputs: dict[str, Path], out: Path, **settings: object) -> tuple[Page, dict[str, float]]:
    cfg = Config.model_validate({"profile": "smoke", "report": {"overlays": OVERLAYS}} | settings)
    metrics = run(cfg, inputs=inputs, out=out, scratch=out, log=lambda metrics, step: None)
    page = Page()
    page.feed((out / "report.html").read_text())
    assert page.open == []
    return page, metrics


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return example(tmp_path_factory.mktemp("runs"))


Written = tuple[Page, dict[str, float], Path]


@pytest.fixture(scope="module")
def written(inputs: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The page, the metrics and the folder of the report."""
    out = tmp_path_factory.mktemp("report")
    return (*report(inputs, out), out)


@pytest.mark.slow
def test_the_page_loads_nothing_from_elsewhere_and_its_clips_move(written: Written):
    page, _, out = written
    assert len([s for s in page.sources if s.startswith("data:image/png")]) == 10  # rollouts
    drawn = [base64.b64decode(s.partition(",")[2]) for s in page.sources if s.startswith("data:image/webp")]
    assert len(drawn) == 4 * 3 * OVERLAYS // 4  # rows, data sets that are there
    frames = sorted(Image.open(io.BytesIO(content)).n_frames for content in drawn)
    assert frames == [1] * 2 * OVERLAYS + [FRAMES] * OVERLAYS
    assert all(source.startswith(("data:image/", "#")) for source in page.sources)
    text = (out / "report.html").read_text()
    assert "@import" not in text
    assert "url(http" not in text


def test_the_summary_holds_every_stages_metrics(inputs: dict[str, Path], written: Written):
    _, metrics, out = written
    summary = json.loads((out / "summary.json").read_text())
    for row in ROWS:
        assert summary[row] == json.loads((inputs[f"evaluate/{row}"] / "metrics.json").read_text())
        assert metrics[f"{row}/referring/val/gIoU"] == summary[row]["referring/val/gIoU"]


def test_best_values_are_marked_and_changes_are_given(written: Written):
    lines = (written[2] / "report.html").read_text().splitlines()
    giou = next(line for line in lines if '<th role="rowheader" scope="row">gIoU</th>' in line)
    assert giou.count('class="best"') == 1
    assert 'data-label="rl" class="best">0.760<span class="gain up">+0.220</span>' in giou
    shuffled = next(line for line in lines if '">gIoU_shuffled_text</th>' in line)
    assert "best" not in shuffled  # lower is better there, and it is a control, not a grade


def test_texts_are_escaped_and_it_says_what_was_run_where(written: Written):
    page, _, out = written
    assert "the &lt;red&gt; circle 3" in (out / "report.html").read_text()
    words = " ".join(filter(None, page.words))
    assert "2026-01-02 03:04 0:05:06 node7 0123abc" in words
    assert "profile smoke here rl.kl 0.02 0.05" in words
    assert "No pictures of gone: its samples are not there" in words


def test_missing_pieces_are_named_and_nothing_is_invented(inputs: dict[str, Path], tmp_path: Path):
    evaluated = Path(shutil.copytree(inputs["evaluate/sft"], tmp_path / "sft"))
    (evaluated / "skipped.json").write_text(json.dumps({"mevis/valid_u": "skipped: /data is not there"}))
    page, metrics = report({"evaluate/sft": evaluated}, tmp_path)
    words = " ".join(page.words)
    assert "mevis/valid_u: skipped: /data is not there" in words
    for absent in (
        "metrics of untrained, base, rl",
        "sft/curves.csv",
        "rl/rewards.json",
        "pictures of rl",
        "times of the stages",
    ):
        assert f"Not there: {absent}" in words
    assert {name.partition("/")[0] for name in metrics} == {"sft"}
    assert list(json.loads((tmp_path / "summary.json").read_text())) == ["sft"]


def test_pictures_of_rollouts_are_the_first_the_last_and_some_between_of_each_loop(written: Written):
    page = written[0]
    shown = [word for word in page.words if "asked: the <thing>" in word]
    assert [word.split("of ")[1] for word in shown] == [
        f"{rollout:06d}-{loop}" for loop in ("loop1", "loop2") for rollout in (0, 25, 75, 125, 175)
    ]  # fmt: skip


@pytest.mark.slow
def test_two_reports_of_the_same_inputs_are_the_same_bytes(
    inputs: dict[str, Path], written: Written, tmp_path: Path
):
    report(inputs, tmp_path)
    assert (tmp_path / "report.html").read_bytes() == (written[2] / "report.html").read_bytes()


def test_without_any_metrics_there_is_no_report(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="evaluate first"):
        report({"evaluate/sft": tmp_path}, tmp_path)


def test_a_broken_file_is_named(tmp_path: Path):
    (tmp_path / "metrics.json").write_text("{")
    with pytest.raises(ValueError, match=r"metrics\.json is not JSON"):
        report({"evaluate/sft": tmp_path}, tmp_path)


@pytest.mark.slow
def test_a_trained_memory_has_curves_and_clips_before_sfts_and_one_passed_through_has_none(
    inputs: dict[str, Path], tmp_path: Path
):
    memory = tmp_path / "memory"
    write_training(memory, ("memory/loss",), 3)
    (memory / "clips").mkdir()
    shots = [Image.new("RGB", (40, 20), colour) for colour in ("red", "blue")]
    shots[0].save(memory / "clips/00-crossing_1.gif", save_all=True, append_images=shots[1:])
    report(inputs | {"memory": memory}, tmp_path / "with")
    text = (tmp_path / "with/report.html").read_text()
    assert re.findall(r"<h3>(base|memory|sft|rl)</h3>", text) == ["base", "memory", "sft", "rl"]
    assert "<figcaption>crossing_1</figcaption>" in text
    shown = base64.b64encode((memory / "clips/00-crossing_1.gif").read_bytes()).decode()
    assert f"data:image/gif;base64,{shown}" in text
    (tmp_path / "passed").mkdir()
    report(inputs | {"memory": tmp_path / "passed"}, tmp_path / "without")
    assert "<h3>memory</h3>" not in (tmp_path / "without/report.html").read_text()


def test_a_broken_line_of_curves_is_named(inputs: dict[str, Path], tmp_path: Path):
    (tmp_path / "curves.csv").write_text("step,name,value\n1,loss,0.5\n2,loss,high\n")
    with pytest.raises(ValueError, match=r"curves\.csv line 3"):
        report({"evaluate/sft": inputs["evaluate/sft"], "sft": tmp_path}, tmp_path)


@pytest.mark.slow
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


def test_the_verdict_comes_first_and_says_what_got_better_and_what_did_not_move(written: Written):
    page, _, out = written
    assert [tag["id"] for tag in page.tags["section"]][:3] == ["verdict", "metrics", "gallery"]
    text = (out / "report.html").read_text()
    lines = {
        verdict: re.findall(rf'data-verdict="{verdict}">(.*?)</div>', text, re.DOTALL)[0]
        for verdict in ("better", "unclear")
    }
    moved = (
        ("Referring segmentation · val", "gIoU_all"),
        ("Region captions · val", "METEOR"),
        ("Grounded captions · val", "mIoU_all_objects"),
    )
    assert all(f'{title} <span class="soft">{metric}</span>' in lines["better"] for title, metric in moved)
    assert 'Video segmentation · val <span class="soft">J&amp;F</span>' in lines["unclear"]
    assert "3 figures improved , nothing got worse beyond chance , 1 did not clearly change" in " ".join(
        filter(None, page.words)
    )


def test_pictures_carry_what_the_filters_ask_for_and_the_filters_offer_it(written: Written):
    """Sample 3 is wrong before SFT and right from then on."""
    page = written[0]
    pictures = [tag for tag in page.tags["figure"] if "data-verdict" in tag]
    assert {picture["data-verdict"] for picture in pictures} == {"right", "wrong"}
    flipped = Counter(
        (picture["data-row"], picture["data-benchmark"]) for picture in pictures if picture["data-changed"]
    )
    assert flipped["sft", "Video segmentation · val"] == 1
    assert not any(benchmark.startswith("Video") for row, benchmark in flipped if row != "sft")
    assert {picture["data-changed"] for picture in pictures} == {"", "better"}
    assert {picture["data-benchmark"] for picture in pictures} <= set(page.words)  # as options
    assert [tag["name"] for tag in page.tags["select"]] == ["row", "benchmark"]
    assert [tag["value"] for tag in page.tags["input"]] == [
        "",
        "right",
        "wrong",
        "changed",
        "better",
        "worse",
    ]
    assert all(tag.get("alt") for tag in page.tags["img"])
    assert all(tag["aria-label"] for tag in page.tags["svg"])


def test_samples_are_chosen_of_every_benchmark_the_most_changed_and_right_and_wrong_ones():
    def of(scores: list[float]) -> Answers:
        answers = {("d", str(i), 0): Answer(score=score, question="a") for i, score in enumerate(scores)}
        return {"referring/val": answers, "loop1/val": answers, "video/val": answers}

    before, after = of([0.9, 0.1, 0.5, 0.9, 0.2, 0.2, 0.9, 0.8]), of([0.9, 0.1, 0.4, 0.6, 0.2, 0.2, 0.9, 0.8])
    chosen = gallery.choose(before, after, 8)
    # 2 flips, 3 changes more
    assert [key[1] for benchmark, key in chosen if benchmark == "referring/val"] == ["2", "3", "0", "4"]
    assert Counter(benchmark for benchmark, _ in chosen) == {"referring/val": 4, "video/val": 4}
    assert len(gallery.choose({}, of([0.9, 0.9, 0.9]), 8)) == 6  # all there are


def test_a_caption_that_became_right_word_for_word_is_among_the_first_that_are_shown():
    def of(*texts: str) -> Answers:
        scores = {"dog": 0.5, "cat": 0.0}  # METEOR of a single word
        return {
            "region_caption/val": {
                ("d", str(i), 0): Answer(score=scores[t], question="dog", text=t) for i, t in enumerate(texts)
            }
        }

    chosen = gallery.choose(of("cat", "dog", "dog", "cat"), of("cat", "dog", "cat", "dog"), 4)
    assert {key[1] for _, key in chosen[:2]} == {"2", "3"}
    ((benchmark, answers),) = of("dog").items()
    assert gallery.is_right(benchmark, answers["d", "0", 0])


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [("There is no such object.", "right"), ("the the the", "unchecked"), ("Sure, [SEG].", "unchecked")],
)
def test_other_words_than_a_denial_are_not_called_right_where_nothing_is_meant(
    tmp_path: Path, answer: str, verdict: str
):
    Image.new("RGB", (W, H)).save(tmp_path / "a.png")
    asked = Sample(
        sample_id="1",
        dataset="d",
        image_id="a",
        frames=(tmp_path / "a.png",),
        height=H,
        width=W,
        task="referring",
        text="a cow",
    )
    shown = gallery.picture("referring/val", asked, {"rl": {"score": 1.0, "text": answer, "masks": []}})
    assert (shown["verdict"], shown["note"] == gallery.UNCHECKED) == (verdict, verdict == "unchecked")


@pytest.mark.parametrize(
    ("before", "after", "told"),
    [
        ("A dog.", "a cat", ("wrong", "worse")),
        ("a cat", "a dog", ("right", "better")),
        ("a dog", "A dog.", ("right", "")),
    ],
)
def test_a_regions_caption_is_right_word_for_word_whatever_its_score(
    tmp_path: Path, before: str, after: str, told: tuple[str, str]
):
    Image.new("RGB", (W, H)).save(tmp_path / "a.png")
    region = {
        "frames": (tmp_path / "a.png",),
        "height": H,
        "width": W,
        "task": "region_caption",
        "masks": ((rle.empty(H, W),),),
    }
    asked = Sample(sample_id="1", dataset="d", image_id="a", text="a dog", **region)
    records = {
        name: {"score": 0.6, "text": text, "masks": []} for name, text in (("sft", before), ("rl", after))
    }
    shown = gallery.picture("region_caption/val", asked, records)
    assert (shown["verdict"], shown["flipped"]) == told


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
def test_a_page_of_400_pixels_clips_nothing_and_its_filters_hide_pictures(written: Written, tmp_path: Path):
    """In a frame of 400 pixels: nothing reaches beyond it but what scrolls by itself; of each choice, the
    pictures shown."""
    shutil.copy(written[2] / "report.html", tmp_path)
    (tmp_path / "frame.html").write_text(PROBE)
    command = [
        "chromium",
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--allow-file-access-from-files",
        "--dump-dom",
    ]
    done = subprocess.run(
        [*command, "--virtual-time-budget=5000", f"--user-data-dir={tmp_path / 'profile'}", f"file://{tmp_path / 'frame.html'}"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    found = json.loads(html.unescape(re.findall(r'<pre id="found">(.*?)</pre>', done.stdout)[-1]))
    assert (found["width"], found["wide"]) == (400, [])
    pictures = [tag for tag in written[0].tags["figure"] if "data-verdict" in tag]
    wanted = {
        "start": sum(picture["data-row"] == "rl" for picture in pictures),
        "all": len(pictures),
        "changed": sum(picture["data-changed"] != "" for picture in pictures),
        "wrong": sum(picture["data-verdict"] == "wrong" for picture in pictures),
    }
    assert found["shown"] == wanted | {"none": 0, "large": 1}
    assert 0 < wanted["changed"] < wanted["wrong"] < wanted["all"]


@pytest.fixture
def tab():
    """A tab of Chromium."""
    driver = pytest.importorskip(
        "playwright.sync_api", reason="the browser's driver is missing: pip install playwright"
    )
    with driver.sync_playwright() as browsers:
        browser = browsers.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        yield browser.new_page()
        browser.close()


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_is_never_wider_than_its_window(written: Written, tmp_path: Path, tab, width: int):
    """With settings as long as a list of data sets is."""
    text = (written[2] / "report.html").read_text()
    assert "<code>0.05</code>" in text
    (tmp_path / "long.html").write_text(
        text.replace("<code>0.05</code>", f"<code>{[{'name': 'mine', 'path': '/home/me/data'}] * 5}</code>")
    )
    tab.set_viewport_size({"width": width, "height": 800})
    tab.goto((tmp_path / "long.html").as_uri())
    assert tab.evaluate("document.documentElement.scrollWidth") == width


@pytest.mark.slow
def test_a_pdf_has_the_pictures_of_the_whole_page_which_nobody_scrolled(written: Written, tab):
    tab.goto((written[2] / "report.html").as_uri())
    shown = tab.evaluate(
        "new Set([...document.images].filter((one) => one.offsetParent).map((one) => one.src)).size"
    )
    # a mask of transparency is an image, too
    assert len(re.findall(rb"/Subtype /Image", tab.pdf())) >= shown == 10
