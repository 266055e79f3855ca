"""Update steps for changing the clients' weights in the average."""

from __future__ import annotations

from abc import ABC, abstractmethod

from lightning_fed.argument_checks import check_count
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.steps.update_step import UpdateStep


class WeightStep(UpdateStep, ABC):
    """Base class of steps to change a client's weight in the average."""

    @abstractmethod
    def weight(self, num_samples: int) -> int:
        """Returns a client's weight, a positive integer. More examples must not give a smaller weight."""

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        update.num_samples = self.weight(update.num_samples)
        return update


class UniformWeights(WeightStep):
    """Gives all clients equal weight in the average, independent of dataset sizes."""

    def weight(self, num_samples: int) -> int:
        return 1


class MaxSamples(WeightStep):
    """Limits each client's weight in the average.

    Args:
        most: Maximum number of examples, a positive integer.
    """

    def __init__(self, most: int) -> None:
        self.most = check_count("most", most)

    def weight(self, num_samples: int) -> int:
        return min(num_samples, self.most)
