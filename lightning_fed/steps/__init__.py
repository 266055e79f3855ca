"""Update steps: ordered transforms between local training and aggregation."""

from lightning_fed.rule import trained_entries as trained_entries
from lightning_fed.steps.bounds import MaxMedianNorm as MaxMedianNorm
from lightning_fed.steps.bounds import MaxNorm as MaxNorm
from lightning_fed.steps.bounds import refuse_rows as refuse_rows
from lightning_fed.steps.chain import Chain as Chain
from lightning_fed.steps.chain import counted_samples as counted_samples
from lightning_fed.steps.update_step import Arrived as Arrived
from lightning_fed.steps.update_step import CollectingStep as CollectingStep
from lightning_fed.steps.update_step import Held as Held
from lightning_fed.steps.update_step import UpdateStep as UpdateStep
from lightning_fed.steps.weights import MaxSamples as MaxSamples
from lightning_fed.steps.weights import UniformWeights as UniformWeights
from lightning_fed.steps.weights import WeightStep as WeightStep

__all__ = [
    "Chain",
    "CollectingStep",
    "Held",
    "MaxMedianNorm",
    "MaxNorm",
    "MaxSamples",
    "UniformWeights",
    "UpdateStep",
    "WeightStep",
]
