"""Secure aggregation: the server receives the sum of client updates, but no single update.

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
from lightning_fed.messages import MOST_SAMPLES, Broadcast, Client, ClientUpdate, State
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
from lightning_fed.steps.chain import counted_samples
from lightning_fed.steps.update_step import Arrived, Held, UpdateStep

WEIGHT = "secure_sum/weight"

_ROUNDING = 8  # random stream for rounding


class SecureSum(UpdateStep):
    r"""Secure aggregation: the server only uses the sum of the clients' updates.

    Each client clips the update and multiplies the result by a weight. The client then rounds randomly to integers
    modulo :math:`2^{32}`, and sends these integers and the weight. The server divides the sum by the total weight. On
    Flower each pair of clients agrees on masks that cancel in the sum, so the server sees no single update. **A
    simulation in one process has no masks.** Clipping and rounding equal those on Flower bit for bit.

    .. math:: w_{t+1} = w_t + \frac{\sum_i a_i u_i}{\sum_i a_i}

    :math:`w_t` is the global model before the round, :math:`u_i` a client's clipped update, and :math:`a_i` the weight.
    Weights must have an upper bound (:class:`~lightning_fed.steps.MaxSamples`).

    The aggregation rule must be ``fedavg``. Methods whose clients only send the model (``fedprox``, ``fedper``,
    ``fedrep``), server optimizers, :class:`CentralDP`, and update steps for weights or norm limits are also supported.
    Integer tensors do not change. The server does not know client metrics, numbers of examples and update norms.

    Args:
        clip: Maximum update norm over all shared floating-point tensors; by default the norm of :class:`CentralDP`.
        threshold: Minimum fraction of the round's n clients in the sum, more than one half. This minimum is t clients.
            With fewer valid updates, the round fails. A server that follows the protocol can read one update only if
            t - 1 other clients reveal secrets. If the server names different lost clients to different clients, secrets
            from 2 t - n clients are enough.

    Raises:
        ValueError: If an argument is outside its range, the rule is not an average, or weights are unbounded. In a fit,
            if 32 bits do not suffice for the model size and the number of clients.

    Example:
        >>> from lightning_fed import Federation
        >>> from lightning_fed.steps import UniformWeights
        >>> federation = Federation("fedadam", steps=[UniformWeights(), SecureSum(clip=10.0)])

    Reference: Bonawitz et al., CCS 2017, Figure 4, for an honest but curious server.
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
        if type(rule) is not FedAvg:
            raise OptionError(
                "Expected an averaging method for a secure sum ('fedavg', 'fedprox', or a server optimizer), but got"
                f" {type(rule).__name__}."
            )
        position = next(index for index, step in enumerate(steps) if step is self)
        inside = steps[:position]
        self._private = next((step for step in inside if isinstance(step, CentralDP)), None)
        if (self.clip is None) != (self._private is not None):
            raise OptionError(
                "Expected a `clip` either in `SecureSum` or in `CentralDP`, but got "
                f"{'both' if self._private is not None else 'none'}."
            )
        if self._private is not None and self._private.adaptive:
            raise OptionError(
                "Expected `CentralDP` with a fixed clipping norm for a secure sum, but got adaptive=True: every "
                "client would report whether its update was clipped."
            )
        self.max_weight = 1 if self._private is not None else counted_samples(inside, MOST_SAMPLES)
        if self.max_weight == MOST_SAMPLES:
            raise OptionError(
                "Expected `MaxSamples` or `UniformWeights` before `SecureSum` in `steps`, because the sum of weights "
                "must fit in 32 bits."
            )

    @property
    def is_private(self) -> bool:
        return self._private is not None

    @property
    def longest_step(self) -> float:
        return self._private.clip if self._private is not None else float(self.clip or 0.0)

    def least_clients(self, count: int) -> int:
        """Minimum number of clients in the sum, if the round has ``count`` clients; at least 2."""
        return max(2, math.ceil(self.threshold * count - 1e-9))

    def callbacks(self) -> Sequence[Any]:
        return [RingSettings(self)]

    def form(self, state: State) -> State:
        return state | ring_form({name: state[name] for name in self._names(state)})

    def on_send(self, client: Client, broadcast: Broadcast) -> None:
        assert self.ring is not None
        broadcast.extras |= self.ring.extras()

    @torch.no_grad()
    def on_client(self, update: ClientUpdate, sent: Broadcast, memory: State) -> ClientUpdate:
        """Replaces the client's model by the update: clipped, weighted, rounded. Raises ``ClientFault`` for NaN."""
        ring = Ring(self.longest_step, int(sent.extras[CLIENTS]), self.max_weight)
        scale = float(sent.extras[SCALE])
        if ring.scale != scale:
            raise ClientFault(
                f"the client's secure sum encodes 1.0 as the integer {ring.scale:.6g}, but the server's as {scale:.6g}:"
                " both federations need the same `clip` and the same update steps"
            )
        names = self._names(sent.state)
        steps = {name: to_float64(update.state[name]) - to_float64(sent.state[name]) for name in names}
        length, weight = step_length(steps), 1 if self.is_private else update.num_samples
        if not math.isfinite(length):
            raise ClientFault("the client's update has NaN or infinite values")
        # Clips a little more, so that the rounded update stays within the norm covered by the noise.
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
        return RingSum(self)

    def vector(self, update: ClientUpdate) -> State:
        """Returns an update's tensors for the sum: encoded entries and, without `CentralDP`, the weight."""
        numbers = {name: update.state[name] for name in self._names(self.state)}
        if self.is_private:
            if update.extras:
                raise BadUpdate(f"the client sends additional tensors, but none are allowed: {sorted(update.extras)}")
            return numbers
        weight = update.extras.get(WEIGHT)
        if weight is None or len(update.extras) > 1 or weight.shape != torch.Size([]) or weight.dtype != torch.int32:
            raise BadUpdate(
                f"the client sends the additional tensors {sorted(update.extras)}, instead of only one int32 number, "
                "the client's weight in the average"
            )
        return {**numbers, WEIGHT: weight}

    @torch.no_grad()
    def mean(self, total: State, clients: Sequence[Client]) -> ClientUpdate:
        """Decodes a sum of updates to the mean. Raises ``BadUpdates`` if the total weight is below 1 or too large."""
        assert self.ring is not None
        most = len(clients) * self.ring.max_weight
        weight = len(clients) if self.is_private else int(total[WEIGHT])
        if not 0 < weight <= most:
            reason = f"the weights add up to {weight} instead of 1 to {most}: a client sent a wrong weight"
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
    """Running sum over the clients' masked updates (int32, modulo 2^32), and the list of summed clients."""

    def __init__(self, step: SecureSum) -> None:
        super().__init__(step)
        self.total: State = {}
        self.clients: list[Client] = []
        self._fault = ""

    @property
    def least(self) -> int:
        return int(self._step.least)

    def add(self, update: ClientUpdate, sent: State) -> None:
        """Adds a client's update. Raises ``BadUpdate`` for a malformed update or a second update from a client."""
        assert self._step.ring is not None
        if len(self.clients) >= self._step.ring.clients:
            raise BadUpdate(f"the secure sum accepts at most {self._step.ring.clients} clients")
        self._join(self._step.vector(update))
        self.clients.append(update.client)

    def merge(self, other: RingSum) -> None:
        self._join(other.total)
        self.clients += other.clients

    def zeros(self) -> np.ndarray[Any, Any]:
        return np.zeros(sum(value.numel() for value in self.total.values()), np.uint32)

    def subtract(self, masks: np.ndarray[Any, Any]) -> None:
        """Subtracts the masks from the sum. ``masks`` joins the masks of all tensors, sorted by name."""
        names = sorted(self.total)
        parts = torch.split(torch.from_numpy(masks.view(np.int32)), [self.total[name].numel() for name in names])
        for name, part in zip(names, parts, strict=True):
            total = self.total[name]
            self.total[name] = in_ring(total.long() - part.reshape(total.shape).to(total.device).long())

    def discard(self, reason: str) -> None:
        self._fault = self._fault or reason

    def release(self) -> Sequence[Arrived]:
        """Returns one update with the mean over the clients, or an empty list if no client sent an update."""
        if not self._fault and 0 < len(self.clients) < self.least:
            self._fault = f"the secure sum requires at least {self.least} clients, but got {len(self.clients)}"
        clients, total, fault = self.clients, self.total, self._fault
        self.clients, self.total, self._fault = [], {}, ""
        if fault and clients:
            raise BadUpdates(dict.fromkeys(clients, fault))
        return [(self._step.mean(total, clients), self._step.state)] if clients else []

    def _join(self, vector: State) -> None:
        for name, value in vector.items():
            if name in self.total:
                assert self._step.ring is not None
                value = self._step.ring.add(self.total[name], value)
            self.total[name] = value


class RingSettings(FederatedCallback):
    """Sets the step size for rounding values in a secure sum, before the fit.

    Also refuses callbacks and BatchNorm options that send values outside the sum.
    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, step: SecureSum) -> None:
        self.step = step

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation, step = find_federation(trainer), self.step
        refuse_other_messages(trainer)
        refuse_statistics(pl_module, federation, "outside the secure sum")
        if not federation.has_server:
            return
        population = len(federation.find_population().clients)
        cohort = federation.schedule.cohort_size(population)
        if cohort < 2 and not step.is_private:
            raise OptionError(
                f"Expected at least 2 clients per round for a secure sum, but got {cohort}: a sum of one update would "
                "reveal the update."
            )
        if step.is_private and cohort < population:  # upper bound for a Poisson cohort
            cohort = min(population, math.ceil(cohort + 10 * math.sqrt(cohort) + 10))
        step.ring = Ring(step.longest_step, cohort, step.max_weight)
        if step.is_private:
            shared = federation.local_model(pl_module).global_state().values()
            step.ring.longest(sum(value.numel() for value in shared))

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.step.least = self.step.least_clients(len(find_federation(trainer).cohort.visits))
