"""A client of a federation as an NVFLARE executor."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal

from lightning_fed.backends.ddp.runner import build_runner
from lightning_fed.backends.nvflare.transport import from_shareable, to_shareable
from lightning_fed.backends.wire.bounds import OrderBounds
from lightning_fed.backends.wire.packets import PacketError
from lightning_fed.backends.wire.runner import ClientRunner, ClientsData
from lightning_fed.backends.wire.server import Model
from lightning_fed.callbacks.federation import Federation

_log = logging.getLogger(__name__)


class FederationExecutor(Executor):  # type: ignore[misc]
    """Client side as an NVFLARE executor, for the machine with the data.

    Each local training is a fit with an ordinary ``L.Trainer``. Client state stays in ``store``, and the server cannot
    request it.

    Args:
        federation: The federation, with the same arguments as on the server.
        model: The LightningModule, or a function that builds the module (called with the federation's seed set).
        data: Mapping from client to data, or a ``FederatedDataModule``; with a ``partition`` in the federation, a plain
            datamodule. Or a function that receives the site's name, as ``{"site": name}``, and returns one of these.
        trainer: Arguments for ``L.Trainer``. With several ``devices``, a client trains with DDP.
        callbacks: Additional callbacks.
        store: Folder for client state, shared by all jobs; by default ``lightning-fed`` in the site's workspace.
        bounds: Limits for work requested by the server; unlimited by default.
        policy: File with the site's rules for requests and answers (:mod:`lightning_fed.backends.site`). If a given
            file is missing, no answer is sent. The default is ``site_policy.toml`` in ``store``. If the default file
            never existed, all answers are sent.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from torch.utils.data import TensorDataset
        >>> from lightning_fed.tasks import ClassificationTask
        >>> executor = FederationExecutor(
        ...     Federation("fedavg", clients_per_round=2),
        ...     lambda: ClassificationTask(nn.Linear(4, 2), num_classes=2),
        ...     lambda node: {node["site"]: TensorDataset(torch.zeros(8, 4), torch.zeros(8, dtype=torch.long))},
        ...     trainer={"accelerator": "cpu"},
        ... )
    """

    def __init__(
        self,
        federation: Federation,
        model: Model,
        data: ClientsData | Callable[[Mapping[str, Any]], ClientsData],
        trainer: Mapping[str, Any] | None = None,
        *,
        callbacks: Sequence[L.Callback] = (),
        store: str | os.PathLike[str] | None = None,
        bounds: OrderBounds | None = None,
        policy: str | os.PathLike[str] | None = None,
    ) -> None:
        super().__init__()
        make = partial(
            build_runner, federation, model, data, trainer, callbacks=callbacks, bounds=bounds, policy=policy
        )
        self._make, self._store = make, store
        self._runner: ClientRunner | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        if self._runner is None:
            workspace = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
            self._runner = self._make(store=workspace / "lightning-fed" if self._store is None else self._store)
        self._runner.keep_log()  # NVFLARE streams log files to the server, by default the error log
        try:
            site = {"site": fl_ctx.get_identity_name()}
            return to_shareable(self._runner.answer(task_name, from_shareable(shareable), site))
        except PacketError as error:
            _log.warning("Could not answer task %r: %s.", task_name, error)
            return make_reply(ReturnCode.BAD_TASK_DATA)
