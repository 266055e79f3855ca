"""Hooks at the start and end of a round, and outside visits."""

import pytest
import torch
from torch.utils.data import Dataset

from lightning_fed import Faults, FederatedCallback, FederatedDataModule
from lightning_fed.algorithms import FedAvg
from tests import models
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Watch(FederatedCallback):
    def __init__(self):
        self.seen, self.models, self.ends = [], [], []

    def on_server_round_start(self, trainer, module):
        federation = trainer.federation
        assert federation.server.report.round == trainer.current_epoch
        assert federation.current_client is None
        shared = federation.local_model(module).global_state()
        assert_same(shared, state_of(module), shared)
        self.seen.append("round")
        self.models.append(state_of(module))
        torch.manual_seed(0)  # a visit's seed is set after this hook

    def on_server_send(self, trainer, module, client, broadcast):
        self.seen.append(client)

    def on_server_aggregate(self, trainer, module, state):
        self.seen.append("aggregate")

    def on_server_round_end(self, trainer, module, is_new):
        shared = trainer.federation.local_model(module).global_state()
        assert_same(shared, state_of(module), shared)
        assert is_new != all(torch.equal(value, self.models[-1][name]) for name, value in state_of(module).items())
        self.seen.append("new" if is_new else "old")

    def on_train_epoch_end(self, trainer, module):
        self.ends.append(state_of(module))


def test_it_comes_once_before_the_first_visit_with_the_global_model(federated_trainer):
    watch, module = Watch(), models.Module(models.mlp(), models.momentum)
    start = state_of(module)
    federated_trainer(max_rounds=3, callbacks=[watch]).fit(module, models.as_datasets(models.vectors({"a": 9, "b": 5})))
    assert watch.seen == ["round", "a", "b", "aggregate", "new"] * 3
    for before, after in zip(watch.models, [start, *watch.ends[:-1]], strict=True):
        assert_same(before, after)


def test_it_comes_in_a_round_without_visits_too(federated_trainer):
    class Lost(Dataset):
        def __len__(self):
            raise OSError("lost")

    watch = Watch()
    trainer = federated_trainer(max_rounds=2, callbacks=[watch], faults=Faults(max_failed_rounds=None))
    trainer.fit(models.Module(models.mlp()), {"a": Lost()})
    assert watch.seen == ["round", "old"] * 2


class Spoil(FederatedCallback):
    def on_server_aggregate(self, trainer, module, state):
        state["net.0.weight"] = torch.full_like(state["net.0.weight"], torch.nan)


class Stop(FederatedCallback):
    def on_train_batch_end(self, trainer, module, *arguments):
        raise KeyError("broken off")


class Enough(FederatedCallback):
    def on_train_batch_end(self, trainer, module, *arguments):
        trainer.should_stop = True


@pytest.mark.parametrize(
    ("other", "seen"),
    [
        (Spoil, ["round", "a", "b", "aggregate", "old"] * 2),
        (Stop, ["round", "a", "old"]),
        (Enough, ["round", "a", "aggregate", "new"]),  # the trained part counts
    ],
)
def test_the_end_comes_where_nothing_comes_of_a_round_too(other, seen, federated_trainer):
    watch, module = Watch(), models.Module(models.mlp(), models.momentum)
    trainer = federated_trainer(max_rounds=2, callbacks=[watch, other()], faults=Faults(max_failed_rounds=None))
    try:
        trainer.fit(module, models.as_datasets(models.vectors({"a": 40, "b": 5})))
    except KeyError:
        assert other is Stop
    assert watch.seen == seen


class Loaded(FederatedCallback):
    """Records the client of each model loaded outside visits."""

    def __init__(self):
        self.seen = []

    def on_fit_start(self, trainer, module):
        self.start = state_of(module)

    def on_server_round_start(self, trainer, module):
        self.seen.append("round")

    def on_model_loaded(self, trainer, module, client):
        """A trained client has a personal head; the global model has the initial head."""
        kept = None if client is None else trainer.federation.store.get(client)
        head = self.start["net.head.weight"] if kept is None else kept["net.head.weight"]
        assert torch.equal(module.net.head.weight, head)
        assert kept is None or not torch.equal(head, self.start["net.head.weight"])
        self.seen.append(client)

    def on_server_aggregate(self, trainer, module, state):
        self.seen.append("aggregate")

    def on_server_round_end(self, trainer, module, is_new):
        self.seen.append("end")


def test_clients_models_outside_of_visits_are_told_of(federated_trainer):
    """For FedDANE's second sample, while measuring statistics, and in evaluation."""
    loaded, clients = Loaded(), models.as_datasets(models.vectors({"a": 9, "b": 6}))
    federated_trainer(
        max_rounds=2, method="feddane", batch_norm="recalibrate", personal=["net.head.*"], callbacks=[loaded]
    ).fit(models.Module(models.BaseAndHead()), datamodule=FederatedDataModule(clients, clients))
    assert loaded.seen == ["a", "b", None, "round", "aggregate", "a", "b", None, "end", "a", "b", None] * 2


class Waits(FedAvg):
    """Aggregates a new model in every second round."""

    def start(self, info, state):
        super().start(info, state)
        self.round = info.round

    def aggregate(self):
        new = super().aggregate()
        return new if self.round % 2 else None


def test_callbacks_change_new_models_alone(federated_trainer):
    """In a round without a new model the hook receives copies: changes affect neither model nor restore point."""

    class Writes(FederatedCallback):
        def on_server_aggregate(self, trainer, module, state):
            written.append(trainer.current_epoch)
            for value in state.values():
                value.fill_(7.0)

        def on_server_round_end(self, trainer, module, is_new):
            ends.append((is_new, state_of(module)))

    written, ends, module = [], [], models.Module(models.mlp())
    start = state_of(module)
    trainer = federated_trainer(max_rounds=2, method=Waits(), callbacks=[Writes()])
    trainer.fit(module, models.as_datasets(models.vectors({"a": 9, "b": 5})))
    assert written == [0, 1]
    assert [is_new for is_new, _ in ends] == [False, True]
    assert_same(ends[0][1], start)
    assert all((value == 7).all() for value in ends[1][1].values())
