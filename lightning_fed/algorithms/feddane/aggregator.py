"""FedDANE's server side: federated averaging of clients whose gradients are corrected towards that of all clients.

Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith, "FedDANE: A Federated Newton-Type Method", Asilomar 2019.
https://arxiv.org/abs/2001.01920
"""

from __future__ import annotations

from lightning_fed.argument_checks import check_nonnegative
from lightning_fed.messages import ClientUpdate
from lightning_fed.server.averaging import AveragingAggregator


class FedDANE(AveragingAggregator):
    r"""The average of the clients' models by their numbers of examples; clients train with corrected gradients.

    Two samples of clients per round. Those of the first send their full gradients at :math:`w_t`, whose mean by numbers
    of examples is :math:`g_t`. Those of the second, the round's cohort, train on

    .. math:: F_k(w) + \langle g_t - \nabla F_k(w_t), w - w_t \rangle + \frac{\mu}{2} \lVert w - w_t \rVert^2

    Both terms are callbacks, which are added to the Trainer if it has none:
    :class:`~lightning_fed.callbacks.GradientCorrection` and :class:`~lightning_fed.callbacks.ProximalTerm`.

    - Sends: 3 models down, 2 up (of them the gradients' sample: 1 down, 1 up).
    - Keeps: nothing.
    - Costs: 2 passes over a client's data per round, with gradients, where all clients are in both samples.
    - For: comparisons; convex problems.

    Args:
        mu: Strength of the proximal term.

    Raises:
        ValueError: If ``mu`` is negative or not finite.

    Example:
        >>> from lightning_fed.method import build_method
        >>> [type(callback).__name__ for callback in build_method("feddane", mu=0.1).callbacks]
        ['GradientCorrection', 'ProximalTerm']

    References:
        Li et al., Asilomar 2019, "FedDANE".

    """

    def __init__(self, mu: float = 0.0) -> None:
        super().__init__()
        self.mu = check_nonnegative("mu", mu)

    def weight(self, update: ClientUpdate) -> float:
        """The client's number of examples."""
        return float(update.num_samples)
