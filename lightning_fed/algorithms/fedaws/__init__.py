"""FedAwS: the server increases the distances between class vectors (rows of the last layer).

Yu, Rawat, Menon & Kumar, "Federated Learning with Only Positive Labels", ICML 2020. https://arxiv.org/abs/2004.10342
"""

from lightning_fed.algorithms.fedaws.callback import SpreadOut as SpreadOut
from lightning_fed.algorithms.fedaws.spreadout import spreadout_margin as spreadout_margin
from lightning_fed.algorithms.fedaws.spreadout import spreadout_top_k as spreadout_top_k

__all__ = [
    "SpreadOut",
    "spreadout_margin",
    "spreadout_top_k",
]
