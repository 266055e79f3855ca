"""Lightning callbacks: the federation itself, and what looks at it."""

from lightning_fed.callbacks.federated_callback import FederatedCallback as FederatedCallback
from lightning_fed.callbacks.federation import Federation as Federation

__all__ = ["FederatedCallback", "Federation"]
