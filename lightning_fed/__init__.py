"""Federated training for PyTorch Lightning: one callback, one Trainer, one epoch per round."""

from lightning_fed import aliases as _aliases  # noqa: F401 - before Lightning is imported
from lightning_fed import console as _console  # noqa: F401 - shows the log from now on
from lightning_fed.backends.client_parallel.strategy import ClientParallelStrategy as ClientParallelStrategy
from lightning_fed.backends.vectorized.plan import Vectorized as Vectorized
from lightning_fed.callbacks.federation import Federation as Federation
from lightning_fed.callbacks.federation import scheduler_steps as scheduler_steps
from lightning_fed.client.client_store import ClientStore as ClientStore
from lightning_fed.client.client_store import FolderStore as FolderStore
from lightning_fed.client.client_store import MemoryStore as MemoryStore
from lightning_fed.data.federated import FederatedDataModule as FederatedDataModule
from lightning_fed.errors import BadUpdate as BadUpdate
from lightning_fed.errors import ClientFault as ClientFault
from lightning_fed.federated_callback import FederatedCallback as FederatedCallback
from lightning_fed.fit.options import Faults as Faults
from lightning_fed.fit.options import FixedStatistics as FixedStatistics
from lightning_fed.fit.options import LocalStatistics as LocalStatistics
from lightning_fed.messages import Broadcast as Broadcast
from lightning_fed.messages import ClientUpdate as ClientUpdate
from lightning_fed.method import Method as Method
from lightning_fed.rule import Aggregator as Aggregator
from lightning_fed.server.schedule import Availability as Availability
from lightning_fed.trainer import FederatedTrainer as FederatedTrainer

__version__ = "0.1.0"

__all__ = [
    "Aggregator",
    "Availability",
    "BadUpdate",
    "Broadcast",
    "ClientFault",
    "ClientParallelStrategy",
    "ClientStore",
    "ClientUpdate",
    "Faults",
    "FederatedCallback",
    "FederatedDataModule",
    "FederatedTrainer",
    "Federation",
    "FixedStatistics",
    "FolderStore",
    "LocalStatistics",
    "MemoryStore",
    "Method",
    "Vectorized",
    "scheduler_steps",
]
