"""A federation's server as a Flower ``ServerApp``."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.argument_checks import check_count
from lightning_fed.atomic_files import RoundCheckpoint
from lightning_fed.backends.flower.clients_for_server import RemoteClientSide
from lightning_fed.backends.flower.data import HalfData
from lightning_fed.backends.flower.options import check_options
from lightning_fed.backends.flower.remote_client_store import RemoteClientStore
from lightning_fed.backends.flower.run_folder import lock_folder, read_clients, write_clients
from lightning_fed.backends.flower.transport import FlowerTransport
from lightning_fed.backends.flower.transport_interface import Transport
from lightning_fed.backends.site.signatures import read_private_key
from lightning_fed.callbacks.federation import Federation
from lightning_fed.messages import Client
from lightning_fed.rounds.batch_norm import batch_norm_layers

_log = logging.getLogger(__name__)

Model = L.LightningModule | Callable[[], L.LightningModule]

_QUIET: dict[str, Any] = {"devices": 1, "enable_progress_bar": False, "enable_model_summary": False}
_OURS = ("callbacks", "max_steps", "max_time", "fast_dev_run", "reload_dataloaders_every_n_epochs", "strategy")


def server_app(
    federation: Federation,
    model: Model,
    val_data: Any = None,
    trainer: Mapping[str, Any] | None = None,
    *,
    clients: int | Sequence[Client] | Mapping[Client, int],
    folder: str | os.PathLike[str],
    callbacks: Sequence[L.Callback] = (),
    time_limit: float = 3600.0,
    patience: float = 600.0,
    key: str | os.PathLike[str] | None = None,
) -> ServerApp:
    """The server's half of a federation, as a Flower app.

    It waits for its clients, and trains as ``Trainer.fit`` does: after every round the global model is validated,
    logged and saved in ``folder``. An app that is started again goes on from the last complete round there, whatever
    ended the one before; one that is to begin anew needs another folder.

    Only messages cross: the global model and what the method adds go down, updates come up. They are checked before
    they are used, and nothing in them is unpickled. A client that is not there, answers too late or with nonsense is
    left out of the round by name.

    Args:
        federation: The federation: rule, schedule, what stays with the clients. Clients need the same one.
        model: The LightningModule, or what makes it (after ``lightning.seed_everything`` with the federation's seed).
        val_data: Validation data of the global model, as :class:`~lightning_fed.data.FederatedDataModule` takes them,
            or a datamodule that has them (it is set up for the stage ``"validate"``).
        trainer: Arguments of ``L.Trainer``; ``max_epochs`` is the number of rounds.
        clients: The clients' keys, or how many they are. Training starts when they are there, and is theirs: those that
            come later are not drawn. A run that goes on waits for those whom it began with. A mapping binds each key to
            the number of a SuperNode, as ``flwr supernode register`` gives it for a node's key: then no other node can
            speak for that client.
        folder: Where checkpoints are, ``last.ckpt`` among them.
        callbacks: Callbacks beside the federation's own.
        time_limit: Seconds in which the clients of a round must have answered.
        patience: Seconds in which the clients must have come.
        key: File of a private key (``ssh-keygen -t ed25519 -N ""``) with which messages are signed, for sites whose
            policy names the server's key.

    Raises:
        ValueError: If an argument is out of its range, or the Trainer is asked for what is not possible.
        MisconfigurationException: When the app runs, if a callback or option needs the clients' data on the server.

    Example:
        >>> from torch import nn
        >>> from lightning_fed.tasks import ClassificationTask
        >>> app = server_app(
        ...     Federation("fedavg", clients_per_round=2),
        ...     lambda: ClassificationTask(nn.Linear(4, 2), num_classes=2),
        ...     trainer={"max_epochs": 10},
        ...     clients=["hospital-a", "hospital-b"],
        ...     folder="runs/hospitals",
        ... )

    """
    options = check_options(trainer, _OURS)
    if not isinstance(options.get("max_epochs"), int) or options["max_epochs"] < 1:
        raise ValueError(
            f"Expected `trainer` to have the number of rounds as `max_epochs`, but got {options.get('max_epochs')!r}."
        )
    if isinstance(clients, int):
        check_count("clients", clients)
    if isinstance(clients, Mapping):
        for client, node in clients.items():
            check_count(f"the node of client {client!r}", node, lowest=0)
    if not time_limit > 0 or not patience >= 0:
        raise ValueError(f"Expected positive times, but got time_limit={time_limit} and patience={patience}.")
    signing = None if key is None else read_private_key(key)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        bound = dict(clients) if isinstance(clients, Mapping) else None
        transport, place = FlowerTransport(grid, time_limit, bound=bound, key=signing), Path(folder)
        with lock_folder(place):
            keys = list(clients) if isinstance(clients, Mapping) else clients
            met = transport.meet(read_clients(keys, place), patience)
            write_clients(met, place)
            run_server(federation, model, val_data, options, transport, met, folder, callbacks)

    return app


def run_server(
    federation: Federation,
    model: Model,
    val_data: Any,
    options: Mapping[str, Any],
    transport: Transport,
    clients: Sequence[Client],
    folder: str | os.PathLike[str],
    callbacks: Sequence[L.Callback] = (),
) -> L.Trainer:
    """A fit whose clients are reached by a transport; the arguments are those of :func:`server_app`."""
    client_store = RemoteClientStore()
    half = federation.replace(
        partition=None,
        store=client_store,
        visits=federation.options.visits_one_by_one,
        # The server does not have what is the clients' own.
        evaluate_clients_every=0 if federation.has_personal_entries else federation.options.evaluate_clients_every,
    )
    half.split(RemoteClientSide(transport, client_store, clients, half.schedule.seed))
    L.seed_everything(half.schedule.seed, verbose=False)
    module = model if isinstance(model, L.LightningModule) else model()
    _check(half, module, callbacks)
    last = Path(folder) / "last.ckpt"
    trainer = L.Trainer(
        **{**_QUIET, "default_root_dir": folder, "num_sanity_val_steps": 0, **options},
        callbacks=[half, *callbacks, RoundCheckpoint(last)],
    )
    if last.exists():
        _log.info("Going on from %s.", last)
    if isinstance(val_data, L.LightningDataModule):
        val_data.prepare_data()
        val_data.setup("validate")
    trainer.fit(module, datamodule=HalfData(val_data), ckpt_path=last if last.exists() else None)
    return trainer


def _check(half: Federation, module: L.LightningModule, callbacks: Sequence[L.Callback]) -> None:
    """Refuses what would need the clients' data on the server."""
    has_statistics = half.options.measures_batch_norm and batch_norm_layers(module)
    of_steps = [callback for step in half.server.chain.steps for callback in step.callbacks()]
    for callback in (*callbacks, *half.method.callbacks, *of_steps):
        reason = getattr(callback, "needs_local_clients", "")
        if not reason and has_statistics and not getattr(callback, "can_recalibrate_remotely", True):
            reason = "with batch_norm='recalibrate' its clients would be asked for more: choose another `batch_norm`"
        if reason:
            raise MisconfigurationException(
                f"`{type(callback).__name__}` does not work yet with clients on other machines: {reason}."
            )
