"""Client side with several processes, which train one client with Lightning's DDP and send one answer."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import lightning as L
import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy

from lightning_fed.algorithms.proximal_term import ProximalTerm
from lightning_fed.backends.ddp.data_shares import share_population
from lightning_fed.backends.ddp.processes import Processes, as_bytes, current_rank
from lightning_fed.backends.wire.data import HalfData
from lightning_fed.backends.wire.held_file import HeldFile
from lightning_fed.backends.wire.hyperparameters import on_device
from lightning_fed.backends.wire.packets import VISIT, Packet, read_train_request
from lightning_fed.backends.wire.runner import ClientRunner
from lightning_fed.backends.wire.server_for_client import RemoteServer, RemoteServerSide, find_public_reason
from lightning_fed.callbacks.federation import Federation
from lightning_fed.client.client_store import FolderStore
from lightning_fed.errors import ClientFault, VisitTimeout
from lightning_fed.federated_callback import FederatedCallback, TrainerCallback
from lightning_fed.fit.federated_fit import FederatedFit
from lightning_fed.lightning.internals import is_overridden
from lightning_fed.messages import State

_log = logging.getLogger(__name__)

_ON_CLIENT = ("on_client_request", "on_client_receive", "on_client_start", "on_client_batch", "on_client_end")
_DEVICES = ("accelerator", "devices", "strategy", "num_nodes", "plugins")


def build_runner(federation: Federation, model: Any, data: Any, trainer: Any, **options: Any) -> ClientRunner:
    """Builds a client's runner, with several processes if the Trainer's arguments select several devices.

    A machine with one device ignores ``strategy``.
    """
    kind: type[ClientRunner] = ClientRunner
    if isinstance(trainer, Mapping) and trainer.get("devices", 1) != 1:
        if _select_devices(trainer).world_size > 1:
            kind = DistributedRunner
        else:
            trainer = _without_strategy(trainer)
    return kind(federation, model, data, trainer, **options)


def _select_devices(trainer: Mapping[str, Any]) -> L.Trainer:
    """Creates a Trainer to find the devices selected by a client's Trainer arguments.

    Raises:
        MisconfigurationException: If several machines are selected, or several devices with a strategy other than DDP,
            or CPUs with ``sync_batchnorm``.
    """
    probe = L.Trainer(**{name: trainer[name] for name in _DEVICES if name in trainer}, logger=False)
    if probe.num_nodes > 1:
        raise MisconfigurationException(
            f"Expected num_nodes=1, because the processes of a client run on one machine, but got {probe.num_nodes}: "
            "let each machine be a client."
        )
    starts_script = hasattr(probe.strategy.launcher, "cluster_environment")  # unlike "ddp_spawn" and "ddp_notebook"
    if probe.world_size > 1 and not (starts_script and isinstance(probe.strategy, DDPStrategy)):
        raise MisconfigurationException(
            "Expected strategy='ddp' for a client with several devices, but got "
            f"strategy={trainer.get('strategy', 'auto')!r}: set strategy='ddp' or devices=1."
        )
    if trainer.get("sync_batchnorm") and probe.world_size > 1 and probe.strategy.root_device.type == "cpu":
        raise MisconfigurationException(
            "Expected sync_batchnorm=False on CPUs, because torch synchronises BatchNorm only on GPUs: remove "
            "`sync_batchnorm`, or set accelerator='gpu'."
        )
    return probe


class DistributedRunner(ClientRunner):
    """Client side that trains in several processes.

    The processes start with the first training and keep running. Only the main process communicates with the server and
    evaluates models. If a process fails, the client misses the round.

    Raises:
        MisconfigurationException: If a callback needs all data of a client, or if an argument cannot be pickled.
    """

    def __init__(
        self, federation: Federation, model: Any, data: Any, trainer: Mapping[str, Any], **options: Any
    ) -> None:
        probe = _select_devices(trainer)
        gpu = probe.strategy.root_device.index
        devices = 1 if gpu is None else [gpu]  # the first selected GPU, not the machine's first
        super().__init__(federation, model, data, {**_without_strategy(trainer), "devices": devices}, **options)
        for callback in (*federation.method.callbacks, *federation.server.chain.callbacks(), *self._callbacks):
            _check_callback(callback)
        self._processes = Processes(
            probe.world_size, as_bytes((federation, model, data, trainer, options)), answer_visit
        )

    def _fit(self, remote: RemoteServerSide, run: str, round: int, datamodule: HalfData) -> int:
        if self._kind != VISIT:
            return super()._fit(remote, run, round, datamodule)
        steps, update, fault, remote.left = self._processes.run(self._order, self._gate.judge_entries)
        remote.server = cast(RemoteServer, SimpleNamespace(update=update, fault=fault))
        return cast(int, steps)

    def _answer(self, kind: str, packet: Packet, node: Mapping[str, Any]) -> Packet:
        self._kind, self._order = kind, (packet, dict(node))
        return super()._answer(kind, packet, node)


def _without_strategy(trainer: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in trainer.items() if name not in ("strategy", "sync_batchnorm")}


def _check_callback(callback: Any) -> None:
    is_known = type(callback) is ProximalTerm or not isinstance(callback, TrainerCallback)
    if not is_known and any(is_overridden(hook, callback, FederatedCallback) for hook in _ON_CLIENT):
        raise MisconfigurationException(
            f"`{type(callback).__name__}` runs in a client's training and may need all of the client's data, but with "
            "several devices each process reads only a share: set devices=1, or train with averaging or FedProx."
        )


class RankRunner(ClientRunner):
    """Client side in one of several processes that train one client together. Only the first process writes files."""

    def __init__(self, federation: Federation, model: Any, data: Any, trainer: Any, options: dict[str, Any]) -> None:
        super().__init__(federation, model, data, _without_strategy(trainer), **options)
        plugins = trainer.get("plugins", [])
        plugins = list(plugins) if isinstance(plugins, list | tuple) else [plugins]
        self._options |= {"strategy": "ddp", **trainer, "plugins": [*plugins, LightningEnvironment()]}
        self.rank, self._size = current_rank()
        if self.rank:
            self.store_kind = _ReadStore

    def train(self, packet: Packet, node: Mapping[str, Any], judge: Any) -> tuple[Any, ...]:
        """Trains on this process's share of the client's data.

        ``node`` is the argument of the user's data function. Before training, ``judge`` raises an error if a policy
        forbids sending a model tensor. Returns steps, update, error (or ``None``), and scheduler and scaler states.
        """
        self.keep_log()
        population, datamodule = self._data_at(node)
        train_request, broadcast = read_train_request(packet, VISIT)
        visit, run = train_request.visit, train_request.run
        shared = share_population(population, self.rank, self._size, visit.seed)
        held = _ReadHeldFile(self._store / run) if self.rank else HeldFile(self._store / run)
        remote = RankSide(VISIT, train_request, broadcast, shared, judge, held)
        self._build_module(run, train_request.seed)
        steps, update, cpu = self._fit(remote, run, visit.round, datamodule), remote.server.update, torch.device("cpu")
        if update is not None:
            update = replace(update, state=on_device(update.state, cpu), extras=on_device(update.extras, cpu))
        return steps, update, remote.server.fault, remote.left


class RankSide(RemoteServerSide):
    """Stands in for the server in each of the processes that train a client together."""

    def start(self, fit: FederatedFit) -> None:
        strategy = fit.trainer.strategy
        # Only the first process writes the file with stored tensors, after the other processes have read the file.
        if fit.trainer.is_global_zero:
            strategy.barrier()
        super().start(fit)
        if not fit.trainer.is_global_zero:
            strategy.barrier()


class _ReadHeldFile(HeldFile):
    def store(self, state: State) -> None: ...


class _ReadStore(FolderStore):
    def put(self, client: Any, round: int, state: State) -> None: ...


def answer_visit(arguments: tuple[Any, ...]) -> Any:
    """Creates a :class:`RankRunner` in a training process. Returns the function that trains with this runner."""
    return partial(_answer_visit, RankRunner(*arguments))


def _answer_visit(runner: RankRunner, order: tuple[Packet, dict[str, Any]], judge: Any) -> tuple[Any, ...] | None:
    try:
        outcome = runner.train(*order, judge)
    except ClientFault:
        raise
    except VisitTimeout as error:
        raise ClientFault(str(error)) from error
    except Exception as error:
        _log.exception("Process %d of a visit failed.", runner.rank + 1)
        raise ClientFault(find_public_reason(error)) from error
    return None if runner.rank else outcome
