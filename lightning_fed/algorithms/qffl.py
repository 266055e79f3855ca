"""q-FedAvg: larger weights for clients with larger losses, to make accuracies more uniform across clients.

Li, Sanjabi, Beirami & Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020, Algorithm 2. arXiv:1905.10497
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any, ClassVar

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.algorithms.channels import Channel, ChannelRule, ChannelVisit, Part
from lightning_fed.algorithms.client_pass import loss_of, pass_over_data, refuse_manual_optimization
from lightning_fed.argument_checks import check_nonnegative, check_positive
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.data.population import batch_length
from lightning_fed.errors import BadUpdate
from lightning_fed.features.isolated_pass import isolated_pass
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.method import register
from lightning_fed.numerics.precision import cast_back, to_float64
from lightning_fed.rule import trained_entries

_LOSS, _DISTANCE = "qffl:loss", "distance"
_SMALLEST = 1e-10  # added to losses as in the authors' program, because zero has no negative powers


@register
class QFFL(ChannelRule):
    r"""q-FedAvg: the global model moves further towards clients with larger losses.

    .. math:: \Delta_k = F_k^q \, L (x - y_k), \qquad h_k = q F_k^{q-1} L^2 \lVert x - y_k \rVert^2 + L F_k^q, \qquad
        x \leftarrow x - \frac{\sum_k p_k \Delta_k}{\sum_k p_k h_k}

    Here :math:`x` is the global model, :math:`y_k` client k's model after local training, and :math:`p_k` client k's
    share of the examples. :math:`F_k` is the global model's mean ``training_step`` loss on client k's data, measured in
    evaluation mode. The summed updates :math:`\Delta_k` are divided by the summed terms :math:`h_k`. The exponent
    :math:`q` and the constant :math:`L` are arguments. Reference: Li et al., ICLR 2020, Algorithm 2.

    The objective is :math:`\sum_k p_k F_k^{q+1} / (q + 1)`. Clients are sampled uniformly and weighted by :math:`p_k`;
    the authors use :math:`p_k` for sampling instead. With ``q=0`` the weights equal FedAvg's weights bit for bit.
    Buffers are averaged with weights :math:`p_k F_k^q`. The server excludes a client with a loss above 128 times the
    round's median.

    - Sends: 1 model down, 1 up (and a number).
    - Keeps: nothing.
    - Costs: 1 pass over a client's data per round, without gradients.
    - For: better results on the worst clients. Requires automatic optimization.

    Args:
        q: Exponent, at least 0; larger values increase the weight of large losses. The authors use 0.001 to 5.
        lipschitz: Constant :math:`L`, positive; by default 1 divided by the learning rate at the start of the round.

    Raises:
        MisconfigurationException: In ``fit``, if the module uses manual optimization, or if ``lipschitz`` is ``None``
            and learning rates differ or are zero.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> qffl = QFFL(q=1.0, lipschitz=1.0)
        >>> qffl.start(RoundInfo(0), {"w": torch.tensor(1.0)})
        >>> for client, value, loss in (("a", 0.0, 1.0), ("b", 3.0, 4.0)):
        ...     extras = {"qffl:loss": torch.tensor(loss)}
        ...     qffl.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}, extras))
        >>> qffl.aggregate()  # 1 - (1 * 1 + 4 * -2) / ((1 + 1) + (4 + 4))
        {'w': tensor(1.7000)}
    """

    channels: ClassVar = {_LOSS: Channel("number", up=True, bounds="above")}
    keeps_privacy: ClassVar = False

    def __init__(self, q: float = 1.0, lipschitz: float | None = None) -> None:
        super().__init__()
        self.q = check_nonnegative("q", q)
        self.lipschitz = None if lipschitz is None else check_positive("lipschitz", lipschitz)
        self._constant = self.lipschitz or 0.0

    def check_fit(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        refuse_manual_optimization(module, "q-FedAvg")
        self._find_lipschitz(trainer)

    def begin_round(self, trainer: L.Trainer) -> None:
        self._constant = self._find_lipschitz(trainer)

    def begin_visit(self, visit: ChannelVisit) -> State:
        trainer, module = visit.trainer, visit.module

        def measure(batches: Iterator[Any]) -> float | None:
            total, count = torch.zeros((), dtype=torch.float64), 0
            with isolated_pass(module):
                for number, batch in enumerate(batches):
                    loss = loss_of(trainer, module, batch, number)
                    if loss is not None:
                        total += batch_length(batch) * to_float64(loss.detach()).cpu()
                        count += batch_length(batch)
            return float(total / count) if count else None

        loss = pass_over_data(find_federation(trainer).population, visit.planned, measure)
        if loss is not None:
            visit.up[_LOSS] = {"": loss}
        return {}

    def weight(self, update: ClientUpdate) -> float:
        return self._weight(update.num_samples, float(update.extras[_LOSS]))

    def add(self, part: Part, update: ClientUpdate, up: dict[str, dict[str, Any]]) -> None:
        """Adds a client's update to the weighted sums."""
        loss = up[_LOSS][""]
        distance = sum(
            float((to_float64(update.state[name]) - to_float64(self._state[name])).square().sum())
            for name in trained_entries(self._info, update.state)
        )
        try:
            is_finite = self._weight(1, loss) + self._slope(loss) * self._constant * distance < float("inf")
        except OverflowError:
            is_finite = False
        if not is_finite:
            raise BadUpdate(f"the client's loss of {loss} to the power of q={self.q} is not finite")
        super().add(part, update, {**up, _DISTANCE: {"": distance}})

    def finish(self, state: State, part: Part) -> State:
        losses = [report.numbers[_LOSS][""] for report in part.reports.values()]
        # With q < 1 a loss near 0 has a steep slope, and would stop the whole step.
        least = statistics.median_low(losses) / 128 if self.q < 1 else 0.0
        scale = 0.0
        for (count, numbers, _), loss in zip(part.reports.values(), losses, strict=True):
            slope = self._slope(max(loss, least))
            scale += self._weight(count, loss) + count * slope * self._constant * numbers[_DISTANCE][""]
        share = part.running.total / scale
        for name in trained_entries(self._info, state):
            old = self._state[name]
            state[name] = cast_back(share * to_float64(state[name]) + (1 - share) * to_float64(old), old)
        return state

    def _weight(self, num_samples: int, loss: float) -> float:
        return float(num_samples * (loss + _SMALLEST) ** self.q)

    def _slope(self, loss: float) -> float:
        return self.q * (loss + _SMALLEST) ** (self.q - 1) if self.q else 0.0

    def _find_lipschitz(self, trainer: L.Trainer) -> float:
        if self.lipschitz is not None:
            return self.lipschitz
        rates = {float(group["lr"]) for optimizer in trainer.optimizers for group in optimizer.param_groups}
        if len(rates) != 1:
            raise MisconfigurationException(
                "q-FedAvg estimates the gradients' Lipschitz constant as the inverse learning rate, but the optimizers"
                f" have several ({sorted(rates)}): set `lipschitz`."
            )
        (rate,) = rates
        if not rate:
            raise MisconfigurationException(
                "q-FedAvg estimates the gradients' Lipschitz constant as the inverse learning rate at the start of a"
                " round, but the learning rate is 0 (a warm-up?): set `lipschitz`."
            )
        return 1 / rate
