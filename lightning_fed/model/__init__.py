"""The model of a federation: its entries, their widths, its features, its BatchNorm layers."""

from lightning_fed.model.batch_norm import batch_norm_layers as batch_norm_layers
from lightning_fed.model.batch_norm import find_bad_statistics as find_bad_statistics
from lightning_fed.model.batch_norm import recalibrate_batch_norm as recalibrate_batch_norm
from lightning_fed.model.batches import TARGET_KEYS as TARGET_KEYS
from lightning_fed.model.batches import BatchKey as BatchKey
from lightning_fed.model.batches import as_classes as as_classes
from lightning_fed.model.batches import find_inputs as find_inputs
from lightning_fed.model.batches import find_target as find_target
from lightning_fed.model.entries import BatchNorm as BatchNorm
from lightning_fed.model.entries import Selector as Selector
from lightning_fed.model.entries import batch_norm_statistics as batch_norm_statistics
from lightning_fed.model.entries import copy_state as copy_state
from lightning_fed.model.entries import entry_policies as entry_policies
from lightning_fed.model.entries import find_non_finite as find_non_finite
from lightning_fed.model.entries import is_running_statistic as is_running_statistic
from lightning_fed.model.entries import live_entries as live_entries
from lightning_fed.model.entries import load_entries as load_entries
from lightning_fed.model.entries import trainable_entries as trainable_entries
from lightning_fed.model.feature_extraction import evaluating as evaluating
from lightning_fed.model.features import FeatureLayer as FeatureLayer
from lightning_fed.model.features import LogitsLayer as LogitsLayer
from lightning_fed.model.features import count_classes as count_classes
from lightning_fed.model.features import encoder_of as encoder_of
from lightning_fed.model.features import find_classifier as find_classifier
from lightning_fed.model.features import find_feature_layer as find_feature_layer
from lightning_fed.model.features import has_channels_last as has_channels_last
from lightning_fed.model.features import named_layers as named_layers
from lightning_fed.model.features import require_classifier as require_classifier
from lightning_fed.model.features import tap_features as tap_features
from lightning_fed.model.features import without_compiled_code as without_compiled_code
from lightning_fed.model.initial_state import shuffled_state as shuffled_state
from lightning_fed.model.label_maps import VoidLabel as VoidLabel
from lightning_fed.model.label_maps import class_indices as class_indices
from lightning_fed.model.label_maps import resize_labels as resize_labels
from lightning_fed.model.label_maps import void_label as void_label
from lightning_fed.model.resize import match_widths as match_widths
from lightning_fed.model.resize import named_tensors as named_tensors
from lightning_fed.model.resize import resize_module as resize_module
from lightning_fed.model.resize import update_layer_sizes as update_layer_sizes

__all__ = [
    "TARGET_KEYS",
    "BatchKey",
    "BatchNorm",
    "FeatureLayer",
    "LogitsLayer",
    "Selector",
    "VoidLabel",
    "as_classes",
    "batch_norm_layers",
    "batch_norm_statistics",
    "class_indices",
    "copy_state",
    "count_classes",
    "encoder_of",
    "entry_policies",
    "evaluating",
    "find_bad_statistics",
    "find_classifier",
    "find_feature_layer",
    "find_inputs",
    "find_non_finite",
    "find_target",
    "has_channels_last",
    "is_running_statistic",
    "live_entries",
    "load_entries",
    "match_widths",
    "named_layers",
    "named_tensors",
    "recalibrate_batch_norm",
    "require_classifier",
    "resize_labels",
    "resize_module",
    "shuffled_state",
    "tap_features",
    "trainable_entries",
    "update_layer_sizes",
    "void_label",
    "without_compiled_code",
]
