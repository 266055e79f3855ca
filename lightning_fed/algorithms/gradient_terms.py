"""Terms that methods add to the gradients of a visit's optimizer steps."""

from __future__ import annotations

from collections.abc import Callable

import lightning as L
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.lightning.internals import gradient_scale
from lightning_fed.numerics.precision import as_real


@torch.no_grad()
def add_to_gradients(
    trainer: L.Trainer, optimizer: Optimizer, term: Callable[[nn.Parameter], Tensor | None], factor: float = 1.0
) -> None:
    """Adds terms to the gradients of an optimizer's parameters, in ``on_before_optimizer_step``.

    Args:
        trainer: The Trainer, in whose scale of the loss the gradients are.
        optimizer: The optimizer.
        term: The term of a parameter that has a gradient; ``None`` where nothing is added.
        factor: Factor of all terms.

    """
    scale = factor * gradient_scale(trainer, optimizer)
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.grad is not None:
                value = term(parameter)
                if value is not None:
                    add_to_gradient(parameter.grad, value, scale)


def add_to_gradient(gradient: Tensor, term: Tensor, scale: float) -> None:
    """Adds a multiple of a term to a gradient, in place; to a sparse one the rows in which the term is not 0.

    Args:
        gradient: The gradient, dense or sparse.
        term: The term, dense, of the gradient's shape; for a complex gradient the real view (``view_as_real``).
        scale: Its factor.

    Example:
        >>> gradient = torch.tensor([[0.0, 0.0], [5.0, 5.0], [0.0, 0.0]]).to_sparse(1)
        >>> add_to_gradient(gradient, torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 0.0]]), scale=2.0)
        >>> gradient.to_dense().tolist()
        [[0.0, 2.0], [5.0, 5.0], [0.0, 0.0]]

    """
    as_real(gradient).add_(term.to_sparse(gradient.sparse_dim()) if gradient.is_sparse else term, alpha=scale)
