"""GPU memory that the agent needs at full size, computed from the models' shapes (nothing is downloaded): a
Markdown table.

`python perf/agent_memory.py [--crops 2] [--crop-tiles 3] [--words 300] [--learned 150]`. P = parameters of
the model, T = those of one adapter (LoRA, projector, rows of new tokens), counted on the meta device.

- frozen base: 2 P bytes (bf16). SFT trains one adapter: 16 T (fp32 weights, gradients, Adam's two moments).
  RFT holds three adapters
  (policy, teacher, reference), of which one is trained: 24 T.
- the row that RFT learns from: one question's group packed, its overview once (most tiles and the whole
  picture) and, for every episode,
  `--crops` pictures of `--crop-tiles` tiles and `--words` tokens of text, of which `--learned` were said. Activations by
  ans_core/model/footprint.py, with checkpointing.
- KV cache: `agent.episode.batch` episodes of that length, bf16.

Each process holds this, whatever their number. Frozen image encoders run without gradients; CUDA's own memory
comes on top.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ans_core.agent.operations import OPERATIONS
from ans_core.agent.policy import AGENT, AgentPolicy, add_call_tokens, set_resolution
from ans_core.checkpoints.published import build_meta
from ans_core.config import PROFILES, Config, resolve
from ans_core.model.footprint import MicroBatch, activation_bytes, cache_bytes

ROOT = Path(__file__).resolve().parents[1]
SIZES = {f"pixelis-{size}": f"sa2va-{size}" for size in ("1b", "4b", "8b", "qwen3-4b", "qwen25-7b")}
"""Profile -> the published size of its base."""
GB = 1e9
TILE_TOKENS = 256


def settings(profile: str) -> Config:
    return Config.model_validate(resolve(ROOT / PROFILES / f"{profile}.yaml", ()))


def built(profile: str, config: Config) -> AgentPolicy:
    """Build the agent on the meta device: shapes without memory."""
    model = build_meta(SIZES[profile])
    pieces = add_call_tokens(model, OPERATIONS)
    set_resolution(model, tiles=config.agent.tiles)
    return AgentPolicy(model, lora=config.agent.sft.lora.model_dump(), rows=sorted(set(pieces)), seed=0)


def line(profile: str, *, crops: int, crop_tiles: int, words: int, learned: int) -> str:
    config = settings(profile)
    parameters = sum(p.numel() for p in build_meta(SIZES[profile]).parameters())
    policy = built(profile, config)
    trained = sum(p.numel() for p in policy.adapters.parameters(AGENT).values())
    group, overview = config.agent.rft.group, (max(config.agent.tiles) + 1) * TILE_TOKENS
    episode = crops * crop_tiles * TILE_TOKENS + words
    tiles = max(config.agent.tiles) + 1 + group * crops * crop_tiles
    row = MicroBatch(
        rows=1, tokens=overview + group * episode, learned=group * learned, grids=((16, 16),) * tiles
    )
    rank, bare = config.agent.sft.lora.rank, build_meta(SIZES[profile])
    activations = sum(
        activation_bytes(bare, row, rank=rank, dropout=False, half=True, recomputed=None).values()
    )
    cache = cache_bytes(bare, rows=config.agent.episode.batch, tokens=overview + episode)
    sft, rft = 2 * parameters + 16 * trained, 2 * parameters + 24 * trained
    cells = (
        f"{size / GB:.1f} GB"
        for size in (2 * parameters, sft, rft, activations, cache, rft + max(activations, cache))
    )
    return (
        f"| {profile} | {parameters / 1e9:.3f} B | {trained / 1e9:.3f} B | {row.tokens:,} | "
        + " | ".join(cells)
        + " |"
    )


def table(**episode: int) -> str:
    head = (
        "| profile | parameters | adapter | tokens of a group | base | SFT: weights, gradients, Adam | RFT: "
        "the same, three adapters | activations of a group | KV cache | RFT, one GPU |"
    )
    return "\n".join([head, "|" + "---|" * 10, *(line(profile, **episode) for profile in SIZES)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="GPU memory of the agent at full size.")
    parser.add_argument("--crops", type=int, default=2, help="pictures that come back in an episode")
    parser.add_argument("--crop-tiles", type=int, default=3, help="tiles of each, the whole picture included")
    parser.add_argument("--words", type=int, default=300, help="tokens of an episode beside pictures")
    parser.add_argument("--learned", type=int, default=150, help="of these, said by the agent")
    a = parser.parse_args()
    print(table(crops=a.crops, crop_tiles=a.crop_tiles, words=a.words, learned=a.learned))
