"""Evaluation of client models after local training, before averaging."""

from __future__ import annotations

import lightning as L

from lightning_fed.argument_checks import check_count
from lightning_fed.callbacks.evaluation.client_evaluation import check_clients_data, loaders_of
from lightning_fed.callbacks.evaluation.data_pass import evaluate_data
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.data.population import seeded_generators
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Client, ClientUpdate


class LocalEvaluation(FederatedCallback):
    """Evaluates each client's model on the client's validation data, directly after local training.

    :class:`~lightning_fed.callbacks.ClientEvaluation` evaluates the global model instead. Locally trained models score
    much higher if clients have different classes. For each value logged in ``validation_step``, the callback logs the
    mean over the round's clients as ``clients/local/<metric>``, every ``every_n_rounds`` rounds. The validation data
    must be a mapping by client. If clients are remote, add the callback on the server and on the clients.

    Raises:
        ValueError: If ``every_n_rounds`` is below 1.
        MisconfigurationException: In ``fit``, if no client has validation data.

    Example:
        >>> local = LocalEvaluation(every_n_rounds=5)

    References:
        Yao et al., ICIP 2019, probably report this measure.
    """

    supports_vectorize = True

    def __init__(self, every_n_rounds: int = 1) -> None:
        self.every_n_rounds = check_count("every_n_rounds", every_n_rounds)

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        check_clients_data(trainer, "LocalEvaluation")

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        if (trainer.current_epoch + 1) % self.every_n_rounds:
            return
        loaders = loaders_of(trainer, "validation")
        if client in loaders:
            # The Trainer of a remote client does not validate, so the limit is 0 there.
            limit = None if find_federation(trainer).has_server else 1.0
            with seeded_generators():  # training draws the same random numbers with and without the evaluation
                values = evaluate_data(trainer, module, loaders[client], limit=limit, keeps=True).values
            update.metrics |= {f"local/{name}": value for name, value in values.items()}
