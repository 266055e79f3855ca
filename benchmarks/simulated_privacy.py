"""Central differential privacy in a study: the noise and budget for a cohort larger than the training cohort."""

from __future__ import annotations

from collections.abc import Mapping

from lightning_fed.messages import Client
from lightning_fed.privacy import Budget, CentralDP


class SimulatedDP(CentralDP):
    """Central differential privacy with noise scaled to a larger, simulated cohort.

    The budget applies to the simulated clients, and is logged as ``privacy/simulated_epsilon``: no bound holds for the
    training clients.

    Args:
        clip: Maximum norm of a client's step.
        delta: Probability of a violation of the bound.
        noise_multiplier: Noise multiplier for the simulated clients.
        cohort: Number of simulated clients in a round.
        population: Number of simulated clients.
        key: Public seed for draws and noise.
        adaptive: Whether the clip follows the median norm of the steps.
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
        return self.known_key

    def plan(self, population: int, cohort: int, rounds: int | None) -> Budget:
        """Returns the simulated clients' budget.

        Raises:
            ValueError: If the simulated clients are fewer than the training clients.
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
        return self.trained_cohort  # divisor for the training clients' sum

    @property
    def noise_std(self) -> float:
        """Standard deviation of the noise in the training clients' sum."""
        return super().noise_std * self.trained_cohort / self.simulated_cohort

    def metrics(self, norms: Mapping[Client, float]) -> dict[str, float]:
        metrics = super().metrics(norms)
        return {name.replace("privacy/epsilon", "privacy/simulated_epsilon"): metrics[name] for name in metrics}
