"""Client state after a rejected update equals the state without participation."""

import itertools

import pytest
import torch

from lightning_fed import Faults, FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import TrimmedMean
from lightning_fed.client.client_store import FolderStore, MemoryStore
from lightning_fed.errors import BadUpdates
from lightning_fed.steps import CollectingStep
from tests import models
from tests.breadth import quick
from tests.recorders import assert_same

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

CLIENTS = {"ann": 9, "bob": 14, "cid": 6}


class RefusesLate(CollectingStep):
    def collect(self, updates):
        if self.info.round == 1 and "bob" in [update.client for update, _ in updates]:
            raise BadUpdates({"bob": "it is too late"})
        return updates


class Implausible(FederatedCallback):
    def on_server_aggregate(self, trainer, module, state):
        if trainer.current_epoch == 1:
            next(iter(state.values())).fill_(torch.nan)


class Remembers(FederatedCallback):
    def on_client_end(self, trainer, module, client, update):
        memory = trainer.federation.client_memory
        memory["visits"] = memory.get("visits", torch.tensor(0)) + 1


CAUSES = {
    "a step, at the end": ({"steps": [RefusesLate()]}, [], {"bob"}),
    "a rule, at the end": ({"method": TrimmedMean(num_malicious=2)}, [], {"ann", "bob", "cid"}),
    "too few clients": (
        {"faults": Faults(min_clients=3, max_failed_rounds=None), "steps": [RefusesLate()]}, [], {"ann", "bob", "cid"},
    ),
    "an implausible aggregate": ({}, [Implausible()], {"ann", "bob", "cid"}),
}  # fmt: skip


def fit(federated_trainer, store, rounds, callbacks=(), **options):
    trainer = federated_trainer(
        max_rounds=rounds, personal=["net.0.*"], optimizer_state="keep", store=store, seed=1, callbacks=[*callbacks],
        **{"faults": Faults(max_failed_rounds=None), **options},
    )  # fmt: skip
    torch.manual_seed(0)
    trainer.fit(models.Module(models.mlp(), models.momentum), models.as_datasets(models.vectors(CLIENTS)))
    return {client: store.get(client) for client in CLIENTS}


@pytest.mark.parametrize(
    ("cause", "kind"),
    quick(
        itertools.product(CAUSES, ["memory", "folder"]),
        [(cause, ("memory", "folder")[place % 2]) for place, cause in enumerate(CAUSES)],
    ),
)
def test_a_refused_client_keeps_what_it_had(cause, kind, federated_trainer, tmp_path):
    options, callbacks, refused = CAUSES[cause]

    def store(name):
        return MemoryStore() if kind == "memory" else FolderStore(tmp_path / name)

    never = "method" in options  # every round in these fits fails
    before = fit(federated_trainer, store("one"), 1, [Remembers(), *callbacks], **options)
    after = fit(federated_trainer, store("two"), 2, [Remembers(), *callbacks], **options)
    for client in CLIENTS:
        if never:
            assert before[client] is after[client] is None
        elif client in refused:
            assert_same(after[client], before[client])
            assert int(after[client]["memory:visits"]) == 1
        else:
            assert int(after[client]["memory:visits"]) == 2


def test_a_schedule_goes_on_from_clients_that_count(federated_trainer):
    """The median number of steps ignores rejected visits."""

    def per_batch(optimizer):
        return {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9), "interval": "step"}

    data = FederatedDataModule(models.as_datasets(models.vectors(CLIENTS)), batch_size=3)
    for steps, batches in (([], 3 + 3), ([RefusesLate()], 3 + 2)):
        trainer = federated_trainer(max_rounds=2, seed=1, steps=steps)
        trainer.fit(models.Module(models.mlp(), models.momentum, per_batch), datamodule=data)
        assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.9**batches)
