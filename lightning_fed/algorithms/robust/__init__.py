"""Equations and update steps for aggregation with protection against malicious clients."""

from lightning_fed.algorithms.robust.equations import adaptive_clipping as adaptive_clipping
from lightning_fed.algorithms.robust.equations import bucketing as bucketing
from lightning_fed.algorithms.robust.equations import bulyan_choice as bulyan_choice
from lightning_fed.algorithms.robust.equations import centered_clipping_weights as centered_clipping_weights
from lightning_fed.algorithms.robust.equations import clipping_weights as clipping_weights
from lightning_fed.algorithms.robust.equations import geometric_median_weights as geometric_median_weights
from lightning_fed.algorithms.robust.equations import krum_order as krum_order
from lightning_fed.algorithms.robust.equations import krum_scores as krum_scores
from lightning_fed.algorithms.robust.equations import mean_around_median as mean_around_median
from lightning_fed.algorithms.robust.equations import nearest_neighbor_mixing as nearest_neighbor_mixing
from lightning_fed.algorithms.robust.equations import squared_distances as squared_distances
from lightning_fed.algorithms.robust.equations import trimmed_mean as trimmed_mean
from lightning_fed.algorithms.robust.equations import trust_weights as trust_weights
from lightning_fed.algorithms.robust.mixtures import AdaptiveClipping as AdaptiveClipping
from lightning_fed.algorithms.robust.mixtures import Bucketing as Bucketing
from lightning_fed.algorithms.robust.mixtures import NearestNeighborMixing as NearestNeighborMixing
from lightning_fed.algorithms.robust.steps import Steps as Steps

__all__ = [
    "AdaptiveClipping",
    "Bucketing",
    "NearestNeighborMixing",
    "Steps",
    "adaptive_clipping",
    "bucketing",
    "bulyan_choice",
    "centered_clipping_weights",
    "clipping_weights",
    "geometric_median_weights",
    "krum_order",
    "krum_scores",
    "mean_around_median",
    "nearest_neighbor_mixing",
    "squared_distances",
    "trimmed_mean",
    "trust_weights",
]
