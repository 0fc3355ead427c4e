from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from ans_core.benchmarks import BENCHMARKS
from ans_core.benchmarks.public.asked import Item
from ans_core.benchmarks.score import benchmark_of
from ans_core.checkpoints import checkpoint
from ans_core.config import Config
from ans_core.data import DatasetEntry, write_entries
from ans_core.data.mixture import Source
from ans_core.data.scene_write import write_scenes
from ans_core.model.network import Network
from ans_core.pictures import rle
from ans_core.report.changes import changes, read_answers
from ans_core.stages import evaluate
from ans_core.stages.evaluate import (
    Asking,
    by_length,
    can_shuffle,
    evaluated_sets,
    is_right,
    load_row,
    other_splits,
    shown,
    spread,
    without_samples,
    write_overlays,
)
from ans_core.types import Prediction, Request
from tests import tiny

REFERRING = BENCHMARKS["referring"]
SAMPLES = [tiny.sample(n, text=f"thing {n}") for n in range(7)]


class Model:
    """Answers with what it was asked; counts; stops where a test wants it."""

    def __init__(self, stop: int = 1000) -> None:
        self.asked: list[str] = []
        self.stop = stop

    def __call__(self, requests: list[Request]) -> list[Prediction]:
        if len(self.asked) >= self.stop:
            raise KeyboardInterrupt
        self.asked += [r.text for r in requests]
        return [Prediction(text=r.text, masks=((tiny.square(0, 0, 8, 8),),)) for r in requests]


def asking(model: Model, scratch: Path, batch: int = 2) -> Asking:
    return Asking(lambda items: model([item.request for item in items]), batch=batch, scratch=scratch)


def test_a_killed_evaluation_does_not_ask_again_what_was_answered(tmp_path: Path):
    requests = [REFERRING.request(s) for s in SAMPLES]
    first = asking(Model(), tmp_path / "first")
    whole = first(requests)
    assert [p.text for p in whole] == [r.text for r in requests]
    with pytest.raises(KeyboardInterrupt):
        asking(Model(stop=4), tmp_path / "cut")(requests)
    again = Model()
    assert asking(again, tmp_path / "cut")(requests) == whole
    assert again.asked == [r.text for r in requests[4:]]
    third = Model()
    resumed = asking(third, tmp_path / "cut")
    assert resumed(requests) == whole
    assert third.asked == []
    more = Request(frames=requests[0].frames, text="more")
    assert [p.text for p in resumed([*requests[:3], more, more])] == [
        *(r.text for r in requests[:3]),
        "more",
        "more",
    ]
    assert third.asked == ["more"]  # what was asked before, and twice, is asked once


def test_batches_are_formed_by_picture_and_length_among_a_window():
    texts = ["long text", "a", "a longer text", "bb", "c", "ddd"]
    items = [
        Item(name=str(n), request=Request(frames=(tiny.picture(n % 2),), text=text))
        for n, text in enumerate(texts)
    ]
    assert [[item.name for item in batch] for batch in by_length(items, 2, 4)] == [
        ["0", "2"],
        ["1", "3"],
        ["4", "5"],
    ]
    assert [[item.name for item in batch] for batch in by_length(items, 4, 6)] == [
        ["4", "0", "2", "1"],
        ["3", "5"],
    ]


def test_kept_predictions_are_equal_to_those_that_were_made(tmp_path: Path):
    clip = Prediction(text="it is [SEG]", masks=((tiny.square(0, 0, 4, 4), rle.empty(64, 64)),))

    def ask(items: list[Item]) -> list[Prediction]:
        return [clip, Prediction(text="nothing")]

    requests = [REFERRING.request(s) for s in SAMPLES[:2]]
    for _ in range(2):
        assert Asking(ask, batch=2, scratch=tmp_path)(requests) == [clip, Prediction(text="nothing")]


def test_pictures_are_chosen_evenly_and_each_once():
    assert spread(list(range(10)), 3) == [0, 3, 6]
    assert spread([4, 5], 6) == [4, 5]
    assert spread([], 3) == []
    assert spread([1, 2], 0) == []
    assert spread(list(range(10)), 4) == [0, 2, 5, 7]  # through all of them


def test_a_clip_with_an_expression_is_asked_as_a_video():
    assert benchmark_of(tiny.clip()) == "video"
    assert benchmark_of(tiny.sample()) == "referring"
    assert benchmark_of(tiny.region()) == "region_caption"


def test_an_unknown_row_names_the_known_ones():
    with pytest.raises(ValueError, match="no row 'sfft'; rows are untrained, base, sft, rl"):
        load_row("sfft", {}, torch.device("cpu"))


def test_what_is_drawn_is_the_answer_or_the_region_that_was_asked_about():
    answer = Prediction(text="x", masks=((tiny.square(0, 0, 2, 2),), (None,)))
    assert [rle.area(m) for m in shown(tiny.sample(), answer)] == [4, 0]
    assert shown(tiny.region(), Prediction(text="a cat")) == [tiny.square(8, 8, 24, 24)]
    assert shown(tiny.sample(), Prediction(text="nothing")) == []


def test_overlays_show_right_and_wrong_answers_with_what_is_said_of_them(tmp_path: Path):
    right, wrong = tiny.square(8, 8, 24, 24), tiny.square(40, 40, 64, 64)
    predictions = [Prediction(text=f"answer {n}", masks=((right if n < 4 else wrong,),)) for n in range(7)]
    score = REFERRING.of_samples(SAMPLES, predictions)
    write_overlays(tmp_path, "referring/val", REFERRING, SAMPLES, predictions, score, count=4)
    index = json.loads((tmp_path / "index.json").read_text())
    assert [e["verdict"] for e in index] == ["right", "right", "wrong", "wrong"]
    assert [e["score"] for e in index] == [1, 1, 0, 0]
    assert len({e["sample_id"] for e in index}) == len({e["file"] for e in index}) == 4
    assert index[0]["benchmark"] == "referring/val"
    with Image.open(tmp_path / index[0]["file"]) as image:
        assert np.asarray(image).std() > 0


def prepared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Drawn expressions and clips, and a data set of the user's with tasks of every kind."""
    mine = [tiny.sample(n, text="red") for n in range(3)] + [
        tiny.region(4),
        tiny.region(5, masks=((tiny.square(0, 0, 9, 9),),) * 2),
    ]
    mine += [tiny.clip(6), tiny.sample(7, task="conversation", question="Why?", text="So.")]
    sources = [
        Source(name="one", kind="referring", samples=SAMPLES),
        Source(name="two", kind="referring", samples=SAMPLES[:2]),
        Source(name="clips", kind="video", samples=[tiny.clip(9)]),
        Source(name="mine", kind="extra", samples=mine),
    ]
    monkeypatch.setattr(evaluate.data, "sources", lambda path, split: sources)
    write_entries(folder, [])
    return folder


def config(*benchmarks: str, **changes: object) -> Config:
    return Config.model_validate(
        {"profile": "tiny", "evaluate": {"benchmarks": benchmarks, "split": "test"} | changes}
    )


def test_every_benchmark_and_the_loops_ask_about_every_data_set_that_has_the_task(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    cfg = config("loops", "referring", "region_caption", "video")
    sets = evaluated_sets(cfg, prepared(tmp_path, monkeypatch))
    assert [(asked.name(asked.benchmark), len(asked.samples)) for asked in sets] == [
        ("referring/test", 9), ("mine/referring", 3), ("mine/region_caption", 2), ("video/test", 1), ("mine/video", 1), ("mine/loops", 1)
    ]  # fmt: skip
    assert sets[-1].name("loop1") == "mine/loop1"


def test_a_data_set_without_the_split_is_evaluated_on_its_val_split_and_says_so(tmp_path: Path):
    def entry(name: str, split: str) -> DatasetEntry:
        return DatasetEntry(name=name, format="plain", path=str(tmp_path), split=split, kind="extra")

    write_entries(
        tmp_path,
        [entry("mine", "train"), entry("mine", "val"), entry("whole", "test"), entry("all", "train")],
    )
    assert other_splits(tmp_path, "test") == {
        "mine": "it has no split 'test'; its split 'val' is evaluated",
        "all": "it has no split 'test'; nothing of it is evaluated: give it a split 'val' or 'test'",
    }


def test_a_benchmark_without_samples_is_named_with_the_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cfg = config("referring", "grounded_caption")
    assert without_samples(cfg, evaluated_sets(cfg, prepared(tmp_path, monkeypatch))) == {
        "grounded_caption": "skipped: no data set has samples of split 'test' for it"
    }


def test_two_data_sets_of_one_name_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    cfg = config("referring", sources=[{"name": "mine", "format": "refcoco", "path": str(tmp_path)}])
    with pytest.raises(ValueError, match=r"evaluate\.sources: 'mine' is also a data set of prepare\.sources"):
        evaluated_sets(cfg, prepared(tmp_path, monkeypatch))


def test_texts_are_swapped_only_between_two_images_at_least():
    assert can_shuffle(SAMPLES)
    assert not can_shuffle([SAMPLES[0], tiny.sample(0, text="other"), tiny.sample(1, masks=())])


def test_loops_keep_the_score_of_every_sample(tmp_path: Path):
    """The caption is right and the mask, an 8 x 8 corner of nothing, is wrong: loop 1 redraws it wrong, loop
    2 retells it right."""
    regions = [tiny.region(n, text="a red square") for n in range(2)]
    asked = evaluate.Evaluation(benchmark="loops", dataset=None, split="test", samples=regions)

    def ask(requests: list[Request]) -> list[Prediction]:
        corner = ((tiny.square(0, 0, 8, 8),),)
        return [
            Prediction(text="a red square") if r.mask_prompts else Prediction(text="[SEG]", masks=corner)
            for r in requests
        ]

    closed = evaluate.close_loops(ask, ask, asked, truth=True)
    metrics = evaluate.loop_metrics(asked, closed)
    assert metrics["loop1/test/IoU"] == metrics["loop1/test/IoU_of_truth"] == 0.0
    assert metrics["loop2/test/METEOR_self"] == pytest.approx(1 - 0.5 / 27)
    with (tmp_path / "lines").open("w") as lines:
        evaluate.write_loop_scores(lines, asked, closed)
        evaluate.write_predictions(
            lines,
            "referring/test",
            SAMPLES[:1],
            [Prediction(text="x")],
            REFERRING.of_samples(SAMPLES[:1], [Prediction(text="x")]),
        )
    told = [json.loads(line) for line in (tmp_path / "lines").read_text().splitlines()]
    assert [(t["benchmark"], t["sample_id"], t["score"]) for t in told[:2]] == [
        ("loop1/test", "s0", 0.0),
        ("loop1/test", "s1", 0.0),
    ]
    assert (
        [t["score_self"] for t in told[2:4]]
        == [t["score_of_truth"] for t in told[2:4]]
        == [round(1 - 0.5 / 27, 4)] * 2
    )
    assert (told[4]["image_id"], told[4]["n_targets"], told[4]["text"]) == ("i0", 1, "x")


def test_garbage_is_no_denial():
    """Nothing is meant: without a mask both answers have IoU 1, and one of them says why."""
    samples = [tiny.sample(0, masks=()), tiny.sample(1, masks=()), tiny.sample(2)]
    told = [
        Prediction(text="square square"),
        Prediction(text="There is no such object."),
        Prediction(text="[SEG]", masks=samples[2].masks),
    ]
    score = REFERRING.of_samples(samples, told)
    assert [facts["score"] for facts in score.samples] == [1, 1, 1]
    assert [is_right(*one) for one in zip(samples, told, score.samples, strict=True)] == [False, True, True]


def test_a_caption_counts_as_right_word_for_word():
    samples = [tiny.region(0, "a red square"), tiny.region(1, "a red square")]
    told = [Prediction(text="A red square."), Prediction(text="a blue square")]
    assert [
        is_right(sample, answer, {"score": 0.9}) for sample, answer in zip(samples, told, strict=True)
    ] == [True, False]


@pytest.mark.slow
def test_public_benchmarks_are_scored_logged_by_split_and_compared(tmp_path: Path, tiny_model: Network):
    write_scenes(tmp_path / "drawn", seed=0, counts={"train": 1, "val": 3, "test": 1}, image_size=64)
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    write_entries(tmp_path, [])
    public = [
        {
            "name": "refcoco",
            "path": str(tmp_path / "drawn/refcoco"),
            "split": "val",
            "limit": 4,
            "max_tokens": 2,
        },
        {"name": "mevis", "path": str(tmp_path / "nowhere")},
    ]
    cfg = Config.model_validate(
        {"profile": "x", "evaluate": {"benchmarks": [], "public": public}, "launch": {"device": "cpu"}}
    )
    out, logged = tmp_path / "out", dict[str, float]()
    for folder in (out, tmp_path / "scratch"):
        folder.mkdir()
    inputs = {"data": tmp_path, "model": tmp_path / "model"}
    metrics = evaluate.run(
        cfg,
        row="rl",
        inputs=inputs,
        out=out,
        scratch=tmp_path / "scratch",
        log=lambda found, step: logged.update(found),
    )
    assert metrics["refcoco/val/expressions"] == 4
    assert {"eval/refcoco/val/gIoU", "eval/refcoco/val/cIoU"} <= set(logged)
    assert (
        json.loads((out / "public/refcoco-val/metrics.json").read_text())["metrics"]["gIoU"]
        == metrics["refcoco/val/gIoU"]
    )
    assert json.loads((out / "skipped.json").read_text())["mevis/valid_u"].endswith(
        "put the benchmark's files there, or give --data"
    )
    answers = read_answers(out)
    assert len(answers["refcoco/val"]) == 4
    (change,) = changes(
        {"before": metrics, "after": metrics}, {"before": answers, "after": answers}, "before", "after"
    )
    assert (change.title, change.difference, change.interval) == ("refcoco/val", 0.0, (0.0, 0.0))


def test_two_entries_of_one_split_are_refused_before_a_question(tmp_path: Path) -> None:
    public = [{"name": "gcg", "path": "A"}, {"name": "gcg", "path": "B", "split": "val"}]
    cfg = Config.model_validate({"profile": "x", "evaluate": {"benchmarks": [], "public": public}})
    with pytest.raises(ValueError, match=r"evaluate\.public: A and B are both split 'val' of gcg"):
        evaluate.public_sessions(cfg, "rl", out=tmp_path)
