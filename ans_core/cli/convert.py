"""`ans convert`: a checkpoint from one layout to another."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from ans_core.checkpoints import hub_id


def add_arguments(it: argparse.ArgumentParser) -> None:
    it.add_argument(
        "source",
        metavar="SRC",
        help=(
            "a model folder, ours or upstream's; upstream's training state (.pth, or such a folder); a "
            "stage's output"
        ),
    )
    it.add_argument("target", metavar="DST", nargs="?")
    it.add_argument(
        "--check",
        action="store_true",
        help="only say what SRC is and which tensors are missing, unknown or mis-shaped",
    )
    layouts = ["native", "upstream", "sa2va-i", "adapter", "sam2"]
    it.add_argument(
        "--to",
        choices=layouts,
        default="native",
        help="layout of DST (default: native, ours); adapter: PEFT's; sam2: SRC's SAM2 for the stock package (DST/sam2) and transformers' "
        "Sam2VideoModel (DST/transformers)",
    )
    it.add_argument(
        "--base",
        help=(
            "of a stage's output, with adapter and sam2: the model that it started from (default: base/base "
            "beside SRC)"
        ),
    )
    it.add_argument("--max-shard", default="5GB", help="largest weight file (default: 5GB)")
    it.add_argument(
        "--internvl", help="of a training state: the InternVL2.5 it was trained from, folder or hub id"
    )
    it.add_argument(
        "--sam2",
        help=(
            "SAM2 (file, folder or hub id): the base of a training state; for a folder, whose mask decoder "
            "is added for sa2va-i"
        ),
    )
    it.add_argument(
        "--template",
        default="qwen_chat",
        choices=["qwen_chat", "internlm2_chat", "phi3_chat"],
        help="of a training state",
    )
    it.add_argument(
        "--alpha-per-rank",
        type=float,
        default=2.0,
        help="of a training state: LoRA's alpha / r (upstream: 256 / 128)",
    )


def run(arguments: argparse.Namespace) -> int:
    """A checkpoint folder to our layout or upstream's, or its SAM2 to files for the stock package and
    transformers; a training state of upstream's (.pth), with its bases, to ours."""
    source = Path(arguments.source)
    if not (arguments.check or arguments.target):
        raise ValueError("ans convert SRC DST: DST is missing (--check SRC alone looks at a folder)")
    hub_id.check(arguments.source)  # before what takes seconds to import
    from ans_core.checkpoints import checkpoint, conversion, folder

    if arguments.to == "sam2" and not arguments.check:
        return write_sam2(source, Path(arguments.target), arguments)
    state = conversion.training_file(source) is not None
    if state and not (arguments.internvl and arguments.sam2):
        raise ValueError(f"{source} is a training state: it needs --internvl and --sam2, its bases")
    bases = {"internvl": arguments.internvl, "sam2": arguments.sam2, "template": arguments.template}
    if arguments.check:
        if (source / checkpoint.DELTA).is_file():
            raise ValueError(
                f"{source} is what a stage trained: `ans convert {source} DST` makes a model of it, and "
                "--check DST looks at that"
            )
        account = conversion.training_account(source, **bases) if state else conversion.account(source)
        print(
            f"{account.kind}: {account.tensors} tensors, {account.parameters:,} parameters, "
            f"{', '.join(account.dtypes)}"
        )
        print("\n".join(account.problems) or "every tensor is known, none is missing")
        return bool(account.problems)
    metadata, target = {"stage": "convert", "source": arguments.source}, Path(arguments.target)
    folder.refuse_to_replace(target, source)
    if arguments.to == "adapter":
        if arguments.sam2:
            raise ValueError("--sam2 adds a mask decoder to a model; an adapter has none")
        return write_adapter(source, target, arguments.base)
    if state:
        if arguments.to != "native":
            raise ValueError(
                f"{source} is a training state and becomes our layout first (--to native); from there, --to "
                f"{arguments.to}"
            )
        model = conversion.from_training_state(source, **bases, alpha_per_rank=arguments.alpha_per_rank)
        checkpoint.save(model, target, max_shard=arguments.max_shard, metadata=metadata)
    elif (source / checkpoint.DELTA).is_file():
        write_stage(source, target, arguments, metadata)
    else:
        conversion.convert(
            source,
            target,
            to=arguments.to,
            sam2=arguments.sam2 or "",
            max_shard=arguments.max_shard,
            metadata=metadata,
        )
    print("wrote", target)
    if arguments.to != "native" and not list(target.glob("*.py")):
        print(
            "for upstream's own classes, put the *.py files of a release of the same text model beside the "
            "weights"
        )
    return 0


def write_stage(source: Path, target: Path, arguments: argparse.Namespace, metadata: dict[str, str]) -> None:
    """Write the model that a stage's output makes (runs/<profile>/sft, rl, rl/teacher, rl/steps/100), in any
    layout, with --sam2 in ours, too, by way of a folder beside the target."""
    from ans_core.checkpoints import checkpoint, conversion

    target.resolve().parent.mkdir(parents=True, exist_ok=True)
    model, how = checkpoint.load(source), {"max_shard": arguments.max_shard, "metadata": metadata}
    if arguments.to == "native" and not arguments.sam2:
        checkpoint.save(model, target, **how)
        return
    with tempfile.TemporaryDirectory(dir=target.resolve().parent) as folder:
        checkpoint.save(model, Path(folder, "model"), **how)
        conversion.convert(Path(folder, "model"), target, to=arguments.to, sam2=arguments.sam2 or "", **how)


def write_adapter(source: Path, target: Path, base: str | None) -> int:
    """Write an adapter from a stage's output; the outputs of the stages before it must lie beside it."""
    from ans_core.checkpoints import adapter, checkpoint
    from ans_core.checkpoints.trained import run_of

    if not (source / checkpoint.DELTA).exists():
        raise ValueError(
            f"{source} holds no {checkpoint.DELTA}: an adapter is made of what SFT or RL trained "
            "(runs/<profile>/sft or rl)"
        )
    run = run_of(source)
    sft = run / "sft" if checkpoint.delta_config(source)["stage"] == "rl" else None
    start = Path(base) if base else run / "base/base"
    adapter.write_adapter(source, target, base=start, sft=sft)
    print(
        f"wrote {target}, for PeftModel.from_pretrained(Sa2VA.from_pretrained({str(start)!r}), "
        f"{str(target)!r})"
    )
    return 0


def write_sam2(source: Path, target: Path, arguments: argparse.Namespace) -> int:
    """Write the SAM2 of a model or of a stage's output for other programs."""
    from ans_core.checkpoints import sam2, sam2_export

    if arguments.sam2:
        raise ValueError(
            "--sam2 adds a mask decoder to a model, and --to sam2 takes a SAM2 out of one; use one after "
            "the other"
        )
    sam2_export.refuse_to_replace(target, source)
    model = sam2_export.read(source, base=Path(arguments.base) if arguments.base else None)
    for_transformers = sam2_export.write(
        model, target, metadata={"stage": "convert", "source": arguments.source}
    )
    print(
        f"wrote {target / sam2_export.STOCK}, for `ans track --model` and the stock package ({sam2.STOCK}, "
        f"{sam2.WEIGHTS})"
    )
    if for_transformers:
        print(f"wrote {target / sam2_export.TRANSFORMERS}, for Sam2VideoModel.from_pretrained")
    else:
        width = f"{sam2.TRANSFORMERS_WIDTH} only, this SAM2's have {model.config.memory_width}"
        print(f"nothing for transformers: its Sam2VideoModel has memories of width {width}")
    if sam2.keeps_no_original(source):
        print(
            "its mask decoder may be trained for [SEG]: SRC keeps none from before; `ans convert SRC OTHER "
            "--sam2 FILE` adds one"
        )
    return 0
