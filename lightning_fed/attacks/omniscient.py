"""Attacks by clients that know the honest clients' steps of the round, and send what they make of them.

No client of a real federation knows so much: these attacks are the worst that a rule may meet. In a simulation the
server knows: the attack is an update step, the outermost, which holds the updates back until all are there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch

from lightning_fed.argument_checks import check_number
from lightning_fed.attacks.attack import AttackStep, attacked_entries
from lightning_fed.messages import Client, State
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.numerics.seeds import client_key
from lightning_fed.rule import Aggregator, RoundInfo
from lightning_fed.steps.bounds import refuse_rows, refuse_rule
from lightning_fed.steps.update_step import Arrived, CollectingStep, UpdateStep


class HonestSteps:
    """Mean and standard deviation of the honest clients' steps of a round, and one of them, in O(model) memory.

    Attributes:
        count: Number of steps.
        first: Step of the client with the smallest key, whatever the order in which they come.

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
        """Adds a client's step, float64 entries."""
        part = HonestSteps()
        part.count, part.first, part._first_key = 1, step, client_key(client)
        part._sums = {name: value.clone() for name, value in step.items()}
        part._squares = {name: value.abs().square() for name, value in step.items()}
        self.merge(part)

    def merge(self, other: HonestSteps) -> None:
        """Joins the steps that ``other`` has; ``other`` is left as it is."""
        self.count += other.count
        if other._first_key is not None and (self._first_key is None or other._first_key < self._first_key):
            self.first, self._first_key = other.first, other._first_key
        for totals, addends in ((self._sums, other._sums), (self._squares, other._squares)):
            for name, value in addends.items():
                totals[name] = totals[name] + value.to(totals[name].device) if name in totals else value

    def mean(self) -> State:
        """The mean step."""
        return {name: value / self.count for name, value in self._sums.items()}

    def std(self) -> State:
        """The standard deviation by coordinate, with n - 1 below the line; 0 of a single step."""
        mean = self.mean()
        return {
            name: ((value - self.count * mean[name].abs().square()).clamp_min(0) / max(1, self.count - 1)).sqrt()
            for name, value in self._squares.items()
        }


class OmniscientAttack(AttackStep, CollectingStep):
    """Base class of attacks that know the honest clients' steps. It needs one process that sees them: the server's.

    Args:
        clients: The malicious clients, or their number.
        seed: Seed of the clients that are drawn.

    """

    @abstractmethod
    def fake(self, honest: HonestSteps) -> State:
        """The step that all malicious clients send, float64 entries.

        Args:
            honest: The honest clients' steps, of at least one client.

        """

    def check(self, rule: Aggregator, steps: Sequence[UpdateStep]) -> None:
        """Refuses rules whose clients' steps are not from one global model."""
        refuse_rule(self, rule, "has_clusters", "resizes")
        self._trusted = frozenset(rule.plan(0).always)

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round; refuses entries of which the clients hold different rows."""
        refuse_rows(self, info)
        super().start(info, state)

    @torch.no_grad()
    def collect(self, updates: Sequence[Arrived]) -> Sequence[Arrived]:
        """Has the malicious clients send what they make of the others' steps."""
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
    r"""Inner-product manipulation: malicious clients send the honest clients' mean step turned round.

    .. math:: u = - \tau \bar u

    With a small :math:`\tau` the average still goes in the right direction, but shorter, and the malicious steps look
    like others; with a large one the average goes backwards.

    Args:
        clients: The malicious clients, or their number.
        tau: Factor :math:`\tau`.
        seed: Seed of the clients that are drawn.

    Example:
        >>> IPM(clients=2, tau=0.5).tau
        0.5

    References:
        Xie, Koyejo & Gupta, "Fall of Empires: Breaking Byzantine-tolerant SGD by Inner Product Manipulation", UAI 2019.

    """

    def __init__(self, clients: Sequence[Client] | int, tau: float = 2.0, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.tau = check_number("tau", tau)

    def fake(self, honest: HonestSteps) -> State:
        """The mean step turned round."""
        return {name: -self.tau * value for name, value in honest.mean().items()}


class ALIE(OmniscientAttack):
    r"""Attack by a little: malicious clients send a step that is off the honest mean by a little at every coordinate.

    .. math:: u = \bar u + z \, \sigma(u)

    Args:
        clients: The malicious clients, or their number.
        z: Number of standard deviations. The paper's own is 1.5 for MNIST and 1 for CIFAR-10.
        seed: Seed of the clients that are drawn.

    Example:
        >>> ALIE(clients=2, z=1.0).z
        1.0

    References:
        Baruch, Baruch & Goldberg, "A Little Is Enough: Circumventing Defenses For Distributed Learning", NeurIPS 2019,
        Algorithm 3.

    """

    def __init__(self, clients: Sequence[Client] | int, z: float = 1.5, seed: int = 0) -> None:
        super().__init__(clients, seed)
        self.z = check_number("z", z)

    def fake(self, honest: HonestSteps) -> State:
        """The mean step and ``z`` standard deviations."""
        deviation = honest.std()
        return {name: value + self.z * deviation[name] for name, value in honest.mean().items()}


class Mimic(OmniscientAttack):
    """Attack by clients that send what one honest client sends, which then counts more than others.

    Nothing in such an update is wrong; what the others know is lost, the more so the more clients' data differ. The
    honest client is the one whose name has the smallest key (:func:`~lightning_fed.numerics.seeds.client_key`).

    Args:
        clients: The malicious clients, or their number.
        seed: Seed of the clients that are drawn.

    Example:
        >>> Mimic(clients=2).clients
        2

    References:
        Karimireddy, He & Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via Bucketing", ICLR 2022, section
        3.2.

    """

    def fake(self, honest: HonestSteps) -> State:
        """The honest client's step."""
        return honest.first
