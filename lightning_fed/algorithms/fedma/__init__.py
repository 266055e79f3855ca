"""FedMA and PFNM: match neurons of the client models before averaging.

Wang, Yurochkin, Sun, Papailiopoulos and Khazaeni, "Federated Learning with Matched Averaging", ICLR 2020; Yurochkin et
al., "Bayesian Nonparametric Federated Learning of Neural Networks" (PFNM), ICML 2019.
"""

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
