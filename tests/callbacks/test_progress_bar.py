"""The progress bar describes the work between batches, and shows one loss."""

import lightning as L
import pytest

from lightning_fed.callbacks import FederatedProgressBar, FederatedRichProgressBar
from lightning_fed.console import STATUS_DISPLAYS
from tests import models

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

CLIENTS = models.vectors({"ann": 9, "[bob]": 8, "cid": 12})


class Descriptions(L.Callback):
    """Reads the bar's text after each change."""

    def __init__(self, bar):
        self.bar, self.texts = bar, []

    def read(self, status):
        if isinstance(self.bar, FederatedProgressBar):
            self.texts.append(self.bar.train_progress_bar.desc.removesuffix(": "))  # added by tqdm
        else:
            self.texts.append(
                pytest.importorskip("rich.text").Text.from_markup(self.bar.train_progress_bar.description).plain
            )

    def on_train_start(self, trainer, module):
        STATUS_DISPLAYS.append(self.read)

    def on_train_end(self, trainer, module):
        STATUS_DISPLAYS.remove(self.read)


@pytest.mark.parametrize("kind", ["tqdm", "rich"])
def test_the_bar_describes_the_work_between_batches(kind, federated_trainer):
    pytest.importorskip(kind)
    bar = FederatedProgressBar()
    if kind == "rich":
        bar = FederatedRichProgressBar(console_kwargs={"force_terminal": True, "width": 200})
    seen = Descriptions(bar)
    trainer = federated_trainer(max_rounds=2, enable_progress_bar=True, callbacks=[bar, seen])
    clients = models.as_datasets(CLIENTS)
    trainer.fit(models.Module(models.norm_mlp()), clients, clients)
    steps = ["averaging", *(f"recalibrating BatchNorm {place}/3" for place in (1, 2, 3)), "validating"]
    steps += [f"evaluating {name}" for name in clients]
    assert seen.texts == [f"Round {round}/2, {text}".removesuffix(", ") for round in (1, 2) for text in [*steps, ""]]
    assert STATUS_DISPLAYS == []


def test_a_fit_that_fails_leaves_no_display(federated_trainer):
    class Failing(models.Module):
        def training_step(self, batch, batch_idx):
            raise RuntimeError

    trainer = federated_trainer(max_rounds=1, enable_progress_bar=True, callbacks=[FederatedProgressBar()])
    with pytest.raises(RuntimeError):
        trainer.fit(Failing(models.mlp()), models.as_datasets(CLIENTS))
    assert STATUS_DISPLAYS == []


class Logging(models.Module):
    """Logs the loss for the bar, optionally only the mean at the end of the epoch."""

    def __init__(self, **options):
        super().__init__(models.mlp())
        self.log_options = options

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, **self.log_options)
        return loss


class Names(FederatedProgressBar):
    def __init__(self):
        super().__init__()
        self.names = []

    def get_metrics(self, trainer, module):
        metrics = super().get_metrics(trainer, module)
        self.names.append(list(metrics))
        return metrics


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"prog_bar": True}, ["client", "train_loss"]),
        ({"prog_bar": True, "on_step": False, "on_epoch": True}, ["client", "loss"]),
        ({}, ["client", "loss"]),
    ],
)
def test_the_bar_shows_one_loss(options, expected, federated_trainer):
    bar = Names()
    trainer = federated_trainer(max_rounds=1, enable_progress_bar=True, callbacks=[bar])
    trainer.fit(Logging(**options), models.as_datasets(CLIENTS))
    assert bar.names[0] == expected
