"""FedMA: neurons are matched before they are averaged, layer by layer; and PFNM, all layers in one exchange.

Wang, Yurochkin, Sun, Papailiopoulos and Khazaeni, "Federated Learning with Matched Averaging", ICLR 2020; Yurochkin et
al., "Bayesian Nonparametric Federated Learning of Neural Networks" (PFNM), ICML 2019. The files, in reading order:

- equations: :mod:`lightning_fed.matching` (neurons of any network found, matched and merged), ``class_mean`` (output
  layers);
- server side: ``aggregator`` (``FedMA``, Algorithm 1), ``matching_pass`` (its progress and its messages), ``pfnm``;
- client side: ``callback`` (``LayerwiseTraining``), ``checks`` (options and optimizers that it refuses).
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
