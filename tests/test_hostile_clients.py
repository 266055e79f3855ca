"""A single client's messages change no other client's values, and cause no permanent damage."""

import pytest
import torch

from lightning_fed import FederatedCallback
from lightning_fed.batch_norm import measurement
from lightning_fed.batch_norm.pooling import find_bad_statistics, pool_statistics
from lightning_fed.steps import MaxSamples, UniformWeights
from tests.models import Module, adam, as_datasets, mlp, norm_mlp, vectors
from tests.recorders import assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")

SIZES = {"ann": 20, "bob": 12, "cid": 16}


class Says(FederatedCallback):
    """One client sends values for the log."""

    def __init__(self, metrics):
        self.metrics = metrics

    def on_client_end(self, trainer, module, client, update):
        if client == "bob":
            update.metrics |= self.metrics


def test_numbers_of_clients_have_a_namespace_of_their_own(federated_trainer, caplog):
    forged = {"clients": 99.0, "update_norm": 1e9, "val_loss/mean": 0.0, "../fed/failed": 5.0, "fed/failed": 7.0}
    bad = {"a b": 1.0, "x" * 101: 1.0, "\ud800": 1.0, "nan": float("nan"), "inf": float("inf"), "new\nline": 1.0}
    data = as_datasets(vectors(SIZES))
    honest = federated_trainer(max_rounds=1)
    honest.fit(Module(mlp()), data, data)
    trainer = federated_trainer(max_rounds=1, callbacks=[Says(forged | bad)])
    trainer.fit(Module(mlp()), data, data)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    for name, value in honest.callback_metrics.items():
        assert logged.pop(name) == float(value), name
    assert logged == {f"clients/{name}": value for name, value in forged.items()}
    assert "Round 1: 6 values of client 'bob' are not logged, starting with 'a b'" in caplog.text


def test_a_client_sends_so_many_numbers_and_no_more(federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=1, callbacks=[Says({f"m{number:03d}": 1.0 for number in range(500)})])
    trainer.fit(Module(mlp()), as_datasets(vectors(SIZES)))
    names = sorted(name for name in trainer.callback_metrics if name.startswith("clients/"))
    assert names == [f"clients/m{number:03d}" for number in range(64)]
    assert "436 values of client 'bob' are not logged" in caplog.text


class Invents(FederatedCallback):
    """One client sends values under new names in every round."""

    def on_client_end(self, trainer, module, client, update):
        names = ["honest"] if client != "bob" else [f"a{trainer.current_epoch}-{number}" for number in range(60)]
        update.metrics |= dict.fromkeys([*names, *(["late"] if trainer.current_epoch else [])], 1.0)


def test_a_client_invents_no_names_without_end(federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=8, callbacks=[Invents()])
    with caplog.at_level("INFO", "lightning_fed"):
        trainer.fit(Module(mlp()), as_datasets(vectors(SIZES)))
    names = {name for name in trainer.callback_metrics if name.startswith("clients/")}
    assert len(names) == 256
    assert {"clients/honest", "clients/late"} < names, "names that most clients send come first"
    assert caplog.text.count("values of client 'bob' are not logged") == 1
    assert trainer.federation.round_log.totals["numbers"] == 8 * 60 - 254
    assert "226 values that clients sent for the log" in caplog.text


class ReadsWrongly(FederatedCallback):
    """A server callback that raises for one client's message."""

    def __init__(self, clients):
        self.clients = clients

    def on_server_receive(self, trainer, module, update):
        if update.client in self.clients:
            raise KeyError("scale")


def test_a_message_that_the_server_cannot_read_is_one_clients_fault(federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=2, callbacks=[ReadsWrongly(["bob"])])
    trainer.fit(Module(mlp()), as_datasets(vectors(SIZES)))
    assert (
        caplog.text.count("client 'bob' is excluded: the server cannot read the client's update: KeyError: 'scale'")
        == 2
    )
    with pytest.raises(KeyError, match="scale"):
        federated_trainer(max_rounds=2, callbacks=[ReadsWrongly(SIZES)]).fit(Module(mlp()), as_datasets(vectors(SIZES)))


# --- BatchNorm statistics ---------------------------------------------------------------------------------------------


def statistics(mean=0.0, variance=1.0, count=8.0):
    return {
        "batch_norm:0:mean": torch.full((2,), mean),
        "batch_norm:0:var": torch.full((2,), variance),
        "batch_norm:0:count": torch.tensor(count, dtype=torch.float64),
    }


@pytest.mark.parametrize(
    ("bad", "is_bad"),
    [
        ({}, False),
        ({"mean": 1e15, "variance": 1e30}, False),
        ({"mean": 3e38}, True),
        ({"mean": -1e19}, True),
        ({"variance": 3e38}, True),
        ({"variance": float("inf")}, True),
        ({"variance": -1.0}, True),
        ({"count": 0.0}, True),
        ({"count": 1e300}, True),
        ({"count": float("nan")}, True),
    ],
)
def test_statistics_from_which_nothing_finite_can_come(bad, is_bad):
    model = {"0.running_mean": torch.zeros(2)}
    assert bool(find_bad_statistics(statistics(**bad), model)) == is_bad


def test_no_pool_of_good_statistics_is_infinite():
    """The largest accepted values with both signs."""
    edge = (torch.finfo(torch.float32).max / 100) ** 0.5 * (1 - 1e-6)
    reports = [statistics(sign * edge, edge**2, 1.0) for sign in (1, -1)]
    assert all(find_bad_statistics(report, {"0.running_mean": torch.zeros(2)}) is None for report in reports)
    mean, variance = pool_statistics(reports, "0")
    assert variance.float().isfinite().all()
    assert mean.float().isfinite().all()


@pytest.mark.parametrize(
    ("steps", "counts"),
    [([], [20.0, 12.0, 16.0]), ([MaxSamples(14)], [14.0, 12.0, 14.0]), ([UniformWeights()], [12.0, 12.0, 12.0])],
    ids=["none", "most", "uniform"],
)
def test_what_counts_counts_in_pooled_statistics_too(steps, counts, federated_trainer, monkeypatch):
    """For the three clients pooled in every layer."""

    def noting(reports, layer, *tolerated, pool=measurement.pool_statistics):
        pooled.append([float(report[f"batch_norm:{layer}:count"]) for report in reports])
        return pool(reports, layer, *tolerated)

    pooled = []
    monkeypatch.setattr(measurement, "pool_statistics", noting)
    trainer = federated_trainer(max_rounds=1, steps=steps)
    trainer.fit(Module(norm_mlp(), adam), as_datasets(vectors(SIZES)))
    assert pooled
    assert all(counted == counts for counted in pooled)


def test_a_round_with_statistics_that_cannot_be_is_taken_back(federated_trainer, monkeypatch, caplog):
    """The earlier model is restored, and the next round trains."""

    def poisoned(reports, layer, *tolerated, pool=measurement.pool_statistics):
        mean, variance = pool(reports, layer, *tolerated)
        return mean, variance * (float("inf") if trainer.current_epoch == 1 else 1)

    states = []

    class Watch(FederatedCallback):
        def on_server_round_end(self, trainer, module, is_new):
            states.append((is_new, state_of(module)))

    monkeypatch.setattr(measurement, "pool_statistics", poisoned)
    trainer = federated_trainer(max_rounds=3, callbacks=[Watch()])
    trainer.fit(Module(norm_mlp(), adam), as_datasets(vectors(SIZES)))
    assert [is_new for is_new, _ in states] == [True, False, True]
    assert_same(states[0][1], states[1][1])
    assert "Round 2 is reverted: entry 'net.1.running_var' has NaN or infinite values." in caplog.text
    assert all(value.isfinite().all() for value in states[2][1].values())
    assert trainer.federation.server.report.failed == {}
