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
from lightning_fed.privacy.ring import CLIENTS, SCALE, Ring, RingSum, ring_form
from lightning_fed.rounds.secret_sum import SummedUpdates
from lightning_fed.server.aggregator import Aggregator
from lightning_fed.server.averaging import AveragingAggregator
from lightning_fed.server.schedule import derive_seed

WEIGHT = "secure_sum/weight"

_ROUNDING = 8  # a stream of a visit's seed of its own


class SecureSum(Protection):
    r"""A secure sum: clients send whole numbers modulo :math:`2^{32}`, of which the server uses the sum alone.

    Every client shortens its step to a length, multiplies it by its weight, rounds it at random to fixed-point numbers,
    and sends these and its weight; the server adds them up and divides. On Flower every two clients agree on masks that
    cancel in the sum, so that the server sees no client's numbers; clients that are lost on the way are recovered from,
    as long as the ``threshold`` is there. **In one process there are no masks**: a simulation shows what rounding, clip
    and 32 bits do to a model, and what it makes of the sum is what a server on Flower makes of it, bit for bit.

    The methods are averages (``fedavg``, ``fairavg``, ``fedprox``, ``fedper``, ``fedrep``), server optimizers after
    them, and :class:`CentralDP`, whose noise is then added to the sum. The sums are the same bits in any order and in
    any number of processes. Clients' metrics, their numbers of examples and the lengths of their steps are not known to
    the server, and not logged.

    Args:
        clip: Longest step of a client, over all floating-point entries that travel; longer ones are shortened to it.
            With :class:`CentralDP` its clip, which must not be given again.
        threshold: Share of a round's clients, more than a half, of which the sum is read: with fewer good updates the
            round comes to nothing. One client less than that, together with the server, could find out what another
            one has sent, for the sum may be of no others; fewer cannot.

    Raises:
        ValueError: If an argument is out of its range; for a method whose result is no sum; in a fit, where the
            weights of examples have no bound (``max_samples``), or the model and the clients are too many for 32 bits.

    Example:
        >>> from lightning_fed import Federation
        >>> federation = Federation("fedadam", secure_sum=SecureSum(clip=10.0), weighting="uniform")
        >>> type(federation.method.aggregator.inner).__name__
        'SecureMean'

    References:
        Bonawitz et al., CCS 2017, Figure 4, for a server that is honest but curious.

    """

    def __init__(self, clip: float | None = None, threshold: float = 2 / 3) -> None:
        if clip is not None and not 0 < check_number("clip", clip) < math.inf:
            raise ValueError(f"Expected `clip` to be greater than 0 and finite, but got {clip}.")
        if not 0.5 < check_number("threshold", threshold) <= 1:
            raise ValueError(f"Expected `threshold` to be more than a half and at most 1, but got {threshold}.")
        self.clip, self.threshold = clip, threshold

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
        protected.callbacks = (*method.callbacks, RingSteps(self.threshold))
        return protected


class RingSteps(SummedUpdates):
    """Both halves of a secure sum: a client sends its step in the ring, and a fit's start settles the ring.

    Args:
        threshold: Share of a round's clients of which the sum is read.

    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, threshold: float = 2 / 3) -> None:
        self.threshold = threshold
        self._broadcasts: dict[Client, Broadcast] = {}

    def secret_sum(self, trainer: L.Trainer) -> RingSum:
        """The sum of the round that is under way."""
        sums = _ring_rule(find_federation(trainer)).sums
        assert sums is not None
        return sums

    def least_clients(self, count: int) -> int:
        """Fewest clients of which the sum is read; never one."""
        return max(2, math.ceil(self.threshold * count - 1e-9))

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses what would tell of single clients, and settles the ring.

        Raises:
            MisconfigurationException: If something else leaves the clients.
            ValueError: If 32 bits are too few, or weights have no bound.

        """
        federation = find_federation(trainer)
        refuse_statistics(pl_module, federation, "each for itself")
        rule, limits = _ring_rule(federation), federation.server.limits
        if limits.max_update_norm is not None:
            raise OptionError("Expected no `max_update_norm` with a secure sum, whose `clip` is one.")
        if limits.weighting != "uniform" and any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            raise OptionError(
                "Expected no scheduler per step with a secure sum and weights by examples: it goes on from the client"
                " with the most, which is not to be known. Take one per epoch, that is per round, or"
                " weighting='uniform'."
            )
        if not federation.has_server:
            return
        population = len(federation.find_population().clients)
        cohort = federation.schedule.cohort_size(population)
        if cohort < 2 and not rule.is_private:
            raise OptionError(
                f"Expected at least 2 clients in a round of a secure sum, but got {cohort}: the sum would be its step."
            )
        if rule.is_private and cohort < population:  # a draw may have more; of so many more there will never be
            cohort = min(population, math.ceil(cohort + 10 * math.sqrt(cohort) + 10))
        ring = Ring(rule.clip, cohort, _most_weight(federation, rule))
        rule.sums = RingSum(ring)
        if rule.is_private:
            shared = federation.local_model(pl_module).global_state().values()
            ring.longest(sum(value.numel() for value in shared))

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Notes how many of the round's clients there must be."""
        self.secret_sum(trainer).least = self.least_clients(len(find_federation(trainer).cohort.visits))

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
            ClientFault: If the step is not finite: whole numbers would not show it; or if the server reads the numbers
                in other units than they are written in.

        """
        federation, broadcast = find_federation(trainer), self._broadcasts.pop(client)
        rule, planned, old = _ring_rule(federation), federation.current_visit, broadcast.state
        assert planned is not None
        ring = Ring(rule.clip, int(broadcast.extras[CLIENTS]), _most_weight(federation, rule))
        scale = float(broadcast.extras[SCALE])
        if ring.scale != scale:
            raise ClientFault(
                f"its federation has {ring.scale:.6g} units of a secure sum in 1, and the server {scale:.6g}: both need"
                " the same `clip`, `weighting` and `max_samples`"
            )
        weight = _weight(federation, rule, update)
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
        sums: The sums of the round; without a ring before a fit has settled it.

    """

    def __init__(self, clip: float, inner: AveragingAggregator) -> None:
        self.clip = float(clip)
        self.weigh: Callable[[ClientUpdate], float] = inner.weight
        self.callbacks = tuple(inner.required_callbacks())
        self.sums = RingSum()
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
        self.sums = self.sums.emptied()

    def broadcast(self, client: Client) -> Broadcast:
        """The global state, and the ring."""
        assert self.sums.ring is not None
        return Broadcast(self._round, dict(self._state), self.sums.ring.extras())

    def expected(self, broadcast: Broadcast) -> State:
        """Whole numbers in the place of floating-point entries."""
        return ring_form(broadcast.state)

    def receive(self, update: ClientUpdate) -> None:
        """Adds a step, and its weight, to the sums.

        Raises:
            BadUpdate: If it has no weight, or there are more than the ring has room for.

        """
        weight = update.extras.get(WEIGHT)
        if weight is None or len(update.extras) > 1 or weight.shape != torch.Size([]) or weight.dtype != torch.int32:
            raise BadUpdate(f"it sends {sorted(update.extras)} along, and not its weight alone")
        numbers = {name: value for name, value in update.state.items() if self._state[name].is_floating_point()}
        self.sums.add(update.client, {**numbers, WEIGHT: weight})

    def merge(self, other: Aggregator) -> None:
        """Joins the sums of another rule of this kind.

        Raises:
            TypeError: If ``other`` is of another kind.

        """
        if not isinstance(other, SecureMean):
            raise TypeError(f"Expected `other` to be a SecureMean, but got {type(other).__name__}.")
        self.sums.merge(other.sums)

    def leave_out(self) -> dict[Client, str]:
        """All clients, if there are too few of them, or their weights are none that they can have."""
        most = 0 if self.sums.ring is None else len(self.sums.clients) * self.sums.ring.max_weight
        is_read = len(self.sums.clients) >= self.sums.least
        if self.sums.total and is_read and not 0 < int(self.sums.total[WEIGHT]) <= most:
            self.sums.discard(f"the sum of the weights, {int(self.sums.total[WEIGHT])}, is not from 1 to {most}")
        return self.sums.leave_out()

    @torch.no_grad()
    def aggregate(self) -> State:
        """The model, moved by the mean."""
        weight, totals = int(self.sums.total[WEIGHT]), self.sums.decoded()
        new = {name: value.clone() for name, value in self._state.items()}
        for name, old in self._state.items():
            if old.is_floating_point():
                new[name] = cast_back(to_float64(old) + (totals[name] / weight).to(old.device), old)
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
