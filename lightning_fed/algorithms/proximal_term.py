"""The proximal term: local training is pulled towards the model that the client got.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, equation 2.
"""

from __future__ import annotations

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.callbacks.federation import find_federation
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import gradient_scale
from lightning_fed.messages import Broadcast, Client, ClientUpdate


class ProximalTerm(FederatedCallback):
    r"""Adds the gradient of a proximal term to every optimizer step.

    .. math:: w \leftarrow w - \eta \left( \nabla F_k(w) + \mu (w - w_t) \right)

    where :math:`w_t` is the broadcast that the client got. The gradient is added once per optimizer step, to the
    parameters that travel, have a gradient and are the optimizer's: after gradient accumulation and the unscaling of
    mixed precision, and before ``gradient_clip_val`` clips. With manual optimization it comes in ``optimizer.step()``,
    after what the module clips itself. Parameters that stay at home or are frozen are not pulled.

    **The loss that the module logs is** :math:`F_k(w)`, **without the term**: the callback sees gradients only, and
    ``train_loss`` stays comparable between methods.

    A sparse gradient (of ``nn.Embedding(sparse=True)``) stays sparse: the term is 0 in rows that have not moved.

    Nothing is copied: the callback holds the tensors of the broadcast while the visit lasts.

    Args:
        mu: Strength :math:`\mu` of the pull; with 0 nothing is changed.

    Raises:
        ValueError: If ``mu`` is negative or not finite.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, callbacks=[ProximalTerm(0.1)], logger=False)

    References:
        Li et al., MLSys 2020, Algorithm 2.

    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, mu: float) -> None:
        if not 0 <= mu < float("inf"):
            raise ValueError(f"Expected `mu` to be finite and at least 0, but got {mu}.")
        self.mu = mu
        self._starts: dict[nn.Parameter, Tensor] = {}

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Notes where the visit starts."""
        self._starts = {
            parameter: broadcast.state[name].to(parameter.device)
            for name, parameter in module.named_parameters()
            if self.mu and name in broadcast.state
        }

    @torch.no_grad()
    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Adds the gradient of the term."""
        if not self._starts or not find_federation(trainer).current_visits:
            return
        mu = self.mu * gradient_scale(trainer, optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and parameter in self._starts:
                    if self._starts[parameter].shape != parameter.shape:  # the first step of several clients at once
                        self._starts[parameter] = parameter.detach().clone()
                    add_to_gradient(parameter.grad, parameter - self._starts[parameter], mu)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Forgets it."""
        self._starts = {}

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Forgets it, where the fit broke off inside a visit."""
        self._starts = {}

    def teardown(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Forgets it, where the fit ended inside a visit."""
        self._starts = {}


def add_to_gradient(gradient: Tensor, term: Tensor, scale: float) -> None:
    """Adds a multiple of a term to a gradient, in place; to a sparse one the rows in which the term is not 0.

    Args:
        gradient: The gradient, dense or sparse.
        term: The term, dense, of its shape.
        scale: Its factor.

    Example:
        >>> gradient = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.0, 0.0]]).to_sparse(1)
        >>> add_to_gradient(gradient, torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), scale=2.0)
        >>> gradient.to_dense().tolist()
        [[0.0, 2.0], [5.0, 5.0], [0.0, 0.0]]

    """
    gradient.add_(term.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else term, alpha=scale)
