"""Base of the settings' sections: its class, the ranges of numbers, and the errors of invalid values."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from typing import Annotated, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

LARGEST = 10**9
"""Upper limit of every whole number: more steps, pixels or samples than this are a typing error."""

Positive = Annotated[int, Field(gt=0, le=LARGEST)]
Count = Annotated[int, Field(ge=0, le=LARGEST)]
Share = Annotated[float, Field(ge=0, le=1)]
Rate = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]
Name = Annotated[str, Field(min_length=1)]
SAME = {"gpu": "cuda", "float32": "fp32", "bfloat16": "bf16"}
"""Words for settings that people know from elsewhere -> the name here, where spelling alone would suggest
another."""
SYNONYMS = {
    "learning_rate": "optim.lr", "lr": "optim.lr", "steps": "optim.steps", "batch": "optim.batch",
    "num_train_epochs": "optim.epochs", "max_epochs": "optim.epochs", "num_epochs": "optim.epochs",
    "max_steps": "optim.steps", "num_steps": "optim.steps",
    "batch_size": "optim.batch", "per_device_train_batch_size": "optim.batch", "global_batch_size": "optim.batch",
    "gradient_accumulation_steps": "optim.accumulate", "grad_accum": "optim.accumulate", "accumulative_counts": "optim.accumulate",
    "accumulate_grad_batches": "optim.accumulate", "gradient_clip_val": "optim.clip_grad",
    "max_norm": "optim.clip_grad",
    "warmup_ratio": "optim.warmup", "warmup_steps": "optim.warmup", "wd": "optim.weight_decay",
    "gradient_clipping": "optim.clip_grad", "max_grad_norm": "optim.clip_grad", "grad_clip": "optim.clip_grad",
    "optimizer": "optim.muon_lr", "scheduler": "optim.warmup", "lr_scheduler_type": "optim.warmup",
    "save_steps": "optim.save_every",
    "lora_r": "lora.rank", "r": "lora.rank", "lora_rank": "lora.rank", "lora_alpha": "lora.alpha",
    "lora_dropout": "lora.dropout",
    "fp16": "dtype", "bf16": "dtype", "fp32": "dtype", "precision": "dtype", "torch_dtype": "dtype",
    "amp": "dtype",
    "gradient_checkpointing": "checkpointing", "activation_checkpointing": "checkpointing",
    "max_seq_length": "sft.max_length", "max_seq_len": "sft.max_length", "model_max_length": "sft.max_length",
    "eval_steps": "val_every", "early_stopping_patience": "early_stop",
    "save_total_limit": "launch.keep_states", "num_frames": "sft.frames",
    "num_generations": "rl.group", "group_size": "rl.group", "num_rollouts": "rl.group",
    "beta": "rl.kl", "kl_coef": "rl.kl", "kl_beta": "rl.kl", "entropy_coef": "rl.entropy",
    "epsilon": "rl.clip_low", "clip_range": "rl.clip_low", "eps_clip": "rl.clip_low", "epsilon_low": "rl.clip_low",
    "epsilon_high": "rl.clip_high",
    "clip_ratio": "rl.clip_low", "cliprange": "rl.clip_low", "logit_clip": "rl.logit_guard",
    "clip_logits": "rl.logit_guard",
    "ema_decay": "rl.ema", "loop_weights": "rl.loops", "loop1_weight": "rl.loops", "loop2_weight": "rl.loops",
    "reward_funcs": "rl.rewards_caption", "max_prompt_length": "sft.max_length",
    "min_pixels": "agent.min_pixels", "max_pixels": "agent.max_pixels",
    "llm_judge_model": "judge.model", "judge_model": "judge.model", "judge_api_base": "judge.base_url",
    "api_base": "judge.base_url",
    "llm_judge_weight": "judge.judge_weight",
    "num_iterations": "rl.inner_steps", "loss_type": "rl.objective", "reward_weights": "rl.rewards_caption",
    "loss_mask": "sft.mask_weight", "loss_dice": "sft.dice_weight", "num_points": "sft.mask_points",
    "sampled_frames": "sft.frames",
    "ckpt_path": "base.sam2", "max_num_objects": "memory.max_objects", "save_top_k": "memory.keep_last",
    "prob_to_use_pt_input": "memory.prompts.kinds", "prob_to_use_box_input": "memory.prompts.kinds",
    "num_correction_pt_per_frame": "memory.prompts.clicks", "n_samples_per_prompt": "agent.rft.group",
    "max_turns": "agent.episode.calls",
    "max_new_tokens": "rl.max_tokens", "max_completion_length": "rl.max_tokens",
    "model": "base.internvl", "model_name_or_path": "base.internvl", "base_model": "base.internvl",
    "dataset": "prepare.sources", "datasets": "prepare.sources", "data": "prepare.sources",
    "data_path": "prepare.sources",
    "random_seed": "seed", "rng_seed": "seed", "num_workers": "launch.workers",
    "dataloader_num_workers": "launch.workers",
    "num_processes": "launch.processes", "nproc_per_node": "launch.processes", "num_gpus": "launch.processes",
    "gpus": "launch.processes", "devices": "launch.processes", "output_dir": "profile",
    "zero_stage": "launch.deepspeed_stage", "deepspeed": "launch.deepspeed_stage",
}  # fmt: skip
"""Names of settings in TRL, transformers, PEFT, DeepSpeed and Lightning -> the last parts of the name
here."""

Item = TypeVar("Item")
AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""Added to a tuple type: YAML has lists only."""
Listed = Annotated[tuple[Item, ...], AsTuple]


class Section(BaseModel):
    """`strict`: `true` is no number, 3.0 no count and "3" neither. Infinite numbers and NaN are refused."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, strict=True, allow_inf_nan=False
    )


class ConfigError(ValueError):
    """A setting that is unknown, mistyped or impossible. The message names the file, the line, the key and
    the remedy."""


class Impossible(ValueError):
    """Raised by a section's validator about one of its keys (dotted from the section), so that the error can
    name its line."""

    def __init__(self, key: str, why: str) -> None:
        super().__init__(why)
        self.keys = key.split(".")


def divides(part: int, total: int, *, key: str, why: str) -> None:
    if total % part:
        raise Impossible(key, f"{total} is no multiple of {part}: {why}")


def some_weight(weights: Iterable[float], *, key: str, why: str) -> None:
    if not any(weights):
        raise Impossible(key, f"{key}: all weights are 0, so {why}")


def no_twice(names: Sequence[str], *, key: str) -> None:
    for place, name in enumerate(names):
        if name in names[:place]:
            raise Impossible(f"{key}.{place}", f"{name!r} stands there twice")


def nearest(word: str, valid_names: Iterable[str]) -> str:
    """Return ` (did you mean 'this'?)`, or nothing if no known name is near."""
    names = list(valid_names)
    close = [SAME[word]] if SAME.get(word) in names else difflib.get_close_matches(word, names, n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""
