"""Layers, losses and conversions for models in federated training."""

from lightning_fed.algorithms.fedfusion.extractors import Extractor as Extractor
from lightning_fed.algorithms.fedfusion.extractors import find_extractor as find_extractor
from lightning_fed.algorithms.fedfusion.frozen_extractor import FrozenExtractor as FrozenExtractor
from lightning_fed.algorithms.fedfusion.layers import FusedExtractor as FusedExtractor
from lightning_fed.algorithms.fedfusion.layers import FusionLayer as FusionLayer
from lightning_fed.algorithms.fedfusion.model_surgery import find_fusion as find_fusion
from lightning_fed.algorithms.fedfusion.model_surgery import fuse as fuse
from lightning_fed.algorithms.fedfusion.model_surgery import plain_state as plain_state
from lightning_fed.algorithms.fedfusion.model_surgery import unwrap as unwrap
from lightning_fed.algorithms.fedfusion.operators import ConvFusion as ConvFusion
from lightning_fed.algorithms.fedfusion.operators import FusionOperator as FusionOperator
from lightning_fed.algorithms.fedfusion.operators import MultiFusion as MultiFusion
from lightning_fed.algorithms.fedfusion.operators import NoFusion as NoFusion
from lightning_fed.algorithms.fedfusion.operators import SingleFusion as SingleFusion
from lightning_fed.algorithms.fedfusion.operators import build_operator as build_operator
from lightning_fed.algorithms.fedss.head import SampledSoftmaxHead as SampledSoftmaxHead
from lightning_fed.algorithms.fedss.head import find_sampled_softmax_head as find_sampled_softmax_head
from lightning_fed.algorithms.fedss.head_conversion import to_sampled_softmax as to_sampled_softmax
from lightning_fed.algorithms.fedss.sampled_classes import SampledClasses as SampledClasses
from lightning_fed.batch_norm.pooling import recalibrate_batch_norm as recalibrate_batch_norm
from lightning_fed.batch_norm.unseen_statistics import UnseenStatistics as UnseenStatistics
from lightning_fed.features.extraction import extract_features as extract_features
from lightning_fed.features.layers import FeatureLayer as FeatureLayer
from lightning_fed.features.layers import count_classes as count_classes
from lightning_fed.features.layers import find_classifier as find_classifier
from lightning_fed.features.layers import find_feature_layer as find_feature_layer
from lightning_fed.features.layers import tap_features as tap_features
from lightning_fed.modules.absent_classes import absent_class_loss as absent_class_loss
from lightning_fed.modules.group_norm import to_group_norm as to_group_norm

__all__ = [
    "ConvFusion",
    "Extractor",
    "FeatureLayer",
    "FrozenExtractor",
    "FusedExtractor",
    "FusionLayer",
    "FusionOperator",
    "MultiFusion",
    "NoFusion",
    "SampledClasses",
    "SampledSoftmaxHead",
    "SingleFusion",
    "UnseenStatistics",
    "absent_class_loss",
    "build_operator",
    "count_classes",
    "extract_features",
    "find_classifier",
    "find_extractor",
    "find_feature_layer",
    "find_fusion",
    "find_sampled_softmax_head",
    "fuse",
    "plain_state",
    "recalibrate_batch_norm",
    "tap_features",
    "to_group_norm",
    "to_sampled_softmax",
    "unwrap",
]
