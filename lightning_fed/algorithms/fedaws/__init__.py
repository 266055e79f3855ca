"""FedAwS: the server spreads out class vectors."""

from lightning_fed.algorithms.fedaws.callback import SpreadOut as SpreadOut
from lightning_fed.algorithms.fedaws.spreadout import spreadout_margin as spreadout_margin
from lightning_fed.algorithms.fedaws.spreadout import spreadout_top_k as spreadout_top_k

__all__ = [
    "SpreadOut",
    "spreadout_margin",
    "spreadout_top_k",
]
