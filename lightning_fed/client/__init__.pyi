"""Names in `lightning_fed.client` for features, each imported from the defining file."""

# ruff: noqa: F401

from lightning_fed.client.client_store import ClientStore, FolderStore
from lightning_fed.client.local_model import OWN_MODEL, STATISTICS, LocalModel, forget_memory, memory_of
from lightning_fed.client.local_optimizers import LocalOptimizers
