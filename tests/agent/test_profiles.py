"""The full-size profiles of the agent: they resolve, and their models can be built (without memory), with 2
to 20 tiles a picture."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from ans_core.agent.controls import RandomCalls
from ans_core.agent.episode import Toolbox
from ans_core.agent.operations import OPERATIONS
from ans_core.agent.policy import AGENT, AgentPolicy, add_call_tokens, load_base, load_policy, set_resolution
from ans_core.checkpoints import checkpoint
from ans_core.checkpoints.published import build_meta
from ans_core.config import Config, ConfigError, load, resolve
from ans_core.data.views import Tiling
from ans_core.model import parts
from ans_core.model.network import Network
from ans_core.stages.operations import toolbox_of
from tests import tiny
from tests.golden import GOLDEN

LORA = {"rank": 4, "alpha": 8, "dropout": 0.0}
PROFILES = Path(__file__).resolve().parents[2] / "profiles"
SIZES = {
    "1b": ("OpenGVLab/InternVL2_5-1B", 896),
    "4b": ("OpenGVLab/InternVL2_5-4B", 2048),
    "8b": ("OpenGVLab/InternVL2_5-8B", 4096),
    "qwen25-7b": ("Qwen/Qwen2.5-VL-7B-Instruct", 3584),
    "qwen3-4b": ("Qwen/Qwen3-VL-4B-Instruct", 2560),
}


@pytest.mark.parametrize("size", SIZES)
def test_the_profile_resolves(size: str) -> None:
    config = Config.model_validate(resolve(PROFILES / f"pixelis-{size}.yaml", ()))
    assert config.base.internvl == SIZES[size][0]
    assert config.agent.tiles == (2, 20)
    assert (config.agent.rft.temperature, config.agent.rft.objective, config.agent.rft.group) == (
        1.0,
        "grpo",
        8,
    )
    assert config.agent.episode.operations_told
    sft = config.agent.sft
    assert config.launch.processes == 8
    for trained in (sft, config.agent.rft):
        trained.check_shares(processes=config.launch.processes)  # no micro-batch is empty
    assert not sft.lora.dropout


def test_large_models_learn_online_slowly_and_small_profiles_release_soon() -> None:
    """The rate of tiny would be 20 times too high for a large model; short runs release nothing of what they
    learned with an average of .999. Noise in grey levels, which tiny's pictures of 96 pixels have, is none of
    full size."""
    for size in SIZES:
        online = Config.model_validate(resolve(PROFILES / f"pixelis-{size}.yaml", ())).agent.online
        assert 1e-6 <= online.update.optim.lr <= 1e-4
        assert online.update.ema == 0.999
        assert 1 - online.update.ema**online.update.optim.steps > 0.5
        assert online.simulation.shift.noise == 0.0
    for name in ("tiny", "tiny-qwen", "smoke", "smoke-qwen"):
        assert Config.model_validate(resolve(PROFILES / f"{name}.yaml", ())).agent.online.update.ema == 0.95


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_the_agent_is_built_on_the_meta_device(size: str) -> None:
    config = Config.model_validate(resolve(PROFILES / f"pixelis-{size}.yaml", ()))
    model = build_meta(f"sa2va-{size}")
    rows = sorted(set(add_call_tokens(model, OPERATIONS)))
    set_resolution(model, tiles=config.agent.tiles)
    if "qwen" in size:
        (sides,) = model.backbone.cutter.grids(4000, 3000)
        assert math.prod(sides) * 28**2 < 20 * 448**2 < 4000 * 3000
    else:
        assert model.backbone.cutter == Tiling(size=448, min_tiles=2, max_tiles=20, grid=16)
    policy = AgentPolicy(model, lora=config.agent.sft.lora.model_dump(), rows=rows, seed=0)
    parameters = policy.adapters.parameters(AGENT)
    assert {p.device.type for p in parameters.values()} == {"meta"}
    hidden = SIZES[size][1]
    assert (
        sum(p.numel() for name, p in parameters.items() if "trainable_tokens_delta" in name)
        == 2 * len(rows) * hidden
    )


def test_pictures_have_between_the_fewest_and_the_most_tiles() -> None:
    cutter = Tiling(size=448, min_tiles=2, max_tiles=20, grid=16)
    views = {
        size: len(cutter.grids(*size))
        for size in [(448, 448), (100, 100), (896, 448), (2240, 1792), (4000, 3000), (8000, 400)]
    }
    assert views == {
        (448, 448): 5,
        (100, 100): 5,
        (896, 448): 3,
        (2240, 1792): 21,
        (4000, 3000): 13,
        (8000, 400): 21,
    }
    assert len(Tiling(size=448, max_tiles=12, grid=16).grids(448, 448)) == 1


def test_pixels_become_as_many_tiles_as_hold_them_and_are_kept() -> None:
    """tiny's tile has 64 pixels."""
    for pixels, tiles in (((2 * 4096, 20 * 4096), (2, 20)), ((4097, 5 * 4096 - 1), (2, 4))):
        model = tiny.build()
        set_resolution(model, pixels=pixels)
        assert model.backbone.cutter == Tiling(size=64, min_tiles=tiles[0], max_tiles=tiles[1], grid=4)
        assert AgentPolicy(model, lora=LORA, rows=[1], seed=1).about()["tiles"] == list(tiles)
    with pytest.raises(
        ValueError, match=r"agent.max_pixels 8000: no whole number of tiles of 64 x 64 = 4096"
    ):
        set_resolution(tiny.build(), pixels=(5000, 8000))


@pytest.mark.slow
@pytest.mark.skipif(not GOLDEN.is_dir(), reason="no reference outputs")
def test_qwen_shows_the_pixels_themselves_and_a_trained_agent_keeps_them(tmp_path: Path) -> None:
    base, pixels = GOLDEN / "qwen3_vl", (20_000, 60_000)
    model = load_base(base, operations=OPERATIONS, pixels=pixels)
    policy = AgentPolicy(model, lora=LORA, rows=[1], seed=1)
    policy.save(tmp_path / "agent", base_hash=checkpoint.weights_hash(base), about={})
    for shown in (model, load_policy(base, tmp_path / "agent", operations=OPERATIONS).model):
        for size in ((4000, 3000), (20, 30)):
            ((rows, columns),) = shown.backbone.cutter.grids(*size)
            assert pixels[0] <= rows * columns * 32**2 <= pixels[1]
    with pytest.raises(ValueError, match=r"agent.max_pixels 900 is less than one image token's 32 x 32"):
        set_resolution(model, pixels=(100, 900))


@pytest.mark.parametrize(
    ("agent", "refusal"),
    [
        ({"tiles": [2, 20], "min_pixels": 10, "max_pixels": 20}, "say the same thing; give one of them"),
        ({"max_pixels": 20}, "min_pixels 0, max_pixels 20; give both, the fewest first"),
        ({"min_pixels": 30, "max_pixels": 20}, "min_pixels 30, max_pixels 20; give both"),
    ],
)
def test_resolutions_that_make_no_sense_are_refused(agent: dict[str, Any], refusal: str) -> None:
    with pytest.raises(ValueError, match=refusal):
        Config.model_validate({"agent": agent})


@pytest.mark.slow
def test_a_trained_agent_keeps_its_tiles(tmp_path: Path) -> None:
    checkpoint.save(tiny.build(), tmp_path / "base", metadata={})
    model = load_base(tmp_path / "base", operations=OPERATIONS, tiles=(2, 4))
    policy = AgentPolicy(model, lora={"rank": 4, "alpha": 8, "dropout": 0.0}, rows=[1], seed=1)
    policy.save(tmp_path / "agent", base_hash=checkpoint.weights_hash(tmp_path / "base"), about={})
    again = load_policy(tmp_path / "base", tmp_path / "agent", operations=OPERATIONS)
    assert again.model.backbone.cutter == model.backbone.cutter
    assert len(again.model.backbone.cutter.grids(64, 64)) == 5
    plain = load_base(tmp_path / "base", operations=OPERATIONS)
    assert len(plain.backbone.cutter.grids(64, 64)) == 1


def test_tiles_that_are_no_range_are_refused(tmp_path: Path) -> None:
    for tiles in ("[20, 2]", "[2]"):
        (tmp_path / "params.yaml").write_text(f"profile: x\nagent: {{tiles: {tiles}}}\n")
        with pytest.raises(ConfigError, match=r"neither empty nor \[fewest, most\]; write \[2, 20\]"):
            load(tmp_path / "params.yaml")


@pytest.mark.slow
def test_the_adapter_takes_the_ranks_of_a_full_fine_tuning(tmp_path: Path, own_model: Network) -> None:
    from ans_core.config.agent import AgentSft
    from ans_core.stages.agent_sft import lora_of, tuned_weights

    tuned = tiny.build()
    name = "internvl.model.language_model.layers.1.mlp.down_proj"
    with torch.no_grad():
        # 32 equal singular values: 90 % of their energy needs 29
        tuned.get_submodule(name).weight += torch.eye(32, 64)
    checkpoint.save(tuned, tmp_path / "tuned", metadata={})
    base = add_call_tokens(own_model, OPERATIONS)
    lora = lora_of(AgentSft(), own_model, tuned_weights(tmp_path / "tuned", base=tmp_path / "base"))
    assert lora["rank_pattern"].pop(name) == 29
    assert set(lora["rank_pattern"].values()) == {4}
    lora["rank_pattern"][name] = 29
    policy = AgentPolicy(own_model, lora=lora, rows=base, seed=1)
    shapes = {n: p.shape for n, p in policy.adapters.parameters(AGENT).items() if "lora_A" in n}
    assert {shape[0] for n, shape in shapes.items() if name in n} == {29}
    assert {shape[0] for n, shape in shapes.items() if name not in n} == {4}
    checkpoint.save(tiny.build(), tmp_path / "base", metadata={})
    policy.save(tmp_path / "agent", base_hash=checkpoint.weights_hash(tmp_path / "base"), about={})
    again = load_policy(tmp_path / "base", tmp_path / "agent", operations=OPERATIONS)
    assert again.adapters.tensors(AGENT).keys() == policy.adapters.tensors(AGENT).keys()


@pytest.mark.slow
def test_a_stage_has_its_operations_draw_with_the_segmenter_of_the_settings(tmp_path: Path) -> None:
    other = tiny.build()
    with torch.no_grad():
        next(other.sam2.parameters()).add_(1)
    checkpoint.save(other, tmp_path / "other", metadata={})
    cfg = Config.model_validate(
        {"profile": "x", "agent": {"reader": "template", "segmenter": str(tmp_path / "other")}}
    )
    model = tiny.build()
    for make in (Toolbox, partial(RandomCalls, seed=0)):
        with toolbox_of(cfg, model, make=make) as toolbox:
            drawing = toolbox._model
            assert drawing is not None
            assert parts.hashes(drawing) == parts.hashes(other) != parts.hashes(model)
            assert not any(p.requires_grad for p in drawing.parameters())
            assert toolbox.reader == "template"
    with toolbox_of(Config.model_validate({"profile": "x"}), model) as toolbox:
        assert toolbox._model is model
