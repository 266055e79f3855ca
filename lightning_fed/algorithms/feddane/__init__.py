"""FedDANE: local gradients corrected towards the gradient of all clients."""

from lightning_fed.algorithms.feddane.aggregator import FedDANE as FedDANE
from lightning_fed.algorithms.feddane.gradient_correction import GradientCorrection as GradientCorrection

__all__ = [
    "FedDANE",
    "GradientCorrection",
]
