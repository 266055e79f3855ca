"""FeSEM: several global models (centres), one for each cluster of clients.

Xie, Long, Shen, Zhou, Wang, Jiang and Zhang, "Multi-Center Federated Learning", 2020. The files, in reading order:
``clustering`` (k-means on the clients' weights), ``aggregator`` (``FeSEM`` on the server) and ``center_evaluation``
(metrics for the centres). Clients train as in FedAvg.
"""

from lightning_fed.algorithms.fesem.aggregator import FeSEM as FeSEM
from lightning_fed.algorithms.fesem.center_evaluation import CenterEvaluation as CenterEvaluation
from lightning_fed.algorithms.fesem.clustering import k_means as k_means

__all__ = [
    "CenterEvaluation",
    "FeSEM",
    "k_means",
]
