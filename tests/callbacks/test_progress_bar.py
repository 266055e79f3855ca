"""The progress bar describes the work between batches, and shows one loss."""

import pytest

from lightning_fed.callbacks import FederatedProgressBar, FederatedRichProgressBar
from tests import models

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")

CLIENTS = models.vectors({"ann": 9, "[bob]": 8, "cid": 12})


class TqdmDescriptions(FederatedProgressBar):
    """Stores the bar's text after each change."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def show_status(self, text):
        super().show_status(text)
        self.texts.append(self.train_progress_bar.desc.removesuffix(": "))  # added by tqdm


class RichDescriptions(FederatedRichProgressBar):
    def __init__(self):
        super().__init__(console_kwargs={"force_terminal": True, "width": 200})
        self.texts = []

    def show_status(self, text):
        super().show_status(text)
        self.texts.append(pytest.importorskip("rich.text").Text.from_markup(self.train_progress_bar.description).plain)


@pytest.mark.parametrize(("kind", "library"), [(TqdmDescriptions, "tqdm"), (RichDescriptions, "rich")])
def test_the_bar_describes_the_work_between_batches(kind, library, federated_trainer):
    pytest.importorskip(library)
    bar = kind()
    trainer = federated_trainer(max_rounds=2, enable_progress_bar=True, callbacks=[bar])
    clients = models.as_datasets(CLIENTS)
    trainer.fit(models.Module(models.norm_mlp()), clients, clients)
    steps = ["averaging", *(f"recalibrating BatchNorm {place}/3" for place in (1, 2, 3)), "validating"]
    steps += [*(f"evaluating {name}" for name in clients), ""]
    assert bar.texts == [f"Round {round}/2, {text}".removesuffix(", ") for round in (1, 2) for text in steps]


class Logging(models.Module):
    def __init__(self, **options):
        super().__init__(models.mlp())
        self.log_options = options

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        loss = self.loss(self(inputs), targets)
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
