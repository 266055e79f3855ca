"""A visit in two phases: what stays at home trains first, then what travels.

Collins, Hassani, Mokhtari & Shakkottai, "Exploiting Shared Representations for Personalized Federated Learning", ICML
2021, Algorithm 1. https://arxiv.org/abs/2102.07078
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_fed.argument_checks import check_count
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.messages import Broadcast, Client, ClientUpdate
from lightning_fed.rounds.callback import FederatedCallback


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
        parameters = [(name, value) for name, value in module.named_parameters() if value.requires_grad]
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

    def on_train_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Lets everything train again, also where the fit ended inside a visit."""
        self._release()

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        """Likewise."""
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
