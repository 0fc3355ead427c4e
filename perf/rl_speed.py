"""A whole GRPO step here and in TRL: generation, rewards, reference and update, in turns in one process on
one CPU thread.

    python perf/rl_speed.py [--repeats 7]

Both sides have the same weights, LoRA, optimizer, rewards, objective and numbers of tokens; before anything
is measured, their log-probabilities and gradients of the same answers are compared. The reference is the
model with adapters off.

1. Text, by length of the prompt: against TRL's `GRPOTrainer.training_step`, with its gradient checkpointing
   off, and on (its default).
2. The memory of both: bytes that are no file's over those before the step, each in processes of its own.
3. Captions of regions in pictures: against TRL's way, written out here for the same model (TRL has no Sa2VA):
   each of the G copies brings
   picture and prompt anew to generation, reference and update.
"""

from __future__ import annotations

import argparse
import io
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from ans_core import prompts
from ans_core.benchmarks.loops import caption_request, true_mask
from ans_core.config import Language, Rl, Sam, Vision
from ans_core.data.collate import prefix_ids, question_ids
from ans_core.data.scene_text import region_caption
from ans_core.data.scenes import draw_scene
from ans_core.data.views import Grid
from ans_core.inference.generation import stop_ids, text_of
from ans_core.inference.prefill import PrefilledBatch, encoded
from ans_core.model.adapters import LORA_TARGETS, Policies, lora_config, policy_modules, rl_config
from ans_core.model.grounding import GroundingConfig
from ans_core.model.network import Network
from ans_core.model.packing import Packed
from ans_core.pictures import rle
from ans_core.pictures.transforms import grid_cells
from ans_core.pretrain.build import CHAT_TOKENS, build_tiny, build_tokenizer, tiny_config
from ans_core.rewards import REWARDS
from ans_core.rl import grpo, text_loop
from ans_core.rl.batch import EncodedImages, rl_batch
from ans_core.rl.experience import Experience
from ans_core.rl.mask_policy import GridGaussian
from ans_core.rl.rollout import Group, Reader, SampledAnswer, Segment, pack, sample, token_logps
from ans_core.rl.step import Exploration, RolloutStep, StepTimer
from ans_core.types import Prediction, Sample
from tests.tiny import GROUNDING

BATCH, GROUP = 4, 4
WORDS, ANSWER, CAPTION = 2000, 32, 24
"""Vocabulary of the text model; tokens of an answer and of a caption, which all are that long."""
PROMPTS = (64, 256, 512)
PICTURES = (96, 256)
"""Pixels on a side: the `tiny` profile's, 36 image tokens; and those that give 256, as in the published
sizes."""
LANGUAGE = {"hidden": 256, "layers": 4, "heads": 8, "kv_heads": 4, "mlp": 1024}
"""Sizes of the text model. perf/gpu.py measures others, and other numbers above."""
SIDES = ("own", "TRL", "TRL, checkpointing")
LORA = {"rank": 16, "alpha": 32, "dropout": 0.0}
LR, KL, STD_FLOOR, CLIP_LOW, CLIP_HIGH, CLIP_GRAD = 1e-4, 0.02, 1e-4, 0.2, 0.28, 1.0
PROCESSES = 3
AGREE = 1e-4
"""Log-probabilities, and gradients as shares of the largest."""


def advantages(rewards: Sequence[float]) -> Tensor:
    return grpo.advantages(
        torch.tensor(rewards).view(-1, GROUP), scale="group", std_floor=STD_FLOOR
    ).flatten()


def grpo_loss(logps: Tensor, reference: Tensor, advantage: Tensor, rollout: Tensor) -> Tensor:
    objective = grpo.Objective(form="dapo", clip_low=CLIP_LOW, clip_high=CLIP_HIGH, max_tokens=ANSWER)
    loss, _ = grpo.policy_loss(
        logps, logps.detach(), advantage[rollout], rollout, objective, answers=len(advantage)
    )
    return loss + KL * grpo.token_kl(logps, reference)[0]


class Learner:
    """The optimizer of one side's trained parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=LR, weight_decay=0.0)

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.trained, CLIP_GRAD)
        self.optimizer.step()
        self.optimizer.zero_grad()


# Text


def distinct(completions: Sequence[str], **_: object) -> list[float]:
    """The reward, in TRL's form: share of different words."""
    return [len(set(text.split())) / ANSWER for text in completions]


def text_model() -> Network:
    """A word is a token, and special tokens lie beyond the model's vocabulary, so no answer ends before its
    time."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=CHAT_TOKENS[2], pad_token=CHAT_TOKENS[0]
    )
    tokenizer.add_tokens([*CHAT_TOKENS, *prompts.INTERNVL_TOKENS, *prompts.SA2VA_TOKENS], special_tokens=True)
    config = tiny_config(
        vision={"image_size": 16, "patch_size": 8, "hidden": 32, "layers": 1, "heads": 2, "mlp": 64},
        language=LANGUAGE,
        grounding=GROUNDING,
        tokenizer=tokenizer,
        template="qwen_chat",
        video_frames=2,
    )  # fmt: skip
    config.backbone["text_config"] |= {"vocab_size": WORDS, "pad_token_id": None}
    torch.manual_seed(0)
    return Network(config, tokenizer).eval()


class Own:
    def __init__(self, *, half: bool = False) -> None:
        """half: frozen weights in bf16, for steps under autocast."""
        self.model = text_model()
        if half:
            for p in self.model.parameters():
                p.data = p.data.bfloat16()
            self.model.norms_in_fp32()
        self.policies = Policies(self.model, rl_config(**LORA, modules=[]), seed=0)
        # at their usual start, 0, policy and reference would be one
        for name, p in self.model.named_parameters():
            if ".lora_B.policy." in name:
                torch.nn.init.normal_(p, std=0.02)
        self.reader = Reader(temperature=1.0, forbidden=[], guard="guard")
        self.learner = Learner(self.model)

    def ids(self, asked: Sequence[str]) -> Tensor:
        return torch.tensor([self.model.tokenizer.encode(text) for text in asked])

    @torch.no_grad()
    def sample_answers(self, ids: Tensor, turn: int) -> list[SampledAnswer]:
        """As `predict.prompt` makes text requests: nothing but the first token is read beforehand."""
        embeds, there = self.model.embed_text(ids), torch.ones_like(ids, dtype=torch.bool)
        first, at_0 = there[:, :1], torch.zeros(len(ids), 1, dtype=torch.long)
        _, cache = self.model.backbone.language_model(
            embeds[:, :1], attention_mask=first.long(), position_ids=at_0
        )
        assert cache is not None
        prompted = PrefilledBatch(
            prefixes=embeds[:, :1],
            prefix_attention=first,
            prefix_cache=cache,
            shift=at_0[:, 0],
            prefix_of=torch.arange(len(ids)),
            embeds=embeds[:, 1:],
            attention=there[:, 1:],
            segs=torch.zeros_like(there[:, 1:]),
            images=[[] for _ in ids],
        )
        seeds = range(turn * 1000, turn * 1000 + len(ids) * GROUP)
        return sample(self.model, prompted, group=GROUP, max_tokens=ANSWER, reader=self.reader, seeds=seeds)

    def packed(self, ids: Tensor, answers: Sequence[Sequence[int]]) -> tuple[Packed, Tensor]:
        groups = []
        for i, (*prefix, last) in enumerate(ids.tolist()):
            asked, own = Segment(ids=(last,), trainable=False), answers[i * GROUP : (i + 1) * GROUP]
            groups.append(
                Group(
                    prefix=tuple(prefix),
                    rollouts=tuple((asked, Segment(ids=tuple(a), trainable=True)) for a in own),
                )
            )
        fields, rollout = pack(groups, pad_id=0)
        return Packed(**fields), rollout

    def logps(self, packed: Packed) -> Tensor:
        hidden = self.model.hidden_states(packed, [None] * len(packed.input_ids))
        return token_logps(self.model, packed, hidden, self.reader)[0]

    def reference(self, packed: Packed) -> Tensor:
        with torch.no_grad(), self.policies.using("reference"):
            return self.logps(packed)

    def step(self, length: int, turn: int) -> int:
        """The number of tokens said."""
        ids = self.ids(drawn(length, turn))
        said = self.sample_answers(ids, turn)
        texts = [self.model.tokenizer.decode(s.ids, skip_special_tokens=True) for s in said]
        advantage = advantages(distinct(texts))
        packed, rollout = self.packed(ids, [s.ids for s in said])
        reference = self.reference(packed)
        grpo_loss(self.logps(packed), reference, advantage, rollout).backward()
        self.learner.step()
        return len(rollout)


class Trl:
    """TRL's trainer over a copy of an `Own`'s text model and adapter. What it does more is to keep metrics,
    always."""

    def __init__(self, own: Own, *, checkpointing: bool = False, half: bool = False) -> None:
        """half: on a GPU, frozen weights in bf16."""
        import trl
        from datasets import Dataset

        language = own.model.vlm.model.language_model
        model = Qwen2ForCausalLM(deepcopy(language.config))
        trained = own.policies.tensors("policy")
        plain = {
            name.replace(".base_layer", ""): value
            for name, value in language.state_dict().items()
            if ".lora_" not in name
        }
        head = {"lm_head.weight": own.model.vlm.lm_head.weight}
        model.load_state_dict({f"model.{name}": value for name, value in plain.items()} | head)
        if half:
            for p in model.parameters():
                p.data = p.data.bfloat16()
        lora = lora_config(**LORA)
        lora.target_modules = LORA_TARGETS.replace(r".*language_model\.", r".*")
        options = trl.GRPOConfig(
            output_dir=tempfile.gettempdir(),
            per_device_train_batch_size=BATCH * GROUP,
            num_generations=GROUP,
            max_completion_length=ANSWER,
            beta=KL,
            loss_type="dapo",
            scale_rewards="group",
            epsilon=CLIP_LOW,
            epsilon_high=CLIP_HIGH,
            gradient_checkpointing=checkpointing,
            bf16=half,
            use_cpu=not half,
            report_to=[],
            logging_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
        )
        self.trainer = trl.GRPOTrainer(
            model=model,
            reward_funcs=distinct,
            args=options,
            train_dataset=Dataset.from_dict({"prompt": ["w0"] * BATCH}),
            processing_class=own.model.tokenizer,
            peft_config=lora,
        )
        self.model = self.trainer.model
        # this and the next are done by `train`, which is not called
        self.trainer.current_gradient_accumulation_steps = 1
        if checkpointing:
            self.model.gradient_checkpointing_enable()
        with torch.no_grad():
            for name, value in trained.items():
                theirs = name.replace("internvl.model.language_model.", "base_model.model.model.").replace(
                    ".*.", ".default."
                )
                self.model.get_parameter(theirs).copy_(value)
        self.learner = Learner(self.model)
        assert sum(p.numel() for p in self.learner.trained) == sum(p.numel() for p in own.learner.trained)

    def step(self, length: int, turn: int) -> int:
        asked = [{"prompt": text} for text in drawn(length, turn) for _ in range(GROUP)]
        self.trainer.training_step(self.model, asked, None)
        self.learner.step()
        return round(self.trainer._metrics["train"]["completions/mean_length"][-1] * BATCH * GROUP)


def drawn(length: int, turn: int) -> list[str]:
    """Random prompts of so many words."""
    words = torch.randint(
        WORDS,
        (BATCH, length),
        generator=torch.Generator("cpu").manual_seed(1000 * length + turn),
        device="cpu",
    )
    return [" ".join(f"w{i}" for i in row) for row in words.tolist()]


def difference(own: Own, trl: Trl, length: int) -> tuple[float, float, float]:
    """Largest differences of the policy's and of the reference's log-probabilities, and of gradients (as a
    share of the largest), for the same answers and advantages."""
    trainer, ids = trl.trainer, own.ids(drawn(length, turn=0))
    answers = torch.tensor([s.ids for s in own.sample_answers(ids, turn=0)])
    assert answers.shape == (BATCH * GROUP, ANSWER), answers.shape
    advantage = advantages([i % 3 / 2 for i in range(BATCH * GROUP)])
    packed, rollout = own.packed(ids, answers.tolist())
    reference, logps = own.reference(packed), own.logps(packed)
    grpo_loss(logps, reference, advantage, rollout).backward()

    asked = ids.repeat_interleave(GROUP, dim=0)
    whole = torch.cat([asked, answers], dim=1)
    trl.model.train()
    with torch.no_grad():
        theirs = trainer._get_per_token_logps_and_entropies(trl.model, whole, torch.ones_like(whole), ANSWER)[
            0
        ]
        with trl.model.disable_adapter():
            their_reference = trainer._get_per_token_logps_and_entropies(
                trl.model, whole, torch.ones_like(whole), ANSWER
            )[0]
    inputs = {
        "prompt_ids": asked, "prompt_mask": torch.ones_like(asked), "completion_ids": answers,
        "completion_mask": torch.ones_like(answers), "advantages": advantage,
        "ref_per_token_logps": their_reference, "num_items_in_batch": torch.tensor(answers.numel()),
    }  # fmt: skip
    trainer._compute_loss(trl.model, inputs).backward()
    gradients = [torch.cat([p.grad.flatten() for p in side.learner.trained]) for side in (own, trl)]
    for side in (own, trl):
        side.learner.optimizer.zero_grad()
    return (
        float((logps.detach() - theirs.flatten()).abs().max()),
        float((reference - their_reference.flatten()).abs().max()),
        float((gradients[0] - gradients[1]).abs().max() / gradients[0].abs().max()),
    )


def measured(side: str) -> None:
    """The longest prompts after one step with short ones, in which libraries load and the optimizer makes its
    state."""
    from peak import watched

    own = Own()
    one = own if side == "own" else Trl(own, checkpointing=side.endswith("checkpointing"))
    one.step(8, turn=0)
    with watched() as peak:
        one.step(PROMPTS[-1], turn=1)
    print(f"{peak.grown / 1e6:.0f}")


# Captions of regions in pictures


def regions(side: int, count: int) -> list[Sample]:
    samples = []
    for index in range(count):
        scene, file = draw_scene(seed=7, split="val", index=index, image_size=side), io.BytesIO()
        Image.fromarray(scene.image).save(file, "PNG")
        samples.append(
            Sample(
                sample_id=str(index), dataset="drawn", image_id=str(index), frames=(file.getvalue(),),
                height=side, width=side, task="region_caption", text=region_caption(scene.things[0]),
                masks=((rle.encode(scene.masks[0]),),),
            )
        )  # fmt: skip
    return samples


class Captions:
    """Both ways over one model, of the `tiny` profile's sizes but for the vision tower's picture."""

    def __init__(self, side: int) -> None:
        told = [s.text for s in regions(64, 200)] + [prompts.REGION_EVAL, prompts.region_text([1])] * 50
        tokenizer = build_tokenizer(told)
        config = tiny_config(
            vision=Vision(image_size=side).model_dump(), language=Language().model_dump(),
            grounding=GroundingConfig(**Sam().model_dump()), tokenizer=tokenizer, template="qwen_chat",
            video_frames=4,
        )  # fmt: skip
        self.model = build_tiny(config, tokenizer, seed=0).eval()
        self.policies = Policies(
            self.model, rl_config(**LORA, modules=policy_modules(self.model, drawing=False)), seed=0
        )
        for name, p in self.model.named_parameters():
            if ".lora_B.policy." in name:
                torch.nn.init.normal_(p, std=0.02)
        self.reader = Reader(
            temperature=1.0, forbidden=[self.model.image_token_id, *stop_ids(self.model)], guard="guard"
        )
        self.learner = Learner(self.model)
        chosen = {
            "group": GROUP,
            "max_tokens": CAPTION,
            "kl": KL,
            "scale_rewards": "group",
            "clip_low": CLIP_LOW,
            "clip_high": CLIP_HIGH,
        }
        default = Rl()
        self.settings = default.model_copy(update=chosen)
        samples = regions(side, BATCH)
        self.batch = rl_batch(samples, [s.text for s in samples], self.model, mask_size=32)
        self.requests = [caption_request(s, true_mask(s)) for s in samples]
        self.cells = [
            [grid_cells(rle.decode(m), grid=self.shown) for m in r.mask_prompts] for r in self.requests
        ]
        start = prefix_ids(tokenizer, template=config.template, frame_tokens=self.batch.views[0].tokens)
        self.asked = [
            start
            + question_ids(
                tokenizer,
                r.text.removeprefix("<image>"),
                template=config.template,
                cells=[int(c.sum()) for c in cells],
            )
            for r, cells in zip(self.requests, self.cells, strict=True)
        ]
        self.frames = self.model.sam2.encode(self.batch.pixels)
        """Nothing is drawn from them."""

    @property
    def shown(self) -> Grid:
        """All pictures are of one size."""
        return self.batch.views[0].shown

    def round(self, turn: int) -> RolloutStep:
        with torch.no_grad():
            vision = encoded(self.model, self.batch.views)
        return RolloutStep(
            policies=self.policies, settings=self.settings, reader=self.reader, batch=self.batch,
            encoded=EncodedImages(vision=vision, frames=self.frames), rewards=REWARDS,
            mask_policy=GridGaussian(8), exploration=Exploration(width=0.5), mask_points=1,
            mask_losses=(0.0, 0.0), seeds=(0, turn), timer=StepTimer(),
        )  # fmt: skip

    def act(self, step: RolloutStep) -> Experience:
        with torch.no_grad():
            done = text_loop.text_experience(step, self.requests, "captions")
            done.advantage = advantages(done.rewards["meteor"].flatten().tolist()).view(-1, GROUP)
            with self.policies.using("reference"):
                text_loop.read_reference(step, done)
        return done

    def own(self, turn: int) -> int:
        step = self.round(turn)
        done = self.act(step)
        text_loop.learn(step, done)[0].backward()
        self.learner.step()
        return sum(len(logps) for logps in done.sampled_logps)

    def read(self, answers: Tensor) -> tuple[Tensor, Tensor]:
        """(embeds, attention) of B x G rows, each with its picture and its whole prompt, padded on the left,
        as TRL makes them."""
        width = max(len(ids) for ids in self.asked)
        pad = self.model.tokenizer.pad_token_id
        ids = torch.tensor([[pad] * (width - len(ids)) + ids for ids in self.asked]).repeat_interleave(
            GROUP, dim=0
        )
        ids = torch.cat([ids, answers], dim=1)
        views = [view for view in self.batch.views for _ in range(GROUP)]
        images = self.model.project(self.model.vision_features(views)).split(views)
        return self.model.embed(ids, images, [c for c in self.cells for _ in range(GROUP)]), ids.ne(
            pad
        ).long()

    def logps(self, answers: Tensor) -> Tensor:
        embeds, attention = self.read(answers)
        hidden = self.model.vlm.model.language_model(
            inputs_embeds=embeds, attention_mask=attention, use_cache=False
        ).last_hidden_state
        logp = self.reader(self.model.logits(hidden[:, -CAPTION - 1 : -1].flatten(0, 1))).log_softmax(dim=1)
        return logp.gather(1, answers.flatten()[:, None])[:, 0]

    def repeated(self, _: int) -> int:
        with torch.no_grad():
            embeds, attention = self.read(torch.zeros(BATCH * GROUP, 0, dtype=torch.long))
            answers = self.model.vlm.generate(
                inputs_embeds=embeds, attention_mask=attention, max_new_tokens=CAPTION, do_sample=True,
                top_k=0, top_p=1.0,
                temperature=1.0, suppress_tokens=self.reader.forbidden,
                pad_token_id=self.model.tokenizer.pad_token_id,
            )  # fmt: skip
            said = [text_of(self.model, ids) for ids in answers.tolist()]
            truth = [Prediction(text=s.text) for s in self.batch.samples]
            reward = [
                REWARDS["meteor"](Prediction(text=t.rstrip(".")), truth[i // GROUP])
                for i, t in enumerate(said)
            ]
            with self.policies.using("reference"):
                reference = self.logps(answers)
        rollout = torch.arange(BATCH * GROUP).repeat_interleave(CAPTION)
        grpo_loss(self.logps(answers), reference, advantages(reward), rollout).backward()
        self.learner.step()
        return answers.numel()

    @torch.no_grad()
    def difference(self) -> float:
        """Largest difference between the log-probabilities of the same captions."""
        step = self.round(turn=0)
        done = self.act(step)
        text_loop.learn(step, done)
        answers = [rollout[-1].ids for group in done.groups for rollout in group.rollouts]
        return float((done.behaviour - self.logps(torch.tensor(answers))).abs().max())


# Times


def seconds(ways: Sequence[Callable[[int], int]], *, tokens: int, repeats: int) -> list[list[float]]:
    """Of every way, in turns; a first turn is not counted. All must say the same number of tokens."""
    found: list[list[float]] = [[] for _ in ways]
    for turn in range(repeats + 1):
        for times, way in zip(found, ways, strict=True):
            start_s = time.perf_counter()
            count = way(turn)
            if turn:
                times.append(time.perf_counter() - start_s)
            assert count == tokens, f"{count} tokens were said, not {tokens}"
    return found


def told(what: str, own: list[float], others: dict[str, list[float]]) -> None:
    print(f"{what}: {min(own):.2f} / {statistics.median(own):.2f} s", end="")
    for name, times in others.items():
        ratios = [b / a for a, b in zip(own, times, strict=True)]
        print(
            f"; {name} {min(times):.2f} / {statistics.median(times):.2f} s = "
            f"{statistics.median(ratios):.2f} times"
            f" ({min(ratios):.2f} to {max(ratios):.2f}), of the minima {min(times) / min(own):.2f}",
            end="",
        )
    print(flush=True)


def text(repeats: int) -> None:
    own = Own()
    sides = {"own": own, "TRL": Trl(own), "TRL, checkpointing": Trl(own, checkpointing=True)}
    gaps = [difference(own, sides["TRL"], length) for length in PROMPTS]
    largest = [max(values) for values in zip(*gaps, strict=True)]
    print(
        "largest differences of log-probabilities, the reference's, gradients: "
        + ", ".join(f"{gap:.1e}" for gap in largest)
    )
    assert max(largest) < AGREE, largest
    for length in PROMPTS:
        ways = [partial(side.step, length) for side in sides.values()]
        times = dict(zip(sides, seconds(ways, tokens=BATCH * GROUP * ANSWER, repeats=repeats), strict=True))
        told(f"prompts of {length} tokens", times.pop("own"), times)


def memory() -> None:
    found: dict[str, list[int]] = {side: [] for side in SIDES}
    for _ in range(PROCESSES):
        for side, grown in found.items():
            out = subprocess.run(
                [sys.executable, __file__, "--measure", side], check=True, stdout=subprocess.PIPE, text=True
            ).stdout
            grown.append(int(out.split()[-1]))
    own = statistics.median(found["own"])
    told = [
        f"{side} {statistics.median(g)} MB ({min(g)} to {max(g)}), {own / statistics.median(g):.2f}"
        for side, g in found.items()
    ]
    print(f"prompts of {PROMPTS[-1]} tokens, memory and own as a share of it: " + "; ".join(told), flush=True)


def pictures(repeats: int) -> None:
    for side in PICTURES:
        captions = Captions(side)
        gap = captions.difference()
        assert gap < AGREE, gap
        ours, theirs = seconds(
            [captions.own, captions.repeated], tokens=BATCH * GROUP * CAPTION, repeats=repeats
        )
        lengths = sorted(len(ids) for ids in captions.asked)
        what = (
            f"pictures of {side} pixels, {sum(captions.batch.views[0].tokens)} of {lengths[0]} to "
            f"{lengths[-1]} tokens of the prompt"
        )
        told(what, ours, {"TRL's way": theirs})


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--repeats", type=int, default=7)
    options.add_argument("--measure", choices=SIDES, help=argparse.SUPPRESS)
    given = options.parse_args()
    torch.set_num_threads(1)
    if given.measure:
        measured(given.measure)
        return
    print(
        f"B = {BATCH}, G = {GROUP}; a step's seconds, minimum / median of {given.repeats}; median ratio of "
        "a turn (its range)"
    )
    text(given.repeats)
    memory()
    pictures(given.repeats)


if __name__ == "__main__":
    main()
