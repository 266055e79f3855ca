"""The server of a federation as a Flower ``ServerApp``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from lightning_fed.backends.flower.transport import FlowerTransport, read_node_key
from lightning_fed.backends.site.signatures import read_private_key
from lightning_fed.backends.wire.server import Model, ServerRunner
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.callbacks.federation import Federation
from lightning_fed.messages import Client


def server_app(
    federation: Federation,
    model: Model,
    val_data: Any = None,
    trainer: Mapping[str, Any] | None = None,
    *,
    clients: int | Sequence[Client] | Mapping[Client, int | str],
    folder: str | os.PathLike[str],
    callbacks: Sequence[L.Callback] = (),
    time_limit: float | Deadline = 3600.0,
    patience: float = 600.0,
    key: str | os.PathLike[str] | None = None,
) -> ServerApp:
    """Server side as a Flower app.

    The app waits for the clients and then trains like ``Trainer.fit``. After every round, Lightning validates, logs and
    saves the global model in ``folder``. A restarted app resumes from the last complete round in ``folder``. For a new
    run, use another folder.

    A client without a valid answer within the time limit is excluded from the round.

    Args:
        federation: The federation. The client side needs the same arguments.
        model: The LightningModule, or a function that builds the module (called with the federation's seed set).
        val_data: Validation data for the global model, as for :class:`~lightning_fed.data.FederatedDataModule`, or a
            datamodule with a validation loader (``setup`` receives the stage ``"validate"``).
        trainer: Arguments for ``L.Trainer``; ``max_epochs`` is the number of rounds.
        clients: The client names, or the number of clients. Training starts when all clients are connected. Clients
            that connect later are ignored, and a resumed run waits for the original clients. A mapping binds each
            client to a SuperNode, by public key (text of the ``.key.pub`` file) or number (from ``flwr supernode
            register``). No other node can then act for the client or receive the client's messages.
        folder: Folder for checkpoints, including ``last.ckpt``.
        callbacks: Additional callbacks.
        time_limit: Seconds per round for the clients' answers, or a :class:`Deadline`.
        patience: Seconds to wait for all clients to connect.
        key: File with a private key that signs messages (``ssh-keygen -t ed25519 -N ""``). Required if a site policy
            lists the server's public key.

    Raises:
        ValueError: If an argument is outside the allowed range, or a Trainer argument is unsupported.
        MisconfigurationException: At the start of the app, if a callback or option needs client data on the server.

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
    bound = dict(clients) if isinstance(clients, Mapping) else None
    for node in (bound or {}).values():
        read_node_key(node)
    runner = ServerRunner(
        federation,
        model,
        val_data,
        trainer,
        clients=clients,
        folder=folder,
        callbacks=callbacks,
        patience=patience,
    )
    deadline = time_limit if isinstance(time_limit, Deadline) else Deadline(time_limit)
    app, signing = ServerApp(), read_private_key(key)

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        stage, ckpt_path = (str(context.run_config.get(name) or "") for name in ("evaluate", "checkpoint"))
        runner.run(FlowerTransport(grid, deadline, bound=bound, key=signing), stage or "fit", ckpt_path)

    return app
