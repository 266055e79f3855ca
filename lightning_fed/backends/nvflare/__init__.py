"""NVFLARE backend: the server side as a controller, the client side as an executor."""

from lightning_fed.backends.nvflare.controller import FederationController as FederationController
from lightning_fed.backends.nvflare.executor import FederationExecutor as FederationExecutor

__all__ = [
    "FederationController",
    "FederationExecutor",
]
