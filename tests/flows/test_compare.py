import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from ans_core.config import Config, load
from ans_core.report.changes import Change
from ans_core.report.page import change_table
from flows import cli, commands
from flows.compare import table
from flows.results import result, revision_of
from tests.stages.test_report import write_data, write_evaluation, write_training
from tests.workspace import environment, tiny_params


def cells(text: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split()[1:] for line in text.splitlines()[1:]}


def compared(one: str, other: str, root: Path) -> str:
    return table(result(one, root), result(other, root))


def write(path: Path, values: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(values))
    return str(path)


def with_rows(folder: Path, **rows: object) -> str:
    """Write a run's folder with the metrics of these rows."""
    for row, metrics in rows.items():
        write(folder / "evaluate" / row / "metrics.json", metrics)
    return str(folder)


def test_folders_of_runs_are_compared_by_what_evaluate_wrote(tmp_path: Path):
    one = with_rows(tmp_path / "one", rl={"video/val/J&F": 0.5}, sft={"loss": 1})
    other = with_rows(tmp_path / "other", rl={"video/val/J&F": 0.75})
    shown = cells(compared(one, other, tmp_path))
    assert shown == {"rl/video/val/J&F": ["0.5000", "0.7500", "+0.2500"], "sft/loss": ["1.0000", "-", "-"]}
    with pytest.raises(
        FileNotFoundError, match=r"has no metrics: no evaluate/<untrained.*>/metrics\.json, and no metrics"
    ):
        compared(one, str(tmp_path), tmp_path)
    with pytest.raises(FileNotFoundError, match="is no folder, no git revision and no DVC experiment"):
        result(f"{one}/evaluate/rl/metrics.json", tmp_path)


@pytest.mark.parametrize(
    "before",
    [{"referring/gIoU": 0.5}, {"referring/val/gIoU": 0.5, "referring/val/samples": 3}],
)
def test_a_headline_or_another_split_is_compared_by_names_without_the_split(tmp_path: Path, before: dict):
    one = with_rows(tmp_path / "one", rl=before)
    other = with_rows(tmp_path / "other", rl={"referring/test/gIoU": 0.25, "referring/test/cIoU": 0.5})
    assert cells(compared(one, other, tmp_path)) == {"rl/referring/gIoU": ["0.5000", "0.2500", "-0.2500"]}


def test_metrics_and_changes_that_are_the_same_are_told_in_a_line(tmp_path: Path):
    one = with_rows(
        tmp_path / "one",
        rl={"referring/val/gIoU": 0.5, "referring/val/cIoU": 0.25, "video/val/F": 0.5},
    )
    other = with_rows(
        tmp_path / "other",
        rl={"referring/val/gIoU": 0.50001, "referring/val/cIoU": 0.5, "video/val/J": 0.5},
    )
    *lines, last = compared(one, other, tmp_path).splitlines()
    # others in one alone
    assert list(cells("\n".join(lines))) == ["rl/referring/val/cIoU", "rl/video/val/F", "rl/video/val/J"]
    assert last == "1 of 4 metrics are the same to four digits"
    assert compared(one, one, tmp_path) == "3 of 3 metrics are the same to four digits"
    still, sure, moved = (
        {"before": 0.5, "after": 0.5},
        {"before": 0.5, "after": 0.5001},
        {"before": 0.5, "after": 0.7},
    )
    made = [Change(title="a", metric=str(n), **values) for n, values in enumerate((still, moved))]
    made.append(Change(title="a", metric="2", **sure, interval=(0.00005, 0.0002)))
    told = change_table(made)
    assert [line.split()[:2] for line in told[1:-1]] == [["a,", "1"], ["a,", "2"]]
    assert told[-1] == "  the same: a, 0 0.500"
    assert change_table(made[:1] * 6) == [f"  the same: {'; '.join(['a, 0 0.500'] * 4)}; and 2 more"]


def test_results_without_a_common_metric_are_refused(tmp_path: Path):
    one = with_rows(tmp_path / "one", rl={"a/val/b": 1})
    other = with_rows(tmp_path / "other", sft={"a/val/b": 1})
    with pytest.raises(ValueError, match=r"no metric in common: rl/a/val/b \.\.\. and sft/a/val/b"):
        compared(one, other, tmp_path)


@pytest.mark.slow
def test_folders_of_runs_get_a_page_with_settings_intervals_the_same_samples_and_curves(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """One is the SFT row of the report's example, the other its RL row: every score but the video's is 0.2
    higher."""
    for name, level, kl in (("one", 2, 0.02), ("two", 3, 0.05)):
        folder = tmp_path / name / "runs/mini"
        write_evaluation(folder / "evaluate/rl", level)
        write_training(folder / "sft", ("loss/text", "loss/same_std"), 10 * level)
        write_data(folder)
        outs = [{"path": "runs/mini/sft", "md5": "0"}]
        stages = {
            "rl": {
                "params": {"params.yaml": {"rl": {"kl": kl, "steps": 4}, "evaluate": {"split": "val"}}},
                "outs": outs,
            }
        }
        (tmp_path / name / "dvc.lock").write_text(yaml.safe_dump({"stages": stages}))
    words = [
        "compare",
        str(tmp_path / "one/runs/mini"),
        str(tmp_path / "two/runs/mini"),
        "--out",
        str(tmp_path / "out"),
    ]
    arguments = cli.parse(words)
    assert arguments.function(arguments) == 0
    told = capsys.readouterr().out
    assert "rl.kl: 0.02 | 0.05" in told
    assert "steps" not in told
    verdicts = dict(re.findall(r"^  (.*? · val, \S+) .* (better|worse|unclear)$", told, re.MULTILINE))
    assert verdicts["Region captions · val, METEOR"] == "better"
    assert verdicts["Video segmentation · val, J&F"] == "unclear"
    page = (tmp_path / "out/page.html").read_text()
    assert page.count("data:image/webp") == 36  # 48 of four benchmarks, of which one has lost its data
    assert "<span>mini <b>0." in page
    assert "<span>mini #2 <b>0." in page
    assert "No pictures of gone" in page
    assert re.findall(r'aria-label="(loss/\w+)', page) == ["loss/text"]
    with pytest.raises(ValueError, match="takes two results or more, not 1"):
        cli.parse(words[:2]).function(cli.parse(words[:2]))


@pytest.mark.slow
def test_checkpoints_are_evaluated_on_the_settings_benchmarks_and_then_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Two of one name, as two checkouts have: the second one scores 0.2 more in everything but videos."""
    for place in ("one", "two"):
        write(tmp_path / place / "runs/mini/model/config.json", {})
    tiny_params(tmp_path)

    def evaluated(checkpoint: Path, content: str, here: Path, config: Config) -> Path:
        assert (here, config) == (tmp_path, load(tmp_path / "params.yaml"))
        out = here / ".ans/eval" / f"model-{content}"
        write_evaluation(out, 2 if "one" in checkpoint.parts else 3)
        return out

    monkeypatch.setattr("flows.checkpoint_eval.evaluated", evaluated)
    monkeypatch.setattr("flows.checkpoint_eval.content_of", lambda path: path.parents[2].name)
    monkeypatch.setattr(commands, "root", lambda: tmp_path)
    arguments = cli.parse(
        ["compare", *(str(tmp_path / place / "runs/mini/model") for place in ("one", "two"))]
    )
    assert arguments.function(arguments) == 0
    told = capsys.readouterr().out
    assert (
        f"mini/model #2: checkpoint {tmp_path / 'two/runs/mini/model'}, evaluated into {tmp_path / '.ans/eval/model-two'}"
        in told
    )
    assert re.search(r"^  Region captions · val, METEOR .* better$", told, re.MULTILINE)
    assert re.search(r"^metric +mini/model +mini/model #2 +difference$", told, re.MULTILINE)
    page = Path(told.split("page: ")[1].strip())
    assert re.fullmatch(r"[\w.-]+", page.parent.name)  # an address with # would end there
    assert "mini/model #2" in page.read_text()


def test_an_experiment_of_dvc_and_a_revision_are_found_by_name(tmp_path: Path):
    git = ["git", "-C", str(tmp_path), "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (
        ["init", "-q"],
        ["commit", "-q", "--allow-empty", "-m", "one"],
        ["update-ref", "refs/exps/ab/cdef/sweep-1", "HEAD"],
    ):
        subprocess.run([*git, *words], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert revision_of("sweep-1", tmp_path) == revision_of("HEAD", tmp_path) == head
    assert revision_of("sweep", tmp_path) is None
    (tmp_path / "runs/mini/evaluate/rl").mkdir(parents=True)
    names = {"runs": "runs", "runs/mini": "mini", "runs/mini/evaluate/rl": "mini/evaluate/rl"}
    assert {path: result(str(tmp_path / path), tmp_path).name for path in names} == names
    found = result("sweep-1", tmp_path)
    assert (found.description, found.evaluated, found.settings) == (f"git {head[:12]}, profile ", {}, {})


SCORE = """
import json, pathlib, yaml

kl = yaml.safe_load(open("params.yaml"))["rl"]["kl"]
row = pathlib.Path("runs/tiny/evaluate/rl")
row.mkdir(parents=True)
scores = [0.5 + kl + (i % 5) / 100 for i in range(40)]
value = {"region_caption/test/METEOR": sum(scores) / 40}
(row / "metrics.json").write_text(json.dumps(value))
record = {"benchmark": "region_caption/test", "dataset": "drawn", "asked": "it"}
lines = [record | {"sample_id": str(i), "score": score, "text": "a circle", "masks": []} for i, score in enumerate(scores)]
(row / "predictions.jsonl").write_text("".join(json.dumps(line) + "\\n" for line in lines))
pathlib.Path("metrics").mkdir(exist_ok=True)
pathlib.Path("metrics/summary.json").write_text(json.dumps({"rl": value}))
"""


@pytest.mark.slow
def test_two_experiments_that_dvc_ran_are_compared_from_its_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """One stage in the place of the pipeline; git, `dvc exp run`, its refs and its cache are real. Every
    score is 0.1 higher."""
    stage = {
        "cmd": "python score.py",
        "deps": ["score.py"],
        "params": ["rl.kl"],
        "outs": ["runs/tiny/evaluate/rl"],
    }
    (tmp_path / "dvc.yaml").write_text(
        yaml.safe_dump({"stages": {"evaluate": stage | {"metrics": ["metrics/summary.json"]}}})
    )
    (tmp_path / "score.py").write_text(SCORE)
    (tmp_path / "profiles").mkdir()
    tiny_params(tmp_path)
    quiet = {"env": environment(tmp_path), "cwd": tmp_path, "check": True, "stdout": subprocess.DEVNULL}
    for words in (["git", "init", "-q"], ["dvc", "init", "-q"], ["git", "add", "-A"],
                  ["git", "-c", "user.name=t", "-c", "user.email=t@t", "commit", "-qm", "start"]):  # fmt: skip
        subprocess.run(words, **quiet)
    for name, kl in (("low", 0.1), ("high", 0.2)):
        subprocess.run(["dvc", "exp", "run", "--name", name, "-S", f"rl.kl={kl}"], **quiet)
    shutil.rmtree(tmp_path / "runs")
    monkeypatch.chdir(tmp_path)
    arguments = cli.parse(["compare", "low", "high", "--out", str(tmp_path / "out")])
    assert arguments.function(arguments) == 0
    told = capsys.readouterr().out
    assert "settings that differ:\n  rl.kl: 0.1 | 0.2\n" in told
    assert "high, rl, against low" in told
    assert re.search(r"Region captions · test, METEOR +0\.620 +0\.720 +\+0\.100 .* better", told)
    assert cells(told[told.index("\nmetric ") + 1 : told.index("\n\npage:")])[
        "rl/region_caption/test/METEOR"
    ] == [
        "0.6200",
        "0.7200",
        "+0.1000",
    ]
    assert "high" in (tmp_path / "out/page.html").read_text()
