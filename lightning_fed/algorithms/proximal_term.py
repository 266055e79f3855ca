"""The proximal term: pulls local training towards the broadcast model (FedProx, equation 2)."""

from __future__ import annotations

import lightning as L
from torch import Tensor, nn

from lightning_fed.algorithms.gradient_terms import GradientTerm
from lightning_fed.argument_checks import check_nonnegative
from lightning_fed.messages import Broadcast, Client
from lightning_fed.numerics.precision import as_real


class ProximalTerm(GradientTerm):
    r"""Adds the gradient of a proximal term to every optimizer step.

    .. math:: w \leftarrow w - \eta \left( \nabla F_k(w) + \mu (w - w_t) \right)

    Here :math:`F_k` is client k's loss, :math:`w` the local model, :math:`\eta` the learning rate, and :math:`w_t` the
    global model at the start of the round. Clipping with ``gradient_clip_val`` includes the term. With manual
    optimization, the term is added in ``optimizer.step()``, after any clipping by the module. Personal and frozen
    parameters have no term. Reference: Li et al., MLSys 2020, Algorithm 2.

    The logged training loss does not include the term.

    Args:
        mu: Strength :math:`\mu`, at least 0; 0 disables the term.

    Raises:
        ValueError: If ``mu`` is negative or not finite.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, callbacks=[ProximalTerm(0.1)], logger=False)
    """

    supports_vectorize = True
    keeps_privacy = True

    def __init__(self, mu: float) -> None:
        self.mu = check_nonnegative("mu", mu)
        super().__init__()

    @property
    def factor(self) -> float:
        return self.mu

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        if self.mu:
            self.use_broadcast(module, broadcast)

    def term(self, parameter: nn.Parameter) -> Tensor | None:
        start, current = self.tensors.get(parameter), as_real(parameter.detach())
        if start is None:
            return None
        if start.shape != current.shape:  # the first step of vectorised visits
            start = self.tensors[parameter] = current.clone()
        return current - start
