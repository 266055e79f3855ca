"""SCAFFOLD: control variates correct local gradients.

Karimireddy, Kale, Mohri, Reddi, Stich & Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020, Algorithm 1. https://arxiv.org/abs/1910.06378
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import torch
from torch import nn

from lightning_fed.algorithms.channels import Channel, ChannelRule, ChannelVisit, Part
from lightning_fed.argument_checks import check_option
from lightning_fed.messages import ClientUpdate, State
from lightning_fed.method import register
from lightning_fed.numerics.precision import as_real, at_least_float32, cast_back, to_float64


@register
class SCAFFOLD(ChannelRule):
    r"""Averages client models, and corrects gradients in local training by control variates.

    .. math:: y \leftarrow y - \eta (g - c_i + c), \qquad x \leftarrow \frac{1}{|S|} \sum_{i \in S} y_i, \qquad
        c \leftarrow c + \frac{1}{N} \sum_{i \in S} (c_i^+ - c_i)

    Here :math:`x` is the global model, and :math:`y_i` client i's model, trained with gradients :math:`g` and learning
    rate :math:`\eta`. :math:`S` are the round's clients, and :math:`N` is the number of all clients. The control
    variates :math:`c` (server) and :math:`c_i` (client) start at 0. After :math:`K` local steps with gradients
    :math:`g_k`, client i's new control variate

    .. math:: c_i^+ = \frac{1}{K} \sum_k g_k

    is the mean gradient without the correction. For plain SGD this equals the paper's option II. Reference: Karimireddy
    et al., ICML 2020, Algorithm 1.

    Only gradients of shared parameters are corrected. Buffers are averaged. For the paper's global step size use a
    server optimizer, such as ``ServerOptimizer("SGD", "scaffold", lr=0.5)``. The logged loss excludes the correction.

    - Sends: 2 models down, 2 up.
    - Keeps: 1 model per client, 1 model on the server.
    - Costs: no additional computation.
    - For: heterogeneous clients with long local training that participate often.

    Args:
        weighting: Client weights: equal (``"uniform"``, as in the paper) or by number of examples (``"examples"``).
            Control variates always have equal weights.

    Raises:
        ValueError: If ``weighting`` is unknown.

    Example:
        >>> from lightning_fed.rule import RoundInfo
        >>> scaffold = SCAFFOLD()
        >>> scaffold.start(RoundInfo(0, clients="abcd"), {"w": torch.tensor(1.0)})
        >>> for client, value in (("a", 0.0), ("b", 3.0)):
        ...     extras = {"control:w": torch.tensor(value)}
        ...     scaffold.receive(ClientUpdate(client, 1, {"w": torch.tensor(value)}, extras))
        >>> scaffold.aggregate(), scaffold.state_dict()["control"]
        ({'w': tensor(1.5000)}, {'w': tensor(0.7500)})
    """

    channels: ClassVar = {"control": Channel(up=True, down=True, memory=True)}

    def __init__(self, weighting: Literal["uniform", "examples"] = "uniform") -> None:
        super().__init__()
        check_option("weighting", weighting, ("uniform", "examples"))
        self.weighting = weighting

    def begin_visit(self, visit: ChannelVisit) -> State:
        server, client = visit.down["control"], visit.memory["control"]
        zeros = {name: torch.zeros_like(value) for name, value in {**server, **client}.items()}
        return {name: server.get(name, zero) - client.get(name, zero) for name, zero in zeros.items()}

    def follow_step(
        self, record: Any, parameter: nn.Parameter, group: dict[str, Any], state: dict[str, Any], scale: float
    ) -> Any:
        total, count = record or (at_least_float32(torch.zeros_like(as_real(parameter))), 0)
        assert parameter.grad is not None
        return total.add_(as_real(parameter.grad), alpha=1 / scale), count + 1

    def end_visit(self, visit: ChannelVisit) -> None:
        own = visit.memory["control"]
        for name, (total, count) in visit.records.items():
            mean = total / count if visit.row is None else total[visit.row] / visit.steps
            visit.up["control"][name] = mean - own.get(name, torch.zeros_like(mean))
            own[name] = mean

    def weight(self, update: ClientUpdate) -> float:
        return 1.0 if self.weighting == "uniform" else float(update.num_samples)

    def finish(self, state: State, part: Part) -> State:
        """Updates the server's control variate :math:`c`. Entries that a client did not train add 0."""
        control = dict(self.tensors["control"])
        for name, change in part.means["control"].mean().items():
            before = control.get(name, at_least_float32(torch.zeros_like(self._state[name])))
            control[name] = cast_back(to_float64(before) + self.share(part) * change, before)
        self.tensors = {"control": control}
        return state
