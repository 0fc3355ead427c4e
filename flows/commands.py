"""What each `ans` command does: parsed arguments in, an exit status out. Each imports what it needs when it
runs."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path
from typing import Any

from ans_core.cli.options import existing
from flows.paths import environment, root


def run(arguments: argparse.Namespace) -> int:
    """The whole pipeline on params.yaml (of a SAM2 alone: up to its memory); with --agent the pixel-space
    agent's stages, with --online its learning online, and all that they need. Settings and --add-data are for
    this run: params.yaml is as before afterwards."""
    from ans_core.config import resolve, setting
    from flows.kept import print_lines, settle, words_of
    from flows.launch import run_pipeline
    from flows.params import insert_sources

    here = root()
    overrides = dict(setting(word) for word in arguments.settings)
    if arguments.add_data:
        settle(here)
        values = resolve(here / "params.yaml", words_of(overrides))
        folders = [Path(path).resolve() for path in arguments.add_data]
        print_lines(insert_sources(values, folders, arguments.format))
        overrides["prepare.sources"] = values["prepare"]["sources"]
    return run_pipeline(here, group=arguments.group, overrides=overrides)


def stage(arguments: argparse.Namespace) -> int:
    """One stage, if it changed."""
    from flows.kept import print_lines, settle
    from flows.params import watch_sources
    from tasks import code
    from tasks.stages import TABLE

    here = root()
    settle(here)
    target = {made.name: made.target for made in TABLE}.get(arguments.name, arguments.name)
    print_lines(watch_sources(here))
    if arguments.accept_code:
        from flows.dvc_state import accept_code

        print(accept_code(target, here))
        return 0
    command = [
        sys.executable,
        "-m",
        "dvc",
        "repro",
        "--single-item",
        code.NAME,
        target,
        *(["--force"] if arguments.force else []),
    ]
    return subprocess.run(command, cwd=here, env=environment(), check=False).returncode


def nightly(arguments: argparse.Namespace) -> int:
    """Champion against challenger: evaluates the newest registered checkpoint and the best so far, and
    promotes the better one."""
    from flows.launch import exit_if_a_stage_fails, prefect_api

    with exit_if_a_stage_fails(), prefect_api(root()):
        from flows.nightly import nightly_evals

        print("\n".join(nightly_evals().lines()))
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """The pipeline for every combination of settings, as DVC experiments, and one table of their results."""
    from ans_core.config.yaml_file import parse
    from flows.launch import exit_if_a_stage_fails, prefect_api

    grid: dict[str, list[Any]] = {}
    for word in arguments.settings:
        key, _, values = word.partition("=")
        if not values:
            raise ValueError(f"{word!r}: write KEY=VALUE,VALUE as in rl.kl=0.01,0.05")
        grid.setdefault(key, []).extend(parse(value, source=repr(word))[0] for value in values.split(","))
    with exit_if_a_stage_fails(resume=""), prefect_api(root()):
        from flows import sweep as flow

        print(flow.plain_text(Path(flow.sweep(grid=grid, name=arguments.name))))
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """Writes params.yaml."""
    from ans_core.config import PROFILES, resolve
    from flows.kept import FLOW_LOCK, settle
    from flows.params import render, write, write_if_needed
    from tasks.process import holder_of

    here, words = root(), tuple(arguments.settings)
    if arguments.show:
        print(render(resolve(here / PROFILES / f"{arguments.name}.yaml", words), words), end="")
        return 0
    settle(here)
    if arguments.if_needed:
        print(write_if_needed(arguments.name, here))
    else:
        print("wrote", write(arguments.name, here, words, force=arguments.force))
    if holder := holder_of(here / FLOW_LOCK):
        print(
            f"note: {holder} is at work here; if its settings are others now, it stops before its next stage, and "
            "drops the result of a stage that these settings decide",
            file=sys.stderr,
        )
    return 0


def finetune(arguments: argparse.Namespace) -> int:
    """Labelled pictures and a checkpoint in; a fine-tuned checkpoint and a report of before and after out,
    with an estimate first."""
    existing(arguments.folder, "the folder, file or zip with pictures and labels (docs/your-data.md)")
    from flows.finetune import FINETUNE
    from flows.short_training import train

    return train(arguments, FINETUNE)


def of_checkpoint(arguments: argparse.Namespace) -> int:
    """Evaluate a checkpoint on the benchmarks of params.yaml."""
    from ans_core.config import load
    from flows.checkpoint_eval import content_of, evaluated, metrics_of, with_fingerprints

    here, checkpoint = root(), Path(arguments.what).resolve()
    out = evaluated(
        checkpoint, content_of(checkpoint), here, with_fingerprints(load(here / "params.yaml"), here)
    )
    for name, value in sorted(metrics_of(out).items()):
        print(f"{name:<48} {value:.4f}")
    print("predictions and overlays:", out)
    return 0


def rl(arguments: argparse.Namespace) -> int:
    """A Sa2VA and regions with captions in; the model after RL in two loops and a report out, with an
    estimate first."""
    from flows.rl_command import RL
    from flows.short_training import train

    return train(arguments, RL)


def doctor(arguments: argparse.Namespace) -> int:
    """What is wrong with this installation and workspace, and whether this machine can do what params.yaml
    asks for."""
    from flows.doctor import report

    return report(root(), repair=not arguments.look_only, deep=arguments.deep, of_cluster=arguments.cluster)


def compare(arguments: argparse.Namespace) -> int:
    """Two results or more, the first as baseline: settings, metrics with intervals, and a page with the same
    samples side by side."""
    from flows.compare import compare

    compare(arguments, root())
    return 0


def server(arguments: argparse.Namespace) -> int:
    """Prefect server, deployments of prefect.yaml and a worker, until Ctrl-C."""
    from flows.launch import serve

    return serve(root(), port=arguments.port)


def up(arguments: argparse.Namespace) -> int:
    """Prefect server with a worker, and MLflow's page, in the background on this machine; prints their
    addresses."""
    from flows import services

    here = root()
    print(
        "\n".join(
            services.address_lines(services.up(here, port=arguments.port, ui_port=arguments.ui_port), here)
        )
    )
    return 0


def status(arguments: argparse.Namespace) -> int:
    """What is up, what is at work, and what waits to be resumed."""
    from flows import services

    print("\n".join(services.status(root())))
    return 0


def down(arguments: argparse.Namespace) -> int:
    """Ends what `ans up` started."""
    from flows import services

    print("ended:", ", ".join(services.down(root())) or "nothing was up")
    return 0
