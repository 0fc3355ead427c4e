"""Settings of the stage `rl`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ans_core.config.section import Count, Positive, Rate, Section, Share
from ans_core.config.training import Lora, Optim

LoopName = Literal["caption", "mask", "describe", "vqa"]
RewardName = Literal["iou", "soft_iou", "meteor", "meteor_nltk", "format", "confidence", "cider"]
TextRewardName = Literal["meteor", "meteor_nltk", "format", "cider"]


class Rl(Section):
    """Dual-loop GRPO from the merged SFT model, with an EMA teacher as the inverse model."""

    optim: Optim = Optim(steps=150, batch=8, lr=2e-4, weight_decay=0.0, save_every=25)
    modules_lr: Annotated[float, Field(ge=0)] = 1.0
    """Factor on the learning rate of what is trained whole (projector, text_hidden_fcs, SAM2's mask decoder): LoRA stands a higher one."""
    lora: Lora = Lora()
    dtype: Literal["fp32", "bf16"] = "bf16"
    """Of the forward pass, rollouts included (autocast); log-probabilities and trained tensors are fp32 in any case."""
    loops: Annotated[dict[LoopName, Rate], Field(min_length=1)] = {"caption": 1.0, "mask": 1.0}
    """Weights. caption: mask -> caption -> mask' (loop 1). mask: caption -> mask -> caption' (loop 2), whose gradient is the noisier: a
    tiny model loses by it at equal weight what SFT learned of expressions (LOG). describe: picture -> caption. vqa: question -> answer."""
    adaptive_loops: Annotated[float, Field(ge=0)] = 0.0
    """Power with which a loop's weight follows what it still misses of its best reward; 0 = fixed weights."""
    expressions: Share = 0.5
    """Of loop 2's samples, the share asked for by a referring expression of the same thing, where the data has one, not by the caption."""
    curriculum: Literal["none", "area", "length", "objects"] = "none"
    """Easy samples first: large masks, short captions, or pictures with few regions."""
    curriculum_start: Annotated[float, Field(gt=0, le=1)] = 0.3
    """Share of the samples, the easiest, that it begins with ..."""
    curriculum_until: Share = 0.5
    """... and share of the steps after which all take part."""
    group: Annotated[int, Field(ge=2)] = 6
    """Rollouts of one sample (G). One alone has no baseline."""
    oversample: Annotated[float, Field(ge=0)] = 0.0
    """Share of further candidates that are rolled out; groups whose rewards are all equal give way to theirs (DAPO's dynamic sampling)."""
    inner_steps: Positive = 1
    """Optimizer steps on the same rollouts (mu)."""
    temperature: Rate = 1.0
    max_tokens: Positive = 24
    logit_guard: Literal["guard", "clip"] = "guard"
    """guard: logits that are not finite are replaced and counted. clip: all are also clamped to +-30, in sampling and learning."""
    objective: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo"] = "dapo"
    clip_low: Rate = 0.2
    clip_high: Rate = 0.28
    kl: Annotated[float, Field(ge=0)] = 0.02
    kl_words: Annotated[float, Field(ge=0)] = 1.0
    """Of the words around `[SEG]` in loop 2, to the reference (exact, summed over an answer): they are given, so no reward holds them, and
    without it what is asked for is more often said not to be there (LOG)."""
    entropy: Annotated[float, Field(ge=0)] = 0.0
    """Weight of the mean entropy of the tokens said, as a bonus."""
    mask_truncated: bool = False
    """Leaves answers out of the loss that max_tokens cut off."""
    combine_rewards: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    scale_rewards: Literal["group", "batch", "within", "none"] = "within"
    """What advantages are divided by: the deviation of the group, of all rewards, of all rewards around their group's mean, or 1."""
    std_floor: Rate = 0.02
    inverse: Literal["teacher", "policy", "reference"] = "teacher"
    """Who closes the loops. policy: itself. reference: the SFT model, for good."""
    ema: Share = 0.99
    """Decay of the teacher towards the policy, by update."""
    ema_warmup: bool = True
    """Decays of the first updates are smaller, (1 + n) / (10 + n): the teacher follows closely from the start. Over a short run it then is
    the policy of some steps ago, and the two agree on captions that nobody else reads better (LOG); without, it stays near SFT."""
    rewards_caption: Annotated[dict[RewardName, float], Field(min_length=1)] = {"iou": 1.0, "meteor": 1.0}
    rewards_mask: Annotated[dict[RewardName, float], Field(min_length=1)] = {"meteor": 1.0, "iou": 0.5}
    rewards_text: Annotated[dict[TextRewardName, float], Field(min_length=1)] = {"meteor": 1.0}
    """Of the loops describe and vqa."""
    use_llm_judge: bool = False
    """Loop 1's captions are also judged by questions (section `judge`): its part `meteor` becomes METEOR and judgement together."""
    use_llm_judge_loop2: bool = False
    """The same for loop 2."""
    mask_policy: Literal["grid_gaussian", "seg_gaussian", "bernoulli", "multimask", "token"] = "grid_gaussian"
    """Where loop 2's randomness lies (ans_core/rl/mask_policy.py)."""
    mask_grid: Positive = 8
    """grid_gaussian: cells on a side of the grid that mask actions live on."""
    mask_sigma: Rate = 0.5
    """Width that exploration starts with; it is then steered so that a group's masks overlap by 0.75 to 0.92."""
    mask_weight: Annotated[float, Field(ge=0)] = 0.25
    """Of the supervised mask loss beside loop 2."""
    stop_identical: Count = 50
    """Updates in a row in which every group of loop 2 has one mask only, after which the run stops; 0 = never."""
    monitor_every: Count = 10
    """Steps between gradient norms by part of the model; 0 = never."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 0.0
    """A part's gradient norm, before clipping, at which a monitored step stops the run; 0 = never."""
    samples_every: Count = 25
    """Rollouts between pictures of what was tried and what it earned; 0 = none."""

    @model_validator(mode="after")
    def _possible(self) -> Rl:
        if self.lora.dropout:
            raise ValueError(f"lora.dropout is {self.lora.dropout:g}: what samples would be another policy than what learns; it must be 0")
        for name in ("rewards_caption", "rewards_mask", "rewards_text"):
            if not any(getattr(self, name).values()):
                raise ValueError(f"{name}: all weights are 0, so nothing is rewarded")
        return self
