"""Names in `lightning_fed.steps`; each loads at the first access. A name without `as` is for features only."""

# ruff: noqa: F401

from lightning_fed.bounds import MaxMedianNorm as MaxMedianNorm
from lightning_fed.bounds import MaxNorm as MaxNorm
from lightning_fed.rule import trained_entries as trained_entries
from lightning_fed.steps.chain import Chain as Chain
from lightning_fed.steps.chain import counted_samples, describe_options
from lightning_fed.steps.update_step import Arrived
from lightning_fed.steps.update_step import CollectingStep as CollectingStep
from lightning_fed.steps.update_step import Held as Held
from lightning_fed.steps.update_step import UpdateStep as UpdateStep
from lightning_fed.steps.weights import MaxSamples as MaxSamples
from lightning_fed.steps.weights import UniformWeights as UniformWeights
from lightning_fed.steps.weights import WeightStep as WeightStep
