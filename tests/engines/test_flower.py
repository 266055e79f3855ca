"""A federation on Flower: the same model as in one process, from the same seeds; and what may go wrong on the way."""

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from torch import nn

pytest.importorskip("flwr")

from lightning_fed import Federation
from lightning_fed.callbacks import ClassPrototypes, FedBN, FedFusion, FedPer, FedSS
from lightning_fed.tasks import ClassificationTask
from tests import models
from tests.engines.halves import SIZES, in_process, on_flower
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@dataclass
class Case:
    """A federation, what it trains and on what."""

    federation: Callable
    module: Callable = lambda: models.Module(models.dropout_mlp(), models.momentum)
    data: Callable = models.vectors
    callbacks: Callable = list
    options: dict = field(default_factory=dict)


def norm_module():
    return models.Module(models.norm_mlp(), models.adam)


def head_module():
    torch.manual_seed(0)
    return ClassificationTask(
        nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 12)), num_classes=12, head="sampled_softmax", lr=0.05
    )


def warm_up(optimizer):
    return {
        "scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 5)),
        "interval": "step",
    }


def milestones(optimizer):
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 2], gamma=0.3)


def base_and_head():
    return models.Module(models.BaseAndHead(), models.momentum)


def cnn_module():
    return models.Module(models.cnn(), models.momentum)


CASES = {
    "fedavg, stragglers, two of three": Case(lambda: Federation(
        local_epochs=3, stragglers=0.5, clients_per_round=2, batch_norm="average", seed=1)),
    "dropout": Case(lambda: Federation(dropout=0.4, seed=2)),
    "fedavgm": Case(lambda: Federation("fedavgm")),
    "fedadam": Case(lambda: Federation("fedadam")),
    "fairavg": Case(lambda: Federation("fairavg")),
    "fedprox": Case(lambda: Federation("fedprox")),
    "fedatt": Case(lambda: Federation("fedatt")),
    "fesem": Case(lambda: Federation("fesem")),
    "fedmargin": Case(lambda: Federation("fedmargin")),
    "recalibrate": Case(lambda: Federation(batch_norm="recalibrate"), norm_module),
    "frozen": Case(lambda: Federation(batch_norm="frozen", frozen=["net.0.*"]), norm_module),
    "fedper": Case(lambda: FedPer("net.head.*"), base_and_head),
    "fedbn": Case(lambda: FedBN(), norm_module),
    "kept optimizers": Case(lambda: Federation(optimizer_state="keep"), norm_module),
    "fedss": Case(lambda: FedSS(num_negatives=3), head_module),
    "fedfusion": Case(lambda: FedFusion(operator="multi", batch_norm="average"), cnn_module, models.images),
    "last local prototypes": Case(
        lambda: Federation("fedmargin"), callbacks=lambda: [ClassPrototypes(lpm_before="last_local")]),
    "a schedule of rounds": Case(Federation, lambda: models.Module(models.mlp(), models.momentum, milestones)),
    "a schedule of steps": Case(Federation, lambda: models.Module(models.mlp(), models.adam, warm_up)),
    "two optimizers": Case(Federation, models.TwoOptimizers),
    "bf16": Case(Federation, options={"precision": "bf16-mixed"}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_methods(case, federated_trainer, tmp_path):
    """Three rounds: the global models, the bytes, and what the log says of the rounds."""
    data = case.data(SIZES)
    here, trainer = in_process(
        federated_trainer, case.module, data, case.federation(), callbacks=case.callbacks(), options=case.options
    )
    there, server, post, _ = on_flower(
        tmp_path, case.module, data, case.federation, callbacks=case.callbacks, options=case.options
    )
    assert_same(state_of(there), state_of(here))
    books = [each.callbacks[0].log_book for each in (server, trainer)]
    assert books[0].state_dict() == books[1].state_dict()
    assert (books[0].total_up_bytes, books[0].total_down_bytes) == (post.received, post.sent)
    assert server.global_step == trainer.global_step
