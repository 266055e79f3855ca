"""Flower backend: the server side and the client side as Flower apps."""

from lightning_fed.backends.flower.client import client_app as client_app
from lightning_fed.backends.flower.server import server_app as server_app

__all__ = [
    "client_app",
    "server_app",
]
