"""One step's samples and encoded images, with everything that loops do with them: ask, draw, read answers
again, reward.

The frozen encoders have run once: all loops and rollouts, policy, teacher and reference use their features.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from PIL import Image
from torch import Tensor, nn

from ans_core import prompts
from ans_core.benchmarks.loops import caption_request, expression_of, true_mask
from ans_core.config.rl import Rl
from ans_core.data.branches import branch_places
from ans_core.data.collate import conversation_ids, prefix_ids, resize_mask
from ans_core.data.tensor_batch import TensorBatch
from ans_core.data.views import Views
from ans_core.dist import rng_of, seed_of
from ans_core.inference.generation import generate, spoken_ids, text_of
from ans_core.inference.prefill import prompt, visible
from ans_core.losses import mask_losses
from ans_core.metrics.mask import soft_iou
from ans_core.model.adapters import Adapters
from ans_core.model.backbones.base import ImageFeatures
from ans_core.model.grounding import FrameFeatures, MaskOutput
from ans_core.model.masks import upsample
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.pictures import rle, transforms
from ans_core.rewards import Reward
from ans_core.rewards.confidence import MaskPrediction
from ans_core.rl import grpo
from ans_core.rl.augmentations import AUGMENTATIONS
from ans_core.rl.mask_policy import MaskActions, MaskPolicy, PolicyOutput, mean_probability
from ans_core.rl.practice import Practice
from ans_core.rl.rollout import Group, Reader, Rollout, SampledAnswer, Segment, pack, sample
from ans_core.types import RLE, Prediction, Request, Sample

MASK_ANSWER = prompts.REFERRING_ANSWERS[0]
"""Teacher-forced: the policy explores the mask, not the words around `[SEG]`."""


Box = tuple[int, int, int, int]
"""x1, y1, x2, y2 in native pixels, x2 and y2 exclusive."""
FramePart = tuple[int, Box]
"""Index of one of the sample's frames, and a box in it."""


@dataclass(frozen=True, kw_only=True)
class RlBatch(TensorBatch):
    """Samples of one step, one image each, with pictures for both encoders."""

    samples: tuple[Sample, ...]
    asked: tuple[str, ...]
    """The text from which loop 2 draws: the sample's caption or an expression with the same meaning."""
    views: list[Views]
    """Every sample's picture, for the vision tower."""
    pixels: Float[Tensor, "B 3 S S"]
    targets: Bool[Tensor, "B M M"]
    """The sample's mask; empty if it has none."""
    repeats: tuple[int, ...]
    """How often the sample stands before this place in the whole step: few data fill a step several times
    over."""
    augmented: list[RlBatch] = field(default_factory=list)
    """The same samples in other views of their pictures, a batch each (`rl.views`)."""

    @staticmethod
    def joined(batches: Sequence[RlBatch]) -> RlBatch:
        """Return one batch of the samples of several, in order."""
        return RlBatch(
            samples=tuple(sample for batch in batches for sample in batch.samples),
            asked=tuple(text for batch in batches for text in batch.asked),
            views=[views for batch in batches for views in batch.views],
            pixels=torch.cat([batch.pixels for batch in batches]),
            targets=torch.cat([batch.targets for batch in batches]),
            repeats=tuple(repeat for batch in batches for repeat in batch.repeats),
            augmented=[RlBatch.joined(views) for views in zip(*(b.augmented for b in batches), strict=True)],
        )

    def take(self, indices: Sequence[int]) -> RlBatch:
        """Return these samples alone."""
        return RlBatch(
            samples=tuple(self.samples[i] for i in indices),
            asked=tuple(self.asked[i] for i in indices),
            views=[self.views[i] for i in indices],
            pixels=self.pixels[list(indices)],
            targets=self.targets[list(indices)],
            repeats=tuple(self.repeats[i] for i in indices),
            augmented=[batch.take(indices) for batch in self.augmented],
        )


def rl_batch(
    samples: Sequence[Sample],
    asked: Sequence[str],
    model: Network,
    *,
    mask_size: int,
    repeats: Sequence[int] = (),
    augmentations: Sequence[str] = (),
    seeds: Sequence[object] = (),
) -> RlBatch:
    """Read the samples' pictures. repeats: of each sample, for its seeds; none given means that each stands
    in the step once. augmentations: other views of the pictures, which `seeds`, the sample and its repeat
    decide."""
    images = [transforms.open_image(s.frames[0]) for s in samples]
    repeats = tuple(repeats) or (0,) * len(samples)

    def batch_of(
        samples: Sequence[Sample], images: Sequence[Image.Image], augmented: list[RlBatch]
    ) -> RlBatch:
        empty = torch.zeros(mask_size, mask_size, dtype=torch.bool)
        masks = [resize_mask(rle.decode(true_mask(s)), mask_size) if s.masks else empty for s in samples]
        return RlBatch(
            samples=tuple(samples),
            asked=tuple(asked),
            views=[visible(model, [image]) for image in images],
            pixels=transforms.normalise(images, size=model.sam2.image_size),
            targets=torch.stack(masks),
            repeats=repeats,
            augmented=augmented,
        )

    def in_view(name: str) -> RlBatch:
        pairs = []
        for chosen, image, repeat in zip(samples, images, repeats, strict=True):
            rng = rng_of(*seeds, name, chosen.dataset, chosen.sample_id, repeat)
            view, mask = AUGMENTATIONS[name](image, rle.decode(true_mask(chosen)), rng)
            # without frames: what they are of is encoded with the batch
            shown = replace(
                chosen, frames=(), masks=((rle.encode(mask),),), width=view.width, height=view.height
            )
            pairs.append((shown, view))
        return batch_of([shown for shown, _ in pairs], [view for _, view in pairs], [])

    return batch_of(samples, images, [in_view(name) for name in augmentations])


@dataclass(frozen=True, kw_only=True)
class EncodedImages:
    """Features of the frozen encoders for a batch, computed once."""

    vision: list[ImageFeatures]
    frames: FrameFeatures | None
    """None if no loop draws in these pictures."""

    @staticmethod
    def joined(parts: Sequence[EncodedImages]) -> EncodedImages:
        frames = [part.frames for part in parts if part.frames is not None]
        together = None
        if frames:
            fine, middle, coarse = (
                torch.cat(maps) for maps in zip(*((f.fine, f.middle, f.coarse) for f in frames), strict=True)
            )
            together = FrameFeatures(fine=fine, middle=middle, coarse=coarse)
        return EncodedImages(vision=[features for part in parts for features in part.vision], frames=together)

    def take(self, kept: Sequence[int]) -> EncodedImages:
        return EncodedImages(
            vision=[self.vision[i] for i in kept],
            frames=None if self.frames is None else self.frames[list(kept)],
        )


@dataclass(kw_only=True)
class Experience:
    """What a loop's policy did with B samples and the rewards it got: enough to learn from it again, also
    after the run was killed."""

    groups: tuple[Group, ...]
    regions: list[list[Bool[Tensor, "h w"]]]
    """Visual prompts of every group's row, in the format of `Packed`."""
    texts: list[str]
    """B x G captions. Of each pair of caption and mask, one is the policy's and the other the inverse
    model's."""
    masks: list[RLE]
    """B x G masks; empty if a loop has none."""
    rewards: dict[str, Float[Tensor, "B G"]]
    """Reward parts."""
    observed: list[list[FramePart]] = field(default_factory=list)
    """The pictures that each group's rollouts were shown, in the order of the packed text; empty if none
    were. Their features are encoded anew where they are needed."""
    kept: list[int] | None = None
    """Indices of these samples among the batch's candidates; None = all."""
    sampled_logps: list[tuple[float, ...]] = field(default_factory=list)
    """B x G: log-probabilities of the answer's tokens, as they were sampled."""
    actions: MaskActions | None = None
    advantage: Float[Tensor, "B G"] | None = None
    behaviour: Float[Tensor, " M"] | None = None
    """Log-probabilities of the actions (sampled tokens; loop 2: masks) under the policy that acted."""
    behaviour_places: Float[Tensor, " P"] | None = None
    """The same of the things that answers of the loop refer click."""
    reference: Float[Tensor, " M"] | None = None
    """Log-probabilities of the sampled tokens under the reference."""
    reference_words: Float[Tensor, "T V"] | None = None
    """Loop 2: the reference's logits at the answers' tokens, which are given."""
    reference_masks: PolicyOutput | None = None
    """Loop 2: the reference's masks."""
    metrics: dict[str, float] = field(default_factory=dict)

    def take(self, kept: Sequence[int]) -> Experience:
        """Keep these samples only; allowed until the reference or the policy has read their tokens."""
        read = (self.behaviour, self.reference, self.reference_masks)
        assert all(values is None for values in read), "reference and behaviour are of the samples that stay"
        group = next(iter(self.rewards.values())).shape[1]
        return replace(
            self,
            kept=list(kept),
            groups=tuple(self.groups[i] for i in kept),
            regions=[self.regions[i] for i in kept] if self.regions else [],
            observed=[self.observed[i] for i in kept] if self.observed else [],
            texts=[self.texts[i * group + g] for i in kept for g in range(group)],
            masks=[self.masks[i * group + g] for i in kept for g in range(group)] if self.masks else [],
            sampled_logps=[self.sampled_logps[i * group + g] for i in kept for g in range(group)]
            if self.sampled_logps
            else [],
            rewards={name: values[list(kept)] for name, values in self.rewards.items()},
            actions=None
            if self.actions is None
            else self.actions.take(torch.tensor(kept, device=self.actions.masks.device)),
        )

    def parts(self, sizes: Sequence[int]) -> list[Experience]:
        """Split into experiences of so many samples each; all have the metrics of the whole."""
        if len(sizes) == 1:
            return [self]
        ends = list(accumulate(sizes))
        spans = [range(end - size, end) for end, size in zip(ends, sizes, strict=True)]
        return [replace(self.take(span), kept=None, metrics=dict(self.metrics)) for span in spans]

    def learned_tokens(self) -> int:
        """Count the sampled tokens that enter the loss."""
        return sum(
            len(s.ids) for group in self.groups for rollout in group.rollouts for s in rollout if s.trainable
        )

    def state(self) -> dict[str, Any]:
        """Return plain containers and tensors for a checkpoint."""
        groups = [(g.prefix, [[(s.ids, s.trainable) for s in r] for r in g.rollouts]) for g in self.groups]
        return {
            **vars(self),
            "groups": groups,
            "actions": None if self.actions is None else dict(vars(self.actions)),
            "reference_masks": None if self.reference_masks is None else dict(vars(self.reference_masks)),
        }

    @staticmethod
    def of(state: dict[str, Any]) -> Experience:
        groups = tuple(
            Group(
                prefix=prefix,
                rollouts=tuple(tuple(Segment(ids=ids, trainable=t) for ids, t in r) for r in rollouts),
            )
            for prefix, rollouts in state["groups"]
        )
        actions = None if (of := state["actions"]) is None else MaskActions(**of)
        masks = None if (of := state["reference_masks"]) is None else PolicyOutput(**of)
        return Experience(**{**state, "groups": groups, "actions": actions, "reference_masks": masks})


class StepTimer:
    """Seconds spent in the named parts of a step."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._open: dict[str, float] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.start(name)
        yield
        self.stop(name)

    def start(self, name: str) -> None:
        self._open[name] = self._now()

    def stop(self, name: str) -> None:
        """Add the time since `start`; a part that was not started adds nothing."""
        now = self._now()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._open.pop(name, now)

    def clear(self) -> None:
        self.seconds.clear()
        self._open.clear()

    @staticmethod
    def _now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(kw_only=True)
class Exploration:
    """How far loop 2 explores; carried from step to step."""

    width: float
    """Width of the mask policy's distribution, in units of `scale`."""
    scale: float = 0.0
    """Running mean of the policy's `spread`; 0 = not known yet."""
    identical: int = 0
    """Consecutive updates in which no group had two different masks."""


@dataclass(frozen=True, kw_only=True)
class RolloutStep:
    """One batch with the policies and settings that act on it."""

    policies: Adapters
    settings: Rl
    reader: Reader
    batch: RlBatch
    encoded: EncodedImages
    rewards: Mapping[str, Reward]
    mask_policy: MaskPolicy
    exploration: Exploration
    mask_points: int
    """Random points of the supervised mask loss, as in SFT."""
    mask_losses: tuple[float, float]
    """Weights of its BCE and dice."""
    seeds: tuple[object, ...]
    """(run seed, loop, rollout number): with the sample, its repeat and the rollout's index they decide
    everything random."""
    timer: StepTimer
    practice: Practice | None = None
    """What an agent acts in; None for loops that need samples and rewards alone."""
    totals: grpo.Totals = field(default_factory=lambda: grpo.Totals(samples=1.0, answers=1.0, tokens=1.0))
    """Known once all micro-batches of the step have acted."""

    @property
    def model(self) -> Network:
        return self.policies.model

    @property
    def objective(self) -> grpo.Objective:
        s = self.settings
        return grpo.Objective(
            form=s.objective, clip_low=s.clip_low, clip_high=s.clip_high, max_tokens=s.max_tokens
        )

    @property
    def frames(self) -> FrameFeatures:
        assert self.encoded.frames is not None, "a loop that draws says so (Loop.decodes_masks)"
        return self.encoded.frames

    @staticmethod
    def joined(steps: Sequence[RolloutStep]) -> RolloutStep:
        """Return the steps of several micro-batches of one loop as one, whose samples are theirs in order."""
        if len(steps) == 1:
            return steps[0]
        return replace(
            steps[0],
            batch=RlBatch.joined([step.batch for step in steps]),
            encoded=EncodedImages.joined([step.encoded for step in steps]),
        )

    def take(self, indices: Sequence[int]) -> RolloutStep:
        return replace(self, batch=self.batch.take(indices), encoded=self.encoded.take(indices))

    def augmented(self) -> Iterator[RolloutStep]:
        """Return this step in each other view of its pictures, which is encoded when its turn comes."""
        for batch in self.batch.augmented:
            with torch.no_grad(), self.timer.part("encode"):
                vision = self.model.vision_features(batch.views).split(batch.views)
                encoded = EncodedImages(vision=vision, frames=self.model.sam2.encode(batch.pixels))
            yield replace(self, batch=batch, encoded=encoded)

    def seed(self, what: str, sample: int, rollout: int | None = None) -> int:
        chosen, repeat = self.batch.samples[sample], self.batch.repeats[sample]
        return seed_of(
            *self.seeds, what, chosen.dataset, chosen.sample_id, rollout, *([repeat] if repeat else [])
        )

    def generators(self, what: str) -> list[torch.Generator]:
        """Return one generator per sample."""
        return [
            torch.Generator(self.model.device).manual_seed(self.seed(what, i))
            for i in range(len(self.batch.samples))
        ]

    # Asking in words

    def sample_answers(self, requests: Sequence[Request], what: str) -> list[SampledAnswer]:
        """Sample G answers of the policy to the request about each sample."""
        group = self.settings.group
        seeds = [self.seed(what, i, g) for i in range(len(requests)) for g in range(group)]
        with torch.no_grad(), self.timer.part("generate"):
            prompted = prompt(self.model, requests, self.encoded.vision)
            return sample(
                self.model,
                prompted,
                group=group,
                max_tokens=self.settings.max_tokens,
                reader=self.reader,
                seeds=seeds,
            )

    def text(self, said: SampledAnswer) -> str:
        return text_of(self.model, spoken_ids(self.model, list(said.ids)))

    @torch.no_grad()
    def inverse_captions(self, masks: Sequence[RLE]) -> list[str]:
        """Return the inverse model's greedy captions of G masks per sample; an empty mask gets an empty
        text."""
        group = self.settings.group
        asked = [i for i, mask in enumerate(masks) if rle.area(mask)]
        texts = [""] * len(masks)
        if not asked:
            return texts
        requests = [caption_request(self.batch.samples[i // group], masks[i]) for i in asked]
        with self.timer.part("generate"), self.policies.using(self.settings.inverse):
            prompted = prompt(self.model, requests, [self.encoded.vision[i // group] for i in asked])
            answers = generate(self.model, prompted, max_tokens=self.settings.max_tokens)
        for i, ids in zip(asked, answers, strict=True):
            texts[i] = text_of(self.model, spoken_ids(self.model, ids))
        return texts

    # Tokens

    def group_of(self, index: int, rollouts: Sequence[Rollout]) -> Group:
        """Make a group of rollouts that share the sample's picture."""
        tokens, marks = self.batch.views[index].tokens, self.model.backbone.marks
        prefix = prefix_ids(
            self.model.tokenizer, template=self.model.config.template, frame_tokens=tokens, marks=marks
        )
        return Group(prefix=tuple(prefix), rollouts=tuple(rollouts))

    def answers_of(self, index: int, question: Segment, answers: Sequence[Segment]) -> Group:
        """Make a group of rollouts that share the picture and the question."""
        picture = self.group_of(index, ())
        last = replace(question, ids=question.ids[-1:])
        return Group(
            prefix=picture.prefix + question.ids[:-1], rollouts=tuple((last, answer) for answer in answers)
        )

    def question(self, text: str, cells: Sequence[int] = (), past: Sequence[tuple[str, str]] = ()) -> Segment:
        """Return the question, after earlier questions and answers, as a given segment. The first question
        comes without `<image>`."""
        turns, model = (*past, (text, "")), self.model
        *asked, _ = conversation_ids(
            model.tokenizer, turns, template=model.config.template, cells=cells, marks=model.backbone.marks
        )
        return Segment(ids=tuple(token for part in asked for token in part), trainable=False)

    def referring_rollout(self, text: str) -> Rollout:
        """Return the question for the object that `text` means, and the answer that draws it."""
        question = prompts.referring_question(expression_of(text), prompts.REFERRING_QUESTIONS[1])
        answer = MASK_ANSWER + prompts.TEMPLATES[self.model.config.template].suffix
        ids = self.model.tokenizer.encode(answer, add_special_tokens=False)
        return self.question(question), Segment(ids=tuple(ids), trainable=True)

    def cells(self, index: int, mask: RLE) -> Bool[Tensor, "h w"]:
        return transforms.grid_cells(rle.decode(mask), grid=self.batch.views[index].shown)

    def hidden(
        self,
        groups: Sequence[Group],
        regions: list[list[Tensor]],
        observed: Sequence[Sequence[FramePart]] = (),
    ) -> tuple[Packed, Float[Tensor, "B L D"], Int[Tensor, " M"]]:
        """Return packed tokens, their hidden states under the active adapter, and the rollout of every
        trainable token."""
        multiple = self.model.length_multiple
        tokens, rollout = pack(groups, pad_id=self.model.tokenizer.pad_token_id or 0, multiple=multiple)
        device = self.model.device
        packed = Packed(
            **dict[str, Any](tokens),
            places=branch_places(tokens["branch"], multiple=multiple),
            regions=regions,
        ).to(device)
        asked = [self.model.project(v) for v in self.encoded.vision]
        return packed, self.model.hidden_states(packed, asked, self._observed(observed)), rollout.to(device)

    def _observed(self, parts: Sequence[Sequence[FramePart]]) -> list[list[ImageFeatures]]:
        """Return the image tokens of each sample's observed pictures."""
        found = []
        for chosen, own in zip(self.batch.samples, parts, strict=True) if parts else ():
            assert self.practice is not None, "rollouts with pictures, and nothing that encodes them"
            features = self.practice.encode([(chosen.frames[frame], box) for frame, box in own])
            found.append([self.model.project(f) for f in features])
        return found

    # Masks

    def decoded(
        self, packed: Packed, hidden: Float[Tensor, "B L D"]
    ) -> tuple[Float[Tensor, "P C"], MaskOutput]:
        """Return the embeddings of every row's `[SEG]` tokens and the masks they decode to."""
        at = (packed.input_ids == self.model.seg_token_id) & packed.loss_mask
        embeddings = self.model.seg_embeddings(hidden[at])
        return embeddings, self.model.sam2.decode(self.frames, at.nonzero()[:, 0], embeddings)

    def first_masks(
        self, packed: Packed, hidden: Float[Tensor, "B L D"], rollout: Int[Tensor, " M"]
    ) -> tuple[Int[Tensor, " P"], Float[Tensor, "P h w"], Bool[Tensor, " P"]]:
        """Return the answers that say `[SEG]`, the logits of the first one's mask in each, and whether it is
        shown. What makes masks of hidden states is a constant here: gradients reach the language model
        alone."""
        drawing = rollout[packed.input_ids[packed.loss_mask] == self.model.seg_token_id]
        first = torch.ones_like(drawing, dtype=torch.bool)
        first[1:] = drawing[1:] != drawing[:-1]
        with constant(self.model.text_hidden_fcs, self.model.sam2.sam_mask_decoder):
            if len(drawing):
                out = self.decoded(packed, hidden)[1]
            else:  # SAM2 can't decode nothing
                embeddings = self.model.seg_embeddings(hidden[0, :1])
                out = self.model.sam2.decode(
                    self.model.sam2.blank_features(hidden), drawing.new_zeros(1), embeddings
                )
        kept = first if len(drawing) else first.new_zeros(1)
        shown = self.model.sam2.shown(out).flatten(1).amax(1) > 0
        return drawing[first], out.logits[kept], shown[kept]

    def decode(self, embeddings: Float[Tensor, "P C"], samples: Int[Tensor, " P"]) -> Float[Tensor, "P h w"]:
        """Decode embeddings in the pictures of these samples (their indices) to mask logits."""
        return self.model.sam2.decode(self.frames, samples, embeddings).logits

    def click(self, at: Float[Tensor, "P 2"]) -> Float[Tensor, "P C"]:
        """Return the prompt embeddings of clicks at (x, y), shares of the picture."""
        return self.model.sam2.click_embeddings(at.to(self.model.device) * self.model.sam2.image_size)

    def mask_loss(
        self, logits: Float[Tensor, "P h w"], targets: Bool[Tensor, "P M M"], samples: Sequence[int]
    ) -> Float[Tensor, ""]:
        """Return BCE and dice loss of the masks of these samples (their indices), weighted as in SFT. The
        random points of a sample are seeded by the sample, so they don't depend on its process."""
        bce, dice = mask_losses(
            logits, targets, points=self.mask_points, seeds=[self.seed("mask points", i) for i in samples]
        )
        return self.mask_losses[0] * bce + self.mask_losses[1] * dice

    @torch.no_grad()
    def inverse_masks(self, texts: Sequence[str]) -> list[MaskPrediction]:
        """Return the inverse model's masks for G texts per sample. All texts of a picture share one packed
        row, and one that several rollouts say is drawn once."""
        size = self.settings.group
        said = [dict.fromkeys(texts[i * size : (i + 1) * size]) for i in range(len(self.batch.samples))]
        groups = [
            self.group_of(i, [self.referring_rollout(text) for text in own]) for i, own in enumerate(said)
        ]
        asked = [(i, text) for i, own in enumerate(said) for text in own]
        with self.timer.part("draw"), self.policies.using(self.settings.inverse):
            packed, hidden, _ = self.hidden(groups, [])
            logits = self.model.sam2.shown(self.decoded(packed, hidden)[1])
            confidence = mean_probability(logits.sigmoid(), logits > 0)
            targets = self.batch.targets[[i for i, _ in asked]]
            overlap = soft_iou(
                F.interpolate(logits[:, None], size=targets.shape[-2:], mode="bilinear")[:, 0].sigmoid(),
                targets,
            )
            found = {
                (i, text): MaskPrediction(
                    text=text, masks=((self.rle(z, i),),), confidence=float(sure), soft_iou=float(soft)
                )
                for (i, text), z, sure, soft in zip(asked, logits, confidence, overlap, strict=True)
            }
        return [found[i // size, text] for i, text in enumerate(texts)]

    @torch.no_grad()
    def drawn(self, groups: Sequence[Group]) -> list[list[RLE]]:
        """Return the masks that the active adapter draws for the `[SEG]` tokens of each of B x G sampled
        answers, in order; also of answers that are cut off and that nothing is learned from."""
        found: list[list[RLE]] = [[] for group in groups for _ in group.rollouts]
        groups = [
            replace(
                g, rollouts=tuple((*asked, replace(answer, trainable=True)) for *asked, answer in g.rollouts)
            )
            for g in groups
        ]
        with self.timer.part("draw"):
            packed, hidden, rollout = self.hidden(groups, [[] for _ in groups])
            drawing = rollout[packed.input_ids[packed.loss_mask] == self.model.seg_token_id].tolist()
            logits = self.model.sam2.shown(self.decoded(packed, hidden)[1]) if drawing else ()
            for answer, z in zip(drawing, logits, strict=True):
                found[answer].append(self.rle(z, answer // self.settings.group))
        return found

    def rle(self, logits: Float[Tensor, "h w"], index: int) -> RLE:
        chosen = self.batch.samples[index]
        return rle.encode(
            upsample(logits, size=self.model.sam2.image_size, height=chosen.height, width=chosen.width)
        )

    # Rewards

    def score(
        self, answers: Sequence[Prediction], weights: Collection[str], truths: Sequence[Prediction] = ()
    ) -> dict[str, Float[Tensor, "B G"]]:
        """Compute every reward part of B x G answers (text and mask, or text alone) against the truths: the
        samples' texts and masks, unless given."""
        size = self.settings.group
        with self.timer.part("reward"):
            drawn = bool(answers[0].masks)
            truths = truths or [
                Prediction(text=s.text, masks=((true_mask(s),),) if drawn and s.masks else ())
                for s in self.batch.samples
            ]
            judged = [replace(answer, text=answer.text.rstrip(".")) for answer in answers]
            return {
                name: torch.tensor(
                    [self.rewards[name](a, truths[i // size]) for i, a in enumerate(judged)]
                ).view(-1, size)
                for name in weights
            }


@contextmanager
def constant(*modules: nn.Module) -> Iterator[None]:
    """Let what is computed here have no gradient with respect to the modules' parameters."""
    trained = [p for module in modules for p in module.parameters() if p.requires_grad]
    for p in trained:
        p.requires_grad_(False)
    try:
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A task that the policy practises. A new one is a file with a `Loop` and a line in LOOPS
    (ans_core/rl/dual_loop.py)."""

    prefix: str
    """Prefix of its metrics."""
    takes: Callable[[Sample], bool]
    """The samples it can use."""
    wants: str
    """Those samples in words, for the error when there are none."""
    decodes_masks: bool = False
    """Whether the loop draws masks in its pictures, so that SAM2 must encode them."""
    acts_together: bool = True
    """Whether several micro-batches act as one, which samples their answers at once."""
    rewards: Callable[[Rl], Mapping[Any, float]]
    """Weights of its reward parts."""
    act: Callable[[RolloutStep], Experience]
    """Roll out and reward, under no_grad."""
    judged: Callable[[Rl], bool] = lambda settings: False
    """Whether the judge also scores its captions, in the part `meteor`."""
    read_reference: Callable[[RolloutStep, Experience], None]
    """Compute what the KL needs and keep it in the experience, under no_grad with the reference active."""
    learn: Callable[[RolloutStep, Experience], tuple[Float[Tensor, ""], dict[str, float]]]
    """Return the loss, with a gradient to the policy, and metrics."""
