"""The examples as a new user meets them: they run, their federated versions differ by a few lines and do train."""

import difflib
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_fed import ClientUpdate
from lightning_fed.algorithms import FedAvg
from lightning_fed.messages import Request
from lightning_fed.rule import RoundInfo
from tests.breadth import quick

EXAMPLES = Path(__file__).parents[1] / "examples"
SETTINGS = {
    "segmentation": ["--epochs", "3", "--scenes", "120", "--size", "24"],
    "classifier": ["--epochs", "5", "--samples", "1200"],
}


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs an example as ``python examples/<name>.py`` does, in an empty folder."""

    def run(name, *arguments):
        monkeypatch.syspath_prepend(EXAMPLES)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        monkeypatch.chdir(tmp_path)
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")

    yield run
    sys.modules.pop("classifier", None)


@pytest.fixture
def extend(monkeypatch):
    monkeypatch.syspath_prepend(EXAMPLES)
    yield runpy.run_path(str(EXAMPLES / "extend.py"))
    sys.modules.pop("classifier", None)


def read_curves(folder):
    """Logged name to (steps, values), of the only run in a folder."""
    events = EventAccumulator(str(folder / "lightning_logs" / "version_0")).Reload()
    curves = {}
    for name in events.Tags()["scalars"]:
        points = events.Scalars(name)
        curves[name] = [point.step for point in points], [point.value for point in points]
    return curves


@pytest.mark.parametrize("name", ["segmentation", "classifier", "lora"])
def test_a_project_is_federated_by_at_most_five_changed_lines(name):
    before, after = ((EXAMPLES / f"{name}{kind}.py").read_text().splitlines() for kind in ("", "_federated"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert 1 <= len(changed) <= 5, "\n".join(changed)


@pytest.mark.parametrize("name", quick(["segmentation", "classifier"], ["classifier"]))
def test_plain_example_trains(name, run, tmp_path):
    assert "lightning_fed" not in (EXAMPLES / f"{name}.py").read_text()
    run(name, *SETTINGS[name], "--epochs", "2")
    curves = read_curves(tmp_path)
    assert curves["train_loss"][1][-1] < 0.9 * curves["train_loss"][1][0]


@pytest.mark.parametrize(("name", "score", "clients"), [("segmentation", "val_miou", 8), ("classifier", "val_acc", 5)])
def test_federated_example_trains_in_rounds(name, score, clients, run, tmp_path):
    run(f"{name}_federated", *SETTINGS[name])
    curves = read_curves(tmp_path)
    rounds = list(range(int(SETTINGS[name][1])))
    for value in ("train_loss", "val_loss", score, "fed/clients", "comm/up_bytes", "comm/down_bytes"):
        assert curves[value][0] == rounds, value
    for loss in ("train_loss", "val_loss"):
        assert curves[loss][1][-1] < 0.9 * curves[loss][1][0]
    assert curves[score][1][-1] > 1.1 * curves[score][1][0]
    assert set(curves["fed/clients"][1]) == {clients}
    assert min(curves["comm/up_bytes"][1]) > 0
    assert curves["comm/total_up_bytes"][1][-1] == pytest.approx(sum(curves["comm/up_bytes"][1]))


def test_extend_example_shows_that_the_median_withstands_poison(run, capsys):
    run("extend", "--rounds", "3", "--samples", "600")
    lines = [line for line in capsys.readouterr().out.splitlines() if "accuracy" in line]
    accuracy = {line.split(":")[0]: float(line.split()[-1]) for line in lines}
    assert accuracy["CoordinateMedian"] > accuracy["FedAvg"] + 0.1


def update(client, **state):
    return ClientUpdate(client, 1, {name: torch.tensor(value) for name, value in state.items()})


@pytest.mark.parametrize("count", [1, 4, 5])
def test_coordinate_median_is_numpy_s(count, extend):
    aggregator, other = extend["CoordinateMedian"](), extend["CoordinateMedian"]()
    values = torch.randn(count, 3, 2)
    for half in (aggregator, other):
        half.start(RoundInfo(0), {"w": torch.zeros(3, 2)})
    for client, value in enumerate(values):
        (aggregator if client % 2 else other).receive(ClientUpdate(client, 1, {"w": value}))
    aggregator.merge(other)
    torch.testing.assert_close(aggregator.aggregate()["w"], torch.from_numpy(np.median(values.numpy(), axis=0)))


def test_coordinate_median_of_identical_clients_is_that_client(extend):
    aggregator = extend["CoordinateMedian"]()
    aggregator.start(RoundInfo(0), update("", w=0.0, steps=0).state)
    for client in "abcd":
        aggregator.receive(update(client, w=0.1, steps=7))
    state = aggregator.aggregate()
    assert torch.equal(state["w"], torch.tensor(0.1))
    assert torch.equal(state["steps"], torch.tensor(7))


class Pair(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a = torch.nn.Parameter(torch.zeros(1))
        self.b = torch.nn.Parameter(torch.zeros(2))
        self.register_buffer("count", torch.tensor([0.0]))
        self.logged = []

    def log(self, name, value, **options):
        self.logged.append((name, value))


@pytest.mark.parametrize(("clip", "factor"), [(1.3, 0.1), (13.0, 1.0), (100.0, 1.0)])
def test_clipping_keeps_the_direction_and_bounds_the_length(clip, factor, extend):
    module, fedavg = Pair(), FedAvg()
    fedavg.start(RoundInfo(0), {"a": torch.tensor([1.0]), "b": torch.tensor([2.0, 0.0]), "count": torch.tensor([0.0])})
    callback = extend["ClipAndNoise"](clip)
    callback.on_client_start(None, module, "x", fedavg.broadcast(Request("x")))
    answer = update("x", a=[4.0], b=[6.0, 12.0], count=[50.0])  # a step of (3, 4, 12): 13 long
    callback.on_client_end(None, module, "x", answer)
    torch.testing.assert_close(answer.state["a"], torch.tensor([1 + factor * 3.0]))
    torch.testing.assert_close(answer.state["b"], torch.tensor([2 + factor * 4.0, factor * 12.0]))
    assert answer.state["count"].tolist() == [50.0]
    assert module.logged == [("fed/clipped", float(factor < 1))]


def test_noise_has_the_deviation_asked_for(extend):
    module = torch.nn.Linear(1000, 100, bias=False)
    module.log = lambda *args, **options: None
    start = {"weight": module.weight.detach().clone()}
    fedavg = FedAvg()
    fedavg.start(RoundInfo(0), start)
    callback = extend["ClipAndNoise"](clip=4.0, noise=0.5)
    callback.on_client_start(None, module, "x", fedavg.broadcast(Request("x")))
    answer = ClientUpdate("x", 1, {"weight": start["weight"].clone()})  # a client that did not move
    callback.on_client_end(None, module, "x", answer)
    noise = answer.state["weight"] - start["weight"]
    assert float(noise.std()) == pytest.approx(2.0, rel=0.02)
    assert abs(float(noise.mean())) < 0.05
