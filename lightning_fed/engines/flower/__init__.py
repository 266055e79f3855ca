"""Federations across machines, on Flower: the server's half and the clients' half as its apps."""

from lightning_fed.engines.flower.client import client_app as client_app
from lightning_fed.engines.flower.server import server_app as server_app

__all__ = ["client_app", "server_app"]
