"""Names in `lightning_fed.lightning` for features, each imported from the defining file."""

# ruff: noqa: F401

from lightning_fed.lightning.checkpoints import RoundCheckpoint
from lightning_fed.lightning.internals import (
    BATCH_HOOKS,
    TRANSFER_HOOKS,
    OverriddenMethod,
    add_optimizer_steps,
    batch_size_of,
    callbacks_of,
    callbacks_with_log,
    datamodule_of,
    exchange_stage,
    find_callbacks,
    gradient_scale,
    has_gradient_hooks,
    ignored_warning,
    implements,
    is_compiled,
    is_fitting,
    is_overridden,
    is_step_left_out,
    is_validating,
    is_vmap_tensor,
    keep_schedulers,
    lightning_attributes,
    log_position,
    loss_scale,
    loss_scaler,
    show_status,
    start_at_epoch,
    tensor_version,
)
