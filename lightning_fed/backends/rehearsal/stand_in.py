"""Replacement for a client's training in simulated deployments."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed.backends.rehearsal.world import Machine
from lightning_fed.backends.wire.data import HalfData
from lightning_fed.backends.wire.packets import VISIT, Packet, TrainRequest
from lightning_fed.backends.wire.runner import ClientRunner
from lightning_fed.backends.wire.server_for_client import RemoteServerSide
from lightning_fed.callbacks.federation import Federation
from lightning_fed.client.client_store import FolderStore
from lightning_fed.messages import Client, ClientUpdate, State
from lightning_fed.model.entries import live_entries
from lightning_fed.rule import RoundInfo
from lightning_fed.server.schedule import Visit, count_visit_batches

MEMORY, SERVER_MEMORY = 5.1, 6.5
"""Memory of a client's process in a visit, and of the server's process, in models (measured: guide "deploy")."""

QUIET: dict[str, Any] = {"accelerator": "cpu", "logger": False}
_COUNT = "memory:visits"


class StandIn(L.LightningModule):
    """Model with eight parameters, for simulated deployments without training of the real model."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(8))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.weight.square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train_stand_in(state: State, visit: Visit, stored: Mapping[str, Tensor]) -> tuple[State, State]:
    """Computes an artificial model and client state instead of training.

    The result depends on the received model, a seed, and the client's stored number of trainings. A lost, repeated or
    changed update therefore changes all later global models.
    """
    generator = torch.Generator().manual_seed(visit.seed)
    count = stored.get(_COUNT, torch.zeros((), dtype=torch.int64)) + 1
    trained = {
        name: 0.9 * value + 0.1 * torch.randn(value.shape, generator=generator).to(value.dtype) + 1e-3 * count
        for name, value in state.items()
    }
    return trained, {_COUNT: count} if visit.seed % 4 else {}


class RehearsedRunner(ClientRunner):
    """Client program in simulated time. Trains the model if ``trains``, otherwise calls :func:`train_stand_in`."""

    def __init__(
        self,
        machine: Machine,
        federation: Federation,
        model: Callable[[], L.LightningModule],
        data: Any,
        model_bytes: float,
        trains: bool,
        store: Path,
        trainer: Mapping[str, Any],
        callbacks: list[L.Callback],
    ) -> None:
        super().__init__(federation, model, data, trainer, store=store, callbacks=callbacks)
        self.machine, self._model_bytes, self._trains = machine, model_bytes, trains
        self._order: tuple[str, TrainRequest]

    def _carry_out(self, kind: str, train_request: TrainRequest, *rest: Any) -> Packet:
        self._order = kind, train_request
        return super()._carry_out(kind, train_request, *rest)

    def _fit(self, remote: RemoteServerSide, run: str, round: int, datamodule: HalfData) -> int:
        profile, (kind, train_request) = self.machine.profile, self._order
        per_epoch = remote.population.batches_per_epoch(train_request.visit.client) or profile.batches
        batches = count_visit_batches(train_request.visit, per_epoch) if kind == VISIT else per_epoch
        self.machine.work(profile.seconds_per_step * batches)
        if MEMORY * self._model_bytes > profile.memory * 1e9:
            self.machine.end("needs more memory than the machine has")
        if self._trains:
            return super()._fit(remote, run, round, datamodule)
        fit = _StandInFit(self._module, self._federation, FolderStore(self._store / run, keep_all=True))
        server = remote.connect(fit.server)
        remote.start(fit)  # type: ignore[arg-type]
        server.start_round(RoundInfo(round), {})
        visit = train_request.visit
        broadcast = server.prepare(visit.client)
        state, stored = train_stand_in(broadcast.state, visit, fit.store.get(visit.client) or {})
        update = ClientUpdate(visit.client, remote.population.num_samples(visit.client), state)
        server.accept(server.chain.on_client(update, broadcast, stored))
        if stored:
            fit.store.put(visit.client, round, stored)
            fit.store.commit(round, [visit.client])
        return batches


class _StandInFit(SimpleNamespace):
    """Replaces a real fit in a simulated deployment. Has only the attributes read by :meth:`RemoteServerSide.start`."""

    def __init__(self, module: L.LightningModule, federation: Federation, store: FolderStore) -> None:
        trainer = SimpleNamespace(
            lightning_module=module,
            optimizers=[module.configure_optimizers()],
            lr_scheduler_configs=[],
            strategy=SimpleNamespace(lr_scheduler_configs=[]),
            precision_plugin=SimpleNamespace(state_dict=dict),
        )
        super().__init__(
            trainer=trainer,
            module=module,
            store=store,
            server=federation.server,
            policies=dict.fromkeys(live_entries(module), "shared"),
            is_batch_norm_fixed=False,
        )


def build_stand_in_data(client: Client, batches: int) -> Mapping[Client, DataLoader[Any]]:
    """Creates artificial data with ``batches`` batches per client. Each batch contains one example."""
    return {client: DataLoader(TensorDataset(torch.zeros(batches, 1)))}
