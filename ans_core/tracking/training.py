"""A TrackingBatch -> loss and curves; which modules of SAM2 learn, and the check that gradients reach all of
them and nothing else."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Float
from sam2.modeling.sam.transformer import Attention
from torch import Tensor, nn

from ans_core import dist
from ans_core.config.memory import MemoryLoss
from ans_core.losses import mean_iou
from ans_core.model.grounding import Grounding
from ans_core.tracking.batch import TrackingBatch, predictions
from ans_core.tracking.forward import Remember, encode, remembered, track
from ans_core.tracking.loss import frame_losses, total

EVERY_STEP = ("memory_attention", "memory_encoder", "image_encoder")
"""Modules of which every step gives every parameter a gradient. Others wait for their prompts: a mask,
clicks, several of them."""
ABSENT = ("no_obj_ptr", "no_obj_embed_spatial")
"""Parameters that are read where an object is predicted to be absent: without a gradient they tell of the
clips, not of a mistake."""
UNREAD = ("no_mem_pos_enc",)
"""Parameters of SAM2's checkpoints that no published model reads (`directly_add_no_mem_embed`)."""
PATIENCE = 20
"""Steps after which an entry of memory.trainable_modules without a gradient is a mistake in the settings, and
no chance of the prompts."""


ORIGINAL = "original_mask_decoder"


class Tracking(nn.Module):
    """SAM2's training loss of clips, mean over everything that a step predicts, on all processes: every
    object, frame with ground truth, and click."""

    def __init__(
        self, sam2: Grounding, weights: MemoryLoss, *, recompute: bool = True, encode_at_once: int = 4
    ) -> None:
        super().__init__()
        self.sam2 = sam2
        self.weights, self.recompute, self.encode_at_once = weights, recompute, encode_at_once
        self.remember: Remember = remembered
        self.reached: set[str] = set()
        """Trained tensors that have had a gradient (GradientCheck); part of a training state."""

    def get_extra_state(self) -> dict[str, list[str]]:
        return {"reached": sorted(self.reached)}

    def set_extra_state(self, state: dict[str, list[str]]) -> None:
        self.reached.update(state["reached"])

    def begin_step(self, batches: Sequence[TrackingBatch]) -> list[TrackingBatch]:
        """Count the step's predictions, as the loop's StepModule asks."""
        count = torch.tensor(sum(map(predictions, batches)))
        total = int(dist.shared_sum(count, self.sam2.device))
        return [replace(batch, total=total) for batch in batches]

    def forward(self, batch: TrackingBatch) -> tuple[Float[Tensor, ""], dict[str, float]]:
        features = encode(self.sam2, batch.frames, at_once=self.encode_at_once, recompute=self.recompute)
        maps = self.sam2.maps(features)
        sums: dict[str, Tensor] = defaultdict(lambda: maps[0].new_zeros((), dtype=torch.float32))
        counted, ious = 0, defaultdict[int, list[tuple[float, int]]](list)
        for groups in batch.tracks:
            frames = groups[0].frames
            for tracked in track(
                self.sam2, maps, batch, groups, recompute=self.recompute, remember=self.remember
            ):
                index, prompted = tracked.index, tracked.prompted
                has_truth = batch.has_truth[tracked.objects, index]
                # a given mask is no prediction
                if not has_truth.any() or (prompted is not None and prompted.kind == "mask"):
                    continue
                target = batch.targets[tracked.objects, index][has_truth]
                for logits, predicted, score in tracked.out["outputs"]:
                    for name, value in frame_losses(
                        logits[has_truth], predicted[has_truth], score[has_truth], target, self.weights
                    ).items():
                        sums[name] = sums[name] + value
                    counted += len(target)
                if index == frames[0] or prompted is None:
                    since = index - max(frame for frame in frames if frame <= index)
                    ious[since].append(
                        (float(mean_iou(tracked.out["pred_masks"][has_truth, 0], target)), len(target))
                    )
        # Zero times every trained tensor: processes that share gradients wait for all of them, whatever
        # prompts were drawn here.
        unused = 0.0 * sum(
            (p.float().sum() for p in self.sam2.parameters() if p.requires_grad), start=maps[0].new_zeros(())
        )
        curves = {f"loss_{name}": float(value.detach()) / counted for name, value in sums.items()}
        for distance, some in sorted(ious.items()):
            curves[f"iou_at_{distance}"] = sum(mean * count for mean, count in some) / sum(
                count for _, count in some
            )
        return total(sums, self.weights) / (batch.total or counted) + unused if counted else unused, curves


def open_modules(sam2: Grounding, names: Collection[str]) -> dict[str, nn.Parameter]:
    """Freeze SAM2 but for the modules (or single parameters) of these names, also inner ones as
    `sam_prompt_encoder.mask_downscaling`, whose weights become fp32; return what is trained.

    Raises ValueError for a name that SAM2 does not have, or that stands for nothing which could learn.
    """
    available = [
        name
        for name, _ in (*sam2.named_modules(), *sam2.named_parameters())
        if name.split(".")[0] not in ("", ORIGINAL)
    ]
    if unknown := sorted(set(names) - set(available)):
        outer = sorted(name for name in available if "." not in name)
        raise ValueError(
            f"memory.trainable_modules: SAM2 has no {unknown}; it has {outer}, and what is in these"
        )
    if idle := sorted(
        {
            name
            for name in names
            if name in UNREAD or not any(_within(p, name) for p, _ in sam2.named_parameters())
        }
    ):
        raise ValueError(
            f"memory.trainable_modules: {idle} can't learn: this SAM2 has no parameters there, or never "
            "reads them; leave it out"
        )
    sam2.requires_grad_(False)
    trained = {
        name: p for name, p in sam2.named_parameters() if any(_within(name, chosen) for chosen in names)
    }
    for p in trained.values():
        p.data = p.data.float()
        p.requires_grad_(True)
    return trained


def _within(name: str, module: str) -> bool:
    return f"{name}.".startswith(f"{module}.")


def set_dropout(sam2: Grounding, share: float) -> None:
    """Set the dropout of the memory attention, which the package fixes where it builds it."""
    for module in sam2.memory_attention.modules():
        if isinstance(module, nn.Dropout):
            module.p = share
        elif isinstance(module, Attention):
            module.dropout_p = share


class GradientCheck:
    """Watches which parameters get a gradient that is finite and not zero, until each has had one; `reached`
    holds their names."""

    def __init__(
        self,
        sam2: Grounding,
        trained: dict[str, nn.Parameter],
        *,
        modules: Collection[str],
        reached: set[str] | None = None,
    ) -> None:
        """modules: the names (memory.trainable_modules) that chose `trained`."""
        self._frozen = {name: p for name, p in sam2.named_parameters() if name not in trained}
        self._trained, self._modules = list(trained), list(modules)
        self._reached = set() if reached is None else reached
        self._watches = {
            name: p.register_post_accumulate_grad_hook(partial(self._note, name))
            for name, p in trained.items()
        }

    def _note(self, name: str, p: Tensor) -> None:
        if name not in self._reached and p.grad is not None and bool(p.grad.any() & p.grad.isfinite().all()):
            self._reached.add(name)
            self._watches[name].remove()

    @property
    def missing(self) -> list[str]:
        """Trained parameters that have had no gradient so far."""
        return [name for name in self._trained if name not in self._reached]

    def judge_first(self) -> None:
        """Raise RuntimeError if one step gave a parameter of EVERY_STEP no gradient, or a frozen one any. All
        processes must call it."""
        self._share()
        if missing := [name for name in self.missing if name.split(".")[0] in EVERY_STEP]:
            raise RuntimeError(_no_gradient(missing, steps=1))
        if stray := [name for name, p in self._frozen.items() if p.grad is not None]:
            raise RuntimeError(f"{len(stray)} frozen tensors have a gradient: {_some(stray)}")

    def judge(self, steps: int) -> None:
        """Warn of the parameters that had no gradient in any of so many steps; raise RuntimeError if these
        are all of a module that was named to be trained, but for ABSENT. All processes must call it."""
        self._share()
        missing = set(self.missing)
        idle = [
            module
            for module in self._modules
            if all(name in missing for name in self._trained if _within(name, module))
        ]
        if wrong := [module for module in idle if module not in ABSENT]:
            raise RuntimeError(_no_gradient(wrong, steps=steps))
        if missing and dist.rank() == 0:
            logging.warning(
                "memory: %d trained tensors had no gradient in %s: %s",
                len(missing),
                _steps(steps),
                ", ".join(self.missing),
            )

    def _share(self) -> None:
        """Add the names that other processes have seen with a gradient."""
        self._reached.update(*dist.union({dist.rank(): sorted(self._reached)}).values())


def _no_gradient(names: Sequence[str], *, steps: int) -> str:
    return (
        f"after {_steps(steps)} no gradient has reached {_some(names)} ({len(names)}); take them out of "
        "memory.trainable_modules, prompt with what they read (memory.prompts.kinds), or train on clips "
        "whose later frames have ground truth"
    )


def _steps(number: int) -> str:
    return "1 step" if number == 1 else f"{number} steps"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8])


def places(step: int, micro: int, *, batch: int, micros: int, per_epoch: int) -> Iterator[tuple[int, int]]:
    """Yield (epoch, place in it) of this process's clips in a micro-batch; `batch` clips a step over all
    processes and micro-batches.

    `per_epoch`: clips of an epoch. An epoch's last batch goes on into the next epoch."""
    for number in dist.own_share(range(step * batch, (step + 1) * batch), micro=micro, micros=micros):
        yield divmod(number, per_epoch)
