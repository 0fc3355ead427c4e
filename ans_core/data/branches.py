"""Packed rows -> where their branches stand, so that attention can read each branch after its prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from ans_core.data.tensor_batch import TensorBatch


@dataclass(frozen=True, kw_only=True)
class BranchPlaces(TensorBatch):
    """Indices of tokens in the flattened batch (B x L), -1 where there is none.

    What comes before a row's second branch is plainly causal: the prefix and the first branch are read
    together. Every later branch is read after the prefix of its row.
    """

    first: Int[Tensor, "B J"]
    """Of every row the prefix and the first branch."""
    prefix: Int[Tensor, "B P"]
    later: Int[Tensor, "N Q"]
    """Every branch after a row's first one."""
    rows: Int[Tensor, " N"]
    """Its row."""
    back: Int[Tensor, " T"]
    """Of every token of the batch (T = B x L), its index among the results of `first`, then those of `later`,
    then one of zeros, which padding gets."""

    @property
    def scores(self) -> int:
        """Return how many scores are computed, those of padding included."""
        (rows, first), (branches, later), prefix = self.first.shape, self.later.shape, self.prefix.shape[1]
        return rows * first**2 + branches * later * (prefix + later)


def branch_places(branch: Int[Tensor, "B L"], *, multiple: int = 1) -> BranchPlaces:
    """Find the parts of packed rows: prefix (0), branches (1..k) one after another, padding (-1).

    `multiple`: lengths are rounded up to it, and there is always a later branch, so that compiled code meets
    no odd size. On a GPU every call waits for it several times; it belongs where batches are made.
    """
    count, length = branch.shape
    runs, lengths = torch.unique_consecutive(
        (torch.arange(count, device=branch.device)[:, None] * (length + 2) + branch + 1).flatten(),
        return_counts=True,
    )
    rows, numbers, starts = runs // (length + 2), runs % (length + 2) - 1, lengths.cumsum(0) - lengths
    answered = numbers > 0
    later = answered & torch.cat([answered.new_zeros(1), answered[:-1] & (rows[1:] == rows[:-1])])
    read_first = (numbers >= 0) & ~later
    per_row = lengths.new_zeros(count).index_add(0, rows[read_first], lengths[read_first])
    of_prefix = lengths.new_zeros(count).index_add(0, rows[numbers == 0], lengths[numbers == 0])
    begin = torch.arange(count, device=branch.device) * length
    first, prefix = _spans(begin, per_row, multiple), _spans(begin, of_prefix, multiple)
    after, of_row = _spans(starts[later], lengths[later], multiple), rows[later]
    if multiple > 1:  # compilers make special code for the sizes 0 and 1
        after = F.pad(after, (0, 0, 0, max(0, 2 - len(after))), value=-1)
        of_row = F.pad(of_row, (0, len(after) - len(of_row)))
    places = torch.cat([first.flatten(), after.flatten()])  # of every result, the token that it is of
    back = torch.full((count * length,), len(places), device=branch.device)
    back[places[places >= 0]] = (places >= 0).nonzero()[:, 0]
    return BranchPlaces(first=first, prefix=prefix, later=after, rows=of_row, back=back)


def _spans(starts: Int[Tensor, " N"], lengths: Int[Tensor, " N"], multiple: int) -> Int[Tensor, "N M"]:
    """Count on from every start, -1 after its length. M: the longest, rounded up."""
    longest = max(int(lengths.max()) if len(lengths) else 0, 1 if multiple > 1 else 0)
    offsets = torch.arange(-(-longest // multiple) * multiple, device=starts.device)
    return torch.where(offsets < lengths[:, None], starts[:, None] + offsets, -1)
