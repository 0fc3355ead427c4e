"""The stage `memory` on a model far too small to learn anything: what it trains, writes, hands on and
refuses."""

from __future__ import annotations

import csv
import itertools
import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from ans_core import data
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints import memory as handed_on
from ans_core.checkpoints import sam2 as sam2_files
from ans_core.config import Config, resolve
from ans_core.data.mixture import Source
from ans_core.model.grounding import Grounding
from ans_core.model.network import Network
from ans_core.stages import base, memory, prepare
from ans_core.tracking.clips import Clip, Clips
from ans_core.tracking.validation import validate
from tests import picture_sets, tiny
from tests.checkpoints.test_sam2 import WIDE, drawn
from tests.workspace import LIMIT_S, ROOT, launch

TRAIN = {
    "train": True, "optim": {"steps": 4, "batch": 2, "lr": 1e-3, "save_every": 1}, "frames": 3,
    "limit_train_batches": 2, "limit_val_batches": 1,
    "trainable_modules": ["memory_attention", "memory_encoder", "sam_mask_decoder"],
    "prompts": {"kinds": {"box": 1.0}, "clicks": 1}, "clips_shown": 1, "image_share": 0.5,
}  # fmt: skip
CLIPS = {
    "scenes": 4,
    "val_scenes": 1,
    "test_scenes": 0,
    "clips": 4,
    "val_clips": 2,
    "test_clips": 0,
    "clip_frames": 4,
    "image_size": 64,
}


def config(**changes: object) -> Config:
    return Config.model_validate({"profile": "tiny", "seed": 1, "prepare": CLIPS, "memory": TRAIN | changes})


def run(folder: Path, name: str, cfg: Config, base: Path) -> dict[str, float]:
    out = folder / name
    out.mkdir()
    inputs = {"data": base.parent / "data", "base": base}
    return memory.run(cfg, inputs=inputs, out=out, scratch=folder / "scratch", log=lambda metrics, step: None)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """data, base (a Sa2VA with its original decoder kept) and alone (a SAM2)."""
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "data").mkdir()
    prepare.run(config(), inputs={}, out=folder / "data", scratch=folder, log=lambda metrics, step: None)
    model = tiny.build()
    with torch.no_grad():
        model.sam2.sam_mask_decoder.pred_obj_score_head.layers[-1].bias += 5
    model.keep_original_decoder()
    checkpoint.save(model, folder / "base/base", metadata={})
    sam2_files.save(drawn(temporal=True, **WIDE), folder / "alone/sam2", metadata={})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_the_best_epoch_is_handed_on_and_a_killed_run_resumes_to_the_same_bits(
    inputs: Path, tmp_path: Path, monkeypatch, dtype: str
):  # type: ignore[no-untyped-def]
    cfg = config(dtype=dtype)
    metrics = run(tmp_path, "whole", cfg, inputs / "base")
    rows = list(csv.DictReader((tmp_path / "whole/curves.csv").open()))
    scores = [float(row["value"]) for row in rows if row["name"] == "memory/val_J&F"]
    assert len(scores) == 2  # two epochs of two steps
    assert metrics["J&F/best"] == pytest.approx(max(metrics["J&F/before"], *scores), abs=1e-6)
    assert {
        "memory/loss_mask",
        "memory/loss_object",
        "memory/iou_at_0",
        "memory/iou_at_2",
        "memory/val_J_at_1",
    } <= {r["name"] for r in rows}
    assert len(list((tmp_path / "whole/clips").glob("*.gif"))) == 1
    saved = []

    def killed(step: int) -> None:
        saved.append(step)
        if len(saved) == 3:
            raise KeyboardInterrupt

    add = memory.EpochWeights.add
    (tmp_path / "again").mkdir()
    monkeypatch.setattr(
        memory.EpochWeights, "add", lambda self, epoch, *rest: (add(self, epoch, *rest), killed(epoch))
    )
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "again", "cut", cfg, inputs / "base")
    monkeypatch.setattr(memory.EpochWeights, "add", add)
    run(tmp_path / "again", "resumed", cfg, inputs / "base")
    assert saved == [0, 1, 2]
    for name in ("delta.safetensors", "curves.csv"):
        assert (tmp_path / "again/resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    # killed after the last step: no gradient is seen any more
    ended = run(tmp_path / "again", "ended", cfg, inputs / "base")
    assert ended == metrics


def cut_short(clip: Clip) -> None:
    """Leave of each frame what a reader checks, its size."""
    for frame in clip.frames:
        Path(str(frame)).write_bytes(Path(str(frame)).read_bytes()[:100])


@pytest.mark.slow
def test_a_clip_that_breaks_after_the_data_were_checked_is_named_and_another_is_trained_on(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(inputs, tmp_path / "mine")
    [clips] = [
        source.samples
        for source in data.sources(tmp_path / "mine/data", "train")
        if source.name == "scenes_clips"
    ]
    broken = Clips([clips])[1]
    cut_short(broken)
    run(tmp_path, "out", config(image_share=0.0), tmp_path / "mine/base")
    told = [json.loads(line) for line in (tmp_path / "scratch/left_out-0.jsonl").read_text().splitlines()]
    assert {line["row"] for line in told} == {broken.name}
    assert all("cannot read the image" in line["reason"] for line in told)
    rows = list(csv.DictReader((tmp_path / "out/curves.csv").open()))
    # two epochs
    assert (
        sum(float(row["value"]) for row in rows if row["name"] == "memory/skipped_samples") == len(told) >= 2
    )
    add = memory.EpochWeights.add

    def killed(self: memory.EpochWeights, epoch: int, *rest: Any) -> None:
        add(self, epoch, *rest)
        if epoch == 1:
            raise KeyboardInterrupt

    (tmp_path / "again").mkdir()
    monkeypatch.setattr(memory.EpochWeights, "add", killed)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "again", "cut", config(image_share=0.0), tmp_path / "mine/base")
    monkeypatch.setattr(memory.EpochWeights, "add", add)
    run(tmp_path / "again", "resumed", config(image_share=0.0), tmp_path / "mine/base")
    for name in ("delta.safetensors", "curves.csv"):
        assert (tmp_path / "again/resumed" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    for clip in Clips([clips]):
        cut_short(clip)
    with pytest.raises(ValueError, match=r"scenes_clips/\S+ can't be read, nor can 10 others in its place"):
        run(tmp_path / "mine", "out", config(image_share=0.0), tmp_path / "mine/base")


@pytest.mark.slow
def test_epochs_whose_last_step_is_skipped_are_judged_after_the_next_one(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Epochs of two steps; the losses at the ends of both are not finite."""
    forward, calls = memory.Tracking.forward, itertools.count()

    def broken(self: torch.nn.Module, batch: object) -> tuple[torch.Tensor, dict[str, float]]:
        loss, metrics = forward(self, batch)
        return (loss * math.nan if next(calls) in (1, 3) else loss), metrics

    monkeypatch.setattr(memory.Tracking, "forward", broken)
    run(tmp_path, "out", config(), inputs / "base")
    assert list(json.loads((tmp_path / "scratch/kept/scores.json").read_text())) == ["0", "1", "2"]


@pytest.mark.slow
def test_the_newest_epochs_are_kept_beside_the_best_and_load_as_the_result_does(
    inputs: Path, tmp_path: Path, monkeypatch
):  # type: ignore[no-untyped-def]
    """Four epochs, of which the first is the best; the others have tensors of their own."""
    trained: dict[int, dict[str, torch.Tensor]] = {}
    add = memory.EpochWeights.add

    def noted(self: memory.EpochWeights, epoch: int, score: float, tensors: dict[str, torch.Tensor]) -> None:
        trained[epoch] = {f"sam2.{name}": tensor.detach().clone() for name, tensor in tensors.items()}
        add(self, epoch, 1.0 if epoch == 1 else 0.5, tensors)

    monkeypatch.setattr(memory.EpochWeights, "add", noted)
    optim = TRAIN["optim"] | {"steps": 4, "batch": 1}
    metrics = run(tmp_path, "out", config(optim=optim, limit_train_batches=1, keep_last=2), inputs / "base")
    assert metrics["best_epoch"] == 1
    assert sorted(path.name for path in (tmp_path / "out/last").iterdir()) == ["epoch-0003", "epoch-0004"]
    for epoch, folder in ((1, "out"), (3, "out/last/epoch-0003"), (4, "out/last/epoch-0004")):
        model = checkpoint.load(inputs / "base/base")
        loaded = handed_on.load_into(model, tmp_path / folder, base=inputs / "base/base")
        own = dict(model.named_parameters())
        assert loaded.keys() == trained[epoch].keys()
        assert all(
            torch.equal(loaded[name], tensor) and torch.equal(own[name], tensor)
            for name, tensor in trained[epoch].items()
        )
    assert any(not torch.equal(trained[3][name], trained[4][name]) for name in trained[3])
    [drawn_clips] = [
        source.samples for source in data.sources(inputs / "data", "val") if source.name == "scenes_clips"
    ]
    sam2, best = (
        sam2_files.load(inputs / "base/base"),
        {name.removeprefix("sam2."): tensor for name, tensor in trained[1].items()},
    )
    for state, tensors in (("before", {}), ("best", best)):
        sam2.load_state_dict(tensors, strict=False)
        # limit_val_batches: one clip
        alone = validate(sam2, Clips([drawn_clips])[:1], prompt="mask", memory=False)
        assert metrics[f"J&F/{state}_without_memory"] == alone["J&F"], state
    assert metrics["J&F/before_without_memory"] != metrics["J&F/best_without_memory"]


def add_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Add the data set `mine`: two clips and two stills, of each one with an object beside a mask of several,
    and one without."""
    several, sources = tiny.square(0, 0, 64, 8), data.sources
    clips = [tiny.clip(0), tiny.clip(1, masks=((several,) * 4,), meta={"joined": [0]})]
    clips[0] = replace(clips[0], masks=((several,) * 4, *clips[0].masks), meta={"joined": [0]})
    stills = [
        tiny.sample(n, masks=((several,), *tiny.sample(n).masks)[: 4 - n], meta={"joined": [0]})
        for n in (2, 3)
    ]
    samples = [replace(sample, dataset="mine") for sample in (*clips, *stills)]
    mine = Source(name="mine", kind="extra", samples=samples, repeats=1)
    monkeypatch.setattr(
        data, "sources", lambda prepared, of: [*sources(prepared, of), *([mine] if of == "train" else [])]
    )


@pytest.mark.slow
def test_masks_of_several_objects_are_not_trained_on_and_counted(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    add_joined(monkeypatch)
    metrics = run(tmp_path, "out", config(data=["mine", "scenes_clips"]), inputs / "base")
    *told, clip, still = (tmp_path / "out/left_out.txt").read_text().splitlines()
    assert told == [
        "mine: 4 masks stand for several objects each (crowds, or categories without instance_id or track_id) and are left out"
    ]
    assert [line.partition(":")[0] for line in (clip, still)] == ["mine/i1", "mine/i3"]
    assert metrics["left_out_clips"] == 2


def test_a_set_without_identities_alone_is_refused(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    add_joined(monkeypatch)
    chosen = config(data=["mine"], frames=5, image_share=0.0)
    with pytest.raises(
        ValueError,
        match=r"all 2 clips are left out, the first is mine/i0: 4 frames, .*give the objects identities",
    ):
        run(tmp_path, "out", chosen, inputs / "base")


def test_without_held_out_videos_and_pictures_both_ways_out_are_named(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    add_joined(monkeypatch)
    told = (
        r"no data set of memory.data \['mine'\] has a split 'val' with videos in which an object can be followed, or with pictures with"
        r" masks of single objects: .*; give about one video in ten to it, or, without videos, one picture in ten, or set memory.train"
    )
    with pytest.raises(ValueError, match=told):
        run(tmp_path, "out", config(data=["mine"], image_share=1.0), inputs / "base")


@pytest.mark.slow
def test_a_short_run_is_judged_by_all_its_steps_even_if_its_last_one_is_skipped(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Boxes alone never read `mask_downsample`. A second start, with no step left to do, refuses it as
    well."""
    forward, calls = memory.Tracking.forward, itertools.count()

    def broken(self: torch.nn.Module, batch: object) -> tuple[torch.Tensor, dict[str, float]]:
        loss, metrics = forward(self, batch)
        return (loss * math.nan if next(calls) == 1 else loss), metrics

    monkeypatch.setattr(memory.Tracking, "forward", broken)
    changed = {
        "trainable_modules": ["memory_encoder", "mask_downsample"],
        "optim": TRAIN["optim"] | {"steps": 2, "batch": 1},
    }
    for name in ("first", "again"):
        with pytest.raises(
            RuntimeError, match=r"after 2 steps no gradient has reached mask_downsample \(1\)"
        ):
            run(tmp_path, name, config(**changed), inputs / "base")
    assert next(calls) == 2


@pytest.mark.slow
def test_what_was_trained_reaches_both_decoders_of_a_base_and_no_base_of_another_hash(
    inputs: Path, tmp_path: Path, own_model: Network
):
    model = checkpoint.load(inputs / "base/base")
    tensors = {
        "sam2.memory_encoder.out_proj.weight": torch.ones_like(model.sam2.memory_encoder.out_proj.weight),
        "sam2.sam_mask_decoder.conv_s0.weight": torch.ones_like(model.sam2.sam_mask_decoder.conv_s0.weight),
    }
    checkpoint.save_delta(
        tensors, tmp_path / "memory", base_hash=checkpoint.weights_hash(inputs / "base/base"), config={}
    )
    handed_on.load_into(model, tmp_path / "memory", base=inputs / "base/base")
    for part in (
        model.sam2.memory_encoder.out_proj,
        model.sam2.sam_mask_decoder.conv_s0,
        model.sam2.original_mask_decoder.conv_s0,
    ):
        assert (part.weight == 1).all()
    assert handed_on.taken(handed_on.joined(tensors, {"x": torch.ones(1)})) == (tensors, {"x": torch.ones(1)})
    checkpoint.save(own_model, tmp_path / "other", metadata={})
    with pytest.raises(ValueError, match="was trained on the base"):
        handed_on.load_into(own_model, tmp_path / "memory", base=tmp_path / "other")


def test_a_stage_that_does_not_train_passes_the_base_through(inputs: Path, tmp_path: Path):
    assert run(tmp_path, "memory", config(train=False), inputs / "base") == {"trained": 0.0}
    model = checkpoint.load(inputs / "base/base")
    before = {name: p.clone() for name, p in model.named_parameters()}
    assert handed_on.load_into(model, tmp_path / "memory", base=inputs / "base/base") == {}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.slow
def test_validation_alone_gives_the_score_that_training_starts_from(inputs: Path, tmp_path: Path):
    found = run(
        tmp_path, "memory", config(train=False, validate_only=True, val_prompt="point"), inputs / "base"
    )
    assert found["J&F"] == pytest.approx((found["J"] + found["F"]) / 2)
    trained = run(tmp_path, "trained", config(val_prompt="point"), inputs / "base")
    assert trained["J&F/before"] == found["J&F"]
    assert trained["J&F/before_without_memory"] == found["J&F_without_memory"]
    assert "pseudo_clips" not in trained
    assert json.loads((tmp_path / "memory/delta.json").read_text())["config"]["stage"] == "memory"


@pytest.mark.slow
def test_a_sam2_alone_gives_files_for_the_stock_package_and_transformers(inputs: Path, tmp_path: Path):
    changed = {
        "image_share": 1.0,
        "trainable_modules": ["memory_attention", "memory_encoder", "obj_ptr_tpos_proj"],
    }
    metrics = run(tmp_path, "memory", config(**changed), inputs / "alone")
    assert metrics["trained"] == 1
    again = sam2_files.load(tmp_path / "memory/sam2")
    assert again.config.temporal_pointers
    assert (tmp_path / "memory/transformers/model.safetensors").is_file()


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"data": ["clips"]},
            r"memory.data: no data set \['clips'\] with a split 'train' or 'val'; there are \['scenes_clips'",
        ),
        (
            {"frames": 5, "image_share": 0.0},
            "all 4 clips are left out, the first is .*: 4 frames, fewer than memory.frames = 5; lower",
        ),
        ({"trainable_modules": ["memory"]}, r"SAM2 has no \['memory'\]; it has .*'memory_attention'"),
    ],
)
def test_settings_that_fit_no_data_are_refused_before_anything_is_trained(
    inputs: Path, tmp_path: Path, changes, told
):  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=told):
        run(tmp_path, "memory", config(**changes), inputs / "base")


@pytest.mark.slow
def test_pictures_in_cocos_format_alone_train_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """The stages of the profile sam2-memory one after the other. Each epoch is judged on the same clips, made
    of the pictures of `val`."""
    for split, seed in (("train", 0), ("val", 1)):
        picture_sets.coco(tmp_path / split, picture_sets.draw(3, image_size=64, seed=seed))
    made, mine = tmp_path / "val/coco", tmp_path / "train/coco"
    (made / "train2017").rename(mine / "val2017")
    (made / "annotations/instances_train2017.json").rename(mine / "annotations/instances_val2017.json")
    sam2_files.save(drawn(temporal=True, **WIDE), tmp_path / "published", metadata={})
    words = (
        f"prepare.sources=[{{name: mine, format: coco, path: {mine}}}]", "prepare.clips=0",
        "memory.image_share=1", f"base.sam2={tmp_path}/published", "memory.image_size=64", "memory.frames=3",
        "memory.dtype=fp32", "memory.val_prompt=box", "memory.optim.steps=4", "memory.limit_train_batches=2",
        "memory.clips_shown=1",
    )  # fmt: skip
    cfg = Config.model_validate(resolve(ROOT / "profiles/sam2-memory.yaml", words))
    judged: list[list[tuple[object, ...]]] = []

    def noted(sam2: Grounding, clips: Sequence[Clip], **given: Any) -> dict[str, float]:
        judged.append([(clip.name, clip.frames, clip.masklets) for clip in clips])
        return validate(sam2, clips, **given)

    monkeypatch.setattr(memory, "validate", noted)
    monkeypatch.chdir(tmp_path)
    folders: dict[str, Path] = {}
    for stage, name in ((prepare, "data"), (base, "base"), (memory, "memory")):
        folders[name] = tmp_path / "run" / name
        folders[name].mkdir(parents=True)
        metrics = stage.run(
            cfg,
            inputs=folders,
            out=folders[name],
            scratch=tmp_path / "scratch",
            log=lambda metrics, step: None,
        )
    assert metrics["trained"] == 1
    assert 0 <= metrics["J&F/best"] <= 1
    assert metrics["pseudo_clips"] == 3
    assert json.loads((folders["memory"] / "metrics.json").read_text()) == metrics
    assert len(judged) >= 3  # before, and after two epochs
    assert all(clips == judged[0] for clips in judged)
    assert [(name, len(frames)) for name, frames, _ in judged[0]] == [
        ("mine/0", 3),
        ("mine/1", 3),
        ("mine/2", 3),
    ]
    assert capsys.readouterr().out.count("J&F is that of pseudo-clips, one of each of 3 of its pictures") == 1
    (clip,) = (folders["memory"] / "clips").glob("*.gif")
    with Image.open(clip) as shown:
        assert (shown.n_frames, shown.info["loop"], shown.info["duration"]) == (3, 0, 250)


SCRIPT = """
import json, sys
from pathlib import Path
import torch
from ans_core import dist
from ans_core.train import loop
from ans_core.config.memory import MemoryPrompts
from ans_core.tracking.batch import make_batch
from ans_core.config.memory import MemoryLoss
from ans_core.tracking.training import Tracking, open_modules, places
from tests import tiny
from tests.tracking.conftest import clip_tensors
from dataclasses import replace

sam2 = tiny.build().sam2.eval()
with torch.no_grad():
    sam2.sam_mask_decoder.pred_obj_score_head.layers[-1].bias += 5
open_modules(sam2, ("memory_attention", "memory_encoder", "sam_prompt_encoder"))

def make(step, micro):
    chosen = [n for _, n in places(step, micro, batch=3, micros=1, per_epoch=3)]
    clips = [clip_tensors(n) for n in chosen]
    clips = [
        replace(c, has_truth=c.has_truth & torch.tensor([True, True, n != 1, True])) for n, c in zip(chosen, clips)
    ]
    kinds = [{"mask": 1.0}, {"box": 1.0}, {"point": 1.0}]
    made = [make_batch([c], MemoryPrompts(kinds=kinds[n]), rngs=[dist.rng_of(n)]) for n, c in zip(chosen, clips)]
    offsets = [4 * i for i in range(len(made))]
    return replace(
        made[0], frames=torch.cat([b.frames for b in made]), rows=torch.cat([b.rows + o for b, o in zip(made, offsets)]),
        targets=torch.cat([b.targets for b in made]), has_truth=torch.cat([b.has_truth for b in made]),
        tracks=[[replace(b.tracks[0][0], objects=b.tracks[0][0].objects + i) for i, b in enumerate(made)]],
    )

schedule = loop.Schedule(steps=2, lr=1e-3, weight_decay=0.0, warmup=0.0, clip_grad=1e9, accumulate=1, save_every=2)
machine = loop.Machine(device=torch.device("cpu"))
module = Tracking(sam2, MemoryLoss())
curves = loop.train(module, make, name="t", schedule=schedule, machine=machine, seed=0, scratch=Path(sys.argv[1]), log=lambda m, s: None)
if dist.rank() == 0:
    norms = [v for s, n, v in curves if n in ("grad_norm", "loss")]
    Path(sys.argv[1], "result.json").write_text(json.dumps(norms))
"""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S)
def test_two_processes_with_unlike_clips_train_as_one_process_does(tmp_path: Path):
    """One process has two clips prompted by a mask and a click, the other a box and a frame without ground
    truth: parameters of the prompt encoder that one of them does not use, and unequal numbers of
    predictions."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    found = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        folder.mkdir()
        launch(script, str(folder), processes=processes)
        found.append(json.loads((folder / "result.json").read_text()))
    assert len(found[0]) == 4
    assert found[1] == pytest.approx(found[0], rel=1e-3)
