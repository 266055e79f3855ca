"""FedAtt: attentive aggregation."""

from lightning_fed.algorithms.fedatt.aggregator import FedAtt as FedAtt
from lightning_fed.algorithms.fedatt.softmax_mean import SoftmaxMean as SoftmaxMean

__all__ = [
    "FedAtt",
    "SoftmaxMean",
]
