"""Grounded conversation (GranD-f val / test): captions whose phrases carry masks -> AP, AP50, mIoU, recall,
CIDEr, METEOR as NLTK has it.

--predictions: a folder of `<image_id>.json` {"image_id", "caption", "phrases", "pred_masks": [RLE]}, or such
records a line; or a list of COCO results {"image_id", "category_id", "segmentation", "score"}, which has
masks alone.
--data: a folder with `{val,test}_gcg_coco_mask_gt.json` and `.._caption_gt.json`, or a file of COCO
instances. A model is run on such a folder with the pictures beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from ans_core.benchmarks.public import captions, files
from ans_core.benchmarks.public.asked import Item, Runner
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.metrics import coco
from ans_core.metrics.bootstrap import Ratio
from ans_core.metrics.grounding import best_pairs, phrases, plain_caption, recalled_pairs
from ans_core.metrics.mask import iou_matrix
from ans_core.metrics.phrases import PhraseEncoder
from ans_core.metrics.text import coco_tokens
from ans_core.types import RLE, Prediction, Request

QUESTION = (
    "<image>\nCould you please give me a brief description of the image? Please respond with interleaved    "
    " segmentation masks for the corresponding parts of the answer."
)
"""Upstream's, with its five blanks."""
SPLITS = ("val", "test")


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """One image's prediction."""

    masks: list[RLE] = field(default_factory=list)
    phrases: list[str] = field(default_factory=list)
    """Of the masks, in order; what is not there is ""."""
    caption: str | None = None


def score(inputs: Inputs) -> Scored:
    masks_file = _masks_file_of(inputs.truth, inputs.predictions)
    truth, images = read_truth(masks_file)
    listed, predicted = _read_predictions(inputs.predictions, images)
    missing = (
        files.refuse_unknown(predicted, images, where=inputs.predictions, what="images") if not listed else []
    )
    if inputs.predicted_only:
        images, missing = {image: images[image] for image in images if image in predicted}, []
    # all, or those predicted
    annotations = [
        a for a in truth.records("annotations") if not a.get("iscrowd") and str(a["image_id"]) in images
    ]
    if not annotations:
        raise ValueError(f"{masks_file}: no true mask")
    true: dict[str, list[RLE]] = {image: [] for image in images}
    true_categories: dict[str, list[Any]] = {image: [] for image in images}
    for annotation in annotations:
        name = str(annotation["image_id"])
        true[name].append(annotation.mask("segmentation", size_of(images[name])))
        true_categories[name].append(annotation["category_id"])
    ious = {image: iou_matrix(predicted.get(image, Predicted()).masks, true[image]) for image in images}
    mious = [_miou(ious[image]) for image in images]
    metrics, notes = _average_precision(truth, annotations, images, predicted), ["crowd regions are left out"]
    ratios = {
        "mIoU": Ratio(numerators=mious),
        "recall_masks_only": _recall(ious, true, lambda image, i, j: 1.0),
    }
    ratios |= _phrase_recall(inputs, masks_file, ious, predicted, true, notes)
    if listed:
        categories: dict[str, list[Any]] = defaultdict(list)
        for record in listed:
            for key in ("category_id", *(["score"] if "score" in record else [])):
                record.number(key)
            categories[str(record["image_id"])].append(record["category_id"])
        ratios["recall_same_category"] = _recall(
            ious, true, lambda image, i, j: float(categories[image][i] == true_categories[image][j])
        )
    metrics |= {"mIoU": float(np.mean(mious)), **_recalls(ratios)}
    if listed:
        of_images = [a for a in truth.records("annotations") if str(a["image_id"]) in images]
        shown = {**truth, "images": list(images.values()), "annotations": of_images}  # with crowds
        metrics |= _coco(shown, with_image_ids(listed, images))
    elif inputs.truth.is_dir():
        figures, of_captions = _captions(inputs, _captions_file(masks_file), images, predicted, notes)
        metrics, ratios = metrics | figures, ratios | of_captions
    notes.append("AP and AP50 have no interval: pycocotools gives them for all images at once")
    return Scored(
        scored_together=tuple({"CIDEr"} & ratios.keys()),
        metrics=metrics | {"images": len(images), "true_masks": len(annotations)},
        published={key: percent(metrics[key]) for key in ("AP50", "mIoU", "recall") if key in metrics},
        ratios=ratios,
        samples=[
            {"image_id": image, "mIoU": miou, "masks": len(predicted.get(image, Predicted()).masks)}
            for image, miou in zip(images, mious, strict=True)
        ],
        missing=len(missing),
        notes=notes,
    )


def _miou(ious: Float[np.ndarray, "P N"]) -> float:
    """GranD-f's of one image; 0 without a match."""
    return float(np.mean([value for *_, value in best_pairs(ious)] or [0.0]))


def size_of(image: Mapping[str, Any]) -> tuple[int, int]:
    return image["height"], image["width"]


def read_truth(path: Path) -> tuple[files.Record, dict[str, files.Record]]:
    """The file, whose annotations are checked, and its images by id."""
    truth = files.Record(files.load(path), str(path))
    images = files.by_id(truth.listed("images"), "id", where=f"{path}, images")
    for image in images.values():
        for key in ("height", "width"):
            if not isinstance(size := image.number(key), int) or size < 1:
                raise ValueError(f"{image.where}: {key} {size} is no number of pixels")
    for annotation in truth.records("annotations"):
        annotation.number("id")
        name = str(annotation.value("image_id"))
        if name not in images:
            raise ValueError(f"{annotation.where}: image {name} is not among the file's images")
        for key in ("category_id", "area"):
            annotation.number(key)
        if annotation.get("segmentation") is None or annotation.get("iscrowd") not in (0, 1):
            raise ValueError(
                f"{annotation.where}: it needs a segmentation and iscrowd (0 or 1), as COCO's do"
            )
        if annotation["iscrowd"]:  # others are decoded where they are scored
            annotation.mask("segmentation", size_of(images[name]))
    for category in truth.records("categories") if "categories" in truth else []:
        category.number("id")
    truth["annotations"] = with_image_ids(truth.records("annotations"), images)
    return truth, images


def with_image_ids(records: Iterable[files.Record], images: Mapping[str, files.Record]) -> list[files.Record]:
    """Return records with the ids of their images as the images have them: to pycocotools 7 and "7" are two."""
    return [
        files.Record(record | {"image_id": images[str(record["image_id"])]["id"]}, record.where)
        for record in records
    ]


def _masks_file_of(data: Path, predictions: Path) -> Path:
    """The truth of the split that is predicted; a folder may hold both."""
    if data.is_file():
        return data
    there = [
        path
        for split in SPLITS
        for path in (_masks_file(data, split), _masks_file(data, split).with_suffix(".json.gz"))
        if path.is_file()
    ]
    if len(there) < 2:
        return files.named(data, *(_masks_file(data, split).name for split in SPLITS))
    predicted = (
        {path.stem for path in predictions.glob("*.json")}
        if predictions.is_dir()
        else {str(files.records(predictions)[0]["image_id"])}
    )
    return next(
        (path for path in there if predicted & {str(image["id"]) for image in files.load(path)["images"]}),
        there[0],
    )


def _masks_file(data: Path, split: str) -> Path:
    return data / f"{split}_gcg_coco_mask_gt.json"


def _captions_file(masks_file: Path) -> Path:
    return masks_file.with_name(masks_file.name.replace("_mask_", "_caption_"))


def _read_predictions(
    predictions: Path, images: Mapping[str, files.Record]
) -> tuple[list[files.Record], dict[str, Predicted]]:
    """COCO's results, if it is a list of these; and every image's prediction."""
    if predictions.is_dir():
        paths = sorted(predictions.glob("*.json"))
        return [], _of_records(
            {path.stem: files.Record(files.load(path), str(path)) for path in paths}, images
        )
    listed = files.records(predictions)
    if "pred_masks" in listed[0]:
        return [], _of_records(files.by_id(listed, "image_id", where=predictions), images)
    return listed, _of_results(listed, images)


def _of_results(listed: Iterable[files.Record], images: Mapping[str, files.Record]) -> dict[str, Predicted]:
    predicted: dict[str, Predicted] = defaultdict(Predicted)
    for record in listed:
        name = str(record.value("image_id"))
        if name not in images:
            raise ValueError(f"{record.where}: image {name} is not one of the truth's")
        if record.get("segmentation") is None:
            other = "; `ans eval score coco_boxes` scores boxes" if "bbox" in record else ""
            raise ValueError(
                f"{record.where}: no segmentation; COCO's results hold only what was found{other}"
            )
        predicted[name].masks.append(record.mask("segmentation", size_of(images[name])))
    return dict(predicted)


def _of_records(
    records: Mapping[str, files.Record], images: Mapping[str, files.Record]
) -> dict[str, Predicted]:
    predicted = {}
    for image, record in records.items():
        if image not in images:
            predicted[image] = Predicted()  # refused with all others of its kind
            continue
        if "caption" not in record and len(record) == 1:
            record = record.record(*record)  # GLaMM's own files: {name: {...}}
        size = size_of(images[image])
        masks = [files.mask(m, size, where=record.where) for m in record.listed("pred_masks")]
        mask_phrases = [*record.listed("phrases"), *[""] * len(masks)][: len(masks)]
        predicted[image] = Predicted(masks=masks, phrases=mask_phrases, caption=record.text("caption"))
    return predicted


def _average_precision(
    truth: Mapping[str, Any],
    annotations: Sequence[Mapping[str, Any]],
    images: Mapping[str, files.Record],
    predicted: dict[str, Predicted],
) -> dict[str, float]:
    """One category, all scores 1.0: among equals the order of the file decides."""
    one = {
        **truth,
        "annotations": [{**a, "category_id": 1} for a in annotations],
        "categories": [{"id": 1, "name": "object"}],
        "images": list(images.values()),
    }
    results = [
        {"image_id": images[image]["id"], "category_id": 1, "segmentation": mask, "score": 1.0}
        for image in predicted
        for mask in predicted[image].masks
    ]
    figures = coco.figures(one, results, kind="segm")
    return {key: figures[key] for key in ("AP", "AP50")}


def _coco(truth: Mapping[str, Any], listed: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """The detection scores of the same file, with its categories and scores."""
    if not all("score" in record for record in listed) or "categories" not in truth:
        return {}
    return {f"coco/{key}": value for key, value in coco.figures(truth, listed, kind="segm").items()}


def _recall(
    ious: dict[str, Any], true: dict[str, list[RLE]], similarity: Callable[[str, int, int], float]
) -> Ratio:
    """Pooled over images."""
    recalled = [recalled_pairs(ious[image], partial(similarity, image)) for image in ious]
    return Ratio(numerators=recalled, denominators=[len(true[image]) for image in ious])


def _recalls(ratios: dict[str, Ratio]) -> dict[str, float]:
    """Each recall with its number of matches."""
    metrics: dict[str, float] = {}
    for name, ratio in ratios.items():
        if "recall" in name:
            metrics |= {name: ratio.value, name.replace("recall", "matches"): int(sum(ratio.numerators))}
    return metrics


def _phrase_recall(
    inputs: Inputs,
    masks_file: Path,
    ious: dict[str, Any],
    predicted: dict[str, Predicted],
    true: dict[str, list[RLE]],
    notes: list[str],
) -> dict[str, Ratio]:
    """The benchmark's own recall, which also compares phrases."""
    if not inputs.text_encoder or not inputs.truth.is_dir():
        notes.append(
            "recall (masks and phrases) is left out: it needs --text-encoder (bert-base-uncased) and the "
            "phrases of the truth"
        )
        return {}
    encoder = PhraseEncoder(inputs.text_encoder)
    path = _captions_file(masks_file)
    labels = {
        str(record["image_id"]): record["labels"]
        for record in files.Record(files.load(path), str(path)).records("annotations")
    }
    for image, masks in true.items():
        if len(labels.get(image, [])) != len(masks):
            raise ValueError(
                f"{path}: image {image} has {len(labels.get(image, []))} labels and {len(masks)} true masks"
            )
    notes.append(f"recall compares phrases by {inputs.text_encoder}")
    return {
        "recall": _recall(
            ious, true, lambda image, i, j: encoder(predicted[image].phrases[i], labels[image][j])
        )
    }


def _captions(
    inputs: Inputs, path: Path, images: Iterable[str], predicted: dict[str, Predicted], notes: list[str]
) -> tuple[dict[str, float], dict[str, Ratio]]:
    truth = captions.caption_truth(path)
    if inputs.predicted_only:
        truth = {image: texts for image, texts in truth.items() if image in predicted}
    tokenised = [coco_tokens(predicted[image].caption or "") if image in predicted else "" for image in truth]
    scores = captions.scores_of(
        list(truth), tokenised, [[coco_tokens(text) for text in texts] for texts in truth.values()]
    )
    notes.append(captions.METEOR_NOTE)
    keys = ("METEOR_nltk", "CIDEr")
    metrics, ratios = {key: scores.metrics[key] for key in keys}, {}
    place = {image: n for n, image in enumerate(truth)}
    if set(place) == set(images):  # a line of the table is an image of the masks
        for key in keys:
            values = scores.ratios[key].numerators
            ratios[key] = Ratio(numerators=[values[place[image]] for image in images])
    return metrics, ratios


def items(folder: Path, split: str) -> Iterator[Item]:
    if not (path := _masks_file(folder, split)).is_file():
        raise ValueError(
            f"{path} is not there; give GranD-f's folder of the evaluation (val_test), or another --split"
        )
    truth, images = read_truth(path)
    pictures = files.pictures(
        folder, "images", "GranDf_HA_images/val_test", "../GranDf_HA_images/val_test", "../images"
    )
    masks: dict[str, list[RLE]] = defaultdict(list)
    for annotation in truth.records("annotations"):
        name = str(annotation["image_id"])
        masks[name].append(annotation.mask("segmentation", size_of(images[name])))
    true_captions = captions.caption_truth(_captions_file(path)) if _captions_file(path).is_file() else {}
    for name, image in images.items():
        picture = (
            pictures / image["file_name"]
            if "file_name" in image
            else files.picture(pictures, name, where=str(path))
        )
        answer = Prediction(
            text=next(iter(true_captions.get(name, [])), ""), masks=tuple((mask,) for mask in masks[name])
        )
        request = Request(frames=(picture,), text=QUESTION)
        yield Item(name=name, request=request, facts={"image_id": name}, truth=answer)


def record(item: Item, prediction: Prediction) -> dict[str, Any]:
    masks = [masklet[0] for masklet in prediction.masks]
    return item.facts | {
        "caption": plain_caption(prediction.text),
        "phrases": phrases(prediction.text),
        "pred_masks": masks,
        "text": prediction.text,
    }


def miou(item: Item, prediction: Prediction) -> float:
    assert item.truth is not None
    predicted, real = (
        [m[0] for m in masks if m[0] is not None] for masks in (prediction.masks, item.truth.masks)
    )
    return _miou(iou_matrix(predicted, real))


SCORER = Scorer(
    score=score,
    data="folder of the mask and caption truth, or a file of COCO instances",
    options=frozenset({"text_encoder", "predicted_only"}),
    sample_id=("image_id",),
    runner=Runner(
        items=items,
        record=record,
        splits=SPLITS,
        running=("mIoU", miou),
        needs=lambda truth, split: files.named(truth, _captions_file(_masks_file(truth, split)).name),
    ),
)
