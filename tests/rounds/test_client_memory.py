"""Client memory of callbacks, the current visit, and metrics reported by aggregators."""

import itertools
import math

import lightning as L
import pytest
import torch

from lightning_fed import FederatedCallback, Federation, FolderStore, MemoryStore
from lightning_fed.algorithms import FedAvg
from lightning_fed.rule import Aggregator
from tests import models
from tests.breadth import quick
from tests.recorders import MemoryLogger, Recorder

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SEED = 5
PERSONAL = {"personal": ["net.head.*"], "optimizer_state": "keep"}


def find(trainer):
    return next(callback for callback in trainer.callbacks if isinstance(callback, Federation))


class Tally(FederatedCallback):
    def __init__(self):
        self.found = []

    def on_client_start(self, trainer, module, client, broadcast):
        self.found.append((broadcast.round, client, dict(find(trainer).client_memory)))

    def on_client_end(self, trainer, module, client, update):
        memory = find(trainer).client_memory
        memory["visits"] = memory.get("visits", torch.tensor(0)) + 1
        memory["bias"] = update.state["net.base.0.bias"].clone()


@pytest.mark.parametrize(
    ("kind", "options"),
    quick(itertools.product(["memory", "folder"], [{}, PERSONAL]), [("memory", {}), ("folder", PERSONAL)]),
)
def test_what_a_client_keeps(kind, options, federated_trainer, tmp_path):
    """A client finds exactly its stored memory; the store also holds personal layers and optimizer state."""
    store = MemoryStore() if kind == "memory" else FolderStore(tmp_path / "clients")
    tally, recorder = Tally(), Recorder()
    trainer = federated_trainer(
        max_rounds=5, clients_per_round=2, callbacks=[tally, recorder], store=store, seed=SEED, **options
    )
    trainer.fit(models.Module(models.BaseAndHead(), models.adam), models.as_datasets(models.vectors()))
    visits, biases = {}, {}
    for (_, client, memory), visit in zip(tally.found, recorder.visits, strict=True):
        assert set(memory) == ({"visits", "bias"} if client in visits else set())
        if client in visits:
            assert memory["visits"] == visits[client]
            assert torch.equal(memory["bias"], biases[client])
        visits[client] = visits.get(client, 0) + 1
        biases[client] = visit.update["net.base.0.bias"]
    assert max(visits.values()) > 2
    kept = {name for name in store.get(recorder.visits[-1].client) if name.startswith("memory:")}
    assert kept == {"memory:visits", "memory:bias"}


def test_it_is_kept_only_if_the_update_was_good(federated_trainer):
    class Nonsense(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1:
                update.state["net.base.0.bias"] = update.state["net.base.0.bias"] * math.nan

    tally = Tally()
    trainer = federated_trainer(max_rounds=3, callbacks=[tally, Nonsense()])
    trainer.fit(models.Module(models.BaseAndHead()), models.as_datasets(models.vectors({"a": 20})))
    assert [int(memory.get("visits", 0)) for _, _, memory in tally.found] == [0, 1, 1]


def test_nothing_is_kept_by_itself(federated_trainer):
    trainer = federated_trainer(max_rounds=1)
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors({"a": 20})))
    assert find(trainer).store.get("a") is None


class Watch(FederatedCallback):
    def __init__(self):
        self.seen = []

    def note(self, hook, trainer):
        federation = find(trainer)
        visit = federation.current_visit
        if visit is None:
            assert federation.current_client is None
            with pytest.raises(RuntimeError, match="No client is training: a client's memory is only available during"):
                _ = federation.client_memory
        else:
            assert federation.current_client == visit.visit.client
            assert federation.client_memory == {}
        self.seen.append((hook, None if visit is None else (visit.visit.client, visit.num_batches)))

    def on_client_start(self, trainer, module, client, broadcast):
        self.note("start", trainer)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.note("batch", trainer)

    def on_client_end(self, trainer, module, client, update):
        self.note("end", trainer)

    def on_server_aggregate(self, trainer, module, state):
        self.note("aggregate", trainer)

    def on_train_epoch_end(self, trainer, module):
        self.note("epoch end", trainer)


def test_whose_visit_it_is(federated_trainer):
    """From the loaded model until the sent update."""
    watch = Watch()
    trainer = federated_trainer(max_rounds=1, callbacks=[watch])
    trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors({"a": 40, "b": 20})))
    assert watch.seen == [
        ("start", ("a", 2)),
        ("batch", ("a", 2)),
        ("batch", ("a", 2)),
        ("end", ("a", 2)),
        ("start", ("b", 1)),
        ("batch", ("b", 1)),
        ("end", ("b", 1)),
        ("aggregate", None),
        ("epoch end", None),
    ]


def test_an_error_in_the_answer_names_the_visit(federated_trainer):
    class Trouble(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            if client == "b":
                raise ZeroDivisionError

    trainer = federated_trainer(max_rounds=1, callbacks=[Trouble()])
    with pytest.raises(ZeroDivisionError) as caught:
        trainer.fit(models.Module(models.mlp()), models.as_datasets(models.vectors({"a": 40, "b": 20})))
    assert caught.value.__notes__ == ["Raised in round 1, in the visit of client 'b'."]


class Reporting(Aggregator):
    """FedAvg with the number of averaged clients over all rounds as a metric."""

    def __init__(self):
        self.inner = FedAvg()
        self.count = 0

    def start(self, info, state):
        self.inner.start(info, state)

    def broadcast(self, request):
        return self.inner.broadcast(request)

    def receive(self, update):
        self.inner.receive(update)
        self.count += 1

    def merge(self, other):
        self.inner.merge(other.inner)

    def aggregate(self):
        return self.inner.aggregate()

    def metrics(self):
        return {"reporting/count": float(self.count)}


def test_what_an_aggregator_reports_is_logged(federated_trainer):
    """For every round with a new global model, visible to callbacks."""

    class Nonsense(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1:
                update.state["net.0.bias"] = update.state["net.0.bias"] * math.nan

    class Look(L.Callback):
        def on_validation_start(self, trainer, module):
            if "reporting/count" in trainer.callback_metrics:
                seen.append(float(trainer.callback_metrics["reporting/count"]))

    seen, logger = [], MemoryLogger()
    clients = models.as_datasets(models.vectors({"a": 40, "b": 20}))
    trainer = federated_trainer(max_rounds=3, method=Reporting(), callbacks=[Nonsense(), Look()], logger=logger)
    trainer.fit(models.Module(models.mlp()), clients, clients)
    assert logger.curve("reporting/count") == [(0, 2.0), (2, 4.0)]
    assert seen[0] == 2.0
    assert seen[-1] == 4.0
