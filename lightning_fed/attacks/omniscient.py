"""Attacks by clients that know the honest clients' steps of the round, and send what they make of them.

No client of a real federation knows so much: these attacks are the worst that a rule may meet. In a simulation the
server knows: a rule is put before the federation's own, which holds the malicious clients' updates back until all
others are there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
import torch

from lightning_fed.argument_checks import check_number
from lightning_fed.attacks.attack import Attack, attacked_entries
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.errors import BadUpdate
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.server.aggregator import Aggregator
from lightning_fed.server.schedule import SecretSampling, client_key


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


class OmniscientAttack(Attack):
    """Base class of attacks that know the honest clients' steps. It needs one process that sees them: the server's.

    While a fit lasts, :class:`AttackedRule` stands before the federation's rule.

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

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Puts the attack before the rule."""
        super().setup(trainer, pl_module, stage)
        self._withdraw(trainer)
        if stage == "fit":
            server = find_federation(trainer).server
            server.aggregator = AttackedRule(server.aggregator, self)

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Tells the rule who the malicious clients are."""
        super().on_server_round_start(trainer, module)
        rule = find_federation(trainer).server.aggregator
        while isinstance(rule, AttackedRule):
            if rule.attack is self:
                rule.malicious = self.malicious(trainer)
            rule = rule.inner

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Takes the attack away."""
        self._withdraw(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Takes the attack away."""
        self._withdraw(trainer)

    def _withdraw(self, trainer: L.Trainer) -> None:
        server = find_federation(trainer).server
        server.aggregator = _without(server.aggregator, self)


class AttackedRule(Aggregator):
    """A rule before which an attack stands: it sees the honest updates, and then what the attack makes of the others.

    Args:
        inner: The rule.
        attack: The attack.

    Attributes:
        malicious: The malicious clients.
        held: Their updates in the round, by client, until all others are there.

    Raises:
        ValueError: If the rule keeps several models, changes their shapes or takes several rounds for one.

    """

    def __init__(self, inner: Aggregator, attack: OmniscientAttack) -> None:
        kind = type(inner)
        rule = inner
        while not isinstance(rule, AttackedRule) and isinstance(getattr(rule, "inner", None), Aggregator):
            rule = rule.inner  # type: ignore[attr-defined] # a server optimizer takes what its rule makes
        if inner.resizes or not (isinstance(rule, AttackedRule) or _makes_one_model(type(rule))):
            raise ValueError(
                f"Expected a rule that makes one model in every round, but {kind.__name__} does not, and"
                f" {type(attack).__name__} does not know what to send to it."
            )
        self.inner, self.attack = inner, attack
        self.always, self.is_private = inner.always, inner.is_private
        self.malicious: frozenset[Client] = frozenset()
        self.held: dict[Client, ClientUpdate] = {}
        self._forget({})

    def __getstate__(self) -> dict[str, Any]:
        """Everything but the attack, which every process has."""
        return {name: value for name, value in vars(self).items() if name != "attack"}

    def required_callbacks(self) -> Sequence[Any]:
        """The callbacks of the rule."""
        return self.inner.required_callbacks()

    def start_round(self, round: int, state: State) -> None:
        """Starts a round of the rule."""
        self._forget(state)
        self.inner.trainable, self.inner.untrained = self.trainable, self.untrained
        self.inner.num_clients = self.num_clients
        self.inner.start_round(round, state)

    def tolerated(self, count: int) -> int:
        """Number of malicious clients that the rule stands."""
        return self.inner.tolerated(count)

    def sampling(self) -> SecretSampling | None:
        """The draw of clients that the rule has."""
        return self.inner.sampling()

    def broadcast(self, client: Client) -> Broadcast:
        """The broadcast of the rule."""
        return self.inner.broadcast(client)

    def respond(self, request: Request) -> Broadcast:
        """The rule's answer to a request."""
        return self.inner.respond(request)

    def expected(self, broadcast: Broadcast) -> State:
        """The form that the rule expects."""
        return self.inner.expected(broadcast)

    @torch.no_grad()
    def receive(self, update: ClientUpdate) -> None:
        """Holds a malicious client's update back, and hands an honest one on."""
        if update.client in self.malicious:
            self.held[update.client] = update
            return
        step = {
            name: to_float64(update.state[name], copy=True).sub_(to_float64(self._state[name]))
            for name in attacked_entries(update.state)
        }
        self.inner.receive(update)
        if update.client not in self.always:
            self.honest.add(update.client, step)

    def merge(self, other: Aggregator) -> None:
        """Joins what another attacked rule has received.

        Raises:
            TypeError: If ``other`` is of another kind.

        """
        if not isinstance(other, AttackedRule):
            raise TypeError(f"Expected `other` to be an AttackedRule, but got {type(other).__name__}.")
        self.held |= other.held
        self.honest.merge(other.honest)
        self.inner.merge(other.inner)

    @torch.no_grad()
    def leave_out(self) -> dict[Client, str]:
        """Has the malicious clients send; returns those whom the rule cannot use."""
        faults: dict[Client, str] = {}
        fake = self.attack.fake(self.honest) if self.honest.count and self.held else {}
        for client, update in self.held.items():
            for name, step in fake.items():
                old = self._state[name]
                update.state[name] = cast_back(to_float64(old) + step.to(old.device), old)
            try:
                self.inner.receive(update)
            except BadUpdate as error:
                faults[client] = str(error)
        self.held = {}
        self.inner.num_refused = self.num_refused + len(faults)
        return faults | self.inner.leave_out()

    def aggregate(self) -> State:
        """The result of the rule."""
        return self.inner.aggregate()

    def metrics(self) -> dict[str, float]:
        """The numbers of the rule."""
        return self.inner.metrics()

    def state_dict(self) -> dict[str, Any]:
        """The state of the rule, as if there were no attack."""
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state of the rule."""
        self.inner.load_state_dict(state)

    def _forget(self, state: State) -> None:
        self._state = state
        self.honest = HonestSteps()
        self.held = {}


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
    honest client is the one whose name has the smallest key (:func:`~lightning_fed.server.schedule.client_key`).

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


def _without(rule: Aggregator, attack: OmniscientAttack) -> Aggregator:
    """The rule without an attack that stands before it."""
    if not isinstance(rule, AttackedRule):
        return rule
    if rule.attack is attack:
        return _without(rule.inner, attack)
    rule.inner = _without(rule.inner, attack)
    return rule


def _makes_one_model(kind: type[Aggregator]) -> bool:
    overridden: Iterable[bool] = (
        getattr(kind, hook) is not getattr(Aggregator, hook) for hook in ("model_of", "plan", "respond", "expected")
    )
    return not any(overridden)
