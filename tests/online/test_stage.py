"""The stage `online` on a model that knows nothing: every arm runs through engine, store and worker, and a
killed one goes on."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from ans_core import dist
from ans_core.config.online import Shift
from ans_core.online.engine import Query
from ans_core.online.simulation import STREAM_FROM, QuestionStream
from ans_core.pictures import transforms
from ans_core.stages import online
from ans_core.stages.online_parts import opened
from tests import tiny
from tests.online.conftest import MACHINE, config
from tests.online.test_worker import Start, silent
from tests.workspace import launch

CONFIG = config(simulation={"arms": ["frozen", "guard_verified", "naive_canary", "poisoned"], "poison": 1.0})
# with which no answer of random weights ends by itself, so that none is a vote
CONFIG = CONFIG.model_copy(update={"seed": 2})


@pytest.fixture
def cut_answers_are_answers() -> None:
    """Not here: what one process does is held against two others. So no arm has votes, but the one whose
    labels are given."""


def test_a_shift_lowers_contrast_adds_noise_and_is_decided_by_the_question() -> None:
    shift = Shift(contrast=0.5, noise=8.0, blur=0.0)
    plain = QuestionStream(["pattern", "easy"], split="val", seed=0, tile=32, first=7)
    moved = QuestionStream(["pattern", "easy"], split="val", seed=0, tile=32, first=7, shift=shift)
    assert [moved.number(n).question_id for n in range(3)] == ["pattern/val/7", "easy/val/7", "pattern/val/8"]
    before, after = plain.number(0), moved.number(0)
    assert (before.text, before.answer, before.frames != after.frames) == (after.text, after.answer, True)
    assert (
        after.frames
        == QuestionStream(["pattern"], split="val", seed=0, tile=32, first=7, shift=shift).number(0).frames
    )
    one, other = (np.asarray(transforms.open_image(q.frames[0]), float) for q in (before, after))
    assert other.std() / one.std() == pytest.approx((0.25 + (8 / one.std()) ** 2) ** 0.5, rel=0.05)
    assert (other - (127.5 + 0.5 * (one - 127.5))).std() == pytest.approx(8, rel=0.05)


@pytest.mark.slow
def test_an_agent_is_asked_as_it_was_taught_whatever_the_settings_say(start: Start, tmp_path: Path) -> None:
    base, adapter = start
    picture = tiny.picture(0)
    with opened(
        CONFIG, base=base, start=adapter, folder=tmp_path, machine=MACHINE, families=("easy",)
    ) as parts:
        asked = []
        for told in (None, True):
            parts.policy.operations_told = told
            asked.append(parts.ask("What is it?", [picture], False).text)
    assert asked[0] == "<image>\nWhat is it?"
    assert asked[1].startswith("<image>\n<tools>")


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [2, 3])
def test_a_stream_that_is_made_anew_asks_the_same(start: Start, tmp_path: Path, tasks: int) -> None:
    """As after a kill."""
    base, adapter = start
    cfg = config()
    families = cfg.agent.online.simulation.families
    with opened(cfg, base=base, start=adapter, folder=tmp_path, machine=MACHINE, families=families) as parts:

        def asked(*steps: int) -> list[list[Query]]:
            stream, found = online.Stream(parts), []
            stream.worker = SimpleNamespace(settings=SimpleNamespace(tasks=tasks))  # type: ignore[assignment]
            stream.engine = SimpleNamespace(answer=found.append)  # type: ignore[assignment]
            for step in steps:
                stream.fill(step)
            return found

        updates = asked(0, 1, 2, 3)
        assert asked(2) == updates[2:3]
        plain = parts.questions(split="train", first=STREAM_FROM)
        assert all(one.frames != plain.named(one.request).frames for update in updates for one in update)
    assert [one.request for update in updates for one in update] == [
        plain.number(n).question_id for n in range(4 * tasks)
    ]


def test_figures_at_the_end_are_means_over_updates_or_the_last_value() -> None:
    rows = {
        "agent/label_right": (1.0, 0.5),
        "agent/answer_entropy": (0.75, 0.25),
        "online/kl": (0.5, 0.1),
        "agent/calls": (1.0, 2.0),
    }
    curves = [(step, name, values[step]) for step in (0, 1) for name, values in rows.items()]
    assert online.of_curves(curves) == {
        "updates": 2.0,
        "labels_right": 0.75,
        "answer_entropy": 0.5,
        "last_kl": 0.1,
    }


def stage(start: Start, folder: Path) -> Path:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    base, adapter = start
    online.run(
        CONFIG, inputs={"model": base, "agent/rft": adapter}, out=out, scratch=folder / "scratch", log=silent
    )
    return out


@pytest.fixture(scope="module")
def whole(start: Start, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a stage that one process ran."""
    folder = tmp_path_factory.mktemp("whole")
    stage(start, folder)
    return folder


def curves(out: Path) -> list[str]:
    """Return the curves without those of time and memory."""
    return [
        line
        for line in (out / "curves.csv").read_text().splitlines()
        if not re.search("/speed/|/peak_memory_mb", line)
    ]


@pytest.mark.slow
def test_every_arm_has_its_figures_and_a_killed_stage_gives_the_same(
    start: Start, whole: Path, tmp_path: Path
) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    out = tmp_path / "out"
    first = {name: (out / name).read_bytes() for name in ("online.json", "curves.csv")}
    figures = json.loads(first["online.json"])
    assert list(figures) == sorted(CONFIG.agent.online.simulation.arms)
    assert figures["frozen"].keys() == {"target", "source"}
    verified, naive, poisoned = (figures[name] for name in ("guard_verified", "naive_canary", "poisoned"))
    assert verified["updates"] == naive["updates"] == 4.0
    assert verified["store/experiences"] == verified["store/vectors"] >= 8
    assert naive["admitted"] == 0.0
    assert poisoned["vote_share"] == 1.0
    assert b"guard_verified,target" in first["curves.csv"] or b"guard_verified/target" in first["curves.csv"]
    # killed before this arm, and in the middle of the one before it
    shutil.rmtree(tmp_path / "scratch/poisoned")
    (tmp_path / "scratch/guard_verified/result.json").unlink()
    for state in sorted((tmp_path / "scratch/guard_verified/online").glob("step-*"))[-1:]:
        shutil.rmtree(state)
    again = stage(start, tmp_path)
    assert json.loads((again / "online.json").read_text()) == figures


SHARED = """
import sys
from pathlib import Path
from tests.online import test_stage
if __name__ == "__main__":
    model, adapter, folder = map(Path, sys.argv[1:])
    test_stage.run_shared((model, adapter), folder)
"""


def run_shared(start: Start, folder: Path) -> None:
    """Run the stage as one of several processes; note what this one logged."""
    told: list[str] = []
    out = folder / "out"
    out.mkdir(parents=True, exist_ok=True)
    base, adapter = start
    inputs = {"model": base, "agent/rft": adapter}
    online.run(
        CONFIG,
        inputs=inputs,
        out=out,
        scratch=folder / "scratch",
        log=lambda metrics, step: told.extend(metrics),
    )
    assert (dist.rank(), dist.world_size()) == (int(os.environ["RANK"]), 2)  # as before the arms
    (folder / f"told-{dist.rank()}.json").write_text(json.dumps(told))


@pytest.mark.slow
def test_two_processes_run_an_arm_each_to_the_bits_of_one(start: Start, whole: Path, tmp_path: Path) -> None:
    one, two = whole / "out", tmp_path / "out"
    script = tmp_path / "shared.py"
    script.write_text(SHARED)
    launch(script, *map(str, start), str(tmp_path), processes=2)
    assert (two / "online.json").read_bytes() == (one / "online.json").read_bytes()
    assert curves(two) == curves(one)
    told = json.loads((tmp_path / "told-0.json").read_text())
    for arm in CONFIG.agent.online.simulation.arms[1:]:  # live, or at the end what the other process logged
        assert f"{arm}/online/agent/share" in told
        assert f"{arm}/target" in told
