"""Central differential privacy of a study: the noise of a larger cohort than the one that trains, and its budget."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_fed.messages import Client
from lightning_fed.privacy import Budget, CentralDP


class SimulatedDP(CentralDP):
    """The mean of the clients that train has the noise that the mean of more clients would have.

    The budget is that of the simulated clients, and logged as ``privacy/simulated_epsilon``: it bounds nothing about
    the clients that train.

    Args:
        clip: Length of a client's step.
        delta: Probability with which the bound need not hold.
        noise_multiplier: Noise multiplier of the simulated clients.
        cohort: Number of simulated clients in a round.
        population: Number of simulated clients.
        key: The key of the draws and the noise, which is no secret.
        adaptive: Whether the clip follows the median length of the steps.

    """

    def __init__(
        self,
        clip: float,
        delta: float,
        noise_multiplier: float,
        cohort: int,
        population: int,
        key: int,
        adaptive: bool = False,
    ) -> None:
        super().__init__(clip, delta, noise_multiplier, adaptive=adaptive)
        self.simulated_cohort, self.simulated_population, self.known_key = cohort, population, key
        self.trained_cohort = 0

    def draw_key(self) -> int:
        """The key that is no secret."""
        return self.known_key

    def plan(self, population: int, cohort: int, rounds: int | None) -> Budget:
        """The budget of the simulated clients.

        Raises:
            ValueError: If they are fewer than the clients that train.

        """
        if cohort > self.simulated_cohort or population > self.simulated_population:
            raise ValueError(
                f"Expected to simulate at least {cohort} of {population} clients, which train, but got"
                f" {self.simulated_cohort} of {self.simulated_population}."
            )
        self.trained_cohort = cohort
        return super().plan(self.simulated_population, self.simulated_cohort, rounds)

    @property
    def cohort(self) -> int:
        """Expected number of clients in a round that train: the divisor of the sum."""
        return self.trained_cohort

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise of the sum of the clients that train."""
        return super().noise_std * self.trained_cohort / self.simulated_cohort

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        """The budget under the name of what it is."""
        metrics = super().metrics(norms)
        return {name.replace("privacy/epsilon", "privacy/simulated_epsilon"): metrics[name] for name in metrics}
