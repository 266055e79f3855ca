"""Several processes per client: remote clients can train visits with DDP."""

from lightning_fed.backends.ddp.runner import build_runner as build_runner

__all__ = [
    "build_runner",
]
