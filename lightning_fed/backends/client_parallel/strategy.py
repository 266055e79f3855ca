"""Lightning strategy for parallel clients: starts the processes and never synchronises gradients."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from lightning_fed.argument_checks import check_option
from lightning_fed.backends.client_parallel.distributed_log import DistributedLog
from lightning_fed.backends.client_parallel.synchronisation import ProcessSynchronisation, check_processes
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import find_callbacks
from lightning_fed.model.entries import tensors_by_path
from lightning_fed.process_group import ClientSharing, ProcessGroup, RoundSynchronisation, TorchProcessGroup


class ClientParallelStrategy(DDPStrategy, ClientSharing):
    """Trains each round's clients in several processes.

    Every process trains some of the round's clients, with the same results as a single process. The processes exchange
    data once per round.

    During local training, ``trainer.world_size`` is 1: ``sync_dist=True``, ``self.all_gather`` and torchmetrics only
    use values from one process. Between rounds, in validation and in tests, the strategy behaves like ``DDPStrategy``.

    Args:
        balance: Quantity to balance between processes, ``"batches"`` (number of batches) or ``"time"`` (measured
            training time). Only with ``"batches"``, two runs agree bit for bit.
        process_group_backend: Backend for ``torch.distributed``; by default chosen for the device.
        timeout: Maximum time to wait for other processes. Must exceed a process's training time in a round.
        **options: Other arguments of ``DDPStrategy``; the Trainer sets the devices and plugins.

    Raises:
        ValueError: If ``balance`` is unknown.
        MisconfigurationException: In ``fit``, if the module has synchronised BatchNorm or differs between processes.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, strategy="client_parallel", devices=1, logger=False)
        >>> trainer.strategy.balance
        'batches'
    """

    strategy_name = "client_parallel"

    def __init__(
        self,
        balance: Literal["batches", "time"] = "batches",
        *,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        **options: Any,
    ) -> None:
        check_option("balance", balance, ("batches", "time"))
        super().__init__(process_group_backend=process_group_backend, timeout=timeout, **options)
        self.balance = balance
        self._processes = ProcessGroup()

    @property
    def process_group(self) -> ProcessGroup:
        return self._processes

    def callbacks(self) -> Sequence[L.Callback]:
        return [DistributedLog()]

    def synchronise(self, fit: FederatedFit) -> RoundSynchronisation:
        check_processes(fit.trainer, fit.store)
        (log,) = find_callbacks(fit.trainer, DistributedLog)
        return ProcessSynchronisation(fit, self.process_group, log, self.balance)

    @property
    def world_size(self) -> int:
        """Number of processes in the fit; 1 while clients train, so that modules do not synchronise values."""
        return 1 if self._processes.is_independent else super().world_size

    def setup_environment(self) -> None:
        super().setup_environment()
        if super().world_size > 1:
            self._processes = TorchProcessGroup(self.root_device)

    def configure_ddp(self) -> None:
        """Copies the module of the first process to all processes, instead of wrapping the module."""
        module = self.lightning_module
        assert module is not None
        if self._layer_sync is not None or any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
            raise MisconfigurationException(
                "Expected plain BatchNorm layers, because synchronised BatchNorm would mix the batches of different"
                " clients: use `sync_batchnorm=False`."
            )
        if self._processes.size > 1:
            self._broadcast_module(module)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        return tensor if self._processes.is_independent else super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        return tensor if self._processes.is_independent else super().all_gather(tensor, group, sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        if not self._processes.is_independent:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._processes.is_independent else super().broadcast(obj, src)

    def teardown(self) -> None:
        self._processes.is_independent = False
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None: ...

    @torch.no_grad()
    def _broadcast_module(self, module: L.LightningModule) -> None:
        values = tensors_by_path(module)
        forms = {name: (value.shape, value.dtype) for name, value in values.items()}
        for rank, rank_forms in enumerate(self._processes.gather(forms)):
            differing = sorted(name for name in forms.keys() | rank_forms if forms.get(name) != rank_forms.get(name))
            if differing:
                raise MisconfigurationException(
                    f"Expected every process to build the same module, but processes {self._processes.rank} and "
                    f"{rank} differ in: {', '.join(differing[:5])}."
                )
        first_values: dict[str, Tensor] = self._processes.broadcast(
            {name: value.detach() for name, value in values.items()}
        )
        for name, value in values.items():
            value.copy_(first_values[name])
