"""What each `ans` command does: parsed arguments in, an exit status out. Each imports what it needs when it runs."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

from flows import agent_command, eval_command
from flows.paths import environment, root


def run(arguments: argparse.Namespace) -> int:
    """The whole pipeline on params.yaml (of a SAM2 alone: up to its memory and a page of it); with --agent the pixel-space agent's stages,
    with --online its learning online, and all that they need. Settings are for this run: params.yaml is as before afterwards."""
    from ans_core.config import setting
    from flows.kept import settle
    from flows.launch import run_pipeline
    from flows.params import add_sources

    here = root()
    overrides = dict(setting(word) for word in arguments.settings)
    if arguments.add_data:
        settle(here)
    for line in add_sources([Path(path).resolve() for path in arguments.add_data or ()], arguments.format, here):
        print(line)
    return run_pipeline(here, group=arguments.group, overrides=overrides)


def stage(arguments: argparse.Namespace) -> int:
    """One stage, if it changed."""
    from flows.kept import settle
    from flows.params import watch_sources
    from tasks import code
    from tasks.stages import TABLE

    settle(root())
    target = {made.name: made.target for made in TABLE}.get(arguments.name, arguments.name)
    for line in watch_sources(root()):
        print(line, flush=True)
    if arguments.accept_code:
        from flows.dvc_state import accept_code

        print(accept_code(target, root()))
        return 0
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", code.NAME, target, *(["--force"] if arguments.force else [])]
    return subprocess.run(command, cwd=root(), env=environment(), check=False).returncode


def nightly(arguments: argparse.Namespace) -> int:
    """Champion against challenger: evaluates the newest registered checkpoint and the best so far, and promotes the better one."""
    from flows.launch import exit_if_a_stage_fails, prefect_api

    with exit_if_a_stage_fails(), prefect_api(root()):
        from flows.nightly import nightly_evals

        print("\n".join(nightly_evals().lines()))
    return 0


def sweep(arguments: argparse.Namespace) -> int:
    """The pipeline for every combination of settings, as DVC experiments, and one table of their results."""
    from ans_core.config.yaml_file import parse
    from flows.launch import exit_if_a_stage_fails, prefect_api

    grid = {}
    for word in arguments.settings:
        key, _, values = word.partition("=")
        if not values:
            raise ValueError(f"{word!r}: write KEY=VALUE,VALUE as in rl.kl=0.01,0.05")
        grid[key] = [parse(value, source=repr(word))[0] for value in values.split(",")]
    with exit_if_a_stage_fails(resume=""), prefect_api(root()):
        from flows import sweep as flow

        print(flow.plain_text(Path(flow.sweep(grid=grid, name=arguments.name))))
    return 0


def profile(arguments: argparse.Namespace) -> int:
    """Writes params.yaml."""
    from ans_core.config import PROFILES, resolve
    from flows.kept import settle
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
    if holder := holder_of(here / ".ans/flow.lock"):
        print(
            f"note: {holder} is at work here; if its settings are others now, it stops before its next stage",
            file=sys.stderr,
        )
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
    from ans_core.inference.answer import write_answer

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
    from ans_core.tracking.track import default_checkpoint, write_track

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
    """A checkpoint folder to our layout or upstream's, or its SAM2 to files for the stock package and transformers; a training state of
    upstream's (.pth), with its bases, to ours."""
    source = Path(arguments.source)
    if not (arguments.check or arguments.target):
        raise ValueError("ans convert SRC DST: DST is missing (--check SRC alone looks at a folder)")
    from ans_core.checkpoints import checkpoint, conversion, folder

    if arguments.to == "sam2" and not arguments.check:
        return write_sam2(source, Path(arguments.target), arguments)
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


def write_sam2(source: Path, target: Path, arguments: argparse.Namespace) -> int:
    """Write the SAM2 of a model or of a stage's output for other programs."""
    from ans_core.checkpoints import sam2, sam2_export

    if arguments.sam2:
        raise ValueError("--sam2 adds a mask decoder to a model, and --to sam2 takes a SAM2 out of one; use one after the other")
    sam2_export.refuse_to_replace(target)
    found = sam2_export.read(source, base=Path(arguments.base) if arguments.base else None)
    whole = sam2_export.write(found, target, metadata={"stage": "convert", "source": arguments.source})
    print(f"wrote {target / sam2_export.STOCK}, for `ans track --model` and the stock package ({sam2.STOCK}, {sam2.WEIGHTS})")
    if whole:
        print(f"wrote {target / sam2_export.TRANSFORMERS}, for Sam2VideoModel.from_pretrained")
    else:
        width = f"{sam2.TRANSFORMERS_WIDTH} only, this SAM2's have {found.config.memory_width}"
        print(f"nothing for transformers: its Sam2VideoModel has memories of width {width}")
    if sam2.keeps_no_original(source):
        print("its mask decoder may be trained for [SEG]: SRC keeps none from before; `ans convert SRC OTHER --sam2 FILE` adds one")
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Public benchmarks: a model run on one, a predictions file scored, two results compared, a server's file written. Or the benchmarks of
    params.yaml on a checkpoint."""
    if eval_command.form(arguments) != "CHECKPOINT":
        return eval_command.run(arguments)
    from ans_core.config import load
    from flows.checkpoint_eval import METRICS, content_of, evaluated, with_fingerprints

    here, checkpoint = root(), Path(arguments.what).resolve()
    out = evaluated(checkpoint, content_of(checkpoint), here, with_fingerprints(load(here / "params.yaml"), here))
    for name, value in sorted(json.loads((out / METRICS).read_text(encoding="utf-8")).items()):
        print(f"{name:<48} {value:.4f}")
    print("predictions and overlays:", out)
    return 0


def data(arguments: argparse.Namespace) -> int:
    """check: reads a data set as training would, and says what is in it and what is wrong. show: draws samples with their masks. import:
    makes a folder with annotations.json of an export of COCO, CVAT, Label Studio or upstream's file. fetch: downloads published sets by
    name; without a name, lists them."""
    if arguments.action == "fetch":
        from ans_core.hub.catalogue import DATA
        from ans_core.hub.fetch import fetch

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
        return _check_traces(arguments)
    from ans_core.data.check import check, named

    name, path, form = named(arguments.path, arguments.format, root())
    folder = root() / ".ans/data" / name
    if arguments.action == "show":
        from ans_core.data.show import show

        out = Path(arguments.out or folder / "samples")
        written = show(name, path, form, arguments.split, count=arguments.count, seed=arguments.seed, out=out)
        print(f"wrote {len(written)} pictures and samples.jsonl to {out}")
        return 0
    page = Path(arguments.out or folder) / "report.html"
    return check(name, path, form, arguments.split, pixels=not arguments.headers_only, page=page)


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
        print(f"{len(names)} pictures have an EXIF tag that turns them (as {names[0]}); boxes are of the upright pictures")
    return 0


def weights(arguments: argparse.Namespace) -> int:
    """Downloads published bases and releases by name; without a name, lists them."""
    from ans_core.hub.catalogue import WEIGHTS
    from ans_core.hub.fetch import fetch

    return fetch(arguments.names, WEIGHTS, root=root(), into=arguments.into, yes=arguments.yes)


def push(arguments: argparse.Namespace) -> int:
    """A checkpoint folder to a repository on the Hugging Face hub, with a model card: data, settings, metrics, licence, examples."""
    from ans_core.hub.push import push as send

    run_folder = Path(arguments.run) if arguments.run else None
    how = {"licence": arguments.licence, "public": arguments.public, "dry_run": arguments.dry_run, "yes": arguments.yes}
    return send(Path(arguments.checkpoint), arguments.repo, run=run_folder, **how)


def pull(arguments: argparse.Namespace) -> int:
    """A model repository of the Hugging Face hub to a folder: goes on where it was cut off, compares checksums, checks every tensor."""
    from ans_core.hub.push import pull as fetch_model

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
    from ans_core.demo.serve import serve

    model = arguments.model or str(newest_model())
    return serve(model, arguments.against or [], host=arguments.host, port=arguments.port, auth=arguments.auth, device=arguments.device)


def tools(arguments: argparse.Namespace) -> int:
    """The agent's visual operations: lists them, or runs one on a picture or a clip and writes what it shows."""
    from ans_core.agent.tools import list_operations, run_operation

    print(run_operation(arguments, out=root() / ".ans/tools", newest_model=newest_model) if arguments.name else list_operations())
    return 0


def ask(arguments: argparse.Namespace) -> int:
    """The agent on a picture or a clip: prints its episode turn by turn (call, what came back, answer), and writes what each turn made."""
    from ans_core.agent.ask import ask as run_it

    return run_it(arguments, root())


def agent(arguments: argparse.Namespace) -> int:
    """Learning online: engine and worker as processes, their store's status, roll-back, export and forgetting (docs/online-learning.md)."""
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
