"""Counts files and classes for a one-round FedAvg fit with two clients and without validation.

`python -m tests.census_script` writes one line (JSON): `classes` and `files` run in the fit; `visit` lists the files
with code between a client's request and the answer. A separate process excludes caches and patches from other tests.
"""

import inspect
import json
import logging
import sys
import warnings
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import TensorDataset

import lightning_fed
from lightning_fed import FederatedCallback, FederatedDataModule, FederatedTrainer

PACKAGE = Path(lightning_fed.__file__).parent
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Regression(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Census:
    """Counts the package's functions while the profiler runs.

    Attributes:
        files: Paths relative to the package.
        classes: Classes with an executed method. An inherited method counts for the object's class.

    """

    def __init__(self):
        self.files, self.classes = set(), set()

    def count(self, frame):
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(PACKAGE):
            self.files.add(str(path.relative_to(PACKAGE)))
            kind = type(frame.f_locals.get("self"))
            if kind.__module__.startswith("lightning_fed."):
                self.classes.add(f"{kind.__module__}.{kind.__qualname__}")

    def start(self):
        frame = inspect.currentframe()
        while frame := frame.f_back:  # callers belong to the visit
            self.count(frame)
        sys.setprofile(lambda frame, event, _: self.count(frame) if event == "call" else None)


class VisitCensus(FederatedCallback):
    """Counts between a client's request and the arrival of the answer."""

    def __init__(self):
        self.census = Census()

    def on_client_request(self, trainer, module, client, request):
        self.census.start()

    def on_server_receive(self, trainer, module, update):
        sys.setprofile(None)


def build_fit(*callbacks):
    data = FederatedDataModule({name: TensorDataset(torch.ones(8, 2)) for name in "ab"}, batch_size=4)
    trainer, module = FederatedTrainer(max_rounds=1, callbacks=[*callbacks], **QUIET), Regression()
    return lambda: trainer.fit(module, datamodule=data)


def main():
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    visit, fit, census = VisitCensus(), build_fit(), Census()
    build_fit(visit)()
    census.start()
    fit()
    sys.setprofile(None)
    counts = {"classes": census.classes, "files": census.files, "visit": visit.census.files}
    print(json.dumps({name: sorted(values) for name, values in counts.items()}))  # noqa: T201


if __name__ == "__main__":
    main()
