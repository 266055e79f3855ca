"""Numerics: float64 sums, weighted means, distances and chunks for large inputs."""

from lightning_fed.numerics.chunks import CHUNK_ELEMENTS as CHUNK_ELEMENTS
from lightning_fed.numerics.chunks import chunk_steps as chunk_steps
from lightning_fed.numerics.float64_states import Float64Mean as Float64Mean
from lightning_fed.numerics.float64_states import Float64States as Float64States
from lightning_fed.numerics.foreach import norms as norms
from lightning_fed.numerics.precision import as_real as as_real
from lightning_fed.numerics.precision import at_least_float32 as at_least_float32
from lightning_fed.numerics.precision import cast_back as cast_back
from lightning_fed.numerics.precision import float64_device as float64_device
from lightning_fed.numerics.precision import to_float64 as to_float64
from lightning_fed.numerics.row_sums import RowWeighting as RowWeighting
from lightning_fed.numerics.row_sums import is_increasing as is_increasing
from lightning_fed.numerics.seeds import client_key as client_key
from lightning_fed.numerics.seeds import derive_seed as derive_seed
from lightning_fed.numerics.trees import copy_tree as copy_tree
from lightning_fed.numerics.trees import map_leaves as map_leaves
from lightning_fed.numerics.trees import move_beside as move_beside
from lightning_fed.numerics.trees import move_tensors as move_tensors
from lightning_fed.numerics.trees import tree_leaves as tree_leaves
from lightning_fed.numerics.weighted_mean import WeightedMean as WeightedMean
