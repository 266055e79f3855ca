"""Clients of a round in several processes: a Lightning strategy that starts them and leaves their gradients alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Literal

import lightning as L
import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import CheckpointIO, Precision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from lightning_fed.argument_checks import check_option
from lightning_fed.backends.client_parallel.distributed_log import DistributedLog
from lightning_fed.backends.client_parallel.synchronisation import ProcessSynchronisation, check_processes
from lightning_fed.client.client_store import ClientStore
from lightning_fed.fit.synchronisation import ClientSharing, RoundSynchronisation
from lightning_fed.lightning.internals import callbacks_of
from lightning_fed.lightning.trainer_progress import RoundProgress
from lightning_fed.model.entries import tensors_by_path
from lightning_fed.process_group import ProcessGroup, TorchProcessGroup
from lightning_fed.server.interface import ServerInterface
from lightning_fed.server.schedule import Schedule


class ClientParallelStrategy(DDPStrategy, ClientSharing):
    """Trains the clients of every round in several processes: each takes its share of the visits.

    It is for a Trainer with a :class:`~lightning_fed.callbacks.Federation`. Every process draws the same round and
    trains some of its clients, as one process would train them; what the aggregators have received is merged once, and
    every process loads the same new global model. Gradients are never synchronised, and the module is not wrapped.
    While visits are under way a process is on its own: ``trainer.world_size`` is 1, and what the module synchronises
    (``sync_dist=True``, ``self.all_gather``, metrics of torchmetrics) stays in the process. Between rounds, for
    validation and tests, all is as with Lightning's ``DDPStrategy``, whose launchers and cluster environments
    (subprocesses, ``torchrun``, SLURM) start the processes: gloo joins them on CPUs, NCCL on GPUs.

    Registered as ``"client_parallel"``.

    Args:
        accelerator: As in ``DDPStrategy``, like all that the Trainer fills in.
        parallel_devices: Likewise.
        cluster_environment: Likewise.
        checkpoint_io: Likewise.
        precision_plugin: Likewise.
        process_group_backend: Backend of ``torch.distributed``; by default that of the device.
        timeout: How long a process waits for the others before it gives up with an error. It must be longer than
            the visits of one process in a round can take: the first to be ready waits for the last.
        balance: What the visits are shared out by: their ``"batches"``, or ``"time"``, the batches times what a batch
            of the client took in its last visit. With the former the shares, and so the order of every sum, depend on
            the data only, and two runs are equal to the last bit. With the latter they are equal to rounding in
            float64; it is for clients whose batches take unlike times, for their sizes or their processes' devices.

    Raises:
        ValueError: If ``balance`` is unknown.
        MisconfigurationException: In ``fit``, if the module has synchronised BatchNorm layers, or differs from process
            to process.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, strategy="client_parallel", devices=1, logger=False)
        >>> trainer.strategy.balance
        'batches'

    """

    strategy_name = "client_parallel"

    def __init__(
        self,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        balance: Literal["batches", "time"] = "batches",
    ) -> None:
        check_option("balance", balance, ("batches", "time"))
        super().__init__(
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.balance = balance
        self._processes = ProcessGroup()

    @property
    def process_group(self) -> ProcessGroup:
        """The processes; this one alone before they are joined."""
        return self._processes

    def callbacks(self) -> Sequence[L.Callback]:
        """The stand-in for ``LightningModule.log``."""
        return [DistributedLog()]

    def synchronise(
        self,
        trainer: L.Trainer,
        server: ServerInterface,
        store: ClientStore,
        schedule: Schedule,
        progress: RoundProgress,
    ) -> RoundSynchronisation:
        """Makes the synchronisation of a fit's rounds."""
        check_processes(trainer, store)
        (log,) = (callback for callback in callbacks_of(trainer) if isinstance(callback, DistributedLog))
        processes = self.process_group
        return ProcessSynchronisation(trainer, server, store, schedule, progress, processes, log, self.balance)

    @property
    def world_size(self) -> int:
        """Number of processes; 1 while each is on its own."""
        return 1 if self._processes.is_independent else super().world_size

    def setup_environment(self) -> None:
        """Joins the processes."""
        super().setup_environment()
        if super().world_size > 1:
            self._processes = TorchProcessGroup(self.root_device)

    def configure_ddp(self) -> None:
        """In the place of wrapping the module: makes it the same in all processes."""
        module = self.lightning_module
        assert module is not None
        if self._layer_sync is not None or any(isinstance(layer, nn.SyncBatchNorm) for layer in module.modules()):
            raise MisconfigurationException(
                "Synchronised BatchNorm would mix the batches of different clients, and wait for processes that have"
                " none left: use `sync_batchnorm=False` and plain BatchNorm layers."
            )
        if self._processes.size > 1:
            self._make_alike(module)

    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: Any = "mean") -> Any:
        """Over the processes; what it is given while each is on its own."""
        return tensor if self._processes.is_independent else super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Of all processes; what it is given, as with one process, while each is on its own."""
        return tensor if self._processes.is_independent else super().all_gather(tensor, group, sync_grads)

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Waits for all processes, unless each is on its own."""
        if not self._processes.is_independent:
            super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """The object of process ``src``; that of this one while each is on its own."""
        return obj if self._processes.is_independent else super().broadcast(obj, src)

    def teardown(self) -> None:
        """Lets go of the module."""
        self._processes.is_independent = False
        super().teardown()

    @classmethod
    def register_strategies(cls, strategy_registry: Any) -> None:
        """Does nothing: only Lightning's own classes are asked, and this one registers itself."""

    @torch.no_grad()
    def _make_alike(self, module: L.LightningModule) -> None:
        """Gives parameters and buffers the values that they have in the first process."""
        values = tensors_by_path(module)
        forms = {name: (value.shape, value.dtype) for name, value in values.items()}
        for rank, rank_forms in enumerate(self._processes.gather(forms)):
            differing = sorted(name for name in forms.keys() | rank_forms if forms.get(name) != rank_forms.get(name))
            if differing:
                raise MisconfigurationException(
                    f"Expected every process to build the same module, but between processes {self._processes.rank} and"
                    f" {rank} these differ: {', '.join(differing[:5])}."
                )
        first_values: dict[str, Tensor] = self._processes.broadcast(
            {name: value.detach() for name, value in values.items()}
        )
        for name, value in values.items():
            value.copy_(first_values[name])
