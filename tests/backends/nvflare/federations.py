"""Federations trained by the tests on NVFLARE and in one process."""

import os
import signal
from pathlib import Path

from torch import nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.algorithms import FedBuff
from lightning_fed.privacy import SecureSum
from lightning_fed.steps import MaxSamples
from tests import models
from tests.backends.flower.halves import clients_of
from tests.study.sites import MANY, SECURED, Net, cases

SIZES = {"site-1": 33, "site-2": 20}
RANKS = "two processes per site"
PLAIN_STUDY = {"study: fedavg": "fedavg", "study: local": "local"}  # with the name of the model
SECURE_STUDY = {f"secure {case}": model for case, model in PLAIN_STUDY.items()}
STUDY = PLAIN_STUDY | SECURE_STUDY

FEDERATIONS = {
    "fedavg": lambda: Federation(local_epochs=2, seed=3),
    "scaffold, kept optimizers": lambda: Federation("scaffold", optimizer_state="keep", seed=1),
    "secure sum": lambda: Federation("fedavgm", steps=[MaxSamples(40), SecureSum(5.0)], seed=3),
    "buffer of two": lambda: Federation(FedBuff(2, 0), seed=3),
    "buffer of one": lambda: Federation(FedBuff(1), seed=3),
    **{case: lambda case=case: study_federation(case) for case in STUDY},
    RANKS: lambda: Federation(local_epochs=2, optimizer_state="keep", seed=3),
}


def study_federation(case):
    """The local models stay at the sites."""
    steps = [MaxSamples(40), SecureSum(5.0)] if case in SECURE_STUDY else []
    return Federation("fedavg", personal=["*"] if STUDY[case] == "local" else (), seed=3, steps=steps)


def places_of(case):
    """Client to site: a study with a secure sum needs five clients, here on two sites."""
    names = SECURED if case in SECURE_STUDY else [*SIZES]
    return {client: f"site-{1 + place % 2}" for place, client in enumerate(names)}


def study_module():
    """With constant initial weights, because random numbers differ between processes."""
    made = Net()
    for parameter in made.parameters():
        nn.init.zeros_(parameter)
    return made


def study_data(case, site):
    sizes = {name: MANY[name] for name in SECURED}
    chosen = {}
    for split in ("train", "val", "test"):
        data = zip(places_of(case).items(), cases(split, sizes).values(), strict=False)
        chosen[split] = {client: own for (client, place), own in data if place == site}
    return FederatedDataModule(chosen["train"], val=chosen["val"], test=chosen["test"], batch_size=8)


def module():
    return models.Module(models.dropout_mlp(), models.momentum)


def data_of(*sites):
    data = models.vectors(SIZES)
    return clients_of({site: data[site] for site in sites})


class Deadly(TensorDataset):
    """While a file exists, a read removes the file and kills the second process of a site."""

    def __getitem__(self, index):
        token = Path(os.environ["FEDJOB_FOLDER"]) / "deadly"
        if os.environ.get("RANK") == "1" and token.exists():
            token.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def plain_module():
    """Without dropout, because each process has another mask."""
    return models.Module(models.mlp(), models.momentum)


def vectors():
    """Data in batches of eight examples for each site, without a remainder."""
    return models.vectors({"site-1": 32, "site-2": 24})


def shared_data(node):
    """Half batches for two processes, at the site in ``node``."""
    site = node["site"]
    kind = Deadly if site == "site-2" else TensorDataset
    return FederatedDataModule({site: kind(*vectors()[site])}, batch_size=4)
