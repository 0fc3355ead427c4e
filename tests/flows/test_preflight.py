from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ans_core.checkpoints.published import PUBLISHED, build_meta
from ans_core.config import Config, load, resolve
from ans_core.model.footprint import Parameters
from flows import preflight
from flows.params import render

ROOT = Path(__file__).resolve().parents[2]


def settings(profile: str, folder: Path, *words: str) -> Config:
    path = folder / "params.yaml"
    path.write_text(render(resolve(ROOT / f"profiles/{profile}.yaml", words), words))
    return load(path)


@pytest.mark.slow
def test_a_full_size_profile_without_gpus_data_and_weights_is_no_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = settings("sa2va-4b", tmp_path)
    said = {finding.what: finding.remedy for finding in preflight.preflight(config, ROOT) if not finding.ok}
    shown = "\n".join(said)
    assert "GPUs: none; sa2va-4b asks for 8 on this machine" in shown
    assert "base.internvl: OpenGVLab/InternVL2_5-4B is neither on this disk nor in the hub's cache" in shown
    assert "base.sam2: facebook/sam2-hiera-large is neither" in shown
    assert "refcoco (data/ref_seg/refcoco), refcoco+ " in shown
    assert "and 14 more" in shown  # of 19
    assert all(said.values())


@pytest.mark.parametrize("profile", ["sa2va-1b-rl", "sa2va-qwen3-4b-rl"])
def test_rl_alone_needs_what_the_whole_profile_of_its_size_does(tmp_path: Path, profile: str) -> None:
    (tmp_path / "alone").mkdir()
    assert preflight.published_name(settings(profile, tmp_path / "alone"), ROOT) == profile.removesuffix(
        "-rl"
    )


@pytest.mark.slow
def test_the_tiny_profile_asks_for_no_gpu(tmp_path: Path) -> None:
    config = settings("tiny", tmp_path)
    findings = [
        preflight.gpu_count(config, []),
        *preflight.weights(config, ROOT),
        preflight.data(config, ROOT),
    ]
    assert all(finding.ok for finding in findings)
    assert preflight.published_name(config, ROOT) is None
    words = ("agent.sft.traces=data/mine", "agent.sft.whole=false", "agent.sft.lora_ranks_from=gone")
    lacking = preflight.data(settings("tiny", tmp_path, *words), ROOT)
    told = "data sets that are not there: agent.sft.traces (data/mine), agent.sft.lora_ranks_from (gone)"
    assert (lacking.ok, lacking.what) == (False, told)
    assert not preflight.gpu_count(
        settings("tiny", tmp_path, "launch.device=cuda", "launch.processes=2"), ["H200"]
    ).ok


def test_disk_follows_from_the_counts(tmp_path: Path) -> None:
    """P 100, F 10, A 6: 4*200 + 4*64 + 2*192."""
    counts, config = Parameters(total=100, full=10, adapters=6), settings("tiny", tmp_path)
    assert preflight.disk(config, counts, 1440).ok
    assert not preflight.disk(config, counts, 1439).ok


@pytest.mark.slow
@pytest.mark.parametrize("profile", sorted(path.stem for path in (ROOT / "profiles").glob("*.yaml")))
def test_every_full_size_profile_fits_the_machine_it_is_made_for(tmp_path: Path, profile: str) -> None:
    config = settings(profile, tmp_path)
    name = preflight.published_name(config, ROOT)
    assert (name is None) == (config.base.source != "published")
    if name is None:
        return
    findings = preflight.gpu_memory(
        config, build_meta(name), preflight.LARGER_GPUS_GB.get(profile, preflight.GPU_GB) * 10**9
    )
    assert len(findings) == (1 if profile.endswith("-rl") else 2)
    if profile.startswith("pixelis"):
        findings.append(preflight.agent_memory(config, build_meta(name), preflight.GPU_GB * 10**9))
        longer = settings(profile, tmp_path, "agent.episode.tokens=36864")
        too_long = preflight.agent_memory(longer, build_meta(name), preflight.GPU_GB * 10**9)
        assert not too_long.ok
        assert "agent.episode.tokens" in too_long.remedy
    assert not [finding.what for finding in findings if not finding.ok]
    assert all("layers computed again" in finding.what for finding in findings)


@pytest.mark.slow
def test_a_profile_that_keeps_all_activations_does_not_fit(tmp_path: Path) -> None:
    """26B: 107 GB without checkpointing; with ZeRO-3 it fits 80 GB, where only sft is counted."""
    assert set(PUBLISHED) >= {"sa2va-8b", "sa2va-26b"}
    config = settings("sa2va-8b", tmp_path, "sft.checkpointing=none", "sft.optim.accumulate=4")
    sft, rl = preflight.gpu_memory(config, build_meta("sa2va-8b"), 80 * 10**9)
    assert (sft.ok, rl.ok) == (False, True)
    assert "activations 157" in sft.what
    assert "sft.checkpointing=auto" in sft.remedy
    assert not preflight.gpu_memory(settings("sa2va-26b", tmp_path), build_meta("sa2va-26b"), 80 * 10**9)[
        0
    ].ok
    (alone,) = preflight.gpu_memory(
        settings("sa2va-26b", tmp_path, "launch.deepspeed_stage=3"), build_meta("sa2va-26b"), 80 * 10**9
    )
    assert alone.ok


@pytest.mark.slow
def test_a_container_with_little_shared_memory_is_no_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings("sa2va-4b", tmp_path)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=64_000_000))
    found = preflight.shared_memory(config, build_meta("sa2va-4b"), tmp_path)
    assert not found.ok
    assert found.remedy.startswith("give the container more (docker run --shm-size=18g")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: SimpleNamespace(free=32_000_000_000))
    assert preflight.shared_memory(config, build_meta("sa2va-4b"), tmp_path).ok
