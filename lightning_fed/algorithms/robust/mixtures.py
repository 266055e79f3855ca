"""Update steps that replace client updates by weighted sums before a robust rule.

The papers are cited in :mod:`lightning_fed.algorithms.robust.equations`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from lightning_fed.algorithms.robust.aggregator import MixedUpdate, majority, number_entries, shares_of
from lightning_fed.algorithms.robust.equations import adaptive_clipping, bucketing, nearest_neighbor_mixing
from lightning_fed.algorithms.robust.steps import Steps
from lightning_fed.argument_checks import check_count
from lightning_fed.bounds import refuse_rows
from lightning_fed.errors import BadUpdates, OptionError
from lightning_fed.messages import Client, ClientUpdate, State
from lightning_fed.model.entries import is_running_statistic
from lightning_fed.numerics.precision import to_float64
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.steps.update_step import Arrived, CollectingStep, UpdateStep


class Mixture(CollectingStep):
    """Base class of update steps that replace updates by weighted sums of updates.

    With ``joins = False``, each weighted sum replaces one client's update, except BatchNorm statistics and integers.
    With ``joins = True``, clients with nonzero weights in a sum form a group, and the sum is the group's only update.
    """

    refuses = ("has_clusters", "has_versions", "resizes")

    joins: bool = False

    @abstractmethod
    def mixing(self, gram: Tensor) -> Tensor:
        """Returns one row of weights per weighted sum, shape ``(sums, updates)``. ``gram``: updates' inner products."""

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Refuses aggregation rules with a trusted client or several global models."""
        if rule.always:
            raise OptionError(
                f"Expected no `{type(self).__name__}` with {type(rule).__name__}: the step would mix other "
                "updates into the update of the trusted client."
            )

    def start(self, info: RoundInfo, state: State) -> None:
        refuse_rows(self, info)
        super().start(info, state)

    @torch.no_grad()
    def collect(self, updates: Sequence[Arrived]) -> Sequence[Arrived]:
        numbers = number_entries(self.state)
        names = [name for name in numbers if not is_running_statistic(name)]
        steps = Steps(self.state, [update.state for update, _ in updates], names)
        faults = steps.find_too_long([update.client for update, _ in updates])
        if faults:
            raise BadUpdates(faults)
        mixing = self.mixing(steps.gram)
        return [(self._mixed(steps, index, row, updates), self.state) for index, row in enumerate(mixing)]

    def _mixed(self, steps: Steps, index: int, row: Tensor, updates: Sequence[Arrived]) -> ClientUpdate:
        members = row.nonzero().flatten().tolist() if self.joins else [index]
        joined = [updates[member][0] for member in members]
        state = steps.mean(row)
        for name in self.state:
            if name not in state:
                values = [update.state[name] for update in joined]
                is_number = values[0].is_floating_point()
                state[name] = torch.stack([to_float64(v) for v in values]).mean(0) if is_number else majority(values)
        shares: dict[Client, float] = defaultdict(float)
        for weight, (update, _) in zip(row.tolist(), updates, strict=True):
            for client, share in shares_of(update).items():
                shares[client] += weight * share
        return MixedUpdate(
            joined[0].client,
            sum(update.num_samples for update in joined),
            state,
            extras={} if self.joins else joined[0].extras,
            members=tuple(client for update in joined for client in update.clients),
            shares=dict(shares),
        )


class TolerantMixture(Mixture):
    """Base class of mixtures (weighted sums of updates) with an assumed number of malicious clients."""

    def __init__(self, num_malicious: int | None = None) -> None:
        self.num_malicious = None if num_malicious is None else check_count("num_malicious", num_malicious, lowest=0)

    def tolerated(self, count: int) -> int:
        """Returns how many of ``count`` updates may be malicious; by default the largest number below half."""
        if self.num_malicious is None:
            return (count - 1) // 2
        return min(max(0, self.num_malicious - len(self.info.refused)), count - 1)


class NearestNeighborMixing(TolerantMixture):
    """Replaces each update by the mean of the nearest updates (NNM).

    The mean contains the update itself and the nearest n - f - 1 of n updates. Reference: Allouah et al., AISTATS 2023.

    Args:
        num_malicious: Number f of malicious clients; by default the largest integer below n / 2.

    Raises:
        ValueError: If ``num_malicious`` is negative.
    """

    def mixing(self, gram: Tensor) -> Tensor:
        return nearest_neighbor_mixing(gram, self.tolerated(len(gram)))


class AdaptiveClipping(TolerantMixture):
    r"""Clips the updates with the largest norms (ARC).

    Reduces the :math:`\lfloor 2 f (n - f) / n \rfloor` largest norms among n updates to the next largest norm.

    Args:
        num_malicious: Number f of malicious clients; by default the largest integer below n / 2.

    Raises:
        ValueError: If ``num_malicious`` is negative.
    """

    def mixing(self, gram: Tensor) -> Tensor:
        return adaptive_clipping(gram, self.tolerated(len(gram)))


class Bucketing(Mixture):
    """Averages updates in random groups of clients.

    The aggregation rule receives one update per group. Reference: Karimireddy et al., ICLR 2022.

    Args:
        bucket_size: Number of clients per group. The last group may be smaller.
        seed: Seed for drawing the groups in each round.
    """

    joins = True

    def __init__(self, bucket_size: int = 2, seed: int = 0) -> None:
        self.bucket_size = check_count("bucket_size", bucket_size)
        self.seed = check_count("seed", seed, lowest=0)

    def mixing(self, gram: Tensor) -> Tensor:
        generator = np.random.default_rng([self.seed, self.info.round])
        return bucketing(len(gram), self.bucket_size, generator)
