"""Server-side rules: what becomes of the clients' updates."""

from lightning_fed.aggregators.averaging import AveragingAggregator as AveragingAggregator
from lightning_fed.aggregators.fairavg import FairAvg as FairAvg
from lightning_fed.aggregators.fedatt import FedAtt as FedAtt
from lightning_fed.aggregators.fedavg import FedAvg as FedAvg
from lightning_fed.aggregators.fedavgm import FedAvgM as FedAvgM
from lightning_fed.aggregators.feddane import FedDANE as FedDANE
from lightning_fed.aggregators.fedma import FedMA as FedMA
from lightning_fed.aggregators.fedmargin import FedMargin as FedMargin
from lightning_fed.aggregators.fedmargin import MarginReport as MarginReport
from lightning_fed.aggregators.fedopt import AdaptiveOptimizer as AdaptiveOptimizer
from lightning_fed.aggregators.fedopt import FedAdagrad as FedAdagrad
from lightning_fed.aggregators.fedopt import FedAdam as FedAdam
from lightning_fed.aggregators.fedopt import FedYogi as FedYogi
from lightning_fed.aggregators.fedprox import FedProx as FedProx
from lightning_fed.aggregators.fesem import FeSEM as FeSEM
from lightning_fed.aggregators.pfnm import PFNM as PFNM
from lightning_fed.aggregators.registry import AGGREGATORS as AGGREGATORS
from lightning_fed.aggregators.registry import build_aggregator as build_aggregator
from lightning_fed.aggregators.server_optimizer import ServerOptimizer as ServerOptimizer
from lightning_fed.server import Aggregator as Aggregator

__all__ = [
    "AGGREGATORS",
    "PFNM",
    "AdaptiveOptimizer",
    "Aggregator",
    "AveragingAggregator",
    "FairAvg",
    "FeSEM",
    "FedAdagrad",
    "FedAdam",
    "FedAtt",
    "FedAvg",
    "FedAvgM",
    "FedDANE",
    "FedMA",
    "FedMargin",
    "FedProx",
    "FedYogi",
    "MarginReport",
    "ServerOptimizer",
    "build_aggregator",
]
