"""A federation's server as a Flower ``ServerApp``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from lightning_fed.argument_checks import check_count
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
            come later are not drawn. A run that goes on waits for those whom it began with. A mapping binds each to
            the public key of a SuperNode (the text of its ``.key.pub``), or to the number that ``flwr supernode
            register`` gives it: then no other node can speak for that client, or gets a message.
        folder: Where checkpoints are, ``last.ckpt`` among them.
        callbacks: Callbacks beside the federation's own.
        time_limit: Seconds in which the clients of a round must have answered; or a :class:`Deadline`, which says more:
            how long a round that has enough answers waits for the others, and for a connection that is lost.
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
    bound = dict(clients) if isinstance(clients, Mapping) else None
    for client, node in (bound or {}).items():
        if isinstance(node, str):
            read_node_key(node)
        else:
            check_count(f"the node of client {client!r}", node, lowest=0)
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
    signing = None if key is None else read_private_key(key)
    deadline = time_limit if isinstance(time_limit, Deadline) else Deadline(time_limit)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        stage, ckpt_path = (str(context.run_config.get(name) or "") for name in ("evaluate", "checkpoint"))
        runner.run(FlowerTransport(grid, deadline, bound=bound, key=signing), stage or "fit", ckpt_path)

    return app
