"""`ans data caption` and `ans data draw`: masks without words, or words without masks in, a data set with both out."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from PIL import Image

from ans_core import data
from ans_core.benchmarks.loops import expression_of
from ans_core.checkpoints import checkpoint
from ans_core.evaluation import self_labels as labelling
from ans_core.model.network import Network
from ans_core.pictures import rle, transforms
from ans_core.rl.self_captions import CaptionOptions
from ans_core.rl.self_masks import MaskOptions
from ans_core.types import Sample
from tests import tiny

OPTIONS = CaptionOptions(samples=8, max_tokens=60, choices=1)
MASKS = (tiny.square(8, 8, 24, 24), tiny.square(30, 30, 60, 50))


@pytest.fixture
def masks(tmp_path: Path) -> Path:
    """Five pictures with two masks each, in SA-1B's layout."""
    folder = tmp_path / "photos"
    folder.mkdir()
    for number in range(5):
        (folder / f"sa_{number}.png").write_bytes(tiny.picture(number))
        image = {"image_id": number, "width": tiny.SIDE, "height": tiny.SIDE, "file_name": f"sa_{number}.png"}
        annotations = [{"id": i, "segmentation": mask} for i, mask in enumerate(MASKS)]
        (folder / f"sa_{number}.json").write_text(json.dumps({"image": image, "annotations": annotations}))
    return folder


@pytest.fixture
def model(own_model: Network, tmp_path: Path) -> str:
    own_model.internvl.lm_head.weight.mul_(0.1)  # so that answers end
    checkpoint.save(own_model, tmp_path / "model", metadata={})
    return str(tmp_path / "model")


def caption(model: str, masks: Path, out: Path, count: int = 0, keep: float = 1.0) -> str:
    return labelling.label(
        labelling.Captions(OPTIONS), model, "photos", masks, "sa1b", "train",
        out=out, count=count, keep=keep, device="cpu",
    )  # fmt: skip


def read(out: Path) -> list[Sample]:
    return data.read_samples(format="shards", path=out, name="captions", split="train")


@pytest.mark.slow
def test_a_killed_run_goes_on_and_gives_a_data_set_with_the_masks_and_their_pictures(
    model: str, masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    said = caption(model, masks, tmp_path / "once")
    samples = read(tmp_path / "once")
    assert said.startswith(f"{len(samples)} captions of 10 masks without words are kept")
    assert 4 <= len(samples) <= 10
    assert {sample.task for sample in samples} == {"region_caption"}
    assert all(sample.text and 0 <= sample.meta["iou"] <= 1 for sample in samples)
    outlines = {mask["counts"] for mask in MASKS}
    assert {sample.masks[0][0]["counts"] for sample in samples} == outlines  # type: ignore[index]
    assert rle.area(samples[0].masks[0][0])  # type: ignore[arg-type]
    for one in samples:
        drawn = Image.open(io.BytesIO(tiny.picture(int(one.image_id))))
        assert transforms.open_image(one.frames[0]).tobytes() == drawn.convert("RGB").tobytes()

    batches = []
    chosen = labelling.self_captions

    def ends(network: Network, regions: list[Sample], options: CaptionOptions) -> object:
        batches.append(len(regions))
        if len(batches) == 2:
            raise KeyboardInterrupt
        return chosen(network, regions, options)

    monkeypatch.setattr(labelling, "self_captions", ends)
    with pytest.raises(KeyboardInterrupt):
        caption(model, masks, tmp_path / "twice")
    assert not (tmp_path / "twice").exists()
    assert caption(model, masks, tmp_path / "twice").split("\n")[0] == said.split("\n")[0]
    assert batches == [8, 2, 2]
    assert [(s.sample_id, s.text, s.meta) for s in read(tmp_path / "twice")] == [
        (s.sample_id, s.text, s.meta) for s in samples
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model", "once", "photos", "twice"]

    with pytest.raises(ValueError, match="twice exists; give a new folder"):
        caption(model, masks, tmp_path / "twice")
    with pytest.raises(
        ValueError, match="keep 50: the share of the captions that are kept is above 0 and at most 1"
    ):
        caption(model, masks, tmp_path / "some", keep=50.0)
    caption(model, masks, tmp_path / "some", count=2, keep=0.5)
    some = read(tmp_path / "some")
    whole = {s.sample_id: s.text for s in samples}
    assert 1 <= len(some) <= 2
    assert len({one.image_id for one in some}) <= 2
    assert all(whole[one.sample_id] == one.text for one in some)


@pytest.mark.slow
def test_a_picture_that_cannot_be_read_is_left_out_and_named(model: str, masks: Path, tmp_path: Path):
    caption(model, masks, tmp_path / "before")
    (masks / "sa_1.png").write_bytes(tiny.picture(1)[:200])
    said = caption(model, masks, tmp_path / "out")
    assert "2 can't be read and are left out" in said
    assert "sa_1.png" in said
    kept = {one.sample_id: one.text for one in read(tmp_path / "before") if one.image_id != "1"}
    assert {one.sample_id: one.text for one in read(tmp_path / "out")} == kept
    for number in (0, 2, 3, 4):
        (masks / f"sa_{number}.png").write_bytes(tiny.picture(number)[:200])
    with pytest.raises(
        ValueError, match=r"no word for any of the 10 masks without words .* 10 can't be read, .*sa_0.png"
    ):
        caption(model, masks, tmp_path / "none")


@pytest.mark.slow
def test_an_error_that_is_no_broken_record_ends_the_run(
    model: str, masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fails(*arguments: object, **settings: object) -> object:
        raise ValueError("a bug")

    monkeypatch.setattr("ans_core.rl.self_captions.token_values", fails)
    with pytest.raises(ValueError, match=r"^a bug$"):
        caption(model, masks, tmp_path / "out")


def test_a_set_whose_things_have_words_has_nothing_to_caption(model: str, tmp_path: Path):
    (tmp_path / "a.png").write_bytes(tiny.picture(0))
    record = {"image": "a.png", "text": "red square", "masks": [MASKS[0]], "split": "train"}
    (tmp_path / "annotations.json").write_text(json.dumps([record]))
    words = (model, "words", tmp_path / "annotations.json", "annotations")
    with pytest.raises(ValueError, match="has no masks without words in train: nothing to label"):
        labelling.label(
            labelling.Captions(CaptionOptions()), *words, "train", out=tmp_path / "out", device="cpu"
        )
    with pytest.raises(ValueError, match="has no split 'val'; name one with --split: train"):
        labelling.label(
            labelling.Captions(CaptionOptions()), *words, "val", out=tmp_path / "out", device="cpu"
        )
    assert not (tmp_path / ".out.parts").exists()


@pytest.mark.parametrize("kl", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_kl_that_no_word_can_be_worth_is_refused(tmp_path: Path, kl: float):
    with pytest.raises(ValueError, match="the IoU a nat is finite and above 0"):
        labelling.label(
            labelling.Captions(CaptionOptions(kl=kl)),
            "none",
            "a",
            tmp_path,
            "sa1b",
            "train",
            out=tmp_path / "out",
        )


@pytest.mark.slow
def test_two_processes_go_on_where_one_was_ended_and_write_what_one_writes(
    model: str, masks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Of ten masks each batch has eight at most, so that one process has more to do than the other."""
    words = (model, "photos", masks.resolve(), "sa1b", "train")
    labelling.label(
        labelling.Captions(CaptionOptions()), *words, out=tmp_path / "one", keep=1.0, device="cpu"
    )
    chosen, batches = labelling.self_captions, iter((True, False))

    def ends(*asked: object) -> object:
        if next(batches):
            return chosen(*asked)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    monkeypatch.setattr(labelling, "self_captions", ends)
    with pytest.raises(KeyboardInterrupt):
        labelling.label(
            labelling.Captions(CaptionOptions()), *words, out=tmp_path / "two", keep=1.0, device="cpu"
        )
    command = [
        sys.executable, "-m", "ans_core.cli", "data", "caption", str(masks), "--format", "sa1b",
        "--model", model, "--out", str(tmp_path / "two"), "--keep", "1", "--device", "cpu", "--processes", "2",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("masks without words are kept") == 1
    one, two = ([(s.sample_id, s.text, s.meta) for s in read(tmp_path / name)] for name in ("one", "two"))
    assert two == one


@pytest.mark.slow
def test_captions_without_masks_become_regions_and_expressions(model: str, tmp_path: Path):
    """The phrases of the two pictures stand in turns in the file."""
    texts = ("a small red square at the top", "a large red circle at the top", "a green square")
    (tmp_path / "words").mkdir()
    for number in range(2):
        (tmp_path / f"words/{number}.png").write_bytes(tiny.picture(number))
    records = [
        {"image": f"{number}.png", "text": text, "task": "phrase"} for text in texts for number in range(2)
    ]
    path = tmp_path / "words/annotations.json"
    path.write_text(json.dumps(records))
    command = [
        sys.executable, "-m", "ans_core.cli", "data", "draw", str(path), "--model", model, "--keep", "1", "--device", "cpu",
    ]  # fmt: skip
    for name, more in (("one", []), ("two", ["--processes", "2"])):
        out = ["--out", str(tmp_path / name), *more]
        done = subprocess.run([*command, *out], capture_output=True, text=True, check=False, timeout=300)
        assert done.returncode == 0, done.stderr
        assert "6 masks of 6 captions without masks are kept" in done.stdout
    one, two = (
        [(s.sample_id, s.task, s.text, s.masks) for s in read(tmp_path / name)] for name in ("one", "two")
    )
    assert one == two
    captions = [sample for sample in read(tmp_path / "one") if sample.task == "region_caption"]
    assert sorted(sample.text for sample in captions) == sorted(texts * 2)
    expressions = [sample for sample in read(tmp_path / "one") if sample.task == "referring"]
    for sample in captions:
        mine = [e for e in expressions if e.sample_id.startswith(sample.sample_id.removesuffix("caption"))]
        whole, *parts = (e.text for e in mine)
        assert parts
        assert whole == expression_of(sample.text)
        assert all({*part.split()} <= {*whole.split()} and len(part) < len(whole) for part in parts)
        assert all(e.masks == sample.masks for e in mine)
        # of another phrase of the picture all words are no choice
        others = [{*expression_of(text).split()} for text in texts if text != sample.text]
        assert not any({*part.split()} <= other for part in parts for other in others)

    half = labelling.label(
        labelling.Masks(MaskOptions()), model, "words", path, "annotations", "train",
        out=tmp_path / "half", count=1, device="cpu",
    )  # fmt: skip
    assert half.startswith("2 masks of 3 captions without masks are kept")
    assert len({sample.image_id for sample in read(tmp_path / "half")}) == 1
