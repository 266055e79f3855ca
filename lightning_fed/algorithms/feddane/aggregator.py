"""FedDANE on the server: federated averaging of clients that train with corrected gradients."""

from __future__ import annotations

from lightning_fed.argument_checks import check_nonnegative
from lightning_fed.messages import ClientUpdate
from lightning_fed.rule import AveragingAggregator


class FedDANE(AveragingAggregator):
    r"""Averages client models trained with corrected gradients.

    Each round selects two groups of clients. Clients in the first group send the gradients of the global model
    :math:`w_t` on all local data. The mean of these gradients is :math:`g_t`. Clients in the second group train, and
    minimise

    .. math:: F_k(w) + \langle g_t - \nabla F_k(w_t), w - w_t \rangle + \frac{\mu}{2} \lVert w - w_t \rVert^2

    with the local loss :math:`F_k`. Two callbacks add the terms: :class:`~lightning_fed.callbacks.GradientCorrection`
    and :class:`~lightning_fed.callbacks.ProximalTerm`. Reference: Li et al., Asilomar 2019, "FedDANE".

    - Sends: 1 model down and 1 up for each client in the first group, 2 models down and 1 up in the second group.
    - Keeps: nothing.
    - Costs: 2 additional passes over a client's data per round, with gradients, if all clients are in both groups.
    - For: comparisons with the paper, and convex problems.

    Args:
        mu: Strength :math:`\mu` for the proximal term, at least 0.

    Raises:
        ValueError: If ``mu`` is negative or not finite.

    Example:
        >>> from lightning_fed.method import build_method
        >>> [type(callback).__name__ for callback in build_method("feddane", mu=0.1).callbacks]
        ['GradientCorrection', 'ProximalTerm']
    """

    def __init__(self, mu: float = 0.0) -> None:
        super().__init__()
        self.mu = check_nonnegative("mu", mu)

    def weight(self, update: ClientUpdate) -> float:
        return float(update.num_samples)
