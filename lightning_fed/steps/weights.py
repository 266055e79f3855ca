"""Update steps that say what a client counts."""

from __future__ import annotations

import numbers
from abc import ABC, abstractmethod
from collections.abc import Sequence

from lightning_fed.argument_checks import check_count
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.steps.update_step import UpdateStep

MOST_SAMPLES = 10**12
"""Number of examples above which no client is believed."""


class WeightStep(UpdateStep, ABC):
    """Base of steps that change the number of examples that a client counts for."""

    @abstractmethod
    def weight(self, num_samples: int) -> int:
        """Number of examples that count, of those that a client has; whole, at least 1, and not falling."""

    def on_server(self, update: ClientUpdate, sent: State) -> ClientUpdate:
        """Weighs the update."""
        update.num_samples = self.weight(update.num_samples)
        return update


class UniformWeights(WeightStep):
    """Every client counts the same, whatever it reports.

    Example:
        >>> UniformWeights().weight(1000)
        1

    """

    def weight(self, num_samples: int) -> int:
        """One."""
        return 1


class MaxSamples(WeightStep):
    """No client counts for more than some examples: neither in a weight, nor where the client with the most decides.

    Args:
        most: Largest number of examples that counts.

    Raises:
        ValueError: If ``most`` is not a whole number from 1 on.

    Example:
        >>> MaxSamples(100).weight(10**9)
        100

    """

    def __init__(self, most: int) -> None:
        self.most = check_count("most", most)

    def weight(self, num_samples: int) -> int:
        """The examples, and no more than the most."""
        return min(num_samples, self.most)


def counted_samples(steps: Sequence[UpdateStep], num_samples: int) -> int:
    """Number of examples that count, of those that a client has.

    Args:
        steps: The steps of a chain, the innermost first.
        num_samples: Number of examples of the client.

    """
    for step in reversed(steps):
        num_samples = step.weight(num_samples) if isinstance(step, WeightStep) else num_samples
    return num_samples


def find_bad_count(num_samples: object) -> str | None:
    """Fault of a number of examples, in words; ``None`` if a client may have so many.

    Example:
        >>> find_bad_count(3), find_bad_count(10**18)
        (None, 'it reports 1000000000000000000 examples')

    """
    is_whole = isinstance(num_samples, numbers.Integral) and not isinstance(num_samples, bool)
    if is_whole and 1 <= num_samples <= MOST_SAMPLES:  # type: ignore[operator]
        return None
    return f"it reports {num_samples!r:.100} examples"
