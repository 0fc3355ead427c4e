"""How much memory converting takes: a checkpoint of many shards there and back, against its largest shard and
tensor.

    python perf/conversion.py [--layers 24] [--shard 64MB]

An InternLM2, whose attention upstream packs into one matrix: those tensors are made anew, the others are
copied from file to file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch
from peak import watched

from ans_core.checkpoints import checkpoint, conversion, folder
from ans_core.model.grounding import GroundingConfig
from ans_core.pretrain.build import build_tiny, build_tokenizer, tiny_config

SMALL = {"image_size": 32, "patch_size": 8, "hidden": 32, "layers": 1, "heads": 2, "mlp": 32}


def write(path: Path, *, layers: int, shard: str) -> None:
    tokenizer = build_tokenizer(["a red circle"] * 10, vocabulary=300)
    language = {"hidden": 512, "layers": layers, "heads": 8, "kv_heads": 2, "mlp": 2048}
    sam = replace(
        GroundingConfig(),
        image_size=64,
        embed=8,
        heads=1,
        stages=(1, 1, 2, 1),
        global_blocks=(3,),
        windows=(4, 2, 4, 2),
    )
    config = tiny_config(
        vision=SMALL,
        language=language,
        grounding=sam,
        tokenizer=tokenizer,
        template="internlm2_chat",
        video_frames=3,
    )
    config.backbone["text_config"] |= {"model_type": "llama", "attention_bias": False, "mlp_bias": False}
    checkpoint.save(build_tiny(config, tokenizer, seed=0), path, max_shard=shard, metadata={})


def measured(source: str, target: str, kind: conversion.Kind, shard: str) -> None:
    """In a process of its own, after a first conversion of something small: prints the bytes over those
    before, and seconds."""
    conversion.convert(Path(source).with_name("small"), f"{target} warm", to=kind, metadata={})
    start_s = time.monotonic()
    with watched() as peak:
        conversion.convert(source, target, to=kind, max_shard=shard, metadata={})
    print(peak.grown, time.monotonic() - start_s)


def sizes(path: Path) -> tuple[int, int, int]:
    """Bytes of the largest shard and of the largest tensor, and how many shards."""
    files = folder.weight_files(path)
    tensors = conversion.Reader(path).shapes.values()
    return (
        max(file.stat().st_size for file in files),
        max(t.numel() * t.element_size() for t in tensors),
        len(files),
    )


def main(layers: int, shard: str) -> None:
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write(root / "small", layers=1, shard=shard)
        write(root / "ours", layers=layers, shard=shard)
        for source, target, kind in (("ours", "up", "upstream"), ("up", "again", "native")):
            words = [
                sys.executable,
                __file__,
                "--one",
                str(root / source),
                str(root / target),
                kind,
                "--shard",
                shard,
            ]
            peak, seconds = map(float, subprocess.check_output(words, text=True).split()[-2:])
            largest, tensor, count = sizes(root / target)
            total = sum(f.stat().st_size for f in folder.weight_files(root / target))
            print(
                f"to {kind}: {total / 1e6:.0f} MB in {count} shards (largest {largest / 1e6:.0f} MB, "
                f"largest tensor {tensor / 1e6:.1f} MB), {seconds:.1f} s, peak {peak / 1e6:.0f} MB = "
                f"{peak / (largest + tensor):.2f} x (shard + tensor)"
            )
        one, other = (dict(folder.tensors(folder.weight_files(root / which))) for which in ("ours", "again"))
        same = one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)
        print("there and back:", "the same" if same else "DIFFERENT")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--shard", default="64MB")
    parser.add_argument(
        "--one", nargs=3, metavar=("SRC", "DST", "KIND"), help="only this conversion, measured"
    )
    arguments = parser.parse_args()
    if arguments.one:
        measured(*arguments.one, arguments.shard)
    else:
        main(arguments.layers, arguments.shard)
