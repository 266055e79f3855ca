"""FedDyn: a dynamic regulariser aligns the clients' optima with the global optimum.

Acar, Zhao, Navarro, Mattina, Whatmough & Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR 2021,
Algorithm 1. https://arxiv.org/abs/2111.04263
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor, nn

from lightning_fed.algorithms.channels import Channel, ChannelRule, ChannelVisit, Part
from lightning_fed.argument_checks import check_positive
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.method import register
from lightning_fed.numerics.precision import as_real, at_least_float32
from lightning_fed.rule import trained_entries


@register
class FedDyn(ChannelRule):
    r"""Averages the client models, and subtracts a correction accumulated over all rounds.

    .. math:: h \leftarrow h - \frac{\alpha}{N} \sum_{i \in S} (y_i - x), \qquad
        x \leftarrow \frac{1}{|S|} \sum_{i \in S} y_i - \frac{h}{\alpha}

    Here :math:`x` is the global model, :math:`y_i` a trained client model, :math:`S` the round's clients, and :math:`N`
    the number of all clients. The correction :math:`h` starts at 0. In local training, clients add
    :math:`\alpha (y - x) - g_i` to the gradients, with the current local model :math:`y`. Each client keeps
    :math:`g_i`, initially 0:

    .. math:: g_i \leftarrow g_i - \alpha (y_i - x)

    The logged loss excludes this gradient term. By default, clients measure BatchNorm statistics again with the new
    global model. Reference: Acar et al., ICLR 2021, Algorithm 1.

    - Sends: 1 model down, 1 up.
    - Keeps: 1 model per client, 1 model on the server.
    - Costs: no additional computation.
    - For: clients with different data that participate often, because :math:`g_i` is only updated when the client
      trains.

    Args:
        alpha: Strength :math:`\alpha`, positive; the authors tune :math:`\alpha` in {0.001, 0.01, 0.1}.

    Raises:
        ValueError: If ``alpha`` is not positive and finite.

    Example:
        >>> from lightning_fed.rule import RoundInfo, trained_entries
        >>> feddyn = FedDyn(alpha=0.1)
        >>> feddyn.start(RoundInfo(0, clients="abcd"), {"w": torch.tensor(1.0)})
        >>> for client, value in (("a", 0.0), ("b", 4.0)):
        ...     feddyn.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}))
        >>> feddyn.aggregate()  # h = -0.1 / 4 * (-1 + 3) = -0.05
        {'w': tensor(2.5000)}
    """

    channels: ClassVar = {"feddyn": Channel(memory=True), "h": Channel(server=True)}

    def __init__(self, alpha: float = 0.01) -> None:
        super().__init__()
        self.alpha = check_positive("alpha", alpha)

    def begin_visit(self, visit: ChannelVisit) -> State:
        r"""Returns :math:`\alpha x + g_i`, the constant terms to subtract from the gradients, by parameter name.

        Here :math:`\alpha` is ``alpha``, :math:`x` the received model, and :math:`g_i` a sum stored on the client.
        """
        corrections, gradients = {}, visit.memory["feddyn"]
        for name, parameter in visit.parameters.items():
            if parameter.requires_grad:
                corrections[name] = self.alpha * at_least_float32(visit.start[name].to(parameter.device))
                if name in gradients:
                    corrections[name] += gradients[name].to(parameter.device)
        return corrections

    def correct(self, parameter: nn.Parameter, correction: Tensor) -> Tensor:
        current = as_real(parameter.detach())
        return (self.alpha * at_least_float32(current) - correction).to(current.dtype)

    def end_visit(self, visit: ChannelVisit) -> None:
        gradients = visit.memory["feddyn"]
        for name, parameter in visit.parameters.items():
            if parameter.requires_grad:
                current = at_least_float32(as_real(parameter.detach()))
                change = current - at_least_float32(visit.start[name].to(current.device))
                gradients[name] = gradients.get(name, torch.zeros_like(change)).to(change.device) - self.alpha * change

    def weight(self, update: ClientUpdate) -> float:
        return 1.0

    def finish(self, state: State, part: Part) -> State:
        r"""Updates the correction :math:`h`, and returns the mean client model minus :math:`h / \alpha`."""
        h = dict(self.tensors["h"])
        for name in trained_entries(self._info, state):
            mean = at_least_float32(state[name])
            change = mean - at_least_float32(self._state[name])
            h[name] = h.get(name, torch.zeros_like(change)) - self.alpha * self.share(part) * change
            state[name] = (mean - h[name] / self.alpha).to(state[name].dtype)
        self.tensors = {**self.tensors, "h": h}
        return state
