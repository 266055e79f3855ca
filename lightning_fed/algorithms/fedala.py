"""FedALA: each client mixes the global model and its last model, with learned elementwise weights.

Zhang, Hua, Wang, Song, Xue, Ma & Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning", AAAI
2023, Algorithm 1. https://arxiv.org/abs/2212.01197
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any, NamedTuple

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn

from lightning_fed.algorithms.client_pass import loss_of, pass_over_data, refuse_manual_optimization, refuse_rows
from lightning_fed.argument_checks import check_count, check_number, check_positive
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.client.local_model import OWN_MODEL
from lightning_fed.features.isolated_pass import isolated_pass
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import loss_scale
from lightning_fed.messages import Broadcast, Client, ClientUpdate, with_prefix
from lightning_fed.method import Method, register
from lightning_fed.model.entries import copy_state, parameter_entries, tensors_by_path
from lightning_fed.numerics.precision import as_real
from lightning_fed.rule import Aggregator

_PREFIX = "ala:"
_WINDOW, _SPREAD = 10, 0.1  # losses in the convergence test, and the largest standard deviation
_MOST_EPOCHS = 100


class AdaptiveAggregation(FederatedCallback):
    r"""Starts local training from a learned mixture of the client's last model and the global model.

    .. math:: \hat\theta_i = \theta_i + W_i \odot (\theta - \theta_i)

    Training starts from :math:`\hat\theta_i`, a mixture of the client's last trained model :math:`\theta_i` and the
    global model :math:`\theta`. Each element of the weights :math:`W_i` is in [0, 1], initially 1. Only the last layers
    are mixed; all other layers are copied from the global model.

    Before each local training, one pass over a share of the client's data trains the weights. In the client's second
    round, the pass is repeated until the weights converge (standard deviation below 0.1 over 10 losses), at most 100
    times. The first round starts from the global model. Reference: Zhang et al., AAAI 2023, equations 4 to 6.

    .. math:: W_i \leftarrow \mathrm{clip} \left( W_i - \eta \, \nabla_{\hat\theta_i} F_i \odot (\theta - \theta_i),
        0, 1 \right)

    Here :math:`F_i` is the client's loss. Evaluation uses the client's last model, initially the global model.

    Args:
        num_layers: Number of mixed layers, counted from the end. Only layers with shared trainable parameters count.
        share: Share of the client's batches used to train the weights, in (0, 1].
        eta: Learning rate :math:`\eta` for the weights.

    Raises:
        MisconfigurationException: In ``fit``, if the module uses manual optimization, or has fewer than ``num_layers``
            such layers, or clients receive only some rows of a tensor.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, callbacks=[AdaptiveAggregation()], logger=False)
    """

    supports_vectorize = True
    has_own_models = True

    def __init__(self, num_layers: int = 1, share: float = 0.8, eta: float = 1.0) -> None:
        self.num_layers = check_count("num_layers", num_layers)
        if not 0 < check_number("share", share) <= 1:
            raise ValueError(f"Expected `share` to be in (0, 1], but got {share}.")
        self.share = share
        self.eta = check_positive("eta", eta)

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        refuse_manual_optimization(pl_module, "FedALA")

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        refuse_rows(broadcast, "FedALA")
        federation = find_federation(trainer)
        planned, memory = federation.visit, federation.client_memory
        mixtures = []
        for name, parameter in last_parameters(module, self.num_layers, broadcast.state).items():
            last = memory.get(f"{OWN_MODEL}{name}")
            if last is not None:
                last = last.to(parameter.device)
                weight = memory.get(f"{_PREFIX}{name}", torch.ones_like(last)).to(parameter.device)
                mixtures.append(_Mixture(name, parameter, last, as_real(parameter.detach()) - last, weight.clone()))
        if not any(bool(mixture.difference.any()) for mixture in mixtures):
            return  # the first visit, or equal models
        is_first = not any(f"{_PREFIX}{mixture.name}" in memory for mixture in mixtures)
        per_epoch = federation.population.batches_per_epoch(client, isolated=True) or planned.num_batches
        count = math.ceil(self.share * per_epoch)

        def learn(batches: Iterator[Any]) -> float | None:
            return self._learn(trainer, module, mixtures, islice(batches, count))

        losses: list[float] = []
        while len(losses) < (_MOST_EPOCHS if is_first else 1):
            loss = pass_over_data(federation.population, planned, learn)
            if loss is None:
                return
            losses.append(loss)
            if len(losses) > _WINDOW and torch.tensor(losses[-_WINDOW:]).std(correction=0) < _SPREAD:
                break
        for mixture in mixtures:
            mixture.write()
            memory[f"{_PREFIX}{mixture.name}"] = mixture.weight

    def _learn(
        self, trainer: L.Trainer, module: L.LightningModule, mixtures: list[_Mixture], batches: Iterator[Any]
    ) -> float | None:
        last_loss = None
        with isolated_pass(module, gradients=True):
            for mixture in mixtures:
                mixture.write()
            for number, batch in enumerate(batches):
                loss = loss_of(trainer, module, batch, number)
                if loss is None:
                    continue
                last_loss = float(loss.detach())
                parameters = [mixture.parameter for mixture in mixtures]
                scale = loss_scale(trainer)
                gradients = torch.autograd.grad(loss * scale, parameters, allow_unused=True)
                if any(not bool(gradient.isfinite().all()) for gradient in gradients if gradient is not None):
                    continue
                for mixture, gradient in zip(mixtures, gradients, strict=True):
                    if gradient is not None:
                        mixture.weight.sub_(self.eta / scale * as_real(gradient) * mixture.difference).clamp_(0, 1)
                        mixture.write()
        return last_loss

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        memory = find_federation(trainer).client_memory
        memory.update(with_prefix(copy_state(update.state), OWN_MODEL))


class _Mixture(NamedTuple):
    name: str
    parameter: nn.Parameter
    last: Tensor
    difference: Tensor
    weight: Tensor

    @torch.no_grad()
    def write(self) -> None:
        as_real(self.parameter).copy_(self.last + self.difference * self.weight)


def last_parameters(module: nn.Module, num_layers: int, state: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Returns the trainable parameters in a model's last layers.

    Parameters without a value in ``state`` are ignored.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2))
        >>> list(last_parameters(net, 1, net.state_dict()))
        ['2.weight', '2.bias']
    """
    layers: dict[str, dict[str, nn.Parameter]] = {}
    names = parameter_entries(module)
    for path, parameter in tensors_by_path(module).items():  # entries may not belong to a layer
        if parameter.requires_grad and isinstance(parameter, nn.Parameter) and names.get(parameter) in state:
            layer = f".{path}".rpartition(".")[0].partition(".parametrizations.")[0]
            layers.setdefault(layer, {})[names[parameter]] = parameter
    if len(layers) < num_layers:
        raise MisconfigurationException(
            f"Expected `num_layers` to be at most the number of shared trainable layers ({len(layers)}), but got"
            f" {num_layers}."
        )
    return {name: parameter for layer in list(layers.values())[-num_layers:] for name, parameter in layer.items()}


@register
class FedALA(Method):
    """Starts local training from a mixture of the global model and the client's last trained model.

    Only the last layers are mixed. Each element of these layers' parameters has a mixing weight, learned by the client
    before each local training, see :class:`~lightning_fed.callbacks.AdaptiveAggregation`. The server averages as in
    ``aggregator``. Evaluation uses each client's last trained model. Reference: Zhang et al., AAAI 2023.

    - Sends: 1 model down, 1 up.
    - Keeps: 1 model per client, and a weight for each element in the mixed layers.
    - Costs: 1 pass over a share of a client's data per round, with gradients; up to 100 passes in the client's second
      round.
    - For: clients with different label distributions; requires automatic optimization.

    Args:
        num_layers: Number of mixed layers, counted from the end of the model.
        share: Share of the client's batches used to train the weights, in (0, 1].
        eta: Learning rate for the mixing weights.
        aggregator: Federated method for averaging, by name or as an object.

    Example:
        >>> from lightning_fed import Federation
        >>> [type(callback).__name__ for callback in Federation(FedALA(share=0.5)).method.callbacks]
        ['AdaptiveAggregation']
    """

    def __init__(
        self,
        num_layers: int = 1,
        share: float = 0.8,
        eta: float = 1.0,
        aggregator: str | Method | Aggregator = "fedavg",
    ) -> None:
        super().__init__(aggregator, [AdaptiveAggregation(num_layers, share, eta)])
