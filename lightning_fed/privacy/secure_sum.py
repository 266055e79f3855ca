"""A secure sum over clients' steps: the server sees the sum, and no single step.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017.
https://eprint.iacr.org/2017/281
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import lightning as L
import numpy as np
import torch

from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.argument_checks import check_number, check_positive
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.errors import BadUpdate, BadUpdates, ClientFault, OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.numerics.precision import to_float64
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.privacy.central import (
    CentralDP,
    clip_factor,
    refuse_other_messages,
    refuse_statistics,
    step_length,
)
from lightning_fed.privacy.ring import CLIENTS, SCALE, Ring, in_ring, ring_form
from lightning_fed.rule import Aggregator
from lightning_fed.steps.update_step import Arrived, Held, UpdateStep
from lightning_fed.steps.weights import MOST_SAMPLES, counted_samples

WEIGHT = "secure_sum/weight"

_ROUNDING = 8  # a stream of a visit's seed of its own


class SecureSum(UpdateStep):
    r"""A secure sum: clients send whole numbers modulo :math:`2^{32}`, of which the server uses the sum alone.

    Every client shortens its step to a length, multiplies it by its weight, rounds it at random to fixed-point numbers,
    and sends these and its weight; the server adds them up and divides. On Flower every two clients agree on masks that
    cancel in the sum, so that the server sees no client's numbers; clients that are lost on the way are recovered from,
    as long as the ``threshold`` is there. **In one process there are no masks**: a simulation shows what rounding, clip
    and 32 bits do to a model, and what it makes of the sum is what a server on Flower makes of it, bit for bit.

    .. math:: w_{t+1} = w_t + \frac{\sum_i a_i u_i}{\sum_i a_i}

    The rule is ``fedavg``, with all callbacks that send nothing of their own (``fedprox``, ``fedper``, ``fedrep``), and
    with steps inside: server optimizers, :class:`CentralDP`, whose noise is then added to the sum, and weights or
    bounds, which the clients apply themselves. Integer entries keep the server's value. The sums are the same bits in
    any order and in any number of processes. Clients' metrics, their numbers of examples and the lengths of their steps
    are not known to the server, and not logged.

    Args:
        clip: Longest step of a client, over all floating-point entries that travel; longer ones are shortened to it.
            With :class:`CentralDP` its clip, which must not be given again.
        threshold: Share of a round's clients, more than a half, of which the sum is read: with fewer good updates the
            round comes to nothing. One client less than that, together with the server, could find out what another
            one has sent, for the sum may be of no others; fewer cannot.

    Raises:
        ValueError: If an argument is out of its range; for a method whose result is no sum, or where the weights have
            no bound (:class:`~lightning_fed.steps.MaxSamples`); in a fit, if the model and the clients are too many for
            32 bits.

    Example:
        >>> from lightning_fed import Federation
        >>> from lightning_fed.steps import UniformWeights
        >>> federation = Federation("fedadam", steps=[UniformWeights(), SecureSum(clip=10.0)])

    References:
        Bonawitz et al., CCS 2017, Figure 4, for a server that is honest but curious.

    """

    reveals: Literal["sum"] = "sum"

    def __init__(self, clip: float | None = None, threshold: float = 2 / 3) -> None:
        if clip is not None:
            check_positive("clip", clip)
        if not 0.5 < check_number("threshold", threshold) <= 1:
            raise ValueError(f"Expected `threshold` to be more than a half and at most 1, but got {threshold}.")
        self.clip, self.threshold = clip, threshold
        self.ring: Ring | None = None
        self.least = 0

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Refuses rules other than an average, and unsuitable steps.

        These are steps outside that work on updates, and weights without a bound.
        """
        if type(rule) is not FedAvg:
            raise OptionError(
                f"Expected a method whose result is a sum of clients' steps for a secure sum, but {type(rule).__name__}"
                " is none: take 'fedavg', 'fedprox', or a server's optimizer after them."
            )
        position = next(index for index, step in enumerate(steps) if step is self)
        inside = steps[:position]
        self._private = next((step for step in inside if isinstance(step, CentralDP)), None)
        if (self.clip is None) != (self._private is not None):
            raise OptionError(
                "Expected a `clip` of a secure sum, unless there is one of `CentralDP` inside of it, but got"
                f" clip={self.clip}."
            )
        if self._private is not None and self._private.adaptive:
            raise OptionError(
                "Expected a `CentralDP` with a clip that stays for a secure sum: of an adaptive one every client says"
                " whether its step was short."
            )
        self.max_weight = 1 if self._private is not None else counted_samples(inside, MOST_SAMPLES)
        if self.max_weight == MOST_SAMPLES:
            raise OptionError(
                "Expected `MaxSamples`, the most examples that count of a client, or `UniformWeights` inside of a"
                " secure sum: the weights are part of it, and 32 bits must have room for all."
            )

    @property
    def is_private(self) -> bool:
        """True if there is noise inside."""
        return self._private is not None

    @property
    def longest_step(self) -> float:
        """Longest step of a client."""
        return self._private.clip if self._private is not None else float(self.clip or 0.0)

    def least_clients(self, count: int) -> int:
        """Fewest clients in a readable sum, for a number in the round; never one."""
        return max(2, math.ceil(self.threshold * count - 1e-9))

    def callbacks(self) -> Sequence[Any]:
        """The callback that settles the ring before a fit."""
        return [RingSettings(self)]

    def form(self, state: State) -> State:
        """Whole numbers in the place of floating-point entries that train."""
        return state | ring_form({name: state[name] for name in self._names(state)})

    def on_send(self, broadcast: Broadcast) -> None:
        """Tells the client the ring."""
        assert self.ring is not None
        broadcast.extras |= self.ring.extras()

    @torch.no_grad()
    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Replaces the model by its weighted step in the ring.

        Raises:
            ClientFault: If the step is not finite: whole numbers would not show it; or if the server reads the numbers
                in other units than they are written in.

        """
        ring = Ring(self.longest_step, int(sent.extras[CLIENTS]), self.max_weight)
        scale = float(sent.extras[SCALE])
        if ring.scale != scale:
            raise ClientFault(
                f"its federation has {ring.scale:.6g} units of a secure sum in 1, and the server {scale:.6g}: both need"
                " the same `clip` and the same steps"
            )
        names = self._names(sent.state)
        steps = {name: to_float64(update.state[name]) - to_float64(sent.state[name]) for name in names}
        length, weight = step_length(steps), 1 if self.is_private else update.num_samples
        if not math.isfinite(length):
            raise ClientFault("its step has NaN or infinite values")
        # So much shorter that rounding makes it no longer than the noise covers.
        longest = ring.longest(sum(step.numel() for step in steps.values())) if self.is_private else ring.clip
        factor = weight * clip_factor(length, longest)
        seed = derive_seed(self.info.seed, sent.round, client_key(update.client), _ROUNDING)
        generator = np.random.default_rng([seed])
        update.state = {
            name: ring.encode(factor * steps[name], generator) if name in steps else sent.state[name]
            for name in update.state
        }
        if not self.is_private:
            update.extras[WEIGHT] = torch.tensor(weight, dtype=torch.int32)
        update.num_samples, update.metrics = 1, {}
        return update

    def hold(self) -> RingSum:
        """The sum."""
        return RingSum(self)

    def vector(self, update: ClientUpdate) -> State:
        """The numbers of an update that are summed up, its weight among them.

        Raises:
            BadUpdate: If it has no weight, or sends more.

        """
        numbers = {name: update.state[name] for name in self._names(self.state)}
        if self.is_private:
            if update.extras:
                raise BadUpdate(f"it sends {sorted(update.extras)} along")
            return numbers
        weight = update.extras.get(WEIGHT)
        if weight is None or len(update.extras) > 1 or weight.shape != torch.Size([]) or weight.dtype != torch.int32:
            raise BadUpdate(f"it sends {sorted(update.extras)} along, and not its weight alone")
        return {**numbers, WEIGHT: weight}

    @torch.no_grad()
    def mean(self, total: State, clients: Sequence[Client]) -> ClientUpdate:
        """The mean of the steps, as one update of as much weight as all.

        Raises:
            BadUpdates: If their weights are none that they can have.

        """
        assert self.ring is not None
        most = len(clients) * self.ring.max_weight
        weight = len(clients) if self.is_private else int(total[WEIGHT])
        if not 0 < weight <= most:
            reason = f"the weights add up to {weight}, not to 1 to {most}: one of them is wrong, and whose is hidden"
            raise BadUpdates(dict.fromkeys(clients, reason))
        state = dict(self.state)
        for name in self._names(self.state):
            mean = self.ring.decode(total[name]) / weight
            state[name] = to_float64(self.state[name]) + mean.to(self.state[name].device)
        return ClientUpdate("sum", weight, state, members=tuple(clients))

    def _names(self, state: State) -> list[str]:
        untrained = self.info.untrained
        return [name for name, value in state.items() if value.is_floating_point() and name not in untrained]


class RingSum(Held):
    """Sum of a round's vectors in a ring, and whose they are.

    Args:
        step: The step that holds it.

    Attributes:
        total: The sums, int32, by name.
        clients: The clients whose vectors are in it.

    """

    def __init__(self, step: SecureSum) -> None:
        super().__init__(step)
        self.total: State = {}
        self.clients: list[Client] = []
        self._fault: str | None = None

    @property
    def least(self) -> int:
        """Fewest clients of which the sum may be read."""
        return int(self._step.least)

    def add(self, update: ClientUpdate, sent: State) -> None:
        """Adds a client's vector.

        Raises:
            BadUpdate: If there are more than the ring has room for, or it is not what a client sends.

        """
        assert self._step.ring is not None
        if len(self.clients) >= self._step.ring.clients:
            raise BadUpdate(f"it is one more than the {self._step.ring.clients} clients whose sum has room in 32 bits")
        self._join(self._step.vector(update))
        self.clients.append(update.client)

    def merge(self, other: RingSum) -> None:
        """Adds the sum of another process."""
        self._join(other.total)
        self.clients += other.clients

    def subtract(self, masks: State) -> None:
        """Takes masks off the sum."""
        for name, value in masks.items():
            self.total[name] = in_ring(self.total[name].long() - value.to(self.total[name].device).long())

    def discard(self, reason: str) -> None:
        """Gives up the sum, for the first reason."""
        self._fault = reason if self._fault is None else self._fault

    def release(self) -> Sequence[Arrived]:
        """The mean, as one update; nothing, where nobody is left.

        Raises:
            BadUpdates: For all clients, if there are too few, or the sum was given up.

        """
        if self._fault is None and 0 < len(self.clients) < self.least:
            self._fault = f"a secure sum is read of {self.least} clients or more, and of {len(self.clients)} it is not"
        clients, total, fault = self.clients, self.total, self._fault
        self.clients, self.total, self._fault = [], {}, None
        if fault is not None and clients:
            raise BadUpdates(dict.fromkeys(clients, fault))
        return [(self._step.mean(total, clients), self._step.state)] if clients else []

    def _join(self, vector: State) -> None:
        for name, value in vector.items():
            if name in self.total:
                assert self._step.ring is not None
                value = self._step.ring.add(self.total[name], value)
            self.total[name] = value


class RingSettings(FederatedCallback):
    """Settles the ring of a secure sum before a fit, and refuses messages about single clients.

    Args:
        step: The step.

    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, step: SecureSum) -> None:
        self.step = step

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses messages about single clients, and settles the ring.

        Raises:
            MisconfigurationException: If something else leaves the clients.
            ValueError: If 32 bits are too few.

        """
        federation, step = find_federation(trainer), self.step
        refuse_other_messages(trainer)
        refuse_statistics(pl_module, federation, "each for itself")
        if not federation.has_server:
            return
        population = len(federation.find_population().clients)
        cohort = federation.schedule.cohort_size(population)
        if cohort < 2 and not step.is_private:
            raise OptionError(
                f"Expected at least 2 clients in a round of a secure sum, but got {cohort}: the sum would be its step."
            )
        if step.is_private and cohort < population:  # a draw may have more; of so many more there will never be
            cohort = min(population, math.ceil(cohort + 10 * math.sqrt(cohort) + 10))
        step.ring = Ring(step.longest_step, cohort, step.max_weight)
        if step.is_private:
            shared = federation.local_model(pl_module).global_state().values()
            step.ring.longest(sum(value.numel() for value in shared))

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Notes how many of the round's clients there must be."""
        self.step.least = self.step.least_clients(len(find_federation(trainer).cohort.visits))
