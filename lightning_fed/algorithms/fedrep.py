"""A shared representation and a personal head per client, which train one after the other.

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
    """In the first epochs of a visit the personal entries train, the head; in the others the shared ones, the body.

    What does not train has no gradient: the optimizer leaves it as it is, with momentum and weight decay too.
    BatchNorm's running statistics follow the data in both phases. Parameters without gradient from the start (of a
    frozen backbone, or ``frozen``) keep having none.

    The order stays where the work is only partly done: a straggler that gets through no more than its head's epochs
    sends the body as it came, and its head has learned.

    Args:
        head_epochs: Epochs that train the head; the visit's others (``local_epochs`` less these) train the body.

    Raises:
        ValueError: If ``head_epochs`` is below 1.
        MisconfigurationException: In ``fit``, if visits have fewer epochs or are counted in steps, or if the module has
            no parameters that stay at home, or none that travel.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(
        ...     max_rounds=10, local_epochs=3, personal=["*head*"], callbacks=[HeadThenBody(2)], logger=False
        ... )

    References:
        Collins et al., ICML 2021, Algorithm 1.

    """

    keeps_privacy = True

    def __init__(self, head_epochs: int) -> None:
        check_count("head_epochs", head_epochs)
        self.head_epochs = head_epochs
        self._head: list[nn.Parameter] = []
        self._frozen: list[nn.Parameter] = []
        self._left = 0  # batches of the first phase

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks the lengths of the visits."""
        if stage != "fit":
            return
        schedule = find_federation(trainer).schedule
        if schedule.local_steps is not None or schedule.local_epochs < self.head_epochs:
            raise MisconfigurationException(
                f"`HeadThenBody(head_epochs={self.head_epochs})` divides the epochs of a visit: set `local_epochs` to"
                f" at least as many, and no `local_steps`, but got local_epochs={schedule.local_epochs} and"
                f" local_steps={schedule.local_steps}."
            )

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Begins with the head."""
        self._release()
        parameters = [(name, value) for value, name in parameter_entries(module).items() if value.requires_grad]
        body = [parameter for name, parameter in parameters if name in broadcast.state]
        self._head = [parameter for name, parameter in parameters if name not in broadcast.state]
        if not body or not self._head:
            raise MisconfigurationException(
                f"`HeadThenBody` trains what stays at home, then what travels, but {len(self._head)} parameters stay"
                f" and {len(body)} travel: name those of the head in `personal`."
            )
        self._left = self.head_epochs * (find_federation(trainer).population.batches_per_epoch(client) or 0)
        self._freeze(body)

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Goes on with the body after the head's last batch."""
        if self._left:
            self._left -= 1
            if not self._left:
                self._release()
                self._freeze(self._head)

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> None:
        """Lets everything train again."""
        self._release()

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Lets everything train again, also where nothing came of the visit."""
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
    """A shared representation and a personal head per client, which train one after the other.

    A visit has ``head_epochs`` epochs in which the head trains and the body does not, then ``body_epochs`` the other
    way round (:class:`~lightning_fed.callbacks.HeadThenBody`). Only the body is sent and averaged.

    After the last round the authors let every client train its head once more, on the final body. That is one more
    round, with all clients and ``body_epochs=0``, resumed from the last checkpoint.

    - Sends: the model without its head, both ways.
    - Keeps: every client its head.
    - Costs: 10 epochs of the head for 1 of the body by default.
    - For: clients whose labels mean, or weigh, different things, and whose inputs are alike.

    Args:
        head: The personal entries: a name pattern (``"head.*"``), a module type, or several. ``"auto"`` is the layer
            that makes the logits (:func:`~lightning_fed.modules.find_classifier`), which is named in the log.
        head_epochs: Epochs of a visit that train the head; ``None`` for 10, or for what ``local_epochs`` leaves.
        body_epochs: Epochs of a visit that train the body; 0 leaves the body as it is. ``None`` for 1, or for what
            ``local_epochs`` and ``head_epochs`` leave.
        local_epochs: Epochs of a visit, where both together are given.
        aggregator: The method for the body, by name or as an object.

    Raises:
        ValueError: If ``head_epochs`` is below 1 or ``body_epochs`` below 0, or they do not add up to ``local_epochs``;
            in ``fit``, if a selector matches nothing.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(FedRep("head.*", head_epochs=10, body_epochs=5)).schedule.local_epochs
        15

    References:
        Collins et al., ICML 2021, Algorithm 1.

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
    """Epochs that train the head, and the body."""
    if body is None:
        body = 1 if head is None or total is None else total - head
    if head is None:
        head = 10 if total is None else total - body
    if total is not None and (head < 1 or head + body != total):
        raise ValueError(
            f"Expected `head_epochs` (at least 1) and `body_epochs` to add up to `local_epochs`, {total}, but got"
            f" {head} and {body}."
        )
    return head, check_count("body_epochs", body, lowest=0)
