"""FedAwS on the server (Algorithm 1): separates class vectors."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, TypeAlias

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn

from lightning_fed.algorithms.fedaws.spreadout import spreadout_margin, spreadout_top_k
from lightning_fed.argument_checks import check_count, check_nonnegative, check_option, check_positive
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.callbacks.training_trace import find_class_task
from lightning_fed.errors import OptionError
from lightning_fed.federated_callback import FederatedCallback
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State
from lightning_fed.model.entries import layer_prefixes, live_entries, parameter_entries
from lightning_fed.numerics.precision import at_least_float32

Variant: TypeAlias = Literal["top_k", "margin"]

_COMPARISON = 5  # random stream separate from the schedule's streams


class SpreadOut(FederatedCallback):
    r"""Increases the distances between class vectors, the rows of the last layer, after each round.

    .. math:: W \leftarrow \tilde W - \lambda \eta \nabla_W \, \mathrm{reg}(\tilde W)

    Here :math:`\tilde W` is the last layer's weight after averaging, and :math:`\mathrm{reg}` is the regulariser chosen
    with ``variant``. In FedAwS, clients only have positive labels, so local losses do not separate classes of different
    clients. Reference: Yu et al., ICML 2020, Algorithm 1, equations 7 and 8.

    The variant ``"top_k"`` separates each class received by a client in this round from the nearest classes
    (:func:`~lightning_fed.algorithms.fedaws.spreadout_top_k`). The variant ``"margin"`` separates all pairs of classes
    (:func:`~lightning_fed.algorithms.fedaws.spreadout_margin`).

    Args:
        variant: ``"top_k"`` or ``"margin"``.
        k: Number of nearest classes for ``"top_k"``; the authors use 10, and 100 for very many classes.
        strength: Strength :math:`\lambda`. Tune this value: good values depend on the lengths of class vectors. The
            authors report 10 to 100 for unit vectors. For untrained vectors with length 0.57, 0.1 was best.
        margin: Cosine distance :math:`\nu` below which ``"margin"`` separates two class vectors.
        lr: Learning rate :math:`\eta`; by default the last layer's learning rate in this round's local training.
        comparison: Number of classes drawn per round as candidates for nearest classes; by default all classes.
        normalize: Whether to preserve the lengths of class vectors.
        entry: Name of the weight with one row per class; ``"auto"`` finds the classifier with a trial training step.

    Raises:
        ValueError: If an option is invalid; in ``fit``, if the weight does not exist or is not sent to the server.
        MisconfigurationException: In ``fit``, if ``"auto"`` finds no classifier.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(max_rounds=10, callbacks=[SpreadOut(k=5)], logger=False)
    """

    supports_vectorize = True
    shared_attribute = "_rows"

    def __init__(
        self,
        variant: Variant = "top_k",
        k: int = 10,
        strength: float = 10.0,
        margin: float = 0.9,
        lr: float | None = None,
        comparison: int | None = None,
        normalize: bool = True,
        entry: str = "auto",
    ) -> None:
        check_option("variant", variant, Variant)
        self.variant = variant
        self.k = check_count("k", k)
        self.strength = check_nonnegative("strength", strength)
        self.margin = check_positive("margin", margin)
        self.lr = None if lr is None else check_nonnegative("lr", lr)
        self.comparison = None if comparison is None else check_count("comparison", comparison)
        self.normalize = normalize
        self.entry = entry
        self._name, self._rate = "" if entry == "auto" else entry, 0.0
        self._rows: dict[Client, Tensor | None] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self.entry == "auto":
            layer = find_class_task(trainer, pl_module, "name the `entry` that holds one row per class").layer
            self._name = f"{layer_prefixes(pl_module)[pl_module.get_submodule(layer)]}weight"

    def on_server_round_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._rows = {}
        weight = live_entries(module).get(self._name)
        if weight is None or weight.ndim < 2:
            raise OptionError(
                f"Expected `entry` to be a weight of {type(module).__name__} with one row per class, but got"
                f" {self._name!r}."
            )
        self._rate = _learning_rate(trainer, module, self._name) if self.lr is None else self.lr

    def on_server_send(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        if self._name not in broadcast.state:
            raise OptionError(f"Expected `entry` to be a shared entry, but {self._name!r} is personal or frozen.")

    def on_server_receive(self, trainer: L.Trainer, module: L.LightningModule, update: ClientUpdate) -> None:
        self._rows[update.client] = update.rows.get(self._name)

    def on_server_aggregate(self, trainer: L.Trainer, module: L.LightningModule, state: State) -> None:
        old = state[self._name]
        with torch.enable_grad():
            weight = at_least_float32(old.detach()).flatten(1).clone().requires_grad_()
            (gradient,) = torch.autograd.grad(self._value(trainer, weight), weight)
        weight = weight.detach()
        new = weight - self.strength * self._rate * gradient
        if self.normalize:
            new = _restore_lengths(new, weight)
        state[self._name] = new.view_as(old).to(old.dtype)

    def _value(self, trainer: L.Trainer, weight: Tensor) -> Tensor:
        if self.variant == "margin":
            return spreadout_margin(weight, self.margin)
        federation = find_federation(trainer)
        report, comparison = federation.server.report, None
        if self.comparison is not None and self.comparison < len(weight):
            seeds = np.random.SeedSequence([federation.schedule.seed, report.round, _COMPARISON])
            drawn = np.random.default_rng(seeds).choice(len(weight), self.comparison, replace=False)
            comparison = torch.from_numpy(np.sort(drawn))
        return spreadout_top_k(weight, self._classes(report.received, len(weight)), self.k, comparison)

    def _classes(self, clients: Iterable[Client], count: int) -> Tensor:
        held = torch.zeros(count, dtype=torch.bool)
        for client in clients:
            rows = self._rows[client]
            held[slice(None) if rows is None else rows.cpu()] = True
        return held.nonzero()[:, 0]


def _restore_lengths(new: Tensor, old: Tensor) -> Tensor:
    lengths = [torch.linalg.vector_norm(rows, dim=1, keepdim=True) for rows in (old, new)]
    changed = (new != old).any(1, keepdim=True)
    # Unchanged rows stay bit-identical.
    return torch.where(changed, new * (lengths[0] / lengths[1]), old)


def _learning_rate(trainer: L.Trainer, module: nn.Module, name: str) -> float:
    groups = [group for optimizer in trainer.optimizers for group in optimizer.param_groups]
    weights = {parameter for parameter, entry in parameter_entries(module).items() if entry == name}
    owners = [group for group in groups if not weights.isdisjoint(group["params"])]
    return float((owners or groups)[0]["lr"])  # the first group if no optimizer has the parameter
