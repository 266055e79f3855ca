"""FedDANE: corrects local gradients towards the global gradient.

Li, Sahu, Zaheer, Sanjabi, Talwalkar & Smith, "FedDANE: A Federated Newton-Type Method", Asilomar 2019. arXiv:2001.01920
"""

from lightning_fed.algorithms.feddane.aggregator import FedDANE as FedDANE
from lightning_fed.algorithms.feddane.gradient_correction import GradientCorrection as GradientCorrection

__all__ = [
    "FedDANE",
    "GradientCorrection",
]
