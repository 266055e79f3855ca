"""One client with averaging and kept optimizer state equals a plain fit bit for bit, also in checkpoints."""

import itertools

import lightning as L
import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    LambdaCallback,
    ModelCheckpoint,
    ModelPruning,
    OnExceptionCheckpoint,
    StochasticWeightAveraging,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedCallback, Federation
from lightning_fed.algorithms.proximal_term import ProximalTerm
from lightning_fed.data import IID, FederatedDataModule, LoaderDataModule
from lightning_fed.steps import MaxNorm
from tests import models
from tests.breadth import quick
from tests.recorders import assert_same, state_of

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`"),
    pytest.mark.filterwarnings("ignore:`?.fit.ckpt_path="),
    pytest.mark.filterwarnings("ignore:The dirpath has changed"),
]

EXAMPLES = models.vectors({"a": 40})["a"]
BATCHES = 5
KEEP = {"optimizer_state": "keep", "batch_norm": "average"}


class Resumable:
    """A loader with a state, for exact resumes by a plain Trainer."""

    def __init__(self):
        self.loader, self.start, self.position = DataLoader(TensorDataset(*EXAMPLES), 8), 0, 0

    def __len__(self):
        return len(self.loader)

    def __iter__(self):
        start, self.start, self.position = self.start, 0, 0
        for batch in self.loader:
            self.position += 1
            if self.position > start:
                yield batch

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.start = state["position"] % BATCHES


def every_batch(folder):
    return ModelCheckpoint(folder, every_n_train_steps=1, save_top_k=-1)


def schedule(kind, **options):
    return lambda optimizer: {"scheduler": kind(optimizer), **options}


def falling(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)


def plateau(optimizer):
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)


class Logging(models.Module):
    """Logs the loss per step, for a scheduler."""

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


class Watch(L.Callback):
    def __init__(self):
        self.validated = []

    def on_validation_end(self, trainer, module):
        self.validated.append((trainer.global_step, state_of(module)))


class StopsInValidation(L.Callback):
    """Stops inside the second epoch, as early stopping does."""

    def on_validation_end(self, trainer, module):
        trainer.should_stop = trainer.global_step == 8


@pytest.fixture
def fit(plain_trainer):
    """Fits plain (``visits=None``) or with a federation; returns trainer, states at validations, and final state."""

    def run(visits, own, callbacks=(), path=None, train=None, federation=None, **options):
        watch = Watch()
        callbacks = [*callbacks, watch]
        train = Resumable() if train is None else train
        if visits is not None:
            federation = Federation(partition=IID(1), visits=visits, **KEEP) if federation is None else federation
            callbacks = [federation, *callbacks]
        is_saving = any(isinstance(callback, lightning_callbacks.Checkpoint) for callback in callbacks)
        options = {"max_epochs": 3, "enable_checkpointing": is_saving, **options}
        trainer = plain_trainer(callbacks=callbacks, **options)
        val = DataLoader(TensorDataset(*EXAMPLES), 20)
        trainer.fit(own, datamodule=LoaderDataModule(train, val), ckpt_path=path)
        return trainer, watch.validated, state_of(own)

    return run


def flat(content, path=""):
    if not isinstance(content, dict | list | tuple):
        return {path: content}
    parts = content.items() if isinstance(content, dict) else enumerate(content)
    return {key: leaf for name, part in parts for key, leaf in flat(part, f"{path}/{name}").items()}


def values_of(path):
    """Lightning's values in a checkpoint, without states of loaders and of other callbacks than averages."""
    content = torch.load(path, weights_only="plain" not in path.parts)
    content["callbacks"] = {key: value for key, value in content["callbacks"].items() if "Averaging" in key}
    content["loops"]["fit_loop"]["state_dict"].pop("combined_loader", None)
    return flat(content)


def assert_same_files(folder, expected_folder):
    names = sorted(path.name for path in expected_folder.iterdir())
    assert sorted(path.name for path in folder.iterdir()) == names
    for name in names:
        saved, expected = values_of(folder / name), values_of(expected_folder / name)
        assert saved.keys() == expected.keys()
        numbers = {key: value for key, value in expected.items() if isinstance(value, torch.Tensor | int | float)}
        pairs = {key: (torch.as_tensor(value), torch.as_tensor(saved[key])) for key, value in numbers.items()}
        assert not [key for key, pair in pairs.items() if not torch.equal(*pair)]


CASES = {  # callbacks, scheduler, optimizer, options
    "no schedule": (list, None, models.adam, {}),
    "schedule per step": (list, schedule(falling, interval="step", frequency=2), models.momentum, {}),
    "schedule per epoch": (list, schedule(falling), models.momentum, {"val_check_interval": 2}),
    "plateau per step": (list, schedule(plateau, interval="step", monitor="loss"), models.momentum, {}),
    "lbfgs": (list, None, lambda parameters: torch.optim.LBFGS(parameters, 0.1, max_iter=2), {}),
    "steps": (list, None, models.momentum, {"max_steps": 8, "max_epochs": -1, "val_check_interval": 3}),
    "stop in validation": (lambda: [StopsInValidation()], None, models.momentum, {"val_check_interval": 3}),
    "pruning": (lambda: [ModelPruning("l1_unstructured", amount=0.3)], None, models.momentum, {}),
    "average of epochs": (
        lambda: [StochasticWeightAveraging(0.05, swa_epoch_start=1)], schedule(falling), models.momentum,
        {"max_epochs": 3},
    ),
    "average of steps": (
        lambda: [lightning_callbacks.EMAWeightAveraging(decay=0.9, update_every_n_steps=2)], None, models.momentum,
        {"val_check_interval": 2},
    ),
}  # fmt: skip


def net(case):
    """A network, with BatchNorm for an average of epochs: Lightning measures the statistics in an additional epoch."""
    layers = list(models.mlp())
    return nn.Sequential(layers[0], nn.BatchNorm1d(8), *layers[1:]) if case == "average of epochs" else models.mlp()


@pytest.mark.filterwarnings("ignore:.*lr_scheduler.step")  # Lightning's order in averages of epochs
@pytest.mark.parametrize(
    ("case", "visits"),
    quick(
        itertools.product(CASES, ["fused", "lightning"]),
        [
            # Both in Lightning's loop with validations inside an epoch.
            *((case, "lightning") for case in ("steps", "stop in validation", "average of steps")),
            *(
                (case, "fused")
                for case in ("schedule per step", "plateau per step", "lbfgs", "pruning", "average of epochs")
            ),
        ],
    ),
)
def test_models_and_files_are_lightnings(case, visits, fit, tmp_path, caplog):
    """Every checkpoint, at every batch, has all of Lightning's values."""
    if case == "average of steps" and not hasattr(lightning_callbacks, "EMAWeightAveraging"):
        pytest.skip("new in Lightning 2.6")
    callbacks, scheduler, optimizer, options = CASES[case]
    if "val_check_interval" in options and visits == "fused":
        visits = "auto"
    ends = []
    for name, kind in (("plain", None), ("federated", visits)):
        own = Logging(net(case), optimizer, scheduler)
        ends.append(fit(kind, own, [*callbacks(), every_batch(tmp_path / name)], **options))
    (trainer, validated, state), (federated, federated_validated, federated_state) = ends
    assert (trainer.global_step, trainer.current_epoch) == (federated.global_step, federated.current_epoch)
    assert_same(federated_state, state)
    torch.testing.assert_close(federated_validated, validated, rtol=0, atol=0)
    assert_same_files(tmp_path / "federated", tmp_path / "plain")
    assert ("and the updates so far are aggregated" in caplog.text) == (case in ("steps", "stop in validation"))


class Requests(models.Module):
    """Records the calls of the loaders' hooks."""

    def __init__(self):
        super().__init__(models.mlp())
        self.calls = []

    def train_dataloader(self):
        self.calls.append("train")
        return Resumable().loader

    def val_dataloader(self):
        self.calls.append("val")
        return Resumable().loader


def test_loaders_are_requested_as_in_a_plain_trainer(plain_trainer):
    """In the same order, because random data sets draw from the global generator."""
    ends = []
    for federations in ([], [Federation(partition=IID(1), **KEEP)]):
        own = Requests()
        trainer = plain_trainer(callbacks=federations, max_epochs=2, num_sanity_val_steps=2)
        trainer.fit(own)
        ends.append(own.calls)
    assert ends == [["val", "train"]] * 2


class Stop(Exception):
    pass


def stop(trainer, module, outputs, batch, batch_idx):
    if trainer.global_step == 8:
        raise Stop


def test_a_fit_resumes_at_the_batch(fit, tmp_path):
    """From files inside rounds, at the ends, after an exception and after `max_steps`, as a plain fit."""
    whole = fit("auto", models.Module(models.mlp(), models.adam))[2]
    paths = {}
    for name, kind in (("plain", None), ("federated", "auto")):
        fit(kind, models.Module(models.mlp(), models.adam), [every_batch(tmp_path / name)])
        paths[name] = sorted((tmp_path / name).iterdir())
        options = {"max_steps": 8, "max_epochs": -1, "callbacks": [ModelCheckpoint(tmp_path / name / "steps", "end")]}
        fit(kind, models.Module(models.mlp(), models.adam), **options)
        end = OnExceptionCheckpoint(tmp_path / name / "raised", "end")
        with pytest.raises(Stop):
            fit(kind, models.Module(models.mlp(), models.adam), [LambdaCallback(on_train_batch_end=stop), end])
        paths[name] += [tmp_path / name / kind / "end.ckpt" for kind in ("steps", "raised")]
    assert len(paths["plain"]) == 3 * BATCHES + 2
    pairs = list(zip(paths["plain"], paths["federated"], strict=True))
    for plain, federated in [*pairs[1:-2:4], *pairs[-2:]]:
        expected, _, state = fit(None, models.Module(models.mlp(), models.adam), path=plain)
        resumed, _, resumed_state = fit("auto", models.Module(models.mlp(), models.adam), path=federated)
        assert_same(resumed_state, state)
        assert (resumed.global_step, resumed.current_epoch) == (expected.global_step, expected.current_epoch)
        if federated.parent.name == "federated":
            assert_same(resumed_state, whole)


@pytest.mark.parametrize("is_raised", [False, True])
def test_a_resumed_visit_draws_as_an_uninterrupted_visit(is_raised, plain_trainer, tmp_path):
    """Dropout, the order of examples, and two local epochs in a visit, with one client of separate data."""

    def run(*callbacks, path=None):
        own, federation = models.Module(models.norm_mlp(), models.adam), Federation(local_epochs=2, **KEEP)
        trainer = plain_trainer(callbacks=[federation, *callbacks], max_epochs=2, enable_checkpointing=bool(callbacks))
        clients = FederatedDataModule(models.as_datasets({"a": EXAMPLES}), batch_size=8)
        trainer.fit(own, datamodule=clients, ckpt_path=path)
        return state_of(own)

    if is_raised:
        with pytest.raises(Stop):
            run(OnExceptionCheckpoint(tmp_path, "end"), LambdaCallback(on_train_batch_end=stop))
    else:
        run(ModelCheckpoint(tmp_path, "end", every_n_train_steps=8))
    assert_same(run(path=tmp_path / "end.ckpt"), run())


NOT_PLAIN = {
    "optimizers": lambda: Federation(partition=IID(1)),
    "step": lambda: Federation(partition=IID(1), steps=[MaxNorm(1.0)], **KEEP),
    "personal": lambda: Federation(partition=IID(1), personal=["net.2.*"], **KEEP),
    "frozen": lambda: Federation(partition=IID(1), frozen=["net.2.*"], **KEEP),
    "method": lambda: Federation("fedprox", partition=IID(1), **KEEP),
    "rule": lambda: Federation("median", partition=IID(1), **KEEP),
    "clients": lambda: Federation(partition=IID(2), **KEEP),
}


@pytest.mark.parametrize("case", [*NOT_PLAIN, "callback"])
def test_other_fits_refuse_names_by_step(case, fit, tmp_path):
    callbacks = [ProximalTerm(0.1)] if case == "callback" else []
    federation = NOT_PLAIN[case]() if case in NOT_PLAIN else None
    with pytest.raises(MisconfigurationException, match="this value belongs to the current batch"):
        fit(
            "auto",
            models.Module(models.mlp(), models.momentum),
            [*callbacks, every_batch(tmp_path)],
            train=Resumable().loader,
            federation=federation,
        )


class Visits(FederatedCallback):
    def on_client_end(self, trainer, module, client, update):
        pass


@pytest.mark.parametrize("name", ["epoch=0-step=2.ckpt", "epoch=0-step=5.ckpt"])
@pytest.mark.parametrize("case", ["clients", "optimizers", "callback"])
def test_a_file_of_a_plain_fit_needs_a_plain_fit(case, name, fit, tmp_path):
    """Otherwise the only client's optimizer state would be the initial state of all visits."""
    fit("auto", models.Module(models.mlp(), models.momentum), [every_batch(tmp_path)], max_epochs=1)
    federations = {
        "clients": Federation(partition=IID(2), **KEEP),
        "optimizers": Federation(partition=IID(1), batch_norm="average"),
    }
    with pytest.raises(MisconfigurationException, match="resume with the same clients and options"):
        fit(
            "auto",
            models.Module(models.mlp(), models.momentum),
            [Visits()] if case == "callback" else [],
            path=tmp_path / name,
            train=Resumable().loader,
            federation=federations.get(case),
        )


def test_a_plain_fit_needs_a_file_of_a_plain_fit(fit, tmp_path):
    """Another fit stores the client's optimizer state in the store, which a plain fit does not read."""
    callbacks = [Visits(), ModelCheckpoint(tmp_path, "end")]
    fit("auto", models.Module(models.mlp(), models.momentum), callbacks, max_epochs=1)
    with pytest.raises(MisconfigurationException, match="resume with the same clients and options"):
        fit("auto", models.Module(models.mlp(), models.momentum), path=tmp_path / "end.ckpt")


def test_a_plain_fit_refuses_new_clients(plain_trainer):
    class Grows(FederatedDataModule):
        def population(self):
            examples, self.examples = self.examples, models.vectors({"a": 8, "b": 8})
            return FederatedDataModule(models.as_datasets(examples)).population()

    grows = Grows(models.as_datasets({"a": EXAMPLES}))
    grows.examples = {"a": EXAMPLES}
    trainer = plain_trainer(callbacks=[Federation(**KEEP)], max_epochs=2, reload_dataloaders_every_n_epochs=1)
    with pytest.raises(MisconfigurationException, match="the reloaded data have 2 clients"):
        trainer.fit(models.Module(models.mlp()), datamodule=grows)


def test_a_lost_round_takes_back_the_optimizers(fit):
    """NaN in one visit: the next rounds continue from the state before this visit."""

    class Breaks(models.Module):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.current_epoch == 1 else loss

    lost = Breaks(models.mlp(), models.momentum)
    fit("auto", lost, max_epochs=3)
    expected = models.Module(models.mlp(), models.momentum)
    fit("auto", expected, max_epochs=2)
    assert_same(state_of(lost), state_of(expected))
