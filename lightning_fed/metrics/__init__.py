"""Metrics for federated training, based on torchmetrics."""

from lightning_fed.algorithms.fedmargin.aggregate_margin import AggregateMeanMargin as AggregateMeanMargin
from lightning_fed.metrics.discrepancy import MaximumMeanDiscrepancy as MaximumMeanDiscrepancy
from lightning_fed.metrics.entropy import MeanEntropy as MeanEntropy
from lightning_fed.metrics.retrieval import MeanAveragePrecisionAtR as MeanAveragePrecisionAtR
from lightning_fed.metrics.segmentation import SegmentationScores as SegmentationScores

__all__ = [
    "AggregateMeanMargin",
    "MaximumMeanDiscrepancy",
    "MeanAveragePrecisionAtR",
    "MeanEntropy",
    "SegmentationScores",
]
