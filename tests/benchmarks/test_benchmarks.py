import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from ans_core.benchmarks import BENCHMARKS, shuffled
from ans_core.benchmarks.public.scored import Inputs
from ans_core.benchmarks.registry import runnable
from ans_core.data import DatasetEntry, write_entries
from ans_core.data.scene_write import write_scenes
from ans_core.pictures import rle
from ans_core.types import Prediction, Sample
from tests.benchmarks.public.drawn import predicted

H, W = 12, 20


def box(start: int, end: int) -> dict:
    mask = np.zeros((H, W), bool)
    mask[2:8, start:end] = True
    return rle.encode(mask)


def sample(
    objects: int,
    *,
    frames: int = 1,
    sample_id: str = "s",
    image_id: str = "i",
    text: str = "a dog, a cat and a bird",
    **meta: str,
):
    boxes = [box(6 * i, 6 * i + 5) for i in range(objects)]
    return Sample(
        sample_id=sample_id, dataset="d", image_id=image_id, frames=(Path("x.png"),) * frames, height=H,
        width=W, task="referring", text=text, masks=tuple((mask,) * frames for mask in boxes),
        phrases=((0, 5), (7, 12), (17, 23))[:objects], meta=meta,
    )  # fmt: skip


MAIN = {"referring": "gIoU_all", "region_caption": "METEOR", "grounded_caption": "mIoU", "video": "J&F"}


@pytest.mark.parametrize("objects", [0, 1, 3])
@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_truth_scores_full_marks(name: str, objects: int):
    asked = [sample(objects, frames=3 if name == "video" else 1)]
    score = BENCHMARKS[name].of_samples(asked, [BENCHMARKS[name].truth(s) for s in asked])
    full = 1 - 0.5 / 7**3 if MAIN[name] == "METEOR" else 1.0  # identical captions of 7 words
    assert score.metrics[MAIN[name]] == pytest.approx(full, abs=1e-12)
    assert [s["score"] for s in score.samples] == pytest.approx([full], abs=1e-12)
    ratios = {k: v for k, v in score.metrics.items() if "samples" not in k and k not in ("METEOR", "CIDEr")}
    assert set(ratios.values()) == {1.0}, ratios


def test_a_prepared_folder_is_asked_and_scored_from_files_as_a_public_benchmark_is(tmp_path: Path):
    write_scenes(tmp_path, seed=0, counts={"train": 1, "val": 3, "test": 1}, image_size=64)
    write_entries(
        tmp_path,
        [DatasetEntry(name="refcoco", format="refcoco", path="refcoco", split="val", kind="referring")],
    )
    scorer, runner = runnable("referring")
    predictions = predicted(
        runner, tmp_path, "val", lambda items: [item.truth for item in items], tmp_path / "all"
    )
    found = scorer.score(Inputs(predictions=predictions, data=tmp_path, split="val"))
    assert (found.metrics["gIoU_all"], found.missing) == (1.0, 0)
    assert [row["sample"] for row in scorer.table(found)] == [
        item.name for item in runner.questions(tmp_path, "val")
    ]
    path = tmp_path / "two.jsonl"
    path.write_text("".join(predictions.open().readlines()[:2]))
    part = scorer.score(Inputs(predictions=path, data=tmp_path, split="val"))
    assert part.missing == found.metrics["samples"] - 2
    assert part.metrics["gIoU_all"] == pytest.approx(2 / found.metrics["samples"])
    assert (
        scorer.score(Inputs(predictions=path, data=tmp_path, split="val", predicted_only=True)).metrics[
            "samples"
        ]
        == 2
    )
    for wrong in (
        {"text": 7},
        {"masks": [[]]},
        {"masks": None},
        {"masks": [[{"size": [2, 2], "counts": "04"}]]},
        {"id": "no"},
    ):
        path.write_text(json.dumps(json.loads(predictions.open().readline()) | wrong))
        with pytest.raises(ValueError, match=r"two\.jsonl"):
            scorer.score(Inputs(predictions=path, data=tmp_path, split="val"))


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_prediction_is_needed_for_every_sample(name: str):
    with pytest.raises(ValueError, match="1 samples and 0 predictions"):
        BENCHMARKS[name].of_samples([sample(1)], [])


def test_requests_use_upstreams_words():
    asked = sample(1, frames=2, text="the red one")
    assert BENCHMARKS["referring"].request(asked).text == "<image>\nPlease segment the red one in this image."
    assert len(BENCHMARKS["referring"].request(asked).frames) == 1
    assert BENCHMARKS["video"].request(asked).text == "<image>\nPlease segment the red one."
    assert len(BENCHMARKS["video"].request(asked).frames) == 2
    assert BENCHMARKS["region_caption"].request(asked).mask_prompts == (asked.masks[0][0],)
    assert "region1" in BENCHMARKS["region_caption"].request(asked).text


def test_referring_counts_by_hand():
    samples = [
        sample(1, kind="attribute"),
        sample(1, kind="relation"),
        sample(2, kind="several"),
        sample(0, kind="none"),
        sample(0, kind="none"),
    ]
    half = Prediction(text="[SEG]", masks=((box(0, 10),),))  # 30 of 60 pixels are the object's
    predictions = [half, Prediction(text="No."), half, Prediction(text="No."), half]
    metrics = BENCHMARKS["referring"].of_samples(samples, predictions).metrics
    assert metrics["gIoU"] == (0.5 + 0) / 2
    assert metrics["cIoU"] == 30 / (60 + 30)  # the silent answer leaves its 30 true pixels in the union
    assert metrics["cIoU_upstream"] == 0.5  # and upstream forgets them
    # columns 0-9 against 0-4 and 6-10: 9 of 11 columns
    assert metrics["gIoU_several"] == pytest.approx(9 / 11)
    assert metrics["N_acc"] == 0.5
    assert metrics["T_acc"] == pytest.approx(2 / 3)
    assert metrics["gIoU_all"] == pytest.approx((0.5 + 0 + 9 / 11 + 1 + 0) / 5)
    assert metrics["gIoU/attribute"] == 0.5
    assert metrics["gIoU/relation"] == 0.0
    assert metrics["gIoU/none"] == 0.5
    assert metrics["samples"] == 5
    assert metrics["single_object_samples"] == 2


def test_only_the_first_seg_mask_counts():
    answer = Prediction(text="[SEG] [SEG]", masks=((box(6, 11),), (box(0, 5),)))
    assert BENCHMARKS["referring"].of_samples([sample(1)], [answer]).metrics["gIoU"] == 0.0


def test_metrics_without_samples_are_left_out():
    metrics = BENCHMARKS["referring"].of_samples([sample(1)], [Prediction(text="")]).metrics
    assert not {"N_acc", "gIoU_several", "cIoU_upstream"} & set(metrics)


def test_region_captions_by_attribute():
    asked = [
        sample(1, text="a small red circle", size="small", colour="red", shape="circle"),
        sample(1, text="a large blue square", size="large", colour="blue", shape="square"),
    ]
    told = [Prediction(text="a small red circle"), Prediction(text="a large red square")]
    metrics = BENCHMARKS["region_caption"].of_samples(asked, told).metrics
    assert metrics["attribute_accuracy"] == 0.5
    assert metrics["attribute_accuracy/shape"] == 1.0
    assert metrics["attribute_accuracy/colour"] == 0.5
    assert metrics["exact_match"] == 0.5


def test_garbage_without_a_mask_is_right_where_nothing_is_meant_and_yet_no_denial():
    asked = [sample(0), sample(0), sample(0), sample(0), sample(1)]
    texts = [
        "There is no such object.",
        "the the the",
        "I don’t see it",
        "No, it is [SEG].",
        "There is no such object.",
    ]
    masks = [(), (), (), ((box(0, 0),),), ()]
    score = BENCHMARKS["referring"].of_samples(
        asked, [Prediction(text=t, masks=m) for t, m in zip(texts, masks, strict=True)]
    )
    assert score.metrics["N_acc"] == 1.0  # the mask is empty
    assert score.metrics["N_denied"] == 0.5
    assert [s["denies"] for s in score.samples] == [True, False, True, False, True]


def test_grounded_captions_forgive_or_count_what_was_missed():
    asked = [sample(3)]
    told = [Prediction(text="<p> a dog </p> [SEG]", masks=((box(0, 5),),))]
    metrics = BENCHMARKS["grounded_caption"].of_samples(asked, told).metrics
    assert metrics["mIoU"] == 1.0
    assert metrics["mIoU_all_objects"] == metrics["recall_token_f1"] == pytest.approx(1 / 3)


def test_a_silent_answer_to_a_clip_scores_only_the_frames_without_the_object():
    leaving = dataclasses.replace(sample(1, frames=4), masks=((box(0, 5), box(0, 5), None, rle.empty(H, W)),))
    metrics = BENCHMARKS["video"].of_samples([leaving], [Prediction(text="No.")]).metrics
    assert metrics["J"] == metrics["F"] == metrics["J&F"] == pytest.approx(1 / 3)  # of 3 annotated frames


def test_a_clip_with_a_wrong_number_of_masks_is_refused():
    with pytest.raises(ValueError, match="sample s of d: 1 masks predicted for 2 frames"):
        BENCHMARKS["video"].of_samples(
            [sample(1, frames=2)], [Prediction(text="[SEG]", masks=((box(0, 5),),))]
        )


def test_shuffling_gives_every_sample_another_images_text_and_keeps_its_truth():
    samples = [
        sample(1, sample_id=f"{i}.{j}", image_id=str(i), text=f"text of {i}")
        for i in range(5)
        for j in range(i + 1)
    ]
    samples.append(sample(0, image_id="0", text="nothing"))
    swapped = shuffled(samples, seed=3)
    before = {s.sample_id: s for s in samples}
    assert sorted(s.sample_id for s in swapped) == sorted(s.sample_id for s in samples if s.masks)
    for s in swapped:
        assert s.text.startswith("text of")
        assert s.text != before[s.sample_id].text
        assert s.masks == before[s.sample_id].masks
    assert [s.text for s in swapped] == [s.text for s in shuffled(samples, seed=3)]
    assert [s.text for s in swapped] != [s.text for s in shuffled(samples, seed=4)]


def test_shuffling_needs_two_images():
    with pytest.raises(ValueError, match="only 1 image"):
        shuffled([sample(1), sample(1)], seed=0)
