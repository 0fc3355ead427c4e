import argparse
import copy
import getpass
import io
import json
import os
import pwd
import re
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from importlib import metadata
from importlib.metadata import version
from pathlib import Path
from typing import NoReturn, get_args

import pytest
import torch

from ans_core.checkpoints import checkpoint
from ans_core.checkpoints import folder as folders
from ans_core.cli import convert
from ans_core.model.config import VideoMode
from ans_core.model.network import Network
from ans_core.stages import evaluate
from flows import checkpoint_eval, cli, commands, doctor, dvc_state, paths
from flows.params import write
from tasks import tracking
from tests.workspace import environment, tiny_params

ROOT = Path(__file__).resolve().parents[2]


def ans(*words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "flows.cli", *words]
    return subprocess.run(
        command, cwd=ROOT, env=environment(ROOT, **extra), capture_output=True, text=True, check=False
    )


def test_help_loads_nothing_heavy() -> None:
    shown = ans("--help")
    for command in (
        "run",
        "stage",
        "profile",
        "predict",
        "track",
        "convert",
        "eval",
        "data",
        "doctor",
        "compare",
    ):
        assert f"    {command} " in shown.stdout or f"    {command}\n" in shown.stdout
    loaded = "import sys, flows.cli; flows.cli.parser(); print({'torch', 'prefect', 'mlflow', 'dvc', 'pydantic'} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", loaded], cwd=ROOT, text=True) == "set()\n"


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.parse(["--version"])
    assert capsys.readouterr().out == f"ans {metadata.version('ans')}\n"


def test_an_unknown_profile_is_one_line_not_a_traceback() -> None:
    done = ans("profile", "tinny")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("ans: no profile named 'tinny' (did you mean 'tiny'?)")


@pytest.mark.parametrize(
    "words", [("predict", "none.jpg", "a dog"), ("track", "none.mp4"), ("finetune", "none", "--model", ".")]
)
def test_what_is_not_there_is_told_before_the_models_imports(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "flows.cli", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 2
    assert f"ans: {words[1]} does not exist; give " in done.stderr
    assert not re.search(r"\| +torch$", done.stderr, re.MULTILINE)


@pytest.mark.parametrize("command", ["predict clip.mp4 question", "eval mevis"])
def test_a_command_knows_every_video_mode(command: str) -> None:
    """They are written out there, since help loads nothing heavy."""
    for mode in ("auto", *get_args(VideoMode)):
        assert cli.parse([*command.split(), "--video-mode", mode]).video_mode == mode


@pytest.mark.parametrize(
    "words", ["tiny a=1 b=2 --force", "--force tiny a=1 b=2", "tiny --force a=1 b=2", "tiny a=1 --force b=2"]
)
def test_options_stand_anywhere_among_a_profiles_settings(words: str) -> None:
    arguments = cli.parse(["profile", *words.split()])
    assert (arguments.name, arguments.settings, arguments.force) == ("tiny", ["a=1", "b=2"], True)


def test_a_runs_settings_stand_before_or_after_its_options() -> None:
    arguments = cli.parse(["run", "rl.kl=0.1", "--agent", "seed=1"])
    assert (arguments.settings, arguments.group) == (["rl.kl=0.1", "seed=1"], "agent")


def test_a_profile_is_shown_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ROOT / "profiles", tmp_path / "profiles")
    monkeypatch.setattr(commands, "root", lambda: tmp_path)
    arguments = cli.parse(["profile", "smoke", "rl.kl=0.5", "--show"])
    assert arguments.function(arguments) == 0
    shown = capsys.readouterr().out
    assert not (tmp_path / "params.yaml").exists()
    write("smoke", tmp_path, ("rl.kl=0.5",))
    assert shown == (tmp_path / "params.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "named"),
    [
        ("profile tiny --forse a=1", "--forse"),
        ("profile --forse tiny a=1", "--forse"),
        ("profile tiny --force a=1 --sett b=2", "--sett"),
        ("stage sft --force rl", "rl"),
        ("doctor --look-only now", "now"),
    ],
)
def test_words_that_no_command_knows_are_named(
    capsys: pytest.CaptureFixture[str], words: str, named: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        cli.parse(words.split())
    assert capsys.readouterr().err.endswith(f"ans: error: unrecognized arguments: {named}\n")


def test_what_is_wrong_with_the_input_is_one_line() -> None:
    done = ans("convert", "somewhere")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "ans: ans convert SRC DST: DST is missing (--check SRC alone looks at a folder)\n"
    assert "Traceback" in ans("convert", "somewhere", ANS_TRACEBACK="1").stderr


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_output_that_nobody_reads_any_more_ends_the_command_quietly(unbuffered: str) -> None:
    known = environment(ROOT, PYTHONUNBUFFERED=unbuffered)
    with subprocess.Popen([sys.executable, "-c", "pass"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = subprocess.run(
            [sys.executable, "-m", "flows.cli", "tools"],
            cwd=ROOT,
            env=known,
            stdout=reader.stdin,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.slow
def test_output_that_cannot_be_written_is_one_line() -> None:
    command = [sys.executable, "-m", "flows.cli", "tools"]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(ROOT),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (
        2,
        "ans: [Errno 28] No space left on device; free space there, and give the same command again\n",
    )


def test_another_broken_pipe_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fails(arguments: argparse.Namespace) -> int:
        raise BrokenPipeError(32, "Broken pipe")

    monkeypatch.setattr(commands, "status", fails)
    monkeypatch.setattr(cli, "environment", dict)
    monkeypatch.setattr(sys, "argv", ["ans", "status"])
    with pytest.raises(SystemExit, match="2"):
        cli.main()
    assert capfd.readouterr().err == "ans: [Errno 32] Broken pipe\n"


def test_a_containers_user_without_a_name_gets_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_name(uid: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    for name in ("LOGNAME", "USER", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", no_name)
    monkeypatch.setattr(os, "environ", paths.environment())
    assert getpass.getuser() == str(os.getuid())


def test_a_letter_that_the_terminal_lacks_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    def shows(arguments: argparse.Namespace) -> int:
        print("gIoU .81 ± .02")
        return 0

    terminal = io.BytesIO()
    monkeypatch.setattr(commands, "status", shows)
    monkeypatch.setattr(cli, "environment", dict)
    monkeypatch.setattr(sys, "argv", ["ans", "status"])
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(terminal, encoding="ascii"))
    with pytest.raises(SystemExit, match="0"):
        cli.main()
    assert terminal.getvalue() == b"gIoU .81 ? .02\n"


def test_converting_nonsense_says_what_to_give(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    state = tmp_path / "iter.pth"
    state.touch()
    for words, said in (
        (["--check", str(tmp_path)], "model_type 'bert'"),
        ([str(state), str(tmp_path / "out")], "needs --internvl and --sam2"),
        (["--check", str(state)], "needs --internvl and --sam2"),
        (
            [str(state), str(tmp_path / "out"), "--internvl", "i", "--sam2", "s", "--to", "upstream"],
            "becomes our layout first",
        ),
        (
            [str(tmp_path / "absent"), str(tmp_path / "out")],
            "no folder .*absent.*; give a local folder or a hub id",
        ),
    ):
        arguments = cli.parser().parse_args(["convert", *words])
        with pytest.raises(ValueError, match=said):
            arguments.function(arguments)


def test_a_conversion_takes_nothing_away(tmp_path: Path) -> None:
    """Whatever is converted: the target is looked at before anything is read."""
    (tmp_path / "models/precious").mkdir(parents=True)
    (tmp_path / "iter.pth").touch()
    for words in (
        [str(tmp_path)],
        [str(tmp_path / "iter.pth"), "--internvl", "i", "--sam2", "s"],
        [str(tmp_path), "--to", "adapter"],
    ):
        arguments = cli.parser().parse_args(["convert", words[0], str(tmp_path / "models"), *words[1:]])
        with pytest.raises(ValueError, match="models holds precious"):
            arguments.function(arguments)
    assert (tmp_path / "models/precious").is_dir()


def test_the_sam2_of_a_model_is_written_for_other_programs_but_not_over_files_of_others(
    tmp_path: Path, own_model: Network, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its memories are too narrow for transformers: a folder that an earlier conversion left there goes."""
    checkpoint.save(own_model, tmp_path / "model", metadata={})
    arguments = cli.parse(["convert", str(tmp_path / "model"), str(tmp_path / "out"), "--to", "sam2"])
    (tmp_path / "out/transformers").mkdir(parents=True)
    written = {"stage": "convert", "source": str(tmp_path / "model")}
    folders.write_manifest(tmp_path / "out/transformers", written)
    for _ in range(2):
        assert arguments.function(arguments) == 0
        assert [path.name for path in (tmp_path / "out").iterdir()] == ["sam2"]
    assert {"sam2.pt", "sam2.yaml"} < {path.name for path in (tmp_path / "out/sam2").iterdir()}
    told = capsys.readouterr().out
    assert (
        "nothing for transformers: its Sam2VideoModel has memories of width 64 only, this SAM2's have 16"
        in told
    )
    assert "its mask decoder may be trained for [SEG]: SRC keeps none from before" in told
    (tmp_path / "out/sam2/precious").touch()
    with pytest.raises(ValueError, match="sam2 holds precious, which no earlier conversion wrote"):
        arguments.function(arguments)
    with pytest.raises(
        ValueError, match=r"model/config\.json is a file, and a folder is to be written there"
    ):
        convert.run(
            argparse.Namespace(**vars(arguments) | {"target": str(tmp_path / "model/config.json/out")})
        )


def test_an_error_in_one_check_of_doctor_leaves_the_others_and_becomes_a_finding() -> None:
    def fails() -> list[doctor.Finding]:
        raise ValueError("x is broken: mend x")

    def odd() -> doctor.Finding:
        raise KeyError("y")

    def closed() -> doctor.Finding:
        raise PermissionError("z")

    broken, other, foreign = (doctor.look(check)[0] for check in (fails, odd, closed))
    assert (broken.ok, broken.what, broken.remedy) == (False, "x is broken", "mend x")
    assert (other.what, other.remedy) == ("KeyError: 'y'", "`ANS_TRACEBACK=1 ans doctor` shows where")
    assert "clone of your own" in foreign.remedy
    assert doctor.look(lambda: doctor.fine("there")) == [doctor.fine("there")]


def test_a_lock_file_that_was_cut_is_a_fault_with_its_remedy(tmp_path: Path) -> None:
    (tmp_path / "dvc.lock").write_text("schema: '2.0'\nstages: {}\n")
    assert doctor.look(lambda: doctor.lock_files(tmp_path))[0].ok
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent/dvc.lock").touch()
    (finding,) = doctor.look(lambda: doctor.lock_files(tmp_path))
    assert (finding.ok, finding.what) == (
        False,
        f"{tmp_path}/agent/dvc.lock is empty or cut, it lists no stages",
    )
    assert f"`git checkout {tmp_path}/agent/dvc.lock`" in finding.remedy


@pytest.mark.slow
@pytest.mark.parametrize("remedy", ["dvc config core.no_scm true", "git init"])
def test_a_checkout_without_git_is_told_what_to_do_and_that_works(tmp_path: Path, remedy: str) -> None:
    (tmp_path / ".dvc").mkdir()
    (tmp_path / ".dvc/config").touch()
    (tmp_path / "dvc.yaml").write_text("stages:\n  a: {cmd: 'true'}\n  code: {cmd: 'true'}\n")
    (finding,) = doctor.look(lambda: doctor.repository(tmp_path))
    assert not finding.ok
    assert f"`{remedy}`" in finding.remedy
    with pytest.raises(ValueError, match=r"no git repository in .*core\.no_scm"):  # `ans run`
        dvc_state.are_up_to_date(["a"], tmp_path)
    words = [sys.executable, "-m", *remedy.split()] if remedy.startswith("dvc") else remedy.split()
    subprocess.run(words, cwd=tmp_path, check=True, capture_output=True)
    assert doctor.look(lambda: doctor.repository(tmp_path))[0].ok
    assert dvc_state.are_up_to_date(["a"], tmp_path) is False


@pytest.mark.slow
def test_a_history_of_runs_of_another_mlflow_is_told_and_a_new_one_is_begun_where_it_is_moved_away(
    tmp_path: Path,
) -> None:
    made, file = tmp_path / "made", tmp_path / ".ans/mlflow.db"
    made.mkdir()
    file.parent.mkdir()
    tracking.client(made).search_experiments()
    shutil.copy(made / ".ans/mlflow.db", file)  # at a place that MLflow has not opened in this process
    with closing(sqlite3.connect(file)) as database, database:
        database.execute("update alembic_version set version_num = 'acf3f17fdcc7'")
    (finding,) = doctor.look(lambda: doctor.stuck_runs(tmp_path, repair=False))
    assert not finding.ok
    assert "mlflow.db (Detected out-of-date database schema" in finding.what
    assert finding.remedy.startswith("move it away and a new one is begun")
    file.rename(tmp_path / "old.db")
    assert doctor.look(lambda: doctor.stuck_runs(tmp_path, repair=False))[0].ok


def test_the_installed_versions_are_those_of_the_lock() -> None:
    finding = doctor.locked(ROOT)
    assert finding.ok, finding.what


def test_an_extra_may_pin_another_version_than_the_lock(tmp_path: Path) -> None:
    own = version("pytest")
    (tmp_path / "constraints.txt").write_text("pytest==0.1\n")
    (tmp_path / "requirements").mkdir()
    assert doctor.locked(tmp_path).what == f"not as in constraints.txt: pytest {own} (lock: 0.1)"
    (tmp_path / "requirements/demo.txt").write_text(f"# why\npytest=={own}\n")
    assert doctor.locked(tmp_path).ok


@pytest.mark.slow
def test_eval_never_goes_on_with_the_answers_of_another_model_or_of_other_settings(
    tmp_path: Path, tiny_model: Network, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two checkpoints of one name, then the first with other settings: each has its own scratch, which is
    gone afterwards. What was evaluated already is read."""
    seen: list[Path] = []

    def run(config: object, *, scratch: Path, out: Path, **rest: object) -> dict[str, float]:
        seen.append(scratch)
        (out / "metrics.json").write_text(json.dumps({"count": len(seen)}))
        return {}

    monkeypatch.setattr(evaluate, "run", run)
    monkeypatch.setattr(commands, "root", lambda: tmp_path)
    monkeypatch.setattr(checkpoint_eval, "inputs_md5", lambda *_, **__: {})
    monkeypatch.setattr(checkpoint_eval.Code, "version_of", lambda *_: "")
    text = tiny_params(tmp_path).read_text()
    for name in ("data", "sft", "base"):
        (tmp_path / "runs/tiny" / name).mkdir(parents=True)
    other = copy.deepcopy(tiny_model)
    with torch.no_grad():
        other.text_hidden_fcs[0].bias.add_(1)
    for folder, model in (("one", tiny_model), ("other", other)):
        checkpoint.save(model, tmp_path / folder / "model", metadata={})
        assert commands.of_checkpoint(eval_of(tmp_path / folder)) == 0
    assert commands.of_checkpoint(eval_of(tmp_path / "one")) == 0
    (tmp_path / "params.yaml").write_text(text.replace("loop_samples: ", "loop_samples: 1"))
    assert commands.of_checkpoint(eval_of(tmp_path / "one")) == 0
    assert len(set(seen)) == len(seen) == 3
    assert not any(scratch.exists() for scratch in seen)
    assert re.findall(r"count +(\d)", capsys.readouterr().out) == ["1", "2", "1", "3"]


def eval_of(folder: Path) -> argparse.Namespace:
    return cli.parser().parse_args(["eval", str(folder / "model")])
