"""Public predictions whose official numbers are known. The files are not ours to publish: tests look for them
in ANS_REFERENCE."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pycocotools import mask

from ans_core.benchmarks.public import files
from ans_core.benchmarks.public.scored import Inputs, Scored
from ans_core.benchmarks.registry import SCORERS
from ans_core.metrics.text import coco_tokens
from ans_core.metrics.video import j_and_f
from tests.benchmarks.public.drawn import write
from tests.golden import REFERENCE

DATA = REFERENCE / "data"
REPLAY = DATA / "replay"
pytestmark = pytest.mark.skipif(
    not REPLAY.is_dir(), reason="no recorded predictions: ANS_REFERENCE names no folder with data/replay"
)


def load(path: Path) -> Any:
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as file:
        return json.load(file)


def scored(name: str, predictions: Path, **others: Any) -> Scored:
    return SCORERS[name].score(Inputs(predictions=predictions, **others))


def vos() -> tuple[Scored, dict[str, float]]:
    expected = load(REPLAY / "davis_osvos/expected.json")["all_objects"]
    wanted = {
        name + key: expected[name][stat]
        for name in "JF"
        for key, stat in (("", "mean"), ("_recall", "recall"), ("_decay", "decay"))
    }
    return scored("vos", REPLAY / "davis_osvos"), wanted | {"J&F": expected["J&F"]}


def mask_pairs() -> tuple[Scored, dict[str, float]]:
    expected = load(REPLAY / "mask_pairs/expected_summary.json")
    frames = expected["every_fifth_frame"]
    rela, lisa = frames["rela_grefcoco"], frames["lisa_reasonseg"]
    wanted = {f"grefcoco/{key}": rela[key] / 100 for key in ("gIoU", "cIoU")} | {
        f"grefcoco/{key}": rela[key] for key in ("N_acc", "T_acc")
    }
    wanted |= {f"grefcoco/P@{t}": rela[f"Pr@{t}"] / 100 for t in (0.7, 0.8, 0.9)}
    wanted |= {"reasonseg/gIoU": lisa["giou"], "reasonseg/cIoU": lisa["ciou"], "images": frames["samples"]}
    return scored("mask_pairs", REPLAY / "mask_pairs/pairs.json.gz"), wanted | expected["mean_over_pairs"]


def gcg() -> tuple[Scored, dict[str, float]]:
    folder = REPLAY / "coco100"
    expected = load(folder / "expected.json")
    style = expected["gcg_style"]
    wanted = {f"coco/{key}": value for key, value in expected["segm"].items()}
    wanted |= {
        key: style[key]
        for key in ("AP", "AP50", "mIoU", "images", "true_masks", "matches_masks_only")
        if key in style
    }
    wanted |= {"true_masks": style["truth_masks"], "recall_masks_only": style["recall_masks_only"]}
    wanted |= {
        "recall_same_category": style["recall_same_category_name"],
        "matches_same_category": style["matches_same_category_name"],
    }
    return scored(
        "gcg", folder / "fakesegm100_results.json.gz", data=folder / "instances_val2014_100.json.gz"
    ), wanted


def nlg_eval() -> tuple[Scored, dict[str, float]]:
    path = REPLAY / "nlg_eval/cases.json"
    wanted = {
        f"{case['name']}/{key}": value
        for case in load(path)
        for key, value in case["recomputed"].items()
        if key != "METEOR"
    }
    return scored("captions", path), wanted


def captions_magic() -> tuple[Scored, dict[str, float]]:
    wanted = load(REPLAY / "captions_magic/expected.json")
    wanted = {key: value for key, value in wanted.items() if key != "METEOR"}  # the jar's
    return scored("captions", REPLAY / "captions_magic/mscoco_tokenized.jsonl.gz"), wanted | {
        "captions": wanted.pop("images")
    }


def dlc_bench() -> tuple[Scored, dict[str, float]]:
    folder = DATA / "dlc_bench"
    found = scored("dlc_bench", folder / "dam_3b_v1.json", data=folder, replay=folder / "dam_3b_v1_eval.json")
    totals = load(folder / "dam_3b_v1_eval.json")
    return found, {
        "positive": totals["avg_pos"],
        "negative": totals["avg_neg"],
        "questions": 992,
        "recognised": 0.92,
        "unparsed": 0,
    }


def gar_bench() -> tuple[Scored, dict[str, float]]:
    expected = load(REPLAY / "gar_bench/expected.json")
    wanted = {
        "vqa/correct": expected["vqa"]["overall"]["correct"],
        "vqa/count": expected["vqa"]["overall"]["total"],
    }
    for kind, counts in expected["vqa"]["by_type"].items():
        wanted |= {f"vqa/correct/{kind}": counts["correct"], f"vqa/count/{kind}": counts["total"]}
    for part in ("caption_simple", "caption_detailed"):
        wanted |= {f"{part}/correct": expected[part]["true"], f"{part}/accuracy": expected[part]["accuracy"]}
    return scored("gar_bench", REPLAY / "gar_bench"), wanted


def ferret_bench() -> tuple[Scored, dict[str, float]]:
    folder = REPLAY / "ferret_bench"
    expected = load(folder / "expected.json")
    found = scored(
        "ferret_bench", folder / "gar_1b_answer.jsonl.gz", replay=folder / "gar_1b_review.jsonl.gz"
    )
    assert found.published["score"] == str(expected["score"])
    assert found.metrics == scored("ferret_bench", folder / "gar_1b_review.jsonl.gz").metrics
    return found, {
        "mean_reference": expected["mean_reference"],
        "mean_model": expected["mean_model"],
        "score": expected["score_unrounded"],
    }


def mmmu_val() -> tuple[Scored, dict[str, float]]:
    folder = REPLAY / "mmmu_val"
    expected, items = load(folder / "expected.json"), load(folder / "expected_items.json.gz")
    found = scored("mmmu_val", folder / "llava1.5_13b_output.json.gz", data=folder)
    for sample in found.samples:
        letter, right, guessed = items[sample["id"]]
        assert sample["right_with_guess"] == right, sample
        if not sample["open"]:
            assert sample["parsed"] == (None if guessed else letter), sample
    wanted = {
        "correct_with_guesses": expected["overall"]["correct"],
        "correct": expected["overall"]["correct_if_unparsable_is_wrong"],
    }
    wanted |= {"unparsed": expected["overall"]["unparsable"], "count": 900}
    for subject, numbers in expected["subjects"].items():
        wanted |= {
            f"correct/{subject}": numbers["correct_if_unparsable_is_wrong"],
            f"correct_with_guesses/{subject}": numbers["correct"],
        }
    wanted |= {f"count/domain/{domain}": numbers["total"] for domain, numbers in expected["domains"].items()}
    return found, wanted


def mmmu_val_parsed() -> tuple[Scored, dict[str, float]]:
    folder = REPLAY / "mmmu_val"
    return scored("mmmu_val", folder / "llava1.5_13b_total_val_output.json.gz", data=folder), {
        "correct": 330,
        "count": 900,
    }


def mmmu_pro_vision() -> tuple[Scored, dict[str, float]]:
    expected = load(REPLAY / "mmmu_pro_vision/expected.json")
    found = scored("mmmu_pro_vision", REPLAY / "mmmu_pro_vision/gpt-4o_vision_direct.jsonl.gz")
    assert {s["id"] for s in found.samples if s["parsed"] is None} == set(expected["unparsable_ids"])
    wanted = {
        f"correct/{subject}": counts["correct_if_unparsable_is_wrong"]
        for subject, counts in expected["by_subject"].items()
    }
    return found, wanted | {"correct": 725, "correct_stored": 734, "unparsed": 48, "count": 1730}


def seed_bench() -> tuple[Scored, dict[str, float]]:
    expected = load(REPLAY / "seed_bench/expected.json")
    wanted = {f"correct/{d}": counts["correct"] for d, counts in expected["by_dimension_after_strip"].items()}
    return scored("seed_bench", REPLAY / "seed_bench/seed_bench_2_gpt4v.jsonl.gz"), wanted | {
        "correct": 15751,
        "correct_with_blanks": 15740,
    }


def vstar() -> tuple[Scored, dict[str, float]]:
    wanted = {
        "correct/direct_attributes": 105,
        "correct/relative_position": 64,
        "correct": 169,
        "count": 191,
        "decided_by_judge": 22,
    }
    return scored("vstar", REPLAY / "vstar/predictions.jsonl.gz"), wanted


def saco_veval() -> tuple[Scored, dict[str, float]]:
    folder = REPLAY / "saco_veval"
    published = load(folder / "expected.json")["published"]
    wanted = {"mask_mAP": published["video_mask_mAP_50_95"], "IL_MCC": published["video_mask_demo_ilmcc_50"]}
    for key in ("HOTA", "DetA", "AssA", "DetRe", "DetPr", "AssRe", "AssPr", "LocA", "OWTA"):
        wanted[key] = published[f"video_mask_all_phrase_{key}"]
    for ours, theirs in (("", "_50_95"), ("50", "_50"), ("75", "_75")):
        wanted[f"phrase_AP{ours}"] = published[f"video_mask_phrase_ap{theirs}"]
        wanted[f"cgF1{ours and '_' + ours}"] = published[f"video_mask_demo_cgf1_micro{theirs}"]
    return scored("saco_veval", folder / "pred.json.gz", data=folder / "gt.json.gz"), wanted


CASES: list[Any] = [
    vos, mask_pairs, gcg, nlg_eval, pytest.param(captions_magic, marks=pytest.mark.slow), dlc_bench,
    gar_bench, ferret_bench, mmmu_val, mmmu_val_parsed, mmmu_pro_vision, seed_bench, vstar, saco_veval,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_recorded_predictions_get_their_official_numbers(case: Callable[[], tuple[Scored, dict[str, float]]]):
    found, wanted = case()
    assert found.missing == 0
    for key, value in wanted.items():
        within = 1e-5 if key.startswith("reasonseg/") else 1e-12  # LISA adds up in float32
        assert found.metrics[key] == pytest.approx(value, rel=within, abs=within), key


@pytest.mark.slow
def test_the_boxes_of_recorded_masks_get_pycocotools_figures(tmp_path: Path):
    """Expected: pycocotools' own loadRes on the masks, which boxes them, and COCOeval of type bbox."""
    folder = REPLAY / "coco100"
    results = load(folder / "fakesegm100_results.json.gz")
    boxes = [r | {"bbox": mask.toBbox(r["segmentation"]).tolist()} for r in results]
    path = write(
        tmp_path / "boxes.json", [{key: r[key] for key in r if key != "segmentation"} for r in boxes]
    )
    found = scored("coco_boxes", path, data=folder / "instances_val2014_100.json.gz")
    assert found.metrics["AP"] == pytest.approx(0.48289170148234417, abs=1e-12)
    assert (found.metrics["images"], found.metrics["true_boxes"], found.metrics["boxes"]) == (100, 830, 734)


def test_every_question_of_dlc_bench_gets_its_recorded_score():
    folder = DATA / "dlc_bench"
    found = scored(
        "dlc_bench", folder / "dam_3b_v1.json", data=folder, replay=folder / "dam_3b_v1_eval.json"
    ).samples
    recorded = load(folder / "dam_3b_v1_eval.json")
    assert len(found) == 992
    keys = {
        "positive": "details_positives",
        "negative": "details_negatives",
        "recognition": "details_recognition",
    }
    for sample in found:
        entry = recorded[sample["object"]][keys[sample["type"]]][sample.get("question", 0)]
        assert sample["choice"] == entry["pred_index"], entry
        if sample["type"] == "recognition":
            assert sample["recognised"] == (entry["eval_result"] == "correct")
        else:
            assert sample["score"] == entry["eval_result"], entry


@pytest.mark.slow
def test_every_frame_of_davis_and_of_the_pairs_gets_its_official_j_and_f():
    for sequence in load(REPLAY / "davis_osvos/expected_per_frame.json.gz"):
        record = load(REPLAY / f"davis_osvos/{sequence['sequence']}.json.gz")
        (one,), (expected,) = record["objects"], sequence["objects"]
        found = [j_and_f(p, t) for p, t in zip(one["prediction"], one["truth"], strict=True)]
        assert [list(values) for values in zip(*found, strict=True)] == [
            expected["J_per_frame"],
            expected["F_per_frame"],
        ]
    samples = scored("mask_pairs", REPLAY / "mask_pairs/pairs.json.gz").samples
    for sample, expected in zip(samples, load(REPLAY / "mask_pairs/expected.json.gz")["pairs"], strict=True):
        for name in "JF":
            assert sample[f"{name}_per_frame"] == pytest.approx(expected[f"{name}_per_frame"], abs=1e-15)
            assert sample[f"{name}_decay"] == pytest.approx(expected[name]["decay"], abs=1e-12)
            assert sample[f"{name}_without_first_and_last"] == pytest.approx(
                expected[f"{name}_without_first_and_last"]["mean"], abs=1e-12
            )


@pytest.mark.slow
def test_each_caption_of_coco_gets_its_official_cider_and_rouge():
    found = scored("captions", REPLAY / "captions_magic/mscoco_tokenized.jsonl.gz").samples
    expected = load(REPLAY / "captions_magic/mscoco_per_image.json.gz")
    for key in ("CIDEr", "ROUGE_L"):
        assert [s[key] for s in found] == pytest.approx(expected[key], abs=6e-7)  # six decimals are stored


@pytest.mark.slow
def test_our_tokens_of_coco_captions_are_the_java_tokenizers_but_for_five_texts():
    folder = REPLAY / "captions_magic"
    texts, tokens = (
        [t for record in files.stream(folder / name) for t in (*record["captions"], record["prediction"])]
        for name in ("mscoco.jsonl.gz", "mscoco_tokenized.jsonl.gz")
    )
    assert len(texts) == 29_902
    assert sum(coco_tokens(text) != wanted for text, wanted in zip(texts, tokens, strict=True)) <= 5
