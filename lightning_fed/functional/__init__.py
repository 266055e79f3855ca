"""The papers' equations on tensors; nothing here knows Lightning or the rest of the package."""

from lightning_fed.functional.alignment import align_networks as align_networks
from lightning_fed.functional.alignment import align_neurons as align_neurons
from lightning_fed.functional.attention import SoftmaxMean as SoftmaxMean
from lightning_fed.functional.average import WeightedMean as WeightedMean
from lightning_fed.functional.class_mean import class_mean as class_mean
from lightning_fed.functional.clustering import k_means as k_means
from lightning_fed.functional.discrepancy import (
    classwise_maximum_mean_discrepancy as classwise_maximum_mean_discrepancy,
)
from lightning_fed.functional.discrepancy import maximum_mean_discrepancy as maximum_mean_discrepancy
from lightning_fed.functional.discrepancy import median_distance as median_distance
from lightning_fed.functional.entropy import feature_entropy as feature_entropy
from lightning_fed.functional.entropy import shannon_entropy as shannon_entropy
from lightning_fed.functional.entropy import softmax_entropy as softmax_entropy
from lightning_fed.functional.fusion import fuse_conv as fuse_conv
from lightning_fed.functional.fusion import fuse_multi as fuse_multi
from lightning_fed.functional.fusion import fuse_single as fuse_single
from lightning_fed.functional.fusion import smooth_weight as smooth_weight
from lightning_fed.functional.hashing import sample_hashes as sample_hashes
from lightning_fed.functional.margin import aggregate_mean_margin as aggregate_mean_margin
from lightning_fed.functional.margin import aggregate_prototype_margin as aggregate_prototype_margin
from lightning_fed.functional.margin import class_margins as class_margins
from lightning_fed.functional.margin import combine_attention as combine_attention
from lightning_fed.functional.margin import local_prototype_margin as local_prototype_margin
from lightning_fed.functional.margin import margin_attention as margin_attention
from lightning_fed.functional.matched_mean import matched_mean as matched_mean
from lightning_fed.functional.matching import NeuronMatch as NeuronMatch
from lightning_fed.functional.matching import match_neurons as match_neurons
from lightning_fed.functional.packing import find_bad_prototypes as find_bad_prototypes
from lightning_fed.functional.packing import find_odd_prototypes as find_odd_prototypes
from lightning_fed.functional.packing import lpm_name as lpm_name
from lightning_fed.functional.packing import pack_prototypes as pack_prototypes
from lightning_fed.functional.packing import unpack_prototypes as unpack_prototypes
from lightning_fed.functional.permutation import GroupEntry as GroupEntry
from lightning_fed.functional.permutation import PermutationGroup as PermutationGroup
from lightning_fed.functional.permutation import grow_neurons as grow_neurons
from lightning_fed.functional.permutation import neuron_features as neuron_features
from lightning_fed.functional.permutation import permute_neurons as permute_neurons
from lightning_fed.functional.permutation import resize_groups as resize_groups
from lightning_fed.functional.permutation import slice_neurons as slice_neurons
from lightning_fed.functional.projection import PrincipalAxes as PrincipalAxes
from lightning_fed.functional.projection import principal_axes as principal_axes
from lightning_fed.functional.prototypes import Prototypes as Prototypes
from lightning_fed.functional.prototypes import aggregate_prototypes as aggregate_prototypes
from lightning_fed.functional.prototypes import class_prototypes as class_prototypes
from lightning_fed.functional.prototypes import class_sums as class_sums
from lightning_fed.functional.prototypes import reference_prototypes as reference_prototypes
from lightning_fed.functional.prototypes import resize_labels as resize_labels
from lightning_fed.functional.prototypes import update_prototypes as update_prototypes
from lightning_fed.functional.retrieval import mean_average_precision_at_r as mean_average_precision_at_r
from lightning_fed.functional.retrieval import relevant_neighbors as relevant_neighbors
from lightning_fed.functional.rows import RowSums as RowSums
from lightning_fed.functional.sampled_softmax import gradient_noise as gradient_noise
from lightning_fed.functional.sampled_softmax import log_correction as log_correction
from lightning_fed.functional.sampled_softmax import sample_negatives as sample_negatives
from lightning_fed.functional.sampled_softmax import sampled_logits as sampled_logits
from lightning_fed.functional.sampled_softmax import sampled_softmax_loss as sampled_softmax_loss
from lightning_fed.functional.spreadout import spreadout_margin as spreadout_margin
from lightning_fed.functional.spreadout import spreadout_top_k as spreadout_top_k
from lightning_fed.functional.synthetic import synthetic as synthetic

__all__ = [
    "GroupEntry",
    "NeuronMatch",
    "PermutationGroup",
    "PrincipalAxes",
    "Prototypes",
    "RowSums",
    "SoftmaxMean",
    "WeightedMean",
    "aggregate_mean_margin",
    "aggregate_prototype_margin",
    "aggregate_prototypes",
    "align_networks",
    "align_neurons",
    "class_margins",
    "class_mean",
    "class_prototypes",
    "class_sums",
    "classwise_maximum_mean_discrepancy",
    "combine_attention",
    "feature_entropy",
    "find_bad_prototypes",
    "find_odd_prototypes",
    "fuse_conv",
    "fuse_multi",
    "fuse_single",
    "gradient_noise",
    "grow_neurons",
    "k_means",
    "local_prototype_margin",
    "log_correction",
    "lpm_name",
    "margin_attention",
    "match_neurons",
    "matched_mean",
    "maximum_mean_discrepancy",
    "mean_average_precision_at_r",
    "median_distance",
    "neuron_features",
    "pack_prototypes",
    "permute_neurons",
    "principal_axes",
    "reference_prototypes",
    "relevant_neighbors",
    "resize_groups",
    "resize_labels",
    "sample_hashes",
    "sample_negatives",
    "sampled_logits",
    "sampled_softmax_loss",
    "shannon_entropy",
    "slice_neurons",
    "smooth_weight",
    "softmax_entropy",
    "spreadout_margin",
    "spreadout_top_k",
    "synthetic",
    "unpack_prototypes",
    "update_prototypes",
]
