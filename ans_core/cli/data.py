"""`ans data`: data sets checked, shown, imported and fetched."""

from __future__ import annotations

import argparse
import logging
import os
from pathlib import Path

from ans_core.cli.options import add_fetch_options, positive
from ans_core.places import root
from ans_core.processes import run_in

_LABELS = {"format", "split", "out", "count", "seed", "model", "keep", "device", "processes"}
ALLOWED = {
    "check": {"format", "split", "headers_only", "out"},
    "show": {"format", "split", "out", "count", "seed"},
    "questions": {"format", "split", "out", "seed"},
    "caption": _LABELS | {"kl"},
    "draw": _LABELS,
    "shard": {"format", "split"},
    "import": {"format", "out"},
    "fetch": {"into", "yes"},
}
"""Options by action."""


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument("action", choices=list(ALLOWED))
    it.add_argument(
        "path",
        metavar="NAME|PATH",
        nargs="*",
        help=(
            "a data set of params.yaml, or a folder (or file) of annotations; import: an export (zip, "
            "folder or file); fetch: names; shard: a set, and the new folder"
        ),
    )
    it.add_argument(
        "--format",
        help="a format of ans_core/data/formats (default: by the files in the folder), or traces (docs/agent.md); import: a "
        "layout of docs/your-data.md (default: by their content)",
    )
    it.add_argument("--split", help="one split (default: all; questions, caption, draw: train)")
    it.add_argument("--headers-only", action="store_true", help="check: do not decode the pictures")
    it.add_argument(
        "--out",
        metavar="FOLDER",
        help=(
            "where pictures go (default: .ans/data/<name>); import: the new folder (default: data/<name>); "
            "questions, caption, draw: a new folder"
        ),
    )
    it.add_argument(
        "--count",
        type=positive,
        help="show: samples of each split (default: 16); caption, draw: pictures (default: all)",
    )
    it.add_argument(
        "--seed",
        type=int,
        help="show, caption, draw: chooses the samples, draw: and their words; questions: the order of things (default: 0)",
    )
    it.add_argument("--model", help="of caption, draw: a checkpoint folder or hub id")
    it.add_argument(
        "--keep",
        type=float,
        metavar="SHARE",
        help="of the captions, those whose words gained most over the samples'; of the masks, those that the captions fit best "
        "(default: 0.5)",
    )
    it.add_argument(
        "--kl",
        type=float,
        help="caption: IoU that a word must bring for each nat of its log-probability, above 0 (default: 0.05)",
    )
    it.add_argument(
        "--device", help="of caption, draw: cpu, cuda, cuda:1 ... (default: a GPU if there is one)"
    )
    it.add_argument(
        "--processes",
        type=positive,
        metavar="N",
        help="of caption, draw: processes or GPUs that share the work (torchrun; default: 1)",
    )
    add_fetch_options(it)


def run(arguments: argparse.Namespace) -> int:
    """check: reads a data set as training would, and says what is in it and what is wrong. show: draws
    samples with their masks. questions: writes questions about its pictures, and traces of looking, for the
    agent. caption: a model captions masks that have no words. draw: a model draws what captions without masks
    mean. shard: writes its pictures and samples into tar files, for a store. import: makes a folder with
    annotations.json of a labelling tool's export (COCO, CVAT, YOLO, labelme ...). fetch: downloads published
    sets by name; without a name, lists them."""
    logging.basicConfig(format="%(message)s")  # without it: WARNING:root:
    check_options(arguments)
    if arguments.action == "fetch":
        from ans_core.hub.catalogue import DATA
        from ans_core.hub.fetch import fetch

        return fetch(arguments.path, DATA, root=root(), into=arguments.into, yes=arguments.yes)
    shards = arguments.path.pop() if arguments.action == "shard" and arguments.path else ""
    if len(arguments.path) != 1:
        more = " and the folder to make" if arguments.action == "shard" else ""
        raise ValueError(f"ans data {arguments.action}: give one data set, its name or its path{more}")
    (arguments.path,) = arguments.path
    if arguments.action == "import":
        from ans_core.data.exports import import_export

        source = Path(arguments.path)
        print(
            "\n".join(
                import_export(
                    source, Path(arguments.out or root() / "data" / source.stem), form=arguments.format
                )
            )
        )
        return 0
    if arguments.format == "traces":  # the agent's, which are no samples
        return _check_traces(arguments)
    from ans_core.data.check import check, named

    name, path, form = named(arguments.path, arguments.format, root())
    folder = root() / ".ans/data" / name
    if shards:
        from ans_core.data.shard import shard

        print("\n".join(shard(path, form, Path(shards), split=arguments.split)))
        return 0
    if arguments.action == "show":
        from ans_core.data.show import show

        out = Path(arguments.out or folder / "samples")
        written = show(
            name, path, form, arguments.split, count=arguments.count or 16, seed=arguments.seed or 0, out=out
        )
        print(f"wrote {len(written)} pictures and samples.jsonl to {out}")
        return 0
    if arguments.action == "questions":
        from ans_core.agent.questions import questions

        out = Path(arguments.out or folder / "questions")
        print(questions(name, path, form, arguments.split, seed=arguments.seed or 0, out=out))
        return 0
    if arguments.action in ("caption", "draw"):
        return _label(arguments, name, path, form)
    page = Path(arguments.out or folder) / "report.html"
    return check(name, path, form, arguments.split, pixels=not arguments.headers_only, page=page)


def check_options(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an option that the action does not read."""
    options = {option for allowed in ALLOWED.values() for option in allowed}
    given = sorted(option for option in options if getattr(arguments, option) not in (None, False))
    traces = arguments.action == "check" and arguments.format == "traces"
    allowed = {"format", "headers_only"} if traces else ALLOWED[arguments.action]
    if wrong := [option for option in given if option not in allowed]:
        named = ", ".join(f"--{option.replace('_', '-')}" for option in wrong)
        what = f"{arguments.action} --format traces" if traces else arguments.action
        raise ValueError(f"ans data {what} takes no {named}; `ans data --help` says what goes with what")


def _label(arguments: argparse.Namespace, name: str, path: Path, form: str) -> int:
    action, seed = arguments.action, arguments.seed or 0
    if not (arguments.model and arguments.out):
        raise ValueError(f"ans data {action}: give --model, which labels, and --out, the new folder")
    if (arguments.processes or 1) > 1 and "RANK" not in os.environ:
        return run_in(arguments.processes)
    from ans_core import dist
    from ans_core.evaluation.self_labels import Captions, Masks, label
    from ans_core.rl.self_captions import CaptionOptions
    from ans_core.rl.self_masks import MaskOptions

    keep = 0.5 if arguments.keep is None else arguments.keep
    kl = {} if arguments.kl is None else {"kl": arguments.kl}
    captions = Captions(CaptionOptions(seed=seed, **kl))
    labelling = captions if action == "caption" else Masks(MaskOptions(seed=seed))
    with dist.process_group():
        said = label(
            labelling, arguments.model, name, path, form, arguments.split or "train",
            out=Path(arguments.out), count=arguments.count or 0, keep=keep, device=arguments.device,
        )  # fmt: skip
    print(said, end="\n" if said else "")
    return 0


def _check_traces(arguments: argparse.Namespace) -> int:
    from ans_core.agent.world.trace_file import mix, pictures_of, read_traces
    from ans_core.data.pictures import check_decoding
    from ans_core.types import ImageRef, VideoFrames

    if arguments.action != "check":
        raise ValueError(f"ans data {arguments.action} takes no traces; `ans data check` reads them")
    folder = Path(arguments.path)
    traces = read_traces(folder)
    shown: dict[ImageRef | VideoFrames, str] = {
        folder / name: f"trace {trace.trace_id}" for trace in reversed(traces) for name in pictures_of(trace)
    }
    turned = [] if arguments.headers_only else check_decoding(shown, where=str(folder))
    names = [ref.relative_to(folder) for ref in turned if isinstance(ref, Path)]
    shares = ", ".join(f"{kind} {share:.2f}" for kind, share in mix(traces).items())
    print(f"{folder}: {len(traces)} traces ({shares}), no fault found")
    if names:
        print(
            f"{len(names)} pictures have an EXIF tag that turns them (as {names[0]}); boxes are of the "
            "upright pictures"
        )
    return 0
