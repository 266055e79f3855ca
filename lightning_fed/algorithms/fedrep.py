"""FedRep: a shared representation and a personal head per client, trained one after the other.

Collins, Hassani, Mokhtari & Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, Algorithm 1. https://arxiv.org/abs/2102.07078
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fed.algorithms.fedper import head_selectors
from lightning_fed.argument_checks import check_count
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Broadcast, Client, ClientUpdate
from lightning_fed.method import Method, register
from lightning_fed.model.entries import Selector, parameter_entries
from lightning_fed.rule import Aggregator


class HeadThenBody(FederatedCallback):
    """Trains the personal head in the first local epochs, and then the shared body.

    The head consists of the parameters in the federation's option ``personal``, and the body of all other parameters.
    While the head trains, the body is frozen, and vice versa. BatchNorm's running statistics change in both phases.
    Reference: Collins et al., ICML 2021, Algorithm 1.

    Args:
        head_epochs: Epochs for the head, at least 1. The remaining ``local_epochs`` train the body.

    Raises:
        MisconfigurationException: In ``fit``, if ``local_epochs`` is smaller than ``head_epochs``, ``local_steps`` is
            set, or the head or the body has no trainable parameters.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(
        ...     max_rounds=10, local_epochs=3, personal=["*head*"], callbacks=[HeadThenBody(2)], logger=False
        ... )
    """

    keeps_privacy = True

    def __init__(self, head_epochs: int) -> None:
        check_count("head_epochs", head_epochs)
        self.head_epochs = head_epochs
        self._head: list[nn.Parameter] = []
        self._frozen: list[nn.Parameter] = []
        self._left = 0  # batches in the first phase

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        schedule = find_federation(trainer).schedule
        if schedule.local_steps is not None or schedule.local_epochs < self.head_epochs:
            raise MisconfigurationException(
                f"Expected `local_epochs` to be at least head_epochs={self.head_epochs} of `HeadThenBody`, and no"
                f" `local_steps`, but got local_epochs={schedule.local_epochs} and local_steps={schedule.local_steps}."
            )

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        self._release()
        parameters = [(name, value) for value, name in parameter_entries(module).items() if value.requires_grad]
        body = [parameter for name, parameter in parameters if name in broadcast.state]
        self._head = [parameter for name, parameter in parameters if name not in broadcast.state]
        if not body or not self._head:
            raise MisconfigurationException(
                "`HeadThenBody` needs trainable personal parameters (the head, trained first) and trainable shared "
                f"parameters (the body, trained second), but got {len(self._head)} personal and {len(body)} shared "
                "parameters: name the head's parameters in `personal`."
            )
        self._left = self.head_epochs * (find_federation(trainer).population.batches_per_epoch(client) or 0)
        self._freeze(body)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._left:
            self._left -= 1
            if not self._left:
                self._release()
                self._freeze(self._head)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        self._release()

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        self._release()

    def _freeze(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.requires_grad_(False)
            parameter.grad = None
            self._frozen.append(parameter)

    def _release(self) -> None:
        for parameter in self._frozen:
            parameter.requires_grad_(True)
        self._frozen = []
        self._left = 0


@register
class FedRep(Method):
    """Trains a personal head per client, and then a shared representation.

    In each round a client trains only the head for ``head_epochs`` epochs, then only the body for ``body_epochs``
    epochs (:class:`~lightning_fed.callbacks.HeadThenBody`). Only the body is sent. Reference: Collins et al., ICML
    2021.

    After the last round the authors train each client's head once more on the final body. For such a round, resume from
    the last checkpoint with all clients and ``body_epochs=0``.

    - Sends: the model without the head, both ways.
    - Keeps: a head per client.
    - Costs: by default 10 epochs for the head and 1 for the body.
    - For: clients with similar inputs whose labels have different meanings or frequencies.

    Args:
        head: Layers of the head: a name pattern (``"head.*"``), a module type, or several. The default is the
            classifier.
        head_epochs: Epochs per round for the head, at least 1, by default ``local_epochs - body_epochs`` or 10.
        body_epochs: Epochs per round for the body, at least 0, by default ``local_epochs - head_epochs`` or 1.
        local_epochs: Total epochs per round, by default the sum. If only this number is given, ``body_epochs`` is 1.
        aggregator: Federated method for the body, by name or as an object.

    Raises:
        ValueError: If the numbers of epochs are invalid, or ``head`` matches nothing.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(FedRep("head.*", head_epochs=10, body_epochs=5)).schedule.local_epochs
        15
    """

    def __init__(
        self,
        head: Selector | Sequence[Selector] = "auto",
        head_epochs: int | None = None,
        body_epochs: int | None = None,
        local_epochs: int | None = None,
        aggregator: str | Method | Aggregator = "fedavg",
    ) -> None:
        head_epochs, body_epochs = _divide_epochs(head_epochs, body_epochs, local_epochs)
        super().__init__(
            aggregator,
            [HeadThenBody(head_epochs)],
            personal=head_selectors(head),
            local_epochs=head_epochs + body_epochs,
            local_steps=None,
        )


def _divide_epochs(head: int | None, body: int | None, total: int | None) -> tuple[int, int]:
    if body is None:
        body = 1 if head is None or total is None else total - head
    if head is None:
        head = 10 if total is None else total - body
    if total is not None and (head < 1 or head + body != total):
        raise ValueError(
            f"Expected `head_epochs` (at least 1) and `body_epochs` to add up to `local_epochs`, {total}, but got "
            f"{head} and {body}."
        )
    return head, check_count("body_epochs", body, lowest=0)
