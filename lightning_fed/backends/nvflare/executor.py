"""A federation's client as an NVFLARE executor."""

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

from lightning_fed.backends.nvflare.transport import from_shareable, to_shareable
from lightning_fed.backends.wire.bounds import OrderBounds
from lightning_fed.backends.wire.packets import PacketError
from lightning_fed.backends.wire.runner import ClientRunner, ClientsData
from lightning_fed.backends.wire.server import Model
from lightning_fed.callbacks.federation import Federation

_log = logging.getLogger(__name__)


class FederationExecutor(Executor):  # type: ignore[misc]
    """The clients' half of a federation, as an NVFLARE executor: what runs beside the data.

    A visit is a fit of an ordinary ``L.Trainer``, with this machine's accelerator, precision and loggers. What stays
    with the clients stays in ``store``, and what the federation says of it is said here: the server cannot ask for it.

    Args:
        federation: The federation, as the server has it.
        model: The LightningModule, or what makes it (after ``lightning.seed_everything`` with the federation's seed).
        data: A mapping of clients or a ``FederatedDataModule``; or, where the federation has a ``partition``, a
            datamodule that it splits. Or a function of the site's configuration, ``{"site": its name}``, that returns
            one of these.
        trainer: Arguments of ``L.Trainer``.
        callbacks: Callbacks beside the federation's own.
        store: Folder for what is the clients'; by default ``lightning-fed`` in the site's workspace, which every job
            on the site shares.
        bounds: Bounds of the work that is done on the server's order; by default there are none.
        policy: File of the site's policy, without which nothing leaves; by default ``site_policy.toml`` in ``store``.
            If neither the file, nor a record or a similar name exists in ``store``, every answer leaves. See
            :mod:`lightning_fed.backends.site`.

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
            ClientRunner, federation, model, data, trainer, callbacks=callbacks, bounds=bounds, policy=policy
        )
        self._make, self._store = make, store
        self._runner: ClientRunner | None = None

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answers a task."""
        if self._runner is None:
            workspace = Path(fl_ctx.get_engine().get_workspace().get_root_dir())
            self._runner = self._make(store=workspace / "lightning-fed" if self._store is None else self._store)
        self._runner.keep_log()  # NVFLARE streams log files to the server, by default the log of errors
        try:
            site = {"site": fl_ctx.get_identity_name()}
            return to_shareable(self._runner.answer(task_name, from_shareable(shareable), site))
        except PacketError as error:
            _log.warning("A task %r could not be answered: %s.", task_name, error)
            return make_reply(ReturnCode.BAD_TASK_DATA)
