"""Names in `lightning_fed.numerics` for features, each imported from the defining file."""

# ruff: noqa: F401

from lightning_fed.numerics.chunks import CHUNK_ELEMENTS, chunk_steps
from lightning_fed.numerics.float64_states import Float64Mean, Float64States
from lightning_fed.numerics.precision import as_real, at_least_float32, cast_back, float64_device, to_float64
from lightning_fed.numerics.row_sums import RowWeighting, is_increasing
from lightning_fed.numerics.seeds import client_key, derive_seed
from lightning_fed.numerics.trees import (
    copy_tree,
    elements,
    like_sequence,
    map_leaves,
    move_beside,
    move_tensors,
    norms,
    tree_leaves,
)
from lightning_fed.numerics.weighted_mean import WeightedMean
