"""Settings that several training stages share."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ans_core.config.section import Count, Impossible, Positive, Rate, Section, Share, Weight


class Optim(Section):
    """AdamW (and Muon), linear warm-up, cosine to zero."""

    steps: Positive
    batch: Positive
    """Images (or clips) per optimizer step, over all processes."""
    lr: Annotated[float, Field(gt=0, le=1)]
    muon_lr: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Learning rate of Muon for the matrices of stacked layers, in AdamW's measure; 0: AdamW for all. Not
    with DeepSpeed."""
    weight_decay: Weight = 0.05
    warmup: Share = 0.05
    clip_grad: Rate = 1.0
    accumulate: Positive = 1
    save_every: Positive = 100
    """Steps between resumable training states."""

    @model_validator(mode="after")
    def _possible(self) -> Optim:
        if self.batch < self.accumulate:
            raise Impossible(
                "batch",
                f"{self.batch} is less than a sample for each of {self.accumulate} micro-batches "
                "(accumulate); raise it",
            )
        return self

    def check_shares(self, name: str, rows: int, what: str, *, processes: int) -> None:
        """Raise ValueError if a step has less than one of `rows` for each micro-batch of each process.
        `name`: of the section."""
        if rows < self.accumulate * processes:
            raise ValueError(
                f"{name}.optim.batch: {rows} {what} a step are less than one for each of {self.accumulate} "
                "micro-batches (accumulate) on"
                f" each of {processes} processes (launch); raise it, or lower {name}.optim.accumulate"
            )


class DataOptim(Optim):
    """The same, of a stage whose number of steps may follow from its data."""

    steps: Count
    """0: by `epochs`."""
    epochs: Weight = 0.0
    """Passes over the training data instead of `steps`, which is then 0: a profile or command line that sets
    one of the two drops the other. 0: by `steps`."""

    @model_validator(mode="after")
    def _one_length(self) -> DataOptim:
        if self.steps and self.epochs:
            raise Impossible(
                "epochs",
                f"{self.epochs:g} epochs and {self.steps} steps are both given; set one of them to 0",
            )
        return self


class KeepingOptim(DataOptim):
    """The same, of a stage whose model can be used as it was after earlier steps."""

    keep_every: Count = 0
    """Steps between trained tensors that stay in `steps/<N>` of the stage's folder, for evaluation, prediction
    and conversion as they were after N steps; 0 = none."""


class Validated(Section):
    """Settings of a stage that can measure itself on held-out data while it trains."""

    optim: KeepingOptim
    val_every: Count = 0
    """Steps between validations on the split `val` (sft: losses of rows of the same mixture; rl: rewards of the
    loops); the stage's result is then the best of them. 0 = none."""
    val_rows: Positive = 64
    """Rows; in rl, samples of each loop."""
    early_stop: Count = 0
    """The stage ends after this many validations in a row without a lower loss; 0 = never."""
    keep_best: Count = 0
    """Of the steps kept by `optim.keep_every`, those with the lowest validation loss that stay; 0 = all."""

    @model_validator(mode="after")
    def _measured(self) -> Validated:
        for name in ("early_stop", "keep_best"):
            if getattr(self, name) and not self.val_every:
                raise Impossible(name, f"{getattr(self, name)} without validations; set val_every")
        if self.keep_best and (not self.optim.keep_every or self.optim.keep_every % self.val_every):
            raise Impossible(
                "keep_best",
                f"of every kept step the validation loss is needed: optim.keep_every {self.optim.keep_every} "
                f"must be a multiple of val_every {self.val_every}",
            )
        return self


def some_length(optim: DataOptim) -> None:
    """Refuse settings that train nothing. Raises Impossible."""
    if not (optim.steps or optim.epochs):
        raise Impossible(
            "optim.steps", "optim.steps and optim.epochs are both 0: nothing is learned; set one of them"
        )


Dtype = Literal["auto", "fp32", "bf16"]
"""auto: bf16 where this machine computes it faster than fp32 (GPUs; processors with bf16 instructions), else
fp32."""
Checkpointing = Literal["none", "layers"]
"""layers: the layers of the language model, and of the vision tower where it is trained, keep their inputs
alone and run again in the backward pass: a third more computation for a fraction of the memory."""
AutoCheckpointing = Literal["auto", Checkpointing]
"""auto: as few of them as this machine's memory asks for (docs/full-size.md); none on a CPU."""


class Lora(Section):
    rank: Positive = 16
    alpha: Positive = 32
    dropout: Share = 0.0
