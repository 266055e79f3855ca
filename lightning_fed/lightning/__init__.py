"""Adapters to Lightning's internals, also usable without federated training."""

from lightning_fed.lightning.internals import BATCH_HOOKS as BATCH_HOOKS
from lightning_fed.lightning.internals import TRANSFER_HOOKS as TRANSFER_HOOKS
from lightning_fed.lightning.internals import OverriddenMethod as OverriddenMethod
from lightning_fed.lightning.internals import add_optimizer_steps as add_optimizer_steps
from lightning_fed.lightning.internals import batch_size_of as batch_size_of
from lightning_fed.lightning.internals import callbacks_of as callbacks_of
from lightning_fed.lightning.internals import callbacks_with_log as callbacks_with_log
from lightning_fed.lightning.internals import datamodule_of as datamodule_of
from lightning_fed.lightning.internals import exchange_stage as exchange_stage
from lightning_fed.lightning.internals import find_callbacks as find_callbacks
from lightning_fed.lightning.internals import gradient_scale as gradient_scale
from lightning_fed.lightning.internals import has_gradient_hooks as has_gradient_hooks
from lightning_fed.lightning.internals import ignored_warning as ignored_warning
from lightning_fed.lightning.internals import is_compiled as is_compiled
from lightning_fed.lightning.internals import is_fitting as is_fitting
from lightning_fed.lightning.internals import is_overridden as is_overridden
from lightning_fed.lightning.internals import is_step_left_out as is_step_left_out
from lightning_fed.lightning.internals import is_validating as is_validating
from lightning_fed.lightning.internals import is_vmap_tensor as is_vmap_tensor
from lightning_fed.lightning.internals import keep_schedulers as keep_schedulers
from lightning_fed.lightning.internals import lightning_attributes as lightning_attributes
from lightning_fed.lightning.internals import loss_scale as loss_scale
from lightning_fed.lightning.internals import loss_scaler as loss_scaler
from lightning_fed.lightning.internals import start_at_epoch as start_at_epoch
from lightning_fed.lightning.internals import tensor_version as tensor_version
