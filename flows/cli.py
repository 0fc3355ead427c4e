"""The `ans` command: a command line in, one call into the pipeline or the model out. Each command imports what it needs."""

from __future__ import annotations

import argparse
import atexit
import gc
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from flows import agent_command, eval_command
from flows.paths import environment, root

USER_ERROR = 2


def run(arguments: argparse.Namespace) -> int:
    """The whole pipeline on params.yaml; with --agent the pixel-space agent's stages, with --online its learning online, and all that they
    need."""
    from flows.launch import run_pipeline
    from flows.params import add_sources

    here = root()
    for line in add_sources([Path(path).resolve() for path in arguments.add_data or ()], arguments.format, here):
        print(line)
    return run_pipeline(here, group=arguments.group)


def stage(arguments: argparse.Namespace) -> int:
    """One stage, if it changed."""
    from tasks.stages import TABLE

    target = {made.name: made.target for made in TABLE}.get(arguments.name, arguments.name)
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", target, *(["--force"] if arguments.force else [])]
    return subprocess.run(command, cwd=root(), env=environment(), check=False).returncode


def nightly(arguments: argparse.Namespace) -> int:
    """Champion against challenger: evaluates the newest registered checkpoint and the best so far, and promotes the better one."""
    from flows.launch import prefect_api

    here = root()
    with prefect_api(here):
        from flows.nightly import nightly_evals

        print(f"nightly-evals: {nightly_evals()}")
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """The pipeline for every combination of settings, as DVC experiments, and one table of their results."""
    from ans_core.config.yaml_file import parse
    from flows.launch import prefect_api

    grid = {}
    for word in arguments.settings:
        key, _, values = word.partition("=")
        if not values:
            raise ValueError(f"{word!r}: write KEY=VALUE,VALUE as in rl.kl=0.01,0.05")
        grid[key] = [parse(value, source=repr(word))[0] for value in values.split(",")]
    with prefect_api(root()):
        from flows import sweep as flow

        print(Path(flow.sweep(grid=grid, name=arguments.name)).read_text(encoding="utf-8"))
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """Writes params.yaml."""
    from flows.params import write, write_if_needed

    if arguments.if_needed:
        print(write_if_needed(arguments.name, root()))
    else:
        print("wrote", write(arguments.name, root(), tuple(arguments.settings), force=arguments.force))
    return 0


def finetune(arguments: argparse.Namespace) -> int:
    """Labelled pictures and a checkpoint in; a fine-tuned checkpoint and a report of before and after out, with an estimate first."""
    from flows.finetune import finetune as run_it

    return run_it(arguments)


def newest_model() -> Path:
    from ans_core.config import load

    return root() / "runs" / load(root() / "params.yaml").profile / "model"


def predict(arguments: argparse.Namespace) -> int:
    """A picture, a video (file or folder of frames) and a text: prints the answer, writes it with masks (RLE, PNG) and overlays."""
    from flows.answer import write_answer

    source = Path(arguments.source)
    told = write_answer(
        source,
        arguments.text,
        checkpoint=Path(arguments.model or newest_model()),
        out=Path(arguments.out or root() / ".ans/predictions" / source.stem),
        max_tokens=arguments.max_tokens,
        video_mode=arguments.video_mode,
        fps=arguments.fps,
        past=[(question, answer) for question, answer in arguments.past or ()],
        masks=[Path(path) for path in arguments.mask or ()],
        points=arguments.point or (),
        boxes=arguments.box or (),
        device=arguments.device,
        dtype=arguments.dtype,
        quantize=arguments.quantize,
    )
    print(told)
    return 0


def track(arguments: argparse.Namespace) -> int:
    """Objects prompted by points, boxes or masks through a video: writes palette PNGs and an animation."""
    from flows.track import default_checkpoint, write_track

    source = Path(arguments.source)
    told = write_track(
        source,
        arguments.prompts or [],
        checkpoint=arguments.model or default_checkpoint(newest_model()),
        out=Path(arguments.out or root() / ".ans/tracks" / source.stem),
        image_size=arguments.image_size,
        device=arguments.device,
        gif=arguments.gif,
        fps=arguments.fps,
    )
    print(told)
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """A checkpoint folder to our layout or upstream's; a training state of upstream's (.pth), with its bases, to ours."""
    source = Path(arguments.source)
    if not (arguments.check or arguments.target):
        raise ValueError("ans convert SRC DST: DST is missing (--check SRC alone looks at a folder)")
    from ans_core.checkpoints import checkpoint, conversion, folder

    state = conversion.training_file(source) is not None
    if state and not (arguments.internvl and arguments.sam2):
        raise ValueError(f"{source} is a training state: it needs --internvl and --sam2, its bases")
    bases = {"internvl": arguments.internvl, "sam2": arguments.sam2, "template": arguments.template}
    if arguments.check:
        told = conversion.training_account(source, **bases) if state else conversion.account(source)
        print(f"{told.kind}: {told.tensors} tensors, {told.parameters:,} parameters, {', '.join(told.dtypes)}")
        print("\n".join(told.problems) or "every tensor is known, none is missing")
        return bool(told.problems)
    metadata, target = {"stage": "convert", "source": arguments.source}, Path(arguments.target)
    folder.refuse_to_replace(target)
    if arguments.to == "adapter":
        return write_adapter(source, target, arguments.base)
    if state:
        if arguments.to != "native":
            raise ValueError(f"{source} is a training state and becomes our layout first (--to native); from there, --to {arguments.to}")
        model = conversion.from_training_state(source, **bases, alpha_per_rank=arguments.alpha_per_rank)
        checkpoint.save(model, target, max_shard=arguments.max_shard, metadata=metadata)
    else:
        conversion.convert(source, target, to=arguments.to, sam2=arguments.sam2 or "", max_shard=arguments.max_shard, metadata=metadata)
    print("wrote", target)
    if arguments.to != "native" and not list(target.glob("*.py")):
        print("for upstream's own classes, put the *.py files of a release of the same text model beside the weights")
    return 0


def write_adapter(source: Path, target: Path, base: str | None) -> int:
    """Write an adapter from a stage's output; the outputs of the stages before it must lie beside it."""
    from ans_core.checkpoints import adapter, checkpoint

    if not (source / checkpoint.DELTA).exists():
        raise ValueError(f"{source} holds no {checkpoint.DELTA}: an adapter is made of what SFT or RL trained (runs/<profile>/sft or rl)")
    stage = json.loads((source / checkpoint.DELTA).read_text())["config"]["stage"]
    sft = source.parent / "sft" if stage == "rl" else None
    start = Path(base) if base else source.parent / "base/base"
    adapter.write_adapter(source, target, base=start, sft=sft)
    print(f"wrote {target}, for PeftModel.from_pretrained(Sa2VA.from_pretrained({str(start)!r}), {str(target)!r})")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Public benchmarks: a model run on one, a predictions file scored, two results compared, a server's file written. Or the benchmarks of
    params.yaml on a checkpoint."""
    if eval_command.form(arguments) != "CHECKPOINT":
        return eval_command.run(arguments)
    from ans_core.checkpoints.checkpoint import weights_hash
    from ans_core.config import load
    from flows.checkpoint_eval import METRICS, evaluated

    here, checkpoint = root(), Path(arguments.what).resolve()
    out = evaluated(checkpoint, weights_hash(checkpoint), here, load(here / "params.yaml"))
    for name, value in sorted(json.loads((out / METRICS).read_text(encoding="utf-8")).items()):
        print(f"{name:<48} {value:.4f}")
    print("predictions and overlays:", out)
    return 0


def data(arguments: argparse.Namespace) -> int:
    """check: reads a data set as training would, and says what is in it and what is wrong. show: draws samples with their masks. import:
    makes a folder with annotations.json of an export of COCO, CVAT, Label Studio or upstream's file. fetch: downloads published sets by
    name; without a name, lists them."""
    if arguments.action == "fetch":
        from flows.catalogue import DATA
        from flows.fetch import fetch

        return fetch(arguments.path, DATA, root=root(), into=arguments.into, yes=arguments.yes)
    if len(arguments.path) != 1:
        raise ValueError(f"ans data {arguments.action}: give one data set, its name or its path")
    (arguments.path,) = arguments.path
    if arguments.action == "import":
        from ans_core.data.exports import import_export

        source = Path(arguments.path)
        print("\n".join(import_export(source, Path(arguments.out or root() / "data" / source.stem), form=arguments.format)))
        return 0
    if arguments.format == "traces":  # the agent's, which are no samples
        from ans_core.agent.world.trace_file import mix, read_traces

        traces = read_traces(Path(arguments.path))
        shares = ", ".join(f"{kind} {share:.2f}" for kind, share in mix(traces).items())
        print(f"{arguments.path}: {len(traces)} traces ({shares}), no fault found")
        return 0
    from flows.data_check import check, named

    name, path, form = named(arguments.path, arguments.format, root())
    folder = root() / ".ans/data" / name
    if arguments.action == "show":
        from flows.data_show import show

        out = Path(arguments.out or folder / "samples")
        written = show(name, path, form, arguments.split, count=arguments.count, seed=arguments.seed, out=out)
        print(f"wrote {len(written)} pictures and samples.jsonl to {out}")
        return 0
    page = Path(arguments.out or folder) / "report.html"
    return check(name, path, form, arguments.split, pixels=not arguments.headers_only, page=page)


def weights(arguments: argparse.Namespace) -> int:
    """Downloads published bases and releases by name; without a name, lists them."""
    from flows.catalogue import WEIGHTS
    from flows.fetch import fetch

    return fetch(arguments.names, WEIGHTS, root=root(), into=arguments.into, yes=arguments.yes)


def push(arguments: argparse.Namespace) -> int:
    """A checkpoint folder to a repository on the Hugging Face hub, with a model card: data, settings, metrics, licence, examples."""
    from flows.push import push as send

    run_folder = Path(arguments.run) if arguments.run else None
    how = {"licence": arguments.licence, "public": arguments.public, "dry_run": arguments.dry_run, "yes": arguments.yes}
    return send(Path(arguments.checkpoint), arguments.repo, run=run_folder, **how)


def pull(arguments: argparse.Namespace) -> int:
    """A model repository of the Hugging Face hub to a folder: goes on where it was cut off, compares checksums, checks every tensor."""
    from flows.push import pull as fetch_model

    return fetch_model(arguments.repo, Path(arguments.target), yes=arguments.yes)


def doctor(arguments: argparse.Namespace) -> int:
    """What is wrong with this installation and workspace, and whether this machine can do what params.yaml asks for."""
    from flows.doctor import report

    return report(root(), repair=not arguments.look_only, deep=arguments.deep)


def compare(arguments: argparse.Namespace) -> int:
    """Two results or more, the first as baseline: settings, metrics with intervals, and a page with the same samples side by side."""
    from flows.compare import compare

    compare(arguments, root())
    return 0


def demo(arguments: argparse.Namespace) -> int:
    """A page in the browser: ask a checkpoint about pictures and clips. On this machine alone, unless --host says otherwise."""
    from flows.demo.serve import serve

    model = arguments.model or str(newest_model())
    return serve(model, arguments.against or [], host=arguments.host, port=arguments.port, auth=arguments.auth, device=arguments.device)


def tools(arguments: argparse.Namespace) -> int:
    """The agent's visual operations: lists them, or runs one on a picture or a clip and writes what it shows."""
    from flows.tools import list_operations, run_operation

    print(run_operation(arguments, out=root() / ".ans/tools", newest_model=newest_model) if arguments.name else list_operations())
    return 0


def ask(arguments: argparse.Namespace) -> int:
    """The agent on a picture or a clip: prints its episode turn by turn (call, what came back, answer), and writes what each turn made."""
    from flows.ask import ask as run_it

    return run_it(arguments, root())


def agent(arguments: argparse.Namespace) -> int:
    """Learning online: engine and worker as processes, their store's status, roll-back, export and forgetting (docs/agent.md)."""
    return agent_command.run(arguments)


def server(arguments: argparse.Namespace) -> int:
    """Prefect server, deployments of prefect.yaml and a worker, until Ctrl-C."""
    from flows.launch import serve

    return serve(root(), port=arguments.port)


def up(arguments: argparse.Namespace) -> int:
    """Prefect server with a worker, and MLflow's page, in the background on this machine; prints their addresses."""
    from flows import services

    here = root()
    print("\n".join(services.told(services.up(here, port=arguments.port, ui_port=arguments.ui_port), here)))
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
    commands = top.add_subparsers(metavar="COMMAND", required=True)

    def command(name: str, function: Any) -> argparse.ArgumentParser:
        made = commands.add_parser(name, help=(function.__doc__ or "").strip(), description=function.__doc__)
        made.set_defaults(function=function)
        return made

    it = command("run", run)
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
    it = command("stage", stage)
    it.add_argument("name", help="as in `dvc stage list`: prepare, base, sft, rl, convert, evaluate@sft, report, cota, agent_sft@tools ...")
    it.add_argument("--force", action="store_true", help="also if nothing changed")
    command("nightly", nightly)
    it = command("sweep", sweep)
    it.add_argument("settings", nargs="+", metavar="KEY=VALUE,VALUE", help="every combination is run, as in rl.kl=0.01,0.05 seed=0,1")
    it.add_argument("--name", help="of the experiments, NAME-1, NAME-2 ... (default: with the time)")
    it = command("profile", profile)
    it.add_argument("name", help="a file of profiles/, without .yaml")
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in sft.optim.steps=200")
    it.add_argument("--force", action="store_true", help="drop edits made by hand")
    it.add_argument("--if-needed", action="store_true", help="leave a params.yaml of this profile alone if it has own settings")
    it = command("finetune", finetune)
    it.add_argument("folder", help="of annotations.json, or of another format (docs/your-data.md)")
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in sft.optim.lr=1e-4")
    it.add_argument("--model", required=True, help="checkpoint folder or hub id to start from")
    it.add_argument("--format", help="where the folder does not tell (see `ans data --help`)")
    it.add_argument("--steps", type=eval_command.positive, metavar="N", help="of training (default: every picture about 10 times)")
    it.add_argument("--profile", help="whose settings to use (default: tiny for a model under 100 million parameters, else sa2va-4b)")
    it.add_argument("--out", metavar="FOLDER", help="(default: runs/finetune-<folder>); the same one resumes a killed run")
    it.add_argument("--estimate", action="store_true", help="only measure time and memory")
    it = command("predict", predict)
    it.add_argument("source", metavar="IMAGE|VIDEO", help="a picture, a video file, or a folder with the frames of one")
    it.add_argument("text")
    it.add_argument("--model", help="checkpoint folder (default: runs/<profile>/model)")
    it.add_argument("--max-tokens", type=int, default=64)
    it.add_argument("--out", metavar="FOLDER", help="where to write; an earlier answer there is removed (default: .ans/predictions/<name>)")
    it.add_argument("--video-mode", choices=["auto", "sa2va", "sa2va-i"], default="auto", help="how masks go through a clip: docs/video.md")
    it.add_argument("--fps", type=float, default=8.0, help="of a video's overlay, 0.002 to 100 (default: 8)")
    it.add_argument("--past", nargs=2, action="append", metavar=("QUESTION", "ANSWER"), help="an earlier turn; the first one first")
    it.add_argument("--mask", action="append", metavar="FILE", help="a region to ask about, not black where it is: region1, region2, ...")
    it.add_argument("--point", action="append", metavar="X,Y", help="a region as well: the object that SAM2 finds there, in pixels")
    it.add_argument("--box", action="append", metavar="X0,Y0,X1,Y1", help="and in a box; both count on from the masks' regions")
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    it.add_argument("--dtype", help="of the weights: float32, bfloat16, float16 (default: as they are stored)")
    it.add_argument("--quantize", choices=["int8", "fp8"], help="the language model in 8 bits (torchao, an extra; fp8: a GPU from Ada on)")
    it = command("track", track)
    it.add_argument("source", metavar="VIDEO|FOLDER", help="a video file, or a folder with the frames of one")
    for name, metavar, told in PROMPTS:
        it.add_argument(f"--{name}", dest="prompts", action=Prompt, metavar=metavar, help=told)
    it.add_argument("--model", help="a SAM2 (folder, .pt or hub id) or a Sa2VA folder (default: the profile's)")
    it.add_argument("--image-size", type=int, default=0, help="side of the model's image (default: the checkpoint's)")
    it.add_argument("--out", metavar="FOLDER", help="where to write (default: .ans/tracks/<name>)")
    it.add_argument("--gif", action="store_true", help="a GIF instead of an MP4")
    it.add_argument("--fps", type=float, default=8.0, help="of the animation (default: 8)")
    it.add_argument("--device", default="auto", help="cpu or cuda (default: a GPU if there is one)")
    it = command("convert", convert)
    it.add_argument(
        "source",
        metavar="SRC",
        help="a model folder, ours or upstream's; upstream's training state (.pth, or such a folder); a stage's output",
    )
    it.add_argument("target", metavar="DST", nargs="?")
    it.add_argument("--check", action="store_true", help="only say what SRC is and which tensors are missing, unknown or mis-shaped")
    layouts = ["native", "upstream", "sa2va-i", "adapter"]
    it.add_argument("--to", choices=layouts, default="native", help="layout of DST (default: native, ours); adapter: PEFT's")
    it.add_argument("--base", help="of an adapter: the model that SFT started from (default: base/base beside SRC)")
    it.add_argument("--max-shard", default="5GB", help="largest weight file (default: 5GB)")
    it.add_argument("--internvl", help="of a training state: the InternVL2.5 it was trained from, folder or hub id")
    it.add_argument(
        "--sam2",
        help="SAM2 (file, folder or hub id): the base of a training state; for a folder, whose mask decoder is added for sa2va-i",
    )
    it.add_argument("--template", default="qwen_chat", choices=["qwen_chat", "internlm2_chat", "phi3_chat"], help="of a training state")
    it.add_argument("--alpha-per-rank", type=float, default=2.0, help="of a training state: LoRA's alpha / r (upstream: 256 / 128)")
    it = command("eval", evaluate)
    eval_command.add_arguments(it)
    it = command("data", data)
    it.add_argument("action", choices=["check", "show", "import", "fetch"])
    it.add_argument(
        "path",
        metavar="NAME|PATH",
        nargs="*",
        help="a data set of params.yaml, or a folder (or file) of annotations; import: an export (zip, folder or file); fetch: names",
    )
    it.add_argument(
        "--format",
        help="a format of ans_core/data/formats (default: by the files in the folder), or traces (docs/agent.md); import: coco, "
        "cvat, label_studio or finetune",
    )
    it.add_argument("--split", help="one split (default: all)")
    it.add_argument("--headers-only", action="store_true", help="check: do not decode the pictures")
    it.add_argument(
        "--out", metavar="FOLDER", help="where pictures go (default: .ans/data/<name>); import: the new folder (default: data/<name>)"
    )
    it.add_argument("--count", type=int, default=16, help="show: samples of each split (default: 16)")
    it.add_argument("--seed", type=int, default=0, help="show: chooses the samples (default: 0)")
    add_fetch_options(it)
    it = command("weights", weights)
    it.add_argument("action", choices=["fetch"])
    it.add_argument("names", nargs="*", metavar="NAME")
    add_fetch_options(it)
    it = command("push", push)
    it.add_argument("checkpoint", metavar="CHECKPOINT", help="a model folder in our layout or upstream's")
    it.add_argument("repo", metavar="REPO", help="OWNER/NAME; it is made if it is not there")
    it.add_argument("--run", metavar="FOLDER", help="runs/<profile> whose metrics and examples go on the card (default: around CHECKPOINT)")
    it.add_argument("--licence", metavar="ID", help="the hub's name of it, as apache-2.0 (default: what README.md states)")
    it.add_argument("--public", action="store_true", help="a repository that is made is public (default: private)")
    it.add_argument("--dry-run", action="store_true", help="only show files, sizes and card; asks the hub nothing")
    it.add_argument("--yes", action="store_true", help="do not ask")
    it = command("pull", pull)
    it.add_argument("repo", metavar="REPO", help="OWNER/NAME")
    it.add_argument("target", metavar="DST", help="folder; the same one goes on after an interruption")
    it.add_argument("--yes", action="store_true", help="do not ask")
    it = command("doctor", doctor)
    it.add_argument("--look-only", action="store_true", help="leave stuck MLflow runs as they are")
    it.add_argument("--deep", action="store_true", help="read every object of DVC's cache, too, and compare it with its hash")
    it = command("compare", compare)
    it.add_argument(
        "names",
        nargs="+",
        metavar="RUN",
        help="a folder (runs/<profile>, one evaluation, or a checkpoint, which is evaluated first), a git revision, a DVC experiment, "
        "an MLflow run id, or a summary.json",
    )
    it.add_argument("--out", type=Path, metavar="FOLDER", help="where the page goes (default: under .ans/compare)")
    it = command("demo", demo)
    it.add_argument("model", nargs="?", metavar="MODEL", help="checkpoint folder or hub id (default: runs/<profile>/model)")
    it.add_argument("--against", action="append", metavar="MODEL", help="a further one to compare with (a run's own are there already)")
    it.add_argument("--port", type=int, default=7860, help="(default: 7860)")
    it.add_argument("--host", default="127.0.0.1", help="another address opens the page to the network and needs --auth")
    it.add_argument("--auth", metavar="USER", help="asks for USER's password, or takes it from ANS_DEMO_PASSWORD")
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    it = command("tools", tools)
    it.add_argument("name", nargs="?", metavar="OPERATION", help="without one, all are listed")
    it.add_argument("source", nargs="?", metavar="IMAGE|VIDEO", help="a picture, a video file, or a folder with the frames of one")
    it.add_argument("settings", nargs="*", metavar="key=value", help="as in bbox_2d=[250,500,500,750] or 'masks=[mask_1]'")
    it.add_argument("--mask", action="append", metavar="PNG", help="becomes mask_1, mask_2, ...: of the picture's size, 0 = outside")
    it.add_argument("--model", help="checkpoint folder, for operations that need one (default: runs/<profile>/model)")
    it.add_argument("--out", metavar="FOLDER", help="where to write (default: .ans/tools/<operation>)")
    it = command("ask", ask)
    it.add_argument("source", metavar="IMAGE|VIDEO", help="a picture, a video file, or a folder with the frames of one")
    it.add_argument("text", metavar="QUESTION")
    it.add_argument("--model", help="folder of the base (default: agent.base of params.yaml, or runs/<profile>/model)")
    it.add_argument("--agent", metavar="FOLDER", help="what agent_sft or rft trained on it (default: of runs/<profile>/agent)")
    it.add_argument("--out", metavar="FOLDER", help="where to write (default: .ans/episodes/<name of the source>)")
    it.add_argument("--device", default="auto", help="cpu, cuda, cuda:1 ... (default: a GPU if there is one)")
    agent_command.add_arguments(command("agent", agent))
    it = command("server", server)
    it.add_argument("--port", type=int, default=4200)
    it = command("up", up)
    it.add_argument("--port", type=int, default=4200, help="of Prefect; another one if it is taken (default: 4200)")
    it.add_argument("--ui-port", type=int, default=5000, help="of MLflow; another one if it is taken (default: 5000)")
    command("status", status)
    command("down", down)
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
    unknown = [word for word in rest if word.startswith("-") or arguments.function not in (profile, tools, finetune)]
    if unknown:
        top.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest:
        arguments.settings += rest
    return arguments


def main() -> None:
    arguments = parse()
    atexit.register(gc.freeze)  # else the interpreter walks through all that was imported as it ends: 0.9 s with MLflow and Prefect
    os.environ.update(environment())
    try:
        sys.exit(arguments.function(arguments))
    except (ValueError, OSError) as error:  # errors in the input; ANS_TRACEBACK=1 shows where they were raised
        if os.environ.get("ANS_TRACEBACK"):
            raise
        print(f"ans: {error}", file=sys.stderr)
        sys.exit(USER_ERROR)
    except KeyboardInterrupt:
        print("\nstopped; the same command resumes", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
