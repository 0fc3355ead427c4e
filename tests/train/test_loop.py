from __future__ import annotations

import json
import logging
import math
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ans_core import stop
from ans_core.train import loop, optim, optimizer_state, states
from ans_core.train import watch as watching
from ans_core.train.optim import lr_factor, optimizer_of
from ans_core.train.watch import START, Validation, Watch
from tests import forks

CPU = loop.Machine(device=torch.device("cpu"))


@dataclass
class Numbers:
    x: Tensor
    y: Tensor

    def to(self, device: torch.device) -> Numbers:
        return self


class Regression(nn.Module):
    """Least squares by a small network with dropout (it draws random numbers) and a count that only its extra
    state keeps."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 1))
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.seen = 0
        self.poison: set[int] = set()

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]

    def forward(self, batch: Numbers) -> tuple[Tensor, dict[str, float]]:
        self.seen += 1
        loss = (self.net(self.frozen(batch.x)) - batch.y).pow(2).mean()
        if self.seen - 1 in self.poison:
            loss = loss * math.nan
        return loss, {"seen": float(self.seen)}


def batch(step: int, micro: int) -> Numbers:
    generator = torch.Generator().manual_seed(1000 * step + micro)
    x = torch.randn(6, 4, generator=generator)
    return Numbers(x, x.sum(1, keepdim=True))


def schedule(**changes: float) -> loop.Schedule:
    return loop.Schedule(
        **(
            {
                "steps": 8,
                "lr": 0.05,
                "weight_decay": 0.01,
                "warmup": 0.25,
                "clip_grad": 1.0,
                "accumulate": 1,
                "save_every": 2,
            }
            | changes
        )
    )


def run(module: nn.Module, scratch: Path, make=batch, **changes: float) -> loop.Curves:  # type: ignore[no-untyped-def]
    return loop.train(
        module,
        make,
        name="fit",
        schedule=schedule(**changes),
        machine=CPU,
        seed=3,
        scratch=scratch,
        log=lambda metrics, step: None,
    )


def weights(module: nn.Module) -> dict[str, Tensor]:
    return {k: v.clone() for k, v in states.trained_tensors(module).items()}


def equal(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


class Stop(Exception):
    pass


def stopping_at(stop: int):  # type: ignore[no-untyped-def]
    def make(step: int, micro: int) -> Numbers:
        if step == stop:
            raise Stop
        return batch(step, micro)

    return make


CHILD = """
import os, signal, sys, time
from pathlib import Path
from threading import Timer
from tests.train.test_loop import Regression, batch, run, weights
import torch
scratch, out = Path(sys.argv[1]), Path(sys.argv[2])
pause, kill_at = float(sys.argv[3]), int(sys.argv[4])
def slow(step, micro):
    print("step", step, flush=True)
    if step == kill_at:
        Timer(0.02 * (kill_at % 3), os.kill, (os.getpid(), signal.SIGKILL)).start()
    time.sleep(pause)
    return batch(step, micro)
module = Regression()
curves = run(module, scratch, slow, steps=20, save_every=3)
torch.save({"weights": weights(module), "seen": module.seen, "curves": curves}, out)
"""


def child(tmp_path: Path, name: str, *, pause: float = 0.0, kill_at: int = -1) -> forks.Ended:
    script = tmp_path / "child.py"
    script.write_text(CHILD)
    (ended,) = forks.run(
        script, str(tmp_path / f"scratch-{name}"), str(tmp_path / f"{name}.pt"), str(pause), str(kill_at)
    )
    return ended


@pytest.mark.slow
def test_a_training_killed_twice_ends_with_the_same_bits_and_curves_as_one_that_was_not(tmp_path: Path):
    whole = child(tmp_path, "whole")
    assert whole.status == 0, whole.said
    for kill_at in (5, 13):
        killed = child(tmp_path, "killed", pause=0.03, kill_at=kill_at)
        assert killed.status == -signal.SIGKILL, killed.said
        assert not (tmp_path / "killed.pt").exists()
    last = child(tmp_path, "killed")
    assert last.status == 0, last.said
    # a bar may stand before it
    steps = [int(step) for step in re.findall(r"step (\d+)$", last.said, re.MULTILINE)]
    assert steps[0] >= 9  # it went on, it did not begin anew; a thread may still have been writing state 12
    one, other = torch.load(tmp_path / "whole.pt"), torch.load(tmp_path / "killed.pt")
    assert equal(one["weights"], other["weights"])
    assert one["curves"] == other["curves"]
    assert (one["seen"], other["seen"]) == (20, 20)


@pytest.mark.slow
@pytest.mark.parametrize("muon_lr", [0.0, 0.02])
def test_a_stopped_training_goes_on_from_its_last_state_in_the_same_process_too(
    tmp_path: Path, muon_lr: float
):
    whole, first, second = Regression(), Regression(), Regression()
    curves = run(whole, tmp_path / "a", muon_lr=muon_lr)
    with pytest.raises(Stop):
        run(first, tmp_path / "b", stopping_at(5), muon_lr=muon_lr)
    assert sorted(p.name for p in (tmp_path / "b" / "fit").iterdir()) == ["step-0000002", "step-0000004"]
    assert run(second, tmp_path / "b", muon_lr=muon_lr) == curves
    assert equal(weights(whole), weights(second))
    assert second.seen == 8


def test_a_finished_training_started_again_computes_nothing(tmp_path: Path):
    first, again = Regression(), Regression()
    curves = run(first, tmp_path)
    assert run(again, tmp_path, stopping_at(0)) == curves
    assert equal(weights(first), weights(again))


@pytest.mark.slow
@pytest.mark.parametrize("harm", ["truncated", "no manifest", "half a manifest", "missing file"])
def test_a_damaged_state_is_put_aside_for_the_older_one(tmp_path: Path, harm: str):
    whole, module = Regression(), Regression()
    curves = run(whole, tmp_path / "whole")
    folder = tmp_path / "cut" / "fit"
    with pytest.raises(Stop):
        run(Regression(), tmp_path / "cut", stopping_at(5))
    newer = folder / "step-0000004"
    match harm:
        case "truncated":
            (newer / "state.pt").write_bytes((newer / "state.pt").read_bytes()[:-100])
        case "no manifest":
            (newer / "manifest.json").unlink()
        case "half a manifest":
            (newer / "manifest.json").write_text((newer / "manifest.json").read_text()[:40])
        case "missing file":
            (newer / "curves.json").unlink()
    asked: list[int] = []

    def make(step: int, micro: int) -> Numbers:
        asked.append(step)
        return batch(step, micro)

    assert run(module, tmp_path / "cut", make) == curves
    assert asked == [2, 3, 4, 5, 6, 7]
    assert equal(weights(whole), weights(module))
    assert sorted(p.name for p in folder.iterdir()) == [
        "step-0000004.damaged",
        "step-0000006",
        "step-0000008",
    ]


@pytest.mark.slow
def test_a_state_appears_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Killed while the files are written: only a `.partial` folder is left, and it is never read."""
    real = torch.save

    def broken(state: object, path: Path) -> None:
        real(state, path)
        if "0000004" in str(path):
            raise Stop

    monkeypatch.setattr(torch, "save", broken)
    with pytest.raises(Stop):
        run(Regression(), tmp_path)
    assert sorted(p.name for p in (tmp_path / "fit").iterdir()) == ["step-0000002", "step-0000004.partial"]
    monkeypatch.setattr(torch, "save", real)
    whole, module = Regression(), Regression()
    assert run(module, tmp_path) == run(whole, tmp_path / "whole")
    assert equal(weights(whole), weights(module))
    assert sorted(p.name for p in (tmp_path / "fit").iterdir()) == ["step-0000006", "step-0000008"]


def test_a_state_of_another_model_is_put_aside_for_the_one_before(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    class Wider(Regression):
        def __init__(self) -> None:
            super().__init__()
            self.net[3] = nn.Linear(8, 2)

    with pytest.raises(Stop):
        run(Regression(), tmp_path / "cut", stopping_at(5))
    run(Wider(), tmp_path / "other")
    (tmp_path / "other/fit/step-0000006").rename(tmp_path / "cut/fit/step-0000006")
    whole, module = Regression(), Regression()
    assert run(module, tmp_path / "cut") == run(whole, tmp_path / "whole")
    assert equal(weights(whole), weights(module))
    assert (
        "step-0000006 trains other tensors than this run and was put aside as step-0000006.damaged"
        in caplog.text
    )


def test_a_full_disk_is_told_and_costs_no_earlier_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """torch writes a part of the file and says "unexpected pos 1088 vs 982"."""
    real = torch.save

    def full(state: object, path: Path) -> None:
        if "0000006" in str(path):
            path.write_bytes(b"a part")
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 1088 vs 982")
        real(state, path)

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(
        RuntimeError,
        match=r"step-0000006 can't be written, with [\d,]+ MB free on its disk .*make room and start again",
    ):
        run(Regression(), tmp_path)
    assert sorted(p.name for p in (tmp_path / "fit").iterdir()) == ["step-0000002", "step-0000004"]
    monkeypatch.setattr(torch, "save", real)
    whole, module = Regression(), Regression()
    assert run(module, tmp_path) == run(whole, tmp_path / "whole")
    assert equal(weights(whole), weights(module))


def test_training_goes_on_while_a_state_is_written_and_the_state_is_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real, later, written = torch.save, threading.Event(), []

    def slow(state: object, path: Path) -> None:
        assert later.wait(60), "training waited for its state"
        real(state, path)
        written.append(path)

    def make(step: int, micro: int) -> Numbers:
        if step == 3:  # two steps after the state of step 2 was handed over
            assert not written
            later.set()
        return stopping_at(4)(step, micro)

    monkeypatch.setattr(torch, "save", slow)
    with pytest.raises(Stop):
        run(Regression(), tmp_path / "slow", make)
    assert [path.name for path in states.states(tmp_path / "slow/fit")] == ["step-0000002", "step-0000004"]
    shutil.rmtree(tmp_path / "slow/fit/step-0000004")
    whole, module = Regression(), Regression()
    assert run(module, tmp_path / "slow") == run(whole, tmp_path / "whole")
    assert equal(weights(whole), weights(module))


@pytest.mark.slow
def test_a_state_of_another_number_of_processes_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    whole, module = Regression(), Regression()
    curves = run(whole, tmp_path / "whole")
    with pytest.raises(Stop):
        run(Regression(), tmp_path / "cut", stopping_at(5))
    for path in (tmp_path / "cut").glob("fit/step-*/manifest.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | {"processes": 2}))
    assert run(module, tmp_path / "cut") == curves
    assert "1 processes go on from a state of 2" in caplog.text


def test_a_step_with_a_loss_that_is_no_number_moves_nothing_and_is_counted(tmp_path: Path):
    module, tracked = Regression(), []
    module.poison = {3}

    def make(step: int, micro: int) -> Numbers:
        tracked.append(weights(module))
        return batch(step, micro)

    curves = run(module, tmp_path, make)
    assert [value for step, name, value in curves if name == "skipped"] == [0, 0, 0, 1, 0, 0, 0, 0]
    assert equal(tracked[3], tracked[4])
    assert not equal(tracked[2], tracked[3])
    assert not equal(tracked[4], tracked[5])


def test_after_too_many_bad_steps_in_a_row_the_run_stops_and_says_where(tmp_path: Path):
    module = Regression()
    module.poison = set(range(2, 50))
    with pytest.raises(
        RuntimeError, match=r"fit: 11 steps in a row .* the last is step 12; lower the learning rate"
    ):
        run(module, tmp_path, steps=50)


def test_bad_steps_that_are_not_in_a_row_do_not_stop_the_run(tmp_path: Path):
    module = Regression()
    module.poison = set(range(0, 40, 2))
    curves = run(module, tmp_path, steps=40, save_every=40)
    assert sum(value for _, name, value in curves if name == "skipped") == 20


@pytest.mark.slow
def test_two_half_batches_give_the_step_of_the_whole_batch(tmp_path: Path):
    """Sizes are equal, so the mean of the halves' means is the whole's mean."""

    def half(step: int, micro: int) -> Numbers:
        both = batch(step, 0)
        return Numbers(both.x[3 * micro : 3 * micro + 3], both.y[3 * micro : 3 * micro + 3])

    one, two = Regression().eval(), Regression().eval()
    whole = run(one, tmp_path / "one", lr=1e-3)
    halves = run(two, tmp_path / "two", half, accumulate=2, lr=1e-3)

    def norms(curves: loop.Curves) -> list[float]:
        return [v for _, name, v in curves if name in ("grad_norm", "loss")]

    assert norms(halves) == pytest.approx(norms(whole), rel=1e-5)
    assert all(
        (a - b).abs().max() < 1e-6 for a, b in zip(weights(one).values(), weights(two).values(), strict=True)
    )


def test_the_learning_rate_rises_in_a_line_and_falls_as_a_cosine():
    """10 steps, 20 % warm-up: 1/2, 1, then cos from 1 at step 2 (0/8 of the way) over 1/2 at step 6 (4/8)."""
    factors = [lr_factor(step, steps=10, warmup=0.2) for step in range(10)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert factors[6] == pytest.approx(0.5)
    assert factors[4] == pytest.approx((1 + math.sqrt(0.5)) / 2)
    assert factors[9] == pytest.approx(0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert lr_factor(0, steps=10, warmup=0.0) == 1.0


def test_a_trained_tensor_that_is_not_fp32_is_refused():
    with pytest.raises(ValueError, match=r"weight is trained in torch\.bfloat16; cast it to float32"):
        optimizer_of(nn.Linear(2, 2).bfloat16(), lr=1.0, weight_decay=0.0, scales={})
    with pytest.raises(ValueError, match="nothing to train"):
        optimizer_of(nn.Linear(2, 2).requires_grad_(False), lr=1.0, weight_decay=0.0, scales={})


def test_muon_moves_matrices_of_stacks_in_all_directions_alike_and_adamw_the_rest():
    """A Muon step is an orthogonal matrix times 0.2 sqrt(longer side) lr; AdamW's first step has the size lr
    in every element."""
    torch.manual_seed(0)
    module = nn.ModuleDict(
        {
            "stack": nn.ModuleList([nn.Linear(6, 4)]),
            "slow": nn.ModuleList([nn.Linear(6, 4)]),
            "head": nn.Linear(4, 2),
        }
    )
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    optimizer = optimizer_of(module, lr=0.01, weight_decay=0.0, scales={"slow": 0.1}, muon_lr=0.1)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group["scale"]
    for p in module.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    moved = {name: p.detach() - before[name] for name, p in module.named_parameters()}
    sizes = torch.linalg.svdvals(moved["stack.0.weight"]) / (0.1 * 0.2 * math.sqrt(6))
    assert (sizes > 0.6).all()
    assert (sizes < 1.3).all()
    slow = torch.linalg.svdvals(moved["slow.0.weight"]) / (0.01 * 0.2 * math.sqrt(6))
    assert (slow > 0.6).all()
    assert (slow < 1.3).all()
    assert moved["head.weight"].abs() == pytest.approx(torch.full((2, 4), 0.01), rel=1e-3)
    assert moved["slow.0.bias"].abs() == pytest.approx(torch.full((4,), 0.001), rel=1e-3)


@pytest.mark.parametrize("native", [True, False], ids=["bf16", "fp32"])
def test_muon_on_all_matrices_of_a_shape_at_once_is_torchs_own(native: bool, monkeypatch: pytest.MonkeyPatch):
    """torch's own iterates in bf16; where `bfloat16` casts to fp32 instead, in fp32. Wide, tall, square, long
    (by their Gram matrices), and one without a gradient."""
    monkeypatch.setattr(optim, "bf16_is_faster", lambda device: native)
    if not native:
        monkeypatch.setattr(Tensor, "bfloat16", Tensor.clone)
    torch.manual_seed(0)
    start = [
        torch.randn(shape) for shape in ((6, 4), (4, 6), (6, 4), (5, 5), (3, 20), (20, 3), (4, 6), (5, 5))
    ]
    gradients = [[torch.randn_like(p) for p in start] for _ in range(3)]
    ends, states = [], []
    for kind in (optim.BatchedMuon, torch.optim.Muon):
        parameters = [nn.Parameter(p.clone()) for p in start]
        optimizer = kind(parameters, lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
        for some in gradients:
            for p, gradient in zip(parameters[:-1], some, strict=False):
                p.grad = gradient.clone()
            optimizer.step()
        ends.append([p.detach() for p in parameters])
        states.append(optimizer.state_dict()["state"])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other, atol=2e-2 if native else 1e-6)
    assert torch.equal(ends[0][-1], start[-1])
    assert states[0].keys() == states[1].keys()
    assert all(
        torch.equal(states[0][k]["momentum_buffer"], states[1][k]["momentum_buffer"]) for k in states[0]
    )


def test_muon_is_refused_with_deepspeed(tmp_path: Path):
    with pytest.raises(ValueError, match=r"set muon_lr=0, or launch\.deepspeed_stage=0"):
        loop.train(
            Regression(), batch, name="fit", schedule=schedule(muon_lr=0.1),
            machine=replace(CPU, deepspeed_stage=2), seed=3, scratch=tmp_path, log=lambda metrics, step: None,
        )  # fmt: skip


def test_curves_are_written_by_phase(tmp_path: Path):
    loop.write_curves(tmp_path / "c.csv", {"sft": [(0, "loss", 0.5), (1, "loss", 1 / 3)]})
    assert (tmp_path / "c.csv").read_text().splitlines() == [
        "step,name,value",
        "0,sft/loss,0.5",
        "1,sft/loss,0.333333",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("at_start", [False, True])
def test_validation_keeps_the_best_weights_and_ends_a_run_that_gains_nothing(tmp_path: Path, at_start: bool):
    """Losses 5, 3, 3, 4 after steps 2, 4, 6, 8 of 20: the first 3 is best, and two later validations without
    a lower one end the run. What is measured before the first step is never the best, and measured once."""
    kept: dict[int, dict[str, Tensor]] = {}

    def watching(module: Regression) -> Watch:
        def measure() -> dict[str, float]:
            done = module.seen
            kept[done] = weights(module)
            return {"loss": {0: 1.0, 2: 5.0, 4: 3.0, 6: 3.0, 8: 4.0}[done], "mask_iou": 0.5}

        return Watch(validation=Validation(every=2, measure=measure, patience=2, at_start=at_start))

    def go(module: Regression, folder: Path, make=batch) -> loop.Curves:  # type: ignore[no-untyped-def]
        return loop.train(
            module, make, name="fit", schedule=schedule(steps=20, save_every=3), machine=CPU, seed=3, scratch=folder,
            log=lambda metrics, step: None, watch=watching(module),
        )  # fmt: skip

    whole, first, second = Regression(), Regression(), Regression()
    curves = go(whole, tmp_path / "whole")
    assert [(step, value) for step, name, value in curves if name == "val/loss"] == [
        *([(START, 1.0)] if at_start else []),
        (1, 5.0),
        (3, 3.0),
        (5, 3.0),
        (7, 4.0),
    ]
    assert max(step for step, *_ in curves) == 7
    assert states.states(tmp_path / "whole/fit")[-1].name == "step-0000008"  # nothing is computed again
    assert equal(weights(whole), kept[4])
    assert not equal(kept[4], kept[6])
    with pytest.raises(Stop):
        go(first, tmp_path / "cut", stopping_at(7))
    assert (0 in kept) == at_start
    kept.clear()
    assert go(second, tmp_path / "cut") == curves
    assert 0 not in kept
    assert equal(weights(second), weights(whole))


@pytest.mark.parametrize("again", [0.499, 0.501])
def test_a_best_step_that_a_killed_run_measures_anew_is_the_best_or_is_not(tmp_path: Path, again: float):
    """States after steps 3 and 6; killed after step 5, when 4 was better than 2. GPUs round by chance: then it is a
    little worse, and the weights of 2 are still there."""
    kept: dict[int, dict[str, Tensor]] = {}

    def go(module: Regression, losses: dict[int, float], make=batch) -> None:  # type: ignore[no-untyped-def]
        def measure() -> dict[str, float]:
            kept[module.seen] = weights(module)
            return {"loss": losses[module.seen]}

        loop.train(
            module, make, name="fit", schedule=schedule(steps=9, save_every=3), machine=CPU, seed=3, scratch=tmp_path,
            log=lambda metrics, step: None, watch=Watch(validation=Validation(every=2, measure=measure)),
        )  # fmt: skip

    losses = {2: 0.5, 4: 0.499, 6: 0.6, 8: 0.7, 9: 0.7}
    with pytest.raises(Stop):
        go(Regression(), losses, stopping_at(5))
    module = Regression()
    go(module, losses | {4: again})
    assert equal(weights(module), kept[4 if again < 0.5 else 2])
    names = {path.name for path in (tmp_path / "fit").glob("best-*")}
    assert ("best-0000001.pt" in names) == (again > 0.5)  # no state that is left needs it


@pytest.mark.parametrize("fused", [False, True])
def test_adamw_finds_its_number_of_steps_where_it_looks_for_it(fused: bool):
    """Fused, it lies beside the parameters: on a GPU, for which torch's device without memory stands here."""
    module = nn.Linear(4, 4, device="meta")
    adamw = torch.optim.AdamW(module.parameters(), fused=fused)
    moments = {"step": torch.tensor(5.0), "exp_avg": torch.zeros(4, 4), "exp_avg_sq": torch.zeros(4, 4)}
    optimizer_state.write(
        {"weight": moments}, module, SimpleNamespace(optimizer=adamw), None, deepspeed_stage=0
    )
    ours = {key: value.device.type for key, value in adamw.state[module.weight].items()}
    theirs = torch.optim.AdamW(module.parameters(), fused=fused)
    theirs.load_state_dict(adamw.state_dict() | {"state": {0: moments}})
    assert ours == {key: value.device.type for key, value in theirs.state[module.weight].items()}


def test_curves_which_may_have_a_million_rows_are_searched_after_validations_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    searched, best = [], Validation.best

    def counted(self: Validation, curves: loop.Curves) -> int | None:
        searched.append(len(curves))
        return best(self, curves)

    monkeypatch.setattr(Validation, "best", counted)
    losses = iter((0.2, 0.1))
    watch = Watch(validation=Validation(every=10, measure=lambda: {"loss": next(losses)}, patience=2))
    loop.train(
        Regression(), batch, name="fit", schedule=schedule(steps=20), machine=CPU, seed=3, scratch=tmp_path,
        log=lambda metrics, step: None, watch=watch,
    )  # fmt: skip
    assert len({*searched}) == 3  # at the start, and after two validations


def test_a_skipped_step_is_written_down_with_its_rows_and_may_end_the_run(tmp_path: Path):
    module = Regression()
    module.poison = {1, 3}
    watch = Watch(rows=lambda step: [f"set/{step}"])
    given = {"name": "fit", "seed": 3, "log": lambda metrics, step: None, "watch": watch}
    loop.train(module, batch, schedule=schedule(), machine=CPU, scratch=tmp_path / "a", **given)
    lines = [json.loads(line) for line in (tmp_path / "a/fit/skipped-0.jsonl").read_text().splitlines()]
    assert [(line["step"], line["loss"], line["rows"]) for line in lines] == [
        (1, "nan", ["set/1"]),
        (3, "nan", ["set/3"]),
    ]
    module = Regression()
    module.poison = {1}
    machine = loop.Machine(device=torch.device("cpu"), halt_on_nan=True)
    with pytest.raises(
        RuntimeError,
        match=r"fit: loss nan and gradient norm nan at step 1 .*halt_on_nan.*skipped-0.jsonl names the rows",
    ):
        loop.train(module, batch, schedule=schedule(), machine=machine, scratch=tmp_path / "b", **given)


def test_speed_rate_norms_by_part_and_a_trace_are_told_and_no_curve_has_them(tmp_path: Path):
    """Six rows a micro-batch, two micro-batches; half of a step of at least 40 ms waits for data."""
    told: list[dict[str, float]] = []

    def slowly(step: int, micro: int) -> Numbers:
        time.sleep(0.02)
        return batch(step, micro)

    watch = Watch(counts=lambda batch: {"rows": float(len(batch.x))}, part_of=lambda name: name.split(".")[1])
    machine = loop.Machine(device=torch.device("cpu"), profile_steps=2)
    curves = loop.train(
        Regression(), slowly, name="fit", schedule=schedule(steps=4, accumulate=2), machine=machine, seed=3,
        scratch=tmp_path, log=lambda metrics, step: told.append(metrics), watch=watch,
    )  # fmt: skip
    assert {name for _, name, _ in curves} == {"loss", "seen", "grad_norm", "skipped"}
    assert [row["fit/lr"] for row in told] == pytest.approx([0.05, 0.05, 0.0375, 0.0125])
    for row in told:
        assert row["fit/speed/rows_per_s"] == pytest.approx(12 / row["fit/speed/step_s"])
        assert 0.04 / row["fit/speed/step_s"] <= row["fit/speed/waiting_for_data"] <= 1
        assert row["fit/grad_norm/0"] ** 2 + row["fit/grad_norm/3"] ** 2 == pytest.approx(
            row["fit/grad_norm"] ** 2, rel=1e-4
        )
        assert row["fit/peak_memory_mb"] > 10
    assert json.loads((tmp_path / "fit/profile-0.json").read_text())["traceEvents"]


def test_the_module_that_spoils_a_step_is_named(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    """Step 2's second micro-batch overflows in the first layer; at step 4 it is the loss alone. The weights
    are those of a run that does not look for it."""

    def overflowing(step: int, micro: int) -> Numbers:
        made = batch(step, micro)
        return replace(made, x=made.x * 3e38) if (step, micro) == (2, 1) else made

    def trained(folder: str, *, runs_again: bool) -> tuple[list[str], Regression]:
        module = Regression()
        module.poison = {8 + runs_again}  # the second look counts, too
        loop.train(
            module, overflowing, name="fit", schedule=schedule(accumulate=2), machine=CPU, seed=3,
            scratch=tmp_path / folder, log=lambda metrics, step: None, watch=Watch(runs_again=runs_again),
        )  # fmt: skip
        lines = (tmp_path / folder / "fit/skipped-0.jsonl").read_text().splitlines()
        return [f"{line['step']} {line['module']}" for line in map(json.loads, lines)], module

    named, looked = trained("named", runs_again=True)
    assert named == ["2 frozen", "4 "]
    assert "fit: step 2 is skipped: frozen is the first module with a non-finite output; " in "".join(
        capfd.readouterr()
    )
    unnamed, plain = trained("unnamed", runs_again=False)
    assert unnamed == ["2 ", "4 "]
    assert equal(weights(looked), weights(plain))


def test_the_share_of_the_peak_and_the_slow_ones_of_three_processes_are_told(monkeypatch: pytest.MonkeyPatch):
    """This process did 100 tokens with 4e6 operations in some 20 ms on a GPU that was busy for .9 of it, the
    others as much, in .5 and 2 seconds, of which they waited .3 and .1, on GPUs with .2 and .8."""

    def summed(own: Tensor, device: torch.device) -> Tensor:
        assert own.tolist()[:2] == [4e6, 100.0]
        seconds, waited, loads = (
            [float(own[2]), 0.5, 2.0],
            [float(own[5]), 0.3, 0.1],
            [float(own[8]), *others],
        )
        return torch.tensor([12e6, 300.0, *seconds, *waited, *loads], dtype=torch.float64)

    others = [0.2, 0.8]
    monkeypatch.setattr(watching, "gpu_utilization", lambda device: 0.9)
    monkeypatch.setattr(watching, "world_size", lambda: 3)
    monkeypatch.setattr(watching, "union", lambda own: dict(enumerate("abc")))
    monkeypatch.setattr(watching, "shared_sum", summed)
    speed = watching.Speed(
        Watch(counts=lambda batch: {"tokens": 100.0, watching.OPERATIONS: 4e6}, peak_flops=1e9)
    )
    speed.take(iter([None]))
    time.sleep(0.02)
    told = speed.metrics(CPU.device)
    seconds = told["speed/step_s"]
    assert told["speed/tokens_per_s"] == pytest.approx(300 / seconds)
    assert told["speed/tokens_per_s_per_process"] == pytest.approx(100 / seconds)
    assert told["speed/mfu"] == pytest.approx(4e6 / seconds / 1e9)
    assert (told["speed/slowest_step_s"], told["speed/median_step_s"]) == (2.0, 0.5)
    assert (told["speed/longest_wait_for_data_s"], told["speed/median_wait_for_data_s"]) == (0.3, 0.1)
    assert told["speed/slowest_process"] == 2
    assert told["speed/longest_waiting_process"] == 1
    assert (told["speed/lowest_gpu_utilization"], told["speed/median_gpu_utilization"]) == (0.2, 0.8)
    assert told["speed/lowest_gpu_utilization_process"] == 1
    assert "speed/operations_per_s" not in told
    lines = [line.split() for line in speed.table().splitlines()]
    assert lines[0][0] == "1"
    assert lines[3:] == [["1", "b", "0.500", "0.300", "0.20"], ["2", "c", "2.000", "0.100", "0.80"]]
    assert "0 steps" in speed.table()
    others[1] = math.nan  # a process whose driver does not tell
    speed.take(iter([None]))
    assert "speed/lowest_gpu_utilization" not in speed.metrics(CPU.device)


def test_a_machine_without_nvidias_driver_has_no_utilization_of_gpus() -> None:
    assert math.isnan(watching.gpu_utilization(CPU.device))
    assert math.isnan(watching.gpu_utilization(torch.device("cuda", 0))) or torch.cuda.is_available()


SIGNALLED = """
import os, signal, sys, time
from pathlib import Path
from ans_core import dist, stop
from ans_core.train import loop
from tests.train.test_loop import CPU, Regression, batch, run, weights
import torch
scratch, out, when = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
loop.let_processes_talk(CPU)
stop.exit_on_signals()
def make(step, micro):
    print("step", step, flush=True)
    if step == when and dist.rank() == 1:
        os.kill(os.getpid(), signal.SIGUSR1)
    return batch(step, micro)
module = Regression()
curves = run(module, scratch, make, steps=20, save_every=1000, save_unit=int(sys.argv[4]))
torch.save({"weights": weights(module), "curves": curves}, f"{out}-{dist.rank()}")
"""


@pytest.mark.slow
@pytest.mark.parametrize(("unit", "last"), [(1, 6), (4, 8)])
def test_a_signal_to_one_process_makes_all_write_a_state_and_end_and_the_next_start_gives_the_same_bits(
    tmp_path: Path, unit: int, last: int
) -> None:
    script = tmp_path / "child.py"
    script.write_text(SIGNALLED)

    def both(name: str, when: int) -> list[forks.Ended]:
        return forks.run(
            script, str(tmp_path / f"scratch-{name}"), str(tmp_path / name), str(when), str(unit), processes=2
        )

    whole = both("whole", -1)
    assert [ended.status for ended in whole] == [0, 0], whole
    stopped = both("stopped", 5)
    assert [ended.status for ended in stopped] == [128 + signal.SIGUSR1] * 2, stopped
    assert [path.name for path in (tmp_path / "scratch-stopped/fit").glob("step-*")] == [f"step-{last:07d}"]
    again = both("stopped", -1)
    assert [ended.status for ended in again] == [0, 0], again
    assert min(int(step) for step in re.findall(r"step (\d+)$", again[0].said, re.MULTILINE)) == last
    one, other = (torch.load(tmp_path / f"{name}-0") for name in ("whole", "stopped"))
    assert equal(one["weights"], other["weights"])
    assert one["curves"] == other["curves"]


def test_a_term_in_a_loop_ends_after_the_step_with_a_state_and_outside_at_once(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in stop.SIGNALS}

    def make(step: int, micro: int) -> Numbers:
        if step == 3:
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)  # of the group and of the parent
        return batch(step, micro)

    try:
        stop.exit_on_signals()
        with pytest.raises(
            stop.Stopped, match="ended by SIGTERM after step 4, whose state is written"
        ) as ended:
            run(Regression(), tmp_path, make, save_every=1000)
        assert ended.value.code == 143
        assert [path.name for path in (tmp_path / "fit").glob("step-*")] == ["step-0000004"]
        stop.exit_on_signals()
        with pytest.raises(SystemExit) as at_once:
            signal.raise_signal(signal.SIGUSR1)
        assert at_once.value.code == 138
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        stop._Request.number = 0


def test_a_training_that_fails_leaves_no_worker_of_its_loader(tmp_path: Path):
    """Also while its error, and so its frames, are kept: Python waits at its end for workers that ignore TERM."""

    def fails(step: int) -> dict[str, float]:
        raise Stop

    before = multiprocessing.active_children()
    with pytest.raises(Stop) as kept:
        loop.train(
            Regression(), batch, name="fit", schedule=schedule(), machine=replace(CPU, workers=1), seed=0,
            scratch=tmp_path, log=lambda metrics, step: None, after_step=fails,
        )  # fmt: skip
    assert kept.value.__traceback__ is not None
    assert multiprocessing.active_children() == before


@pytest.mark.slow
def test_a_step_that_hangs_writes_where_it_waits_into_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps before it are as long together, and each alone is shorter."""
    monkeypatch.setattr(watching, "HANG_S", 1.0)
    handler = logging.FileHandler(tmp_path / "log")
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])

    def slow(step: int, micro: int) -> Numbers:
        time.sleep(2.5 if step == 5 else 0.3)
        return batch(step, micro)

    def run(steps: int) -> str:
        loop.train(
            Regression(), slow, name="r", schedule=schedule(steps=steps, accumulate=1), machine=CPU, seed=0,
            scratch=tmp_path / str(steps), log=lambda metrics, step: None,
        )  # fmt: skip
        return (tmp_path / "log").read_text()

    assert run(5) == ""
    stacks = run(6)
    assert stacks.count("Timeout (0:00:01)!") == 1
    assert "in slow" in stacks
    time.sleep(1.2)
    assert (tmp_path / "log").read_text() == stacks  # nothing after the run


def test_a_state_says_its_size_and_how_long_it_took_and_usr2_writes_the_stacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: dict[int, dict[str, float]] = {}

    def slow(step: int, micro: int) -> object:
        time.sleep(0.05)  # the state is written meanwhile
        if step == 3:
            os.kill(os.getpid(), signal.SIGUSR2)
        return batch(step, micro)

    handler = logging.FileHandler(tmp_path / "stacks")
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    loop.train(
        Regression(), slow, name="fit", schedule=schedule(steps=6, save_every=2), machine=CPU, seed=3,
        scratch=tmp_path, log=lambda metrics, step: told.update({step: metrics}),
    )  # fmt: skip
    handler.close()
    sizes = [metrics["fit/speed/state_gb"] for metrics in told.values() if "fit/speed/state_gb" in metrics]
    assert sizes
    assert all(0 < size < 0.001 for size in sizes)
    assert "test_loop.py" in (tmp_path / "stacks").read_text()
