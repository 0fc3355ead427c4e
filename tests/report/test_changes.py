import json
from pathlib import Path

import numpy as np
import pytest

from ans_core.benchmarks import BENCHMARKS
from ans_core.report.changes import SCORED_BY, changes, read_answers
from ans_core.types import Prediction
from tests.benchmarks.test_benchmarks import sample


def write(folder: Path, scores: list[tuple[str, float]]) -> Path:
    folder.mkdir()
    lines = [
        {"benchmark": "referring/val", "dataset": "d", "sample_id": name, "asked": "a", "score": score}
        for name, score in scores
    ]
    (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_samples_are_paired_by_id_and_repeated_ids_by_their_order(tmp_path: Path):
    """Pairs: a 0.1 -> 0.3, the two of b 0.2 -> 0.4 and 0.8 -> 1.0; c and d have no partner. Every pair gains
    0.2."""
    old = read_answers(write(tmp_path / "old", [("b", 0.2), ("a", 0.1), ("b", 0.8), ("c", 0.0)]))
    new = read_answers(write(tmp_path / "new", [("a", 0.3), ("b", 0.4), ("d", 0.0), ("b", 1.0)]))
    summary = {"sft": {"referring/val/cIoU": 0.5}, "rl": {"referring/val/cIoU": 0.4}}
    scored, plain = changes(summary, {"sft": old, "rl": new}, "sft", "rl")
    # no gIoU_all with that mean in the summary
    assert (scored.metric, scored.pairs, scored.verdict) == ("mean score", 3, "better")
    assert (scored.before, scored.after) == pytest.approx((1.1 / 3, 1.7 / 3))
    assert scored.interval == pytest.approx((0.2, 0.2))
    assert (plain.metric, plain.difference, plain.verdict) == ("cIoU", pytest.approx(-0.1), "no interval")


@pytest.mark.parametrize(
    ("gains", "verdict"),
    [([0.1, 0.2, 0.1], "better"), ([-0.1, -0.2, -0.1], "worse"), ([0.3, -0.3, 0.1], "unclear")],
)
def test_a_change_is_a_verdict_only_where_its_interval_leaves_out_zero(
    tmp_path: Path, gains: list[float], verdict: str
):
    old = write(tmp_path / "old", [(str(i), 0.5) for i in range(3)])
    new = write(tmp_path / "new", [(str(i), 0.5 + gain) for i, gain in enumerate(gains)])
    means = {"sft": 0.5, "rl": 0.5 + sum(gains) / 3}
    summary = {row: {"referring/val/gIoU_all": mean} for row, mean in means.items()}
    (change,) = changes(summary, {"sft": read_answers(old), "rl": read_answers(new)}, "sft", "rl")
    assert (change.metric, change.verdict) == ("gIoU_all", verdict)


def test_a_loop_has_an_interval_where_its_scores_were_kept(tmp_path: Path):
    rows = {}
    for row, scores in (("sft", (0.2, 0.4)), ("rl", (0.3, 0.5))):
        rows[row] = write(tmp_path / row, [("a", scores[0]), ("b", scores[1])])
        lines = (rows[row] / "predictions.jsonl").read_text().replace("referring/val", "loop1/val")
        (rows[row] / "predictions.jsonl").write_text(lines)
    summary = {
        "sft": {"loop1/val/IoU": 0.3, "loop2/val/METEOR": 0.1},
        "rl": {"loop1/val/IoU": 0.4, "loop2/val/METEOR": 0.2},
    }
    found = changes(summary, {row: read_answers(folder) for row, folder in rows.items()}, "sft", "rl")
    assert [(change.metric, change.verdict, change.pairs) for change in found] == [
        ("IoU", "better", 2),
        ("METEOR", "no interval", None),
    ]


@pytest.mark.parametrize(
    "line",
    [
        '{"benchmark": "b"}',
        "{",
        '{"benchmark": "b", "dataset": "d", "sample_id": "1", "asked": "", "score": NaN}',
    ],
)
def test_a_broken_prediction_is_named_by_file_and_line(tmp_path: Path, line: str):
    folder = write(tmp_path / "row", [("a", 0.5)])
    with (folder / "predictions.jsonl").open("a") as file:
        file.write(line)
    with pytest.raises(ValueError, match=r"predictions\.jsonl line 2: .*run its evaluate stage again"):
        read_answers(folder)


@pytest.mark.parametrize("task", BENCHMARKS)
def test_the_metric_of_a_benchmark_is_the_mean_of_its_scores(task: str):
    """One answer right, one wrong, one wrong because nothing was meant or all of it right for that."""
    benchmark, asked = (
        BENCHMARKS[task],
        [sample(objects, frames=2 if task == "video" else 1) for objects in (1, 3, 0)],
    )
    score = benchmark.of_samples(
        asked, [benchmark.truth(asked[0]), Prediction(text="a cow"), Prediction(text="a bird")]
    )
    assert score.metrics[SCORED_BY[task]] == pytest.approx(np.mean([s["score"] for s in score.samples]))
    assert 0 < score.metrics[SCORED_BY[task]] < 1


def test_some_metrics_are_means_over_the_samples_with_one_object_or_with_none(tmp_path: Path):
    """One object: 0.2, 0.4 -> 0.6, 0.8; none: 1, 1 -> 1, 0."""
    rows, summary = {}, {}
    for row, scores in (("sft", (0.2, 0.4, 1.0, 1.0)), ("rl", (0.6, 0.8, 1.0, 0.0))):
        folder = write(tmp_path / row, [(str(i), score) for i, score in enumerate(scores)])
        lines = [
            json.loads(line) | {"n_targets": int(i < 2)}
            for i, line in enumerate((folder / "predictions.jsonl").open())
        ]
        (folder / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        rows[row] = read_answers(folder)
        summary[row] = {"referring/val/gIoU": sum(scores[:2]) / 2, "referring/val/N_acc": sum(scores[2:]) / 2}
    found = {change.metric: change for change in changes(summary, rows, "sft", "rl")}
    assert (found["gIoU"].interval, found["gIoU"].pairs) == (pytest.approx((0.4, 0.4)), 2)
    assert (found["N_acc"].difference, found["N_acc"].verdict) == (-0.5, "unclear")


def test_other_data_with_some_of_the_same_ids_are_not_paired(tmp_path: Path):
    old = write(tmp_path / "old", [(str(i), 0.2 + 0.01 * (i % 3)) for i in range(30)])
    new = write(tmp_path / "new", [(str(i), 0.8 + 0.01 * (i % 3)) for i in range(25, 55)])
    (change,) = changes({"a": {}, "b": {}}, {"a": read_answers(old), "b": read_answers(new)}, "a", "b")
    assert (change.pairs, change.verdict, change.difference) == (None, "better", pytest.approx(0.6))
    assert 0.58 < change.interval[0] < change.interval[1] < 0.62
