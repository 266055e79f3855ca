"""FedMA: layer-wise matched averaging; PFNM: all layers in one exchange."""

from lightning_fed.algorithms.fedma.aggregator import FedMA as FedMA
from lightning_fed.algorithms.fedma.callback import LayerwiseTraining as LayerwiseTraining
from lightning_fed.algorithms.fedma.class_mean import class_mean as class_mean
from lightning_fed.algorithms.fedma.pfnm import PFNM as PFNM

__all__ = [
    "PFNM",
    "FedMA",
    "LayerwiseTraining",
    "class_mean",
]
