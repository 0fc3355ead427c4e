"""The pipeline's part of the `ans` command: words in, one call into Prefect, DVC and MLflow out."""

from __future__ import annotations

import argparse
from pathlib import Path

from ans_core.cli.main import Command, main, parse, parser
from ans_core.cli.options import positive
from flows import commands
from flows.commands import of_checkpoint
from flows.eval_command import job_words
from flows.eval_command import log_to_mlflow as record
from flows.paths import environment

__all__ = ["add_commands", "environment", "job_words", "main", "of_checkpoint", "parse", "parser", "record"]


def add_commands(command: Command) -> None:
    """Add what needs the checkout."""
    add_pipeline(command)
    add_training(command)
    add_results(command)
    add_services(command)


def add_pipeline(command: Command) -> None:
    it = command("run", commands.run)
    it.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for this run alone, as in rl.kl=0.05")
    it.add_argument(
        "--add-data",
        action="append",
        metavar="PATH",
        help="folder with annotations.json, or of another format: trained on and evaluated too, in this run alone",
    )
    it.add_argument(
        "--format", help="format of --add-data where the folder does not tell (see `ans data --help`)"
    )
    others = it.add_mutually_exclusive_group()
    help_text = "cota, agent_sft, rft, agent_evaluate and agent_report (docs/agent.md)"
    others.add_argument(
        "--agent", dest="group", action="store_const", const="agent", default="main", help=help_text
    )
    help_text = "the stage online: what the agent after rft learns from a simulated stream"
    others.add_argument(
        "--online", dest="group", action="store_const", const="online", default="main", help=help_text
    )
    it = command("stage", commands.stage)
    it.add_argument(
        "name",
        help=(
            "as in `dvc stage list`: prepare, base, sft, rl, convert, evaluate@sft, report, cota, "
            "agent_sft@tools ..."
        ),
    )
    it.add_argument("--force", action="store_true", help="also if nothing changed")
    it.add_argument(
        "--accept-code",
        action="store_true",
        help=(
            "don't run: record that the changed code gives the same result (settings and inputs as they were)"
        ),
    )
    command("nightly", commands.nightly)
    it = command("sweep", commands.sweep)
    it.add_argument(
        "settings",
        nargs="+",
        metavar="KEY=VALUE,VALUE",
        help="every combination is run, as in rl.kl=0.01,0.05 seed=0,1",
    )
    it.add_argument("--name", help="of the experiments, NAME-1, NAME-2 ... (default: with the time)")
    it = command("profile", commands.profile)
    it.add_argument("name", help="a file of profiles/, without .yaml")
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in sft.optim.steps=200")
    it.add_argument("--show", action="store_true", help="print the settings, write nothing")
    it.add_argument("--force", action="store_true", help="drop edits made by hand")
    it.add_argument(
        "--if-needed",
        action="store_true",
        help="leave a params.yaml of this profile alone if it has own settings",
    )


def add_training(command: Command) -> None:
    small = "whose settings to use (default: tiny for a model under 100 million parameters, else"
    it = command("finetune", commands.finetune)
    it.add_argument("folder", help="of annotations.json, or of another format (docs/your-data.md)")
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in sft.optim.lr=1e-4")
    it.add_argument("--model", required=True, help="checkpoint folder or hub id to start from")
    it.add_argument("--format", help="where the folder does not tell (see `ans data --help`)")
    it.add_argument(
        "--steps", type=positive, metavar="N", help="of training (default: every picture about 10 times)"
    )
    it.add_argument("--profile", help=f"{small} sa2va-4b)")
    add_out_and_estimate(it, "runs/finetune-<folder>")
    it = command("rl", commands.rl)
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in rl.kl=0.05")
    it.add_argument("--model", required=True, help="a Sa2VA to start from: folder or hub id")
    it.add_argument(
        "--data",
        required=True,
        action="append",
        metavar="PATH",
        help="regions with captions (docs/your-data.md); several: --data A --data B",
    )
    it.add_argument(
        "--format", help="of all data sets, where their folders do not tell (see `ans data --help`)"
    )
    it.add_argument(
        "--judge",
        metavar="URL",
        help="OpenAI-compatible endpoint that judges captions; judge.model=NAME where it has several",
    )
    it.add_argument(
        "--steps",
        type=positive,
        metavar="N",
        help="of training (default: the profile's, or 3 epochs if fewer)",
    )
    it.add_argument("--profile", help=f"{small} sa2va-4b-rl)")
    add_out_and_estimate(it, "runs/rl-<data>")


def add_out_and_estimate(it: argparse.ArgumentParser, default: str) -> None:
    it.add_argument(
        "--out", metavar="FOLDER", help=f"(default: {default}); the same one resumes a killed run"
    )
    it.add_argument("--estimate", action="store_true", help="only measure time and memory")


def add_results(command: Command) -> None:
    it = command("doctor", commands.doctor)
    it.add_argument("--look-only", action="store_true", help="leave stuck MLflow runs as they are")
    it.add_argument(
        "--deep",
        action="store_true",
        help="read every object of DVC's cache, too, and compare it with its hash",
    )
    it.add_argument(
        "--cluster",
        action="store_true",
        help="launcher, file system, shared servers and cache, too (docs/cluster.md)",
    )
    it = command("compare", commands.compare)
    it.add_argument(
        "names",
        nargs="+",
        metavar="RUN",
        help="a folder (runs/<profile>, one evaluation, or a checkpoint, which is evaluated first), a git revision, or a DVC experiment",
    )
    it.add_argument(
        "--out", type=Path, metavar="FOLDER", help="where the page goes (default: under .ans/compare)"
    )


def add_services(command: Command) -> None:
    it = command("server", commands.server)
    it.add_argument("--port", type=int, default=4200)
    it = command("up", commands.up)
    it.add_argument(
        "--port", type=int, default=4200, help="of Prefect; another one if it is taken (default: 4200)"
    )
    it.add_argument(
        "--ui-port", type=int, default=5000, help="of MLflow; another one if it is taken (default: 5000)"
    )
    command("status", commands.status)
    command("down", commands.down)


if __name__ == "__main__":
    main()
