"""A small fixed slice of held-out rows -> losses and mask IoU during SFT."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ans_core.data.collate import Batch, Layout, Row, collate_readable
from ans_core.data.mixture import Mixture
from ans_core.dist import rank, read_together, shared_sum, world_size
from ans_core.model.supervised import Supervised


@contextmanager
def in_eval_mode(module: nn.Module) -> Iterator[None]:
    """Switch dropouts off in the context. Training has some modules in eval mode, so each gets its own mode
    back."""
    modes = [(m, m.training) for m in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for m, training in modes:
            m.training = training


class ValidationSlice:
    """The first `rows` rows of a mixture of held-out data, read anew every time (they would fill memory),
    `batch` of them at once over all processes."""

    def __init__(
        self,
        module: Supervised,
        mixture: Mixture,
        layout: Layout,
        *,
        rows: int,
        batch: int,
        autocast: torch.autocast,
    ) -> None:
        self.module, self.mixture, self.layout = module, mixture, layout
        self.rows, self.batch, self.autocast = rows, batch, autocast

    @torch.no_grad()
    def measure(self) -> dict[str, float]:
        """Return means over the slice's learned tokens (`text`) and masks (`bce`, `dice`, `mask_iou`), and
        their weighted sum `loss`. All processes must call it. A row that can't be read is left out, as in
        training."""
        sums = dict.fromkeys(("tokens", "masks", "text", "bce", "dice", "mask_iou"), 0.0)
        with in_eval_mode(self.module), self.autocast:
            for start in range(0, self.rows, self.batch):
                numbers = range(start, min(start + self.batch, self.rows))[rank() :: world_size()]
                batch = self._read([self.mixture.row(number) for number in numbers])
                (metrics,) = read_together([self.module(batch)[1]])
                counts = {"tokens": float(batch.learned.shape[1]), "masks": float(len(batch.pair_seg))}
                for name, count in counts.items():
                    sums[name] += count
                for name, of in (
                    ("text", "tokens"),
                    ("bce", "masks"),
                    ("dice", "masks"),
                    ("mask_iou", "masks"),
                ):
                    sums[name] += metrics.get(name, 0.0) * counts[of]
        total = shared_sum(
            torch.tensor(list(sums.values()), dtype=torch.float64), self.module.model.device
        ).tolist()
        tokens, masks, text, *mask_sums = total
        bce, dice, iou = (value / max(masks, 1.0) for value in mask_sums)
        means = {"text": text / max(tokens, 1.0), "bce": bce, "dice": dice, "mask_iou": iou}
        return {
            "loss": means["text"] + self.module.mask_weight * bce + self.module.dice_weight * dice,
            **means,
        }

    def _read(self, rows: list[Row]) -> Batch:
        model = self.module.model
        return collate_readable(rows, model.tokenizer, self.layout)[0].to(model.device)
