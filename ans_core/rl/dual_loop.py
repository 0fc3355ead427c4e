"""One RL step: samples (image, mask, caption) in, the loss of both loops out, with rollouts, teacher and rewards in between.

Loop 1 (`caption`): the policy samples G captions of the mask; the teacher draws each; IoU and text rewards.
Loop 2 (`mask`): the policy draws the caption, or a referring expression of the same thing, and explores G masks around it; the teacher
captions each; text reward and IoU.
Frozen encoders run once per image for both loops, all G, policy, teacher and reference. One update per rollout: the behaviour policy is the
policy itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from ans_core import prompts, rle, transforms
from ans_core.data.collate import PackedRow, TensorBatch, pack_row, pad_rows, prefix_ids, question_ids, resize_mask
from ans_core.dist import rank, seed_of, shared_mean
from ans_core.losses import mask_losses
from ans_core.model import predict as ask
from ans_core.model.adapters import Policies
from ans_core.model.grounding import FrameFeatures
from ans_core.model.sa2va import Packed, Sa2VA
from ans_core.model.supervised import mean_iou
from ans_core.rewards import REWARDS
from ans_core.rl import grpo, mask_policy
from ans_core.rl.loops import caption_request, expression_of, true_mask
from ans_core.types import Prediction, Sample

MASK_ANSWER = prompts.REFERRING_ANSWERS[0]
"""Teacher-forced: what is explored is the mask, not the words around `[SEG]`."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Of config.Rl, those that the step itself needs."""

    loops: Mapping[str, float]
    """Which of the two, and the weight of its loss."""
    group: int
    temperature: float
    max_tokens: int
    clip_low: float
    clip_high: float
    kl: float
    kl_words: float
    scale_rewards: grpo.Scale
    std_floor: float
    ema: float
    ema_warmup: bool
    rewards_caption: Mapping[str, float]
    rewards_mask: Mapping[str, float]
    mask_grid: int
    mask_sigma: float
    mask_weight: float


@dataclass(frozen=True, kw_only=True)
class RlBatch(TensorBatch):
    """Samples of one step, one image each, and their pictures for both encoders."""

    samples: tuple[Sample, ...]
    asked: tuple[str, ...]
    """What loop 2 draws from: the sample's caption or an expression that means the same thing."""
    tiles: Float[Tensor, "T 3 s s"]
    tiles_per_row: list[int]
    pixels: Float[Tensor, "B 3 S S"]
    targets: Bool[Tensor, "B M M"]
    step: int


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The frozen part of the work on a batch, done once."""

    vision: list[Float[Tensor, "_ n C"]]
    frames: FrameFeatures


def collate(samples: Sequence[Sample], asked: Sequence[str], model: Sa2VA, *, mask_size: int, step: int) -> RlBatch:
    images = [transforms.open_image(s.frames[0]) for s in samples]
    tiles = [ask.seen_tiles(model, [image]) for image in images]
    return RlBatch(
        samples=tuple(samples),
        asked=tuple(asked),
        tiles=transforms.normalise([t for row in tiles for t in row], size=model.tile_size),
        tiles_per_row=[len(row) for row in tiles],
        pixels=transforms.normalise(images, size=model.sam2.image_size),
        targets=torch.stack([resize_mask(rle.decode(true_mask(s)), mask_size) for s in samples]),
        step=step,
    )


class DualLoop(nn.Module):
    """The loss module of the RL stage. Saved with every training state, as its extra state: the teacher and the exploration width, which
    all processes share, and the rewards so far, of the first process's samples."""

    def __init__(self, policies: Policies, settings: Settings, *, seed: int, points: int, loss_weights: tuple[float, float]) -> None:
        super().__init__()
        self.model = policies.model
        self.policies, self.settings, self.seed, self.points, self.loss_weights = policies, settings, seed, points, loss_weights
        self.sigma, self.scale = settings.mask_sigma, 0.0
        self.record: dict[str, list[list[float]]] = defaultdict(list)
        """Reward part -> the values of every step, for the report."""
        self.updates = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {
            "teacher": self.policies.tensors("teacher"),
            "sigma": self.sigma,
            "scale": self.scale,
            "updates": self.updates,
            "record": dict(self.record),
        }

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.policies.load("teacher", state["teacher"])
        self.sigma, self.scale, self.updates = state["sigma"], state["scale"], state["updates"]
        self.record = defaultdict(list, state["record"])

    def after_step(self, step: int) -> dict[str, float]:
        """The teacher follows the policy, only after a real step."""
        self.updates += 1
        decay = self.settings.ema
        if self.settings.ema_warmup:
            decay = min(decay, (1 + self.updates) / (10 + self.updates))
        return {"teacher_distance": self.policies.ema(decay)}

    def forward(self, batch: RlBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        with torch.no_grad():
            vision = list(self.model.vision_features(batch.tiles).split(batch.tiles_per_row))
            seen = Seen(vision=vision, frames=self.model.sam2.encode(batch.pixels))
        total = batch.pixels.new_zeros(())
        metrics: dict[str, float] = {}
        weights = self.settings.loops
        if "caption" in weights:
            loss, found = self._caption_loop(batch, seen)
            total, metrics = total + weights["caption"] * loss, metrics | {f"loop1/{k}": v for k, v in found.items()}
        if "mask" in weights:
            loss, found = self._mask_loop(batch, seen)
            total, metrics = total + weights["mask"] * loss, metrics | {f"loop2/{k}": v for k, v in found.items()}
        return total, metrics

    # Loop 1: mask -> captions -> masks'

    def _caption_loop(self, batch: RlBatch, seen: Seen) -> tuple[Float[Tensor, ""], dict[str, float]]:
        s, group = self.settings, self.settings.group
        requests = [caption_request(sample, true_mask(sample)) for sample in batch.samples]
        with torch.no_grad():
            said = ask.generate(
                self.model,
                ask.prompt(self.model, requests, seen.vision),
                max_tokens=s.max_tokens,
                samples=group,
                temperature=s.temperature,
            )
        texts = [ask.text_of(self.model, ask.said(self.model, ids)) for ids in said]
        drawn = self._teacher_draws(batch, seen, texts)
        rewards, parts = self._rewards("loop1", batch, texts, drawn, s.rewards_caption)
        advantage = grpo.advantages(rewards, scale=s.scale_rewards, std_floor=s.std_floor)
        rows = [
            self._row(sample, batch.tiles_per_row[i], self._caption_branches(sample, said[i * group : (i + 1) * group]))
            for i, sample in enumerate(batch.samples)
        ]
        regions = [[self._cells(true_mask(sample))] * group for sample in batch.samples]
        logps, entropy = self._token_logps(rows, regions, seen)
        with torch.no_grad(), self.policies.using("reference"):
            reference, _ = self._token_logps(rows, regions, seen)
        packed_branch = pad_rows(rows, pad_id=0)
        owner = packed_branch["branch"][packed_branch["loss_mask"]] - 1
        row_of = packed_branch["loss_mask"].nonzero()[:, 0]
        loss, metrics = grpo.clipped_loss(
            logps, logps.detach(), advantage.to(logps.device)[row_of, owner], clip_low=s.clip_low, clip_high=s.clip_high
        )
        kl_loss, kl = grpo.token_kl(logps, reference)
        lengths = [len(ids) for ids in said]
        metrics |= parts | {
            "kl": kl,
            "entropy": entropy,
            "length": sum(lengths) / len(lengths),
            "truncated": sum(len(ask.said(self.model, ids)) == len(ids) for ids in said) / len(said),
            "zero_spread": grpo.zero_spread(rewards),
            "distinct": sum(len(set(texts[i : i + group])) for i in range(0, len(texts), group)) / len(texts),
        }
        return loss + s.kl * kl_loss, metrics

    def _caption_branches(self, sample: Sample, answers: list[list[int]]) -> list[tuple[list[int], list[int]]]:
        cells = [int(self._cells(true_mask(sample)).sum())]
        question = self._question(prompts.REGION_EVAL.removeprefix("<image>"), cells)
        return [(question, answer) for answer in answers]

    @torch.no_grad()
    def _teacher_draws(self, batch: RlBatch, seen: Seen, texts: list[str]) -> list[dict[str, Any]]:
        """A mask for every caption, all of an image's captions in one packed row."""
        group = self.settings.group
        rows = [
            self._row(sample, batch.tiles_per_row[i], [self._mask_branch(text) for text in texts[i * group : (i + 1) * group]])
            for i, sample in enumerate(batch.samples)
        ]
        with self.policies.using("teacher"):
            logits = self._mask_logits(rows, seen, per_row=group)
        return [self._rle(z, batch.samples[i // group]) for i, z in enumerate(logits)]

    # Loop 2: caption or expression -> masks -> captions'

    def _mask_loop(self, batch: RlBatch, seen: Seen) -> tuple[Float[Tensor, ""], dict[str, float]]:
        s = self.settings
        rows = [self._row(sample, batch.tiles_per_row[i], [self._mask_branch(batch.asked[i])]) for i, sample in enumerate(batch.samples)]
        with torch.no_grad():
            before = self._mask_logits(rows, seen, per_row=1)
            spread = shared_mean(float(before.std()), before.device)
            self.scale = spread if not self.scale else 0.9 * self.scale + 0.1 * spread
            generator = torch.Generator(device=before.device).manual_seed(seed_of(self.seed, "mask actions", batch.step, rank()))
            actions = mask_policy.act(before, group=s.group, cells=s.mask_grid, sigma=self.sigma, scale=self.scale, generator=generator)
            with self.policies.using("reference"):
                packed, hidden = self._hidden(rows, [], seen)
                reference, reference_words = self._decoded(packed, hidden, seen, per_row=1), self._word_logits(packed, hidden)
        drawn = [self._rle(m.float() - 0.5, batch.samples[i]) for i, masks in enumerate(actions.masks) for m in masks]
        retold = self._teacher_captions(batch, seen, drawn)
        rewards, parts = self._rewards("loop2", batch, retold, drawn, s.rewards_mask)
        advantage = grpo.advantages(rewards, scale=s.scale_rewards, std_floor=s.std_floor).to(before.device)
        packed, hidden = self._hidden(rows, [], seen)
        logits = self._decoded(packed, hidden, seen, per_row=1)
        logps = mask_policy.log_prob(logits, actions).flatten()
        loss, metrics = grpo.clipped_loss(logps, logps.detach(), advantage.flatten(), clip_low=s.clip_low, clip_high=s.clip_high)
        kl = mask_policy.kl(logits, reference, actions)
        words_kl = grpo.exact_kl(self._word_logits(packed, hidden), reference_words) / len(rows)
        bce, dice = mask_losses(logits, batch.targets, points=self.points)
        alike = shared_mean(grpo.pairwise_iou(actions.masks), before.device)
        self.sigma = mask_policy.steered(self.sigma, alike)
        metrics |= parts | {
            "kl": float(kl.detach()),
            "words_kl": float(words_kl.detach()),
            "sigma": self.sigma,
            "group_pairwise_iou": alike,
            "zero_spread": grpo.zero_spread(rewards),
            "iou_mean": mean_iou(logits.detach(), batch.targets),
        }
        supervised = self.loss_weights[0] * bce + self.loss_weights[1] * dice
        return loss + s.kl * kl + s.kl_words * words_kl + s.mask_weight * supervised, metrics

    @torch.no_grad()
    def _teacher_captions(self, batch: RlBatch, seen: Seen, masks: list[dict[str, Any]]) -> list[str]:
        """Greedy captions; an empty mask has nothing to tell of and gets an empty text (reward 0)."""
        group = self.settings.group
        asked = [i for i, mask in enumerate(masks) if rle.area(mask)]
        texts = [""] * len(masks)
        if not asked:
            return texts
        requests = [caption_request(batch.samples[i // group], masks[i]) for i in asked]
        with self.policies.using("teacher"):
            prompted = ask.prompt(self.model, requests, [seen.vision[i // group] for i in asked])
            answers = ask.generate(self.model, prompted, max_tokens=self.settings.max_tokens)
        for i, ids in zip(asked, answers, strict=True):
            texts[i] = ask.text_of(self.model, ask.said(self.model, ids))
        return texts

    # Shared

    def _rewards(
        self, loop: str, batch: RlBatch, texts: list[str], masks: list[dict[str, Any]], weights: Mapping[str, float]
    ) -> tuple[Float[Tensor, "B G"], dict[str, float]]:
        """Weighted sum of the reward parts, and their means and spreads for the log. (caption, mask) is judged against the sample's own."""
        group = self.settings.group
        total = torch.zeros(len(texts))
        metrics: dict[str, float] = {}
        truths = [Prediction(text=s.text, masks=((true_mask(s),),)) for s in batch.samples]
        answers = [Prediction(text=t.rstrip("."), masks=((m,),)) for t, m in zip(texts, masks, strict=True)]
        for name, weight in weights.items():
            values = torch.tensor([REWARDS[name](a, truths[i // group]) for i, a in enumerate(answers)])
            total += weight * values
            metrics |= {f"reward/{name}": float(values.mean()), f"reward/{name}_std": float(values.std())}
            self.record[f"{loop}/{name}"].append([round(float(v), 4) for v in values])
        return total.view(-1, group), metrics | {"reward": float(total.mean())}

    def _question(self, text: str, cells: list[int]) -> list[int]:
        return question_ids(self.model.tokenizer, text, template=self.model.config.template, cells=cells)

    def _mask_branch(self, caption: str) -> tuple[list[int], list[int]]:
        question = prompts.REFERRING_EVAL.removeprefix("<image>\n").format(text=expression_of(caption))
        answer = MASK_ANSWER + prompts.TEMPLATES[self.model.config.template].suffix
        return self._question(question, []), self.model.tokenizer.encode(answer, add_special_tokens=False)

    def _row(self, sample: Sample, tiles: int, branches: list[tuple[list[int], list[int]]]) -> PackedRow:
        prefix = prefix_ids(self.model.tokenizer, template=self.model.config.template, frame_tokens=[tiles * self.model.grid**2])
        return pack_row(prefix, branches)

    def _cells(self, mask: dict[str, Any]) -> Bool[Tensor, "grid grid"]:
        return transforms.grid_cells(rle.decode(mask), grid=self.model.grid)

    def _hidden(self, rows: list[PackedRow], regions: list[list[Tensor]], seen: Seen) -> tuple[Packed, Float[Tensor, "B L D"]]:
        padded = pad_rows(rows, pad_id=self.model.tokenizer.pad_token_id or 0)
        packed = Packed(**{k: v.to(self.model.device) for k, v in padded.items()}, regions=regions)
        return packed, self.model.hidden_states(packed, [self.model.project(v) for v in seen.vision])

    def _token_logps(self, rows: list[PackedRow], regions: list[list[Tensor]], seen: Seen) -> tuple[Float[Tensor, " M"], float]:
        """Log-probabilities of the sampled tokens as `generate` drew them (temperature, no IMG_CONTEXT), in fp32; and the mean entropy."""
        packed, hidden = self._hidden(rows, regions, seen)
        at, place = packed.loss_mask.nonzero(as_tuple=True)
        logits = self._word_logits(packed, hidden) / self.settings.temperature
        logits[:, self.model.image_token_id] = -torch.inf
        logp = F.log_softmax(logits, dim=-1)
        chosen = logp.gather(1, packed.input_ids[at, place][:, None])[:, 0]
        return chosen, float(torch.special.entr(logp.detach().exp()).sum(1).mean())

    def _mask_logits(self, rows: list[PackedRow], seen: Seen, *, per_row: int) -> Float[Tensor, "P h4 w4"]:
        """Masks of the rows' `[SEG]`s, `per_row` of them in every row."""
        return self._decoded(*self._hidden(rows, [], seen), seen, per_row=per_row)

    def _decoded(self, packed: Packed, hidden: Float[Tensor, "B L D"], seen: Seen, *, per_row: int) -> Float[Tensor, "P h4 w4"]:
        embeddings = self.model.seg_embeddings(hidden[(packed.input_ids == self.model.seg_token_id) & packed.loss_mask])
        frame = torch.arange(len(packed.input_ids), device=hidden.device).repeat_interleave(per_row)
        return self.model.sam2.decode(seen.frames, frame, embeddings).logits

    def _word_logits(self, packed: Packed, hidden: Float[Tensor, "B L D"]) -> Float[Tensor, "M V"]:
        """Of the tokens of the answers, before they are said."""
        at, place = packed.loss_mask.nonzero(as_tuple=True)
        return self.model.logits(hidden[at, place - 1])

    def _rle(self, logits: Float[Tensor, "h w"], sample: Sample) -> dict[str, Any]:
        return rle.encode(ask.upsample(logits, size=self.model.sam2.image_size, height=sample.height, width=sample.width))
