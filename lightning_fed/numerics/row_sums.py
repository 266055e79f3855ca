"""Weighted mean of a table (such as an embedding) over clients that train only some rows.

"Federated sampled softmax" (FedSS), Algorithm 1, line 12: a missing row is treated as unchanged.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import torch
from torch import Tensor

from lightning_fed.argument_checks import check_option
from lightning_fed.numerics.precision import cast_back, to_float64

RowWeighting: TypeAlias = Literal["global", "per_row"]


class RowSums:
    r"""Running weighted sums of table rows, with memory only for rows that clients have sent.

    Client *k* with weight :math:`a_k` sends the rows :math:`w_{k,j}` with the indices :math:`j \in S_k`. For the old
    table :math:`w`, row *j* in the mean is

    .. math:: \bar w_j = w_j + \frac{1}{A_j} \sum_{k:\, j \in S_k} a_k (w_{k,j} - w_j)

    The argument ``weighting`` of :meth:`mean` sets :math:`A_j`. With ``"global"``, the default, :math:`A_j` sums the
    weights of all clients, so a missing row counts as unchanged. With ``"per_row"``, only clients with row *j* count.

    Attributes:
        total: Sum of all added weights.
        num_rows: Number of rows in memory.

    Example:
        >>> sums = RowSums()
        >>> sums.add(torch.tensor([1, 2]), torch.tensor([[3.0], [8.0]]), weight=1)
        >>> sums.add(torch.tensor([2]), torch.tensor([[4.0]]), weight=3)
        >>> sums.mean(torch.zeros(4, 1)).flatten(), sums.mean(torch.zeros(4, 1), "per_row").flatten()
        (tensor([0.0000, 0.7500, 5.0000, 0.0000]), tensor([0., 3., 5., 0.]))
    """

    def __init__(self) -> None:
        self.total = 0.0
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []  # row indices, sums and weights
        self._num_merged = self.num_rows = 0

    @property
    def rows(self) -> Tensor:
        """Sorted indices of all added rows: int64, shape ``(rows,)``."""
        parts = [rows.cpu() for rows, _, _ in self._parts]
        return torch.unique(torch.cat(parts)) if parts else torch.zeros(0, dtype=torch.int64)

    @torch.no_grad()
    def add(self, rows: Tensor, values: Tensor, weight: float) -> None:
        """Adds a client's rows: distinct indices, int64, shape ``(rows,)``, and values, shape ``(rows, *)``."""
        sums = to_float64(values.detach(), copy=True).mul_(weight)
        self.add_sums(rows, sums, sums.new_full((len(rows),), weight))
        self.total += weight

    def add_sums(self, rows: Tensor, sums: Tensor, weights: Tensor) -> None:
        self._parts.append((rows.to(sums.device), sums, weights))
        self.num_rows += len(rows)
        if self.num_rows > 2 * self._num_merged:  # bounds the memory by the number of distinct rows
            self._merge_parts()

    def merge(self, other: RowSums) -> None:
        for rows, sums, weights in other._parts:
            self.add_sums(rows, sums, weights)
        self.total += other.total

    @torch.no_grad()
    def mean(self, base: Tensor, weighting: RowWeighting = "global", total: float | None = None) -> Tensor:
        """Returns a copy of ``base``, shape ``(n, *)``, with weighted means in the rows that clients sent.

        With ``"global"``, a client without a row contributes the row of ``base``. With ``"per_row"``, such a
        client is ignored. ``total`` is the sum of all clients' weights, by default the sum of all added weights.
        """
        check_option("row_weighting", weighting, ("global", "per_row"))
        self._merge_parts()
        table = base.detach().clone()
        if not self._parts:
            return table
        rows, sums, weights = self._parts[0]
        weights = weights.view(-1, *[1] * (sums.ndim - 1))
        old = to_float64(base.detach()[rows.to(base.device)])
        if weighting == "global":
            all_weights = self.total if total is None else total
            means = (sums + (all_weights - weights) * old) / all_weights
        else:
            means = torch.where(weights > 0, sums / weights, old)
        table[rows.to(base.device)] = cast_back(means, base)
        return table

    def _merge_parts(self) -> None:
        if len(self._parts) > 1:
            rows, sums, weights = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
            rows, positions = torch.unique(rows, return_inverse=True)
            sums = sums.new_zeros((len(rows), *sums.shape[1:])).index_add_(0, positions, sums)
            weights = weights.new_zeros(len(rows)).index_add_(0, positions, weights)
            self._parts = [(rows, sums, weights)]
        self._num_merged = self.num_rows = sum(len(rows) for rows, _, _ in self._parts)


def find_bad_rows(rows: Tensor, table: Tensor) -> str | None:
    """Describes why row indices (``rows``) are invalid for a table; ``None`` if all indices are valid."""
    if rows.dtype != torch.int64 or rows.ndim != 1:
        return f"the row indices are {rows.dtype} of shape {tuple(rows.shape)} instead of int64 of shape (rows,)"
    if table.ndim == 0 or not table.is_floating_point():
        return f"the entry is not a table of floating-point rows: shape {tuple(table.shape)}, {table.dtype}"
    if len(rows) and not (int(rows.min()) >= 0 and int(rows.max()) < len(table)):
        return f"the row indices range from {int(rows.min())} to {int(rows.max())}, but the table has {len(table)} rows"
    return None if is_increasing(rows) else "the row indices are not strictly increasing"


def is_increasing(values: Tensor) -> bool:
    """True if integers are strictly increasing.

    Example:
        >>> is_increasing(torch.tensor([2**31 - 1, -(2**31), 0], dtype=torch.int32))
        False
    """
    # Compares instead of subtracting, because differences can overflow.
    return bool((values[1:] > values[:-1]).all())
