"""Names in `lightning_fed.fit` for features, each imported from the defining file."""

# ruff: noqa: F401

from lightning_fed.fit.checks import check_processes, find_loader_owner
from lightning_fed.fit.entry_policies import freeze_parameters
from lightning_fed.fit.federated_fit import FederatedFit, RemoteSide, monitored_names
from lightning_fed.fit.options import FixedStatistics, LocalStatistics, VisitsAtOnce
from lightning_fed.fit.round_log import format_bytes, last_checkpoint
