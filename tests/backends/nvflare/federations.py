"""Federations trained by the tests on NVFLARE and in one process."""

from lightning_fed import Federation
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxSamples
from tests import models
from tests.backends.flower.halves import clients_of

SIZES = {"site-1": 33, "site-2": 20}

FEDERATIONS = {
    "fedavg": lambda: Federation(local_epochs=2, seed=3),
    "scaffold, kept optimizers": lambda: Federation("scaffold", optimizer_state="keep", seed=1),
    "secure sum": lambda: Federation("fedavgm", steps=[MaxSamples(40), SecureSum(5.0)], seed=3),
}


def module():
    return models.Module(models.dropout_mlp(), models.momentum)


def data_of(*sites):
    data = models.vectors(SIZES)
    return clients_of({site: data[site] for site in sites})
