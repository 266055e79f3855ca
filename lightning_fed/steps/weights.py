"""Update steps for client weights."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence

from lightning_fed.argument_checks import check_count
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.steps.update_step import UpdateStep

# Larger reported numbers of examples are rejected.
MOST_SAMPLES = 10**12


class WeightStep(UpdateStep, ABC):
    """Base class for update steps on client weights."""

    @abstractmethod
    def weight(self, num_samples: int) -> int:
        """Number of examples to count: an integer, at least 1, that never decreases as ``num_samples`` grows."""

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        update.num_samples = self.weight(update.num_samples)
        return update


class UniformWeights(WeightStep):
    """Gives all clients equal weight."""

    def weight(self, num_samples: int) -> int:
        return 1


class MaxSamples(WeightStep):
    """Caps each client's number of examples, both as a weight and as the size for integer entries.

    Args:
        most: Largest number to count, a positive integer.
    """

    def __init__(self, most: int) -> None:
        self.most = check_count("most", most)

    def weight(self, num_samples: int) -> int:
        return min(num_samples, self.most)


def counted_samples(steps: Sequence[UpdateStep], num_samples: int) -> int:
    """Number of examples to count after all weight steps in a chain."""
    for step in reversed(steps):
        num_samples = step.weight(num_samples) if isinstance(step, WeightStep) else num_samples
    return num_samples


def find_bad_count(num_samples: object) -> str | None:
    """Describes an invalid number of examples, or returns ``None``."""
    is_whole = isinstance(num_samples, numbers.Integral) and not isinstance(num_samples, bool)
    if is_whole and 1 <= num_samples <= MOST_SAMPLES:  # type: ignore[operator]
        return None
    return f"it reports {num_samples!r:.100} examples"
