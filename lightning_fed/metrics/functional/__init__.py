"""Metrics as functions on tensors: feature discrepancy, entropy and retrieval."""

from lightning_fed.metrics.functional.discrepancy import (
    classwise_maximum_mean_discrepancy as classwise_maximum_mean_discrepancy,
)
from lightning_fed.metrics.functional.discrepancy import maximum_mean_discrepancy as maximum_mean_discrepancy
from lightning_fed.metrics.functional.discrepancy import median_distance as median_distance
from lightning_fed.metrics.functional.entropy import feature_entropy as feature_entropy
from lightning_fed.metrics.functional.entropy import shannon_entropy as shannon_entropy
from lightning_fed.metrics.functional.entropy import softmax_entropy as softmax_entropy
from lightning_fed.metrics.functional.retrieval import mean_average_precision_at_r as mean_average_precision_at_r

__all__ = [
    "classwise_maximum_mean_discrepancy",
    "feature_entropy",
    "maximum_mean_discrepancy",
    "mean_average_precision_at_r",
    "median_distance",
    "shannon_entropy",
    "softmax_entropy",
]
