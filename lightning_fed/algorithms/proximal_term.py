"""The proximal term: local training is pulled towards the model that the client got.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, equation 2.
"""

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
        self.mu = check_nonnegative("mu", mu)
        super().__init__(self.mu)

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Notes where the visit starts."""
        if self.mu:
            self.use_broadcast(module, broadcast)

    def term(self, parameter: nn.Parameter) -> Tensor | None:
        """The parameter's difference to the start of the visit."""
        start, current = self.tensors.get(parameter), as_real(parameter.detach())
        if start is None:
            return None
        if start.shape != current.shape:  # the first step of several clients at once
            start = self.tensors[parameter] = current.clone()
        return current - start
