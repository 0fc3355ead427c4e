"""Settings of the stage `rl`."""

from __future__ import annotations

import math
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ans_core.config.names import GroundRewardName, LoopName, RewardName, TextRewardName
from ans_core.config.section import Count, Impossible, Positive, Rate, Share, Weight, some_weight
from ans_core.config.training import AutoCheckpointing, Dtype, KeepingOptim, Lora, Validated, some_length


class Rl(Validated):
    """Dual-loop GRPO from the merged SFT model, with an EMA teacher as the inverse model."""

    optim: KeepingOptim = KeepingOptim(steps=150, batch=8, lr=2e-4, weight_decay=0.0, save_every=25)
    modules_lr: Weight = 0.1
    """Factor on the learning rate of modules trained in full (projector, text_hidden_fcs, SAM2's mask
    decoder): LoRA tolerates a higher rate. At 1 a tiny model's masks break (LOG, 2026-11-21)."""
    lora: Lora = Lora()
    dtype: Dtype = "auto"
    """Dtype of the forward pass, rollouts included (autocast); log-probabilities and trained tensors are
    always fp32."""
    checkpointing: AutoCheckpointing = "none"
    """layers: recompute the layers in the backward pass, for memory. auto: as few of them as the longest rows
    need on these GPUs. Rollouts keep their KV cache."""
    loops: Annotated[dict[LoopName, Rate], Field(min_length=1)] = {"caption": 1.0, "mask": 0.2, "refer": 1.0}
    """Weights. caption: mask -> caption -> mask' (loop 1); masks without a caption (SA-1B) take part, if none
    of its rewards reads one. mask: caption -> mask -> caption' (loop 2), whose gradient is noisier: at equal
    weight it makes a tiny model lose what SFT learned of expressions (LOG); texts without a mask take part,
    if nothing reads a mask. refer: expression -> a mask, or "there is no such object". ground: picture -> a
    caption with masks. describe: picture -> caption. vqa: question -> answer."""
    absent: Annotated[float, Field(ge=0, lt=1)] = 0.25
    """Share of the loop refer's expressions that nothing in the picture fits, if the data has such."""
    expressions: Share = 0.5
    """Share of loop 2's samples that ask with a referring expression of the same thing, if the data has one,
    instead of the caption."""
    group: Annotated[int, Field(ge=2)] = 6
    """Rollouts of one sample (G). A single one has no baseline."""
    answers_at_once: Positive = 64
    """Answers of a loop that are sampled together, of as many micro-batches (optim.accumulate) as that takes,
    of one at least: a GPU spends its time on reading the weights for each token, however many answers get
    one."""
    oversample: Weight = 0.0
    """Share of additional candidates that are rolled out; of all, the groups whose rewards vary most are
    learned from. Groups of equal rewards teach nothing (DAPO's dynamic sampling)."""
    rows: Count = 0
    """Rows of SFT's mixture that every step learns from beside the loops, with SFT's losses, so that what no
    loop practises is not forgotten; 0 = none. At least one for each micro-batch of each process."""
    rows_weight: Weight = 1.0
    inner_steps: Positive = 1
    """Optimizer steps on the same rollouts (mu)."""
    temperature: Rate = 1.0
    max_tokens: Positive = 24
    logit_guard: Literal["guard", "clip"] = "guard"
    """guard: replace and count logits that are not finite. clip: also clamp all to +-30, in sampling and
    learning."""
    objective: Literal["dapo", "grpo", "dr_grpo", "bnpo", "gspo", "cispo"] = "dapo"
    clip_low: Rate = 0.2
    clip_high: Rate = 0.28
    kl: Weight = 0.02
    kl_words: Weight = 5.0
    """Weight of the KL to the reference of the words around `[SEG]` in loop 2 (exact, summed over an answer).
    These words are given, so no reward constrains them; without the KL the model more often says that the
    object is not there (LOG). 5 at loop 2's weight of 0.2 is as strong as 1 at 1."""
    entropy: Weight = 0.0
    """Weight of the mean entropy of the sampled tokens, as a bonus."""
    mask_truncated: bool = False
    """Leave answers that max_tokens cut off out of the loss."""
    combine_rewards: Literal["sum_then_normalise", "normalise_then_sum"] = "sum_then_normalise"
    scale_rewards: Literal["group", "batch", "within", "none"] = "within"
    """What advantages are divided by: the standard deviation of the group, of all rewards, of all rewards
    around their group's mean, or 1."""
    std_floor: Rate = 0.02
    inverse: Literal["teacher", "policy", "reference"] = "teacher"
    """The model that closes the loops. policy: the policy itself. reference: always the SFT model."""
    ema: Share = 0.9995
    """Decay of the teacher towards the policy, per update."""
    ema_warmup: bool = False
    """Use smaller decays in the first updates, (1 + n) / (10 + n), so that the teacher follows closely from
    the start. In a short run it then lags the policy by a few steps only, and the two agree on captions that
    no other model reads better (LOG); without warm-up it stays near SFT."""
    rewards_caption: Annotated[dict[RewardName, Weight], Field(min_length=1)] = {"iou": 1.0, "meteor": 1.0}
    rewards_mask: Annotated[dict[RewardName, Weight], Field(min_length=1)] = {"meteor": 1.0, "iou": 0.5}
    rewards_refer: Annotated[dict[Literal["iou"], Weight], Field(min_length=1)] = {"iou": 1.0}
    """Reward of the loop refer, as gRefCOCO scores: the IoU; nothing meant and nothing drawn = 1."""
    rewards_ground: Annotated[dict[GroundRewardName, Weight], Field(min_length=1)] = {
        "iou": 1.0,
        "meteor": 1.0,
    }
    """Rewards of the loop ground. iou: mean over all objects; missed ones and extra masks count 0. The others
    read the caption as text."""
    rewards_text: Annotated[dict[TextRewardName, Weight], Field(min_length=1)] = {"meteor": 1.0}
    """Rewards of the loops describe and vqa."""
    use_llm_judge: bool = False
    """Also judge loop 1's captions by questions (section `judge`): its part `meteor` becomes METEOR and
    judgement together."""
    use_llm_judge_loop2: bool = False
    """The same for loop 2."""
    mask_grid: Positive = 8
    """Cells on a side of the grid of noise that loop 2 adds to masks (ans_core/rl/mask_policy.py)."""
    mask_sigma: Rate = 0.5
    """Initial width of exploration; it is then steered so that a group's masks have a mean IoU of 0.75 to
    0.92."""
    mask_weight: Weight = 0.25
    """Weight of the supervised mask loss in loop 2."""
    stop_identical: Count = 50
    """The run stops after this many consecutive updates in which every group of loop 2 has one mask only; 0 =
    never."""
    samples_every: Count = 25
    """Rollouts between pictures of rollouts with their rewards; 0 = none."""

    @model_validator(mode="after")
    def _possible(self) -> Rl:
        some_length(self.optim)
        if self.lora.dropout:
            raise Impossible(
                "lora.dropout",
                f"lora.dropout is {self.lora.dropout:g}: what samples would be another policy than what "
                "learns; it must be 0",
            )
        for name in ("rewards_caption", "rewards_mask", "rewards_refer", "rewards_ground", "rewards_text"):
            some_weight(getattr(self, name).values(), key=name, why="nothing is rewarded")
        for flag, rewards in (
            ("use_llm_judge", self.rewards_caption),
            ("use_llm_judge_loop2", self.rewards_mask),
        ):
            if getattr(self, flag) and not rewards.get("meteor"):
                raise Impossible(
                    flag,
                    "METEOR and judge pay together, in the part `meteor`, which the loop's rewards lack: "
                    "add it",
                )
        if 0 < self.rows < self.optim.accumulate:
            raise Impossible(
                "rows",
                f"rows is {self.rows}, less than the {self.optim.accumulate} micro-batches of a step: take "
                "more, or 0",
            )
        return self

    @property
    def rolled_out(self) -> int:
        """Number of samples of which a step takes rollouts; it learns from `optim.batch` of them."""
        return math.ceil(self.optim.batch * (1 + self.oversample))

    @property
    def drawing(self) -> bool:
        """Whether anything gives what makes masks a gradient, so that it is trained."""
        return "mask" in self.loops or bool(self.rows)
