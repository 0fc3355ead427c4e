"""How many layers a stage computes again: as few as the GPU's memory asks for, and as many on every
process."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ans_core import dist
from ans_core.checkpoints.published import build_meta
from ans_core.config import Config, resolve
from ans_core.data.collate import collate
from ans_core.data.conversation import Turn
from ans_core.model import adapters
from ans_core.model.footprint import MicroBatch, loaded_bytes
from ans_core.model.network import Network
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config
from ans_core.stages import gpu_memory, launch
from ans_core.train.loop import Machine
from tests import tiny

PROFILES = Path(__file__).resolve().parents[2] / "profiles"
GB = 10**9
GPU = Machine(device=torch.device("cuda"), dtype="bf16", deepspeed_stage=2)


def config(*words: str) -> Config:
    """Two rows or samples at once on the one process of a test."""
    few = ("sft.optim.accumulate=32", "rl.optim.accumulate=32")
    return Config.model_validate(resolve(PROFILES / "sa2va-1b.yaml", ("launch.processes=1", *few, *words)))


def trained(cfg: Config, stage: str) -> Network:
    model = build_meta("sa2va-1b")
    if stage == "sft":
        adapters.prepare_sft(model, adapters.lora_config(**cfg.sft.lora.model_dump()), seed=0)
    else:
        modules = adapters.policy_modules(model, drawing=cfg.rl.drawing)
        lora = adapters.rl_config(**cfg.rl.lora.model_dump(), modules=modules)
        adapters.Adapters(model, lora, names=("policy",), off="reference", seed=0)
    return model


def gpu_with(monkeypatch: pytest.MonkeyPatch, *, free: int, total: int = 80 * GB, cached: int = 0) -> None:
    """A GPU whose allocator holds `cached` bytes that nothing uses."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: cached + GB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GB)


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_a_large_gpu_computes_nothing_again_and_a_small_one_most(
    stage: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg, logged = config(), dict[str, float]()
    model = trained(cfg, stage)

    def chosen(free: int) -> int | None:
        gpu_with(monkeypatch, free=free, cached=GB)
        return gpu_memory.checkpointed_layers(
            cfg, model, stage, machine=GPU, log=lambda metrics, step: logged.update(metrics)
        )

    assert chosen(140 * GB) == 0
    assert "checkpointing: 0 of 24 layers are computed again: up to " in capsys.readouterr().out
    some = chosen(45 * GB)
    assert some is not None
    assert 0 < some < 22
    assert logged == {"checkpointing/layers": float(some)}
    assert "may not fit" not in capsys.readouterr().out
    assert chosen(9 * GB) == 22  # of 24: computing the last two again saves nothing
    assert "the longest rows may not fit: raise optim.accumulate" in capsys.readouterr().out


@pytest.mark.slow
def test_the_process_with_least_memory_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config()
    model = trained(cfg, "sft")

    def chosen(*, free: int, of_others: int) -> int | None:
        gpu_with(monkeypatch, free=free)
        monkeypatch.setattr(dist, "largest", lambda value, device: max(value, -of_others))
        return gpu_memory.checkpointed_layers(cfg, model, "sft", machine=GPU, log=lambda metrics, step: None)

    alone = chosen(free=40 * GB, of_others=100 * GB)
    gpu_with(monkeypatch, free=40 * GB)
    least = gpu_memory.free_bytes(model, GPU)
    assert alone == chosen(free=140 * GB, of_others=least)
    assert alone != 0


@pytest.mark.slow
def test_gradients_and_optimizer_are_set_aside(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 bytes of each trained weight, fp32, under ZeRO-2, and RESERVE of the GPU."""
    model = trained(config(), "sft")
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    gpu_with(monkeypatch, free=70 * GB, cached=2 * GB)
    assert gpu_memory.free_bytes(model, GPU) == int(72 * GB - 16 * weights - gpu_memory.RESERVE * 80 * GB)


@pytest.mark.slow
def test_a_cpu_computes_nothing_again_and_settings_count(capsys: pytest.CaptureFixture[str]) -> None:
    model, cpu = build_meta("sa2va-1b"), Machine(device=torch.device("cpu"))

    def chosen(setting: str) -> int | None:
        cfg = config(f"sft.checkpointing={setting}")
        return gpu_memory.checkpointed_layers(cfg, model, "sft", machine=cpu, log=lambda metrics, step: None)

    assert (chosen("auto"), chosen("none"), chosen("layers")) == (0, 0, None)
    assert capsys.readouterr().out == "checkpointing: 0 of 24 layers are computed again: on a CPU\n"


@pytest.mark.parametrize("kind", ["internvl", "qwen3_vl"])
def test_a_loaded_batch_is_as_large_as_the_formula_says(kind: str) -> None:
    """A picture with two masks: pixels for both encoders, and targets."""
    words = build_tokenizer(tiny.TEXTS * 5, vocabulary=300, kind=kind)
    vision = {"image_size": 64, "patch_size": 8, "hidden": 32, "layers": 1, "heads": 2, "mlp": 64}
    language = {"hidden": 32, "layers": 1, "heads": 4, "kv_heads": 2, "mlp": 64}
    made = tiny_config(
        kind=kind,
        vision=vision,
        language=language,
        grounding=tiny.GROUNDING,
        tokenizer=words,
        template="qwen_chat",
        video_frames=2,
    )
    model, box = build_tiny(made, words, seed=0), (tiny.square(8, 8, 24, 24),)
    turns = (
        Turn(
            question="Please segment the red square in this image.",
            answer="It is [SEG] left of [SEG].",
            masks=(box, box),
        ),
    )
    batch = collate([tiny.row(*turns)], words, tiny.layout(model))
    (views,) = batch.views
    size = sum(x.nbytes for x in (views.pixels, batch.sam_frames, batch.targets))
    assert (
        loaded_bytes(model, MicroBatch(rows=1, tokens=9, learned=9, grids=views.grids, masks=2), mask_size=32)
        == size
    )


@pytest.mark.slow
def test_candidates_are_loaded_too() -> None:
    """Of RL's step: twice as many of each loop."""
    model = build_meta("sa2va-1b")

    def size(*words: str) -> int:
        cfg = config("rl.rows=0", "rl.loops={caption: 1.0, mask: 1.0}", *words)
        return gpu_memory.loader_bytes(cfg, model, "rl", processes=1)

    assert size("rl.oversample=1.0") == 2 * size()


def test_too_little_shared_memory_for_the_loaders_is_refused_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """64 MB, as in a container that was not asked for more."""
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=64_000_000))
    launch.check_shared_memory(2, 8_000_000, processes=4, folder=tmp_path)
    launch.check_shared_memory(0, 10**9, processes=8, folder=tmp_path)
    launch.check_shared_memory(8, 10**9, processes=8, folder=tmp_path / "none")
    with pytest.raises(
        RuntimeError,
        match=r"has 64 MB free, and 8 x 8 .* up to 96 MB .*--shm-size=13g.* or set launch\.workers=0",
    ):
        launch.check_shared_memory(8, 96_000_000, processes=8, folder=tmp_path)


@pytest.mark.parametrize(
    ("setting", "device", "asked"),
    [("auto", "cpu", True), ("auto", "cuda", False), ("false", "cpu", False), ("true", "cuda", True)],
)
def test_determinism_is_for_who_asks_and_free_on_a_cpu(
    setting: str, device: str, asked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []
    monkeypatch.setattr(launch, "deterministic", calls.append)
    monkeypatch.setattr(launch, "pick_device", lambda name: torch.device(device))
    launch.machine_of(config(f"launch.deterministic={setting}").launch)
    assert calls == [asked]


def test_gradients_of_indexing_are_the_same_bits_each_time_on_a_cpu() -> None:
    """torch sums them with atomic additions of several threads where nobody asks for more."""
    launch.machine_of(config("launch.device=cpu", "launch.deepspeed_stage=0", "launch.threads=2").launch)
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(300, 128, generator=generator, requires_grad=True)
    places = torch.randint(0, 300, (8000,), generator=generator)
    weights = torch.randn(8000, 128, generator=generator)
    sums = [torch.autograd.grad((table[places] * weights).sum(), table)[0] for _ in range(10)]
    assert all(torch.equal(each, sums[0]) for each in sums)
