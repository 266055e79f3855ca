"""SCAFFOLD: local gradients are corrected by control variates, the mean gradients of the client and of all clients.

Karimireddy, Kale, Mohri, Reddi, Stich & Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1. https://arxiv.org/abs/1910.06378
"""

from __future__ import annotations

from typing import Any, Literal

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.algorithms.gradient_terms import add_to_gradient
from lightning_fed.algorithms.visit_tensors import VisitTensors, row_of
from lightning_fed.argument_checks import check_option
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.errors import BadUpdate
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import gradient_scale, is_step_left_out
from lightning_fed.messages import Broadcast, Client, ClientUpdate, Request, State, with_prefix, without_prefix
from lightning_fed.method import register
from lightning_fed.model.entries import parameter_entries
from lightning_fed.numerics.precision import as_real, at_least_float32, cast_back, to_float64
from lightning_fed.numerics.trees import move_beside
from lightning_fed.numerics.weighted_mean import WeightedMean
from lightning_fed.rule import RoundInfo
from lightning_fed.server.averaging import AveragingAggregator

_PREFIX = "control:"


class ControlVariates(FederatedCallback):
    r"""SCAFFOLD's client side: adds :math:`c - c_i` to the gradients of every optimizer step.

    :math:`c` comes with the broadcast, :math:`c_i` is the client's own and stays in its memory; both are 0 at first.
    After the visit

    .. math:: c_i^+ = \frac{1}{K} \sum_k g_k

    is the mean of the visit's :math:`K` gradients as they were before the correction, and the update carries
    :math:`c_i^+ - c_i`. With plain SGD of rate :math:`\eta` this is the paper's option II,
    :math:`c_i - c + (x - y_i) / (K \eta)`; unlike that it is a gradient with momentum, with adaptive optimizers, with
    weight decay and with changing rates as well. Steps are counted parameter by parameter, so that a module may have
    several optimizers. Control variates are of float32 at least, also where the model is of 16 bits
    (``precision="bf16-true"``), in which their small changes would be lost.

    The correction is added where :class:`~lightning_fed.callbacks.ProximalTerm` adds its own, to the parameters that
    travel: what stays at home trains as ever. Of a term that another callback adds to the gradients, those that come
    before this callback are part of :math:`g_k`. The logged loss is without the correction.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, method="scaffold", logger=False)  # adds it by itself

    References:
        Karimireddy et al., ICML 2020, Algorithm 1.

    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self) -> None:
        self._corrections = VisitTensors()
        self._shared: dict[nn.Parameter, str] = {}  # the parameters that travel, and their names
        self._sums: dict[nn.Parameter, Tensor] = {}  # of the gradients of the visits that are under way
        self._steps: dict[nn.Parameter, int] = {}

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Looks up the two control variates."""
        federation = find_federation(trainer)
        self._shared = {value: name for value, name in parameter_entries(module).items() if name in broadcast.state}
        self._sums, self._steps = {}, {}
        corrections: dict[nn.Parameter, Tensor] = {}
        for parameter, name in self._shared.items():
            of_server = broadcast.extras.get(f"{_PREFIX}{name}")
            of_client = federation.client_memory.get(f"{_PREFIX}{name}")
            if of_server is not None:
                corrections[parameter] = of_server.to(parameter.device)
            if of_client is not None:
                of_client = of_client.to(parameter.device)
                corrections[parameter] = corrections.get(parameter, torch.zeros_like(of_client)) - of_client
        self._corrections.put(federation.visit, corrections)

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Adds up the gradients, and corrects them."""
        visits = find_federation(trainer).current_visits
        if not visits or is_step_left_out(trainer, optimizer):
            return
        scale = gradient_scale(trainer, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None or parameter not in self._shared:
                    continue
                if parameter not in self._sums:
                    self._sums[parameter] = at_least_float32(torch.zeros_like(as_real(parameter)))
                self._sums[parameter].add_(as_real(parameter.grad), alpha=1 / scale)
                self._steps[parameter] = self._steps.get(parameter, 0) + 1
                correction = self._corrections.of(parameter, visits)
                if correction is not None:
                    add_to_gradient(parameter.grad, correction, scale)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Makes the client's new control variate, and sends what has changed of it."""
        federation = find_federation(trainer)
        planned, memory = federation.visit, federation.client_memory
        row = row_of(planned, federation.current_visits)
        for parameter, total in self._sums.items():
            key = f"{_PREFIX}{self._shared[parameter]}"
            if row is None:
                mean = total / self._steps[parameter]
            else:  # the steps of the group are those of its longest visit
                mean = total[row] / (planned.num_batches // trainer.accumulate_grad_batches)
            update.extras[key] = mean - memory.get(key, torch.zeros_like(mean)).to(mean.device)
            memory[key] = mean

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Forgets the visit."""
        planned = find_federation(trainer).visit
        self._corrections.end(planned)
        if not self._corrections:
            self._shared, self._sums, self._steps = {}, {}, {}


@register(callbacks=lambda rule: [ControlVariates()])
class SCAFFOLD(AveragingAggregator):
    r"""The average of the clients' models; clients train with gradients that control variates correct.

    .. math:: y \leftarrow y - \eta (g - c_i + c), \qquad x \leftarrow \frac{1}{|S|} \sum_{i \in S} y_i, \qquad
        c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i)

    for the clients :math:`S` of a round, of :math:`N`. The correction is
    :class:`~lightning_fed.callbacks.ControlVariates`, which is added to the Trainer. A round carries one vector of the
    size of the trained parameters more in each direction (down from the second round on); a client keeps one, the
    server another.

    The paper's global step size :math:`\eta_g` is a server optimizer:
    ``ServerOptimizer("SGD", "scaffold", lr=0.5)``. Buffers are averaged.

    - Sends: 2 models down, 2 up.
    - Keeps: 1 model per client, 1 model on the server.
    - Costs: the training alone.
    - For: clients that differ, train long, and come back often.

    Args:
        weighting: Clients weigh the same (``"uniform"``, as in the paper), or by their examples (``"examples"``, as in
            NIID-Bench). Control variates always weigh the same.

    Raises:
        ValueError: If ``weighting`` is unknown.

    Note:
        State: ``control``, the server's control variate by entry.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> import torch
        >>> scaffold = SCAFFOLD()
        >>> scaffold.start(RoundInfo(0, clients="abcd"), {"w": torch.tensor(1.0)})
        >>> for client, value in (("a", 0.0), ("b", 3.0)):
        ...     extras = {"control:w": torch.tensor(value)}
        ...     scaffold.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}, extras))
        >>> scaffold.aggregate(), scaffold.state_dict()["control"]
        ({'w': tensor(1.5000)}, {'w': tensor(0.7500)})

    References:
        Karimireddy et al., ICML 2020, Algorithm 1.

    """

    def __init__(self, weighting: Literal["uniform", "examples"] = "uniform") -> None:
        super().__init__()
        check_option("weighting", weighting, ("uniform", "examples"))
        self.weighting = weighting
        self._control: State = {}
        self.changes = WeightedMean()

    def weight(self, update: ClientUpdate) -> float:
        """1, or the client's number of examples."""
        return 1.0 if self.weighting == "uniform" else float(update.num_samples)

    def start(self, info: RoundInfo, state: State) -> None:
        """Starts a round from ``state``."""
        super().start(info, state)
        self.changes = WeightedMean()
        # From round 0 on it is a new run, with the same object perhaps.
        self._control = {} if info.round == 0 else move_beside(self._control, state)

    def broadcast(self, request: Request) -> Broadcast:
        """The global state, and the server's control variate."""
        broadcast = super().broadcast(request)
        broadcast.extras |= with_prefix(self._control, _PREFIX)
        return broadcast

    def receive(self, update: ClientUpdate) -> None:
        """Adds the model to the mean, and the change of the control variate.

        Raises:
            BadUpdate: If there is no change of a control variate, or one that does not fit the model.

        """
        changes = without_prefix(update.extras, _PREFIX)
        if not changes:
            raise BadUpdate("it sent no control variate: no step was made, or its callback is missing")
        for name, value in changes.items():
            entry = self._state.get(name)
            if entry is None or value.shape != entry.shape or value.dtype != at_least_float32(entry).dtype:
                raise BadUpdate(f"its control variate does not fit the entry {name!r}")
        super().receive(update)
        # A client may not have trained every entry: what is not there has not changed.
        self.changes.add({name: to_float64(value) for name, value in changes.items()}, 1.0, update.num_samples)

    def merge(self, other: SCAFFOLD) -> None:
        """Joins what another aggregator has received."""
        super().merge(other)
        self.changes.merge(other.changes)

    def aggregate(self) -> State:
        """The mean of the models; the server's control variate moves."""
        state = super().aggregate()
        share = self.changes.count / (len(self._info.clients) or self.changes.count)
        control = dict(self._control)
        for name, change in self.changes.mean().items():
            before = control.get(name, at_least_float32(torch.zeros_like(self._state[name])))
            control[name] = cast_back(to_float64(before) + share * change, before)
        self._control = control
        return state

    def state_dict(self) -> dict[str, Any]:
        """The server's control variate."""
        return {"control": dict(self._control)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores it."""
        self._control = dict(state.get("control", {}))
