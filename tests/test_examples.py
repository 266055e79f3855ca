"""The examples as run by a new user: they work, and the federated versions differ by a few lines and train."""

import copy
import difflib
import pickle
import runpy
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import TensorDataset

from lightning_fed import Broadcast, ClientUpdate, Federation
from lightning_fed.algorithms import METHODS
from lightning_fed.messages import Request
from lightning_fed.privacy import SecureSum
from lightning_fed.rule import RoundInfo
from lightning_fed.steps import Chain, MaxNorm, UpdateStep
from tests.recorders import state_of
from tests.test_docs import blocks

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
    """Logged values by name: (epochs or `None`, values), from the only run in a folder."""
    events = EventAccumulator(str(folder / "lightning_logs" / "version_0")).Reload()
    epochs = {point.step: int(point.value) for point in events.Scalars("epoch")}
    curves = {}
    for name in events.Tags()["scalars"]:
        points = events.Scalars(name)
        curves[name] = [epochs.get(point.step) for point in points], [point.value for point in points]
    return curves


@pytest.mark.parametrize("name", ["segmentation", "classifier", "lora"])
def test_a_project_is_federated_by_at_most_five_changed_lines(name):
    before, after = ((EXAMPLES / f"{name}{kind}.py").read_text().splitlines() for kind in ("", "_federated"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-"]
    assert 1 <= len(changed) <= 5, "\n".join(changed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["segmentation", "classifier"])
def test_plain_example_trains(name, run, tmp_path):
    assert "lightning_fed" not in (EXAMPLES / f"{name}.py").read_text()
    run(name, *SETTINGS[name], "--epochs", "2")
    curves = read_curves(tmp_path)
    assert curves["train_loss"][1][-1] < 0.9 * curves["train_loss"][1][0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "score"), [("segmentation", "val_miou"), ("classifier", "val_acc")])
def test_federated_example_trains_in_rounds(name, score, run, tmp_path):
    run(f"{name}_federated", *SETTINGS[name])
    curves = read_curves(tmp_path)
    rounds = list(range(int(SETTINGS[name][1])))
    for value in ("train_loss", "val_loss", score, "fed/drift"):
        assert curves[value][0] == rounds, value
    for loss in ("train_loss", "val_loss"):
        assert curves[loss][1][-1] < 0.9 * curves[loss][1][0]
    assert curves[score][1][-1] > 1.1 * curves[score][1][0]
    assert not {"fed/clients", "comm/up_MB"} & curves.keys()  # constant
    numbers, totals = curves["comm/total_up_MB"]
    assert numbers == rounds[1:]
    assert totals == pytest.approx([totals[0] * (number + 1) / 2 for number in numbers])


@pytest.mark.slow
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
    assert aggregator.broadcast(Request("a")).round == 0
    state = aggregator.aggregate()
    assert torch.equal(state["w"], torch.tensor(0.1))
    assert torch.equal(state["steps"], torch.tensor(7))


@pytest.mark.parametrize(("clip", "factor"), [(1.3, 0.1), (13.0, 1.0), (100.0, 1.0)])
def test_clipping_keeps_the_direction_and_bounds_the_length(clip, factor, extend):
    start = {"a": torch.tensor([1.0]), "b": torch.tensor([2.0, 0.0]), "count": torch.tensor([0.0])}
    step = extend["ClipAndNoise"](clip)
    step.start(RoundInfo(0, trainable=frozenset("ab")), start)
    answer = update("x", a=[4.0], b=[6.0, 12.0], count=[50.0])  # a change of (3, 4, 12) has length 13
    answer = step.on_client(answer, Broadcast(0, dict(start)), {})
    torch.testing.assert_close(answer.state["a"], torch.tensor([1 + factor * 3.0]))
    torch.testing.assert_close(answer.state["b"], torch.tensor([2 + factor * 4.0, factor * 12.0]))
    assert answer.state["count"].tolist() == [50.0]
    assert answer.metrics == {"clipped": float(factor < 1)}


def test_noise_has_the_deviation_asked_for(extend):
    start = {"weight": torch.nn.Linear(1000, 100, bias=False).weight.detach()}
    step = extend["ClipAndNoise"](clip=4.0, noise=0.5)
    step.start(RoundInfo(0), start)
    answer = ClientUpdate("x", 1, {"weight": start["weight"].clone()})  # a client without movement
    noise = step.on_client(answer, Broadcast(0, dict(start)), {}).state["weight"] - start["weight"]
    assert float(noise.std()) == pytest.approx(2.0, rel=0.02)
    assert abs(float(noise.mean())) < 0.05


def test_poison_is_the_change_turned_round_and_that_of_the_others_as_it_was(extend):
    start = {"w": torch.tensor([1.0, 1.0])}
    step = extend["Poison"](clients={3}, scale=5.0)
    step.start(RoundInfo(0), start)
    for client, expected in ((3, [-9.0, 6.0]), (4, [3.0, 0.0])):
        answer = step.on_client(update(client, w=[3.0, 0.0]), Broadcast(0, dict(start)), {})
        assert answer.state["w"].tolist() == expected


# --- Guide ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def guide(tmp_path_factory):
    """The guide to extensions as a module, so that its definitions can be pickled."""
    module = ModuleType("guide_extending")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("guide"))
        patch.setattr("lightning_fed.method.METHODS", dict(METHODS))
        patch.setitem(sys.modules, module.__name__, module)
        for block in blocks(EXAMPLES.parent / "docs" / "guides" / "extending.md", "python"):
            exec(block, vars(module))
        yield module


class Wire(UpdateStep):
    def __init__(self):
        self.messages = []

    def __deepcopy__(self, memo):
        return self  # with the test's list

    def start(self, info, state):
        super().start(info, state)
        self.messages.clear()

    def note(self, receive):
        def noted(update, sent, inspect):
            self.messages.append(copy.deepcopy((update, sent)))
            receive(update, sent, inspect)

        return noted


def train_with(guide, steps, callbacks, federated_trainer):
    """Fits the guide's rule for two rounds; returns the messages of the second round and the final model."""
    sizes = {"ann": 30, "bob": 7, "cam": 20, "dan": 12}
    generator = torch.Generator().manual_seed(0)
    clients = {
        name: TensorDataset(torch.randn(size, 8, generator=generator), torch.randint(3, (size,), generator=generator))
        for name, size in sizes.items()
    }
    wire = Wire()
    torch.manual_seed(0)
    module = guide.Module()
    trainer = federated_trainer(method=guide.ByRoot(), max_rounds=2, steps=[*steps, wire], callbacks=callbacks, seed=1)
    chain = trainer.federation.server.chain
    chain.receive = wire.note(chain.receive)
    trainer.fit(module, clients)
    return wire, state_of(module)


STEPS = {
    "streams": lambda guide: [MaxNorm(0.2), guide.HalfPrecision()],
    "remembers": lambda guide: [guide.Feedback()],
    "holds back": lambda guide: [guide.WithoutLongest(), guide.HalfPrecision()],
}


@pytest.mark.parametrize("name", STEPS)
def test_the_ports_of_the_guide_work_in_two_parts_as_in_one(name, guide, federated_trainer):
    """Splits the clients of a fit over two chains, and sends one chain's part to the other."""
    steps = STEPS[name](guide)
    wire, new = train_with(guide, steps, [guide.NoisyInputs()], federated_trainer)
    assert len(wire.messages) == 4
    assert {update.state["net.weight"].dtype for update, _ in wire.messages} == {torch.float16}
    chains = [Chain(guide.ByRoot(), steps) for _ in range(2)]
    for chain in chains:
        chain.start(wire.info, wire.state)
    for position, message in enumerate(wire.messages):
        chains[position % 2].receive(*message)
    chains[0].merge(pickle.loads(pickle.dumps(chains[1].part)))
    merged = chains[0].aggregate()
    assert merged.keys() == new.keys()
    for entry, value in merged.items():
        torch.testing.assert_close(value, new[entry], rtol=1e-6, atol=1e-7)
        assert not torch.equal(value, wire.state[entry])


def test_each_port_of_the_guide_changes_the_model(guide, federated_trainer):
    choices = [([], []), ([guide.HalfPrecision()], []), ([guide.WithoutLongest()], []), ([], [guide.NoisyInputs()])]
    models = [train_with(guide, *choice, federated_trainer)[1]["net.weight"] for choice in choices]
    assert not any(torch.equal(model, models[0]) for model in models[1:])


def test_the_guides_feedback_sends_in_the_end_what_rounding_took_away(guide):
    """1 + 2^-12 is not a float16 number; after four updates only the stored error is missing."""
    start, memory, total = {"w": torch.zeros(1)}, {}, 0.0
    step = guide.Feedback()
    step.start(RoundInfo(0), start)
    for _ in range(4):
        sent = step.on_client(ClientUpdate("a", 1, {"w": torch.tensor([1 + 2.0**-12])}), Broadcast(0, start), memory)
        total += float(step.on_server(sent, start).state["w"])
    assert total != 4.0
    assert total + float(memory["w"]) == 4 * (1 + 2.0**-12)


def test_the_guides_collecting_step_leaves_out_the_longest(guide):
    start = {"w": torch.zeros(2)}
    chain = Chain(guide.ByRoot(), [guide.WithoutLongest()])
    chain.start(RoundInfo(0), start)
    for client, samples, value in (("a", 4, 1.0), ("b", 1, 4.0), ("c", 9, -50.0)):
        chain.receive(ClientUpdate(client, samples, {"w": torch.full((2,), value)}), start)
    assert chain.aggregate()["w"].tolist() == [2.0, 2.0]  # (2 * 1 + 1 * 4) / 3


def test_a_secure_sum_outside_of_the_guides_collecting_step_is_refused(guide):
    with pytest.raises(ValueError, match="no `WithoutLongest` before `SecureSum` in `steps`"):
        Chain(guide.ByRoot(), [guide.WithoutLongest(), SecureSum(clip=1.0)])


def test_the_guides_method_joins_all_three(guide):
    method = guide.RootMean(noise=0.2)
    assert (method.name, type(method.aggregator)) == ("RootMean", guide.ByRoot)
    assert ([type(step) for step in method.steps], method.callbacks[0].noise) == ([MaxNorm], 0.2)
    federation = Federation(method, steps=[guide.Feedback()])
    assert [type(step) for step in federation.server.chain.steps] == [MaxNorm, guide.Feedback]
    assert federation.schedule.local_epochs == 2
