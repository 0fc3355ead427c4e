"""`ans eval compare` and `ans eval submit`, on predictions of which everything can be worked out by hand."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from ans_core.evaluation import compare as eval_compare
from ans_core.report.comparison import Evaluation, changes, notes
from flows import cli
from tests.benchmarks.public.drawn import coded, write

TRUTH = [{"id": name, "mask": coded(0, 4)} for name in "abcd"]


def ans(*words: object) -> int:
    arguments = cli.parse(["eval", *map(str, words)])
    return arguments.function(arguments)


def scored(folder: Path, name: str, ends: dict[str, int]) -> Path:
    truth = write(folder / "truth.jsonl", TRUTH)
    drawn = write(
        folder / f"{name}.jsonl", [{"id": sample, "mask": coded(0, end)} for sample, end in ends.items()]
    )
    assert (
        ans(
            "score",
            "refcoco",
            "--predictions",
            drawn,
            "--data",
            truth,
            "--predicted-only",
            "--out",
            folder / name / "metrics.json",
        )
        == 0
    )
    return folder / name


@pytest.mark.slow
def test_two_evaluations_are_compared_sample_by_sample(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """IoU from 1/2, 1/2, 1/2 to 3/4, 3/4, 1: gains of .25, .25, .5; d is in the second alone."""
    before = scored(tmp_path, "before", {"a": 2, "b": 2, "c": 2})
    after = scored(tmp_path, "after", {"a": 3, "b": 3, "c": 4, "d": 4})
    assert ans("compare", before, after, "--out", tmp_path / "out") == 0
    told = capsys.readouterr().out
    assert "gIoU" in told
    alone = "1 samples are in after alone and not compared; the figures are of the 3 that both have"
    assert f"note: {alone}" in told
    found = json.loads((tmp_path / "out/comparison.json").read_text())
    (giou,) = (change for change in found["changes"] if change["metric"] == "gIoU")
    assert (giou["before"], giou["after"], giou["pairs"], giou["verdict"]) == (
        0.5,
        pytest.approx(2.5 / 3),
        3,
        "better",
    )
    assert giou["interval"] == [0.25, 0.5]
    (ciou,) = (change for change in found["changes"] if change["metric"] == "cIoU")
    assert ciou["after"] == pytest.approx(10 / 12)
    assert [(s["sample"], s["after"] - s["before"]) for s in found["most_changed"]] == [
        ("c", 0.5),
        ("a", 0.25),
        ("b", 0.25),
    ]
    page = (tmp_path / "out/page.html").read_text()
    assert alone in page
    assert re.search(r"<caption>refcoco/all</caption>.*?>cIoU</th>", page, re.DOTALL)
    assert "<span>before <b>0.500</b></span> <span>after <b>1.000</b></span>" in page
    assert eval_compare.pictures(before, after) == {}  # of scores, the questions are not known


@pytest.mark.slow
def test_samples_of_one_evaluation_alone_are_counted_where_both_folders_have_one_name(tmp_path: Path):
    before = scored(tmp_path / "one", "refcoco", {"a": 2, "b": 2, "c": 2})
    after = scored(tmp_path / "other", "refcoco", {"b": 3, "c": 4})
    assert ans("compare", before, after, "--out", tmp_path / "out") == 0
    assert "1 samples are in before alone" in (tmp_path / "out/page.html").read_text()


@pytest.mark.slow
def test_a_limited_run_is_called_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    before = scored(tmp_path, "before", {"a": 2, "b": 2, "c": 2})
    after = scored(tmp_path, "after", {"a": 3, "b": 3})
    head = json.loads((after / "metrics.json").read_text())
    (after / "metrics.json").write_text(json.dumps(head | {"limit": 2}))
    assert ans("compare", before, after, "--out", tmp_path / "out") == 0
    told = "after: only 2 questions were asked: not the benchmark's figures"
    assert f"note: {told}" in capsys.readouterr().out
    assert told.replace("'", "&#39;") in (tmp_path / "out/page.html").read_text()
    changed = json.loads((tmp_path / "out/comparison.json").read_text())["changes"]
    # plain differences would be of three samples and of two
    assert all(change["interval"] for change in changed)


@pytest.mark.slow
def test_a_comparison_replaces_an_earlier_one_alone(tmp_path: Path):
    before, after = (
        scored(tmp_path, name, {"a": 2, "b": end}) for name, end in (("before", 2), ("after", 3))
    )
    (before / "page.html").write_text("its own")
    with pytest.raises(ValueError, match=r"before holds files and no comparison\.json of an earlier run"):
        ans("compare", before, after, "--out", before)
    assert (before / "page.html").read_text() == "its own"
    for _ in range(2):
        assert ans("compare", before, after, "--out", tmp_path / "out") == 0


def test_what_can_not_be_compared_is_refused(tmp_path: Path):
    one, other = scored(tmp_path, "one", {"a": 2, "b": 2}), scored(tmp_path, "other", {"c": 2, "d": 2})
    with pytest.raises(ValueError, match="have 0 samples in common"):
        ans("compare", one, other)
    with pytest.raises(ValueError, match=r"no metrics\.json with metrics\.samples\.jsonl beside it"):
        ans("compare", one, tmp_path)
    with pytest.raises(ValueError, match="takes two evaluations, not 1"):
        ans("compare", one)
    (skipped := tmp_path / "skipped").mkdir()
    (skipped / "metrics.json").write_text(
        json.dumps({"benchmark": "refcoco", "skipped": "/data is not there", "metrics": {}})
    )
    with pytest.raises(ValueError, match="skipped has no figures to compare: /data is not there"):
        ans("compare", one, skipped)
    (other / "metrics.json").write_text(json.dumps({"benchmark": "mevis", "metrics": {}}))
    with pytest.raises(ValueError, match=r"one is of refcoco, .*other of mevis"):
        ans("compare", one, other)


def test_predictions_become_the_servers_file(tmp_path: Path):
    line = {
        "video": "zoo",
        "expression": "3",
        "frames": ["00000", "00005"],
        "size": [6, 10],
        "prediction_masks": [coded(0, 4), None],
    }
    drawn = write(tmp_path / "predictions.jsonl", [line])
    assert ans("submit", "mevis", "--predictions", drawn, "--out", tmp_path / "out.zip") == 0
    with zipfile.ZipFile(tmp_path / "out.zip") as archive:
        assert archive.namelist() == ["Annotations/zoo/3/00000.png", "Annotations/zoo/3/00005.png"]
    image = {"image_id": "7", "caption": "A cat.", "phrases": ["A cat"], "pred_masks": [coded(0, 4)]}
    told = write(tmp_path / "gcg.jsonl", [image | {"item": "7", "text": "<p> A cat </p> [SEG]."}])
    assert ans("submit", "gcg", "--predictions", told, "--out", tmp_path / "gcg") == 0
    assert json.loads((tmp_path / "gcg/7.json").read_text()) == image
    with pytest.raises(
        ValueError, match=r"record 0: no expression, frames, .*give the predictions\.jsonl of `ans eval mevis"
    ):
        ans("submit", "mevis", "--predictions", told, "--out", tmp_path / "no.zip")
    with pytest.raises(ValueError, match="refcoco has no server"):
        ans("submit", "refcoco", "--predictions", told, "--out", tmp_path / "x")
    with pytest.raises(ValueError, match=r"empty\.jsonl: no predictions to submit"):
        ans(
            "submit",
            "mevis",
            "--predictions",
            write(tmp_path / "empty.jsonl", []),
            "--out",
            tmp_path / "empty.zip",
        )


def evaluation(
    name: str, terms: dict[str, dict[str, list[float]]], *, benchmark: str = "captions", **head: object
) -> Evaluation:
    table = {sample: {"sample": sample, "terms": of_sample} for sample, of_sample in terms.items()}
    return Evaluation(
        name=name, path=Path(name), head={"benchmark": benchmark, "metrics": {}} | head, table=table
    )


def test_what_depends_on_the_other_samples_is_compared_for_the_same_ones_alone():
    """The same answers: of two weights, as of 2 and of 4 expressions of a type."""
    whole = {name: {"own": [1.0, 1.0], "overall": [0.25, 0.25]} for name in "abcd"}
    part = {name: {"own": [1.0, 1.0], "overall": [0.5, 0.5]} for name in "ab"}
    one, other = (evaluation(n, t, scored_together=["overall"]) for n, t in (("1", whole), ("2", part)))
    assert [change.metric for change in changes(one, other)] == ["own"]
    assert "overall: not compared, for a sample's share depends on the others that were scored" in notes(
        one, other
    )
    assert [change.metric for change in changes(one, one)] == ["own", "overall"]
    assert notes(one, one) == []


def test_a_metric_that_nothing_counts_for_is_left_out():
    terms = {name: {"gIoU": [1.0, 1.0], "N_acc": [0.0, 0.0]} for name in "ab"}
    one = evaluation("1", terms)
    assert [(change.metric, change.interval) for change in changes(one, one)] == [("gIoU", (0.0, 0.0))]


def test_names_of_one_benchmark_are_compared_and_of_two_data_sets_are_not():
    terms = {name: {"accuracy": [1.0, 1.0]} for name in "ab"}

    def compared(one: str, other: str) -> int:
        return len(changes(evaluation("1", terms, benchmark=one), evaluation("2", terms, benchmark=other)))

    assert compared("mmmu", "mmmu_val") == compared("vstar_bench", "vstar") == compared("mose", "mose") == 1
    for one, other in (
        ("refcoco", "refcoco+"),
        ("davis17", "mose"),
        ("mevis", "mevis_v2"),
        ("mmmu", "vstar"),
    ):
        with pytest.raises(ValueError, match=f"1 is of {re.escape(one)}.*, 2 of {re.escape(other)}"):
            compared(one, other)


def test_what_is_noted_of_one_alone_is_said():
    terms = {name: {"accuracy": [1.0, 1.0]} for name in "ab"}
    one = evaluation("1", terms, notes=["judge: a", "a ratio of means"])
    other = evaluation("2", terms, notes=["judge: b", "a ratio of means"])
    assert notes(one, other) == ["before: judge: a", "after: judge: b"]
