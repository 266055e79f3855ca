"""Callbacks of central differential privacy: clients clip, and the fit ends with its budget."""

from __future__ import annotations

import logging
import secrets

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.algorithms.server_optimizer import ServerOptimizer
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.errors import OptionError
from lightning_fed.messages import Broadcast, Client, ClientUpdate
from lightning_fed.model.entries import batch_norm_statistics
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.privacy.accounting import Accountant, Budget, Sampling, plan_budget
from lightning_fed.privacy.mean import CLIP, IS_SHORT, PrivateMean, clip_factor, step_length
from lightning_fed.rounds.federated_callback import FederatedCallback
from lightning_fed.rounds.options import LocalStatistics
from lightning_fed.rounds.synchronisation import process_group_of
from lightning_fed.server.aggregator import Aggregator

_log = logging.getLogger(__name__)


class ClippedSteps(FederatedCallback):
    """The client's half of central differential privacy: it clips its step, and says nothing else of itself.

    The number of examples that it sends is 1. Metrics of callbacks before this one stay at home, and so does what a
    module writes into parameters without gradient: the server adds no noise to them.

    Args:
        adaptive: Whether it says if its step was short enough.

    """

    supports_vectorize = True

    def __init__(self, adaptive: bool = False) -> None:
        self.adaptive = adaptive
        self._broadcasts: dict[Client, Broadcast] = {}

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Keeps what the client was sent."""
        self._broadcasts[client] = broadcast

    @torch.no_grad()
    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Clips the step."""
        broadcast = self._broadcasts.pop(client)
        clip = float(broadcast.extras[CLIP])
        untrained = find_federation(trainer).server.aggregator.untrained
        update.state |= {name: broadcast.state[name] for name in untrained if name in update.state}
        steps = {
            name: to_float64(value) - to_float64(broadcast.state[name])
            for name, value in update.state.items()
            if value.is_floating_point() and name not in untrained
        }
        length = step_length(steps)
        factor = clip_factor(length, clip)
        if factor < 1:
            for name, step in steps.items():
                old = broadcast.state[name]
                update.state[name] = cast_back(to_float64(old) + factor * step, old)
        if self.adaptive:
            update.extras[IS_SHORT] = torch.tensor(float(length <= clip))
        update.num_samples = 1
        update.metrics.clear()

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Forgets what a client was sent whose visit has failed."""
        self._broadcasts.pop(client, None)


class PrivacyBudget(FederatedCallback):
    """The server's half: it sets the noise before the first round, and ends the fit before a round beyond the budget.

    Args:
        noise_multiplier: Noise multiplier; ``None`` to find that of ``epsilon``.
        epsilon: Bound over all rounds of the fit.
        delta: Probability with which the bound need not hold.
        max_epsilon: Bound at which the fit ends; ``None`` for none.
        sampling: How clients are drawn.
        accountant: Which bound.
        key_for_tests: A key that is not secret.
        noise_cohort: Number of clients in a round whose noise is simulated; ``None`` for those that train.
        noise_population: Number of clients that they are drawn from; ``None`` for those that there are.

    """

    supports_vectorize = True

    def __init__(
        self,
        noise_multiplier: float | None,
        epsilon: float | None,
        delta: float,
        max_epsilon: float | None,
        sampling: Sampling,
        accountant: Accountant,
        key_for_tests: int | None = None,
        noise_cohort: int | None = None,
        noise_population: int | None = None,
    ) -> None:
        self.noise_cohort, self.noise_population = noise_cohort, noise_population
        self.noise_multiplier, self.epsilon, self.delta, self.max_epsilon = (
            noise_multiplier,
            epsilon,
            delta,
            max_epsilon,
        )
        self.sampling, self.accountant, self.key_for_tests = sampling, accountant, key_for_tests

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses what would tell of clients beside the noise, sets the noise and draws the key.

        Raises:
            MisconfigurationException: If something else leaves the clients.
            ValueError: If the budget cannot be kept.

        """
        federation = find_federation(trainer)
        _refuse_other_releases(trainer, pl_module, federation)
        if not federation.has_server:
            return
        rule = private_mean(federation.server.aggregator)
        budget = self._budget(trainer, federation, rule)
        budget.epsilon(1)  # an accountant that is not installed is missed now, and not after a round
        if budget.delta >= 1 / budget.population:
            _log.warning(
                "delta=%g is not less than one over the number of clients (%d): it allows to give one of them away.",
                budget.delta,
                budget.population,
            )
        key = rule.key if rule.key is not None else self.key_for_tests
        key = process_group_of(trainer).broadcast(secrets.randbits(128) if key is None else key)
        if self.noise_cohort is None:
            rule.begin(budget, key)
        else:
            rule.begin(budget, key, federation.schedule.cohort_size(len(federation.find_population().clients)))
            _log.warning(
                "The noise is that of %d clients a round, of %d in all, and %d train: epsilon is simulated, and bounds"
                " nothing of these clients.",
                budget.cohort,
                budget.population,
                rule.cohort,
            )

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Ends a fit that has nothing left of its budget."""
        self._stop_in_time(trainer)

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        """Ends the fit where the next round would exceed the budget."""
        self._stop_in_time(trainer)

    def _budget(self, trainer: L.Trainer, federation: Federation, rule: PrivateMean) -> Budget:
        population = len(federation.find_population().clients)
        population, cohort = simulated_counts(
            population, federation.schedule.cohort_size(population), self.noise_population, self.noise_cohort
        )
        z = rule.budget.noise_multiplier if rule.budget is not None else None  # of a fit that goes on
        return plan_budget(
            self.noise_multiplier if self.noise_multiplier is not None else z,
            self.epsilon,
            self.delta,
            population,
            cohort,
            trainer.max_epochs,
            self.sampling,
            self.accountant,
        )

    def _stop_in_time(self, trainer: L.Trainer) -> None:
        federation = find_federation(trainer)
        if self.max_epsilon is None or not federation.has_server:
            return
        rule = private_mean(federation.server.aggregator)
        assert rule.budget is not None
        following = rule.budget.epsilon(rule.rounds + 1)
        if following > self.max_epsilon * (1 + 1e-9):
            last = trainer.max_epochs is not None and rule.rounds == trainer.max_epochs
            if not last:
                _log.warning(
                    "The fit ends after %d rounds: with one more epsilon would be %.4g, more than max_epsilon=%g.",
                    rule.rounds,
                    following,
                    self.max_epsilon,
                )
            trainer.should_stop = True


def simulated_counts(
    population: int, cohort: int, noise_population: int | None, noise_cohort: int | None
) -> tuple[int, int]:
    """The clients, and those in a round, that noise and budget are of.

    Args:
        population: Number of clients.
        cohort: Number of clients that train in a round.
        noise_population: Number of clients that is simulated; ``None`` for none.
        noise_cohort: Number of clients in a round that is simulated; ``None`` for none.

    Raises:
        ValueError: If they are fewer than there are.

    """
    if noise_cohort is None:
        return population, cohort
    simulated = population if noise_population is None else noise_population
    if not cohort <= noise_cohort <= simulated or simulated < population:
        raise OptionError(
            f"Expected `noise_cohort` to be from {cohort} clients, which train, to `noise_population`, and that to be"
            f" {population} at least, but got {noise_cohort} of {simulated}."
        )
    return simulated, noise_cohort


def private_mean(rule: Aggregator) -> PrivateMean:
    """The private mean inside a rule: behind a server's optimizer, say.

    Raises:
        ValueError: If there is none.

    """
    while not isinstance(rule, PrivateMean):
        inner = getattr(rule, "inner", None)
        if inner is None:
            raise ValueError(f"Expected a rule with a private mean, but got {type(rule).__name__}.")
        rule = inner
    return rule


def protected_rule(rule: Aggregator, mean: Aggregator) -> Aggregator:
    """A rule with a private mean, or a secure one, in the place of its average.

    Raises:
        ValueError: If its result is no average.

    """
    return rule.around(protected_rule(rule.inner, mean)) if isinstance(rule, ServerOptimizer) else mean


def _refuse_other_releases(trainer: L.Trainer, module: L.LightningModule, federation: Federation) -> None:
    refuse_statistics(module, federation, "without noise")
    if federation.server.min_clients > 1:
        raise MisconfigurationException(
            f"Expected min_clients=1 with differential privacy, but got {federation.server.min_clients}: a round that"
            " is left out for want of clients tells who was not there."
        )
    if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        raise MisconfigurationException(
            "A scheduler per step goes on from the client with the most examples, which is not to be known: take one"
            " per epoch, that is per round."
        )


def refuse_statistics(module: L.LightningModule, federation: Federation, how: str) -> None:
    """Refuses BatchNorm's running statistics that travel.

    Args:
        module: The module.
        federation: The federation.
        how: How they would leave the clients, for the error.

    Raises:
        MisconfigurationException: If they do.

    """
    statistics = sorted(batch_norm_statistics(module))
    stay = federation.options.batch_norm in ("personal", "frozen", LocalStatistics("batch"))
    if statistics and not stay:
        raise MisconfigurationException(
            f"BatchNorm's statistics ({statistics[0]}, ...) would leave the clients {how}: take"
            " batch_norm='personal', 'frozen' or LocalStatistics(), or GroupNorm"
            " (`lightning_fed.modules.to_group_norm`)."
        )
