"""The rounds: where the server half and the client half meet Lightning."""

from lightning_fed.rounds.batch_norm import batch_norm_layers as batch_norm_layers
from lightning_fed.rounds.batch_norm import client_statistics as client_statistics
from lightning_fed.rounds.batch_norm import layers_in_training as layers_in_training
from lightning_fed.rounds.batch_norm import measure_statistics as measure_statistics
from lightning_fed.rounds.batch_norm import pool_statistics as pool_statistics
from lightning_fed.rounds.client_errors import client_fault as client_fault
from lightning_fed.rounds.client_evaluation import Stage as Stage
from lightning_fed.rounds.client_evaluation import evaluate_clients as evaluate_clients
from lightning_fed.rounds.client_evaluation import evaluate_visit as evaluate_visit
from lightning_fed.rounds.client_evaluation import limited_batches as limited_batches
from lightning_fed.rounds.entry_policies import freeze_parameters as freeze_parameters
from lightning_fed.rounds.federated_callback import FederatedCallback as FederatedCallback
from lightning_fed.rounds.federated_callback import federated_callbacks as federated_callbacks
from lightning_fed.rounds.federated_callback import tell_of_model as tell_of_model
from lightning_fed.rounds.federated_fit import FederatedFit as FederatedFit
from lightning_fed.rounds.isolated_pass import forward_step as forward_step
from lightning_fed.rounds.isolated_pass import isolated_pass as isolated_pass
from lightning_fed.rounds.isolated_pass import one_pass as one_pass
from lightning_fed.rounds.isolated_pass import prepare_batch as prepare_batch
from lightning_fed.rounds.isolated_pass import run_prepared as run_prepared
from lightning_fed.rounds.isolated_pass import run_step as run_step
from lightning_fed.rounds.isolated_pass import until_fault as until_fault
from lightning_fed.rounds.lightning_internals import OverriddenMethod as OverriddenMethod
from lightning_fed.rounds.lightning_internals import add_optimizer_steps as add_optimizer_steps
from lightning_fed.rounds.lightning_internals import callbacks_of as callbacks_of
from lightning_fed.rounds.lightning_internals import datamodule_of as datamodule_of
from lightning_fed.rounds.lightning_internals import gradient_scale as gradient_scale
from lightning_fed.rounds.lightning_internals import is_compiled as is_compiled
from lightning_fed.rounds.lightning_internals import is_fitting as is_fitting
from lightning_fed.rounds.lightning_internals import is_overridden as is_overridden
from lightning_fed.rounds.lightning_internals import is_step_left_out as is_step_left_out
from lightning_fed.rounds.lightning_internals import keep_schedulers as keep_schedulers
from lightning_fed.rounds.lightning_internals import loss_scale as loss_scale
from lightning_fed.rounds.lightning_internals import loss_scaler as loss_scaler
from lightning_fed.rounds.lightning_internals import start_at_epoch as start_at_epoch
from lightning_fed.rounds.options import FixedStatistics as FixedStatistics
from lightning_fed.rounds.options import LocalStatistics as LocalStatistics
from lightning_fed.rounds.remote import RemoteSide as RemoteSide
from lightning_fed.rounds.round import Round as Round
from lightning_fed.rounds.round import VisitModel as VisitModel
from lightning_fed.rounds.synchronisation import process_group_of as process_group_of
from lightning_fed.rounds.trainer_checks import find_loader_owner as find_loader_owner

__all__ = [
    "FederatedCallback",
    "FederatedFit",
    "FixedStatistics",
    "LocalStatistics",
    "OverriddenMethod",
    "RemoteSide",
    "Round",
    "Stage",
    "VisitModel",
    "add_optimizer_steps",
    "batch_norm_layers",
    "callbacks_of",
    "client_fault",
    "client_statistics",
    "datamodule_of",
    "evaluate_clients",
    "evaluate_visit",
    "federated_callbacks",
    "find_loader_owner",
    "forward_step",
    "freeze_parameters",
    "gradient_scale",
    "is_compiled",
    "is_fitting",
    "is_overridden",
    "is_step_left_out",
    "isolated_pass",
    "keep_schedulers",
    "layers_in_training",
    "limited_batches",
    "loss_scale",
    "loss_scaler",
    "measure_statistics",
    "one_pass",
    "pool_statistics",
    "prepare_batch",
    "process_group_of",
    "run_prepared",
    "run_step",
    "start_at_epoch",
    "tell_of_model",
    "until_fault",
]
