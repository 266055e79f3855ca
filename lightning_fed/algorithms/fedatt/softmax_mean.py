"""Averages of model states with softmax weights, entry by entry, in O(model) memory.

Ji, Pan, Long, Li, Jiang & Huang, "Learning Private Neural Language Modeling with Attentive Aggregation", IJCNN 2019.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_fed.numerics.precision import to_float64


class SoftmaxMean:
    r"""Running mean of flat states, in which every entry has weights of its own: a softmax of scores over the states.

    .. math:: \bar w^l = \sum_k \alpha_k^l w_k^l, \qquad \alpha^l = \mathrm{softmax}_k(s_k^l)

    The softmax is not known before the last score: sums are kept relative to the largest score so far and scaled down
    where a larger one comes, in float64. The object is a monoid: :meth:`merge` joins what another process has added.

    Example:
        >>> mean = SoftmaxMean()
        >>> mean.add({"w": torch.tensor([0.0])}, {"w": torch.tensor(1.0)})
        >>> mean.add({"w": torch.tensor([1.0])}, {"w": torch.tensor(2.0)})
        >>> mean.mean()
        {'w': tensor([0.7311], dtype=torch.float64)}

    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._peaks: dict[str, Tensor] = {}

    @torch.no_grad()
    def add(self, state: Mapping[str, Tensor], scores: Mapping[str, Tensor]) -> None:
        """Adds one state.

        Args:
            state: Floating-point entries of any shape; every state added must have the same names and shapes.
            scores: Score of every entry, shape ``()``.

        """
        for name, value in state.items():
            wide = to_float64(value.detach(), copy=True)
            peak = to_float64(scores[name]).to(wide.device)
            self._join(name, wide, torch.ones_like(peak), peak)

    @torch.no_grad()
    def merge(self, other: SoftmaxMean) -> None:
        """Joins the states that ``other`` has added; ``other`` is left as it is."""
        for name, values in other._sums.items():
            device = self._sums[name].device if name in self._sums else values.device
            weight, peak = (each[name].to(device) for each in (other._weights, other._peaks))
            self._join(name, values.to(device, copy=True), weight, peak)

    @torch.no_grad()
    def mean(self) -> dict[str, Tensor]:
        """The mean of what was added, in float64 (complex128)."""
        return {name: value / self._weights[name] for name, value in self._sums.items()}

    def _join(self, name: str, values: Tensor, weight: Tensor, peak: Tensor) -> None:
        """Joins a sum of states, which may be written to, and of their weights, both relative to exp(peak)."""
        if name not in self._sums:
            self._sums[name], self._weights[name], self._peaks[name] = values, weight, peak
            return
        top = torch.maximum(self._peaks[name], peak)
        ours, theirs = (self._peaks[name] - top).exp(), (peak - top).exp()
        self._sums[name].mul_(ours).add_(values.mul_(theirs))
        self._weights[name] = self._weights[name] * ours + weight * theirs
        self._peaks[name] = top
