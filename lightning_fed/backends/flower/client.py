"""A client of a federation as a Flower ``ClientApp``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from lightning_fed.backends.ddp.runner import build_runner
from lightning_fed.backends.flower.start import flower_home
from lightning_fed.backends.flower.transport import from_records, to_records
from lightning_fed.backends.wire.bounds import OrderBounds
from lightning_fed.backends.wire.runner import ClientRunner, ClientsData
from lightning_fed.backends.wire.server import Model
from lightning_fed.callbacks.federation import Federation


def client_app(
    federation: Federation,
    model: Model,
    data: ClientsData | Callable[[Mapping[str, Any]], ClientsData],
    trainer: Mapping[str, Any] | None = None,
    *,
    callbacks: Sequence[L.Callback] = (),
    store: str | os.PathLike[str] | None = None,
    bounds: OrderBounds | None = None,
    policy: str | os.PathLike[str] | None = None,
) -> LightningClientApp:
    """Client side as a Flower app, for the machine with the data.

    Each local training is a fit with an ordinary ``L.Trainer``. Client state, such as personal layers, stays in
    ``store``, and the server cannot request it. The machine serves all clients in ``data``. In a Flower simulation, the
    node with ``partition-id`` serves every ``num-partitions``-th client.

    Args:
        federation: The federation, with the same arguments as on the server.
        model: The LightningModule, or a function that builds the module (called with the federation's seed set).
        data: Mapping from client to data, or a ``FederatedDataModule``; with a ``partition`` in the federation, a plain
            datamodule. Or a function that receives Flower's node configuration, and returns one of these.
        trainer: Arguments for ``L.Trainer``. With several ``devices``, a client trains with DDP.
        callbacks: Additional callbacks.
        store: Folder for client state; by default ``lightning-fed`` in Flower's folder (``FLWR_HOME``).
        bounds: Limits for work requested by the server; unlimited by default.
        policy: File with the site's rules for requests and answers (:mod:`lightning_fed.backends.site`). If a given
            file is missing, no answer is sent. The default is ``site_policy.toml`` in ``store``. If the default file
            never existed, all answers are sent.

    Raises:
        ValueError: If ``trainer`` has an argument reserved for the server.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_fed.tasks import ClassificationTask
        >>> app = client_app(
        ...     Federation("fedavg", clients_per_round=2),
        ...     lambda: ClassificationTask(nn.Linear(4, 2), num_classes=2),
        ...     lambda node: {node["client"]: TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))},
        ...     trainer={"accelerator": "cpu"},
        ... )
    """
    runner = build_runner(
        federation,
        model,
        data,
        trainer,
        callbacks=callbacks,
        store=flower_home() / "lightning-fed" if store is None else store,
        bounds=bounds,
        policy=policy,
    )
    return LightningClientApp(runner)


class LightningClientApp(ClientApp):
    """The Flower app returned by :func:`client_app`. A :class:`ClientRunner` answers the server's messages."""

    def __init__(self, runner: ClientRunner) -> None:
        super().__init__()
        self.runner = runner
        self.query()(self._answer)
        self.query("request")(self._answer)
        self.query("sum")(self._answer)
        self.train()(self._answer)
        self.evaluate()(self._answer)
        self.evaluate("question")(self._answer)

    def _answer(self, message: Message, context: Context) -> Message:
        kind, packet = message.metadata.message_type, from_records(message.content)
        return Message(to_records(self.runner.answer(kind, packet, context.node_config)), reply_to=message)
