"""Traffic by part equals the messages, the formula in the specification, and federated averaging."""

import csv

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import Dataset

from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer
from lightning_fed.algorithms import FedPer
from lightning_fed.callbacks import CommunicationReport, SampledSoftmax, Traffic
from lightning_fed.callbacks.communication import top_level_parts
from lightning_fed.modules import SampledSoftmaxHead
from tests import models
from tests import references_retrieval as references
from tests.algorithms.fedmargin.test_prototype_plots import Stop, StopAt, train
from tests.breadth import quick, slow
from tests.conftest import QUIET
from tests.recorders import MemoryLogger, Recorder, bytes_of

# Most fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 10, "bob": 5, "cid": 17}
BASE, HEAD = 6 * 8 + 8, 8 * 3 + 3  # sizes of an MLP


def federate(callbacks, rounds=2, module=None, ckpt_path=None, sizes=SIZES, **options):
    options = {**QUIET, "batch_norm": "average", "seed": 3, **options}
    trainer = FederatedTrainer(**options, max_rounds=rounds, callbacks=callbacks)
    data = FederatedDataModule(models.as_datasets(models.vectors(sizes)), batch_size=8)
    trainer.fit(module or models.Module(models.mlp()), datamodule=data, ckpt_path=ckpt_path)
    return trainer


def test_federated_averaging_sends_all_of_the_model():
    report, recorder, logger = CommunicationReport(), Recorder(), MemoryLogger()
    trainer = federate([recorder, report], logger=logger)
    assert report.rows == [
        Traffic(round, client, part, numel, 4 * numel, numel, 4 * numel)
        for round in range(2)
        for client in SIZES
        for part, numel in (("net.0", BASE), ("net.2", HEAD))
    ]
    assert [row[:1] + row[-1:] for row in report.summary()] == [("net.0", 1), ("net.2", 1), ("(all)", 1)]
    assert logger.curve("comm/down_share") == logger.curve("comm/up_share") == [(0, 1.0), (1, 1.0)]
    assert trainer.callback_metrics["comm/up_share"] == 1
    for round in range(2):
        assert recorder.down_bytes[round] == sum(row.down_bytes for row in report.rows if row.round == round)
        assert recorder.up_bytes[round] == sum(row.up_bytes for row in report.rows if row.round == round)
    assert report.table().splitlines()[2] == "| net.0 | 56 | 56 | 56 | 224 | 224 | 100.00% |"


def test_entries_of_any_type_and_extras():
    """Integer buffers count eight bytes per number; a method's extras are a separate part."""

    class Extras(FederatedCallback):
        def on_server_send(self, trainer, module, client, broadcast):
            broadcast.extras["note"] = torch.zeros(3, dtype=torch.float16)

        def on_client_end(self, trainer, module, client, update):
            update.extras["answer"] = torch.zeros(5, dtype=torch.float64)

    report, recorder = CommunicationReport(), Recorder()
    trainer = federate([report, Extras(), recorder], 1, models.Module(models.norm_mlp()))
    (norm,) = (row for row in report.rows if row.part == "net.1" and row.client == "ann")
    assert norm[3:] == (33, 4 * 32 + 8, 33, 4 * 32 + 8)
    (extras,) = (row for row in report.rows if row.part == "(extras)" and row.client == "ann")
    assert extras[3:] == (3, 6, 5, 40)
    assert sum(row.down_bytes for row in report.rows) == recorder.down_bytes[0]
    assert sum(row.up_bytes for row in report.rows) == recorder.up_bytes[0]
    *_, of_extras, of_all = report.summary()
    assert of_extras == ("(extras)", 0, 3, 5, 6, 40, None)
    full = bytes_of(trainer.lightning_module.state_dict())
    assert of_all.share == pytest.approx((2 * full + 46) / (2 * full))
    assert "| (extras) | 0 | 3 | 5 | 6 | 40 |  |" in report.table()


@pytest.mark.parametrize(
    ("num_classes", "bias", "position"),
    [
        (30, False, 0),
        slow((30, False, 1)),
        slow((1000, False, 0)),
        (1000, False, 1),
        (1000, True, 0),
        slow((1000, True, 1)),
    ],
)
def test_fedss_sends_the_rows_of_its_classes(num_classes, bias, position):
    """|phi| + d |S_k| numbers in each direction and |S_k| integers up, for any number of classes."""
    torch.manual_seed(0)
    head = SampledSoftmaxHead(8, num_classes, bias=bias, normalize=not bias)
    module = models.Module(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), head))
    report, callbacks = CommunicationReport(parts=["net.2"]), [SampledSoftmax(num_negatives=7)]
    callbacks.insert(position, report)
    trainer = federate(callbacks, module=module)
    labels = {name: len(set(targets.tolist())) for name, (_, targets) in models.vectors(SIZES).items()}
    by_visit = {}
    for row in report.rows:
        by_visit.setdefault((row.round, row.client), {})[row.part] = row
    assert len(by_visit) == 6
    for (_, client), parts in by_visit.items():
        held = labels[client] + 7
        sent = references.sent_parameters_reference(56, 8, held, bias)
        model = [parts["(rest)"], parts["net.2"]]
        assert sum(row.down_numel for row in model) == sum(row.up_numel for row in model) == sent
        assert sum(row.down_bytes for row in model) == sum(row.up_bytes for row in model) == 4 * sent
        request = parts["(request)"]  # once for each entry of the head
        assert request[3:] == (0, 0, held, 8 * held)  # one list for weight and bias
    down, up = (sum(getattr(row, f"{way}_bytes") for row in report.rows) for way in ("down", "up"))
    assert trainer.callback_metrics["comm/total_down_bytes"] == down
    assert trainer.callback_metrics["comm/total_up_bytes"] == up
    full = 4 * (56 + (8 + bias) * num_classes)
    last = [row for row in report.rows if row.round == 1]
    for way in ("down", "up"):
        share = sum(getattr(row, f"{way}_bytes") for row in last) / (3 * full)
        assert trainer.callback_metrics[f"comm/{way}_share"].item() == pytest.approx(share)
    rows = {row.part: row for row in report.summary()}
    mean = (8 + bias) * sum(count + 7 for count in labels.values()) / 3
    assert rows["net.2"][1:4] == pytest.approx(((8 + bias) * num_classes, mean, mean))
    assert rows["net.2"].share == pytest.approx(mean / ((8 + bias) * num_classes))
    assert rows["(rest)"].share == 1


class Halved(FederatedCallback):
    changes_update = True

    changes_update = True

    def on_server_send(self, trainer, module, client, broadcast):
        broadcast.extras = {f"half:{name}": value.half() for name, value in broadcast.state.items()}

    def on_client_end(self, trainer, module, client, update):
        update.state = {name: value.half() for name, value in update.state.items()}

    def on_server_receive(self, trainer, module, update):
        update.state = {name: value.float() for name, value in update.state.items()}


@pytest.mark.parametrize("position", [0, 1])
def test_messages_count_as_they_travel(position):
    """For any position of the unpacking callback."""
    report, callbacks = CommunicationReport(), [Halved()]
    callbacks.insert(position, report)
    trainer = federate(callbacks, 1)
    assert {(row.part, row.up_numel, row.up_bytes) for row in report.rows} >= {
        ("net.0", BASE, 2 * BASE),
        ("net.2", HEAD, 2 * HEAD),
    }
    assert trainer.callback_metrics["comm/up_share"] == 0.5
    assert trainer.callback_metrics["comm/down_share"] == 1.5
    assert sum(row.up_bytes for row in report.rows) == trainer.callback_metrics["comm/up_bytes"]
    assert sum(row.down_bytes for row in report.rows) == trainer.callback_metrics["comm/down_bytes"]


def test_what_stays_at_home_is_saved():
    report = CommunicationReport()
    module = models.Module(models.mlp())
    trainer = FederatedTrainer(**QUIET, method=FedPer(), batch_norm="average", max_rounds=2, callbacks=[report])
    data = FederatedDataModule(models.as_datasets(models.vectors(SIZES)), batch_size=8)
    trainer.fit(module, datamodule=data)
    shares = {row.part: row.share for row in report.summary()}
    assert shares == {"net.0": 1, "net.2": 0, "(all)": BASE / (BASE + HEAD)}
    assert trainer.callback_metrics["comm/up_share"].item() == BASE / (BASE + HEAD)


def test_a_client_that_does_not_answer():
    """The client is sent the model and sends nothing; shares only count existing messages."""

    class Broken(models.Module):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) == 5:
                raise ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1])")
            return super().training_step(batch, batch_idx)

    class Spoil(FederatedCallback):
        def on_client_end(self, trainer, module, client, update):
            if client == "cid":
                update.num_samples = 0  # arrives, but is invalid

    report = CommunicationReport()
    sizes = {"ann": 16, "bob": 1, "cid": 16}
    trainer = federate([report, Spoil()], 1, models.Module(models.norm_mlp()), sizes=sizes)
    assert set(trainer.federation.server.report.failed) == {"bob", "cid"}
    ups = {row.client: row.up_numel for row in report.rows if row.part == "net.0"}
    downs = {row.client: row.down_numel for row in report.rows if row.part == "net.0"}
    assert downs == {"ann": BASE, "bob": BASE, "cid": BASE}
    assert ups == {"ann": BASE, "bob": 0, "cid": BASE}
    assert {row.share for row in report.summary()} == {1.0}
    assert trainer.callback_metrics["comm/up_share"] == trainer.callback_metrics["comm/down_share"] == 1
    assert sum(row.up_bytes for row in report.rows) == trainer.callback_metrics["comm/up_bytes"]


class Breaking(Dataset):
    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        if index >= 8:
            raise OSError("the disk is gone")
        return self.data[index]


def test_a_client_that_only_asks():
    torch.manual_seed(0)
    module = models.Module(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), SampledSoftmaxHead(8, num_classes=30)))
    data = models.as_datasets(models.vectors({"ann": 16, "bob": 16}))
    data["bob"] = Breaking(data["bob"])
    report = CommunicationReport(parts=["net.2"])
    trainer = FederatedTrainer(
        **{**QUIET, "batch_norm": "average"},
        max_rounds=1,
        callbacks=[report, SampledSoftmax(2, classes={"ann": [0, 1, 2], "bob": [0, 1, 2]})],
    )
    trainer.fit(module, datamodule=FederatedDataModule(data, batch_size=8, shuffle=False))
    assert set(trainer.federation.server.report.failed) == {"bob"}
    assert {row.client: row.up_numel for row in report.rows if row.part == "(request)"} == {"ann": 5, "bob": 5}
    assert {row.client: row.up_numel for row in report.rows if row.part == "net.2"} == {"ann": 40, "bob": 0}
    (head,) = (row for row in report.summary() if row.part == "net.2")
    assert (head.down_numel, head.up_numel, head.share) == (40, 40, 40 / 240)


def test_the_parts():
    report = CommunicationReport(parts=["net", "net.0", "net.2.bias"])
    federate([report], 1)
    numel = {row.part: row.down_numel for row in report.rows}
    assert numel == {"net.0": BASE, "net": 24, "net.2.bias": 3}
    assert top_level_parts(["a.b.weight", "a.b.bias"]) == ["a.b.weight", "a.b.bias"]
    assert top_level_parts(["weight"]) == ["weight"]
    assert top_level_parts(["a", "a.b"]) == ["a"]
    for wrong in ("net.", "net.1", "ne", "net.*"):
        with pytest.raises(ValueError, match=r"`parts` to be prefixes of entry names, but no name begins with"):
            federate([CommunicationReport(parts=["net.0", wrong])], 1)


def test_the_file(tmp_path):
    report = CommunicationReport()
    federate([report])
    report.to_csv(tmp_path / "sent.csv")
    with (tmp_path / "sent.csv").open(newline="") as file:
        header, *lines = csv.reader(file)
    assert header == ["round", "client", "part", "down_numel", "down_bytes", "up_numel", "up_bytes"]
    assert lines == [[str(row.round + 1), *map(str, row[1:])] for row in report.rows]
    assert len(lines) == 12


def test_a_fit_with_a_report_is_one_without():
    ends = []
    for callbacks in ([], [CommunicationReport()]):
        recorder = Recorder()
        trainer = federate([recorder, *callbacks], module=models.Module(models.norm_mlp()))
        share_names = {"comm/up_share", "comm/down_share"}
        values = {name: value.item() for name, value in trainer.callback_metrics.items() if name not in share_names}
        ends.append((trainer.lightning_module.state_dict(), values))
    assert all(torch.equal(value, ends[1][0][name]) for name, value in ends[0][0].items())
    assert ends[0][1] == ends[1][1]


class Present(L.Callback):
    def __init__(self):
        self.fits = 0

    def on_fit_start(self, trainer, pl_module):
        self.fits += 1


def test_other_callbacks_keep_their_hooks():
    """The report moves to the front during a loop over all callbacks."""
    present = [Present() for _ in range(4)]
    trainer = federate([*present[:2], CommunicationReport(), *present[2:]], 1)
    assert [callback.fits for callback in present] == [1, 1, 1, 1]
    assert isinstance(trainer.callbacks[1], CommunicationReport)
    assert [callback for callback in trainer.callbacks if isinstance(callback, Present)] == present


def test_a_resumed_run_counts_as_the_uninterrupted_one(tmp_path):
    def run(folder, stop=(), ckpt_path=None):
        report, logger = CommunicationReport(), MemoryLogger()
        checkpoint = ModelCheckpoint(folder, save_last=True, save_on_train_epoch_end=True)
        options = {"logger": logger, "enable_checkpointing": True, "clients_per_round": 2, "ckpt_path": ckpt_path}
        try:
            federate([report, checkpoint, *stop], 4, **options)
        except Stop:
            assert stop
        return report, logger.curve("comm/up_share")

    whole, curve = run(tmp_path / "all")
    last = tmp_path / "parts" / "last.ckpt"
    first, before = run(last.parent, [StopAt(2, 1)])
    assert {row.round for row in first.rows} == {0, 1, 2}
    state = torch.load(last, weights_only=True)["callbacks"]["CommunicationReport"]
    assert {row[0] for row in state["rows"]} == {0, 1}
    second, after = run(last.parent, ckpt_path=last)
    assert second.rows == whole.rows
    assert second.table() == whole.table()
    assert [*before, *after] == curve
    assert len({row.client for row in whole.rows if row.round == 0}) == 2


@pytest.mark.parametrize("keep", quick([0, 1, 3], [0, 3]))
def test_rounds_that_are_long_over_are_sums(keep, tmp_path):
    """The means do not change, even if a client never answers; a resumed run has the same rows."""

    class Silent(models.Module):
        def training_step(self, batch, batch_idx):
            if len(batch[0]) == 1:
                raise ValueError("Expected more than 1 value per channel when training, got input size torch.Size([1])")
            return super().training_step(batch, batch_idx)

    def run(keep, folder="whole", stop=(), ckpt_path=None):
        report = CommunicationReport(client_rounds=keep)
        options = {"enable_checkpointing": True, "ckpt_path": ckpt_path, "sizes": {"ann": 16, "bob": 1, "cid": 20}}
        checkpoint = ModelCheckpoint(tmp_path / folder, save_last=True, save_on_train_epoch_end=True)
        try:
            federate([report, checkpoint, *stop], 5, Silent(models.mlp()), clients_per_round=2, **options)
        except Stop:
            assert stop
        return report

    whole, folded = run(100), run(keep)
    assert folded.summary() == whole.summary()
    answers = {(row.round, row.client): row.up_numel > 0 for row in whole.rows}
    assert set(answers.values()) == {True, False}
    long_over = range(max(0, 4 - keep))
    assert [row for row in folded.rows if row.round not in long_over] == [
        row for row in whole.rows if row.round not in long_over
    ]
    for round in long_over:
        of_round = [row for row in whole.rows if row.round == round]
        assert [row for row in folded.rows if row.round == round] == [
            Traffic(
                round,
                "(all)",
                part,
                *(sum(row[index] for row in of_round if row.part == part) for index in range(3, 7)),
            )
            for part in ("net.0", "net.2")
        ]
    run(keep, "parts", [StopAt(3, 1)])
    again = run(keep, "parts", ckpt_path=tmp_path / "parts" / "last.ckpt")
    assert again.rows == folded.rows
    assert again.summary() == folded.summary()
    with pytest.raises(ValueError, match="`client_rounds` to be at least 0, but got -1"):
        CommunicationReport(client_rounds=-1)


def test_a_round_that_is_trained_again_counts_once(tmp_path):
    """The checkpoint inside a round contains part of this round."""
    report = CommunicationReport()
    inside = tmp_path / "inside.ckpt"

    class Save(L.Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            if (trainer.current_epoch, batch_idx) == (1, 2):
                trainer.save_checkpoint(inside)

    federate([report, Save()])
    again = CommunicationReport()
    federate([again], ckpt_path=inside)
    assert again.rows == report.rows
    assert {row[0] for row in torch.load(inside, weights_only=True)["callbacks"]["CommunicationReport"]["rows"]} == {
        0,
        1,
    }


def test_another_fit_starts_anew():
    report = CommunicationReport()
    federate([report], 2)
    federate([report], 1)
    assert {row.round for row in report.rows} == {0}
    assert CommunicationReport().summary() == []
    assert len(CommunicationReport().table().splitlines()) == 2


def test_it_needs_a_federation():
    with pytest.raises(MisconfigurationException, match="with a `Federation` callback, but got none"):
        train([CommunicationReport()], False, 1)
