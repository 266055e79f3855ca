"""All federated methods, named as in the papers. The imports in this file register the methods."""

from lightning_fed.algorithms.asynchronous.arrivals import Durations as Durations
from lightning_fed.algorithms.asynchronous.rules import AsynchronousRule as AsynchronousRule
from lightning_fed.algorithms.asynchronous.rules import FedAsync as FedAsync
from lightning_fed.algorithms.asynchronous.rules import FedBuff as FedBuff
from lightning_fed.algorithms.channels import Channel as Channel
from lightning_fed.algorithms.channels import ChannelRule as ChannelRule
from lightning_fed.algorithms.channels import ChannelVisit as ChannelVisit
from lightning_fed.algorithms.ditto import Ditto as Ditto
from lightning_fed.algorithms.fairavg import FairAvg as FairAvg
from lightning_fed.algorithms.fedala import FedALA as FedALA
from lightning_fed.algorithms.fedatt import FedAtt as FedAtt
from lightning_fed.algorithms.fedavg import FedAvg as FedAvg
from lightning_fed.algorithms.fedavgm import FedAvgM as FedAvgM
from lightning_fed.algorithms.fedaws.method import FedAwS as FedAwS
from lightning_fed.algorithms.fedbn import FedBN as FedBN
from lightning_fed.algorithms.feddane.aggregator import FedDANE as FedDANE
from lightning_fed.algorithms.feddyn import FedDyn as FedDyn
from lightning_fed.algorithms.fedfusion.method import FedFusion as FedFusion
from lightning_fed.algorithms.fedma.aggregator import FedMA as FedMA
from lightning_fed.algorithms.fedma.pfnm import PFNM as PFNM
from lightning_fed.algorithms.fedmargin.aggregator import FedMargin as FedMargin
from lightning_fed.algorithms.fedmargin.aggregator import MarginReport as MarginReport
from lightning_fed.algorithms.fednova import FedNova as FedNova
from lightning_fed.algorithms.fedopt import AdaptiveOptimizer as AdaptiveOptimizer
from lightning_fed.algorithms.fedopt import FedAdagrad as FedAdagrad
from lightning_fed.algorithms.fedopt import FedAdam as FedAdam
from lightning_fed.algorithms.fedopt import FedYogi as FedYogi
from lightning_fed.algorithms.fedper import FedPer as FedPer
from lightning_fed.algorithms.fedprox import FedProx as FedProx
from lightning_fed.algorithms.fedrep import FedRep as FedRep
from lightning_fed.algorithms.fedss.method import FedSS as FedSS
from lightning_fed.algorithms.fesem.aggregator import FeSEM as FeSEM
from lightning_fed.algorithms.fixbn import FixBN as FixBN
from lightning_fed.algorithms.moon import MOON as MOON
from lightning_fed.algorithms.qffl import QFFL as QFFL
from lightning_fed.algorithms.robust.aggregator import RobustAggregator as RobustAggregator
from lightning_fed.algorithms.robust.clipping import CenteredClipping as CenteredClipping
from lightning_fed.algorithms.robust.clipping import NormClipping as NormClipping
from lightning_fed.algorithms.robust.coordinatewise import Median as Median
from lightning_fed.algorithms.robust.coordinatewise import TrimmedMean as TrimmedMean
from lightning_fed.algorithms.robust.fltrust import FLTrust as FLTrust
from lightning_fed.algorithms.robust.geometric_median import GeometricMedian as GeometricMedian
from lightning_fed.algorithms.robust.krum import Bulyan as Bulyan
from lightning_fed.algorithms.robust.krum import Krum as Krum
from lightning_fed.algorithms.robust.krum import MultiKrum as MultiKrum
from lightning_fed.algorithms.scaffold import SCAFFOLD as SCAFFOLD
from lightning_fed.algorithms.server_optimizer import ServerOptimizer as ServerOptimizer
from lightning_fed.algorithms.silobn import SiloBN as SiloBN
from lightning_fed.method import METHODS as METHODS
from lightning_fed.method import Method as Method
from lightning_fed.method import build_method as build_method
from lightning_fed.method import method_names as method_names
from lightning_fed.method import register as register
from lightning_fed.rule import AveragingAggregator as AveragingAggregator

__all__ = [
    "METHODS",
    "MOON",
    "PFNM",
    "QFFL",
    "SCAFFOLD",
    "AdaptiveOptimizer",
    "AsynchronousRule",
    "AveragingAggregator",
    "Bulyan",
    "CenteredClipping",
    "Channel",
    "ChannelRule",
    "ChannelVisit",
    "Ditto",
    "Durations",
    "FLTrust",
    "FairAvg",
    "FeSEM",
    "FedALA",
    "FedAdagrad",
    "FedAdam",
    "FedAsync",
    "FedAtt",
    "FedAvg",
    "FedAvgM",
    "FedAwS",
    "FedBN",
    "FedBuff",
    "FedDANE",
    "FedDyn",
    "FedFusion",
    "FedMA",
    "FedMargin",
    "FedNova",
    "FedPer",
    "FedProx",
    "FedRep",
    "FedSS",
    "FedYogi",
    "FixBN",
    "GeometricMedian",
    "Krum",
    "MarginReport",
    "Median",
    "Method",
    "MultiKrum",
    "NormClipping",
    "RobustAggregator",
    "ServerOptimizer",
    "SiloBN",
    "TrimmedMean",
    "build_method",
    "method_names",
    "register",
]
