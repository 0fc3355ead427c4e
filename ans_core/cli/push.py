"""`ans push`: a checkpoint to the hub."""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument("checkpoint", metavar="CHECKPOINT", help="a model folder in our layout or upstream's")
    it.add_argument("repo", metavar="REPO", help="OWNER/NAME; it is made if it is not there")
    it.add_argument(
        "--run",
        metavar="FOLDER",
        help="runs/<profile> whose metrics and examples go on the card (default: around CHECKPOINT)",
    )
    it.add_argument(
        "--licence", metavar="ID", help="the hub's name of it, as apache-2.0 (default: what README.md states)"
    )
    it.add_argument(
        "--public", action="store_true", help="a repository that is made is public (default: private)"
    )
    it.add_argument(
        "--dry-run", action="store_true", help="only show files, sizes and card; asks the hub nothing"
    )
    it.add_argument("--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    """A checkpoint folder to a repository on the Hugging Face hub, with a model card: data, settings,
    metrics, licence, examples."""
    from ans_core.hub.push import push as send

    run_folder = Path(arguments.run) if arguments.run else None
    how = {
        "licence": arguments.licence,
        "public": arguments.public,
        "dry_run": arguments.dry_run,
        "yes": arguments.yes,
    }
    return send(Path(arguments.checkpoint), arguments.repo, run=run_folder, **how)
