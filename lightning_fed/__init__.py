"""Federated training for PyTorch Lightning: one callback, one Trainer, one epoch per round."""

from lightning_fed.aggregators import Aggregator as Aggregator
from lightning_fed.callbacks import FedBN as FedBN
from lightning_fed.callbacks import FederatedCallback as FederatedCallback
from lightning_fed.callbacks import Federation as Federation
from lightning_fed.callbacks import FedPer as FedPer
from lightning_fed.callbacks import FedRep as FedRep
from lightning_fed.callbacks.blame import ClientFault as ClientFault
from lightning_fed.callbacks.federation import scheduler_steps as scheduler_steps
from lightning_fed.data import FederatedDataModule as FederatedDataModule
from lightning_fed.engines import ClientParallelStrategy as ClientParallelStrategy
from lightning_fed.functional.options import BadUpdate as BadUpdate
from lightning_fed.messages import Broadcast as Broadcast
from lightning_fed.messages import ClientUpdate as ClientUpdate
from lightning_fed.store import ClientStore as ClientStore
from lightning_fed.store import FolderStore as FolderStore
from lightning_fed.store import MemoryStore as MemoryStore
from lightning_fed.trainer import FederatedTrainer as FederatedTrainer

__version__ = "0.1.0.dev0"

__all__ = [
    "Aggregator",
    "BadUpdate",
    "Broadcast",
    "ClientFault",
    "ClientParallelStrategy",
    "ClientStore",
    "ClientUpdate",
    "FedBN",
    "FedPer",
    "FedRep",
    "FederatedCallback",
    "FederatedDataModule",
    "FederatedTrainer",
    "Federation",
    "FolderStore",
    "MemoryStore",
    "scheduler_steps",
]
