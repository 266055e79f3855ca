"""Federated averaging with equal weights.

Michieli & Ozay, "Are All Users Treated Fairly in Federated Learning Systems?", CVPR Workshops 2021.
"""

from __future__ import annotations

from lightning_fed.algorithms.fedavg import FedAvg
from lightning_fed.method import Method, register
from lightning_fed.steps.weights import UniformWeights


@register
class FairAvg(Method):
    r"""Averages the clients' models with equal weights (Michieli & Ozay, CVPR-W 2021).

    .. math:: w_{t+1} = \frac{1}{|S|} \sum_{k \in S} w_k

    Here :math:`w_k` is a client's trained model, and :math:`S` contains the round's clients.

    - Sends: 1 model down, 1 up.
    - Keeps: nothing.
    - Costs: no additional computation.
    - For: federations that give all clients equal influence, independent of dataset sizes.

    Example:
        >>> type(FairAvg().steps[0]).__name__
        'UniformWeights'
    """

    def __init__(self) -> None:
        super().__init__(FedAvg(), steps=[UniformWeights()])
