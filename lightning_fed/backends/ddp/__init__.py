"""Several processes per client: DDP inside a visit, for clients on other machines."""

from lightning_fed.backends.ddp.runner import build_runner as build_runner

__all__ = [
    "build_runner",
]
