"""A federation on Flower: the same model as in one process, from the same seeds; and what may go wrong on the way."""

import pytest

pytest.importorskip("flwr")

from lightning_fed import FederatedDataModule, Federation
from lightning_fed.engines.flower.client import ClientRunner, client_app
from lightning_fed.engines.flower.post import FlowerPost
from lightning_fed.engines.flower.server import run_server
from tests import models
from tests.conftest import QUIET
from tests.engines.grids import FakeGrid
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

OPTIONS = {name: QUIET[name] for name in ("accelerator", "logger", "enable_progress_bar", "enable_model_summary")}
SIZES = {"ann": 33, "bob": 20, "cid": 48}


def clients_of(data, batch_size=16):
    return FederatedDataModule(models.as_datasets(data), batch_size=batch_size)


def in_process(trainer, make_module, data, federation, rounds=3, callbacks=(), val=None):
    module = make_module()
    fitted = trainer(federation=federation, max_rounds=rounds, callbacks=list(callbacks), enable_checkpointing=False)
    datamodule = FederatedDataModule(models.as_datasets(data), val, batch_size=16)
    fitted.fit(module, datamodule=datamodule)
    return module, fitted


def on_flower(folder, make_module, data, federation, rounds=3, callbacks=(), val=None, change=None, options=()):
    """Two nodes: the first has every other client, the second the rest."""
    apps = {
        node: client_app(
            federation(), make_module, clients_of(data), OPTIONS, callbacks=callbacks, store=folder / f"{node}"
        )
        for node in (11, 12)
    }
    configs = {node: {"partition-id": place, "num-partitions": 2} for place, node in enumerate(apps)}
    grid = FakeGrid(apps, configs, change)
    post = FlowerPost(grid, time_limit=5, poll=0.01)
    made = []

    def model():
        made.append(make_module())
        return made[-1]

    trainer = run_server(
        federation(), model, val, {**OPTIONS, **dict(options), "max_epochs": rounds}, post,
        post.meet(len(data), 1), folder / "server", callbacks,
    )  # fmt: skip
    return made[0], trainer, post, grid


def test_the_engine_does_not_matter(federated_trainer, tmp_path):
    data = models.vectors(SIZES)

    def module():
        return models.Module(models.dropout_mlp(), models.momentum)

    def federation():
        return Federation("fedavg", local_epochs=2, seed=3)

    here, trainer = in_process(federated_trainer, module, data, federation())
    there, server, post, _ = on_flower(tmp_path, module, data, federation)
    assert_same(state_of(there), state_of(here))
    assert server.global_step == trainer.global_step
    book = server.callbacks[0].log_book
    assert (book.total_up_bytes, book.total_down_bytes) == (post.received, post.sent)
