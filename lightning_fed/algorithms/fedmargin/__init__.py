"""FedMargin: weights clients by the movement of class prototypes in local training.

Michieli, Toldo and Ozay, "Federated Learning via Attentive Margin of Semantic Feature Representations", IEEE Internet
of Things Journal 2022. The text available to us contains no equations. This implementation is a reconstruction from the
description, with options for ambiguous points and fixed tuning constants.
"""

from lightning_fed.algorithms.fedmargin.aggregate_margin import AggregateMeanMargin as AggregateMeanMargin
from lightning_fed.algorithms.fedmargin.aggregator import FedMargin as FedMargin
from lightning_fed.algorithms.fedmargin.aggregator import MarginReport as MarginReport
from lightning_fed.algorithms.fedmargin.attention import combine_attention as combine_attention
from lightning_fed.algorithms.fedmargin.attention import margin_attention as margin_attention
from lightning_fed.algorithms.fedmargin.attention_map import AttentionMap as AttentionMap
from lightning_fed.algorithms.fedmargin.callback import ClassPrototypes as ClassPrototypes
from lightning_fed.algorithms.fedmargin.margins import aggregate_mean_margin as aggregate_mean_margin
from lightning_fed.algorithms.fedmargin.margins import aggregate_prototype_margin as aggregate_prototype_margin
from lightning_fed.algorithms.fedmargin.margins import class_margins as class_margins
from lightning_fed.algorithms.fedmargin.margins import local_prototype_margin as local_prototype_margin
from lightning_fed.algorithms.fedmargin.principal_axes import PrincipalAxes as PrincipalAxes
from lightning_fed.algorithms.fedmargin.principal_axes import principal_axes as principal_axes
from lightning_fed.algorithms.fedmargin.prototype_messages import find_invalid_prototypes as find_invalid_prototypes
from lightning_fed.algorithms.fedmargin.prototype_messages import (
    find_mismatched_prototypes as find_mismatched_prototypes,
)
from lightning_fed.algorithms.fedmargin.prototype_messages import find_outlying_prototypes as find_outlying_prototypes
from lightning_fed.algorithms.fedmargin.prototype_messages import lpm_key as lpm_key
from lightning_fed.algorithms.fedmargin.prototype_messages import pack_prototypes as pack_prototypes
from lightning_fed.algorithms.fedmargin.prototype_messages import unpack_prototypes as unpack_prototypes
from lightning_fed.algorithms.fedmargin.prototype_plots import PrototypePlots as PrototypePlots
from lightning_fed.algorithms.fedmargin.prototypes import Prototypes as Prototypes
from lightning_fed.algorithms.fedmargin.prototypes import aggregate_prototypes as aggregate_prototypes
from lightning_fed.algorithms.fedmargin.prototypes import class_prototypes as class_prototypes
from lightning_fed.algorithms.fedmargin.prototypes import class_sums as class_sums
from lightning_fed.algorithms.fedmargin.prototypes import reference_prototypes as reference_prototypes
from lightning_fed.algorithms.fedmargin.prototypes import update_prototypes as update_prototypes

__all__ = [
    "AggregateMeanMargin",
    "AttentionMap",
    "ClassPrototypes",
    "FedMargin",
    "MarginReport",
    "PrincipalAxes",
    "PrototypePlots",
    "Prototypes",
    "aggregate_mean_margin",
    "aggregate_prototype_margin",
    "aggregate_prototypes",
    "class_margins",
    "class_prototypes",
    "class_sums",
    "combine_attention",
    "find_invalid_prototypes",
    "find_mismatched_prototypes",
    "find_outlying_prototypes",
    "local_prototype_margin",
    "lpm_key",
    "margin_attention",
    "pack_prototypes",
    "principal_axes",
    "reference_prototypes",
    "unpack_prototypes",
    "update_prototypes",
]
