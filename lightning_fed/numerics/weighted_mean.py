"""Weighted mean of model states in O(model) memory.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017, Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.numerics.row_sums import RowSums, RowWeighting
from lightning_fed.numerics.trees import add_in_float64, map_runs


class WeightedMean:
    r"""Running weighted mean of state dicts, with memory for one state dict.

    .. math:: \bar w = \frac{\sum_k a_k w_k}{\sum_k a_k}

    Here :math:`w_k` is a state dict and :math:`a_k` the weight. Floating-point tensors are summed in float64. Integer
    and boolean tensors are taken from the state dict with the most examples. If several have the most examples, the
    largest value is taken. :meth:`merge` adds the state dicts of another process.

    Example:
        >>> import torch
        >>> mean = WeightedMean()
        >>> mean.add({"w": torch.tensor([1.0])}, weight=1, size=1)
        >>> mean.add({"w": torch.tensor([3.0])}, weight=3, size=3)
        >>> mean.mean()
        {'w': tensor([2.5000])}
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, float] = {}  # weight sum per entry
        self._likes: dict[str, Tensor] = {}  # empty tensors with the dtypes and devices of entries
        self._integers: dict[str, Tensor] = {}
        self._rows: dict[str, RowSums] = {}
        self._largest = -1
        self.total = 0.0
        self.count = 0

    @torch.no_grad()
    def add(
        self, state: Mapping[str, Tensor], weight: float, size: int, rows: Mapping[str, Tensor] | None = None
    ) -> None:
        """Adds a state dict with a weight. ``size`` is the client's number of examples.

        A missing floating-point tensor counts as unchanged in the round. If a tensor contains only some rows, ``rows``
        maps the tensor's name to the row indices: int64, shape ``(rows,)``.
        """
        if not 0 <= weight < float("inf"):
            raise ValueError(f"Expected `weight` to be finite and not negative, but got {weight}.")
        rows = rows or {}
        floats, integers, summed = list[str](), list[str](), list[str]()
        for name, value in state.items():
            self._weights[name] = self._weights.get(name, 0.0) + weight
            if name in rows:
                self._rows.setdefault(name, RowSums()).add(rows[name], value, weight)
            elif not (value.is_floating_point() or value.is_complex()):
                integers.append(name)
            else:
                (summed if name in self._sums else floats).append(name)
        add_in_float64([self._sums[name] for name in summed], [state[name].detach() for name in summed], weight)
        values = [state[name].detach().contiguous() for name in floats]
        sums = map_runs(lambda flat, _: to_float64(flat, copy=True).mul_(weight), values)
        self._sums |= zip(floats, sums, strict=True)
        self._likes |= {name: value.new_empty(0) for name, value in zip(floats, values, strict=True)}
        self._keep_integers({name: state[name] for name in integers}, size)
        self._largest = max(self._largest, size)
        self.total += weight
        self.count += 1

    @torch.no_grad()
    def merge(self, other: WeightedMean) -> None:
        for name, value in other._sums.items():
            if name in self._sums:
                self._sums[name].add_(value.to(self._sums[name].device))
            else:
                self._sums[name] = value.clone()
                self._likes[name] = other._likes[name]
        for name, weight in other._weights.items():
            self._weights[name] = self._weights.get(name, 0.0) + weight
        self._keep_integers(other._integers, other._largest)
        for name, sums in other._rows.items():
            self._rows.setdefault(name, RowSums()).merge(sums)
        self._largest = max(self._largest, other._largest)
        self.total += other.total
        self.count += other.count

    @torch.no_grad()
    def mean(
        self, base: Mapping[str, Tensor] | None = None, row_weighting: RowWeighting = "global"
    ) -> dict[str, Tensor]:
        """Returns the weighted mean of all added state dicts.

        ``base`` is the state dict before the round. A tensor missing in an added state dict is taken from ``base``, or
        is 0 without ``base``. If clients sent only some rows of a tensor (``rows`` in :meth:`add`), ``base`` is needed.
        ``row_weighting`` is for these tensors, see :class:`RowSums`. Without a positive weight, raises ``ValueError``.
        """
        if self.total <= 0:
            raise ValueError("Expected at least one state with a positive weight before `mean`.")
        names = [name for name in self._sums if name not in self._rows]
        sums = [self._completed(name, self._sums[name], base) for name in names]
        likes = [self._likes[name] for name in names]
        results = map_runs(lambda flat, first: cast_back(flat / self.total, likes[first]), sums)
        means = dict(zip(names, results, strict=True))
        for name, rows in self._rows.items():
            assert base is not None
            means[name] = self._with_whole(name, rows).mean(base[name], row_weighting, self.total)
        return means | {name: value.clone() for name, value in self._integers.items()}

    def held_rows(self) -> dict[str, Tensor]:
        """Returns received row indices by entry: int64, shape ``(rows,)``. Omits an entry if a client sent all rows."""
        return {name: sums.rows for name, sums in self._rows.items() if name not in self._sums}

    def _completed(self, name: str, value: Tensor, base: Mapping[str, Tensor] | None) -> Tensor:
        if base is None or self._weights[name] == self.total:
            return value
        # States without the entry are treated as unchanged.
        return value + to_float64(base[name]) * (self.total - self._weights[name])

    def _with_whole(self, name: str, sums: RowSums) -> RowSums:
        if name not in self._sums:
            return sums
        whole, joined = self._sums[name], RowSums()
        joined.merge(sums)
        all_rows = torch.arange(len(whole), device=whole.device)
        joined.add_sums(all_rows, whole, whole.new_full((len(whole),), self.total - sums.total))
        return joined

    def _keep_integers(self, values: Mapping[str, Tensor], size: int) -> None:
        for name, value in values.items():
            largest = self._integers.get(name)
            if largest is None or size > self._largest:
                self._integers[name] = value.detach().clone()
            elif size == self._largest:
                self._integers[name] = torch.maximum(largest, value)
