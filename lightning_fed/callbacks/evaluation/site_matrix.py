"""Evaluates each client's model and the global model on every client's data."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed.callbacks.evaluation.client_evaluation import ClientEvaluation, check_clients_data
from lightning_fed.callbacks.evaluation.tables import GLOBAL, Table, row_name
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.lightning.internals import find_callbacks
from lightning_fed.messages import Client, ClientUpdate, State
from lightning_fed.model.entries import copy_state, live_entries, load_entries

_log = logging.getLogger(__name__)


class SiteMatrix(FederatedCallback):
    """Evaluates each client's model and the global model on every client's data, after the fit.

    A client's model is the state sent in the last round, before averaging. The matrix is logged in Markdown, and
    written to ``<folder>/sites.csv`` and ``sites.png``. The cost is one evaluation on all clients per model, and memory
    for the models of one round. Server and clients need :class:`ClientEvaluation`.

    Args:
        metric: Name of the value in the matrix, as logged by the validation step.
        folder: Folder for files; if ``None``, the matrix is only logged.

    Raises:
        MisconfigurationException: In ``fit``, if personal entries, privacy or compression hide the clients' complete
            models from the server, or if no client has validation data.

    Example:
        >>> matrix = SiteMatrix("val_acc")

    References:
        NVFLARE's "cross-site model evaluation".
    """

    supports_vectorize = True
    shared_attribute = "_models"

    def __init__(self, metric: str, folder: str | os.PathLike[str] | None = None) -> None:
        self.metric = metric
        self.folder = None if folder is None else Path(folder)
        self.table: Table | None = None
        self._models: dict[Client, State] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        chain, reason = federation.server.chain, ""
        if federation.has_personal_entries:
            reason = "personal entries never leave the clients, so the server receives no complete client model"
        elif chain.reveals != "update" or chain.is_coded:
            reason = "privacy or compression hides the models of single clients from the server"
        elif not find_callbacks(trainer, ClientEvaluation):
            reason = "a `ClientEvaluation` callback is required"
        if reason:
            raise MisconfigurationException(f"`SiteMatrix` cannot be computed: {reason}.")

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_clients_data(trainer, "SiteMatrix")

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._models = {}

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        self._models[update.client] = {name: value.cpu() for name, value in copy_state(update.state).items()}

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        federation = find_federation(trainer)
        if not federation.has_server:
            return
        evaluation = find_callbacks(trainer, ClientEvaluation)[0]
        received = federation.server.report.received
        models = {row_name(client): model for client, model in self._models.items() if client in received}
        entries, values, sites = live_entries(pl_module), dict[tuple[str, str], float](), dict[str, None]()
        with federation.averages_in_place():
            initial_state = copy_state(entries)
            try:
                for name, model in {GLOBAL: {}, **models}.items():
                    if any(key not in entries or value.shape != entries[key].shape for key, value in model.items()):
                        _log.warning(
                            "The matrix excludes the model of client %s, whose entries differ from the global model's.",
                            name,
                        )
                        continue
                    load_entries(
                        entries,
                        {**initial_state, **{key: value.to(entries[key].device) for key, value in model.items()}},
                    )
                    for client, report in evaluation.evaluate(trainer, pl_module).items():
                        site = row_name(client)
                        sites[site] = None
                        if self.metric in report.values:
                            values[name, site] = report.values[self.metric]
            finally:
                load_entries(entries, initial_state)
        if not values:
            _log.warning("`SiteMatrix` has no table, because no client logs %r in `validation_step`.", self.metric)
            return
        rows = sorted(models, key=[*sites, *models].index)  # a diagonal of clients with their own models
        self.table = Table(f"{self.metric} of the model of", [GLOBAL, *rows], list(sites), values)
        if trainer.is_global_zero:
            _log.info("Models by sites:\n\n%s\n", self.table.markdown())
            if self.folder is not None:
                self.table.write(self.folder / "sites")
                self.table.draw(self.folder / "sites.png")
