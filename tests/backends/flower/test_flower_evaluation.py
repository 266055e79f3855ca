"""Evaluation at remote clients: the values of one process, a server without data, failing clients."""

import csv
import logging
from pathlib import Path

import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassConfusionMatrix

from lightning_fed import Federation, LocalStatistics
from lightning_fed.algorithms import FedPer
from lightning_fed.backends.flower.client import client_app
from lightning_fed.backends.flower.transport import FlowerTransport
from lightning_fed.backends.wire import server_for_client
from lightning_fed.backends.wire.server import run_server
from lightning_fed.batch_norm import measurement
from lightning_fed.callbacks import ClientEvaluation, LocalEvaluation, SiteMatrix
from lightning_fed.cli.recipe_halves import read_recipe
from lightning_fed.errors import ClientFault
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxSamples
from tests import evaluations, models
from tests.backends.flower.grids import FakeGrid
from tests.backends.flower.halves import OPTIONS, base_and_head, in_process, norm_module, on_flower, plain_module
from tests.breadth import quick
from tests.privacy.helpers import KnownKey
from tests.recorders import MemoryLogger, assert_same, state_of

TRAIN = evaluations.TRAIN

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


def numbers_of(trainer, *prefixes):
    values = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {name: value for name, value in values.items() if name.startswith(prefixes)}


@pytest.mark.parametrize("case", quick(evaluations.CASES, ["classifier", "loaders"]))
def test_a_server_without_data_has_the_values_of_pooled_data(case, plain_trainer, tmp_path):
    make, data, loaders = evaluations.CASES[case]
    held_out = evaluations.held_out(data, loaders)
    module, trainer, *_ = on_flower(
        tmp_path, make, data(TRAIN), Federation, 1, lambda: [ClientEvaluation(lists=["dice"])], held_out=held_out
    )
    expected = evaluations.on_pooled_data(plain_trainer(), module, held_out)
    found = {name: float(trainer.callback_metrics[name]) for name in expected}
    assert found == pytest.approx(expected, rel=2e-5)


@pytest.mark.parametrize("personal", quick([False, True], [True]))
def test_by_client_as_in_one_process(personal, federated_trainer, tmp_path):
    def federation():
        return Federation(FedPer("net.head.*") if personal else "fedavg", seed=3)

    data, held_out = models.vectors(TRAIN), evaluations.held_out(models.vectors, 1)
    _, trainer = in_process(federated_trainer, base_and_head, data, federation(), 1, [ClientEvaluation()], held_out)
    kinds = ("fed/val", "client/", "val_", "evaluation/")
    expected = numbers_of(trainer, *kinds)
    _, remote, transport, _ = on_flower(
        tmp_path, base_and_head, data, federation, 1, lambda: [ClientEvaluation()], held_out=held_out
    )
    assert len(expected) > 15
    assert numbers_of(remote, *kinds) == pytest.approx(expected, rel=1e-5)
    assert len({expected[f"client/{name}/val_acc"] for name in TRAIN}) > 1
    assert transport.received > 0


TREATMENTS = ["auto", LocalStatistics(), LocalStatistics("pooled")]


@pytest.mark.parametrize("batch_norm", quick(TREATMENTS, TREATMENTS[:1]), ids=str)
def test_clients_have_the_statistics_of_one_process(batch_norm, federated_trainer, tmp_path):
    """Clients with different images: compares the decision and the scores, including a client without a visit."""
    data = {
        client: (inputs + 20.0 * place, targets)
        for place, (client, (inputs, targets)) in enumerate(models.vectors(TRAIN).items())
    }
    held_out = {client: DataLoader(TensorDataset(*tensors), len(tensors[0])) for client, tensors in data.items()}

    def federation():
        return Federation(clients_per_round=2, batch_norm=batch_norm, seed=3)

    _, trainer = in_process(federated_trainer, norm_module, data, federation(), 2, [ClientEvaluation()], held_out)
    expected = numbers_of(trainer, "fed/val", "client/", "fed/batch_norm")
    _, remote, *_ = on_flower(
        tmp_path, norm_module, data, federation, 2, lambda: [ClientEvaluation()], held_out=held_out
    )
    assert len(expected) >= 8
    assert numbers_of(remote, "fed/val", "client/", "fed/batch_norm") == pytest.approx(expected, rel=1e-5)
    decisions = {fitted.callbacks[0].batch_norm_decision for fitted in (trainer, remote)}
    assert decisions == {"own" if batch_norm == "auto" else ""}


def test_a_client_without_a_measurement_has_the_statistics_of_one_process(federated_trainer, tmp_path, monkeypatch):
    """Such a client is evaluated with batch statistics."""
    measure = measurement.client_statistics

    def failing(trainer, module, population, visit, *arguments):
        if visit.client == "bob":
            raise ValueError("no measurement")
        return measure(trainer, module, population, visit, *arguments)

    for module in (measurement, server_for_client):
        monkeypatch.setattr(module, "client_statistics", failing)
    data = {
        client: (inputs + 20.0 * place, targets)
        for place, (client, (inputs, targets)) in enumerate(models.vectors(TRAIN).items())
    }
    held_out = {client: DataLoader(TensorDataset(*tensors), len(tensors[0])) for client, tensors in data.items()}

    def federation():
        return Federation(seed=3)

    _, trainer = in_process(federated_trainer, norm_module, data, federation(), 1, [ClientEvaluation()], held_out)
    _, remote, *_ = on_flower(
        tmp_path, norm_module, data, federation, 1, lambda: [ClientEvaluation()], held_out=held_out
    )
    assert remote.callbacks[0].batch_norm_decision == "own"
    expected = numbers_of(trainer, "fed/val", "client/")
    assert numbers_of(remote, "fed/val", "client/") == pytest.approx(expected, rel=1e-5)


def test_lightnings_callbacks_need_not_know_of_clients(tmp_path):
    def callbacks():
        return [
            ModelCheckpoint(tmp_path / "best", monitor="val_acc", mode="max", filename="{epoch}"),
            EarlyStopping("val_loss", patience=2, mode="min", min_delta=10.0),
        ]

    def module():
        return models.Module(models.mlp(), models.momentum, plateau)

    def plateau(optimizer):
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"scheduler": scheduler, "monitor": "val_loss"}

    server_callbacks = callbacks()
    logger = CSVLogger(tmp_path / "logs")
    _, trainer, *_ = on_flower(
        tmp_path, module, models.vectors(TRAIN), Federation, 9, lambda: [ClientEvaluation()],
        held_out=evaluations.held_out(models.vectors, 1), server_callbacks=server_callbacks,
        server_options={"logger": logger},
    )  # fmt: skip
    best, stopping = server_callbacks
    assert trainer.current_epoch == 3 == stopping.stopped_epoch + 1
    rows = (tmp_path / "logs" / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    assert "val_acc" in rows[0]
    assert "fed/val_acc/worst10" in rows[0]
    assert float(best.best_model_score) == max(float(value) for value in best.best_k_models.values())
    assert trainer.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.05 * 0.1**3)


class Fails(ClientEvaluation):
    """Bob's evaluation raises, and cid refuses."""

    def on_client_question(self, trainer, module, client, question):
        if client == "bob":
            raise ValueError("/home/bob/scans/17.png is no image")
        if client == "cid":
            raise ClientFault("the client's data are being moved")
        return super().on_client_question(trainer, module, client, question)


@pytest.mark.parametrize("min_clients", quick([1, 2], [2]))
def test_clients_that_do_not_answer_are_named(min_clients, tmp_path, caplog):
    with caplog.at_level(logging.INFO, "lightning_fed"):
        _, trainer, *_ = on_flower(
            tmp_path, base_and_head, models.vectors(TRAIN), Federation, 1, lambda: [Fails(min_clients=min_clients)],
            held_out=evaluations.held_out(models.vectors, 1),
        )  # fmt: skip
    assert "Client 'bob' does not answer: the client's program raised ValueError; see the client's log." in caplog.text
    assert "Client 'cid' does not answer: the client's data are being moved." in caplog.text
    assert "1 clients evaluated the model: 'ann'." in caplog.text
    assert ("Round 1 has no score: 1 clients were evaluated, fewer than min_clients=2." in caplog.text) == (
        min_clients == 2
    )
    assert ("val_loss" in trainer.callback_metrics) == (min_clients == 1)
    counts = numbers_of(trainer, "evaluation/")
    assert (counts["evaluation/clients"], counts["evaluation/failed"]) == (1, 2)


def test_who_is_silent_in_an_evaluation_is_left_out_of_it(tmp_path, caplog):
    grids = []

    class Silences(Callback):
        def on_validation_start(self, trainer, pl_module):
            grids[0].silent.add(12)

    _, trainer, *_ = on_flower(
        tmp_path, evaluations.Classifier, models.vectors(TRAIN), Federation, 1, lambda: [ClientEvaluation()],
        held_out=evaluations.held_out(models.vectors, 1), server_callbacks=[Silences()], grids=grids, limit=0.2,
    )  # fmt: skip
    assert "Client 'bob' does not answer: the client did not answer within 0 s." in caplog.text
    assert trainer.callback_metrics["fed/clients"] == 3
    assert trainer.callback_metrics["evaluation/clients"] == 2
    assert "val_loss" in trainer.progress_bar_metrics
    assert "val_f1" not in trainer.progress_bar_metrics


def test_a_half_without_the_callback_says_so(tmp_path, caplog):
    _, trainer, *_ = on_flower(
        tmp_path, base_and_head, models.vectors(TRAIN), Federation, 1, server_callbacks=[ClientEvaluation()]
    )
    assert (
        "does not answer: the client's program has no callback 'ClientEvaluation', which the server queries."
        in caplog.text
    )
    assert "val_loss" not in trainer.callback_metrics


def test_a_checkpoint_is_evaluated_without_training(tmp_path):
    """With personal heads stored at the clients: equal to the heads of the run."""
    held_out = evaluations.held_out(models.vectors, 1)

    def federation():
        return Federation(FedPer("net.3.*"), seed=3)

    grids = []
    module, fitted, *_ = on_flower(
        tmp_path, evaluations.Classifier, models.vectors(TRAIN), federation, 1, lambda: [ClientEvaluation()],
        held_out=held_out, grids=grids,
    )  # fmt: skip
    for stage in ("validate", "test"):
        transport, evaluation = FlowerTransport(grids[0], 5, poll=0.01), ClientEvaluation(folder=tmp_path / stage)
        trainer = run_server(
            federation(), evaluations.Classifier(), None, {**OPTIONS, "max_epochs": 1}, transport,
            transport.await_clients(3, 1), tmp_path / "server", [evaluation], stage,
        )  # fmt: skip
        kinds = ("client/", "val_", "all_", "fed/val", "examples")
        assert numbers_of(trainer, *kinds) == pytest.approx(numbers_of(fitted, *kinds), rel=1e-6)
        assert_same(state_of(trainer.lightning_module), state_of(module))
        with (tmp_path / stage / "clients.csv").open() as file:
            rows = {row["client"]: row for row in csv.DictReader(file)}
        assert list(rows) == [*TRAIN, "all"]
        assert float(rows["bob"]["val_loss"]) == pytest.approx(numbers_of(fitted, "client/bob/val_loss").popitem()[1])
        assert [rows[name]["examples"] for name in rows] == ["21", "5", "40", "66"]
        classes = [float(rows["all"][f"support/{index}"]) for index in range(models.CLASSES)]
        assert sum(classes) == 66


def test_a_matrix_of_models_by_sites(federated_trainer, tmp_path, caplog):
    data, held_out = models.vectors(TRAIN), evaluations.held_out(models.vectors, 1)

    def callbacks():
        return [ClientEvaluation(), SiteMatrix("val_acc", tmp_path)]

    one, other = callbacks(), callbacks()
    with caplog.at_level(logging.INFO, "lightning_fed"):
        in_process(federated_trainer, base_and_head, data, Federation(seed=3), 1, one, held_out)
    assert "| val_acc of the model of | ann | bob | cid |" in caplog.text
    on_flower(
        tmp_path, base_and_head, data, lambda: Federation(seed=3), 1, lambda: [ClientEvaluation()],
        held_out=held_out, server_callbacks=other[1:],
    )  # fmt: skip
    table = one[1].table
    assert table.rows == ["global", *TRAIN]
    assert table.columns == list(TRAIN)
    assert len(table.values) == 12
    assert other[1].table.values == pytest.approx(table.values)
    assert len(set(table.values.values())) > 3
    assert (tmp_path / "sites.csv").read_text() == other[1].table.csv()


def test_models_before_they_are_averaged_as_in_one_process(federated_trainer, tmp_path):
    data, held_out = models.vectors(TRAIN), evaluations.held_out(models.vectors, 1)
    _, trainer = in_process(federated_trainer, plain_module, data, Federation(), 1, [LocalEvaluation()], held_out)
    _, remote, *_ = on_flower(
        tmp_path, plain_module, data, Federation, 1, lambda: [LocalEvaluation()], held_out=held_out
    )
    expected = numbers_of(trainer, "clients/local/")
    assert set(expected) == {"clients/local/val_acc", "clients/local/val_loss"}
    assert numbers_of(remote, "clients/local/") == pytest.approx(expected, rel=1e-5)


class Refuses(models.Module):
    def __init__(self, has_norm):
        super().__init__(models.mlp())
        self.norm = torch.nn.BatchNorm1d(6, track_running_stats=False) if has_norm else torch.nn.Identity()

    def validation_step(self, batch, batch_idx):
        if isinstance(self.norm, torch.nn.Identity) and len(batch[0]) == 1:
            raise KeyError("no mask")
        self.log("val_loss", self.loss(self(self.norm(batch[0])), batch[1]))


@pytest.mark.parametrize("has_norm", [True, False])
def test_an_error_at_a_client_names_client_and_stage(has_norm, tmp_path, caplog):
    held_out = evaluations.held_out(models.vectors, 1, {"ann": 21, "bob": 17, "cid": 40})  # in batches of 8
    on_flower(
        tmp_path, lambda: Refuses(has_norm), models.vectors(TRAIN), lambda: Federation(batch_norm="average"), 1,
        lambda: [ClientEvaluation()], held_out=held_out,
    )  # fmt: skip
    advice = " A batch is too small for a BatchNorm layer that normalises with batch statistics"
    assert f"Raised in the validation of client 'bob'.{advice if has_norm else ''}" in caplog.text
    assert "'ann'" not in caplog.text
    assert "'cid'" not in caplog.text
    assert (advice in caplog.text) == has_norm


class Confusions(models.Module):
    """Logs an image in the first step and at the end of the epoch."""

    def __init__(self):
        super().__init__(models.mlp())
        self.confusion = MulticlassConfusionMatrix(models.CLASSES)

    def validation_step(self, batch, batch_idx):
        super().validation_step(batch, batch_idx)
        self.confusion.update(self(batch[0]), batch[1])
        if batch_idx == 0:
            self.logger.experiment.add_image("first batch", len(batch[0]))

    def on_validation_epoch_end(self):
        self.logger.experiment.add_image("confusion", int(self.confusion.compute().sum()))
        self.confusion.reset()


class Gallery(MemoryLogger):
    def __init__(self):
        super().__init__()
        self.pictures = []

    @property
    def experiment(self):
        return self

    def add_image(self, *picture):
        self.pictures.append(picture)


def test_pictures_come_once_of_the_global_model(federated_trainer, tmp_path):
    """A server without data draws the image at the end of the epoch from the clients' metric states."""
    here, there = Gallery(), Gallery()
    data, held_out = models.vectors(TRAIN), evaluations.held_out(models.vectors, 1)
    in_process(
        federated_trainer, Confusions, data, Federation(), 2, [ClientEvaluation()], held_out, options={"logger": here}
    )
    on_flower(
        tmp_path, Confusions, data, Federation, 2, lambda: [ClientEvaluation()], held_out=held_out,
        server_options={"logger": there},
    )  # fmt: skip
    examples = sum(evaluations.HELD_OUT.values())
    assert here.pictures == [("first batch", 8), ("confusion", examples)] * 2
    assert there.pictures == [("confusion", examples)] * 2


@pytest.mark.parametrize(
    ("step", "reason"),
    [("sum", "the secure sum would not protect their scores"), ("noise", "no noise would protect their scores")],
)
def test_private_federations_evaluate_no_client_and_say_so(step, reason, tmp_path, caplog):
    """A server without data sends no question to the clients."""
    if step == "noise":
        pytest.importorskip("dp_accounting")

    def federation():
        steps = {"sum": [MaxSamples(40), SecureSum(5.0)], "noise": [KnownKey(0.5, 1e-3, noise_multiplier=0.5, key=5)]}
        return Federation("fedavg", steps=steps[step], clients_per_round=2 if step == "noise" else 1.0)

    with caplog.at_level(logging.INFO, "lightning_fed"):
        _, trainer, _, grid = on_flower(
            tmp_path, plain_module, models.vectors(TRAIN), federation, 2, lambda: [ClientEvaluation()],
            held_out=evaluations.held_out(models.vectors, 1),
        )  # fmt: skip
    assert caplog.text.count(f"The clients are not evaluated: {reason}.") == 1
    assert not {name for name in trainer.callback_metrics if name.startswith(("val_", "client/", "fed/val"))}
    assert "evaluate.question" not in {message.metadata.message_type for _, message in grid.sent}


class SilentAfter(ClientEvaluation):
    """Two of three clients do not answer after round 0."""

    def on_client_question(self, trainer, module, client, question):
        if trainer.current_epoch and client != "ann":
            raise ClientFault("it is tired")
        return super().on_client_question(trainer, module, client, question)


def test_a_round_without_a_score_has_none_of_an_earlier_model(tmp_path):
    best = ModelCheckpoint(tmp_path / "best", monitor="val_loss", save_top_k=3, filename="{epoch}")
    _, trainer, *_ = on_flower(
        tmp_path, base_and_head, models.vectors(TRAIN), Federation, 2, lambda: [SilentAfter(min_clients=2)],
        held_out=evaluations.held_out(models.vectors, 1), server_callbacks=[best],
    )  # fmt: skip
    assert trainer.callback_metrics["val_loss"].isnan()
    assert best.best_model_path.endswith("epoch=0.ckpt")


def test_a_server_without_data_has_a_score_at_every_validation(tmp_path):
    with pytest.raises(MisconfigurationException, match="Expected `every_n_rounds=1` on a server without data"):
        on_flower(tmp_path, base_and_head, models.vectors(TRAIN), Federation, 2, server_callbacks=[ClientEvaluation(2)])


class Breaks(ClientEvaluation):
    """The server program ends after the clients have answered in round 1."""

    def evaluate(self, trainer, *arguments, **options):
        reports = super().evaluate(trainer, *arguments, **options)
        if trainer.current_epoch == 1:
            raise KeyError("broken off")
        return reports


def test_a_run_that_ended_inside_an_evaluation_goes_on(tmp_path):
    data, held_out = (
        models.vectors({"ann": 33, "bob": 20}),
        evaluations.held_out(models.vectors, 1, {"ann": 21, "bob": 5}),
    )

    def run(folder, evaluation=ClientEvaluation):
        return on_flower(
            tmp_path / folder, base_and_head, data, lambda: Federation(FedPer("net.head.*"), seed=2), 2,
            lambda: [evaluation()], held_out=held_out,
        )  # fmt: skip

    whole, trainer, *_ = run("whole")
    with pytest.raises(KeyError, match="broken off"):
        run("broken", Breaks)
    resumed, other, *_ = run("broken")
    assert_same(state_of(resumed), state_of(whole))
    kinds = ("fed/", "client/", "val_", "evaluation/")
    assert numbers_of(other, *kinds) == numbers_of(trainer, *kinds)


ROOT = Path(__file__).parents[3]
DATA = ROOT.parent / "shared" / "data"
DRIVES = ["0001TP", "0006R0", "0016E5"]


# Lightning 2.6 calls a function deprecated in jsonargparse 4.53.
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::jsonargparse._deprecated.JsonargparseDeprecationWarning")
def test_the_recipe_of_sites(tmp_path, monkeypatch):
    """A server without data has the table of drives, the best model by frames, and the matrix."""
    pytest.importorskip("matplotlib")
    if not (DATA / "camvid").is_dir():
        pytest.skip(f"no data at {DATA / 'camvid'}")
    monkeypatch.chdir(tmp_path)
    small = ["--data.source.data_dir", str(DATA), "--data.source.image_size", "[32,32]", "--data.source.train_size=40"]
    small += ["--model.model=Unet", "--model.model_kwargs", '{"encoder_depth": 3, "decoder_channels": [16, 8, 8]}']
    server, clients = (read_recipe(ROOT / "recipes" / "camvid_sites.yaml", small) for _ in range(2))
    app = client_app(
        clients.federation, clients.model, clients.data, {**clients.client_trainer, **OPTIONS},
        callbacks=clients.client_callbacks, store=tmp_path / "clients",
    )  # fmt: skip
    nodes = {node: {"partition-id": index, "num-partitions": 2} for index, node in enumerate((11, 12))}
    transport = FlowerTransport(FakeGrid(dict.fromkeys(nodes, app), nodes), 60, poll=0.01)
    trainer = run_server(
        server.federation, server.model, None, {**server.server_trainer, **OPTIONS, "max_epochs": 2}, transport,
        transport.await_clients(DRIVES, 1), tmp_path / "server", server.server_callbacks,
    )  # fmt: skip
    tables = {}
    for name in ("clients", "sites"):
        with (tmp_path / "runs" / "camvid_sites" / f"{name}.csv").open() as file:
            head, *rows = csv.reader(file)
        tables[name] = {row: dict(zip(head[1:], values, strict=True)) for row, *values in rows}
    assert (tmp_path / "runs" / "camvid_sites" / "sites.png").stat().st_size > 1000
    best, stopping = trainer.checkpoint_callback, trainer.early_stopping_callback
    reached = numbers_of(trainer, "val_miou").popitem()[1]
    assert list(tables["clients"]) == [*DRIVES, "all"]
    assert float(tables["clients"]["all"]["val_miou"]) == pytest.approx(reached)
    assert Path(best.best_model_path).is_file()
    assert best.best_model_score == stopping.best_score >= reached > 0
    assert list(tables["sites"]) == ["global", *DRIVES]
    by_drive = {drive: float(tables["clients"][drive]["val_miou"]) for drive in DRIVES}
    assert {drive: float(value) for drive, value in tables["sites"]["global"].items()} == pytest.approx(by_drive)
