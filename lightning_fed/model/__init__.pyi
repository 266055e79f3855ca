"""Names in `lightning_fed.model` for features, each imported from the defining file."""

# ruff: noqa: F401

from lightning_fed.model.entries import (
    BatchNorm,
    Selector,
    batch_norm_layers,
    batch_norm_statistics,
    check_entries,
    copy_state,
    distance,
    entry_names,
    entry_policies,
    entry_tensors,
    find_implausible,
    find_non_finite,
    freeze_batch_norm,
    is_running_statistic,
    layer_entries,
    layer_prefixes,
    live_entries,
    load_entries,
    norm,
    parameter_entries,
    tensor_slots,
    tensors_by_path,
    tied_names,
    trainable_entries,
    untrained_entries,
)
from lightning_fed.model.resize import layer_numbers, resize_module, set_tensor_data, update_layer_sizes
