"""FeSEM: several global models, one per cluster of clients."""

from lightning_fed.algorithms.fesem.aggregator import FeSEM as FeSEM
from lightning_fed.algorithms.fesem.center_evaluation import CenterEvaluation as CenterEvaluation
from lightning_fed.algorithms.fesem.clustering import k_means as k_means

__all__ = [
    "CenterEvaluation",
    "FeSEM",
    "k_means",
]
