"""Names in `lightning_fed.backends.flower`; each loads at the first access."""

from lightning_fed.backends.flower.client import client_app as client_app
from lightning_fed.backends.flower.server import server_app as server_app
