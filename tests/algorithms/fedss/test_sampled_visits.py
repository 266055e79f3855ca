"""A visit with a few classes equals a plain Lightning fit of a model with only these classes, for all options."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lightning_fed import FederatedCallback, FederatedDataModule
from lightning_fed.callbacks import SampledSoftmax
from lightning_fed.modules import SampledSoftmaxHead
from tests import models
from tests.breadth import quick
from tests.recorders import Recorder, fit_fixed, state_of
from tests.references import seed_reference, visit_seed_reference

pytestmark = [
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),  # Dynamo reads `grad`
]

SEED, CLASSES, NEGATIVES = 5, 30, 6


class FewClasses(nn.Module):
    """Logits of a client's head in training: cosines, plus a correction for negatives."""

    def __init__(self, count, positives):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(count, 8))
        self.correction = torch.where(positives, 0.0, math.log((CLASSES - int(positives.sum())) / NEGATIVES))

    def forward(self, features):
        cosine = F.normalize(features.float(), dim=1) @ F.normalize(self.weight, dim=1).T
        return 20 * cosine.float() + self.correction  # autocast multiplies in half precision


def body():
    torch.manual_seed(0)
    return nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2)


def whole():
    return nn.Sequential(*body(), SampledSoftmaxHead(8, CLASSES))


def plain(net):
    return models.Module(net, models.momentum)


def compiled(net):
    return models.Module(torch.compile(net, backend="eager"), models.momentum)  # without a C++ compiler


def per_step(optimizer):
    return {"scheduler": torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step), "interval": "step"}


class Rows(FederatedCallback):
    def __init__(self):
        self.held = []

    def on_client_start(self, trainer, module, client, broadcast):
        (rows,) = broadcast.rows.values()
        self.held.append(rows)


TABLE = {
    "plain": (plain, {}, {}, {}),
    "adam, epochs": (lambda net: models.Module(net, models.adam), {"local_epochs": 2}, {}, {}),
    "compiled": (compiled, {}, {}, {}),
    "manual": (lambda net: models.ManualModule(net), {}, {}, {}),
    "accumulation": (plain, {"local_steps": 4}, {"accumulate_grad_batches": 2}, {}),
    "clipping": (plain, {}, {"gradient_clip_val": 1.0}, {}),
    "scheduler": (lambda net: models.Module(net, models.sgd, per_step), {}, {}, {}),
    "bf16": (plain, {}, {"precision": "bf16-mixed"}, {}),
    "workers": (plain, {}, {}, {"num_workers": 1}),
}


@pytest.mark.parametrize("name", quick(TABLE, ["plain", "accumulation", "scheduler"]))
def test_a_visit_is_a_plain_fit(name, federated_trainer, plain_trainer):
    make, options, trainer_options, loading = TABLE[name]
    clients = {
        client: (inputs, (3 * torch.arange(len(inputs)) + index) % (9 + index))
        for index, (client, (inputs, _)) in enumerate(models.vectors().items())
    }
    recorder, rows = Recorder(), Rows()
    trainer = federated_trainer(
        max_rounds=1, seed=SEED, callbacks=[SampledSoftmax(NEGATIVES, target=1), recorder, rows], batch_norm="average",
        **options, **trainer_options,
    )  # fmt: skip
    data = FederatedDataModule(models.as_datasets(clients), batch_size=8, **loading)
    trainer.fit(make(whole()), datamodule=data)
    assert len(recorder.visits) == len(clients)
    for visit, held in zip(recorder.visits, rows.held, strict=True):
        positives = torch.isin(held, clients[visit.client][1])
        assert int((~positives).sum()) == NEGATIVES
        module = make(nn.Sequential(*body(), FewClasses(len(held), positives)))
        module.load_state_dict(visit.start)
        batches = [[inputs, torch.searchsorted(held, labels)] for inputs, labels in copy.deepcopy(visit.batches)]
        seed_reference(visit_seed_reference(SEED, 0, visit.client))
        fit_fixed(plain_trainer(max_epochs=1, **trainer_options), module, [batches])
        for entry, value in state_of(module).items():
            torch.testing.assert_close(
                visit.end[entry], value, rtol=1e-4, atol=1e-6, msg=lambda text, e=entry: e + text
            )
        moved = max(float((visit.end[entry] - value).abs().max()) for entry, value in visit.start.items())
        assert moved > 1e-2
