"""The `ans` command: a command line in, one call into the pipeline or the model out."""

from __future__ import annotations

import argparse
import atexit
import errno
import gc
import os
import select
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from flows import agent_command, commands, eval_command, eval_record
from flows.paths import environment

USER_ERROR = 2
CLOSED_PIPE = 141
"""Exit status of a program that SIGPIPE ends, as the shell shows it."""


PROMPTS = (
    ("point", "X,Y", "a click on an object, in pixels of the video; repeat any of these three for several objects"),
    ("box", "X0,Y0,X1,Y1", "the box around an object"),
    ("mask", "FILE", "an object's mask, not black where it is"),
    ("frame", "N", "the frame of the prompt before it, counted from 0 (default: 0)"),
)


class Prompt(argparse.Action):
    """Collect --point, --box and --mask in their order as (kind, value, frame); --frame belongs to the prompt before it."""

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        given = list(namespace.prompts or [])
        if option != "--frame":
            given.append((str(option).removeprefix("--"), values, 0))
        elif not given or not values.isdecimal():
            parser.error(f"--frame {values}: a whole number, after the prompt of that frame")
        else:
            given[-1] = (*given[-1][:2], int(values))
        namespace.prompts = given


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="ans",
        description="Trains and evaluates pixel-grounded multimodal models: annotations in, a checkpoint and a report out.",
    )
    top.add_argument("--version", action="version", version=f"ans {metadata.version('ans')}")
    subparsers = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function: Any) -> argparse.ArgumentParser:
        made = subparsers.add_parser(name, help=(function.__doc__ or "").strip(), description=function.__doc__)
        made.set_defaults(function=function)
        return made

    it = command("run", commands.run)
    it.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="for this run alone, as in rl.kl=0.05")
    it.add_argument(
        "--add-data",
        action="append",
        metavar="PATH",
        help="folder with annotations.json, or of another format: trained on and evaluated too",
    )
    it.add_argument("--format", help="format of --add-data where the folder does not tell (see `ans data --help`)")
    others = it.add_mutually_exclusive_group()
    told = "cota, agent_sft, rft, agent_evaluate and agent_report (docs/agent.md)"
    others.add_argument("--agent", dest="group", action="store_const", const="agent", default="main", help=told)
    told = "the stage online: what the agent after rft learns from a simulated stream"
    others.add_argument("--online", dest="group", action="store_const", const="online", default="main", help=told)
    it = command("stage", commands.stage)
    it.add_argument("name", help="as in `dvc stage list`: prepare, base, sft, rl, convert, evaluate@sft, report, cota, agent_sft@tools ...")
    it.add_argument("--force", action="store_true", help="also if nothing changed")
    it.add_argument(
        "--accept-code",
        action="store_true",
        help="don't run: record that the changed code gives the same result (settings and inputs as they were)",
    )
    command("nightly", commands.nightly)
    it = command("sweep", commands.sweep)
    it.add_argument("settings", nargs="+", metavar="KEY=VALUE,VALUE", help="every combination is run, as in rl.kl=0.01,0.05 seed=0,1")
    it.add_argument("--name", help="of the experiments, NAME-1, NAME-2 ... (default: with the time)")
    it = command("profile", commands.profile)
    it.add_argument("name", help="a file of profiles/, without .yaml")
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in sft.optim.steps=200")
    it.add_argument("--show", action="store_true", help="print the settings, write nothing")
    it.add_argument("--force", action="store_true", help="drop edits made by hand")
    it.add_argument("--if-needed", action="store_true", help="leave a params.yaml of this profile alone if it has own settings")
    it = command("finetune", commands.finetune)
    it.add_argument("folder", help="of annotations.json, or of another format (docs/your-data.md)")
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in sft.optim.lr=1e-4")
    it.add_argument("--model", required=True, help="checkpoint folder or hub id to start from")
    it.add_argument("--format", help="where the folder does not tell (see `ans data --help`)")
    it.add_argument("--steps", type=eval_command.positive, metavar="N", help="of training (default: every picture about 10 times)")
    it.add_argument("--profile", help="whose settings to use (default: tiny for a model under 100 million parameters, else sa2va-4b)")
    it.add_argument("--out", metavar="FOLDER", help="(default: runs/finetune-<folder>); the same one resumes a killed run")
    it.add_argument("--estimate", action="store_true", help="only measure time and memory")
    it = command("predict", commands.predict)
    it.add_argument("source", metavar="IMAGE|VIDEO", help="a picture, a video file, or a folder with the frames of one")
    it.add_argument("text")
    it.add_argument("--model", help="checkpoint folder (default: runs/<profile>/model)")
    it.add_argument("--max-tokens", type=eval_command.positive, default=64)
    it.add_argument("--out", metavar="FOLDER", help="where to write; an earlier answer there is removed (default: .ans/predictions/<name>)")
    it.add_argument(
        "--video-mode", choices=["auto", "sa2va", "sa2va-i", "keyframe"], default="auto", help="how masks go through a clip: docs/video.md"
    )
    it.add_argument("--fps", type=float, default=8.0, help="of a video's overlay, 0.002 to 100 (default: 8)")
    it.add_argument("--past", nargs=2, action="append", metavar=("QUESTION", "ANSWER"), help="an earlier turn; the first one first")
    it.add_argument("--mask", action="append", metavar="FILE", help="a region to ask about, not black where it is: region1, region2, ...")
    it.add_argument("--point", action="append", metavar="X,Y", help="a region as well: the object that SAM2 finds there, in pixels")
    it.add_argument("--box", action="append", metavar="X0,Y0,X1,Y1", help="and in a box; both count on from the masks' regions")
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    it.add_argument("--dtype", help="of the weights: float32, bfloat16, float16 (default: as stored, but not emulated: docs/video.md)")
    it.add_argument("--quantize", choices=["int8", "fp8"], help="the language model in 8 bits (torchao, an extra; fp8: a GPU from Ada on)")
    it = command("track", commands.track)
    it.add_argument("source", metavar="VIDEO|FOLDER", help="a video file, or a folder with the frames of one")
    for name, metavar, told in PROMPTS:
        it.add_argument(f"--{name}", dest="prompts", action=Prompt, metavar=metavar, help=told)
    it.add_argument("--model", help="a SAM2 (folder, .pt or hub id) or a Sa2VA folder (default: the profile's)")
    it.add_argument("--image-size", type=int, default=0, help="side of the model's image (default: the checkpoint's)")
    it.add_argument("--out", metavar="FOLDER", help="where to write (default: .ans/tracks/<name>)")
    it.add_argument("--gif", action="store_true", help="a GIF instead of an MP4")
    it.add_argument("--fps", type=float, default=8.0, help="of the animation (default: 8)")
    it.add_argument("--device", default="auto", help="cpu or cuda (default: a GPU if there is one)")
    it = command("convert", commands.convert)
    it.add_argument(
        "source",
        metavar="SRC",
        help="a model folder, ours or upstream's; upstream's training state (.pth, or such a folder); a stage's output",
    )
    it.add_argument("target", metavar="DST", nargs="?")
    it.add_argument("--check", action="store_true", help="only say what SRC is and which tensors are missing, unknown or mis-shaped")
    layouts = ["native", "upstream", "sa2va-i", "adapter", "sam2"]
    it.add_argument(
        "--to",
        choices=layouts,
        default="native",
        help="layout of DST (default: native, ours); adapter: PEFT's; sam2: SRC's SAM2 for the stock package (DST/sam2) and transformers' "
        "Sam2VideoModel (DST/transformers)",
    )
    it.add_argument(
        "--base", help="of a stage's output, with adapter and sam2: the model that it started from (default: base/base beside SRC)"
    )
    it.add_argument("--max-shard", default="5GB", help="largest weight file (default: 5GB)")
    it.add_argument("--internvl", help="of a training state: the InternVL2.5 it was trained from, folder or hub id")
    it.add_argument(
        "--sam2",
        help="SAM2 (file, folder or hub id): the base of a training state; for a folder, whose mask decoder is added for sa2va-i",
    )
    it.add_argument("--template", default="qwen_chat", choices=["qwen_chat", "internlm2_chat", "phi3_chat"], help="of a training state")
    it.add_argument("--alpha-per-rank", type=float, default=2.0, help="of a training state: LoRA's alpha / r (upstream: 256 / 128)")
    it = command("eval", commands.evaluate)
    eval_command.add_arguments(it)
    it.set_defaults(record=eval_record.log_to_mlflow)
    it = command("data", commands.data)
    it.add_argument("action", choices=["check", "show", "import", "fetch"])
    it.add_argument(
        "path",
        metavar="NAME|PATH",
        nargs="*",
        help="a data set of params.yaml, or a folder (or file) of annotations; import: an export (zip, folder or file); fetch: names",
    )
    it.add_argument(
        "--format",
        help="a format of ans_core/data/formats (default: by the files in the folder), or traces (docs/agent.md); import: a "
        "layout of docs/your-data.md (default: by their content)",
    )
    it.add_argument("--split", help="one split (default: all)")
    it.add_argument("--headers-only", action="store_true", help="check: do not decode the pictures")
    it.add_argument(
        "--out", metavar="FOLDER", help="where pictures go (default: .ans/data/<name>); import: the new folder (default: data/<name>)"
    )
    it.add_argument("--count", type=int, default=16, help="show: samples of each split (default: 16)")
    it.add_argument("--seed", type=int, default=0, help="show: chooses the samples (default: 0)")
    add_fetch_options(it)
    it = command("weights", commands.weights)
    it.add_argument("action", choices=["fetch"])
    it.add_argument("names", nargs="*", metavar="NAME")
    add_fetch_options(it)
    it = command("push", commands.push)
    it.add_argument("checkpoint", metavar="CHECKPOINT", help="a model folder in our layout or upstream's")
    it.add_argument("repo", metavar="REPO", help="OWNER/NAME; it is made if it is not there")
    it.add_argument("--run", metavar="FOLDER", help="runs/<profile> whose metrics and examples go on the card (default: around CHECKPOINT)")
    it.add_argument("--licence", metavar="ID", help="the hub's name of it, as apache-2.0 (default: what README.md states)")
    it.add_argument("--public", action="store_true", help="a repository that is made is public (default: private)")
    it.add_argument("--dry-run", action="store_true", help="only show files, sizes and card; asks the hub nothing")
    it.add_argument("--yes", action="store_true", help="do not ask")
    it = command("pull", commands.pull)
    it.add_argument("repo", metavar="REPO", help="OWNER/NAME")
    it.add_argument("target", metavar="DST", help="folder; the same one goes on after an interruption")
    it.add_argument("--yes", action="store_true", help="do not ask")
    it = command("doctor", commands.doctor)
    it.add_argument("--look-only", action="store_true", help="leave stuck MLflow runs as they are")
    it.add_argument("--deep", action="store_true", help="read every object of DVC's cache, too, and compare it with its hash")
    it = command("compare", commands.compare)
    it.add_argument(
        "names",
        nargs="+",
        metavar="RUN",
        help="a folder (runs/<profile>, one evaluation, or a checkpoint, which is evaluated first), a git revision, a DVC experiment, "
        "an MLflow run id, or a summary.json",
    )
    it.add_argument("--out", type=Path, metavar="FOLDER", help="where the page goes (default: under .ans/compare)")
    it = command("demo", commands.demo)
    it.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint folder or hub id (default: runs/<profile>/model)")
    it.add_argument("--against", action="append", metavar="MODEL", help="a further one to compare with (a run's own are there already)")
    it.add_argument("--port", type=int, default=7860, help="(default: 7860)")
    it.add_argument("--host", default="127.0.0.1", help="another address opens the page to the network and needs --auth")
    it.add_argument("--auth", metavar="USER", help="asks for USER's password, or takes it from ANS_DEMO_PASSWORD")
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    it = command("tools", commands.tools)
    it.add_argument("name", nargs="?", metavar="OPERATION", help="without one, all are listed")
    it.add_argument("source", nargs="?", metavar="IMAGE|VIDEO", help="a picture, a video file, or a folder with the frames of one")
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in bbox_2d=[250,500,500,750] or 'masks=[mask_1]'")
    it.add_argument("--mask", action="append", metavar="PNG", help="becomes mask_1, mask_2, ...: of the picture's size, 0 = outside")
    it.add_argument("--model", help="checkpoint folder, for operations that need one (default: runs/<profile>/model)")
    it.add_argument("--out", metavar="FOLDER", help="where to write (default: .ans/tools/<operation>)")
    it = command("ask", commands.ask)
    it.add_argument("source", metavar="IMAGE|VIDEO", help="a picture, a video file, or a folder with the frames of one")
    it.add_argument("text", metavar="QUESTION")
    it.add_argument("--model", help="folder of the base (default: agent.base of params.yaml)")
    it.add_argument("--agent", metavar="FOLDER", help="what agent_sft or rft trained on it (default: of runs/<profile>/agent)")
    it.add_argument("--out", metavar="FOLDER", help="where to write (default: .ans/episodes/<name of the source>)")
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    agent_command.add_arguments(command("agent", commands.agent))
    it = command("server", commands.server)
    it.add_argument("--port", type=int, default=4200)
    it = command("up", commands.up)
    it.add_argument("--port", type=int, default=4200, help="of Prefect; another one if it is taken (default: 4200)")
    it.add_argument("--ui-port", type=int, default=5000, help="of MLflow; another one if it is taken (default: 5000)")
    command("status", commands.status)
    command("down", commands.down)
    return top


def add_fetch_options(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "--into", metavar="FOLDER", help="of fetch: where each name gets a folder (default: data/ and weights/ as profiles expect)"
    )
    it.add_argument("--yes", action="store_true", help="of fetch: do not ask")


def parse(words: list[str] | None = None) -> argparse.Namespace:
    """argparse leaves words over that follow an option: of `ans profile tiny --force a=b` and `ans tools` they are settings, anything else
    is an error."""
    top = parser()
    arguments, rest = top.parse_known_args(words)
    with_settings = (commands.run, commands.profile, commands.tools, commands.finetune)
    unknown = [word for word in rest if word.startswith("-") or arguments.function not in with_settings]
    if unknown:
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.settings += rest
    return arguments


def main() -> None:
    try:
        try:
            run()
        finally:
            sys.stdout.flush()  # here, where an error is caught, and not as the interpreter ends
    except OSError as error:  # of standard output: run() tells any other
        closed = output_is_closed()
        if os.environ.get("ANS_TRACEBACK") and not closed:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what could not be written
        if not closed:
            print(told(error), file=sys.stderr)
        sys.exit(CLOSED_PIPE if closed else USER_ERROR)


def told(error: Exception) -> str:
    remedies = {  # of what Python says without one
        errno.ENOSPC: "; free space there, and give the same command again",
        errno.EACCES: "; if that is in another user's checkout, work in a clone of your own",
    }
    return f"ans: {error}" + (remedies.get(error.errno or 0, "") if isinstance(error, OSError) else "")


def output_is_closed() -> bool:
    """Whether the program that reads standard output, as `head`, has ended. Any other broken pipe is an error."""
    poll = select.poll()
    poll.register(sys.stdout, 0)
    return any(event & select.POLLERR for _, event in poll.poll(0))


def run() -> None:
    """Run the command of the command line and exit with its status."""
    arguments = parse()
    atexit.register(gc.freeze)  # else the interpreter walks through all that was imported as it ends: 0.9 s with MLflow and Prefect
    os.environ.update(environment())
    try:
        sys.exit(arguments.function(arguments))
    except (ValueError, OSError) as error:  # errors in the input; ANS_TRACEBACK=1 shows where they were raised
        if os.environ.get("ANS_TRACEBACK") or (isinstance(error, BrokenPipeError) and output_is_closed()):
            raise
        print(told(error), file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
