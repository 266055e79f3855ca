"""State of a federated fit: options, entry policies, round log, and checks for Trainer and checkpoint."""

from lightning_fed.fit.entry_policies import freeze_parameters as freeze_parameters
from lightning_fed.fit.federated_fit import FederatedFit as FederatedFit
from lightning_fed.fit.federated_fit import RemoteSide as RemoteSide
from lightning_fed.fit.fit_summary import monitored_names as monitored_names
from lightning_fed.fit.options import FixedStatistics as FixedStatistics
from lightning_fed.fit.options import LocalStatistics as LocalStatistics
from lightning_fed.fit.options import VisitsAtOnce as VisitsAtOnce
from lightning_fed.fit.synchronisation import ClientSharing as ClientSharing
from lightning_fed.fit.synchronisation import RoundSynchronisation as RoundSynchronisation
from lightning_fed.fit.synchronisation import process_group_of as process_group_of
from lightning_fed.fit.trainer_checks import check_processes as check_processes
from lightning_fed.fit.trainer_checks import find_loader_owner as find_loader_owner
