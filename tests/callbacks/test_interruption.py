"""An interrupted fit reports two round numbers: the current round, and the last round with a new model."""

import logging

import pytest
import torch

from lightning_fed import FederatedCallback
from tests import models
from tests.recorders import assert_same, state_of


class Interrupts(FederatedCallback):
    """Raises the error for Ctrl-C in a second visit."""

    def __init__(self, round):
        self.round, self.visits, self.before = round, 0, None

    def on_server_round_start(self, trainer, module):
        self.before = state_of(module)

    def on_client_start(self, trainer, module, client, broadcast):
        self.visits += 1
        if trainer.current_epoch == self.round and self.visits % 3 == 2:
            raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore:You defined a `validation_step`")
@pytest.mark.parametrize(("round", "origin"), [(0, "the initial model"), (2, "from the end of round 2")])
def test_ctrl_c_reports_the_round_of_the_model(round, origin, federated_trainer, caplog):
    callback = Interrupts(round)
    trainer = federated_trainer(max_rounds=4, callbacks=[callback])
    torch.manual_seed(0)
    trained = models.Module(models.mlp())
    clients = models.as_datasets(models.vectors({"ann": 9, "bob": 8, "cid": 12}))
    with caplog.at_level(logging.INFO, "lightning_fed"), pytest.raises((KeyboardInterrupt, SystemExit)):
        trainer.fit(trained, clients)
    assert f"The fit ended in round {round + 1} of 4. The model is {origin}." in caplog.text
    assert_same(state_of(trained), callback.before)
