"""Ditto: each client also trains a personal model, regularised towards the global model.

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
    r"""Trains the global model in the first local epochs, and then the client's personal model.

    The personal model :math:`v_i` starts from the client's first broadcast and stays on the client. Training uses fresh
    optimizers and the gradients

    .. math:: g(v_i) + \lambda (v_i - x)

    with the personal model's loss gradient :math:`g` and the round's global model :math:`x`. The client's update equals
    the update without this callback bit for bit. Evaluation uses :math:`v_i`, or before the client's first round the
    global model. Reference: Li et al., ICML 2021, Algorithm 1.

    Gradient terms from other methods, such as SCAFFOLD, apply only in the global epochs. ``train_loss`` includes the
    losses of both models. A client with NaN or infinite values in :math:`v_i` is excluded from the round, and keeps the
    previous :math:`v_i`.

    Args:
        lam: Strength :math:`\lambda`, at least 0.
        global_epochs: Epochs for the global model, at least 1. The remaining ``local_epochs`` train the personal model.
            ``local_steps`` is not supported.

    Raises:
        ValueError: If ``lam`` is negative or not finite, or ``global_epochs`` is below 1.
        MisconfigurationException: In ``fit``, if no epochs remain for the personal model, if ``local_steps`` is set, or
            if clients receive only some rows of a tensor.

    Example:
        >>> from lightning_fed import FederatedTrainer
        >>> personal = PersonalModel(0.1, global_epochs=2)
        >>> trainer = FederatedTrainer(max_rounds=10, local_epochs=4, callbacks=[personal], logger=False)
    """

    has_own_models = True
    leaves_update = True  # `on_client_end` only trains the personal model

    def __init__(self, lam: float, global_epochs: int = 1) -> None:
        self.lam = check_nonnegative("lam", lam)
        self.global_epochs = check_count("global_epochs", global_epochs)
        super().__init__()
        self._first_model: State = {}  # for a client without a personal model

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        schedule = find_federation(trainer).schedule
        if schedule.local_steps is not None or schedule.local_epochs <= self.global_epochs:
            raise MisconfigurationException(
                f"Expected epochs for the personal model after global_epochs={self.global_epochs} for the global model,"
                f" but got local_epochs={schedule.local_epochs} and local_steps={schedule.local_steps}: set a larger"
                " `local_epochs`, and no `local_steps`."
            )

    def on_client_start(
        self, trainer: L.Trainer, module: L.LightningModule, client: Client, broadcast: Broadcast
    ) -> None:
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
        visit = find_federation(trainer).open_visit
        assert visit is not None
        if visit.main_batches is None or visit.planned.num_batches <= visit.main_batches:
            return
        model = without_prefix(visit.memory, OWN_MODEL) or self._first_model
        entries, optimizer_state = visit.local.client_entries(), visit.optimizers.capture()
        visit.local.load(model)
        visit.optimizers.start_visit()
        visit.clear_gradients()
        visit.trains_second_model = True
        for _ in range(visit.planned.num_batches - visit.main_batches):
            yield
        model = visit.local.client_entries()
        visit.local.load(entries)
        visit.optimizers.resume(optimizer_state)
        visit.clear_gradients()
        visit.trains_second_model = False
        fault = find_non_finite(model)
        if fault is not None:
            raise ClientFault(f"in the client's personal model, {fault}")
        visit.memory.update(with_prefix(model, OWN_MODEL))

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Optimizer) -> None:
        visit = find_federation(trainer).open_visit
        if visit is not None and visit.trains_second_model:
            add_to_gradients(trainer, optimizer, self.term, self.lam)

    def on_client_visit_end(self, trainer: L.Trainer, module: L.LightningModule, client: Client) -> None:
        super().on_client_visit_end(trainer, module, client)
        self._first_model = {}

    def term(self, parameter: nn.Parameter) -> Tensor | None:
        return as_real(parameter.detach()) - self.tensors[parameter] if parameter in self.tensors else None


@register
class Ditto(Method):
    r"""Trains a global model, and personal models regularised towards the global model.

    .. math:: \min_{v_i} F_i(v_i) + \frac{\lambda}{2} \lVert v_i - x \rVert^2

    Here :math:`v_i` is the personal model of client :math:`i`, :math:`F_i` the client's loss, and :math:`x` the global
    model. A client first trains the global model, and then the personal model
    (:class:`~lightning_fed.callbacks.PersonalModel`). The global model equals the result of ``aggregator`` bit for bit.
    Evaluation uses personal models. Reference: Li et al., ICML 2021, Algorithm 1.

    - Sends: 1 model down, 1 up.
    - Keeps: 1 model per client.
    - Costs: ``personal_epochs`` more epochs per round; by default twice the training.
    - For: heterogeneous clients that need personal models, also in federations with malicious clients.

    Args:
        lam: Strength :math:`\lambda`. Large values keep personal models near the global model. The authors tune
            :math:`\lambda` in {0.05, 0.1, 0.2, 1, 2}.
        local_epochs: Epochs per round for the global model.
        personal_epochs: Epochs per round for the personal model; by default ``local_epochs``.
        aggregator: Federated method for the global model, by name or as an object.

    Raises:
        ValueError: If ``lam`` is negative or not finite, or a number of epochs is below 1.

    Example:
        >>> from lightning_fed import Federation
        >>> Federation(Ditto(lam=0.1, local_epochs=2)).schedule.local_epochs
        4
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
