from pathlib import Path

import pytest
import torch

from ans_core.config import Config, load, resolve
from ans_core.model.needs import Needs
from flows import preflight
from flows.params import render

ROOT = Path(__file__).resolve().parents[2]


def settings(profile: str, folder: Path, *words: str) -> Config:
    path = folder / "params.yaml"
    path.write_text(render(resolve(ROOT / f"profiles/{profile}.yaml", words), words))
    return load(path)


def test_a_full_size_profile_without_gpus_data_and_weights_is_no_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    found = preflight.published_needs(settings(profile, tmp_path / "alone"), ROOT)
    assert found is not None
    assert found == preflight.published_needs(settings(profile.removesuffix("-rl"), tmp_path), ROOT)


def test_the_tiny_profile_asks_for_no_gpu(tmp_path: Path) -> None:
    config = settings("tiny", tmp_path)
    findings = [preflight.gpu_count(config, []), *preflight.weights(config, ROOT), preflight.data(config, ROOT)]
    assert all(finding.ok for finding in findings)
    assert preflight.published_needs(config, ROOT) is None
    words = ("agent.sft.traces=data/mine", "agent.sft.whole=false", "agent.sft.lora_ranks_from=gone")
    lacking = preflight.data(settings("tiny", tmp_path, *words), ROOT)
    told = "data sets that are not there: agent.sft.traces (data/mine), agent.sft.lora_ranks_from (gone)"
    assert (lacking.ok, lacking.what) == (False, told)
    assert not preflight.gpu_count(settings("tiny", tmp_path, "launch.device=cuda", "launch.processes=2"), ["H200"]).ok


def test_memory_and_disk_follow_from_the_counts(tmp_path: Path) -> None:
    """P 100, F 10, A 6, 8 GPUs: weights 2*90 + 4*16 = 244; plain + 12*16, ZeRO-2 + 16*16/8, ZeRO-3 (244 + 256)/8. On disk
    4*200 + 4*64 + 2*192."""
    need = Needs(parameters=100, full=10, adapters=6, gpus=8)
    for stage, limit in ((0, 436), (2, 276), (3, 62.5)):
        config = settings("tiny", tmp_path, f"launch.deepspeed_stage={stage}", "sft.optim.muon_lr=0", "memory.train=false")
        assert preflight.gpu_memory(config, need, int(limit + 0.5)).ok
        assert not preflight.gpu_memory(config, need, int(limit - 0.5)).ok
    assert preflight.disk(config, need, 1440).ok
    assert not preflight.disk(config, need, 1439).ok
