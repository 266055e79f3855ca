"""FedDANE: corrects local gradients towards the global gradient.

Li, Sahu, Zaheer, Sanjabi, Talwalkar and Smith, "FedDANE: A Federated Newton-Type Method", Asilomar 2019. The files, in
reading order: ``aggregator`` (``FedDANE`` on the server, with the local objective) and ``gradient_correction``
(``GradientCorrection`` on the clients, and the sample of clients for the global gradient).
"""

from lightning_fed.algorithms.feddane.aggregator import FedDANE as FedDANE
from lightning_fed.algorithms.feddane.gradient_correction import GradientCorrection as GradientCorrection

__all__ = [
    "FedDANE",
    "GradientCorrection",
]
