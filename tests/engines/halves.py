"""The same federation in one process, and as two halves with Flower's apps and a fake grid between them."""

from lightning_fed import FederatedDataModule
from lightning_fed.engines.flower.client import client_app
from lightning_fed.engines.flower.post import FlowerPost
from lightning_fed.engines.flower.server import run_server
from tests import models
from tests.conftest import QUIET
from tests.engines.grids import FakeGrid

OPTIONS = {name: QUIET[name] for name in ("accelerator", "logger", "enable_progress_bar", "enable_model_summary")}
SIZES = {"ann": 33, "bob": 20, "cid": 48}


def clients_of(data, batch_size=16):
    return FederatedDataModule(models.as_datasets(data), batch_size=batch_size)


def in_process(trainer, make_module, data, federation, rounds=3, callbacks=(), val=None, options=()):
    module = make_module()
    fitted = trainer(federation=federation, max_rounds=rounds, callbacks=list(callbacks), **dict(options))
    datamodule = FederatedDataModule(models.as_datasets(data), val, batch_size=16)
    fitted.fit(module, datamodule=datamodule)
    return module, fitted


def on_flower(
    folder, make_module, data, federation, rounds=3, callbacks=list, val=None, change=None, options=(), limit=5,
    server_callbacks=(), grids=None,
):  # fmt: skip
    """Two nodes: the first has every other client, the second the rest.

    Args:
        folder: Where both halves keep what is theirs.
        make_module: Makes the module.
        data: Tensors by client.
        federation: Makes the federation.
        rounds: Their number.
        callbacks: Makes the callbacks of both halves.
        val: The server's validation data.
        change: See `FakeGrid`.
        options: Arguments of both Trainers.
        limit: Seconds in which a round's clients must answer.
        server_callbacks: Callbacks of the server alone.
        grids: A list that the grid is put into.

    Returns:
        The server's module, its Trainer, the post and the grid.

    """
    apps = {
        node: client_app(
            federation(), make_module, clients_of(data), {**OPTIONS, **dict(options)}, callbacks=callbacks(),
            store=folder / f"{node}",
        )
        for node in (11, 12)
    }  # fmt: skip
    grid = FakeGrid(
        apps, {node: {"partition-id": place, "num-partitions": 2} for place, node in enumerate(apps)}, change
    )
    if grids is not None:
        grids.append(grid)
    post = FlowerPost(grid, limit, poll=0.01)
    module = make_module()
    trainer = run_server(
        federation(), module, val, {**OPTIONS, **dict(options), "max_epochs": rounds}, post, post.meet(len(data), 1),
        folder / "server", [*callbacks(), *server_callbacks],
    )  # fmt: skip
    return module, trainer, post, grid
