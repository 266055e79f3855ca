"""Update steps for client weights."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lightning_fed.argument_checks import check_count
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.steps.update_step import UpdateStep


class WeightStep(UpdateStep, ABC):
    """Base class for update steps on client weights."""

    @abstractmethod
    def weight(self, num_samples: int) -> int:
        """Returns the number of examples to count: an integer from 1 that never decreases as ``num_samples`` grows."""

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        update.num_samples = self.weight(update.num_samples)
        return update


class UniformWeights(WeightStep):
    """Gives all clients equal weight."""

    def weight(self, num_samples: int) -> int:
        return 1


class MaxSamples(WeightStep):
    """Limits each client's number of examples, both as a weight and as the size for integer entries.

    Args:
        most: Maximum number of examples to count, a positive integer.
    """

    def __init__(self, most: int) -> None:
        self.most = check_count("most", most)

    def weight(self, num_samples: int) -> int:
        return min(num_samples, self.most)
