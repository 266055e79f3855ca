"""A secure sum of clients' steps: the server is to see the sum of all, and of no client its own.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.
https://eprint.iacr.org/2017/281
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning as L
import numpy as np
import torch

from lightning_fed.algorithms.server_optimizer import averaging_rule
from lightning_fed.argument_checks import check_number
from lightning_fed.callbacks.federation import Federation, find_federation
from lightning_fed.errors import BadUpdate, ClientFault, OptionError
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.method import Method, Protection
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.privacy.callbacks import ClippedSteps, PrivacyBudget, protected_rule, refuse_statistics
from lightning_fed.privacy.central import AVERAGES, CALLBACKS
from lightning_fed.privacy.mean import PrivateMean, clip_factor, refuse_complex, step_length
from lightning_fed.privacy.ring import Ring, add_to_ring, merge_rings, ring_form
from lightning_fed.rounds.federated_callback import FederatedCallback
from lightning_fed.server.aggregator import Aggregator
from lightning_fed.server.averaging import AveragingAggregator
from lightning_fed.server.schedule import derive_seed

WEIGHT = "secure_sum/weight"

_ROUNDING = 8  # a stream of a visit's seed of its own


class SecureSum(Protection):
    r"""A secure sum in simulation: clients send whole numbers modulo :math:`2^{32}`, whose sum alone is used.

    Every client shortens its step to a length, multiplies it by its weight, rounds it at random to fixed-point numbers,
    and sends these and its weight; the server adds them up and divides. In a deployment pairs of clients would mask
    their numbers, and the masks cancel in the sum: so what a server does with the sum is what it does here, bit for
    bit. **Here there are no masks**: a simulation shows what rounding, clip and 32 bits do to a model, and that nothing
    but sums is needed. Flower's clients are refused.

    The methods are averages (``fedavg``, ``fairavg``, ``fedprox``, ``fedper``, ``fedrep``), server optimizers after
    them, and :class:`CentralDP`, whose noise is then added to the sum. The sums are the same bits in any order and in
    any number of processes. Clients' metrics, their numbers of examples and the lengths of their steps are not known to
    the server, and not logged.

    Args:
        clip: Longest step of a client, over all floating-point entries that travel; longer ones are shortened to it.
            With :class:`CentralDP` its clip, which must not be given again.

    Raises:
        ValueError: If ``clip`` is not positive and finite; for a method whose result is no sum; in a fit, where the
            weights of examples have no bound (``max_samples``), or the model and the clients are too many for 32 bits.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedadam", secure_sum=SecureSum(clip=10.0), weighting="uniform")
        >>> type(federation.method.aggregator.inner).__name__
        'SecureMean'

    References:
        Bonawitz et al., CCS 2017.

    """

    def __init__(self, clip: float | None = None) -> None:
        if clip is not None and not 0 < check_number("clip", clip) < math.inf:
            raise ValueError(f"Expected `clip` to be greater than 0 and finite, but got {clip}.")
        self.clip = clip

    def protect(self, method: Method) -> Method:
        """The method with a secure sum in the place of its average.

        Raises:
            ValueError: If its result is no sum, or its clients send more than steps.

        """
        rule = averaging_rule(method.aggregator)
        known: tuple[type, ...] = (*CALLBACKS, ClippedSteps, PrivacyBudget)
        others = [callback for callback in method.callbacks if type(callback) not in known]
        if others:
            raise ValueError(
                f"Expected a method whose clients send steps alone for a secure sum, but {type(others[0]).__name__}"
                " sends more."
            )
        if (self.clip is None) != isinstance(rule, PrivateMean):
            raise ValueError(
                "Expected a `clip` of a secure sum, unless there is one of `CentralDP`, but got"
                f" clip={self.clip} with {type(rule).__name__}."
            )
        protected = copy.copy(method)
        if isinstance(rule, PrivateMean):
            if rule.adaptive:
                raise ValueError(
                    "Expected a `CentralDP` with a clip that stays for a secure sum: of an adaptive one every client"
                    " says whether its step was short."
                )
        elif type(rule) in AVERAGES:
            assert isinstance(rule, AveragingAggregator)
            assert self.clip is not None
            protected.aggregator = protected_rule(method.aggregator, SecureMean(self.clip, rule))
        else:
            raise ValueError(
                f"Expected a method whose result is a sum of clients' steps for a secure sum, but {type(rule).__name__}"
                " is none: take 'fedavg', 'fedprox', or a server's optimizer after them."
            )
        protected.callbacks = (*method.callbacks, RingSteps())
        return protected


class RingSteps(FederatedCallback):
    """The client's half of a secure sum: it sends its step in the ring; at a fit's start it settles the ring."""

    supports_vectorize = True
    keeps_privacy = True
    needs_local_clients = "a secure sum is simulated: nothing is masked"

    def __init__(self) -> None:
        self._broadcasts: dict[Client, Broadcast] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses what would tell of single clients, and settles the ring.

        Raises:
            MisconfigurationException: If something else leaves the clients.
            ValueError: If 32 bits are too few, or weights have no bound.

        """
        federation = find_federation(trainer)
        refuse_statistics(pl_module, federation, "each for itself")
        rule = _ring_rule(federation)
        if federation.server.limits.max_update_norm is not None:
            raise OptionError("Expected no `max_update_norm` with a secure sum, whose `clip` is one.")
        population = len(federation.find_population().clients)
        cohort = federation.schedule.cohort_size(population)
        if cohort < 2 and not rule.is_private:
            raise OptionError(
                f"Expected at least 2 clients in a round of a secure sum, but got {cohort}: the sum would be its step."
            )
        if rule.is_private and cohort < population:  # a draw may have more; of so many more there will never be
            cohort = min(population, math.ceil(cohort + 10 * math.sqrt(cohort) + 10))
        rule.ring = Ring(rule.clip, cohort, _most_weight(federation, rule))
        if rule.is_private:
            shared = federation.local_model(pl_module).global_state().values()
            rule.ring.longest(sum(value.numel() for value in shared))

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Keeps what the client was sent."""
        self._broadcasts[client] = broadcast

    @torch.no_grad()
    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Replaces the model by its weighted step in the ring.

        Raises:
            ClientFault: If the step is not finite: whole numbers would not show it.

        """
        federation, old = find_federation(trainer), self._broadcasts.pop(client).state
        rule, planned = _ring_rule(federation), federation.current_visit
        assert planned is not None
        assert rule.ring is not None
        ring, weight = rule.ring, _weight(federation, rule, update)
        left_out = rule.untrained if isinstance(rule, PrivateMean) else frozenset()
        steps = {
            name: to_float64(value) - to_float64(old[name])
            for name, value in update.state.items()
            if value.is_floating_point() and name not in left_out
        }
        length = step_length(steps)
        if not math.isfinite(length):
            raise ClientFault("its step has NaN or infinite values")
        # So much shorter that rounding makes it no longer than the noise covers.
        longest = ring.longest(sum(step.numel() for step in steps.values())) if rule.is_private else ring.clip
        factor = weight * clip_factor(length, longest)
        seed = derive_seed(planned.visit.seed, _ROUNDING)
        generator = np.random.default_rng(np.random.SeedSequence([seed, planned.visit.round]))
        update.state = {
            name: ring.encode(factor * steps[name], generator) if name in steps else old[name].clone()
            for name in update.state
        }
        if not isinstance(rule, PrivateMean):
            update.extras[WEIGHT] = torch.tensor(weight, dtype=torch.int32)
        update.num_samples = 1
        update.metrics.clear()

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Forgets what a client was sent whose visit has failed."""
        self._broadcasts.pop(client, None)


class SecureMean(Aggregator):
    r"""The global model and the weighted mean of clients' steps, from sums in a ring.

    .. math:: w_{t+1} = w_t + \frac{\sum_i a_i u_i}{\sum_i a_i}

    Integer entries keep the server's value. The ring is set before the first round.

    Args:
        clip: Length of the steps.
        inner: The rule that it takes the place of, which says what a client counts.

    Attributes:
        ring: The ring; ``None`` before a fit has settled it.
        total: Sums of the round, int32, by entry.

    """

    def __init__(self, clip: float, inner: AveragingAggregator) -> None:
        self.clip = float(clip)
        self.weigh: Callable[[ClientUpdate], float] = inner.weight
        self.callbacks = tuple(inner.required_callbacks())
        self.ring: Ring | None = None
        self.start_round(-1, {})

    def required_callbacks(self) -> Sequence[Any]:
        """The callbacks of the rule whose place it takes."""
        return self.callbacks

    def start_round(self, round: int, state: State) -> None:
        """Starts a round from ``state``.

        Raises:
            ValueError: If there are complex entries.

        """
        refuse_complex(state)
        self._round, self._state = round, state
        self.total: State = {}
        self.count = 0

    def broadcast(self, client: Client) -> Broadcast:
        """The global state."""
        return Broadcast(self._round, dict(self._state))

    def expected(self, broadcast: Broadcast) -> State:
        """Whole numbers in the place of floating-point entries."""
        return ring_form(broadcast.state)

    def receive(self, update: ClientUpdate) -> None:
        """Adds a step to the sums.

        Raises:
            BadUpdate: If it has no weight, or there are more than the ring has room for.

        """
        assert self.ring is not None
        if update.extras.keys() != {WEIGHT} or update.extras[WEIGHT].shape != torch.Size([]):
            raise BadUpdate(f"it sends {sorted(update.extras)} along, and not its weight alone")
        if not 0 <= int(update.extras[WEIGHT]) <= self.ring.max_weight:
            raise BadUpdate(f"its weight is not from 0 to {self.ring.max_weight}")
        self.count = add_to_ring(self.ring, self.total, {**update.state, WEIGHT: update.extras[WEIGHT]}, self.count)

    def merge(self, other: Aggregator) -> None:
        """Joins the sums of another rule of this kind.

        Raises:
            TypeError: If ``other`` is of another kind.

        """
        if not isinstance(other, SecureMean):
            raise TypeError(f"Expected `other` to be a SecureMean, but got {type(other).__name__}.")
        merge_rings(self.ring, self.total, other.total)
        self.count += other.count

    @torch.no_grad()
    def aggregate(self) -> State:
        """The model, moved by the mean.

        Raises:
            ValueError: If no client counts anything.

        """
        assert self.ring is not None
        weight = int(self.total[WEIGHT])
        if weight <= 0:
            raise ValueError("Expected at least one client with a positive weight.")
        new = {name: value.clone() for name, value in self._state.items()}
        for name, old in self._state.items():
            if old.is_floating_point():
                mean = self.ring.decode(self.total[name]) / weight
                new[name] = cast_back(to_float64(old) + mean.to(old.device), old)
        return new


def _ring_rule(federation: Federation) -> SecureMean | PrivateMean:
    """The rule of a secure sum: behind a server's optimizer, say."""
    rule: Any = federation.server.aggregator
    while not isinstance(rule, SecureMean | PrivateMean):
        rule = rule.inner
    return rule


def _weight(federation: Federation, rule: SecureMean | PrivateMean, update: ClientUpdate) -> int:
    """Weight of a client, a whole number."""
    if isinstance(rule, PrivateMean):
        return 1
    counted = federation.server.limits.counted_samples(update.num_samples)
    return int(rule.weigh(ClientUpdate(update.client, counted, {})))


def _most_weight(federation: Federation, rule: SecureMean | PrivateMean) -> int:
    """Largest weight of a client.

    Raises:
        ValueError: If there is no bound.

    """
    limits = federation.server.limits
    if _weight(federation, rule, ClientUpdate("", 1, {})) == _weight(federation, rule, ClientUpdate("", 2, {})):
        return 1
    if limits.max_samples is None:
        raise OptionError(
            "Expected `max_samples`, the most examples that count of a client, or weighting='uniform', with a secure"
            " sum: the weights are part of it, and 32 bits must have room for all."
        )
    return limits.max_samples
