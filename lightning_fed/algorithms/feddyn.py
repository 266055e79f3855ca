"""FedDyn: a regulariser that changes with the rounds makes the clients' optima agree with the federation's.

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
from lightning_fed.steps.bounds import trained_entries


@register
class FedDyn(ChannelRule):
    r"""The average of the clients' models less what their regularisers have in common.

    .. math:: h \leftarrow h - \frac{\alpha}{N} \sum_{i \in S} (y_i - x), \qquad
        x \leftarrow \frac{1}{|S|} \sum_{i \in S} y_i - \frac{h}{\alpha}

    for the round's clients :math:`S`, of :math:`N`; :math:`h` is 0 at first. Clients add
    :math:`\alpha (y - x) - g_i` to the gradients of the parameters that travel, and keep :math:`g_i`, 0 at first:

    .. math:: g_i \leftarrow g_i - \alpha (y_i - x)

    The logged loss is without the term. A round carries as many bytes
    as with FedAvg; the server and every client keep one vector of the size of the trained parameters.

    Clients weigh the same. Buffers are averaged: running statistics of BatchNorm that are averages belong to the mean
    of the clients and not to :math:`x`; ``batch_norm="recalibrate"``, the default, measures them with :math:`x`.

    - Sends: 1 model down, 1 up.
    - Keeps: 1 model per client, 1 model on the server.
    - Costs: the training alone.
    - For: clients that differ, and that come back often: their regularisers are of their last visits.

    Args:
        alpha: The regulariser's strength :math:`\alpha`; the authors tune it in {0.001, 0.01, 0.1}.

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

    channels: ClassVar = {"feddyn": Channel(memory=True), "h": Channel(server=True)}

    def __init__(self, alpha: float = 0.01) -> None:
        super().__init__()
        self.alpha = check_positive("alpha", alpha)

    def begin_visit(self, visit: ChannelVisit) -> State:
        """The client's :math:`g_i`, plus alpha times the start."""
        corrections, own = {}, visit.memory["feddyn"]
        for name, parameter in visit.parameters.items():
            if parameter.requires_grad:
                corrections[name] = self.alpha * at_least_float32(visit.start[name].to(parameter.device))
                if name in own:
                    corrections[name] += own[name].to(parameter.device)
        return corrections

    def correct(self, parameter: nn.Parameter, correction: Tensor) -> Tensor:
        """The regulariser's gradient."""
        current = as_real(parameter.detach())
        return (self.alpha * at_least_float32(current) - correction).to(current.dtype)

    def end_visit(self, visit: ChannelVisit) -> None:
        """Updates the client's :math:`g_i`."""
        own = visit.memory["feddyn"]
        for name, parameter in visit.parameters.items():
            if parameter.requires_grad:
                current = at_least_float32(as_real(parameter.detach()))
                change = current - at_least_float32(visit.start[name].to(current.device))
                own[name] = own.get(name, torch.zeros_like(change)).to(change.device) - self.alpha * change

    def weight(self, update: ClientUpdate) -> float:
        """1."""
        return 1.0

    def finish(self, state: State, part: Part) -> State:
        """The models' mean, less :math:`h` over alpha."""
        h = dict(self.tensors["h"])
        for name in trained_entries(self._info, state):
            mean = at_least_float32(state[name])
            change = mean - at_least_float32(self._state[name])
            h[name] = h.get(name, torch.zeros_like(change)) - self.alpha * self.share(part) * change
            state[name] = (mean - h[name] / self.alpha).to(state[name].dtype)
        self.tensors = {**self.tensors, "h": h}
        return state
