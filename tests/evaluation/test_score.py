from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ans_core.benchmarks.public.published import comparison, published
from ans_core.benchmarks.registry import SCORERS
from ans_core.config.names import OTHER_NAMES
from flows import cli
from tests.benchmarks.public.drawn import H, W, coded, write

TRUTH = [
    {"id": "a", "mask": coded(0, 4)},
    {"id": "b", "mask": None, "height": H, "width": W},
    {"id": "c", "mask": coded(0, 1)},
]


def ans(*words: object) -> int:
    arguments = cli.parse(["eval", "score", *map(str, words)])
    return arguments.function(arguments)


def test_it_prints_the_figures_with_intervals_and_writes_them_with_a_record_a_sample(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    truth = write(tmp_path / "truth.jsonl", TRUTH)
    drawn = write(tmp_path / "drawn.jsonl", [{"id": "a", "mask": coded(0, 5)}, {"id": "b", "mask": None}])
    assert (
        ans("refcoco", "--predictions", drawn, "--data", truth, "--out", tmp_path / "out/metrics.json") == 0
    )
    told = capsys.readouterr().out
    assert "gIoU" in told
    assert "1 predictions are missing; they count 0" in told
    assert "Sa2VA-4B" in told
    written = json.loads((tmp_path / "out/metrics.json").read_text())
    assert written["metrics"]["gIoU"] == pytest.approx((0.8 + 1 + 0) / 3)
    assert written["missing"] == 1
    low, high = written["intervals"]["gIoU"]
    assert low <= written["metrics"]["gIoU"] <= high
    samples = [json.loads(line) for line in (tmp_path / "out/metrics.samples.jsonl").read_text().splitlines()]
    assert [s["id"] for s in samples] == ["a", "b", "c"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothing"], "no benchmark 'nothing' to score; there are captions, coco_boxes, detailed_captions"),
        (
            ["vstarr"],
            "no benchmark 'vstarr' to score .did you mean 'vstar'..; there are captions, coco_boxes, detailed_captions",
        ),
        ([], "takes one benchmark, not none; there are captions"),
        (["refcoco"], "--predictions is missing"),
        (["refcoco", "--predictions", "truth.jsonl"], "refcoco needs --data: records of true masks"),
        (
            ["refcoco", "--predictions", "truth.jsonl", "--data", "truth.jsonl"],
            "would be scored against itself",
        ),
        (["gar_bench", "--predictions", ".", "--data", "."], "would be scored against itself"),
        (["refcoco", "--predictions", "nowhere.jsonl", "--data", "truth.jsonl"], "no such file or folder"),
        (["vstar", "--predictions", "truth.jsonl", "--convention", "davis"], "vstar takes no --convention"),
        (
            ["refcoco", "--predictions", "refer", "--data", "truth.jsonl"],
            "refer is a folder; give a file in it",
        ),
        (["refcoco", "--predictions", "empty.jsonl", "--data", "refer"], "empty.jsonl: no predictions"),
    ],
)
def test_what_is_wrong_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "truth.jsonl", TRUTH)
    write(tmp_path / "empty.jsonl", [])
    (tmp_path / "refer").mkdir()
    with pytest.raises(ValueError, match=message):
        ans(*words)


def test_figures_replace_an_earlier_score_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "true").mkdir()
    truth = write(tmp_path / "true/truth.jsonl", TRUTH)
    drawn = write(tmp_path / "drawn.samples.jsonl", [{"id": "a", "mask": coded(0, 5)}])
    (tmp_path / "notes.txt").write_text("mine")
    words = ("refcoco", "--predictions", drawn, "--predicted-only", "--data", truth, "--out")
    before = {file: file.read_bytes() for file in tmp_path.rglob("*.*")}
    for out, message in (
        (drawn, "would replace --predictions"),
        ("drawn.json", "would replace --predictions"),  # its table of samples
        (truth, "exists and is of no earlier score"),
        ("notes.txt", "notes.txt exists and is of no earlier score"),
        ("true", "true exists and is of no earlier score"),
    ):
        with pytest.raises(ValueError, match=message):
            ans(*words, out)
    assert {file: file.read_bytes() for file in tmp_path.rglob("*.*")} == before
    for _ in range(2):
        assert ans(*words, "figures.json") == 0


def test_files_that_cannot_be_read_are_refused_by_name(tmp_path: Path):
    truth = write(tmp_path / "truth.json", TRUTH)
    packed = gzip.compress(truth.read_bytes())
    for name, content, message in (
        ("cut.json.gz", packed[:-12], "is cut off or not UTF-8 text in gzip"),
        ("plain.json.gz", b"[]", "is cut off or not UTF-8 text in gzip"),
        ("bytes.json", b"\xff\xfe", "is cut off or not UTF-8 text"),
        ("bytes.jsonl", b"\xff\xfe", "is cut off or not UTF-8 text"),
        ("deep.json", b"[" * 100_000, "nested too deep"),
        ("twice.json", b'[{"id": "a", "id": "b", "mask": null}]', "key 'id' comes twice in one object"),
        (
            "twice.jsonl",
            b'{"id": "a", "mask": null, "mask": null}',
            "line 1: key 'mask' comes twice in one object",
        ),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{tmp_path / name}.*{message}"):
            ans("refcoco", "--predictions", tmp_path / name, "--data", truth)


def test_a_byte_order_mark_and_ids_in_floating_point_change_no_figure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    numbered = [record | {"id": float(n)} for n, record in enumerate(TRUTH)]
    truth = write(tmp_path / "truth.json", [record | {"id": n} for n, record in enumerate(TRUTH)])
    mark, whole, lines = (
        b"\xef\xbb\xbf",
        json.dumps(numbered).encode(),
        "\n".join(map(json.dumps, numbered)).encode(),
    )
    files = {
        "a.json": mark + whole,
        "b.jsonl": mark + lines,
        "c.json.gz": gzip.compress(mark + whole),
        "d.json": whole,
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
        assert ans("refcoco", "--predictions", tmp_path / name, "--data", truth) == 0
        assert "1.000000" in capsys.readouterr().out


def test_a_hard_link_to_the_truth_is_refused(tmp_path: Path):
    truth = write(tmp_path / "truth.json", TRUTH)
    (tmp_path / "mine.json").hardlink_to(truth)
    with pytest.raises(ValueError, match="would be scored against itself"):
        ans("refcoco", "--predictions", tmp_path / "mine.json", "--data", truth)


def test_judged_and_several_figures_stand_beside_published_ones():
    for name, metrics, ours in (
        (
            "dlc_bench",
            {"objects": 100.0, "average": 0.67, "positive": 0.51, "negative": 0.83},
            [67.0, 51.0, 83.0],
        ),
        ("ferret_bench", {"questions": 40.0, "score": 55.98}, [55.98]),
        ("gar_bench", {"vqa/count": 424.0, "vqa/accuracy": 0.5}, [50.0]),
    ):
        assert sorted({row.ours or 0.0 for row in comparison(name, "", metrics, samples=1)}) == pytest.approx(
            sorted(ours)
        )
        assert {row.ours for row in comparison(name, "", dict.fromkeys(metrics, 0.5), samples=1)} == {None}


def test_a_part_of_a_benchmark_whose_predictions_hold_the_truth_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    review = write(tmp_path / "review.json", [{"question_id": 1, "answer2_id": 1, "content": "8 6"}])
    assert ans("ferret_bench", "--predictions", review, "--out", tmp_path / "metrics.json") == 0
    assert "a part of the benchmark: 1 of its 40 samples" in capsys.readouterr().out
    assert "1 of its 40 samples" in json.loads((tmp_path / "metrics.json").read_text())["notes"][-1]


def test_options_of_scoring_are_refused_for_a_checkpoint(tmp_path: Path):
    arguments = cli.parse(["eval", str(tmp_path), "--predictions", "x.json"])
    with pytest.raises(ValueError, match="ans eval CHECKPOINT takes no --predictions"):
        arguments.function(arguments)


def test_every_other_name_and_every_published_figure_is_of_a_scorer():
    assert set(OTHER_NAMES.values()) <= set(SCORERS)
    assert not set(OTHER_NAMES) & set(SCORERS)
    figures = [figure for name in SCORERS for figure in published(name)]
    assert len(figures) > 80
    assert all(0 < figure.value <= 100 and figure.source for figure in figures)
    assert all("judge" in figure.note for name in ("dlc_bench", "ferret_bench") for figure in published(name))
