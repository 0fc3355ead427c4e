"""A value of a wrong type anywhere in a file of predictions or truth is refused by name or does not matter,
and never ends in a traceback."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet as parquet
import pytest

from ans_core.benchmarks.registry import SCORERS
from tests.benchmarks.public import test_gcg, test_questions, test_video_files
from tests.benchmarks.public.drawn import H, W, coded, score, write
from tests.benchmarks.public.question_sets import SETS

ODD: tuple[Any, ...] = (None, True, float("nan"), "", [], {"size": None})
DELETED = object()
ART = "Art/validation-00000-of-00001.parquet"
CHOICES = {
    "question_type": "multiple-choice",
    "answer": "B",
    "all_choices": ["A", "B"],
    "index2ans": {"A": "x", "B": "y"},
}
PREDICTIONS: dict[str, Any] = {
    "refcoco": [{"id": "a", "mask": coded(0, 5)}, {"id": "c", "mask": None}],
    "grefcoco": [{"sample_id": "a", "masks": [[coded(0, 5)]]}, {"sample_id": "c", "masks": []}],
    "mask_pairs": {"height": H, "width": W, "frames": 3, "pairs": [{"truth": [coded(0, 4)] * 3, "prediction": [coded(0, 3), None, None]}]},
    "mevis": {"zoo": {"0": {"prediction_masks": [coded(0, 2), None]}, "1": {"prediction_masks": [coded(0, 2), None]}}},
    "gcg": [{"image_id": 1, "category_id": 1, "segmentation": coded(0, 3), "score": 0.5}],
    "coco_boxes": [{"image_id": 1, "category_id": 1, "bbox": [0, 0, 3, 6], "score": 0.5}],
    "captions": [{"captions": ["a cat", "the cat"], "prediction": "x"}, {"captions": ["a dog"], "prediction": "a dog"}],
    "gar_bench": [{"image": "1", "choices": ["A. x", "B. y"], "answer": "A", "type": "color", "model_output": "A"}],
    "ferret_bench": [{"question_id": 1, "answer2_id": 1, "content": "8 6"}],
    "mmbench": [{"index": 1, "A": "x", "B": "y", "answer": "A", "prediction": "A"},
                {"index": 1_000_001, "A": "y", "B": "x", "answer": "B", "prediction": "A"}],
    "mmmu_val": {"Art": [{"id": "validation_Art_1", "response": "B", **CHOICES},
                         {"id": "validation_Art_2", "response": "7", "question_type": "open", "answer": "7"}]},
    "mmmu_pro_vision": [{"id": "1", "subject": "Art", "options": "['x', 'y']", "answer": "A", "response": "A", "if_right": True}],
    "mme": [{"category": "count", "image": "1", "question": q, "answer": "Yes", "prediction": "yes"} for q in "ab"],
    "seed_bench": [{"question_id": "1_0", "prediction": "A", "gt_answer": "B"}],
    "vstar": [{"image": "x", "test_type": "t", "question": "q", "options": ["cat", "dog"], "answer": "cat", "pred_ans": "A", "judged": 1}],
    "saco_veval": [{"video_id": 1, "category_id": 2, "score": 0.9, "segmentations": [coded(0, 4), None]}],
    "dlc_bench": {"7": "a cat"},
    "tallyqa_complex": [{"question_id": 7, "prediction": "4", "answer": 4}, {"question_id": "8", "prediction": "x", "answer": 2}],
    "infographicsvqa": [{"questionId": 7, "answer": "12"}],
    "mathvista": {"1": {"response": "4"}, "2": {"extraction": "B"}},
    "mm_vet": {"v1_0": "x = 3"},
    "virl39k": [{"qid": "a", "prediction": "3", "answer": "3", "category": "Math"}],
}  # fmt: skip


def truth_of(name: str, folder: Path) -> dict[str, Path]:
    if name in ("refcoco", "grefcoco"):
        truth = [{"id": "a", "mask": coded(0, 4)}, {"id": "c", "mask": None, "height": H, "width": W}]
        return {"data": write(folder / "truth.json", truth)}
    if name == "mevis":
        return {
            "data": test_video_files.truth(folder / "data", {"0": {"anno_id": [1]}, "1": {"anno_id": [9]}})
        }
    if name == "revos":
        return {
            "data": test_video_files.truth(
                folder / "data", {"0": {"anno_id": [1], "type_id": 0}, "1": {"anno_id": [9], "type_id": 1}}
            )
        }
    if name in ("gcg", "coco_boxes"):
        return {"data": test_gcg.truth(folder / "data") / "val_gcg_coco_mask_gt.json"}
    if name == "saco_veval":
        masklet = {"id": 1, "video_id": 1, "category_id": 2, "segmentations": [coded(0, 4), None]}
        truth = {"videos": [{"id": 1, "length": 2, "height": H, "width": W}], "annotations": [masklet]}
        phrases = [{"video_id": 1, "category_id": 2, "noun_phrase": "cat"}]
        return {"data": write(folder / "truth.json", truth | {"video_np_pairs": phrases})}
    if name == "infographicsvqa":
        asked = {"questionId": 7, "question": "?", "image_local_name": "1.jpg", "answers": ["12"]}
        return {"data": write(folder / "truth.json", {"data": [asked]})}
    if name == "mathvista":
        first = {"question": "?", "question_type": "free_form", "answer_type": "integer", "answer": "4"}
        second = {
            "question": "?",
            "question_type": "multi_choice",
            "answer_type": "text",
            "choices": ["x", "y"],
            "answer": "y",
        }
        return {"data": write(folder / "truth.json", {"1": first, "2": second})}
    if name == "mm_vet":
        truth = {"v1_0": {"imagename": "a.jpg", "question": "?", "answer": "3", "capability": ["math"]}}
        replay = write(folder / "grades.json", {"v1_0": {"model": ["m"], "content": ["1.0"], "score": [1.0]}})
        return {"data": write(folder / "truth.json", truth), "replay": replay}
    if name == "dlc_bench":
        files = test_questions.dlc(folder / "data", recognised="Yes", replies=["A", "A"])
        return {key: files[key] for key in ("data", "replay")}
    return {}


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    for key, child in (
        value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    ):
        yield (*at, key)
        yield from places(child, (*at, key))


def changed(value: Any, at: tuple[Any, ...], odd: Any) -> Any:
    value = parent = copy.deepcopy(value)
    for key in at[:-1]:
        parent = parent[key]
    if odd is DELETED:
        del parent[at[-1]]
    else:
        parent[at[-1]] = odd
    return value


@pytest.mark.slow
@pytest.mark.parametrize("name", PREDICTIONS)
def test_wrong_types_are_refused_by_name(tmp_path: Path, name: str):
    valid, others = PREDICTIONS[name], truth_of(name, tmp_path)
    path = write(tmp_path / "predictions.json", valid)
    assert score(name, path, **others).metrics
    refusals: list[str] = []
    for at in places(valid):
        for odd in (*ODD, DELETED):
            path.write_text(json.dumps(changed(valid, at, odd)))
            try:
                score(name, path, **others)
            except ValueError as error:
                refusals.append(str(error))
    assert refusals
    assert all(str(tmp_path) in refusal or "--predictions" in refusal for refusal in refusals), refusals


@pytest.mark.slow
@pytest.mark.parametrize("name", ["refcoco", "mevis", "revos", "gcg", "saco_veval", "dlc_bench"])
def test_wrong_types_in_the_truth_are_refused_by_name(tmp_path: Path, name: str):
    predictions = write(tmp_path / "predictions.json", PREDICTIONS["mevis" if name == "revos" else name])
    others = truth_of(name, tmp_path)
    refusals: list[str] = []
    for path in [
        path
        for given in others.values()
        for path in ([given] if given.is_file() else sorted(given.glob("*.json")))
    ]:
        text = path.read_text()
        for number, at in enumerate(places(valid := json.loads(text))):
            # each place once
            path.write_text(json.dumps(changed(valid, at, (*ODD, DELETED)[number % (len(ODD) + 1)])))
            try:
                score(name, predictions, **others)
            except ValueError as error:
                refusals.append(str(error))
        path.write_text(text)
    assert refusals
    assert [refusal for refusal in refusals if str(tmp_path) not in refusal and "zoo/" not in refusal] == []


def rewritten(path: Path) -> Iterator[None]:
    """Write each wrong value to each place of a JSON file; of a table, to its first row, alone in it."""
    content, table = path.read_bytes(), path.suffix == ".parquet"
    valid = parquet.read_table(path).to_pylist()[0] if table else json.loads(content)
    for at in places(valid):
        for odd in (*ODD, DELETED):
            wrong = changed(valid, at, odd)
            if table:
                parquet.write_table(pyarrow.Table.from_pylist([wrong]), path)
            else:
                path.write_text(json.dumps(wrong))
            yield
    path.write_bytes(content)


def refused(path: Path, *reads: Callable[[], object]) -> list[str]:
    """How each of these refuses the values that `rewritten` writes."""
    refusals = []
    for _ in rewritten(path):
        for read in reads:
            try:
                read()
            except ValueError as error:
                refusals.append(str(error))
    return refusals


@pytest.mark.slow
@pytest.mark.parametrize("name", SETS)
def test_wrong_types_in_a_set_of_questions_are_refused_by_name(tmp_path: Path, name: str):
    """By those who ask a model, and by those who score its answers."""
    folder, runner = SETS[name](tmp_path / "data"), SCORERS[name].runner
    assert runner is not None
    asked = [runner.record(item, item.truth) for item in runner.items(folder, runner.splits[0]) if item.truth]
    predictions = write(tmp_path / "told.json", asked)
    others = {"data": folder} if SCORERS[name].data else {}
    if name == "mmmu_val":
        others = {}  # its release holds no answer_dict_val.json
    if name == "mm_vet":
        graded = {record["id"]: {"model": ["m"], "content": ["1.0"], "score": [1.0]} for record in asked}
        others["replay"] = write(tmp_path / "grades.json", graded)
    assert score(name, predictions, **others).metrics

    def ask() -> None:
        list(runner.items(folder, runner.splits[0]))

    for path in [*sorted(folder.rglob("*.json")), *folder.rglob("*.parquet"), *tmp_path.glob("grades.json")]:
        refusals = refused(path, ask, lambda: score(name, predictions, **others))
        assert refusals
        assert [refusal for refusal in refusals if str(tmp_path) not in refusal] == []


@pytest.mark.parametrize(
    "told",
    [PREDICTIONS["mmmu_val"], {"validation_Art_1": "B", "validation_Art_2": ["7", 7.0]}],
    ids=["replies", "parsed"],
)
def test_wrong_types_in_mmmus_answers_are_refused_by_name(tmp_path: Path, told: dict[str, Any]):
    truth = {"validation_Art_1": {"question_type": "multiple-choice", "ground_truth": "B"}}
    truth |= {"validation_Art_2": {"question_type": "short-answer", "ground_truth": "7"}}
    paths = write(tmp_path / "told.json", told), write(tmp_path / "answer_dict_val.json", truth)
    assert score("mmmu_val", paths[0], data=paths[1]).metrics["accuracy"] == 1.0
    for path in paths:
        refusals = refused(path, lambda: score("mmmu_val", paths[0], data=paths[1]))
        assert refusals
        assert [refusal for refusal in refusals if str(tmp_path) not in refusal] == []


@pytest.mark.parametrize(
    ("name", "file", "at", "odd", "refusal"),
    [
        ("tallyqa_complex", "test.json", (0, "image"), DELETED, r"test\.json, 7: key 'image' is missing"),
        ("infographicsvqa", "infographicsVQA_val_v1.0_withQT.json", ("data", 0, "answer_type"), 1, r"71: 'answer_type' is 1, not a list"),
        ("mathvista", "annot_testmini.json", ("1", "metadata"), 1, r"testmini\.json, 1, metadata: int, not an object"),
        ("mathvista", "annot_testmini.json", ("2", "choices"), 1, r"testmini\.json, 2: 'choices' is 1, not a list of str"),
        ("mathvista", "annot_testmini.json", ("2", "choices"), [], r"testmini\.json, 2: a multi_choice question without choices"),
        ("mathvista", "annot_testmini.json", ("1", "answer_type"), "float", r"testmini\.json, 1: 'precision' is None, not a finite number"),
        ("mm_vet", "mm-vet.json", ("v1_0", "imagename"), 1, r"mm-vet\.json, v1_0: 'imagename' is int '1', not text"),
        ("mm_vet", "mm-vet.json", ("v1_0", "capability"), "ocr", r"mm-vet\.json, v1_0: 'capability' is 'ocr', not a list of str"),
        ("mmmu_val", ART, ("image_1",), None, r"validation_Art_1, image_1: NoneType, not an object"),
        ("mmmu_val", ART, ("image_1", "bytes"), None, r"image_1 holds None, not the bytes"),
        ("mmmu_val", ART, ("options",), "['me', ", r"Art_1: 'options' is \"\['me', \", not the text of a Py"),
        ("mmmu_val", ART, ("options",), "[]", r"Art_1: a multiple-choice question without options"),
        ("mmmu_val", ART, ("id",), DELETED, r"parquet, None: key 'id' is missing"),
        ("virl39k", "39Krelease.parquet", ("image",), 1, r"39Krelease\.parquet, 0: 'image' is 1, not a list of str"),
        ("virl39k", "39Krelease.parquet", ("image",), [{"path": "0.png"}], r"39Krelease\.parquet, 0: 'image' is .*, not a list of str"),
        ("virl39k", "39Krelease.parquet", ("qid",), 0.5, r"39Krelease\.parquet, 0\.5: qid 0\.5 is no id"),
    ],
)  # fmt: skip
def test_what_is_wrong_in_a_set_of_questions_is_said_in_a_sentence(
    tmp_path: Path, name: str, file: str, at: tuple[Any, ...], odd: Any, refusal: str
):
    folder, runner = SETS[name](tmp_path), SCORERS[name].runner
    path = folder / file
    if path.suffix == ".parquet":
        row = parquet.read_table(path).to_pylist()[0]
        parquet.write_table(pyarrow.Table.from_pylist([changed(row, at, odd)]), path)
    else:
        write(path, changed(json.loads(path.read_text()), at, odd))
    assert runner is not None
    with pytest.raises(ValueError, match=refusal):
        list(runner.items(folder, runner.splits[0]))


def test_mm_vets_questions_as_a_list_are_refused(tmp_path: Path):
    folder, runner = SETS["mm_vet"](tmp_path), SCORERS["mm_vet"].runner
    write(folder / "mm-vet.json", [{"imagename": "a.jpg"}])
    assert runner is not None
    with pytest.raises(ValueError, match=r"mm-vet\.json: expected \{id: question\}"):
        list(runner.items(folder, ""))


@pytest.mark.parametrize("key", ["model", "content"])
def test_a_replay_of_mm_vet_whose_runs_are_no_list_is_refused(tmp_path: Path, key: str):
    others = truth_of("mm_vet", tmp_path)
    write(others["replay"], {"v1_0": {"model": ["m"], "content": ["1.0"], "score": [1.0], key: 1}})
    with pytest.raises(ValueError, match=rf"grades\.json, v1_0: '{key}' is 1, not a list of str"):
        score("mm_vet", write(tmp_path / "told.json", PREDICTIONS["mm_vet"]), **others)


def test_a_number_that_is_none_is_not_scored(tmp_path: Path):
    path = write(tmp_path / "told.json", changed(PREDICTIONS["saco_veval"], (0, "score"), float("nan")))
    with pytest.raises(ValueError, match="record 0: 'score' is nan, not a finite number"):
        score("saco_veval", path, **truth_of("saco_veval", tmp_path))
