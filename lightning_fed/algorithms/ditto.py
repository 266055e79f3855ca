"""Ditto: beside the global model every client trains a model of its own, which is pulled towards the global one.

Li, Hu, Beirami & Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021, Algorithm 1.
https://arxiv.org/abs/2012.04221
"""

from __future__ import annotations

from collections.abc import Iterator

import lightning as L
from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.algorithms.client_pass import refuse_rows
from lightning_fed.algorithms.gradient_terms import GradientTerm, add_to_gradients
from lightning_fed.argument_checks import check_count, check_nonnegative
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.client.local_model import OWN_MODEL
from lightning_fed.errors import ClientFault
from lightning_fed.messages import Broadcast, Client, ClientUpdate, State, with_prefix, without_prefix
from lightning_fed.method import Method, register
from lightning_fed.model.entries import copy_state, find_non_finite, live_entries
from lightning_fed.numerics.precision import as_real
from lightning_fed.rule import Aggregator


class PersonalModel(GradientTerm):
    r"""In the first epochs of a visit the global model trains; in the others a model of the client's own.

    The client's own model :math:`v_i` starts from the first model that the client was sent, and stays in its memory. It
    trains on the client's data with fresh optimizers and with gradients

    .. math:: g(v_i) + \lambda (v_i - x)

    where :math:`x` is the model that the client was sent in this visit. Then the module, the optimizers and the
    per-step schedulers are again what the first epochs have made of them: what the client sends is what it would send
    without this callback, bit for bit. The client is evaluated with :math:`v_i`
    (``fed/val_acc/mean``, :meth:`Federation.client_state`), before its first visit with the global model.

    Of clients that have entries at home (``personal``) both models have their own; those of :math:`v_i` are not pulled.
    What the rule's callbacks add to gradients (SCAFFOLD's, FedProx's) is added in the first epochs only. A straggler
    that gets through no more than these leaves :math:`v_i` as it was. A client whose own model gets NaN or infinite
    values is left out of the round by name, as one whose update has them; its own model stays that of its last good
    visit. What the module logs in training (``train_loss``)
    is of both models, and of the module's random numbers those of the second come after those of the first.

    Args:
        lam: Strength :math:`\lambda` of the pull.
        global_epochs: Epochs that train the global model; the visit's others (``local_epochs`` less these) train the
            client's own.

    Raises:
        ValueError: If ``lam`` is negative or not finite, or ``global_epochs`` is below 1.
        MisconfigurationException: In ``fit``, if visits have no more epochs or are counted in steps, or clients hold
            some rows of an entry only.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> trainer = FederatedTrainer(
        ...     max_rounds=10, local_epochs=4, callbacks=[PersonalModel(0.1, global_epochs=2)], logger=False
        ... )

    References:
        Li et al., ICML 2021, Algorithm 1.

    """

    has_own_models = True
    leaves_update = True  # `on_client_end` trains a second model, and neither reads nor changes the update

    def __init__(self, lam: float, global_epochs: int = 1) -> None:
        self.lam = check_nonnegative("lam", lam)
        self.global_epochs = check_count("global_epochs", global_epochs)
        super().__init__(self.lam)
        self._first_model: State = {}  # for a client without a personal model

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        """Checks the lengths of the visits."""
        if stage != "fit":
            return
        schedule = find_federation(trainer).schedule
        if schedule.local_steps is not None or schedule.local_epochs <= self.global_epochs:
            raise MisconfigurationException(
                f"`PersonalModel(global_epochs={self.global_epochs})` divides the epochs of a visit: set `local_epochs`"
                f" to more, and no `local_steps`, but got local_epochs={schedule.local_epochs} and"
                f" local_steps={schedule.local_steps}."
            )

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
        """Stores the received model."""
        refuse_rows(broadcast, "Ditto")
        federation = find_federation(trainer)
        assert federation.open_visit is not None
        batches = federation.population.batches_per_epoch(client)
        federation.open_visit.main_batches = batches and self.global_epochs * batches
        self.use_broadcast(module, broadcast)
        if not any(name.startswith(OWN_MODEL) for name in federation.client_memory):
            entries = live_entries(module)
            policies = federation.policies
            self._first_model = copy_state({name: entries[name] for name in entries if policies[name] != "frozen"})

    def on_client_end(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, update: ClientUpdate
    ) -> Iterator[None]:
        """Trains the client's own model, on the batches after the global epochs."""
        visit = find_federation(trainer).open_visit
        assert visit is not None
        if visit.main_batches is None or visit.planned.num_batches <= visit.main_batches:
            return
        model = without_prefix(visit.memory, OWN_MODEL) or self._first_model
        with visit.second_model(model) as entries:
            for _ in range(visit.planned.num_batches - visit.main_batches):
                yield
            model = entries()
        fault = find_non_finite(model)
        if fault is not None:
            raise ClientFault(f"of its own model, {fault}")
        visit.memory.update(with_prefix(model, OWN_MODEL))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        """Pulls the client's own model towards the global one."""
        visit = find_federation(trainer).open_visit
        if visit is not None and visit.trains_second_model:
            add_to_gradients(trainer, optimizer, self.term, self.lam)

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        """Releases the tensors."""
        super().on_client_visit_end(trainer, module, client)
        self._first_model = {}

    def term(self, parameter: nn.Parameter) -> Tensor | None:
        """Difference between the parameter and the global model."""
        return as_real(parameter.detach()) - self.tensors[parameter] if parameter in self.tensors else None


@register
class Ditto(Method):
    r"""A global model as with FedAvg, and beside it a model of every client's own that is pulled towards it.

    .. math:: \min_{v_i} F_i(v_i) + \frac{\lambda}{2} \lVert v_i - x \rVert^2

    A visit has ``local_epochs`` epochs in which the global model trains, then ``personal_epochs`` in which the client's
    own does (:class:`~lightning_fed.callbacks.PersonalModel`). The global model and what travels are those of the rule,
    bit for bit; clients are evaluated with their own models. A client keeps one model.

    - Sends: 1 model down, 1 up.
    - Keeps: 1 model per client.
    - Costs: ``personal_epochs`` more epochs in a visit: twice the training by default.
    - For: clients that differ and want a model of their own, also where some send bad updates.

    Args:
        lam: Strength :math:`\lambda` of the pull: with 0 clients train alone, with a large one they keep the global
            model. The authors tune it in {0.05, 0.1, 0.2, 1, 2}.
        local_epochs: Epochs of a visit that train the global model.
        personal_epochs: Epochs of a visit that train the client's own; ``None`` for as many.
        aggregator: The method for the global model, by name or as an object.

    Raises:
        ValueError: If ``lam`` is negative or not finite, or epochs are below 1.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(Ditto(lam=0.1, local_epochs=2)).schedule.local_epochs
        4

    References:
        Li et al., ICML 2021, Algorithm 1.

    """

    def __init__(
        self,
        lam: float = 0.1,
        local_epochs: int = 1,
        personal_epochs: int | None = None,
        aggregator: str | Method | Aggregator = "fedavg",
    ) -> None:
        check_count("local_epochs", local_epochs)
        personal_epochs = local_epochs if personal_epochs is None else check_count("personal_epochs", personal_epochs)
        super().__init__(
            aggregator,
            [PersonalModel(lam, local_epochs)],
            local_epochs=local_epochs + personal_epochs,
            local_steps=None,
        )
