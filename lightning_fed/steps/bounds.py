"""Update steps that bound the length of a client's step: the Euclidean norm of (local - global).

Sun, Kairouz, Suresh & McMahan, "Can You Really Backdoor Federated Learning?", 2019, section 3 ("norm thresholding").
https://arxiv.org/abs/1911.07963
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from lightning_fed.argument_checks import check_positive
from lightning_fed.errors import OptionError
from lightning_fed.messages import Client, ClientUpdate, State
from lightning_fed.model.entries import distance, is_running_statistic
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.rule import Aggregator, ResizingAggregator, RoundInfo
from lightning_fed.steps.update_step import Arrived, CollectingStep, UpdateStep


def trained_entries(info: RoundInfo, state: State) -> list[str]:
    """The entries whose change is the length of a step: those that train."""
    if info.trainable is not None:
        return [name for name in state if name in info.trainable]
    return [name for name, value in state.items() if value.is_floating_point() and not is_running_statistic(name)]


class MaxNorm(UpdateStep):
    r"""No client's step is longer than a bound; longer ones are shortened to it.

    .. math:: u_k \leftarrow u_k \min\left(1, \frac{C}{\lVert u_k \rVert}\right)

    The norm is over the entries that train. Inside of a sum that the server sees alone the clients shorten their steps
    themselves, and the server has to take their word.

    Args:
        bound: The bound C, greater than 0.

    Raises:
        ValueError: If ``bound`` is not a positive number, or the clients' models have shapes of their own.

    Note:
        Logged is ``fed/shortened``: the number of steps that were shortened.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> import torch
        >>> step = MaxNorm(1.0)
        >>> step.start(RoundInfo(0), {})
        >>> step.on_server(ClientUpdate("a", 1, {"w": torch.tensor([3.0, 4.0])}), {"w": torch.zeros(2)}).state
        {'w': tensor([0.6000, 0.8000])}

    """

    def __init__(self, bound: float) -> None:
        self.bound = check_positive("bound", bound)

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Refuses rules whose clients have models of any shape: between these there is no step."""
        refuse_rule(self, rule, ResizingAggregator)

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        """Shortens a step."""
        return _shortened(update, sent, trained_entries(self.info, sent), self.bound)

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        """Number of steps that were shortened, where their lengths may be known."""
        return {"fed/shortened": sum(length > self.bound for length in norms.values())} if norms else {}


class MaxMedianNorm(CollectingStep):
    """No client's step is longer than a multiple of the round's median length; longer ones are shortened to it.

    Of an even number of clients the lower of the two in the middle counts, so that one of two clients cannot raise it.
    Where it is 0, there is no bound. The server holds a round's updates until all are there.

    Args:
        multiple: The multiple, greater than 0.

    Raises:
        ValueError: If ``multiple`` is not a positive number, or the clients' models have shapes of their own.

    Note:
        Logged is ``fed/shortened``: the number of steps that were shortened.

    """

    def __init__(self, multiple: float) -> None:
        self.multiple = check_positive("multiple", multiple)

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Refuses rules whose clients have models of any shape: between these there is no step."""
        refuse_rule(self, rule, ResizingAggregator)

    def collect(self, updates: Sequence[Arrived]) -> Sequence[Arrived]:
        """Shortens the long steps."""
        names = [trained_entries(self.info, sent) for _, sent in updates]
        norms = [distance(update.state, sent, own) or 0.0 for (update, sent), own in zip(updates, names, strict=True)]
        bound = self._bound(norms)
        return [
            (_shortened(update, sent, own, bound, norm), sent)
            for (update, sent), own, norm in zip(updates, names, norms, strict=True)
        ]

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        """Number of steps that were shortened."""
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
        for name in names:  # in float64: the difference of two large numbers of float16 is not one of its own
            start = to_float64(sent[name])
            step = (to_float64(update.state[name]) - start) * (bound / length)
            update.state[name] = cast_back(start + step, update.state[name])
    return update


def refuse_rows(step: UpdateStep, info: RoundInfo) -> None:
    """Refuses entries of which every client holds rows of its own, for a step that compares whole entries.

    Raises:
        ValueError: If there are any.

    """
    if info.sliced:
        raise OptionError(
            f"Expected no `{type(step).__name__}` where clients hold some rows of {sorted(info.sliced)} only: it"
            " compares whole entries."
        )


def refuse_rule(step: UpdateStep, rule: Aggregator, *kinds: type) -> None:
    """Refuses rules of some kinds, for a step that needs the step from one global model to a client's.

    Args:
        step: The step.
        rule: The rule.
        kinds: Kinds of rules: under which models have shapes of their own, or which keep several models.

    Raises:
        ValueError: If the rule is of one of these.

    """
    if isinstance(rule, kinds):
        raise OptionError(
            f"Expected no `{type(step).__name__}` with {type(rule).__name__}, whose clients do not all start from one"
            " model of the same shapes."
        )
