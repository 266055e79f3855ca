"""Client side of a federation: the local model, optimizers, and stores for client state between visits."""

from lightning_fed.client.client_store import ClientStore as ClientStore
from lightning_fed.client.client_store import FolderStore as FolderStore
from lightning_fed.client.local_model import OWN_MODEL as OWN_MODEL
from lightning_fed.client.local_model import STATISTICS as STATISTICS
from lightning_fed.client.local_model import LocalModel as LocalModel
from lightning_fed.client.local_model import forget_memory as forget_memory
from lightning_fed.client.local_model import memory_of as memory_of
from lightning_fed.client.local_optimizers import LocalOptimizers as LocalOptimizers
