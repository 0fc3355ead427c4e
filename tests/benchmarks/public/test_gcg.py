from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from ans_core.benchmarks.registry import SCORERS
from ans_core.metrics.phrases import PhraseEncoder
from tests.benchmarks.public.drawn import H, W, coded, score, write

MASKS = "val_gcg_coco_mask_gt.json"


def truth(folder: Path) -> Path:
    images = [{"id": i, "height": H, "width": W, "file_name": f"{i}.jpg"} for i in (1, 2)]
    masks = [(1, coded(0, 4)), (1, coded(6, 10)), (2, coded(0, 10))]
    annotations = [
        {
            "id": n,
            "image_id": i,
            "category_id": 1,
            "segmentation": m,
            "area": 24,
            "bbox": [0, 0, 4, 6],
            "iscrowd": 0,
        }
        for n, (i, m) in enumerate(masks, start=1)
    ]
    categories = [{"id": 1, "name": "object"}]
    write(
        folder / "val_gcg_coco_mask_gt.json",
        {"images": images, "annotations": annotations, "categories": categories},
    )
    texts = {1: ("A red cat and a dog.", ["red cat", "dog"]), 2: ("The sky above the sea.", ["sky"])}
    captions = [
        {"id": i, "image_id": i, "caption": caption, "labels": labels}
        for i, (caption, labels) in texts.items()
    ]
    write(folder / "val_gcg_coco_caption_gt.json", {"images": images, "annotations": captions})
    return folder


def predicted(folder: Path, image: int, caption: str, phrases: list[str], masks: list[Any]) -> Path:
    write(
        folder / f"{image}.json",
        {"image_id": image, "caption": caption, "phrases": phrases, "pred_masks": masks},
    )
    return folder


def test_the_truth_scores_one(tmp_path: Path):
    drawn = predicted(
        tmp_path / "drawn", 1, "A red cat and a dog.", ["red cat", "dog"], [coded(0, 4), coded(6, 10)]
    )
    predicted(drawn, 2, "The sky above the sea.", ["sky"], [coded(0, 10)])
    found = score("gcg", drawn, data=truth(tmp_path / "truth"))
    assert [found.metrics[key] for key in ("AP", "AP50", "mIoU", "recall_masks_only")] == pytest.approx(
        [1.0] * 4
    )
    assert found.metrics["CIDEr"] == pytest.approx(10.0)
    assert "recall" not in found.metrics
    assert any("left out: it needs --text-encoder" in note for note in found.notes)


def test_missed_masks_cost_recall_and_not_miou_and_a_missing_image_counts_nothing(tmp_path: Path):
    drawn = predicted(tmp_path / "drawn", 1, "A cat.", ["cat"], [coded(0, 3)])  # IoU .75
    found = score("gcg", drawn, data=truth(tmp_path / "truth"))
    assert found.missing == 1
    assert found.metrics["mIoU"] == (0.75 + 0) / 2
    # precision 1 up to recall 1/3, at 34 of COCO's 101 points; IoU .75 counts at 6 of 10 thresholds
    assert [found.metrics[key] for key in ("AP50", "AP")] == pytest.approx([34 / 101, 0.6 * 34 / 101])
    assert found.metrics["matches_masks_only"] == 1
    assert found.metrics["recall_masks_only"] == pytest.approx(1 / 3)


def test_images_that_the_truth_lacks_are_refused(tmp_path: Path):
    drawn = predicted(tmp_path / "drawn", 7, "A cat.", [], [])
    with pytest.raises(ValueError, match="1 images that the truth does not have: 7"):
        score("gcg", drawn, data=truth(tmp_path / "truth"))


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A BERT of a few numbers, whose embedding tells every word from the others."""
    folder = tmp_path_factory.mktemp("bert")
    words = ["[UNK]", "[PAD]", "red", "cat", "dog", "sky", "sea"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", pad_token="[PAD]").save_pretrained(
        folder
    )
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=1,
        intermediate_size=16,
    )
    BertModel(config).save_pretrained(folder)
    return str(folder)


def test_recall_asks_a_text_encoder_for_the_phrases(tmp_path: Path, encoder: str):
    alike = PhraseEncoder(encoder)
    assert alike("red cat", "red cat") == pytest.approx(1.0)
    assert alike("red cat", "sky") == pytest.approx(alike("sky", "red cat"))
    assert alike("red cat", "sky") < 1
    drawn = predicted(
        tmp_path / "drawn", 1, "A red cat and a dog.", ["red cat", "dog"], [coded(0, 4), coded(6, 10)]
    )
    predicted(drawn, 2, "The sky.", ["sky"], [coded(0, 2)])  # IoU .2
    found = score("gcg", drawn, data=truth(tmp_path / "truth"), text_encoder=encoder)
    assert found.metrics["recall"] == pytest.approx(2 / 3)
    assert found.metrics["matches"] == 2


def test_average_precision_of_what_is_predicted_alone_is_of_these_images(tmp_path: Path):
    data = truth(tmp_path / "truth")
    of_first = [
        {"image_id": 1, "category_id": 1, "segmentation": mask, "score": 0.9}
        for mask in (a["segmentation"] for a in json.loads((data / MASKS).read_text())["annotations"])
    ][:2]
    told = write(tmp_path / "told.json", of_first)
    assert score("gcg", told, data=data, predicted_only=True).metrics["coco/AP"] == pytest.approx(1.0)
    content = json.loads((data / MASKS).read_text())
    crowd = content["annotations"][0] | {"id": 9, "iscrowd": 1, "segmentation": coded(4, 6)}
    write(data / MASKS, content | {"annotations": [*content["annotations"], crowd]})
    above = {"image_id": 1, "category_id": 1, "segmentation": coded(4, 6), "score": 0.99}
    told = write(tmp_path / "told.json", [above, *of_first])  # what lies in a crowd is no mistake
    assert score("gcg", told, data=data, predicted_only=True).metrics["coco/AP"] == pytest.approx(1.0)
    assert score("gcg", told, data=data).metrics["coco/AP"] < 0.9


def test_captions_that_only_the_scorer_reads_are_missed_before_a_question(tmp_path: Path):
    runner = SCORERS["gcg"].runner
    assert runner is not None
    data = truth(tmp_path)
    runner.needs(data, "val")
    (data / "val_gcg_coco_caption_gt.json").unlink()
    with pytest.raises(ValueError, match="val_gcg_coco_caption_gt"):
        runner.needs(data, "val")


def boxes(folder: Path, *records: tuple[int | str, list[float], float]) -> Path:
    return write(
        folder / "boxes.json",
        [{"image_id": i, "category_id": 1, "bbox": b, "score": s} for i, b, s in records],
    )


def test_boxes_are_scored_by_coco_s_average_precision(tmp_path: Path):
    """Each true box is 10 x 10. IoU .62 passes three of COCO's ten thresholds (.5, .55, .6)."""
    images = [{"id": i, "height": 20, "width": 20} for i in (1, 2)]
    square = {
        "category_id": 1,
        "area": 100,
        "bbox": [0, 0, 10, 10],
        "iscrowd": 0,
        "segmentation": [[0, 0, 10, 0, 10, 10, 0, 10]],
    }
    annotations = [square | {"id": i, "image_id": i} for i in (1, 2)]
    data = write(
        tmp_path / "truth.json",
        {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "object"}]},
    )
    right = score(
        "coco_boxes", boxes(tmp_path, (1, [0, 0, 10, 10], 0.9), (2, [0, 0, 10, 10], 0.8)), data=data
    )
    assert [right.metrics[key] for key in ("AP", "AP50", "AR_max100", "true_boxes")] == pytest.approx(
        [1, 1, 1, 2]
    )
    narrow = score(
        "coco_boxes", boxes(tmp_path, (1, [0, 0, 6.2, 10], 0.9), (2, [0, 0, 6.2, 10], 0.8)), data=data
    )
    assert narrow.metrics["AP"] == pytest.approx(0.3)
    content = json.loads(data.read_text())
    content["annotations"][0]["image_id"] = "1"
    texts = write(tmp_path / "texts.json", content)  # ids as texts are those of the images too
    named = boxes(tmp_path, ("1", [0, 0, 10, 10], 0.9), ("2", [0, 0, 10, 10], 0.8))
    for truth_file in (data, texts):
        assert score("coco_boxes", named, data=truth_file).metrics == right.metrics
    half = score("coco_boxes", boxes(tmp_path, (1, [0, 0, 10, 10], 0.9)), data=data)
    assert half.metrics["AR_max100"] == pytest.approx(0.5)
    for box, message in (
        ([0, 0, 10], "is no .x, y, width, height."),
        ([0, 0, -1, 9], "is no .x, y, width, height."),
    ):
        with pytest.raises(ValueError, match=message):
            score("coco_boxes", boxes(tmp_path, (1, box, 0.9)), data=data)
    with pytest.raises(ValueError, match="images that the truth does not have: 7"):
        score("coco_boxes", boxes(tmp_path, (7, [0, 0, 10, 10], 0.9)), data=data)
    with pytest.raises(ValueError, match="`ans eval score coco_boxes` scores boxes"):
        score("gcg", boxes(tmp_path, (1, [0, 0, 10, 10], 0.9)), data=data)
