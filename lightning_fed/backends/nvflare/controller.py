"""The server of a federation as an NVFLARE controller."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any

import lightning as L
from nvflare.apis.client import Client as Site
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.fuel.f3.cellnet import cell

from lightning_fed.backends.nvflare.transport import FlareTransport
from lightning_fed.backends.site.signatures import read_private_key
from lightning_fed.backends.wire.server import Model, ServerRunner
from lightning_fed.backends.wire.transport import Deadline
from lightning_fed.callbacks.federation import Federation
from lightning_fed.messages import Client

_log = logging.getLogger(__name__)


class FederationController(Controller):  # type: ignore[misc]
    """Server side as an NVFLARE controller. Each message is a task for one site.

    The controller trains like ``Trainer.fit``. After every round, Lightning validates, logs and saves the global model
    in ``folder``. A resubmitted job resumes from the last complete round. For a new run, use another folder.

    Args:
        federation: The federation. The client side needs the same arguments.
        model: The LightningModule, or a function that builds the module (called with the federation's seed set).
        val_data: Validation data for the global model, as for :class:`~lightning_fed.data.FederatedDataModule`, or a
            datamodule with a validation loader (``setup`` receives the stage ``"validate"``).
        trainer: Arguments for ``L.Trainer``; ``max_epochs`` is the number of rounds.
        clients: Client names, equal to the site names, or a mapping from client to site name.
        folder: Folder for checkpoints (``last.ckpt``), outside the job's folder (deleted by NVFLARE).
        callbacks: Additional callbacks.
        time_limit: Seconds per round for the clients' answers, or a :class:`Deadline`.
        patience: Seconds to wait for all sites to connect.
        key: File with a private key that signs messages (``ssh-keygen -t ed25519 -N ""``). Required if a site policy
            lists the server's public key.

    Raises:
        ValueError: If an argument is outside the allowed range, or a Trainer argument is unsupported.
        MisconfigurationException: At the start of the job, if a callback or option needs client data on the server.

    Example:
        >>> from torch import nn
        >>> from lightning_fed.tasks import ClassificationTask
        >>> controller = FederationController(
        ...     Federation("fedavg", clients_per_round=2),
        ...     lambda: ClassificationTask(nn.Linear(4, 2), num_classes=2),
        ...     trainer={"max_epochs": 10},
        ...     clients=["site-1", "site-2"],
        ...     folder="runs/hospitals",
        ... )
    """

    def __init__(
        self,
        federation: Federation,
        model: Model,
        val_data: Any = None,
        trainer: Mapping[str, Any] | None = None,
        *,
        clients: Sequence[str] | Mapping[Client, str],
        folder: str | os.PathLike[str],
        callbacks: Sequence[L.Callback] = (),
        time_limit: float | Deadline = 3600.0,
        patience: float = 600.0,
        key: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__(task_check_period=0.05)
        self._sites: dict[Client, str] = {}
        self._sites.update(clients if isinstance(clients, Mapping) else zip(clients, clients, strict=True))
        self._runner = ServerRunner(
            federation,
            model,
            val_data,
            trainer,
            clients=list(self._sites),
            folder=folder,
            callbacks=callbacks,
            patience=patience,
        )
        self._deadline = time_limit if isinstance(time_limit, Deadline) else Deadline(time_limit)
        self._key = read_private_key(key)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Patches NVFLARE: an unreadable answer from a client must not end the server process."""
        _survive_bad_answers()

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        self._runner.run(FlareTransport(self, fl_ctx, abort_signal, self._sites, self._deadline, key=self._key))

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Does nothing, because training has ended."""

    def process_result_of_unknown_task(
        self, client: Site, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        _log.warning("Discarded a late answer from site %r to the task %r.", client.name, task_name)


def _survive_bad_answers() -> None:
    # NVFLARE decodes an answer before the controller receives it, and exits if decoding fails, so one site could end
    # the job. Without the exit, the round excludes the site at the deadline.
    if hasattr(cell, "_is_server_job_cell"):  # NVFLARE >= 2.8
        cell._is_server_job_cell = lambda _: False  # noqa: SLF001 - NVFLARE has no option
