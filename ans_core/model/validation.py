"""A small fixed slice of held-out rows -> losses and mask IoU during SFT, and pictures of the masks in
them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import torch
from jaxtyping import Float
from PIL import Image
from torch import Tensor, nn

from ans_core.data.collate import Batch, Layout, Row, collate_readable
from ans_core.data.mixture import Mixture
from ans_core.dist import rank, read_together, shared_sum, world_size
from ans_core.model.masks import upsample
from ans_core.model.supervised import Supervised, image_tokens, packed
from ans_core.pictures import overlay, rle, transforms
from ans_core.types import RLE

SHOWN = 4
"""Rows of a slice that are drawn: the first ones with a mask."""


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
        pictures_to: Path,
    ) -> None:
        self.module, self.mixture, self.layout, self.pictures_to = module, mixture, layout, pictures_to
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

    @torch.no_grad()
    def draw(self, done: int) -> None:
        """Write pictures of the first rows with masks, in their first frames: truth beside the masks that the
        true words draw. All processes must call it; the first one writes `<step>-<row>.png`."""
        candidates = (self.mixture.row(number) for number in range(self.rows))
        shown = list(islice((row for row in candidates if any(turn.masks for turn in row.turns)), SHOWN))
        for place, row in enumerate(shown):
            batch = self._read([row])
            if not len(batch.pair_seg):
                continue
            with in_eval_mode(self.module), self.autocast:
                images = image_tokens(self.module.model, batch.views).split(batch.views)
                hidden = self.module.model.hidden_states(packed(batch), images)
                logits = self.module.model.sam2.shown(self.module.decode_masks(batch, hidden)).float()
            if rank() == 0:
                self.pictures_to.mkdir(parents=True, exist_ok=True)
                self._sheet(row, batch, logits).save(self.pictures_to / f"{done:06d}-{place}.png")

    def _sheet(self, row: Row, batch: Batch, logits: Float[Tensor, "P h w"]) -> Image.Image:
        image, turns = transforms.open_image(row.frames[0]), [turn for turn in row.turns if turn.masks]
        truth: list[RLE | None] = [masklet[row.mask_frames[0]] for turn in turns for masklet in turn.masks]
        predicted: list[RLE | None] = [None] * len(truth)
        for seg, frame, one in zip(batch.pair_seg.tolist(), batch.pair_frame.tolist(), logits, strict=True):
            if frame == 0:
                size = self.module.model.sam2.image_size
                predicted[seg] = rle.encode(upsample(one, size=size, height=image.height, width=image.width))
        words = " ".join(turn.answer for turn in turns)
        question = " ".join(turn.question for turn in turns)
        return overlay.side_by_side(
            image,
            truth=truth,
            prediction=predicted,
            question=question,
            truth_text=words,
            prediction_text=row.name,
        )
