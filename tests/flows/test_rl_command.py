"""`ans rl`: a Sa2VA and regions with captions in, a checkpoint after RL and a report out."""

from __future__ import annotations

import json
import os
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest
from datasets import Dataset, Features, Image, Value

from ans_core.checkpoints import checkpoint
from ans_core.config import Config
from ans_core.data.formats import FORMATS
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from flows import cli, rl_command, short_training
from tasks.stages import stage_named
from tests import tiny

REFERENCE = Path(os.environ.get("ANS_REFERENCE", Path(__file__).resolve().parents[2] / "../shared"))
needs_reference = pytest.mark.skipif(not REFERENCE.is_dir(), reason=f"no reference data at {REFERENCE} (set ANS_REFERENCE)")
FEW_WORDS = (  # of the tiny profile, shrunk
    "sft.mask_points=64", "sft.mask_size=32", "rl.group=2", "rl.max_tokens=4", "rl.lora.rank=2", "rl.lora.alpha=4", "rl.mask_grid=4",
    "evaluate.max_tokens=4", "evaluate.batch=4", "report.overlays=4",
)  # fmt: skip


def ans(*words: object) -> int:
    arguments = cli.parse(["rl", *map(str, words)])
    return arguments.function(arguments)


def save_regions(folder: Path, rows: list[tuple[Path, dict[str, object], str]]) -> Path:
    """Write (picture, mask, caption) as describe-anything and Grasp-Any-Region come: Arrow with embedded pictures, of one split."""
    said = [[{"from": "human", "value": "<image>\nDescribe <Prompt0>."}, {"from": "gpt", "value": caption}] for *_, caption in rows]
    columns = {"image": [str(file) for file, *_ in rows], "mask_rle": [[mask] for _, mask, _ in rows], "conversations": said}
    features = Features(
        {
            "image": Image(),
            "mask_rle": [{"size": [Value("int64")], "counts": Value("string")}],
            "conversations": [{"from": Value("string"), "value": Value("string")}],
        }
    )
    Dataset.from_dict(columns, features=features).save_to_disk(folder)
    return folder


def drawn(folder: Path, count: int) -> Path:
    folder.mkdir()
    for number in range(count):
        (folder / f"{number}.png").write_bytes(tiny.picture(number))
    return save_regions(folder / "regions", [(folder / f"{n}.png", tiny.square(8, 8, 24, 24), "a red square") for n in range(count)])


def settings_of(folder: Path, *words: str, parameters: int = 1000) -> Config:
    arguments = cli.parse(["rl", "--model", "owner/a-release", "--data", str(folder), *words])
    return rl_command.settings([rl_command.read_set(folder, None)], arguments, parameters=parameters)


def test_settings_have_the_loops_that_the_data_can_and_a_share_held_out(tmp_path: Path) -> None:
    folder = drawn(tmp_path / "mine", 30)
    config = settings_of(folder)
    (source,) = config.prepare.sources
    assert (source.format, source.hold_out) == ("region_arrow", 0.2)
    assert config.rl.loops == {"caption": 1.0, "mask": 0.2}
    assert (config.sft.optim.steps, config.base.source, config.base.internvl, config.base.sam2) == (0, "published", "owner/a-release", "")
    assert config.evaluate.benchmarks == ("region_caption", "loops")
    train = len(rl_command.read_set(folder, None).train)
    assert config.rl.optim.steps == -(-3 * train // 8)  # three epochs are fewer than the profile's 180 steps
    assert (config.rl.optim.batch, config.rl.rows, config.rl.use_llm_judge, config.launch.processes) == (8, 8, False, 1)
    assert settings_of(folder, "rl.optim.epochs=5").rl.optim.steps == -(-5 * train // 8)
    assert settings_of(folder, "--steps", "7", "rl.kl=0.2").rl.optim.steps == 7
    with pytest.raises(ValueError, match=r"rl\.optim\.epochs and a number of steps are both given"):
        settings_of(folder, "--steps", "7", "rl.optim.epochs=2")
    with pytest.raises(ValueError, match=r"launch\.processes = 'two': give a whole number above 0"):
        settings_of(folder, "launch.processes=two")


def test_a_large_model_gets_the_profile_of_rl_alone_divided_for_one_process(tmp_path: Path) -> None:
    config = settings_of(drawn(tmp_path / "mine", 90), "launch.processes=2", parameters=10**9)
    optim = config.rl.optim
    assert config.profile == "sa2va-4b-rl"
    assert (optim.batch, optim.accumulate, config.rl.rows) == (64, 16, 64)  # the profile: 4 of 8 processes, so 2 samples at once here too
    assert [one.name for one in config.evaluate.public] == ["dlc_bench", "refcoco"]
    command = short_training.ranks_command(stage_named("rl"), config, tmp_path, "--out", "x")
    assert command
    assert {"--nproc-per-node=2", "flows.short_training", "rl"} <= {*command}
    assert short_training.ranks_command(stage_named("prepare"), config, tmp_path) is None


def test_a_judge_that_is_named_is_not_asked_for_its_models() -> None:
    assert rl_command.judge_words(None, {}) == []
    named = rl_command.judge_words("http://127.0.0.1:9/v1", {"judge.model": "a"})
    assert named == ["rl.use_llm_judge=true", 'judge.base_url="http://127.0.0.1:9/v1"']
    with pytest.raises(ValueError, match=r"--judge http://127.0.0.1:9/v1: it does not tell its models .* name one \(judge.model=NAME\)"):
        rl_command.judge_words("http://127.0.0.1:9/v1", {})


class Models(BaseHTTPRequestHandler):
    """An endpoint that tells its models."""

    names: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        body = json.dumps({"object": "list", "data": [{"id": name, "object": "model"} for name in self.names]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def test_the_only_model_of_an_endpoint_judges_and_one_of_several_is_to_be_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), Models) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        monkeypatch.setattr(Models, "names", ["a-judge"])
        config = settings_of(drawn(tmp_path / "mine", 20), "--judge", url)
        assert (config.judge.model, config.judge.base_url) == ("a-judge", url)
        assert (config.rl.use_llm_judge, config.rl.use_llm_judge_loop2) == (True, False)
        monkeypatch.setattr(Models, "names", ["one", "two"])
        with pytest.raises(ValueError, match=r"has 2 models \['one', 'two'\]; name one of them: judge.model=NAME"):
            rl_command.judge_words(url, {})
        server.shutdown()


def test_what_rl_can_not_learn_from_is_refused_before_a_model_is_loaded(tmp_path: Path, tiny_model: Network) -> None:
    with pytest.raises(ValueError, match="1 pictures are too few to hold some out"):
        ans("--model", "nothing", "--data", drawn(tmp_path / "few", 1), "--out", tmp_path / "out")
    folder = drawn(tmp_path / "mine", 20)
    with pytest.raises(ValueError, match="no folder 'nothing'"):
        ans("--model", "nothing", "--data", folder, "--out", tmp_path / "out")
    checkpoint.save(tiny_model, tmp_path / "base", metadata={"stage": "base", "source": ["an/InternVL", "a/SAM2"]})
    with pytest.raises(ValueError, match="an/InternVL with a/SAM2, whose text_hidden_fcs are random"):
        ans("--model", tmp_path / "base", "--data", folder, "--out", tmp_path / "out")
    question = {"image": "0.png", "question": "How many?", "answer": "Two."}
    (tmp_path / "asked").mkdir()
    (tmp_path / "asked/0.png").write_bytes(tiny.picture(0))
    records = [question | {"split": "train"}, question | {"split": "val"}]
    (tmp_path / "asked/annotations.json").write_text(json.dumps(records))
    checkpoint.save(tiny_model, tmp_path / "model", metadata={})
    with pytest.raises(ValueError, match=r"no samples for a loop of RL: caption and mask want region captions"):
        ans("--model", tmp_path / "model", "--data", tmp_path / "asked", "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@needs_reference
@pytest.mark.slow
def test_a_release_and_regions_become_a_checkpoint_and_a_report_on_two_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Photographs with masks and captions, and a release in upstream's layout of random weights."""
    lines = [json.loads(line) for line in (REFERENCE / "data/regions/manifest.jsonl").read_text().splitlines()]
    chosen = [line for line in lines if line.get("caption")][:16]
    rows = [(REFERENCE / "data/regions" / line["image"], line["segmentation"], line["caption"]) for line in chosen]
    folder, release, out = save_regions(tmp_path / "described", rows), REFERENCE / "golden/qwen2", tmp_path / "out"
    assert len(list(FORMATS["region_arrow"](folder, name="d", split="train"))) == 16
    words = ("--model", release, "--data", folder, "--out", out, "--steps", 2, "rl.optim.batch=4", "launch.processes=2", *FEW_WORDS)
    assert ans(*words) == 0
    told = capsys.readouterr().out
    assert "loops caption, mask; 2 steps of 4" in told
    assert "s a step, " in told
    assert "held-out pictures, before and after" in told
    before, after = checkpoint.load(release), Sa2VA.from_pretrained(out / "model")
    assert any(not new.equal(old) for new, old in zip(after.parameters(), before.parameters(), strict=True))
    for row in ("sft", "rl"):
        metrics = json.loads((out / "evaluate" / row / "metrics.json").read_text())
        assert {"described/loop1/IoU", "described/loop2/METEOR", "described/region_caption/METEOR"} <= metrics.keys()
    page = (out / "report/report.html").read_text()
    assert "RL against sft" in page
    assert "ANS report: RL on described" in page
    assert ans(*words) == 0
    assert capsys.readouterr().out.count("was there") == 9
