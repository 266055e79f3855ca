"""Lightning callbacks: the federation itself, and what looks at it."""

from lightning_fed.callbacks.federated_callback import FederatedCallback as FederatedCallback
from lightning_fed.callbacks.federation import Federation as Federation
from lightning_fed.callbacks.images import SegmentationImages as SegmentationImages
from lightning_fed.callbacks.images import segmentation_grid as segmentation_grid
from lightning_fed.callbacks.presets import FedBN as FedBN
from lightning_fed.callbacks.presets import FedPer as FedPer
from lightning_fed.callbacks.progress import FederatedProgressBar as FederatedProgressBar
from lightning_fed.callbacks.prototypes import ClassPrototypes as ClassPrototypes

__all__ = [
    "ClassPrototypes",
    "FedBN",
    "FedPer",
    "FederatedCallback",
    "FederatedProgressBar",
    "Federation",
    "SegmentationImages",
    "segmentation_grid",
]
