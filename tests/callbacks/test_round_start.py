"""The hook at the start of a round."""

import pytest
import torch
from torch.utils.data import Dataset

from lightning_fed import FederatedCallback
from tests import models
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Watch(FederatedCallback):
    """Notes the order of a round's hooks, and the model at its start."""

    def __init__(self):
        self.seen, self.models, self.ends = [], [], []

    def on_round_start(self, trainer, module):
        federation = trainer.federation
        assert federation.server.report.round == trainer.current_epoch
        assert federation.current_client is None
        assert_same(federation.local_model(module).global_state(), state_of(module))
        self.seen.append("round")
        self.models.append(state_of(module))
        torch.manual_seed(0)  # a visit has its own seed, set after this

    def on_broadcast(self, trainer, module, client, broadcast):
        self.seen.append(client)

    def on_aggregate(self, trainer, module, state):
        self.seen.append("aggregate")

    def on_train_epoch_end(self, trainer, module):
        self.ends.append(state_of(module))


def test_it_comes_once_before_the_first_visit_with_the_global_model(federated_trainer):
    watch, module = Watch(), models.Module(models.mlp(), models.momentum)
    start = state_of(module)
    federated_trainer(max_rounds=3, callbacks=[watch]).fit(module, models.as_datasets(models.vectors({"a": 9, "b": 5})))
    assert watch.seen == ["round", "a", "b", "aggregate"] * 3
    for before, after in zip(watch.models, [start, *watch.ends[:-1]], strict=True):
        assert_same(before, after)


def test_it_comes_in_a_round_without_visits_too(federated_trainer):
    class Lost(Dataset):
        def __len__(self):
            raise OSError("lost")

    watch = Watch()
    federated_trainer(max_rounds=2, callbacks=[watch]).fit(models.Module(models.mlp()), {"a": Lost()})
    assert watch.seen == ["round"] * 2
