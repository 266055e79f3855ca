"""Each round's metrics reach loggers once, and monitoring callbacks, also after a resume."""

import csv

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from torch.utils.data import DataLoader, TensorDataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer, Federation
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.data import IID, LoaderDataModule
from lightning_fed.errors import ClientFault
from lightning_fed.steps import MaxNorm, MaxSamples, UniformWeights
from tests.breadth import slow
from tests.models import Module, Quadratic, as_datasets, mlp, vectors
from tests.recorders import MemoryLogger, StepCheckpoint

OWN = {
    *(f"fed/{name}" for name in ("clients", "stragglers", "dropped", "failed", "num_samples", "drift")),
    *(f"fed/{name}" for name in ("update_norm", "global_update_norm")),
    *(f"comm/{name}" for name in ("up_bytes", "down_bytes", "total_up_bytes", "total_down_bytes")),
}


class Stop(Exception):
    pass


class BreakOff(L.Callback):
    def on_validation_end(self, trainer, pl_module):
        if trainer.current_epoch == 1 and not trainer.sanity_checking:
            raise Stop


def data():
    clients = as_datasets(vectors())
    return FederatedDataModule(clients, val=next(iter(clients.values())), batch_size=16)


def trainer(folder, name, *callbacks, rounds=3):
    return FederatedTrainer(
        max_rounds=rounds,
        seed=0,
        callbacks=list(callbacks),
        logger=CSVLogger(folder, name="", version=name, flush_logs_every_n_steps=1),
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )


def module():
    torch.manual_seed(0)
    return Module(mlp())


def own_rows(folder, name):
    with open(folder / name / "metrics.csv", newline="") as file:
        return [row for row in csv.DictReader(file) if row.get("fed/clients")]


def test_every_round_is_one_row_with_the_round_as_its_epoch(tmp_path):
    made = trainer(tmp_path, "a")
    made.fit(module(), datamodule=data())
    rows = own_rows(tmp_path, "a")
    assert [int(row["epoch"]) for row in rows] == [0, 1, 2]
    assert all(OWN.issubset(name for name, value in row.items() if value) for row in rows)
    last = {name: float(rows[-1][name]) for name in OWN}
    assert {name: made.callback_metrics[name].item() for name in OWN} == last
    assert {name: made.logged_metrics[name].item() for name in OWN} == last
    per_round = float(rows[0]["comm/up_bytes"])
    assert [float(row["comm/total_up_bytes"]) for row in rows] == [per_round, 2 * per_round, 3 * per_round]


class FailsOnce(FederatedCallback):
    def on_client_start(self, trainer, module, client, broadcast):
        if trainer.current_epoch == 1 and client == "bob":
            raise ClientFault("its disk is full")


def test_tensorboard_gets_megabytes_and_counts_that_change(tmp_path, federated_trainer):
    """A count appears from its first change on, also if the fit is resumed. All curves have the same x-axis."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    board, plain = TensorBoardLogger(tmp_path, name="", version=""), MemoryLogger()
    for rounds, resumed in ((3, None), (5, tmp_path / "last.ckpt")):
        saver = ModelCheckpoint(tmp_path, save_last=True)
        made = federated_trainer(
            max_rounds=rounds,
            logger=[board, plain],
            callbacks=[FailsOnce(), saver],
            enable_checkpointing=True,
        )
        made.fit(module(), datamodule=data(), ckpt_path=resumed)
    board.experiment.flush()
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    curves = {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    rows = [(step, line) for step, line in plain.lines if "fed/clients" in line]
    positions = [step for step, _ in rows]
    assert [line["fed/failed"] for _, line in rows] == [0, 1, 0, 0, 0]
    for name in ("fed/clients", "fed/failed", "fed/num_samples", "comm/up_MB"):
        sent = [line[name.replace("_MB", "_bytes")] * (1e-6 if "MB" in name else 1) for _, line in rows]
        assert curves[name] == pytest.approx(dict(zip(positions[1:], sent[1:], strict=True)))
    assert list(curves["comm/total_up_MB"]) == positions[1:]
    assert list(curves["fed/drift"]) == positions
    assert not {"fed/stragglers", "fed/dropped", "comm/up_bytes", "comm/total_up_bytes"} & curves.keys()
    assert {line["fed/stragglers"] for _, line in rows} == {line["fed/dropped"] for _, line in rows} == {0}


class Chatty(Module):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("batch_loss", loss.detach(), on_step=True)
        return loss

    def on_validation_epoch_end(self):
        self.log("doubled", 2.0 * self.trainer.current_epoch)


class ChoosesAxis(Chatty):
    """Logs the value that Lightning uses as x-axis."""

    def on_train_epoch_end(self):
        self.log("step", 100.0 + self.trainer.current_epoch)


@pytest.mark.parametrize("kind", [Chatty, ChoosesAxis])
def test_a_log_has_the_rows_of_a_plain_fit(kind, tmp_path, plain_trainer):
    train = DataLoader(TensorDataset(*vectors({"a": 40})["a"]), 8)
    fits = []
    for federation in ([], [Federation(partition=IID(1))]):
        folder, logger, own = tmp_path / str(len(fits)), MemoryLogger(), kind(mlp())
        keep = ModelCheckpoint(folder, "{step}", save_top_k=-1)
        options = {"logger": logger, "log_every_n_steps": 2, "enable_checkpointing": True}
        made = plain_trainer(max_epochs=3, callbacks=[*federation, keep], **options)
        made.fit(own, datamodule=LoaderDataModule(train, train))
        made.validate(own, train, verbose=False)
        rows = [
            (step, sorted(name for name in line if not name.startswith(("fed/", "comm/"))))
            for step, line in logger.lines
            if not any(name.startswith("fed/") for name in line)
        ]
        fits.append((rows, sorted(path.name for path in folder.iterdir()), sorted(made.callback_metrics.keys() - OWN)))
    assert fits[0] == fits[1]


@pytest.mark.parametrize("steps", [5, 7])
def test_a_fit_resumed_inside_a_round_logs_at_the_same_positions(steps, tmp_path, plain_trainer):
    """At the end of round 0, or inside round 1: later values are logged at the same positions."""
    train = DataLoader(TensorDataset(*vectors({"a": 40})["a"]), 8)
    save = StepCheckpoint(tmp_path, steps)
    logs = []
    for path in (None, tmp_path / f"inside-step={steps}.ckpt"):
        logger = MemoryLogger()
        federation = Federation(partition=IID(1), visits="lightning")
        made = plain_trainer(max_epochs=3, logger=logger, callbacks=[federation, save], enable_checkpointing=True)
        made.fit(Chatty(mlp()), datamodule=LoaderDataModule(train, train), ckpt_path=path)
        logs.append([(step, sorted(line)) for step, line in logger.lines if line["epoch"] > 0])
    assert logs[0] == logs[1]


def test_byte_counts_beyond_float32_are_exact(tmp_path):
    made = trainer(tmp_path, "a", rounds=1)
    empty = {"last": {}, "first_counts": {}, "passing": {}}
    made.federation.round_log.load_state_dict({"up_bytes": 2**24, "down_bytes": 0, **empty})
    book = made.federation.round_log
    book.put(made, 0, {"comm/total_up_bytes": 2**24 + 1})
    assert made.callback_metrics["comm/total_up_bytes"].item() == 2**24 + 1


def test_callbacks_can_monitor_them(tmp_path):
    checkpoint = ModelCheckpoint(
        tmp_path / "checkpoints", "{epoch}-{fed/clients:.0f}", "fed/update_norm", auto_insert_metric_name=False
    )
    stop = EarlyStopping("fed/clients", patience=1, mode="max", strict=True)
    made = trainer(tmp_path, "a", checkpoint, stop, rounds=9)
    made.fit(module(), datamodule=data())
    assert made.current_epoch == 2  # the number of clients never increased
    norms = [float(row["fed/update_norm"]) for row in own_rows(tmp_path, "a")]
    assert checkpoint.best_model_score.item() == pytest.approx(min(norms))


def test_a_fit_resumed_between_a_rounds_end_and_its_checkpoint_knows_its_numbers(tmp_path):
    whole = ModelCheckpoint(tmp_path / "whole", monitor="fed/update_norm", save_top_k=-1)
    made = trainer(tmp_path, "a", whole)
    made.fit(module(), datamodule=data())

    saved = tmp_path / "at-validation.ckpt"

    class Save(L.Callback):
        def on_validation_end(self, trainer, pl_module):
            if trainer.current_epoch == 1 and not trainer.sanity_checking:
                trainer.save_checkpoint(saved)

    part = ModelCheckpoint(tmp_path / "part", monitor="fed/update_norm", save_top_k=-1)
    with pytest.raises(Stop):
        trainer(tmp_path, "b", part, Save(), BreakOff()).fit(module(), datamodule=data())
    rest = ModelCheckpoint(tmp_path / "part", monitor="fed/update_norm", save_top_k=-1)
    trainer(tmp_path, "c", rest).fit(module(), datamodule=data(), ckpt_path=saved)
    scores = [float(score) for score in whole.best_k_models.values()]
    assert [float(score) for score in rest.best_k_models.values()] == scores


def numbers_of(fitted):
    """The rounds' values visible to monitoring callbacks, without the module's values."""
    return {name: float(value) for name, value in fitted.callback_metrics.items() if "/" in name}


def test_a_fit_resumed_after_its_end_shows_the_last_rounds_numbers(tmp_path):
    """Nothing trains after a kill behind the last checkpoint. Lightning does not restore the module's values."""
    fits = []
    for name, path in (("whole", None), ("resumed", tmp_path / "saved" / "last.ckpt")):
        fits.append(trainer(tmp_path, name, ModelCheckpoint(tmp_path / "saved", save_last=True)))
        fits[-1].fit(module(), datamodule=data(), ckpt_path=path)
    assert numbers_of(fits[0]).keys() >= OWN
    assert numbers_of(fits[1]) == numbers_of(fits[0])
    assert "val_loss" in fits[0].callback_metrics
    assert "val_loss" not in fits[1].callback_metrics


def test_numbers_that_not_every_round_brings_are_there_after_a_resume(tmp_path):
    """Clients are only evaluated in round 2 of five; the fit is interrupted in the last round."""

    class BreakOffIn4(L.Callback):
        def on_train_epoch_start(self, trainer, pl_module):
            if trainer.current_epoch == 4:
                raise Stop

    def fit(name, folder, *callbacks, path=None):
        saved = ModelCheckpoint(tmp_path / folder, save_last=True)
        made = trainer(tmp_path, name, saved, ClientEvaluation(every_n_rounds=3), *callbacks, rounds=5)
        clients = as_datasets(vectors())
        made.fit(module(), datamodule=FederatedDataModule(clients, clients, batch_size=32), ckpt_path=path)
        return made

    whole = fit("whole", "saved-whole")
    with pytest.raises(Stop):
        fit("broken-off", "saved", BreakOffIn4())
    resumed = fit("resumed", "saved", path=tmp_path / "saved" / "last.ckpt")
    assert "fed/val_loss/mean" in numbers_of(whole)
    assert numbers_of(resumed) == numbers_of(whole)


class Margins(FedAvg):
    """A rule with one metric per client, and one metric over all clients."""

    def receive(self, update):
        super().receive(update)
        self.of_round.append(update.client)

    def start(self, info, state):
        super().start(info, state)
        self.of_round = []

    def metrics(self):
        return {"margin/all": 1.0, **{f"margin/{client}": 1.0 for client in self.of_round}}


class Seldom(L.Callback):
    def on_validation_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            trainer.federation.round_log.put(trainer, 0, {"seldom": 1.0})


def test_numbers_of_clients_are_those_of_the_newest_round(federated_trainer, tmp_path):
    clients = as_datasets(vectors({f"c{number:02d}": 8 for number in range(12)}))
    validated = [dict(list(clients.items())[first : first + 3]) for first in (0, 3, 6, 9)]

    class Data(FederatedDataModule):
        def val_clients(self):
            return {
                key: self.evaluation_loader(data) for key, data in validated[self.trainer.current_epoch % 4].items()
            }

    def fit(rounds, ckpt_path=None):
        trainer = federated_trainer(max_rounds=rounds, method=Margins(), clients_per_round=2, callbacks=[Seldom()])
        trainer.fit(module(), datamodule=Data(clients, val=clients), ckpt_path=ckpt_path)
        return trainer

    made = fit(4)
    names = set(made.callback_metrics)
    cohort = {visit.client for visit in made.federation.cohort.visits}
    assert {name for name in names if name.startswith("margin/")} == {"margin/all", *(f"margin/{c}" for c in cohort)}
    assert {name.split("/")[1] for name in names if name.startswith("client/")} == set(validated[3])
    assert {"seldom", "fed/val_loss/mean", "fed/drift"} < names
    assert {name for name in made.logged_metrics if name.startswith(("margin/", "client/"))} < names
    fit(2).save_checkpoint(tmp_path / "two.ckpt")
    resumed = fit(4, tmp_path / "two.ckpt")
    assert numbers_of(resumed) == numbers_of(made)


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(
    ("options", "counted"),
    [
        slow(({}, lambda size: size)),
        ({"steps": [MaxSamples(30)]}, lambda size: min(size, 30)),
        slow(({"steps": [UniformWeights()]}, lambda size: 1)),
        ({"steps": [MaxNorm(0.5)]}, lambda size: size),
    ],
)
def test_drift_of_a_mean_is_not_negative(options, counted, federated_trainer):
    """Clients with very different sizes and steps, in some rounds all in one direction."""
    random = torch.Generator().manual_seed(0)
    for _ in range(5):
        sizes = torch.randint(2, 90, (4,), generator=random).tolist()
        goals = 10 * torch.randn(4, 2, generator=random).abs() ** 3
        examples = [
            torch.utils.data.TensorDataset(goal.expand(size, 2)) for size, goal in zip(sizes, goals, strict=True)
        ]
        made = federated_trainer(max_rounds=1, local_steps=1, **options)
        made.fit(Quadratic(lr=0.5), dict(enumerate(examples)))
        weights = [counted(size) for size in sizes]
        norms = (0.5 * goals).norm(dim=1).tolist()
        mean = sum(weight * norm for weight, norm in zip(weights, norms, strict=True)) / sum(weights)
        assert made.callback_metrics["fed/update_norm"].item() == pytest.approx(mean, rel=1e-5)
        assert -1e-6 <= made.callback_metrics["fed/drift"].item() <= 1


class Ages(FederatedCallback):
    def on_client_end(self, trainer, pl_module, client, update):
        update.metrics["age"] = np.float32(40)


def test_checkpoints_hold_no_numbers_of_numpy(federated_trainer, tmp_path):
    fitted = federated_trainer(max_rounds=1, seed=np.int64(3), callbacks=[Ages()])
    fitted.fit(module(), datamodule=data())
    fitted.save_checkpoint(tmp_path / "last.ckpt")
    state = torch.load(tmp_path / "last.ckpt", weights_only=True)["callbacks"]["Federation"]
    assert state["seed"] == 3
    assert float(fitted.callback_metrics["clients/age"]) == 40
