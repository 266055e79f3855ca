"""The papers' equations on tensors; nothing here knows Lightning or the rest of the package."""

from lightning_fed.functional.average import WeightedMean as WeightedMean
from lightning_fed.functional.partition import by_group as by_group
from lightning_fed.functional.partition import dirichlet_per_class as dirichlet_per_class
from lightning_fed.functional.partition import dirichlet_per_client as dirichlet_per_client
from lightning_fed.functional.partition import iid as iid
from lightning_fed.functional.partition import labels_per_client as labels_per_client
from lightning_fed.functional.partition import pixel_permutation as pixel_permutation
from lightning_fed.functional.partition import quantity_skew as quantity_skew
from lightning_fed.functional.partition import shards as shards
from lightning_fed.functional.synthetic import synthetic as synthetic

__all__ = [
    "WeightedMean",
    "by_group",
    "dirichlet_per_class",
    "dirichlet_per_client",
    "iid",
    "labels_per_client",
    "pixel_permutation",
    "quantity_skew",
    "shards",
    "synthetic",
]
