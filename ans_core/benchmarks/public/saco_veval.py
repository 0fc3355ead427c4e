"""SA-Co/VEval: noun phrases and clips in, scored masklets out -> mask mAP, phrase AP, cgF1, HOTA.

--predictions: records {"video_id", "category_id", "score", "segmentations": [RLE or null per frame]}. --data:
the truth file ("videos", "annotations", "video_np_pairs"). TETA is not computed: it is a program of its own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Inputs, Scored, Scorer, percent
from ans_core.metrics.hota import Frame, Tracks, hota, tracks
from ans_core.metrics.mask import iou_matrix
from ans_core.metrics.masklets import Group, average_precision, masklet_ious, phrase_figures
from ans_core.pictures import rle
from ans_core.types import RLE

Pair = tuple[Any, Any]


def score(inputs: Inputs) -> Scored:
    path = files.named(inputs.truth, "gt.json")
    truth = files.Record(files.load(path), str(path))
    videos = {video.number("id"): video for video in truth.records("videos")}
    for video in videos.values():
        for key in ("length", "height", "width"):
            video.number(key)
    phrases = {_pair(pair): pair.text("noun_phrase") for pair in truth.records("video_np_pairs")}
    true: dict[Pair, list[list[RLE]]] = defaultdict(list)
    for record in truth.records("annotations"):
        true[_pair(record)].append(_masklet(record, videos))
    predicted: dict[Pair, list[list[RLE]]] = defaultdict(list)
    scores: dict[Pair, list[float]] = defaultdict(list)
    for record in files.records(inputs.predictions):
        pair = _pair(record)
        if pair not in phrases:
            raise ValueError(f"{record.where}: the truth asks for no phrase {pair[1]} in video {pair[0]}")
        predicted[pair].append(_masklet(record, videos))
        scores[pair].append(float(record.number("score")))
    groups = {
        pair: Group(scores=scores[pair], ious=masklet_ious(predicted[pair], true[pair])) for pair in phrases
    }
    per_category = average_precision(groups)
    per_phrase = average_precision({(pair, "any"): group for pair, group in groups.items()})
    metrics = {"mask_mAP": per_category["AP"]} | {f"phrase_{key}": value for key, value in per_phrase.items()}
    metrics |= phrase_figures(list(groups.values()))
    sure = {
        pair: [m for m, s in zip(predicted[pair], scores[pair], strict=True) if s > 0.5] for pair in phrases
    }
    metrics |= hota([_tracks(sure[pair], true[pair]) for pair in phrases])
    return Scored(
        metrics=metrics
        | {
            "phrases": len(phrases),
            "true_masklets": sum(map(len, true.values())),
            "masklets": sum(map(len, predicted.values())),
        },
        published={key: percent(metrics[key]) for key in ("mask_mAP", "phrase_AP", "cgF1", "HOTA")},
        samples=[_sample(pair, phrases[pair], group) for pair, group in groups.items()],
        notes=[
            "HOTA takes masklets that score above .5, pooled over phrases",
            "TETA is left out: it is a program of its own",
        ],
    )


def _pair(record: files.Record) -> Pair:
    return record.number("video_id"), record.number("category_id")


def _tracks(predicted: list[list[RLE]], true: list[list[RLE]]) -> Tracks:
    """A masklet is there in the frames where it has a pixel."""
    frames = []
    for t in range(max(map(len, [*predicted, *true]), default=0)):
        ours, theirs = (
            [(i, masklet[t]) for i, masklet in enumerate(side) if rle.area(masklet[t])]
            for side in (predicted, true)
        )
        similarity = iou_matrix([m for _, m in theirs], [m for _, m in ours])
        frames.append(
            Frame(true=[i for i, _ in theirs], predicted=[i for i, _ in ours], similarity=similarity)
        )
    return tracks(frames)


def _masklet(record: files.Record, videos: Mapping[Any, files.Record]) -> list[RLE]:
    video = videos.get(record["video_id"])
    if video is None:
        raise ValueError(f"{record.where}: no video {record['video_id']} in the truth")
    size = int(video["height"]), int(video["width"])
    return record.masklet("segmentations", range(int(video["length"])), size)


def _sample(pair: Pair, phrase: str, group: Group) -> dict[str, Any]:
    best = float(group.ious.max()) if group.ious.size else None
    return {
        "video_id": pair[0],
        "noun_phrase": phrase,
        "masklets": len(group.scores),
        "true": group.ious.shape[1],
        "best_iou": best,
    }


SCORER = Scorer(score=score, data="the truth file of SA-Co/VEval", sample_id=("video_id", "noun_phrase"))
