"""Sending a checkpoint to a hub and getting it back, by a server on this machine that speaks the protocol."""

from __future__ import annotations

import copy
import json
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest
import torch
from huggingface_hub import ModelCard, constants

from ans_core.checkpoints import checkpoint, conversion
from ans_core.hub import download as hub
from ans_core.hub import model_card, push
from ans_core.inference.sa2va import Sa2VA
from ans_core.model.network import Network
from flows import cli
from tests import tiny
from tests.golden import GOLDEN, needs_golden
from tests.hub_server import Hub, serving
from tests.stages.test_report import write_evaluation

REPO = "org/model"


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    with serving(Hub({}, repo=REPO, exists=False)) as made:
        monkeypatch.setattr(constants, "ENDPOINT", made.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", made.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the server has no chunked storage
        monkeypatch.setenv("HF_TOKEN", made.token)
        real = time.sleep
        monkeypatch.setattr(time, "sleep", lambda seconds: real(seconds / 1000))
        yield made


@pytest.fixture
def run(tmp_path: Path, tiny_model: Network) -> Path:
    """A folder as runs/<profile> with a converted model, an evaluation and its pictures."""
    folder = tmp_path / "runs/mini"
    checkpoint.save(tiny_model, folder / "model", max_shard="3MB", metadata={})
    (folder / "model/README.md").write_text(
        '---\nlicense: apache-2.0\ntags:\n- ans\n---\n# mini\n\n    Sa2VA.from_pretrained("path/to/this/folder")\n\n'
        "## Data\n- `drawn` (train, format refcoco)\n\n## Metrics\nelsewhere\n\n## Licence\nApache-2.0\n\n"
        "## Settings\n```yaml\nseed: 0\n```\n"
    )
    (folder / "model/optimizer.bin").write_bytes(b"state")
    write_evaluation(folder / "evaluate/rl", 3)
    index = []
    for number, verdict in enumerate(("right", "right", "wrong")):
        file = f"referring_val_{number:04d}.png"
        (folder / "evaluate/rl/overlays").mkdir(exist_ok=True)
        (folder / "evaluate/rl/overlays" / file).write_bytes(tiny.picture(number))
        index.append(
            {"file": file, "benchmark": "referring/val", "score": 1.0 - number / 2, "verdict": verdict}
        )
    (folder / "evaluate/rl/overlays/index.json").write_text(json.dumps(index))
    return folder


def ans(*words: object) -> int:
    arguments = cli.parse([*map(str, words)])
    return arguments.function(arguments)


@pytest.mark.slow
def test_a_checkpoint_is_shown_sent_with_its_card_and_got_back_in_every_byte(
    served: Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    assert ans("push", run / "model", REPO, "--dry-run") == 0
    told = capsys.readouterr().out
    assert served.exists is False
    assert "left out: optimizer.bin" in told
    assert "layout native, licence apache-2.0" in told
    weights = sorted(path.name for path in (run / "model").glob("*.safetensors"))
    assert len(weights) > 1
    for name in weights:
        assert f"{name}" in told
        assert f"{(run / 'model' / name).stat().st_size:,} bytes" in told

    assert ans("push", run / "model", REPO, "--yes") == 0
    assert served.private
    assert f"{served.url}/{REPO}/commit/" in capsys.readouterr().out
    assert {f"examples/referring_val_000{n}.png" for n in (0, 2)} == {
        name for name in served.files if name.startswith("examples")
    }
    written = served.files["README.md"].decode()
    assert ModelCard(written).data.license == "apache-2.0"
    assert f'Sa2VA.from_pretrained("{REPO}")' in written
    assert [line for line in written.splitlines() if line.startswith("## ")] == [
        "## Data", "## Metrics", "## Examples", "## Licence", "## Settings"
    ]  # fmt: skip
    assert "elsewhere" not in written

    assert ans("pull", REPO, tmp_path / "got", "--yes") == 0
    assert "every tensor is known" in capsys.readouterr().out
    for path in (run / "model").iterdir():
        if path.name not in ("README.md", "optimizer.bin"):
            assert (tmp_path / "got" / path.name).read_bytes() == path.read_bytes()
    state = Sa2VA.from_pretrained(REPO).state_dict()
    assert all(
        torch.equal(tensor, state[name])
        for name, tensor in Sa2VA.from_pretrained(run / "model").state_dict().items()
    )


def test_the_card_gives_every_mean_of_scores_the_interval_of_the_bootstrap(run: Path):
    """A third of the samples at 0.9, the others at 0: the mean of 30 has a standard error of 0.079."""
    row = run / "evaluate/rl"
    record = {"benchmark": "region_caption/val", "dataset": "d", "asked": "it"}
    lines = [record | {"sample_id": str(i), "score": 0.9 if i % 3 == 0 else 0.0} for i in range(30)]
    (row / "predictions.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (row / "metrics.json").write_text(
        json.dumps({"region_caption/val/METEOR": 0.3, "region_caption/val/exact_match": 0.4})
    )
    mean, other = model_card.metrics_text(row).splitlines()[2:4]
    bounds = re.search(r"\| METEOR \| 0\.300 \| (.*) to (.*) \| 30 \|", mean).groups()
    assert [*map(float, bounds)] == pytest.approx([0.3 - 1.96 * 0.079, 0.3 + 1.96 * 0.079], abs=0.03)
    assert other.endswith("| exact_match | 0.400 | – | – |")


@pytest.mark.slow
def test_a_second_push_sends_what_is_new_and_removes_old_weights_and_examples(
    served: Hub, run: Path, capsys: pytest.CaptureFixture[str]
):
    assert ans("push", run / "model", REPO, "--yes") == 0
    mine = {"notes.md", "examples/old.png", "lora/adapter_model.safetensors"}
    served.files |= dict.fromkeys(mine, b"mine")
    before = len(served.sends)
    (run / "evaluate/rl/overlays/index.json").write_text("[]")
    model = Sa2VA.from_pretrained(run / "model")
    shutil.rmtree(run / "model")
    checkpoint.save(model, run / "model", metadata={})
    with pytest.raises(
        ValueError, match=r"has no README\.md that would state a licence: give --licence apache-2\.0"
    ):
        ans("push", run / "model", REPO, "--yes")
    assert ans("push", run / "model", REPO, "--yes", "--licence", "mit") == 0
    told = capsys.readouterr().out
    assert "org/model is there, private, and gets a new commit" in told
    assert "removed: model.safetensors.index.json" in told
    assert {name for name in served.files if name.endswith(".safetensors") or "/" in name} | mine == {
        "model.safetensors",
        *mine,
    }
    assert mine <= served.files.keys()
    assert len(served.sends) == before + 2  # weights and card; the tokenizer is there
    assert "the card lacks data: no section of it" in told


@pytest.mark.slow
def test_a_push_that_breaks_off_changes_nothing_and_goes_on(served: Hub, run: Path):
    served.broken_sends = 1
    with pytest.raises(
        hub.HubError, match=r"org/model: Error while uploading .*the same command goes on from there"
    ):
        ans("push", run / "model", REPO, "--yes")
    assert served.files == {}
    already = len(served.sends)
    assert ans("push", run / "model", REPO, "--yes") == 0
    assert len(set(served.sends)) == len(served.sends) > already


@pytest.mark.slow
def test_without_a_token_that_may_write_nothing_is_sent(
    served: Hub, run: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("HF_TOKEN", "hf_other")
    with pytest.raises(
        hub.HubError, match=r"answers 401: `hf auth login` \(or set HF_TOKEN\) with a token that may do this"
    ):
        ans("push", run / "model", REPO, "--yes")
    with pytest.raises(hub.HubError, match="are to be sent and nobody is there to ask; add --yes"):
        ans("push", run / "model", REPO)


@pytest.mark.slow
def test_what_is_no_checkpoint_or_no_repository_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(ValueError, match="'a b' is no repository: write OWNER/NAME"):
        ans("push", run / "model", "a b", "--dry-run")
    with pytest.raises(ValueError, match=r"has no evaluate/<untrained\|base\|sft\|rl>/metrics\.json"):
        ans("push", run / "model", REPO, "--run", tmp_path, "--dry-run")
    (run / "model/README.md").rename(tmp_path / "README.md")
    with pytest.raises(
        ValueError, match=r"model has no README\.md that would state a licence: give --licence apache-2\.0"
    ):
        ans("push", run / "model", REPO, "--dry-run")
    # as the message says
    assert ans("push", run / "model", REPO, "--dry-run", "--licence", "apache-2.0") == 0
    (tmp_path / "README.md").rename(run / "model/README.md")
    shard = next((run / "model").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    with pytest.raises(ValueError, match="is damaged, or was edited"):
        ans("push", run / "model", REPO, "--dry-run")
    shard.unlink()
    with pytest.raises(ValueError, match="is missing"):
        ans("push", run / "model", REPO, "--dry-run")


@pytest.mark.slow
def test_a_folder_in_upstreams_layout_comes_back_as_upstream_reads_it(
    served: Hub, run: Path, tmp_path: Path, tiny_model: Network
):
    conversion.convert(run / "model", tmp_path / "up", to="upstream", metadata={})
    assert ans("push", tmp_path / "up", REPO, "--yes", "--run", run, "--licence", "apache-2.0") == 0
    assert "without its code files" in served.files["README.md"].decode()
    (tmp_path / "up/modeling_sa2va_chat.py").write_text("# upstream's\n")
    parcel = push.parcel(tmp_path / "up", REPO, run=run, licence="mit")
    assert "modeling_sa2va_chat.py" in parcel.contents
    assert "trust_remote_code=True" in parcel.card.text
    assert ans("pull", REPO, tmp_path / "got", "--yes") == 0
    assert conversion.account(tmp_path / "got").kind == "upstream"
    values = json.loads((tmp_path / "got/config.json").read_text())
    assert values["auto_map"]["AutoModel"] == "modeling_sa2va_chat.Sa2VAChatModel"
    state = Sa2VA.from_pretrained(tmp_path / "got").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in tiny_model.state_dict().items())


@pytest.mark.slow
@needs_golden
@pytest.mark.parametrize("to", ["native", "upstream"])
def test_a_release_with_files_that_are_not_sent_or_not_read_comes_back_from_the_hub(
    served: Hub, tmp_path: Path, to: Literal["native", "upstream"]
):
    release, folder = tmp_path / "release", tmp_path / "model"
    shutil.copytree(GOLDEN / "qwen2_5_vl", release)  # with chat_template.jinja and *.npz
    release.chmod(0o755)
    for name in (".gitattributes", "modeling_sa2va_qwen.py", "LICENSE"):
        (release / name).write_text("# upstream's\n")
    conversion.convert(release, folder, to=to, metadata={})
    assert ans("push", folder, REPO, "--yes", "--licence", "mit") == 0
    manifest = json.loads(served.files["manifest.json"])
    assert {*manifest["sha256"], "README.md", "manifest.json"} == served.files.keys()
    assert ans("pull", REPO, tmp_path / "got", "--yes") == 0
    state = Sa2VA.from_pretrained(REPO).state_dict()
    assert all(
        torch.equal(tensor, state[name])
        for name, tensor in Sa2VA.from_pretrained(folder).state_dict().items()
    )


@pytest.mark.slow
def test_a_pull_removes_what_an_earlier_one_fetched_and_the_repository_no_longer_has(
    served: Hub, tmp_path: Path, tiny_model: Network, capsys: pytest.CaptureFixture[str]
):
    def pulled(max_shard: str) -> list[str]:
        checkpoint.save(model, tmp_path / "model", max_shard=max_shard, metadata={})
        assert ans("push", tmp_path / "model", REPO, "--yes", "--licence", "mit") == 0
        assert ans("pull", REPO, tmp_path / "got", "--yes") == 0
        return [name for name in served.files if name.endswith(".safetensors")]

    model = copy.deepcopy(tiny_model)
    assert len(pulled("3MB")) > 1
    (tmp_path / "got/notes.md").write_text("mine")
    with torch.no_grad():
        model.text_hidden_fcs[0].bias.add_(1)
    assert pulled("1GB") == ["model.safetensors"]
    assert "removed: model.safetensors.index.json, which an earlier pull fetched" in capsys.readouterr().out
    assert {path.name for path in (tmp_path / "got").iterdir()} == {
        *served.files, "notes.md", ".partial", hub.VERIFIED
    }  # fmt: skip
    state = Sa2VA.from_pretrained(tmp_path / "got").state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


def test_a_push_replaces_weights_beside_the_card_and_the_examples_on_it(served: Hub):
    card = "# model\n![right](examples/a_0001.png)\n![mine](examples/mine.png)\n"
    replaced = ["examples/a_0001.png", "model-00001.safetensors", "model.safetensors.index.json"]
    others = ["examples/b_0001.png", "examples/mine.png", "lora/adapter_model.safetensors", "notes.md"]
    served.files |= {"README.md": card.encode(), **dict.fromkeys([*replaced, *others], b"")}
    served.exists = True
    sent = push.Parcel(
        repo=REPO, layout="native", contents={"README.md": b"", "model.safetensors": b""}, left_out=(),
        card=model_card.Card(text="", pictures={}, licence="mit", lacking=()),
    )  # fmt: skip
    assert push.on_the_hub(REPO, sent)[1] == replaced
