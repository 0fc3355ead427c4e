import json
from pathlib import Path

import pytest

from ans_core.report.metrics import ROWS, headline, parse, tables

HEADLINE_OF_GIT = Path(__file__).resolve().parents[2] / "metrics/headline.json"


@pytest.mark.parametrize(
    ("name", "benchmark", "task", "metric", "title"),
    [
        (
            "referring/val/gIoU/relation",
            "referring/val",
            "referring",
            "gIoU/relation",
            "Referring segmentation · val",
        ),
        ("photos/referring/gIoU", "photos/referring", "referring", "gIoU", "Referring segmentation · photos"),
        # a data set of that name
        ("video/referring/gIoU", "video/referring", "referring", "gIoU", "Referring segmentation · video"),
        ("riddles/val/accuracy", "riddles/val", "", "accuracy", "riddles/val"),
    ],
)
def test_names_are_of_a_task_on_a_split_or_of_a_data_set(
    name: str, benchmark: str, task: str, metric: str, title: str
):
    parts = parse(name)
    assert (parts.benchmark, parts.task, parts.metric, parts.title) == (benchmark, task, metric, title)


def test_the_headline_is_the_same_for_every_split_and_the_mean_over_ones_own_data_sets():
    drawn = {"gIoU": 0.7, "cIoU": 0.6, "gIoU_all": 0.9}
    of_split = {
        split: {"rl": {f"referring/{split}/{name}": value for name, value in drawn.items()}}
        for split in ("val", "test")
    }
    assert (
        headline(of_split["val"])
        == headline(of_split["test"])
        == {"rl": {"referring/gIoU": 0.7, "referring/cIoU": 0.6}}
    )
    own = {
        "coco/referring/gIoU": 0.25,
        "streets/referring/gIoU": 0.75,
        "coco/region_caption/exact_match": 0.5,
        "loop1/val/IoU": 0.125,
    }
    assert headline({"sft": own, "rl": own, "base": own}) == {
        "rl": {"referring/gIoU": 0.5, "region_caption/exact_match": 0.5, "loop1/IoU": 0.125},
        "sft": {"referring/gIoU": 0.5, "loop1/IoU": 0.125},
    }


def test_git_keeps_about_ten_numbers():
    kept = json.loads(HEADLINE_OF_GIT.read_text())
    assert {row: len(numbers) for row, numbers in kept.items()} == {"rl": 9, "sft": 3}


def test_only_a_single_best_as_it_is_shown_is_marked():
    def best(*values: float | None) -> list[str]:
        summary = {
            row: {"video/val/J&F": value}
            for row, value in zip(ROWS, values, strict=True)
            if value is not None
        }
        return [cell["row"] for cell in tables(summary)[0].lines[0]["cells"] if cell["best"]]

    assert best(0.1, 0.3, 0.2, None) == ["base"]
    assert best(0.1, 0.3, 0.3, 0.2) == []
    assert best(None, 0.1, 0.7491, 0.7494) == []  # 0.749 both
    assert best(None, None, 0.7, None) == []


def test_a_table_shows_the_main_metrics_and_keeps_the_rest_behind():
    metrics = {"mIoU": 0.7, "mIoU_all_objects": 0.6, "CIDEr": 2.0, "samples": 12.0}
    (table,) = tables({"rl": {f"grounded_caption/val/{name}": value for name, value in metrics.items()}})
    assert [line["name"] for line in table.lines] == ["mIoU_all_objects", "mIoU"]
    assert [line["name"] for line in table.rest] == ["CIDEr", "samples"]
    assert table.samples == 12
