"""FeSEM: one global model (centre) for each cluster of clients.

Xie, Long, Shen, Zhou, Wang, Jiang & Zhang, "Multi-Center Federated Learning", 2020. https://arxiv.org/abs/2005.01026
"""

from lightning_fed.algorithms.fesem.aggregator import FeSEM as FeSEM
from lightning_fed.algorithms.fesem.center_evaluation import CenterEvaluation as CenterEvaluation
from lightning_fed.algorithms.fesem.clustering import k_means as k_means

__all__ = [
    "CenterEvaluation",
    "FeSEM",
    "k_means",
]
