"""FedDyn: a regulariser that changes with the rounds makes the clients' optima agree with the federation's.

Acar, Zhao, Navarro, Mattina, Whatmough & Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR 2021,
Algorithm 1. https://arxiv.org/abs/2111.04263
"""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.algorithms.gradient_terms import add_to_gradients
from lightning_fed.algorithms.visit_tensors import VisitTensors
from lightning_fed.argument_checks import check_positive
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.method import register
from lightning_fed.model.entries import parameter_entries
from lightning_fed.numerics.precision import as_real, at_least_float32
from lightning_fed.numerics.trees import move_beside
from lightning_fed.rule import RoundInfo
from lightning_fed.server.averaging import AveragingAggregator
from lightning_fed.steps.bounds import trained_entries

_PREFIX = "feddyn:"


class DynamicRegularizer(FederatedCallback):
    r"""FedDyn's client side: adds :math:`\alpha (y - x) - g_i` to the gradients of every optimizer step.

    :math:`x` is the model that the client was sent, :math:`y` the one that it trains, and :math:`g_i`, 0 at first, is
    the client's own and stays in its memory. After the visit

    .. math:: g_i \leftarrow g_i - \alpha (y_i - x)

    It is added where :class:`~lightning_fed.callbacks.ProximalTerm` adds its own, to the parameters that travel: what
    stays at home trains as ever. The logged loss is without it.

    Args:
        alpha: Strength :math:`\alpha` of the regulariser, that of the server's rule.

    Raises:
        ValueError: If ``alpha`` is not positive and finite.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, method="feddyn:alpha=0.1", logger=False)  # adds it by itself

    References:
        Acar et al., ICLR 2021, equation 1.

    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, alpha: float) -> None:
        self.alpha = check_positive("alpha", alpha)
        self._corrections = VisitTensors()  # g_i + alpha x
        self._broadcasts: dict[int, State] = {}  # by position of the visit

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Looks up the client's own gradient."""
        federation = find_federation(trainer)
        planned, memory = federation.visit, federation.client_memory
        corrections: dict[nn.Parameter, Tensor] = {}
        for parameter, name in parameter_entries(module).items():
            if name in broadcast.state and parameter.requires_grad:
                correction = self.alpha * at_least_float32(broadcast.state[name].to(parameter.device))
                if f"{_PREFIX}{name}" in memory:
                    correction += memory[f"{_PREFIX}{name}"].to(parameter.device)
                corrections[parameter] = correction
        self._corrections.put(planned, corrections)
        self._broadcasts[planned.position] = broadcast.state

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Adds the gradient of the regulariser."""
        visits = find_federation(trainer).current_visits

        def term(parameter: nn.Parameter) -> Tensor | None:
            correction = self._corrections.of(parameter, visits)
            if correction is None:
                return None
            current = as_real(parameter.detach())
            return (self.alpha * at_least_float32(current) - correction).to(current.dtype)

        if visits:
            add_to_gradients(trainer, optimizer, term)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Updates the client's own gradient."""
        federation = find_federation(trainer)
        planned, memory = federation.visit, federation.client_memory
        start = self._broadcasts[planned.position]
        for parameter, name in parameter_entries(module).items():
            if name in start and parameter.requires_grad:
                current = at_least_float32(as_real(parameter.detach()))
                change = current - at_least_float32(start[name].to(current.device))
                before = memory.get(f"{_PREFIX}{name}", torch.zeros_like(change)).to(change.device)
                memory[f"{_PREFIX}{name}"] = before - self.alpha * change

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Forgets the visit."""
        planned = find_federation(trainer).visit
        self._corrections.end(planned)
        self._broadcasts.pop(planned.position, None)


@register(callbacks=lambda rule: [DynamicRegularizer(rule.alpha)])
class FedDyn(AveragingAggregator):
    r"""The average of the clients' models less what their regularisers have in common.

    .. math:: h \leftarrow h - \frac{\alpha}{N} \sum_{i \in S} (y_i - x), \qquad
        x \leftarrow \frac{1}{|S|} \sum_{i \in S} y_i - \frac{h}{\alpha}

    for the clients :math:`S` of a round, of :math:`N`; :math:`h` is 0 at first. Clients train with
    :class:`~lightning_fed.callbacks.DynamicRegularizer`, which is added to the Trainer. A round carries as many bytes
    as with FedAvg; the server and every client keep one vector of the size of the trained parameters.

    Clients weigh the same. Buffers are averaged: running statistics of BatchNorm that are averages belong to the mean
    of the clients and not to :math:`x`; ``batch_norm="recalibrate"``, the default, measures them with :math:`x`.

    - Sends: 1 model down, 1 up.
    - Keeps: 1 model per client, 1 model on the server.
    - Costs: the training alone.
    - For: clients that differ, and that come back often: their regularisers are of their last visits.

    Args:
        alpha: Strength :math:`\alpha` of the regulariser; the authors tune it in {0.001, 0.01, 0.1}.

    Raises:
        ValueError: If ``alpha`` is not positive and finite.

    Note:
        State: ``h``, by entry.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> feddyn = FedDyn(alpha=0.1)
        >>> feddyn.start(RoundInfo(0, clients="abcd"), {"w": torch.tensor(1.0)})
        >>> for client, value in (("a", 0.0), ("b", 4.0)):
        ...     feddyn.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> feddyn.aggregate()  # h = -0.1 / 4 * (-1 + 3) = -0.05
        {'w': tensor(2.5000)}

    References:
        Acar et al., ICLR 2021, Algorithm 1.

    """

    def __init__(self, alpha: float = 0.01) -> None:
        super().__init__()
        self.alpha = check_positive("alpha", alpha)
        self._h: State = {}

    def weight(self, update: ClientUpdate) -> float:
        """1."""
        return 1.0

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round from ``state``."""
        super().start(info, state)
        # From round 0 on it is a new run, with the same object perhaps.
        self._h = {} if info.round == 0 else move_beside(self._h, state)

    def aggregate(self) -> State:
        """The mean of the models, less :math:`h` over alpha."""
        state, h = super().aggregate(), dict(self._h)
        share = self.running.count / (len(self._info.clients) or self.running.count)
        for name in trained_entries(self._info, state):
            mean = at_least_float32(state[name])
            change = mean - at_least_float32(self._state[name])
            h[name] = h.get(name, torch.zeros_like(change)) - self.alpha * share * change
            state[name] = (mean - h[name] / self.alpha).to(state[name].dtype)
        self._h = h
        return state

    def state_dict(self) -> dict[str, Any]:
        """The server's :math:`h`."""
        return {"h": dict(self._h)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it."""
        self._h = dict(state.get("h", {}))
