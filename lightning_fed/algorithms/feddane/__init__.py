"""FedDANE: local gradients are corrected towards the gradient of all clients.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "FedDANE: A Federated Newton-Type Method", Asilomar 2019. The files, in
reading order: ``aggregator`` (the server side, ``FedDANE``, with the local objective) and ``gradient_correction`` (the
client side, ``GradientCorrection``, and the sample of clients that gives the gradient of all).
"""

from lightning_fed.algorithms.feddane.aggregator import FedDANE as FedDANE
from lightning_fed.algorithms.feddane.gradient_correction import GradientCorrection as GradientCorrection

__all__ = [
    "FedDANE",
    "GradientCorrection",
]
