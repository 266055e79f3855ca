"""q-FedAvg: clients with a larger loss count for more, so that accuracies become more alike.

Li, Sanjabi, Beirami & Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, Algorithm 2.
https://arxiv.org/abs/1905.10497
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.algorithms.client_pass import loss_of, pass_over_data, refuse_manual_optimization
from lightning_fed.argument_checks import check_nonnegative, check_positive
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.data.population import batch_length
from lightning_fed.errors import BadUpdate
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.isolated_pass import isolated_pass
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.method import register
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.rule import RoundInfo
from lightning_fed.server.averaging import AveragingAggregator
from lightning_fed.steps.bounds import trained_entries

_LOSS, _LIPSCHITZ = "qffl:loss", "qffl:lipschitz"
_SMALLEST = 1e-10  # added to losses, as the authors' program does, so that one of 0 has powers below 0


class LossReport(FederatedCallback):
    r"""q-FedAvg's client side: reports the loss :math:`F_k(x)` of the model that the client was sent, on all its data.

    It is the mean of what ``training_step`` returns over one more pass over the client's data, in evaluation mode and
    beside the training, which draws the same random numbers as without. The update carries it, and :math:`L`: two
    numbers of float64. A client whose data fail in the pass is left out by name.

    Args:
        lipschitz: Constant :math:`L` of the losses' gradients; ``None`` for one over the learning rate at the start of
            a visit, as the authors estimate it.

    Raises:
        ValueError: If ``lipschitz`` is not positive and finite.
        MisconfigurationException: In ``fit``, with manual optimization, where ``training_step`` has no loss; or if
            ``lipschitz`` is not given and optimizers have several learning rates, or one of 0.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, method="qffl:q=1", logger=False)  # adds it by itself

    References:
        Li et al., ICLR 2020, Algorithm 2.

    """

    supports_vectorize = True

    def __init__(self, lipschitz: float | None = None) -> None:
        self.lipschitz = None if lipschitz is None else check_positive("lipschitz", lipschitz)
        self._reports: dict[int, State] = {}  # by position of the visit

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Refuses modules without a loss, or without one learning rate."""
        refuse_manual_optimization(pl_module, "q-FedAvg")
        if self._lipschitz_of(trainer) == float("inf"):
            raise MisconfigurationException(
                "q-FedAvg estimates the Lipschitz constant of the gradients as one over the learning rate with which a"
                " visit begins, but it begins with 0 (a warm-up?): give `lipschitz`."
            )

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Measures the loss."""
        federation = find_federation(trainer)
        planned = federation.visit

        def measure(batches: Iterator[Any]) -> float | None:
            total, count = torch.zeros((), dtype=torch.float64), 0
            with isolated_pass(module):
                for number, batch in enumerate(batches):
                    loss = loss_of(trainer, module, batch, number)
                    if loss is not None:
                        total += batch_length(batch) * to_float64(loss.detach()).cpu()
                        count += batch_length(batch)
            return float(total / count) if count else None

        loss = pass_over_data(federation.population, planned, measure)
        if loss is None:
            planned.fault = planned.fault or "its data gave no batch with a loss"
            return
        numbers = {_LOSS: loss, _LIPSCHITZ: self._lipschitz_of(trainer)}
        self._reports[planned.position] = {
            name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()
        }

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Sends the loss along."""
        planned = find_federation(trainer).visit
        update.extras |= self._reports.pop(planned.position)

    def on_server_round_end(self, trainer: L.Trainer, module: L.LightningModule, is_new: bool) -> None:
        """Forgets reports of visits that came to nothing."""
        self._reports = {}

    def _lipschitz_of(self, trainer: L.Trainer) -> float:
        if self.lipschitz is not None:
            return self.lipschitz
        rates = {float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups}
        if len(rates) != 1:
            raise MisconfigurationException(
                "q-FedAvg estimates the Lipschitz constant of the gradients as one over the learning rate, but the"
                f" optimizers have several ({sorted(rates)}): give `lipschitz`."
            )
        (rate,) = rates
        return 1 / rate if rate else float("inf")


@register(callbacks=lambda rule: [LossReport(rule.lipschitz)])
class QFFL(AveragingAggregator):
    r"""q-FedAvg: the global model moves further towards clients with a larger loss.

    .. math:: \Delta_k = F_k^q \, L (x - y_k), \qquad h_k = q F_k^{q-1} L^2 \lVert x - y_k \rVert^2 + L F_k^q, \qquad
        x \leftarrow x - \frac{\sum_k p_k \Delta_k}{\sum_k p_k h_k}

    with the losses :math:`F_k(x)` of :class:`~lightning_fed.callbacks.LossReport`, which is added to the Trainer. The
    authors draw clients with probabilities :math:`p_k`, their shares of the examples, and average them alike. Here
    clients are drawn alike and :math:`p_k` weighs them, which aims at the same objective,
    :math:`\sum_k p_k F_k^{q+1} / (q + 1)`. With ``q=0`` the weights equal FedAvg's, bit for bit; the larger :math:`q`,
    the more alike the losses, at the cost of their mean. Buffers are averaged by :math:`p_k F_k^q`.

    - Sends: 1 model down, 1 up (and two numbers).
    - Keeps: nothing.
    - Costs: 1 pass over a client's data per visit, without gradients.
    - For: federations that should serve their worst clients better; automatic optimization.

    Args:
        q: How much a large loss counts. The authors have values from 0.001 (text) to 5, tuned per data set.
        lipschitz: Constant :math:`L`; ``None`` for one over the clients' learning rate.

    Raises:
        ValueError: If ``q`` is negative or not finite, or ``lipschitz`` is not positive and finite.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> qffl = QFFL(q=1.0)
        >>> qffl.start(RoundInfo(0), {"w": torch.tensor(1.0)})
        >>> for client, value, loss in (("a", 0.0, 1.0), ("b", 3.0, 4.0)):
        ...     extras = {"qffl:loss": torch.tensor(loss), "qffl:lipschitz": torch.tensor(1.0)}
        ...     qffl.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}, extras))
        >>> qffl.aggregate()  # 1 - (1 * 1 + 4 * -2) / ((1 + 1) + (4 + 4))
        {'w': tensor(1.7000)}

    References:
        Li et al., ICLR 2020, Algorithm 2.

    """

    def __init__(self, q: float = 1.0, lipschitz: float | None = None) -> None:
        super().__init__()
        self.q = check_nonnegative("q", q)
        self.lipschitz = LossReport(lipschitz).lipschitz
        self.scale = 0.0  # sum of p_k h_k / L

    def weight(self, update: ClientUpdate) -> float:
        """The client's number of examples times its loss to the ``q``."""
        loss = float(update.extras[_LOSS]) + _SMALLEST
        return float(update.num_samples * loss**self.q)

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round from ``state``."""
        super().start(info, state)
        self.scale = 0.0

    def receive(self, update: ClientUpdate) -> None:
        """Adds the model to the mean, and its distance to the step's scale.

        Raises:
            BadUpdate: If it has no loss, or a negative one, or no positive :math:`L`.

        """
        if any(name not in update.extras or update.extras[name].numel() != 1 for name in (_LOSS, _LIPSCHITZ)):
            raise BadUpdate("it sent no loss of the global model: its callback is missing")
        loss, lipschitz = float(update.extras[_LOSS]), float(update.extras[_LIPSCHITZ])
        if loss < 0 or lipschitz <= 0:
            raise BadUpdate(f"q-FedAvg needs a loss that is not negative and L > 0, but got {loss} and {lipschitz}")
        distance = sum(
            float((to_float64(update.state[name]) - to_float64(self._state[name])).square().sum())
            for name in trained_entries(self._info, update.state)
        )
        weight = self.weight(update)
        slope = self.q * (loss + _SMALLEST) ** (self.q - 1) if self.q else 0.0
        if not max(weight, slope * lipschitz * distance) < float("inf"):
            raise BadUpdate(f"its loss of {loss} to the power of q={self.q} is not finite")
        super().receive(update)
        self.scale += weight + update.num_samples * slope * lipschitz * distance

    def merge(self, other: QFFL) -> None:
        """Joins what another aggregator has received."""
        super().merge(other)
        self.scale += other.scale

    def aggregate(self) -> State:
        """The global model, moved by the clients' scaled changes."""
        state, share = super().aggregate(), self.running.total / self.scale
        for name in trained_entries(self._info, state):
            old = self._state[name]
            state[name] = cast_back(share * to_float64(state[name]) + (1 - share) * to_float64(old), old)
        return state
