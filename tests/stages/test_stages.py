"""All stages one after the other on a model and a world far too small to learn anything: what they write, and
what they refuse."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file

from ans_core import data, dist, precision
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints import trained as handed_on
from ans_core.config import Config, Rl
from ans_core.config.training import DataOptim, KeepingOptim, Optim
from ans_core.data import DatasetEntry, write_entries
from ans_core.data.selection import Joined, Selected
from ans_core.inference import predict as answering
from ans_core.inference.predict import predict
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from ans_core.stages import (
    base,
    convert,
    evaluate,
    judge_questions,
    launch,
    memory,
    prepare,
    rl,
    rl_batches,
    sft,
)
from ans_core.train import states
from ans_core.types import Log, Prediction, Request
from flows import cli
from tests import forks, workspace
from tests.half_products import HalfProducts
from tests.workspace import ROOT
from tests.workspace import launch as launched

OPTIM = {"steps": 2, "batch": 2, "lr": 1e-3, "save_every": 1}
KEEPING = OPTIM | {"keep_every": 1}
CONFIG = Config.model_validate(
    {
        "profile": "tiny",
        "seed": 1,
        "prepare": {
            "scenes": 8, "val_scenes": 3, "test_scenes": 0, "clips": 3, "val_clips": 1, "test_clips": 0,
            "clip_frames": 4, "image_size": 64,
        },
        "base": {
            "vision": {"image_size": 32, "patch_size": 8, "hidden": 32, "layers": 2, "heads": 2, "mlp": 32},
            "language": {"hidden": 32, "layers": 2, "heads": 2, "kv_heads": 1, "mlp": 32},
            "sam": {
                "image_size": 64, "embed": 16, "heads": 1, "stages": [1, 1, 2, 1], "global_blocks": [3],
                "windows": [4, 2, 4, 2], "width": 32, "memory_layers": 1, "memory_width": 16,
            },
            "vision_words": OPTIM, "alignment": OPTIM, "sam_images": OPTIM, "language_text": OPTIM,
        },
        "memory": {"train": True, "optim": OPTIM, "frames": 3, "clips_shown": 0},
        "sft": {"optim": KEEPING, "lora": {"rank": 2, "alpha": 4}, "frames": 2, "mask_points": 50, "mask_size": 32, "object_weight": 0.5},
        "rl": {"optim": KEEPING, "dtype": "fp32", "rows": 2, "lora": {"rank": 2, "alpha": 4}, "group": 2, "max_tokens": 4, "mask_grid": 4},
        "evaluate": {"limit": 2, "batch": 4, "max_tokens": 4, "overlays": 2},
    }
)  # fmt: skip


def nothing(metrics: dict[str, float], step: int) -> None:
    assert all(isinstance(v, int | float) for v in metrics.values())


def run(
    stage,
    folder: Path,
    name: str,
    inputs: dict[str, Path],
    cfg: Config = CONFIG,
    log: Log = nothing,
    **words: str,
):  # type: ignore[no-untyped-def]
    out = folder / name
    out.mkdir(parents=True, exist_ok=True)
    return stage.run(cfg, inputs=inputs, out=out, scratch=folder / "scratch" / name, log=log, **words)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    run(prepare, folder, "data", {})
    run(base, folder, "base", {"data": folder / "data"})
    run(memory, folder, "memory", {"data": folder / "data", "base": folder / "base"})
    run(sft, folder, "sft", {k: folder / k for k in ("data", "base", "memory")})
    run(rl, folder, "rl", {k: folder / k for k in ("data", "base", "sft")})
    run(convert, folder, "model", {k: folder / k for k in ("data", "base", "sft", "rl")})
    return folder


pytestmark = pytest.mark.slow


def test_the_base_stage_trains_its_phases_each_on_its_own_parts(runs: Path):
    moved = json.loads((runs / "base" / "moved.json").read_text())
    trained = {
        phase: {k.removesuffix(" (trained)") for k, did in found.items() if did}
        for phase, found in moved.items()
    }
    assert trained == {
        "vision_words": {"vision tower"},
        "alignment": {"projector", "embeddings"},
        "sam_images": {"SAM2 image encoder", "SAM2 prompt encoder", "SAM2 mask decoder"},
        "language": {"projector", "embeddings", "language model", "head", "text_hidden_fcs"},
    }
    untrained, trained_model = (
        checkpoint.load(runs / "base" / "untrained"),
        checkpoint.load(runs / "base" / "base"),
    )
    assert not torch.equal(untrained.internvl.lm_head.weight, trained_model.internvl.lm_head.weight)
    box = trained_model.tokenizer.convert_tokens_to_ids("<box>")
    for table in (
        trained_model.internvl.get_input_embeddings().weight,
        trained_model.internvl.lm_head.weight,
    ):
        assert torch.equal(table[trained_model.seg_token_id], table[box])


def test_the_base_stage_is_one_process_whatever_deepspeed_does_for_the_stages_after_it(
    runs: Path, tmp_path: Path
):
    launched = CONFIG.launch.model_copy(update={"processes": 2, "deepspeed_stage": 2})
    run(base, tmp_path, "base", {"data": runs / "data"}, CONFIG.model_copy(update={"launch": launched}))
    assert (tmp_path / "base/curves.csv").read_bytes() == (runs / "base/curves.csv").read_bytes()


FOLLOWED = """
import json, sys
from pathlib import Path
from accelerate.state import AcceleratorState
from tests.stages.test_stages import follow
for name, changes in json.loads(sys.argv[3]).items():
    follow(Path(sys.argv[1]), Path(sys.argv[2], name), changes)
    AcceleratorState._reset_state()  # accelerate takes one configuration of DeepSpeed a process
"""


def follow(runs: Path, folder: Path, changes: dict[str, Any]) -> None:
    """Run the stage memory with other settings, and write its metrics."""
    cfg = Config.model_validate(
        CONFIG.model_dump() | {k: getattr(CONFIG, k).model_dump() | v for k, v in changes.items()}
    )
    (folder / "metrics.json").write_text(
        json.dumps(run(memory, folder, "memory", {k: runs / k for k in ("data", "base")}, cfg))
    )


def test_two_processes_pass_memory_through_measure_it_and_train_it(runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "followed.py"
    script.write_text(FOLLOWED)
    off = {"train": False}
    ways = {"passed": {"memory": off}, "measured": {"memory": off | {"validate_only": True}}, "trained": {}}
    for folder in ("one", "two"):
        for name in (*ways, "deepspeed"):
            (tmp_path / folder / name).mkdir(parents=True)
    both = ways | {"deepspeed": {"launch": {"processes": 2, "deepspeed_stage": 2}}}
    launched(script, str(runs), str(tmp_path / "two"), json.dumps(both), processes=2)
    for name, changes in ways.items():
        follow(runs, tmp_path / "one" / name, changes)
    shutil.copytree(tmp_path / "one" / "trained", tmp_path / "one" / "deepspeed", dirs_exist_ok=True)
    for name in both:
        alone, together = (
            json.loads((tmp_path / folder / name / "metrics.json").read_text()) for folder in ("one", "two")
        )
        compared = {k for k in alone if "J" in k or k == "train/loss"}
        assert bool(compared) == (name != "passed")
        assert {k: together[k] for k in compared} == pytest.approx({k: alone[k] for k in compared}, rel=1e-3)
        of_one, of_two = (
            load_file(tmp_path / folder / name / "memory" / "delta.safetensors") for folder in ("one", "two")
        )
        assert of_one.keys() == of_two.keys()


def test_sft_and_rl_hold_trained_tensors_alone_and_the_hash_of_their_base(runs: Path):
    config = json.loads((runs / "sft" / "moved.json").read_text())
    assert {k for k, did in config.items() if not did} == {k for k in config if k.endswith("(frozen)")}
    for stage, under in (("sft", runs / "base" / "base"), ("rl", runs / "sft")):
        tensors, _ = checkpoint.load_delta(runs / stage, base_hash=checkpoint.weights_hash(under))
        assert not any("vision_tower" in name or "image_encoder" in name for name in tensors)
        assert not any(".teacher." in name for name in tensors)
        with pytest.raises(ValueError, match="was trained on the base"):
            checkpoint.load_delta(runs / stage, base_hash="0" * 64)


def test_rl_of_captions_alone_leaves_what_draws_frozen(runs: Path, tmp_path: Path):
    changed = CONFIG.model_copy(
        update={"rl": CONFIG.rl.model_copy(update={"loops": {"caption": 1.0}, "rows": 0})}
    )
    run(rl, tmp_path, "rl", {k: runs / k for k in ("data", "base", "sft")}, changed)
    moved = json.loads((tmp_path / "rl" / "moved.json").read_text())
    assert moved["text_hidden_fcs (frozen)"] is moved["SAM2 mask decoder (frozen)"] is False
    merged = handed_on.rl_model(runs / "base" / "base", runs / "sft", tmp_path / "rl").state_dict()
    before = handed_on.sft_model(runs / "base" / "base", runs / "sft").state_dict()
    assert {k for k in merged if k.startswith("sam2.") and not torch.equal(merged[k], before[k])} == set()


UNDER_DEEPSPEED = """
import sys
from pathlib import Path
from ans_core.stages import rl
from tests.stages.test_stages import CONFIG, run
changes = {"launch": {"deepspeed_stage": 2}}
cfg = CONFIG.model_copy(update={k: getattr(CONFIG, k).model_copy(update=v) for k, v in changes.items()})
run(rl, Path(sys.argv[2]), "rl", {k: Path(sys.argv[1]) / k for k in ("data", "base", "sft")}, cfg)
"""


def test_rl_trains_with_deepspeed_and_has_the_norm_of_the_whole_gradient(runs: Path, tmp_path: Path):
    script = tmp_path / "under_deepspeed.py"
    script.write_text(UNDER_DEEPSPEED)
    launched(script, str(runs), str(tmp_path), processes=2)
    with (tmp_path / "rl/curves.csv").open() as file:
        assert "rl/grad_norm" in {row["name"] for row in csv.DictReader(file)}


def test_rl_learns_from_rows_of_sft_beside_its_loops(runs: Path, tmp_path: Path):
    """A loop of captions gives what draws no gradient: the rows do."""
    changed = CONFIG.model_copy(
        update={"rl": CONFIG.rl.model_copy(update={"loops": {"caption": 1.0}, "rows": 2})}
    )
    metrics = run(rl, tmp_path, "rl", {k: runs / k for k in ("data", "base", "sft")}, changed)
    assert metrics["train/rows/text"] > 0
    assert metrics["train/rows/dice"] > 0
    moved = json.loads((tmp_path / "rl" / "moved.json").read_text())
    assert moved["SAM2 mask decoder (trained)"] is True
    again = tmp_path / "again"
    run(rl, again, "rl", {k: runs / k for k in ("data", "base", "sft")}, changed)
    one, other = (load_file(folder / "rl" / "delta.safetensors") for folder in (tmp_path, again))
    assert all(torch.equal(one[k], other[k]) for k in one)


def test_fewer_rows_than_micro_batches_are_refused():
    with pytest.raises(ValueError, match=r"rows is 1, less than the 2 micro-batches of a step"):
        Rl(rows=1, optim=KeepingOptim(steps=1, batch=2, lr=1e-4, accumulate=2))


@pytest.mark.parametrize(
    ("share", "settings", "name", "holds"),
    [
        (
            "caption_share",
            {"loops": {"caption": 1.0}, "rewards_caption": {"iou": 1.0}},
            "train/loop1/length",
            lambda words: words > 0,
        ),
        (
            "mask_share",
            {"loops": {"mask": 1.0}, "rewards_mask": {"meteor": 1.0}, "mask_weight": 0.0},
            "train/loop2/reward/meteor",
            lambda meteor: 0 <= meteor <= 1,
        ),
    ],
)
def test_pairs_of_a_few_pictures_and_one_half_of_the_others_are_enough_for_sft_and_rl(
    tmp_path: Path, share: str, settings: dict[str, Any], name: str, holds: Callable[[float], bool]
) -> None:
    changed = CONFIG.model_dump()
    changed["prepare"][share] = 0.3
    changed["memory"]["train"] = False
    changed["rl"] |= settings
    cfg = Config.model_validate(changed)
    run(prepare, tmp_path, "data", {}, cfg)
    run(base, tmp_path, "base", {"data": tmp_path / "data"}, cfg)
    run(memory, tmp_path, "memory", {k: tmp_path / k for k in ("data", "base")}, cfg)
    run(sft, tmp_path, "sft", {k: tmp_path / k for k in ("data", "base", "memory")}, cfg)
    assert holds(run(rl, tmp_path, "rl", {k: tmp_path / k for k in ("data", "base", "sft")}, cfg)[name])


def test_the_curves_have_a_row_per_step_and_name(runs: Path):
    for stage, phase in (("sft", "sft"), ("rl", "rl"), ("base", "language")):
        with (runs / stage / "curves.csv").open() as file:
            rows = [row for row in csv.DictReader(file) if row["name"] == f"{phase}/loss"]
        assert [row["step"] for row in rows] == ["0", "1"]
        assert all(math.isfinite(float(row["value"])) for row in rows)


def test_the_converted_model_is_the_merged_policy(runs: Path):
    merged = handed_on.rl_model(runs / "base" / "base", runs / "sft", runs / "rl").state_dict()
    converted = Sa2VA.from_pretrained(runs / "model").state_dict()
    assert merged.keys() == converted.keys()
    assert all(torch.equal(merged[k], converted[k]) for k in merged)
    score = "sam2.sam_mask_decoder.pred_obj_score_head.layers.2.bias"
    # sft.object_weight
    assert not torch.equal(converted[score], checkpoint.load(runs / "base" / "base").state_dict()[score])
    assert Sa2VA.from_pretrained(runs / "model").config.seg_object_score
    parity = json.loads((runs / "model" / "parity.json").read_text())
    assert (parity["texts"], parity["probes"]) == (0, 16)
    assert parity["masks"] < convert.TOLERANCE


def test_what_the_memory_stage_trained_is_in_every_later_model(runs: Path):
    tensors, _ = checkpoint.load_delta(
        runs / "memory", base_hash=checkpoint.weights_hash(runs / "base" / "base")
    )
    final, before = (
        Sa2VA.from_pretrained(runs / "model").state_dict(),
        checkpoint.load(runs / "base" / "base").state_dict(),
    )
    memories = ("sam2.memory_attention.", "sam2.memory_encoder.")
    assert {name for name in before if name.startswith(memories)} >= set(tensors) > set()
    assert all(torch.equal(final[name], tensors[name]) for name in tensors)


def test_stages_started_again_write_the_same_bits(runs: Path, tmp_path: Path):
    run(sft, tmp_path, "sft", {k: runs / k for k in ("data", "base", "memory")})
    one, other = (load_file(folder / "sft" / "delta.safetensors") for folder in (runs, tmp_path))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("stage", [sft, rl])
def test_a_stage_stopped_between_two_steps_goes_on_to_the_same_bits(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage
):  # type: ignore[no-untyped-def]
    """RL: with the teacher, the width of the exploration and the rewards so far."""
    name = stage.__name__.rsplit(".", 1)[1]
    reader, collate = (rl_batches, "rl_batch") if stage is rl else (sft, "collate_readable")
    each = 2 if stage is rl else 1  # of a step: regions, and expressions
    real, made = getattr(reader, collate), []

    def stopping(*args: object, **words: object) -> object:
        made.append(1)
        if len(made) == each + 1:
            raise KeyboardInterrupt
        return real(*args, **words)

    monkeypatch.setattr(reader, collate, stopping)
    inputs = {k: runs / k for k in ("data", "base", "memory", "sft")}
    with pytest.raises(KeyboardInterrupt):
        run(stage, tmp_path, name, inputs)
    run(stage, tmp_path, name, inputs)
    assert len(made) == 2 * each + 1  # the first step was not computed again
    for output in (name, f"{name}/steps/1", f"{name}/steps/2"):
        one, other = (load_file(folder / output / "delta.safetensors") for folder in (runs, tmp_path))
        assert all(torch.equal(one[k], other[k]) for k in one)
    for file in ("curves.csv", "rewards.json") if stage is rl else ("curves.csv",):
        assert (runs / name / file).read_text() == (tmp_path / name / file).read_text()


KILLED = """
import os, signal, sys
from pathlib import Path
from tests.stages import test_stages as stages

runs, folder, name, moment = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], int(sys.argv[4])
real, seen = os.replace, []

def dying(*paths):
    seen.extend([paths[1]] if folder in Path(paths[1]).parents else [])
    if len(seen) == moment:
        os.kill(os.getpid(), signal.SIGKILL)
    real(*paths)

os.replace = os.rename = dying
stages.run_named(name, runs, folder)
"""


def run_named(name: str, runs: Path, folder: Path) -> None:
    words = {"row": "sft"} if name == "evaluate" else {}
    stage = {"base": base, "sft": sft, "rl": rl, "evaluate": evaluate}[name]
    shutil.rmtree(folder / name, ignore_errors=True)  # as DVC does with outs before it starts a stage
    run(stage, folder, name, {k: runs / k for k in ("data", "base", "memory", "sft")}, **words)


@pytest.mark.parametrize(("name", "moment"), [("base", 10), ("sft", 2), ("rl", 2), ("evaluate", 3)])
def test_a_killed_stage_started_again_ends_with_the_same_bits(
    runs: Path, tmp_path: Path, name: str, moment: int
) -> None:
    """SIGKILL before the `moment`-th file or folder is moved to its place. Base: the language side's first
    state, after all of SAM2's."""
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    (done,) = forks.run(script, str(runs), str(tmp_path), name, str(moment))
    assert done.status == -signal.SIGKILL, done.said[-3000:]
    run_named(name, runs, tmp_path)
    whole = runs / name
    if name == "evaluate":
        whole = tmp_path / "whole" / name
        run_named(name, runs, tmp_path / "whole")
    files = {path.relative_to(whole) for path in whole.rglob("*") if path.is_file()}
    assert files == {
        path.relative_to(tmp_path / name) for path in (tmp_path / name).rglob("*") if path.is_file()
    }
    different = [
        file for file in files if (whole / file).read_bytes() != (tmp_path / name / file).read_bytes()
    ]
    assert different == []


ONE_OF_TWO_KILLED = """
import os, signal, sys
from pathlib import Path
from tests.stages import test_stages as stages

runs, folder, moment = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
real, seen = Path.replace, []

def dying(path, target):
    if Path(target).name.startswith("step-"):
        seen.append(target)
        if len(seen) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
    return real(path, target)

Path.replace = dying
stages.run(stages.sft, folder, "sft", {k: runs / k for k in ("data", "base", "memory")})
"""


def test_sft_on_two_processes_one_of_which_is_killed_ends_with_the_same_bits_when_started_again(
    runs: Path, tmp_path: Path
) -> None:
    """SIGKILL of the process that writes, before the second state is moved to its place; the launcher ends
    the other."""
    script = tmp_path / "two.py"
    script.write_text(ONE_OF_TWO_KILLED)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    words = [str(script), str(runs), str(tmp_path / "cut"), "2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    killed = subprocess.run(
        [*launcher, *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=workspace.LIMIT_S,
    )
    assert "SIGKILL" in killed.stderr, killed.stderr[-3000:]
    assert sorted(path.name for path in (tmp_path / "cut/scratch/sft/sft").iterdir()) == [
        "kept-0000001.pt",
        "kept-0000002.pt",
        "step-0000001",
        "step-0000002.partial",
    ]
    for folder in ("cut", "whole"):
        workspace.launch(script, str(runs), str(tmp_path / folder), "0")
    for file in ("delta.safetensors", "steps/1/delta.safetensors", "curves.csv"):
        assert (tmp_path / "cut/sft" / file).read_bytes() == (tmp_path / "whole/sft" / file).read_bytes()


OPTIONS = """
import sys
from pathlib import Path
from tests.stages import test_stages as stages

runs, folder = Path(sys.argv[1]), Path(sys.argv[2])
cfg = stages.with_every_option()
stages.run(stages.sft, folder, "sft", {k: runs / k for k in ("data", "base", "memory")}, cfg)
"""


def with_every_option() -> Config:
    chosen = {
        "optim": {"steps": 4, "batch": 4, "lr": 1e-3, "save_every": 2, "accumulate": 2, "keep_every": 2},
        "lora": {"rank": 2, "alpha": 4, "dropout": 0},
        "frames": 2, "dtype": "fp32", "length_window": 2, "mask_points": 0, "mask_size": 32, "objects": 5, "object_weight": 0.5,
        "checkpointing": "layers",
        "val_every": 2, "val_rows": 3, "early_stop": 1, "keep_best": 1,
    }  # fmt: skip
    launched = {"profile_steps": 1, "halt_on_nan": True, "workers": 1}
    return Config.model_validate(CONFIG.model_dump() | {"sft": chosen, "launch": launched})


def test_sft_with_every_option_is_the_same_on_one_process_and_on_two(runs: Path, tmp_path: Path) -> None:
    """Losses agree to 1e-4, as those of validations of three rows, of which one process has two."""
    script = tmp_path / "options.py"
    script.write_text(OPTIONS)
    curves: list[dict[tuple[str, str], float]] = []
    for processes in (1, 2):
        folder = tmp_path / str(processes)
        workspace.launch(script, str(runs), str(folder), processes=processes)
        with (folder / "sft/curves.csv").open() as file:
            curves.append({(row["step"], row["name"]): float(row["value"]) for row in csv.DictReader(file)})
        assert len(list((folder / "scratch/sft/sft").glob("profile-*.json"))) == processes
        (best,) = (folder / "sft/steps").iterdir()
        assert (best / "delta.safetensors").read_bytes() == (folder / "sft/delta.safetensors").read_bytes()
        assert json.loads((folder / "sft/moved.json").read_text())["SAM2 image encoder (frozen)"] is False
    one, two = curves
    assert (
        one.keys()
        == two.keys()
        >= {("1", "sft/val/loss"), ("1", "sft/val/mask_iou"), ("3", "sft/loss"), ("0", "sft/grad_norm")}
    )
    for key in one:
        if key[1] in {"sft/loss", "sft/grad_norm", "sft/val/loss", "sft/val/text", "sft/val/mask_iou"}:
            assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize(
    ("harm", "error", "message"),
    [
        (1.0, RuntimeError, "the converted model is not the trained one"),
        (math.nan, ValueError, r"1 with weights that are NaN or infinite: text_hidden_fcs\.2\.bias"),
    ],
)
def test_a_converted_model_that_is_not_the_trained_one_is_refused(
    runs: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    harm: float,
    error: type[Exception],
    message: str,
):
    real = convert.rl_model

    def other(*paths: Path, device: torch.device) -> Network:
        model = real(*paths, device=device)
        with torch.no_grad():
            model.text_hidden_fcs[2].bias.add_(harm)
        return model

    monkeypatch.setattr(convert, "rl_model", other)
    monkeypatch.setattr(
        convert, "generate", lambda model, prompted, max_tokens: [[model.seg_token_id]] * len(prompted.images)
    )
    with pytest.raises(error, match=message):
        run(convert, tmp_path, "model", {k: runs / k for k in ("data", "base", "sft", "rl")})


def test_answers_that_differ_are_counted_and_masks_compared_where_answers_are_alike():
    masks = [torch.ones(1, 2, 2), torch.full((1, 2, 2), 4.0), torch.zeros(0, 8)]
    texts = [[1], [2], [5]]
    harmed = [masks[0], masks[1] * 1.5, masks[2]]
    assert convert.compare((texts, masks), (texts, harmed)) == {"texts": 0.0, "masks": 0.5, "probes": 3.0}
    assert convert.compare((texts, masks), ([[1], [3], [5]], harmed)) == {
        "texts": 1.0,
        "masks": 0.0,
        "probes": 3.0,
    }
    assert math.isnan(
        convert.compare((texts, masks), (texts, [masks[0], masks[1] * math.nan, masks[2]]))["masks"]
    )


@pytest.mark.parametrize(("format", "tagged"), [("regions", True), ("videos", True), ("refcoco", False)])
def test_the_model_card_says_when_test_items_were_trained_on(tmp_path: Path, format: str, tagged: bool):
    write_entries(tmp_path, [DatasetEntry(name="mine", format=format, path="x", split="train", kind="extra")])
    card = convert.model_card(CONFIG, tmp_path, {"probes": 4.0, "masks": 0.0})
    assert ("Trained on benchmark test items (mine)" in card) == tagged
    assert f"`mine` (train, format {format})" in card
    write_entries(tmp_path, [DatasetEntry(name="mine", format=format, path="x", split="val", kind="extra")])
    assert "benchmark test items" not in convert.model_card(CONFIG, tmp_path, {"probes": 4.0, "masks": 0.0})


def test_the_model_card_depends_on_no_setting_that_the_weights_do_not_depend_on(tmp_path: Path):
    write_entries(tmp_path, [])

    def card(section: str, **changes: object) -> str:
        changed = getattr(CONFIG, section).model_copy(update=changes)
        return convert.model_card(
            CONFIG.model_copy(update={section: changed}), tmp_path, {"probes": 4.0, "masks": 0.0}
        )

    plain = card("rl")
    assert (
        card("launch", workers=7)
        == card("evaluate", limit=3)
        == card("judge", base_url="http://elsewhere")
        == plain
    )
    assert all(
        other != plain
        for other in (card("rl", kl=0.5), card("sft", frames=9), card("judge", judge_weight=0.25))
    )


@pytest.mark.parametrize("row", ["untrained", "sft", "rl"])
def test_every_row_is_evaluated_with_the_same_metrics(runs: Path, tmp_path: Path, row: str):
    found = run(evaluate, tmp_path, row, {k: runs / k for k in ("data", "base", "sft", "model")}, row=row)
    needed = {
        "referring/val/gIoU", "referring/val/cIoU", "referring/val/gIoU_shuffled_text",
        "region_caption/val/METEOR", "region_caption/val/attribute_accuracy", "loop1/val/IoU",
        "loop2/val/METEOR", "loop1/val/IoU_self", "loop2/val/METEOR_self", "video/val/J&F",
    }  # fmt: skip
    assert needed <= set(found)
    assert json.loads((tmp_path / row / "metrics.json").read_text()) == found
    lines = [json.loads(line) for line in (tmp_path / row / "predictions.jsonl").read_text().splitlines()]
    assert {line["benchmark"] for line in lines} >= {"referring/val", "region_caption/val", "video/val"}
    assert sum(line["benchmark"] == "referring/val" for line in lines) == 2
    assert len({(line["benchmark"], line["dataset"], line["sample_id"]) for line in lines}) == len(lines)
    assert (tmp_path / row / "overlays" / "index.json").exists()


EVALUATED = """
import sys
from pathlib import Path
from tests.stages import test_stages as stages
stages.run_evaluation(Path(sys.argv[1]), Path(sys.argv[2]))
"""


def run_evaluation(runs: Path, folder: Path) -> None:
    """Row `rl`, whose loops have an inverse model, in batches that don't come out even; notes how many
    requests this process answers."""
    asked = []

    def counting(model: Network, requests: list[Request], **words: object) -> list[Prediction]:
        asked.append(len(requests))
        return predict(model, requests, **words)  # type: ignore[arg-type]

    answering.predict = counting  # type: ignore[assignment]
    values = CONFIG.model_dump()
    public = {
        "name": "refcoco",
        "path": str(runs / "data/scenes/refcoco"),
        "split": "val",
        "limit": 5,
        "max_tokens": 2,
    }
    values["evaluate"] |= {"limit": 0, "batch": 3, "public": [public]}
    run(
        evaluate,
        folder,
        "rl",
        {k: runs / k for k in ("data", "base", "sft", "model")},
        Config.model_validate(values),
        row="rl",
    )
    (folder / f"asked-{dist.rank()}").write_text(str(sum(asked)))


def test_two_processes_evaluate_to_the_bits_of_one(runs: Path, tmp_path: Path) -> None:
    script = tmp_path / "evaluated.py"
    script.write_text(EVALUATED)
    for processes in (1, 2):
        launched(script, str(runs), str(tmp_path / str(processes)), processes=processes)
    one, two = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "1/rl", tmp_path / "2/rl")
    )
    assert {
        Path("metrics.json"),
        Path("predictions.jsonl"),
        Path("public/refcoco-val/metrics.json"),
    } <= one.keys()
    assert one.keys() == two.keys()
    assert [file for file in one if one[file] != two[file]] == []
    shares = [int((tmp_path / f"2/asked-{rank}").read_text()) for rank in (0, 1)]
    assert sum(shares) == int((tmp_path / "1/asked-0").read_text())
    assert min(shares) > 0.3 * sum(shares)


def test_a_data_set_of_the_users_gets_every_metric_that_the_same_drawn_samples_get(
    runs: Path, tmp_path: Path
):
    scenes = runs / "data" / "scenes"
    values = CONFIG.model_dump()
    values["evaluate"]["benchmarks"] = ["referring", "region_caption", "loops"]
    values["evaluate"]["sources"] = [
        {"name": "mine", "format": "refcoco", "path": str(scenes / "refcoco"), "split": "val"},
        {"name": "told", "format": "region_arrow", "path": str(scenes / "region_captions"), "split": "val"},
    ]
    values["evaluate"]["limit"] = 0
    found = run(
        evaluate,
        tmp_path,
        "sft",
        {k: runs / k for k in ("data", "base", "sft")},
        Config.model_validate(values),
        row="sft",
    )
    assert "mine/referring/gIoU_shuffled_text" in found
    for loop in ("loop1/{}/IoU", "loop2/{}/METEOR"):
        for suffix in ("", "_self", "_of_truth"):
            drawn, (number, metric) = found[loop.format("val") + suffix], loop.split("/{}/")
            assert found[f"told/{number}/{metric}{suffix}"] == drawn
    assert found["told/region_caption/METEOR"] == found["region_caption/val/METEOR"]


def test_sft_goes_on_without_pictures_that_break_after_they_were_checked(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "data", tmp_path / "data")
    for picture in sorted((tmp_path / "data/scenes/images").glob("train_*.png"))[:2]:
        picture.write_bytes(picture.read_bytes()[:100])
    values = CONFIG.model_dump()
    values["sft"]["optim"] |= {"steps": 4}
    run(
        sft,
        tmp_path,
        "sft",
        {"data": tmp_path / "data", "base": runs / "base", "memory": runs / "memory"},
        Config.model_validate(values),
    )
    with (tmp_path / "sft/curves.csv").open() as file:
        counted = sum(
            float(row["value"]) for row in csv.DictReader(file) if row["name"] == "sft/skipped_samples"
        )
    named = [
        json.loads(line) for line in (tmp_path / "scratch/sft/left_out-0.jsonl").read_text().splitlines()
    ]
    assert counted == sum(line["samples"] for line in named) > 0
    assert all("cannot read the image" in line["reason"] for line in named)


def test_rl_puts_others_in_the_place_of_samples_whose_pictures_break_after_they_were_checked(
    runs: Path, tmp_path: Path
):
    """Beside it SFT's rows go on without them."""
    shutil.copytree(runs / "data", tmp_path / "data")
    pictures = sorted((tmp_path / "data/scenes/images").glob("train_*.png"))
    for picture in pictures[::2]:
        picture.write_bytes(picture.read_bytes()[:100])
    values = CONFIG.model_dump()
    values["rl"] |= {"rows": 2}
    inputs = {k: runs / k for k in ("base", "memory", "sft")} | {"data": tmp_path / "data"}
    run(rl, tmp_path, "rl", inputs, Config.model_validate(values))
    with (tmp_path / "rl/curves.csv").open() as file:
        counted = sum(
            float(row["value"]) for row in csv.DictReader(file) if row["name"] == "rl/skipped_samples"
        )
    named = [json.loads(line) for line in (tmp_path / "scratch/rl/left_out-0.jsonl").read_text().splitlines()]
    assert counted == sum(line["samples"] for line in named)
    assert all("cannot read the image" in line["reason"] for line in named)
    assert {line["row"].split("/")[0] for line in named} > {"scenes_single"}
    # samples of RL, and rows of several questions
    assert {line["samples"] > 1 for line in named} == {False, True}
    for picture in pictures:
        picture.write_bytes(picture.read_bytes()[:100])
    with pytest.raises(
        ValueError, match=r"rl: .* can't be read, nor can 10 others in its place: cannot read the image"
    ):
        run(rl, tmp_path, "again", inputs, Config.model_validate(values))


def test_what_a_stage_trained_becomes_an_adapter_by_one_command(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    for stage in ("sft", "rl", "sft/steps/1", "rl/steps/2", "rl/teacher"):
        assert ans("convert", str(runs / stage), str(tmp_path / stage), "--to", "adapter") == 0
        assert "PeftModel.from_pretrained" in capsys.readouterr().out
        merged = PeftModel.from_pretrained(
            checkpoint.load(runs / "base" / "base"), tmp_path / stage
        ).merge_and_unload()
        expected = checkpoint.load(runs / ("model" if stage == "rl" else stage))
        assert all(
            torch.allclose(a, b, atol=1e-5)
            for a, b in zip(merged.state_dict().values(), expected.state_dict().values(), strict=True)
        )
    with pytest.raises(
        ValueError, match=r"holds no delta\.json: an adapter is made of what SFT or RL trained"
    ):
        ans("convert", str(runs / "base"), str(tmp_path / "none"), "--to", "adapter")


def ans(*words: str) -> int:
    arguments = cli.parse(list(words))
    return int(arguments.function(arguments))


def test_published_bases_have_no_untrained_row(runs: Path, tmp_path: Path):
    shutil.copytree(runs / "base" / "base", tmp_path / "base" / "base")
    assert run(evaluate, tmp_path, "none", {"base": tmp_path / "base"}, row="untrained") == {}


@pytest.mark.parametrize("steps", [KEEPING["steps"], 0])
def test_a_base_in_bf16_is_trained_merged_and_evaluated(runs: Path, tmp_path: Path, steps: int):
    """As published weights are; by RL alone where SFT has no steps. RL also learns from rows of SFT."""
    model = checkpoint.load(runs / "base" / "base", dtype=torch.bfloat16)
    checkpoint.save(model, tmp_path / "base" / "base", metadata={})
    optim = CONFIG.sft.optim.model_copy(update={"steps": steps})
    changes = {"sft": {"dtype": "bf16", "optim": optim}, "rl": {"dtype": "bf16", "rows": 2}}
    cfg = CONFIG.model_copy(
        update={name: getattr(CONFIG, name).model_copy(update=values) for name, values in changes.items()}
    )
    (tmp_path / "data").symlink_to(runs / "data")
    run(memory, tmp_path, "memory", {k: tmp_path / k for k in ("data", "base")}, cfg)
    run(sft, tmp_path, "sft", {k: tmp_path / k for k in ("data", "base", "memory")}, cfg)
    run(rl, tmp_path, "rl", {k: tmp_path / k for k in ("data", "base", "sft")}, cfg)
    tensors, _ = checkpoint.load_delta(tmp_path / "rl", base_hash=checkpoint.weights_hash(tmp_path / "sft"))
    assert {tensor.dtype for tensor in tensors.values()} == {torch.float32}
    run(convert, tmp_path, "model", {k: tmp_path / k for k in ("data", "base", "sft", "rl")}, cfg)
    head = checkpoint.load(tmp_path / "model").vlm.lm_head.weight
    assert head.dtype == (torch.float32 if steps else torch.bfloat16)
    found = run(
        evaluate, tmp_path, "row", {k: tmp_path / k for k in ("data", "base", "sft", "model")}, cfg, row="rl"
    )
    assert math.isfinite(found["referring/val/gIoU"])


def test_no_stage_multiplies_in_bf16_where_that_is_emulated(
    runs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """From a base in bf16, as published weights are, with Muon. Where bf16 is asked for, the counter sees
    it."""
    monkeypatch.setattr(precision, "cpu_times", lambda: {"fp32": 1.0, "bf16": 9.0})
    phases = dict.fromkeys(
        ("vision_words", "alignment", "sam_images", "language_text"),
        Optim.model_validate(OPTIM | {"muon_lr": 1e-3}),
    )
    muon = DataOptim.model_validate(OPTIM | {"muon_lr": 1e-3})
    changed = {
        "base": phases,
        "memory": {"optim": muon},
        "sft": {"optim": muon},
        "rl": {"optim": muon, "dtype": "auto"},
    }
    cfg = CONFIG.model_copy(
        update={name: getattr(CONFIG, name).model_copy(update=values) for name, values in changed.items()}
    )
    folder = tmp_path
    (folder / "data").symlink_to(runs / "data")

    def work(stage: Any, name: str, *inputs: str, cfg: Config = cfg, **row: str) -> None:
        run(stage, folder, name, {k: folder / k for k in inputs}, cfg, **row)

    with HalfProducts() as seen:
        work(base, "base", "data")
        checkpoint.save(
            checkpoint.load(folder / "base" / "base", dtype=torch.bfloat16),
            folder / "base" / "base",
            metadata={},
        )
        work(memory, "memory", "data", "base")
        work(sft, "sft", "data", "base", "memory")
        work(rl, "rl", "data", "base", "sft")
        work(convert, "model", "data", "base", "sft", "rl")
        for row in ("base", "sft", "rl"):
            work(evaluate, f"row-{row}", "data", "base", "sft", "model", row=row)
    assert seen.counts == {}
    with HalfProducts() as seen:
        work(
            sft,
            "half",
            "data",
            "base",
            "memory",
            cfg=cfg.model_copy(update={"sft": cfg.sft.model_copy(update={"dtype": "bf16"})}),
        )
    assert seen.counts["convolution"] > 0
    assert seen.counts["mm"] > 0


def test_rl_without_region_captions_says_what_it_needs(runs: Path, tmp_path: Path):
    entries = [e for e in data.read_entries(runs / "data") if e.kind == "video"]
    (tmp_path / "data").mkdir()
    write_entries(tmp_path / "data", entries)
    shutil.copytree(runs / "data" / "scenes" / "mevis", tmp_path / "data" / "scenes" / "mevis")
    with pytest.raises(ValueError, match=r"rl\.loops has 'caption', which needs region captions"):
        run(rl, tmp_path, "rl", {"data": tmp_path / "data", "base": runs / "base", "sft": runs / "sft"})


def test_the_last_means_are_over_the_last_fifty_steps():
    curves = [(step, "loss", float(step)) for step in range(100)] + [(0, "early", 7.0)]
    assert launch.last_means(curves) == {"train/loss": sum(range(50, 100)) / 50}


def test_rl_with_a_judge_wants_its_questions_before_anything_is_loaded(runs: Path, tmp_path: Path):
    cfg = Config.model_validate(
        CONFIG.model_dump() | {"rl": CONFIG.rl.model_dump() | {"use_llm_judge": True}}
    )
    inputs = dict.fromkeys(("data", "base", "sft", "questions"), tmp_path / "nothing")
    with pytest.raises(
        ValueError, match=r"questions\.jsonl does not exist; run the stage `judge_questions` first"
    ):
        run(rl, tmp_path, "rl", inputs, cfg)


TWO = """
import sys
from pathlib import Path
from ans_core import dist
from ans_core.checkpoints import checkpoint
from ans_core.stages import rl, sft
from tests.stages import test_stages as stages

runs, folder = Path(sys.argv[1]), Path(sys.argv[2])
save, written = checkpoint.save_delta, []
checkpoint.save_delta = lambda *args, **words: (written.append(1), save(*args, **words))
inputs = {k: runs / k for k in ("data", "base", "memory")}
stages.run(sft, folder, "sft", inputs)
assert len(written) == 3 * (dist.rank() == 0) and (folder / "sft" / "delta.json").exists(), "the others wait for the first"
stages.run(rl, folder, "rl", inputs | {"sft": folder / "sft"})
assert len(written) == 7 * (dist.rank() == 0) and (folder / "rl" / "delta.json").exists(), "policy, teacher, two steps"
"""


def test_of_two_processes_the_first_writes_and_the_other_waits(runs: Path, tmp_path: Path):
    script = tmp_path / "two.py"
    script.write_text(TWO)
    workspace.launch(script, str(runs), str(tmp_path), processes=2)
    assert sorted(p.name for p in (tmp_path / "sft").iterdir()) == sorted(
        p.name for p in (runs / "sft").iterdir()
    )


def test_rl_with_everything_at_once_runs_and_leaves_pictures(runs: Path, tmp_path: Path):
    """All loops that the drawn world has samples for, a judge by rules, candidates, inner steps, another
    objective."""
    values = CONFIG.model_dump()
    values["rl"] |= {
        "loops": {"caption": 1.0, "mask": 1.0, "refer": 1.0, "ground": 0.5, "describe": 0.5}, "absent": 0.5,
        "rewards_caption": {"iou": 1.0, "meteor": 1.0, "confidence": 0.1, "cider": 0.5},
        "use_llm_judge": True, "use_llm_judge_loop2": True, "oversample": 0.5, "inner_steps": 2, "objective": "gspo",
        "combine_rewards": "normalise_then_sum", "scale_rewards": "group", "entropy": 0.01, "mask_truncated": True,
        "samples_every": 1,
        "val_every": 1, "val_rows": 2, "early_stop": 3, "keep_best": 1,
    }  # fmt: skip
    config = Config.model_validate(values)
    run(judge_questions, tmp_path, "questions", {"data": runs / "data"}, config)
    inputs = {name: runs / name for name in ("data", "base", "sft")} | {"questions": tmp_path / "questions"}
    logged: set[str] = set()
    found = run(rl, tmp_path, "rl", inputs, config, log=lambda metrics, step: logged.update(metrics))
    for name in (
        "loop1/reward/judge",
        "loop1/reward/cider",
        "loop2/reward/judge",
        "describe/reward/meteor",
        "describe/kl",
        "refer/reward/iou",
        "ground/reward/meteor",
        "val/refer/reward/iou",
        "val/describe/reward",
    ):
        assert f"train/{name}" in found
    parts = ("projector", "language model", "text_hidden_fcs", "SAM2 mask decoder")
    assert {name for name in logged if "grad_norm" in name} == {
        "rl/grad_norm",
        *(f"rl/grad_norm/{part}" for part in parts),
    }
    names = {path.name for path in (tmp_path / "rl" / "samples").iterdir()}
    assert {
        f"000000-{loop}.{kind}"
        for loop in ("loop1", "loop2", "refer", "ground", "describe")
        for kind in ("png", "json")
    } <= names
    with (tmp_path / "rl/curves.csv").open() as file:
        losses = {
            int(row["step"]): float(row["value"])
            for row in csv.DictReader(file)
            if row["name"] == "rl/val/loss"
        }
    assert sorted(losses) == [-1, 0, 1]  # before the first step, and after each
    (best,) = (tmp_path / "rl/steps").iterdir()
    assert best.name == str(min((0, 1), key=losses.__getitem__) + 1)
    assert (best / "delta.safetensors").read_bytes() == (tmp_path / "rl/delta.safetensors").read_bytes()


def test_rl_validates_on_what_the_split_has_and_says_when_nothing_was_better(
    runs: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    joined = Joined([source.samples for source in data.sources(runs / "data", "val")])
    model = checkpoint.load(runs / "base" / "base")
    regions = list(Selected(joined, joined.where(rl.LOOPS["caption"].takes)))
    chosen = rl.held_out(regions, 3, model, mask_size=32, seed=1)
    assert chosen == rl.held_out(regions, 3, model, mask_size=32, seed=1)
    broken = [
        replace(sample, frames=(b"no picture",)) if sample == chosen[0] else sample for sample in regions
    ]
    assert rl.held_out(broken, 2, model, mask_size=32, seed=1) == chosen[1:]
    assert f"validation leaves out {chosen[0].dataset}/{chosen[0].sample_id}: cannot read" in caplog.text
    rl.warn_unless_better([(-1, "val/loss", 0.5), (1, "val/loss", 0.4)])
    assert "no validation is better" not in caplog.text
    rl.warn_unless_better([(-1, "val/loss", 0.5), (1, "val/loss", 0.5)])
    assert "no validation is better" in caplog.text
    shutil.copytree(runs / "data", tmp_path / "data")
    write_entries(
        tmp_path / "data", [entry for entry in data.read_entries(tmp_path / "data") if entry.split != "val"]
    )
    inputs = {k: runs / k for k in ("base", "sft")} | {"data": tmp_path / "data"}
    values = CONFIG.model_dump()
    values["rl"] |= {"val_every": 1}
    with pytest.raises(ValueError, match=r"the split 'val' has nothing that a loop of rl\.loops practises"):
        run(rl, tmp_path, "rl", inputs, Config.model_validate(values))


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_each_kept_step_loads_as_a_model_and_the_last_is_the_stages_own(runs: Path, stage: str):
    first, last, own = (
        checkpoint.load(runs / stage / name).state_dict() for name in ("steps/1", "steps/2", ".")
    )
    assert sorted(path.name for path in (runs / stage / "steps").iterdir()) == ["1", "2"]
    assert all(torch.equal(last[name], tensor) for name, tensor in own.items())
    assert any(not torch.equal(first[name], tensor) for name, tensor in own.items())


def test_best_steps_are_those_of_lowest_validation_loss():
    curves = [(9, "val/loss", 3.0), (19, "val/loss", 1.0), (29, "val/loss", 2.0), (29, "loss", 0.0)]
    assert launch.best_of([10, 20, 30], curves, count=2) == [20, 30]
    assert launch.best_of([10, 20, 30], curves, count=0) == [10, 20, 30]
    for lost in (0, 1, 2):
        some = [*curves]
        some[lost] = (*curves[lost][:2], math.nan)
        best = min((20, 30, 10), key=lambda step: step == 10 * (lost + 1))
        assert launch.best_of([10, 20, 30], some, count=1) == [best]


def test_what_a_start_before_kept_beyond_the_end_of_this_one_is_left_out(tmp_path: Path):
    """Killed after step 6, begun again at 4, and stopped early at 5."""
    module = torch.nn.Linear(1, 1)
    with states.Writer() as writer:
        for steps in (2, 4, 6):
            writer.save_weights(states.step_file(tmp_path / "sft", steps), steps, module)
    written: list[Path] = []
    launch.write_trained(
        written.append, module, "sft", [(1, "val/loss", 2.0), (3, "val/loss", 1.0), (4, "loss", 1.0)], {},
        out=tmp_path, scratch=tmp_path, keep_best=2, device=torch.device("cpu"),
    )  # fmt: skip
    assert written == [tmp_path, tmp_path / "steps/2", tmp_path / "steps/4"]


def test_rl_and_its_teacher_load_as_models_from_their_folders(runs: Path):
    """The policy is the converted model; the teacher lies between it and SFT."""
    converted, policy, teacher, before = (
        checkpoint.load(runs / name).state_dict() for name in ("model", "rl", "rl/teacher", "sft")
    )
    assert all(torch.equal(policy[name], tensor) for name, tensor in converted.items())
    moved = [name for name, tensor in converted.items() if not torch.equal(before[name], tensor)]
    assert moved
    assert any(not torch.equal(teacher[name], before[name]) for name in moved)
    for name in moved:
        assert (teacher[name] - before[name]).norm() < (policy[name] - before[name]).norm()
