"""Recipes for the tests of `compare`, with a callback to record the fits.

`python -m tests.compare.compare_script PLACE COMMAND...` runs a command of `lightning-fed`. When a run reaches the
place (as JSON), the process writes the file `reached` and waits to be killed.
"""

import json
import sys
import time
from pathlib import Path
from typing import ClassVar

from lightning_fed import FederatedCallback
from lightning_fed.callbacks.federation import find_federation
from lightning_fed.cli.main import main
from tests.resume_script import Data

# A model with BatchNorm, dropout and schedulers, on 60 examples; 3 of 6 clients per round.
OWN = """
seed_everything: 0
model: {class_path: tests.resume_script.Net, init_args: {schedulers: true}}
data: tests.resume_script.Data
trainer:
  max_rounds: 3
  clients_per_round: 3
  local_epochs: 2
  availability:
    client_dropout: 0.1
  accelerator: cpu
  default_root_dir: .
  partition: {class_path: Dirichlet, init_args: {num_clients: 6, alpha: 1.0, min_size: 4}}
  callbacks:
    - class_path: tests.compare.compare_script.Notes
    - class_path: ModelCheckpoint
      init_args: {dirpath: checkpoints, filename: '{epoch}', monitor: val_loss, mode: min, save_top_k: -1}
"""

# Clients with separate validation and test data.
CLIENTS = """
model:
  class_path: ClassificationTask
  init_args: {model: mlp, in_channels: 60, input_size: 1, model_kwargs: {hidden: [8]}, num_classes: 10, lr: 0.05}
data: {class_path: Synthetic, init_args: {num_clients: 4, batch_size: 40, seed: 10}}
trainer:
  max_rounds: 2
  clients_per_round: 0.5
  local_epochs: 2
  accelerator: cpu
  callbacks:
    - class_path: tests.compare.compare_script.Notes
    - class_path: ModelCheckpoint
      init_args: {monitor: val_acc, mode: max}
"""


class Interruption(Exception):
    pass


def interrupt():
    raise Interruption


class Attached(Data):
    def setup(self, stage):
        assert self.trainer.world_size == 1

    def train_dataloader(self):
        assert self.trainer.world_size == 1
        return super().train_dataloader()


class Notes(FederatedCallback):
    """Records the input of every fit; acts at a place: (number of the fit, hook, round, batch)."""

    fits: ClassVar[list[dict]] = []
    place: ClassVar[list | None] = None
    action = staticmethod(interrupt)

    def on_train_start(self, trainer, module):
        state = {name: value.clone() for name, value in module.state_dict().items()}
        self.fits.append({"state": state, "visits": [], "seen": [], "rates": [], "clients": {}, "logged": []})

    def on_client_start(self, trainer, module, client, broadcast):
        federation = find_federation(trainer)
        planned = federation.current_visit
        self.fits[-1]["visits"].append((planned.visit, planned.num_batches, planned.num_samples))
        parts = dict(federation.population.source.datasets)
        self.fits[-1]["clients"] = {client: part.indices for client, part in parts.items() if hasattr(part, "indices")}

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.fits[-1]["seen"] += batch[0][:, 0].tolist()
        if batch_idx == 0:
            self.fits[-1]["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])
        self.act("on_train_batch_start", trainer, batch_idx)

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        if not trainer.sanity_checking:
            self.act("on_validation_batch_end", trainer, batch_idx)

    def on_train_epoch_end(self, trainer, module):
        self.fits[-1]["logged"].append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_train_end(self, trainer, module):
        self.act("on_train_end", trainer, 0)

    def act(self, hook, trainer, batch):
        if self.place is not None and self.place == [len(self.fits), hook, trainer.current_epoch, batch]:
            type(self).place = None
            self.action()


def wait_for_the_end():
    Path("reached").touch()
    time.sleep(600)


if __name__ == "__main__":
    # Not the class in this module, `__main__`, but the recipe's class.
    from tests.compare.compare_script import Notes as Named

    Named.place, Named.action = json.loads(sys.argv[1]), staticmethod(wait_for_the_end)
    main(sys.argv[2:])
