"""Server program for any network transport: a fit with clients on other machines."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.argument_checks import check_count
from lightning_fed.backends.wire.arrivals import RemoteArrivals
from lightning_fed.backends.wire.clients_for_server import RemoteClientSide
from lightning_fed.backends.wire.data import HalfData
from lightning_fed.backends.wire.options import check_options
from lightning_fed.backends.wire.remote_client_store import RemoteClientStore
from lightning_fed.backends.wire.run_folder import count_start, lock_folder, read_clients, write_clients
from lightning_fed.backends.wire.transport import Transport
from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation, ClientsBatch
from lightning_fed.callbacks.federation import Federation
from lightning_fed.lightning.checkpoints import RoundCheckpoint
from lightning_fed.messages import Client
from lightning_fed.model.entries import batch_norm_layers
from lightning_fed.report.callback import Report

_log = logging.getLogger(__name__)

Model = L.LightningModule | Callable[[], L.LightningModule]

_QUIET: dict[str, Any] = {"devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
_OURS = ("callbacks", "max_steps", "max_time", "fast_dev_run", "reload_dataloaders_every_n_epochs", "strategy")


class ServerRunner:
    """Trains or evaluates with clients on other machines.

    Takes the arguments of :func:`~lightning_fed.backends.flower.server_app`. A mapping as ``clients`` assigns each
    client to a node in the network.
    """

    def __init__(
        self,
        federation: Federation,
        model: Model,
        val_data: Any = None,
        trainer: Mapping[str, Any] | None = None,
        *,
        clients: int | Sequence[Client] | Mapping[Client, Any],
        folder: str | os.PathLike[str],
        callbacks: Sequence[L.Callback] = (),
        patience: float = 600.0,
    ) -> None:
        options = check_options(trainer, _OURS)
        if not isinstance(options.get("max_epochs"), int) or options["max_epochs"] < 1:
            raise ValueError(
                "Expected `trainer` to contain the number of rounds as `max_epochs`, but got "
                f"{options.get('max_epochs')!r}."
            )
        interval = options.get("val_check_interval", 1.0)
        if isinstance(interval, int) or interval != 1.0:
            raise ValueError(
                "Expected `trainer` without `val_check_interval`, because the server does not know the number of "
                f"batches in a round, but got {interval!r}: use `check_val_every_n_epoch` to validate every n rounds."
            )
        if isinstance(clients, int):
            check_count("clients", clients)
        if not patience >= 0:
            raise ValueError(f"Expected `patience` to be at least 0, but got {patience}.")
        self._clients = list(clients) if isinstance(clients, Mapping) else clients
        self._folder, self._patience = Path(folder), patience
        self._run = partial(run_server, federation, model, val_data, options, folder=self._folder, callbacks=callbacks)

    def run(self, transport: Transport, stage: str = "fit", ckpt_path: str = "") -> L.Trainer:
        with lock_folder(self._folder):
            clients = transport.await_clients(read_clients(self._clients, self._folder), self._patience)
            write_clients(clients, self._folder)
            return self._run(transport=transport, clients=clients, stage=stage, ckpt_path=ckpt_path)


def run_server(
    federation: Federation,
    model: Model,
    val_data: Any,
    options: Mapping[str, Any],
    transport: Transport,
    clients: Sequence[Client],
    folder: str | os.PathLike[str],
    callbacks: Sequence[L.Callback] = (),
    stage: str = "fit",
    ckpt_path: str | os.PathLike[str] | None = None,
) -> L.Trainer:
    """Trains or evaluates with remote clients. See :class:`ServerRunner` for the arguments."""
    client_store = RemoteClientStore()
    half = federation.replace(
        partition=None,
        store=client_store,
        visits=federation.options.visits_one_by_one,
    )
    parts = transport, client_store, clients, half.schedule.seed, count_start(Path(folder))
    has_versions = half.server.rule.has_versions
    half.split(RemoteArrivals(*parts, folder=Path(folder)) if has_versions else RemoteClientSide(*parts))
    L.seed_everything(half.schedule.seed, verbose=False)
    module = model if isinstance(model, L.LightningModule) else model()
    _check(half, module, callbacks)
    last = Path(folder) / "last.ckpt"
    trainer = L.Trainer(
        **{**_QUIET, "default_root_dir": folder, "num_sanity_val_steps": 0, **options},
        callbacks=[half, *callbacks, Report(Path(folder) / "report.html"), RoundCheckpoint(last)],
    )
    if stage != "fit":
        if not any(isinstance(callback, ClientEvaluation) for callback in callbacks):
            raise MisconfigurationException("Evaluation on clients needs `ClientEvaluation()`: add it to `callbacks`.")
        path = last if not ckpt_path and last.exists() else ckpt_path or None
        getattr(trainer, stage)(module, datamodule=HalfData(ClientsBatch()), ckpt_path=path)
        return trainer
    if last.exists():
        _log.info("Resuming from %s.", last)
    if val_data is None and any(isinstance(callback, ClientEvaluation) for callback in callbacks):
        val_data = ClientsBatch()
    if isinstance(val_data, L.LightningDataModule):
        val_data.prepare_data()
        val_data.setup("validate")
    trainer.fit(module, datamodule=HalfData(val_data), ckpt_path=last if last.exists() else None)
    return trainer


def _check(half: Federation, module: L.LightningModule, callbacks: Sequence[L.Callback]) -> None:
    has_statistics = half.reports_statistics and batch_norm_layers(module)
    of_steps = half.server.chain.callbacks()
    for callback in (*callbacks, *half.method.callbacks, *of_steps):
        reason = getattr(callback, "needs_local_clients", "")
        if not reason and has_statistics and not getattr(callback, "can_recalibrate_remotely", True):
            reason = "batch_norm='recalibrate' would need additional messages to clients: choose another `batch_norm`"
        if reason:
            raise MisconfigurationException(
                f"`{type(callback).__name__}` does not work yet with clients on other machines: {reason}."
            )
