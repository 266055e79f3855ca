"""User callbacks see every batch of a visit, the client, and the data on request."""

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer, Federation
from tests.models import SIZES, Module, as_datasets, mlp, momentum, vectors
from tests.recorders import Recorder, assert_same, state_of

QUIET = {
    "accelerator": "cpu",
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "logger": False,
    "num_sanity_val_steps": 0,
}


def data():
    clients = as_datasets(vectors())
    return FederatedDataModule(clients, val=clients["dan"], batch_size=4)


def module():
    torch.manual_seed(0)
    return Module(mlp())


class Counter(FederatedCallback):
    def __init__(self):
        self.count, self.at_start, self.at_end, self.clients, self.per_visit = 0, [], [], [], {}

    def on_client_start(self, trainer, module, client, broadcast):
        self.count = 0

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.at_start.append(current(trainer))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.count += 1
        self.at_end.append(current(trainer))

    def on_client_end(self, trainer, module, client, update):
        self.per_visit[client] = self.count
        self.clients += [client] * self.count


class ChangesState(FederatedCallback):
    def __init__(self, change):
        self.change = change

    def on_client_end(self, trainer, module, client, update):
        self.change(update.state)


class DeclaresChange(ChangesState):
    changes_update = True


def replace_entry(state):
    state["net.0.bias"] = state["net.0.bias"] + 1


def write_into_entry(state):
    state["net.0.bias"].add_(1)


@pytest.mark.parametrize("change", [replace_entry, write_into_entry, lambda state: state.pop("net.0.bias")])
def test_only_a_declared_callback_changes_the_state_of_an_update(change, federated_trainer):
    with pytest.raises(MisconfigurationException, match=r"`ChangesState.on_client_end` to leave `update.state`"):
        federated_trainer(max_rounds=1, callbacks=[ChangesState(change)]).fit(module(), datamodule=data())


def replace_in_inference_mode(state):
    with torch.inference_mode():
        replace_entry(state)


@pytest.mark.parametrize("change", [write_into_entry, replace_in_inference_mode])
def test_a_declared_callback_may_change_the_state_of_an_update(change, federated_trainer):
    plain, changed = module(), module()
    federated_trainer(max_rounds=1).fit(plain, datamodule=data())
    callbacks = [DeclaresChange(change)]
    federated_trainer(max_rounds=1, callbacks=callbacks).fit(changed, datamodule=data())
    torch.testing.assert_close(changed.net[0].bias, plain.net[0].bias + 1)


def current(trainer):
    return next(one for one in trainer.callbacks if isinstance(one, Federation)).current_client


@pytest.mark.parametrize("is_first", [True, False])
def test_callbacks_see_every_batch_of_a_visit_wherever_they_stand(tmp_path, is_first):
    counter, federation = Counter(), Federation()
    callbacks = [counter, federation] if is_first else [federation, counter]
    L.Trainer(max_epochs=1, callbacks=callbacks, enable_checkpointing=False, **QUIET).fit(module(), datamodule=data())
    sizes = {client: -(-size // 4) for client, size in SIZES.items()}
    expected = {client: number - (SIZES[client] % 4 == 1 and number > 1) for client, number in sizes.items()}
    assert counter.per_visit == {client: number for client, number in expected.items() if number}
    assert counter.at_start == counter.at_end == counter.clients


def test_a_callback_that_changes_weights_after_a_batch_changes_the_update_and_not_the_global_model(tmp_path):
    class Clip(L.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            with torch.no_grad():
                for parameter in pl_module.parameters():
                    parameter.clamp_(-0.1, 0.1)

    class Stretch(FederatedCallback):
        def on_server_aggregate(self, trainer, module, state):
            for name in state:
                state[name] = state[name] + 1

    recorder = Recorder()
    net = module()
    trainer = FederatedTrainer(
        max_rounds=1, callbacks=[Clip(), Stretch(), recorder], enable_checkpointing=False, **QUIET
    )
    trainer.fit(net, datamodule=data())
    for visit in recorder.visits:
        assert all(value.abs().max() <= 0.1 for value in visit.update.values())
    assert all(value.min() > 0.5 for value in net.state_dict().values())  # not clipped afterwards


class HalfDown(FederatedCallback):
    def __init__(self):
        self.received = []

    def on_server_send(self, trainer, module, client, broadcast):
        broadcast.state = {name: value.half() for name, value in broadcast.state.items()}

    def on_client_receive(self, trainer, module, client, broadcast):
        self.received.append(next(iter(broadcast.state.values())).dtype)
        broadcast.state = {name: value.float() for name, value in broadcast.state.items()}


def test_a_broadcast_is_counted_as_packed_and_answered_as_unpacked(tmp_path):
    recorder, half = Recorder(), HalfDown()
    trainer = FederatedTrainer(max_rounds=1, callbacks=[half, recorder], default_root_dir=tmp_path, **QUIET)
    own = module()
    start = state_of(own)
    trainer.fit(own, data())
    size = sum(4 * value.numel() for value in start.values())
    assert float(trainer.callback_metrics["comm/down_bytes"]) == len(SIZES) * size / 2
    assert float(trainer.callback_metrics["comm/up_bytes"]) == len(SIZES) * size
    assert set(half.received) == {torch.float16}
    assert_same(recorder.visits[0].start, {name: value.half().float() for name, value in start.items()})


def test_anybody_may_ask_for_the_training_loader(tmp_path):
    class Curious(L.Callback):
        def on_train_start(self, trainer, pl_module):
            self.ask(trainer)

        def on_train_epoch_start(self, trainer, pl_module):
            self.ask(trainer)

        def on_train_epoch_end(self, trainer, pl_module):
            self.ask(trainer)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.ask(trainer)

        def ask(self, trainer):
            loader = trainer.datamodule.train_dataloader()
            assert len(loader) == trainer.num_training_batches
            assert len(next(iter(loader))[0]) == 4

    ends = []
    for callbacks in ([], [Curious()]):
        net = module()
        trainer = FederatedTrainer(
            max_rounds=2, callbacks=callbacks, clients_per_round=1.0, enable_checkpointing=False, **QUIET
        )
        trainer.fit(net, datamodule=data())
        ends.append(state_of(net))
        assert trainer.callback_metrics["fed/clients"] > 1
    assert_same(*ends)


def test_client_scores_are_those_of_the_round_that_is_saved(tmp_path):
    class Score(Module):
        def validation_step(self, batch, batch_idx):
            self.log("val_score", float(self.trainer.current_epoch), batch_size=len(batch[0]))

    clients = as_datasets(vectors({"a": 12, "b": 8}))
    keep = ModelCheckpoint(tmp_path, monitor="fed/val_score/mean", mode="max", save_top_k=-1)
    trainer = FederatedTrainer(max_rounds=4, callbacks=[keep], check_val_every_n_epoch=2, **QUIET)
    torch.manual_seed(0)
    trainer.fit(Score(mlp()), datamodule=FederatedDataModule(clients, val=clients, batch_size=4))
    assert [float(score) for score in keep.best_k_models.values()] == [1.0, 3.0]


def test_a_federated_trainer_takes_one_device(monkeypatch):
    assert FederatedTrainer(max_rounds=1, **QUIET).num_devices == 1
    monkeypatch.setattr("lightning.pytorch.accelerators.CPUAccelerator.auto_device_count", staticmethod(lambda: 4))
    assert L.Trainer(max_epochs=1, **QUIET).num_devices == 4  # the default
    assert FederatedTrainer(max_rounds=1, **QUIET).num_devices == 1


class Accumulating(Module):
    """Manual optimization: an optimizer step for every two batches and for the rest, a scheduler step per epoch.

    Records the arguments for every batch.
    """

    def __init__(self):
        super().__init__(mlp(), momentum, lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1))
        self.automatic_optimization = False
        self.told = []

    def on_train_batch_start(self, batch, batch_idx):
        self.told.append(("start", batch_idx, self.trainer.is_last_batch))

    def training_step(self, batch, batch_idx):
        self.told.append(("step", batch_idx, self.trainer.is_last_batch))
        self.manual_backward(self.loss(self(batch[0]), batch[1]))
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            self.optimizers().step()
            self.optimizers().zero_grad()
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.told.append(("end", batch_idx, self.trainer.is_last_batch))


def test_a_module_counts_the_batches_of_a_visit_as_in_a_fit_of_its_own(federated_trainer, plain_trainer):
    """Batch index and last batch of a local epoch are per client, so manual accumulation never spans clients."""
    datasets = as_datasets(vectors({"a": 12, "b": 8}))
    loaders = {name: DataLoader(dataset, batch_size=4) for name, dataset in datasets.items()}  # 3 and 2 batches
    expected, states = [], []
    for loader in loaders.values():
        alone = Accumulating()
        plain_trainer(max_epochs=2).fit(alone, loader, loader)
        expected += alone.told
        states.append(alone.state_dict())
    module, updates = Accumulating(), {}

    class Watch(FederatedCallback):
        def on_server_receive(self, trainer, module, update):
            updates[update.client] = {name: value.clone() for name, value in update.state.items()}

    federated_trainer(max_rounds=1, local_epochs=2, callbacks=[Watch()]).fit(module, loaders, loader)
    assert module.told == expected
    assert {index for _, index, _ in expected} == {0, 1, 2}
    for update, state in zip(updates.values(), states, strict=True):
        assert all(torch.equal(update[name], value) for name, value in state.items())


def test_gradients_that_no_step_has_used_stay_in_their_visit(federated_trainer):
    """A visit cut inside an epoch reports its last batch."""

    class Leaves(Accumulating):
        def training_step(self, batch, batch_idx):
            self.told.append(("left", batch_idx, self.trainer.is_last_batch))
            if batch_idx == 0:
                found.append(any(parameter.grad is not None for parameter in self.parameters()))
            self.manual_backward(self.loss(self(batch[0]), batch[1]))

    found, module = [], Leaves()
    loaders = [DataLoader(dataset, batch_size=4) for dataset in as_datasets(vectors({"a": 12, "b": 12})).values()]
    federated_trainer(max_rounds=2, local_steps=2).fit(module, loaders, loaders[0])
    assert found == [False] * 4
    assert [tell for tell in module.told if tell[0] == "left"] == [("left", 0, False), ("left", 1, True)] * 4


def test_the_module_has_its_own_methods_back_where_the_end_of_a_fit_fails_too(federated_trainer):
    class FailsTwice(FederatedCallback):
        def on_train_batch_start(self, trainer, module, batch, batch_idx):
            raise OSError("disk is full")

        def on_server_round_end(self, trainer, module, is_new):
            raise ValueError("so is the other one")

    net, clients = module(), data()
    with pytest.raises(ValueError, match="so is the other one"):
        federated_trainer(max_rounds=1, callbacks=[FailsTwice()]).fit(net, datamodule=clients)
    assert not [name for owner in (net, clients) for name, value in vars(owner).items() if hasattr(value, "restore")]
