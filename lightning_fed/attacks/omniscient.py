"""Attacks with knowledge of all honest updates in a round.

These attacks are a worst case. In a simulation the server executes the attack.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from lightning_fed.argument_checks import check_number
from lightning_fed.attacks.attack import AttackStep, attacked_entries
from lightning_fed.bounds import refuse_rows
from lightning_fed.messages import Client, State
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.steps.update_step import Arrived, CollectingStep, UpdateStep


class HonestSteps:
    """Mean and standard deviation over the honest clients' updates in a round.

    Also stores one of these updates, ``first``.

    Example:
        >>> honest = HonestSteps()
        >>> for client, value in {"a": 1.0, "b": 3.0}.items():
        ...     honest.add(client, {"w": torch.tensor(value).double()})
        >>> honest.mean()["w"], honest.std()["w"]
        (tensor(2., dtype=torch.float64), tensor(1.4142, dtype=torch.float64))
    """

    def __init__(self) -> None:
        self.count = 0
        self.first: State = {}
        self._first_key: int | None = None
        self._sums: State = {}
        self._squares: State = {}

    def add(self, client: Client, step: State) -> None:
        """Adds an honest client's update to the sums. ``step``: trained minus global model, as float64 tensors."""
        part = HonestSteps()
        part.count, part.first, part._first_key = 1, step, client_key(client)
        part._sums = {name: value.clone() for name, value in step.items()}
        part._squares = {name: value.abs().square() for name, value in step.items()}
        self.merge(part)

    def merge(self, other: HonestSteps) -> None:
        self.count += other.count
        if other._first_key is not None and (self._first_key is None or other._first_key < self._first_key):
            self.first, self._first_key = other.first, other._first_key
        for totals, addends in ((self._sums, other._sums), (self._squares, other._squares)):
            for name, value in addends.items():
                totals[name] = totals[name] + value.to(totals[name].device) if name in totals else value

    def mean(self) -> State:
        return {name: value / self.count for name, value in self._sums.items()}

    def std(self) -> State:
        """Unbiased standard deviation of the updates per coordinate, by entry; 0 for a single update."""
        mean = self.mean()
        return {
            name: ((value - self.count * mean[name].abs().square()).clamp_min(0) / max(1, self.count - 1)).sqrt()
            for name, value in self._squares.items()
        }


class OmniscientAttack(AttackStep, CollectingStep):
    """Base class for attacks that use the honest updates. Requires all updates in one process."""

    refuses = ("has_clusters", "has_versions", "resizes")

    @abstractmethod
    def fake(self, honest: HonestSteps) -> State:
        """Returns the update sent by all malicious clients (float64), computed from the honest updates' statistics."""

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        self._trusted = frozenset(rule.always)

    def start(self, info: RoundInfo, state: State) -> None:
        refuse_rows(self, info)
        super().start(info, state)

    @torch.no_grad()
    def collect(self, updates: Sequence[Arrived]) -> Sequence[Arrived]:
        malicious, honest = self.malicious(self.info.clients), HonestSteps()
        for update, _ in updates:
            if update.client not in malicious | self._trusted:
                step = {
                    name: to_float64(update.state[name], copy=True).sub_(to_float64(self.state[name]))
                    for name in attacked_entries(update.state)
                }
                honest.add(update.client, step)
        fake = self.fake(honest) if honest.count else {}
        for update, _ in updates:
            if update.client in malicious:
                for name, value in fake.items():
                    old = self.state[name]
                    update.state[name] = cast_back(to_float64(old) + value.to(old.device), old)
        return updates


class IPM(OmniscientAttack):
    r"""Malicious clients send the negative mean of honest updates (inner-product manipulation, IPM).

    .. math:: u = - \tau \bar u

    Here :math:`\bar u` is the mean of the honest updates. A small :math:`\tau` shrinks the average, and malicious
    updates look normal. A large :math:`\tau` reverses the average.

    Args:
        clients: Malicious clients, or the number to draw.
        tau: Factor :math:`\tau`.
        seed: Seed for drawing clients.

    Xie, Koyejo & Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2019.

    Example:
        >>> IPM(clients=2, tau=0.5).tau
        0.5
    """

    def __init__(self, clients: Sequence[Client] | int, tau: float = 2.0, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.tau = check_number("tau", tau)

    def fake(self, honest: HonestSteps) -> State:
        return {name: -self.tau * value for name, value in honest.mean().items()}


class ALIE(OmniscientAttack):
    r"""Malicious clients deviate slightly from the honest mean in every coordinate ("A Little Is Enough").

    .. math:: u = \bar u + z \, \sigma(u)

    Here :math:`\bar u` and :math:`\sigma(u)` are the mean and the standard deviation of the honest updates.

    Args:
        clients: Malicious clients, or the number to draw.
        z: Number of standard deviations. The paper uses 1.5 for MNIST and 1 for CIFAR-10.
        seed: Seed for drawing clients.

    Baruch, Baruch & Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", 2019, Algorithm 3.

    Example:
        >>> ALIE(clients=2, z=1.0).z
        1.0
    """

    def __init__(self, clients: Sequence[Client] | int, z: float = 1.5, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.z = check_number("z", z)

    def fake(self, honest: HonestSteps) -> State:
        deviation = honest.std()
        return {name: value + self.z * deviation[name] for name, value in honest.mean().items()}


class Mimic(OmniscientAttack):
    """Malicious clients copy one honest client's update, to increase this client's weight in the average.

    The attack matters most for heterogeneous data.

    Args:
        clients: Malicious clients, or the number to draw.
        seed: Seed for drawing clients.

    Karimireddy, He & Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022, 3.2.

    Example:
        >>> Mimic(clients=2).clients
        2
    """

    def fake(self, honest: HonestSteps) -> State:
        return honest.first
