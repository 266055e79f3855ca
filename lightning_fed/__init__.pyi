"""Names in `lightning_fed`, imported at the first access."""

from . import algorithms as algorithms
from . import attacks as attacks
from . import backends as backends
from . import callbacks as callbacks
from . import compare as compare
from . import compression as compression
from . import data as data
from . import datasets as datasets
from . import matching as matching
from . import metrics as metrics
from . import modules as modules
from . import privacy as privacy
from . import steps as steps
from . import study as study
from . import tasks as tasks
from .backends.client_parallel.strategy import ClientParallelStrategy as ClientParallelStrategy
from .backends.vectorized.plan import Vectorized as Vectorized
from .batch_norm.measurement import adapt as adapt
from .callbacks.federation import Federation as Federation
from .callbacks.federation import scheduler_steps as scheduler_steps
from .client.client_store import ClientStore as ClientStore
from .client.client_store import FolderStore as FolderStore
from .client.client_store import MemoryStore as MemoryStore
from .data.federated import FederatedDataModule as FederatedDataModule
from .errors import BadUpdate as BadUpdate
from .errors import ClientFault as ClientFault
from .federated_callback import FederatedCallback as FederatedCallback
from .fit.options import Faults as Faults
from .fit.options import FixedStatistics as FixedStatistics
from .fit.options import LocalStatistics as LocalStatistics
from .messages import Broadcast as Broadcast
from .messages import ClientUpdate as ClientUpdate
from .method import Method as Method
from .rule import Aggregator as Aggregator
from .server.schedule import Availability as Availability
from .trainer import FederatedTrainer as FederatedTrainer

__version__: str
