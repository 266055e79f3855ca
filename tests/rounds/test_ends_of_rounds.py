"""Rounds cut before the last batch, the end of a fit with one client, and checkpoints at the end of a round."""

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import Availability, FederatedCallback, FederatedDataModule, Federation
from lightning_fed.data import IID, LoaderDataModule
from tests import models
from tests.breadth import pairs, slow
from tests.recorders import MemoryLogger, Recorder, StepCheckpoint, assert_same, state_of

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

EXAMPLES = models.vectors({"a": 40})["a"]
KEEP = {"optimizer_state": "keep", "batch_norm": "average"}


def data():
    loader = DataLoader(TensorDataset(*EXAMPLES), 8)
    return LoaderDataModule(loader, loader)


class Stops(L.Callback):
    """Stops the Trainer after step 7, the second step of the second epoch."""

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.should_stop = trainer.global_step == 7


class Skips(models.Module):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.trainer.current_epoch and batch_idx == 2 else None


ENDS = {
    "max_steps": (models.Module, {"max_steps": 7}, ()),
    "should_stop": (models.Module, {}, (Stops(),)),
    "-1": (Skips, {}, ()),
}


@pytest.mark.parametrize(
    ("how", "visits"),
    [(how, visits) for how in ENDS for visits in ("fused", "lightning") if (how, visits) != ("-1", "fused")],
)
def test_an_epoch_ends_as_in_a_plain_fit(how, visits, plain_trainer):
    kind, options, callbacks = ENDS[how]
    ends = []
    for federation in ([], [Federation(partition=IID(1), visits=visits, **KEEP)]):
        own, seen = kind(models.mlp(), models.momentum), []
        watch = L.pytorch.callbacks.LambdaCallback(
            on_train_epoch_end=lambda trainer, module, seen=seen: seen.append((trainer.global_step, state_of(module)))
        )
        trainer = plain_trainer(max_epochs=3, callbacks=[*federation, *callbacks, watch], **options)
        trainer.fit(own, datamodule=data())
        ends.append((trainer.current_epoch, trainer.global_step, seen, state_of(own)))
    (epochs, steps, seen, state), (rounds, federated_steps, federated_seen, federated_state) = ends
    assert (epochs, steps) == (rounds, federated_steps)
    assert [step for step, _ in seen] == [step for step, _ in federated_seen]
    for (_, ours), (_, theirs) in zip(seen, federated_seen, strict=True):
        torch.testing.assert_close(ours, theirs)
    torch.testing.assert_close(state, federated_state)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_fit_goes_on_behind_a_round_that_was_cut(plain_trainer, tmp_path):
    """From a checkpoint of the following validation: the next round is complete, and logging continues at the last
    step.
    """
    save, logger = ModelCheckpoint(tmp_path, "cut", save_on_train_epoch_end=False), MemoryLogger()
    options = {"logger": logger, "log_every_n_steps": 1}
    callbacks = [Federation(partition=IID(1)), Stops(), save]
    cut = plain_trainer(max_epochs=3, callbacks=callbacks, enable_checkpointing=True, **options)
    cut.fit(models.Module(models.mlp()), datamodule=data())
    logger.lines.clear()
    recorder = Recorder()
    trainer = plain_trainer(max_epochs=3, callbacks=[Federation(partition=IID(1)), recorder], **options)
    trainer.fit(models.Module(models.mlp()), datamodule=data(), ckpt_path=tmp_path / "cut.ckpt")
    assert [len(visit.batches) for visit in recorder.visits] == [5]
    assert (trainer.current_epoch, trainer.global_step) == (3, 12)
    assert {step for step, line in logger.lines if line["epoch"] == 2} == {11}


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize(
    ("steps", "limit_val_batches", "taken"), pairs([5, 7], [0, 1], ["at the epoch's end", "after the fit"])
)
def test_more_steps_begin_with_a_whole_round(steps, limit_val_batches, taken, plain_trainer, tmp_path):
    """Rounds have five batches: the checkpoint is from the end of a round, or from a cut round."""
    options = {"max_epochs": -1, "limit_val_batches": limit_val_batches}
    save = ModelCheckpoint(tmp_path, "end", save_on_train_epoch_end=True)
    callbacks = [Federation(partition=IID(1)), save]
    trainer = plain_trainer(max_steps=steps, callbacks=callbacks, enable_checkpointing=True, **options)
    trainer.fit(models.Module(models.mlp()), datamodule=data())
    trainer.save_checkpoint(tmp_path / "after.ckpt")
    recorder = Recorder()
    trainer = plain_trainer(max_steps=steps + 10, callbacks=[Federation(partition=IID(1)), recorder], **options)
    path = tmp_path / ("end.ckpt" if taken == "at the epoch's end" else "after.ckpt")
    trainer.fit(models.Module(models.mlp()), datamodule=data(), ckpt_path=path)
    assert [len(visit.batches) for visit in recorder.visits] == [5, 5]
    assert trainer.current_epoch == -(-steps // 5) + 2


def test_schedules_go_by_the_visits_that_were_served(federated_trainer):
    """Stragglers are dropped; a per-step schedule advances by the steps of one visit per round."""
    clients = models.as_datasets(models.vectors(dict.fromkeys("abc", 40)))
    made = models.Module(
        models.mlp(),
        scheduler=lambda optimizer: {
            "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step",
        },
    )  # fmt: skip
    trainer = federated_trainer(max_rounds=6, availability=Availability(partial_work="drop", stragglers=0.66), seed=1)
    trainer.fit(made, {name: DataLoader(part, 8) for name, part in clients.items()})
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 6 * 5


def test_a_module_that_ends_a_visit_leaves_the_others_alone(federated_trainer):
    recorder = Recorder()
    clients = {
        name: DataLoader(part, 8) for name, part in models.as_datasets(models.vectors({"a": 40, "b": 24})).items()
    }
    trainer = federated_trainer(max_rounds=2, callbacks=[recorder])
    trainer.fit(Skips(models.mlp()), clients)
    assert [len(visit.batches) for visit in recorder.visits] == [5, 3, 3, 3]  # including the skipped batch
    assert trainer.callback_metrics["fed/clients"] == 2


@pytest.mark.parametrize("visits", ["fused", "lightning"])
def test_a_checkpoint_on_the_last_batch_holds_the_round(visits, federated_trainer, tmp_path):
    recorder = Recorder()
    save = StepCheckpoint(tmp_path, 10, save_last=True)
    trainer = federated_trainer(max_rounds=2, callbacks=[recorder, save], enable_checkpointing=True, visits=visits)
    clients = models.as_datasets(models.vectors({"a": 40, "b": 40}))
    trainer.fit(models.Module(models.mlp()), {name: DataLoader(part, 8) for name, part in clients.items()})
    for name, aggregate in (("inside-step=10", 0), ("inside-step=20", 1), ("last", 1)):
        saved = torch.load(tmp_path / f"{name}.ckpt", weights_only=True)
        assert_same(recorder.aggregates[aggregate], saved["state_dict"])
        assert saved["callbacks"]["Federation"]["rounds"] == aggregate + 1


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
def test_a_round_whose_validation_is_left_is_not_trained_again(plain_trainer, tmp_path):
    save = ModelCheckpoint(tmp_path, save_last=True, every_n_train_steps=1, save_top_k=0)

    class Breaks(models.Module):
        def on_validation_start(self):
            if not self.trainer.sanity_checking:
                raise KeyError("broken off")

    trainer = plain_trainer(max_epochs=2, callbacks=[Federation(partition=IID(1)), save], enable_checkpointing=True)
    with pytest.raises(KeyError, match="broken off"):
        trainer.fit(Breaks(models.mlp()), datamodule=data())
    again = plain_trainer(max_epochs=2, callbacks=[Federation(partition=IID(1))], limit_val_batches=0)
    with pytest.raises(MisconfigurationException, match="The checkpoint was saved inside round 1"):
        again.fit(models.Module(models.mlp()), datamodule=data(), ckpt_path=tmp_path / "last.ckpt")


class FullError(Exception):
    pass


class RaisesInHook(FederatedCallback):
    def on_server_round_end(self, trainer, module, is_new):
        if trainer.federation.rounds == 2:
            raise FullError


class RaisesInLogger(MemoryLogger):
    def log_metrics(self, metrics, step=None):
        if "fed/clients" in metrics and metrics["epoch"] == 1:
            raise FullError


BROKEN = {
    "hook": ({"callbacks": [RaisesInHook()]}, 2),
    "logger": ({"logger": RaisesInLogger(), "callbacks": []}, 1),
}


@pytest.mark.filterwarnings("ignore:`?.fit.ckpt_path=")  # Lightning's warning for every `OnExceptionCheckpoint`
@pytest.mark.parametrize("where", BROKEN)
def test_an_error_at_the_end_of_a_round(where, federated_trainer, tmp_path):
    """The round is either complete or repeated: a checkpoint never mixes the states before and after."""

    def make(callbacks=(), **options):
        callbacks = [OnExceptionCheckpoint(tmp_path, "broken"), *callbacks]
        options |= {"max_rounds": 3, "method": "fedavgm", "personal": ["net.2.*"], "enable_checkpointing": True}
        return federated_trainer(callbacks=callbacks, **options)

    options, rounds = BROKEN[where]
    broken, ends = make(**options), []
    with pytest.raises(FullError):
        broken.fit(models.Module(models.mlp()), models.as_datasets(models.vectors()))
    assert broken.federation.rounds == rounds
    for path in (tmp_path / "broken.ckpt", None):
        module, trainer = models.Module(models.mlp()), make()
        trainer.fit(module, models.as_datasets(models.vectors()), ckpt_path=path)
        kept = {client: trainer.federation.client_state(client) for client in models.SIZES}
        ends.append((state_of(module), kept, trainer.callback_metrics["comm/total_up_bytes"]))
    torch.testing.assert_close(*ends, rtol=0, atol=0)


class Validations(L.Callback):
    """Records round and weights of each validation. ``hook`` saves a checkpoint in round 6 and stops the fit."""

    def __init__(self, hook=None, path=None):
        self.seen, self.path = [], path
        if hook is not None:
            setattr(self, hook, self.stop)

    def on_validation_epoch_start(self, trainer, pl_module):
        self.seen.append((trainer.current_epoch, state_of(pl_module)))

    def stop(self, trainer, *arguments):
        if trainer.current_epoch == 5:
            trainer.save_checkpoint(self.path)
            raise KeyError("stop")


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("hook", [slow("on_train_batch_start"), slow("on_train_batch_end"), "on_validation_end"])
def test_validation_by_batches_follows_complete_rounds(hook, plain_trainer, tmp_path, caplog):
    """The first round has 10 batches, so 24 batches are 2 rounds, also after a resume in a round with 2 batches."""
    clients = models.as_datasets(models.vectors({"a": 80, "b": 16}))
    options = {"max_steps": 31, "max_epochs": -1, "val_check_interval": 24, "check_val_every_n_epoch": None}

    def fit(watch, **arguments):
        own = models.Module(models.mlp())
        trainer = plain_trainer(callbacks=[Federation(clients_per_round=1, seed=1), watch], **options)
        try:
            trainer.fit(own, datamodule=FederatedDataModule(clients, clients["a"], batch_size=8), **arguments)
        finally:
            assert (trainer.val_check_interval, trainer.check_val_every_n_epoch) == (24, None)
        return trainer.global_step, state_of(own)

    whole, stopped, resumed = Validations(), Validations(hook, tmp_path / "x.ckpt"), Validations()
    with caplog.at_level("INFO", "lightning_fed"):
        end = fit(whole)
    assert end[0] == 10 + 2 + 2 + 10 + 2 + 2 + 2 + 2
    assert [round for round, _ in whole.seen] == [1, 3, 5, 7]
    assert caplog.text.count("val_check_interval=24: the number of rounds between validations is 2") == 1
    assert "Clients train in Lightning's loop" not in caplog.text
    with pytest.raises(KeyError, match="stop"):
        fit(stopped)
    torch.testing.assert_close(fit(resumed, ckpt_path=tmp_path / "x.ckpt"), end, rtol=0, atol=0)
    states = dict(stopped.seen) | dict(resumed.seen)
    torch.testing.assert_close(states, dict(whole.seen), rtol=0, atol=0)


@pytest.mark.parametrize("interval", [0.25, 1, 3, slow(9)])
def test_validations_inside_a_round_become_one_after_the_round(interval, plain_trainer):
    """As with Lightning's `check_val_every_n_epoch=2`."""
    clients = models.as_datasets(models.vectors({"a": 40, "b": 40}))
    watch = Validations()
    options = {"max_epochs": 4, "val_check_interval": interval, "check_val_every_n_epoch": 2}
    trainer = plain_trainer(callbacks=[Federation(), watch], **options)
    trainer.fit(models.Module(models.mlp()), datamodule=FederatedDataModule(clients, clients["a"], batch_size=8))
    assert [round for round, _ in watch.seen] == [1, 3]


def test_a_resumed_fit_follows_a_new_number_of_epochs(plain_trainer, tmp_path):
    clients = models.as_datasets(models.vectors({"a": 40, "b": 40}))

    def fit(rounds, every, **arguments):
        watch, options = Validations(), {"val_check_interval": 0.5, "check_val_every_n_epoch": every}
        trainer = plain_trainer(max_epochs=rounds, callbacks=[Federation(seed=1), watch], **options)
        data = FederatedDataModule(clients, clients["a"], batch_size=8)
        trainer.fit(models.Module(models.mlp()), datamodule=data, **arguments)
        trainer.save_checkpoint(tmp_path / "x.ckpt")
        return [round for round, _ in watch.seen]

    assert fit(2, 1) == [0, 1]
    assert fit(8, 3, ckpt_path=tmp_path / "x.ckpt") == [2, 5]


def test_a_checkpoint_from_another_version_is_refused(federated_trainer, tmp_path):
    data, path = FederatedDataModule(models.as_datasets(models.vectors()), batch_size=8), tmp_path / "x.ckpt"
    trainer = federated_trainer(max_rounds=1, seed=0)
    trainer.fit(models.Module(models.mlp()), datamodule=data)
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=False)
    (state,) = [state for state in checkpoint["callbacks"].values() if "validation" in state]
    del state["validation"]
    torch.save(checkpoint, path)
    with pytest.raises(MisconfigurationException, match=r"from this version, but \['validation'\] are missing"):
        federated_trainer(max_rounds=2, seed=0).fit(models.Module(models.mlp()), datamodule=data, ckpt_path=path)


def test_an_interval_above_the_rounds_batches_is_lightnings_error(plain_trainer):
    clients = models.as_datasets(models.vectors({"a": 40, "b": 40}))
    trainer = plain_trainer(max_epochs=1, callbacks=[Federation()], val_check_interval=11)
    with pytest.raises(ValueError, match="If you want to validate based on the total training batches"):
        trainer.fit(models.Module(models.mlp()), datamodule=FederatedDataModule(clients, clients["a"], batch_size=8))
