"""Terms added to the gradients in every optimizer step of a client's training."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.callbacks.federation import find_federation
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import gradient_scale
from lightning_fed.messages import Broadcast, Client
from lightning_fed.model.entries import parameter_entries
from lightning_fed.numerics.precision import as_real


class GradientTerm(FederatedCallback):
    """Adds a term to the gradients in every optimizer step of a client's training.

    A subclass implements :meth:`term`. Before a client's training, the subclass fills the dictionary ``tensors`` with
    one tensor per parameter, such as the received global value. After the training, the base class empties ``tensors``.
    """

    def __init__(self) -> None:
        self.tensors: dict[nn.Parameter, Tensor] = {}

    @property
    def factor(self) -> float:
        """Number to multiply with every parameter's term, by default 1."""
        return 1.0

    @abstractmethod
    def term(self, parameter: nn.Parameter) -> Tensor | None:
        """Computes the term to add to a parameter's gradient, or returns ``None`` if the parameter has no term."""

    def use_broadcast(self, module: nn.Module, broadcast: Broadcast) -> None:
        self.tensors = {
            parameter: broadcast.state[name].to(parameter.device)
            for parameter, name in parameter_entries(module).items()
            if name in broadcast.state
        }

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        if self.tensors and find_federation(trainer).current_visits:
            add_to_gradients(trainer, optimizer, self.term, self.factor)

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        self.tensors = {}


@torch.no_grad()
def add_to_gradients(
    trainer: L.Trainer, optimizer: Optimizer, term: Callable[[nn.Parameter], Tensor | None], factor: float = 1.0
) -> None:
    """Adds ``factor * term(parameter)`` to the parameters' gradients, multiplied by the loss scale."""
    scale = factor * gradient_scale(trainer, optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                value = term(parameter)
                if value is not None:
                    add_to_gradient(parameter.grad, value, scale)


def add_to_gradient(gradient: Tensor, term: Tensor, scale: float) -> None:
    """Adds ``scale * term`` to a gradient, in place.

    The term is a dense tensor, also for a sparse gradient. For a complex gradient, the term is real, as in
    ``view_as_real``.

    Example:
        >>> gradient = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.0, 0.0]]).to_sparse(1)
        >>> add_to_gradient(gradient, torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), scale=2.0)
        >>> gradient.to_dense().tolist()
        [[0.0, 2.0], [5.0, 5.0], [0.0, 0.0]]
    """
    as_real(gradient).add_(term.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else term, alpha=scale)
