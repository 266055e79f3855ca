"""Building blocks of models."""

from lightning_fed.modules.extraction import extract_features as extract_features
from lightning_fed.modules.features import FeatureLayer as FeatureLayer
from lightning_fed.modules.features import count_classes as count_classes
from lightning_fed.modules.features import find_classifier as find_classifier
from lightning_fed.modules.features import find_feature_layer as find_feature_layer
from lightning_fed.modules.features import tap_features as tap_features
from lightning_fed.modules.group_norm import to_group_norm as to_group_norm
from lightning_fed.modules.head_conversion import to_sampled_softmax as to_sampled_softmax
from lightning_fed.modules.held_classes import HeldClasses as HeldClasses
from lightning_fed.modules.sampled_softmax import SampledSoftmaxHead as SampledSoftmaxHead
from lightning_fed.modules.sampled_softmax import find_sampled_softmax_head as find_sampled_softmax_head

__all__ = [
    "FeatureLayer",
    "HeldClasses",
    "SampledSoftmaxHead",
    "count_classes",
    "extract_features",
    "find_classifier",
    "find_feature_layer",
    "find_sampled_softmax_head",
    "tap_features",
    "to_group_norm",
    "to_sampled_softmax",
]
