"""A federation's client as a Flower ``ClientApp``."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

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
    """The clients' half of a federation, as a Flower app: what runs beside the data.

    A visit is a fit of an ordinary ``L.Trainer``, with this machine's accelerator, precision and loggers. What stays
    with the clients (personal layers, kept optimizer state, what callbacks remember) stays in ``store``, and what the
    federation says of it is said here: the server cannot ask for it.

    One machine may have several clients: all that ``data`` has, or, with ``partition-id`` and ``num-partitions`` in the
    node's configuration, every ``num-partitions``-th of them, as in a simulation.

    Args:
        federation: The federation, as the server has it.
        model: The LightningModule, or what makes it (after ``lightning.seed_everything`` with the federation's seed).
        data: A mapping of clients or a ``FederatedDataModule``; or, where the federation has a ``partition``, a
            datamodule that it splits. Or a function of the node's configuration that returns one of these.
        trainer: Arguments of ``L.Trainer``.
        callbacks: Callbacks beside the federation's own.
        store: Folder for what is the clients'; by default ``lightning-fed`` in Flower's own (``FLWR_HOME``).
        bounds: Bounds of the work that is done on the server's order; by default there are none.
        policy: File of the site's policy, without which nothing leaves; by default ``site_policy.toml`` in ``store``.
            If neither the file, nor a record or a similar name exists in ``store``, every answer leaves. See
            :mod:`lightning_fed.backends.site`.

    Raises:
        ValueError: If the Trainer is asked for what is the server's to say.

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
    runner = ClientRunner(
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
    """App of a client, of :func:`client_app`: it has its runner answer.

    Args:
        runner: Answers packets.

    """

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
