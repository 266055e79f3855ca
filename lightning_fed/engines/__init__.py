"""Ways to execute a round's visits other than one after another in one process."""

from lightning_fed.engines.client_parallel import ClientParallelStrategy as ClientParallelStrategy

__all__ = ["ClientParallelStrategy"]
