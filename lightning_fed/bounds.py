"""Update steps that bound the Euclidean norm of a client update (local minus global).

Sun, Kairouz, Suresh & McMahan, "Can You Really Backdoor Federated Learning?", 2019, section 3 ("norm thresholding").
https://arxiv.org/abs/1911.07963
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_fed.argument_checks import check_positive
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client, ClientUpdate, State
from lightning_fed.model.entries import distance
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.rule import RoundInfo, trained_entries
from lightning_fed.steps.update_step import Arrived, CollectingStep, UpdateStep


class MaxNorm(UpdateStep):
    r"""Clips client updates to a fixed norm over all trained tensors.

    .. math:: u_k \leftarrow u_k \min\left(1, \frac{C}{\lVert u_k \rVert}\right)

    Here :math:`u_k` is the update of client k: the trained model minus the received model. With secure aggregation, the
    server cannot verify the clipping. Logs the number of clipped updates as ``fed/shortened``.

    Args:
        bound: Maximum norm C, greater than 0.

    Raises:
        ValueError: If ``bound`` is not a positive number, or if client models have different shapes.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedavg", steps=[MaxNorm(1.0)])
    """

    refuses = ("resizes",)

    def __init__(self, bound: float) -> None:
        self.bound = check_positive("bound", bound)

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        return _shortened(update, sent, trained_entries(self.info, sent), self.bound)

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        """Returns the number of clipped updates; empty if the server may not see the norms of single updates."""
        return {"fed/shortened": sum(length > self.bound for length in norms.values())} if norms else {}


class MaxMedianNorm(CollectingStep):
    """Clips client updates to a multiple of the round's median norm, unless the median is 0.

    The server stores all updates until the round is complete. Logs the number of clipped updates as ``fed/shortened``.

    Args:
        multiple: Factor for the median norm, greater than 0.

    Raises:
        ValueError: If ``multiple`` is not a positive number, or if client models have different shapes.
    """

    refuses = ("resizes",)

    def __init__(self, multiple: float) -> None:
        self.multiple = check_positive("multiple", multiple)

    def collect(self, updates: Sequence[Arrived]) -> Sequence[Arrived]:
        names = [trained_entries(self.info, sent) for _, sent in updates]
        norms = [
            distance(update.state, sent, entries) or 0.0 for (update, sent), entries in zip(updates, names, strict=True)
        ]
        bound = self._bound(norms)
        return [
            (_shortened(update, sent, entries, bound, norm), sent)
            for (update, sent), entries, norm in zip(updates, names, norms, strict=True)
        ]

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        bound = self._bound(list(norms.values()))
        return {"fed/shortened": sum(length > bound for length in norms.values())} if norms else {}

    def _bound(self, norms: Sequence[float]) -> float:
        median = sorted(norms)[(len(norms) - 1) // 2] if norms else 0.0
        return self.multiple * median if median > 0 else math.inf


def _shortened(
    update: ClientUpdate, sent: State, names: Sequence[str], bound: float, length: float | None = None
) -> ClientUpdate:
    length = (distance(update.state, sent, names) or 0.0) if length is None else length
    if length > bound:
        for name in names:  # float64, because float16 cannot represent the difference of two large numbers
            start = to_float64(sent[name])
            step = (to_float64(update.state[name]) - start) * (bound / length)
            update.state[name] = cast_back(start + step, update.state[name])
    return update


def refuse_rows(step: UpdateStep, info: RoundInfo) -> None:
    """Raises an error if clients receive only some rows of a tensor. The update step ``step`` needs all rows."""
    if info.sliced:
        raise OptionError(
            f"Expected no `{type(step).__name__}` if clients hold only some rows of {sorted(info.sliced)}, because the "
            "step compares whole entries: remove the step, or send whole entries."
        )
