"""Methods by name, class and object are equivalent; invalid methods give errors."""

import inspect
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

from lightning_fed import (
    Aggregator,
    FederatedCallback,
    FederatedTrainer,
    Federation,
    Method,
    algorithms,
)
from lightning_fed.algorithms import (
    METHODS,
    FairAvg,
    FedAvg,
    FedAvgM,
    FedBN,
    FedDANE,
    FedProx,
    FedSS,
    ServerOptimizer,
    build_method,
    method_names,
    register,
)
from lightning_fed.callbacks import (
    ClassPrototypes,
    GradientCorrection,
    LayerwiseTraining,
    ProximalTerm,
    SampledSoftmax,
    find_federation,
)
from lightning_fed.cli.main import main
from lightning_fed.cli.methods import costs_of, read_methods
from lightning_fed.compare import MethodChoice
from lightning_fed.steps import UniformWeights
from tests import models, warm_process
from tests.breadth import quick
from tests.recorders import Recorder, assert_same, bytes_of, state_of

ROOT = Path(__file__).parents[1]

# The fits only train, but the modules define a validation step.
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


# --- Table ------------------------------------------------------------------------------------------------------------


def test_every_method_of_the_room_is_in_the_table():
    made = [getattr(algorithms, name) for name in algorithms.__all__]
    classes = {kind for kind in made if inspect.isclass(kind) and issubclass(kind, Method | Aggregator)}
    helpers = {Method, algorithms.AveragingAggregator, algorithms.ChannelRule, algorithms.RobustAggregator}
    helpers |= {algorithms.ServerOptimizer, algorithms.AsynchronousRule}
    assert classes - helpers == set(METHODS.values())
    assert method_names() == sorted(kind.__name__.lower() for kind in METHODS.values())


@pytest.mark.parametrize("name", METHODS)
def test_a_name_builds_its_class(name):
    options = {"fedss": {"num_negatives": 4}, "fixbn": {"after": 2}, "fltrust": {"trusted": "server"}}.get(name, {})
    method = build_method(name.upper(), **options)
    assert method.name == METHODS[name].__name__
    assert type(method if issubclass(METHODS[name], Method) else method.aggregator) is METHODS[name]
    federation = Federation(method)
    assert federation.server.rule is federation.method.aggregator
    assert federation.server.rule is not method.aggregator


def test_a_rule_comes_with_its_callbacks():
    rule = FedDANE(mu=0.3)
    method = build_method(rule)
    assert (method.name, method.aggregator, method.settings, method.steps) == ("FedDANE", rule, {}, ())
    assert [type(callback) for callback in method.callbacks] == [GradientCorrection, ProximalTerm]
    assert method.callbacks[1].mu == 0.3
    assert [type(callback) for callback in FedBN(aggregator=rule).callbacks] == [GradientCorrection, ProximalTerm]
    # from FedMA, the base
    assert [type(callback) for callback in build_method("pfnm").callbacks] == [LayerwiseTraining]


def test_a_method_begins_from_another():
    """Inherits rule and callbacks, and puts the base's steps inside the additional steps."""
    prox = FedProx(mu=0.3)
    method = FedBN(aggregator=FedAvgM(aggregator=Method(prox, steps=[UniformWeights()], local_epochs=2)))
    assert (method.name, method.aggregator) == ("FedBN", prox.aggregator)
    assert method.settings == {"batch_norm": "personal", "local_epochs": 2}
    assert method.callbacks == prox.callbacks
    assert [type(callback) for callback in prox.callbacks] == [ProximalTerm]
    assert [type(step) for step in method.steps] == [UniformWeights, ServerOptimizer]
    assert build_method(method) is method
    assert build_method("ditto:aggregator=fairavg").steps[0].weight(7) == 1


def test_a_method_is_registered_once(monkeypatch):
    monkeypatch.setattr("lightning_fed.method.METHODS", dict(METHODS))

    class FedMine(FedAvg):
        """Mine."""

    assert register(FedMine) is FedMine
    assert register(FedMine) is FedMine
    assert type(build_method("fedmine").aggregator) is FedMine
    with pytest.raises(
        ValueError, match=r"a new method name, but 'fedavg' is already a method of lightning_fed\.algorithms"
    ):
        register(type("FedAvg", (FedAvg,), {}))


# --- Options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["fedss:num_negatives=4:server_momentum=0.5", "fedss"])
def test_options_in_the_text_and_beside_it(given):
    options = {} if ":" in given else {"num_negatives": 4, "server_momentum": 0.5}
    method = build_method(given, **options)
    assert isinstance(method.callbacks[0], SampledSoftmax)
    assert method.callbacks[0].num_negatives == 4
    assert method.steps[0].optimizer_kwargs["momentum"] == 0.5


def test_options_of_its_callbacks():
    method = build_method("fedmargin:margin=relative:layer=body", max_batches=3)
    (callback,) = method.callbacks
    assert isinstance(callback, ClassPrototypes)
    assert (callback.margin, callback.layer, callback.max_batches) == ("relative", "body", 3)
    assert method.aggregator.margin == "relative"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: build_method("fedsgd"), ValueError, r"`method` to be one of 39 names, but got 'fedsgd'"),
        (lambda: build_method("nowhere.FedX"), ValueError, "an import path, but got 'nowhere.FedX': No module"),
        (lambda: build_method("torch.FedX"), ValueError, "an import path, but got 'torch.FedX': module 'torch'"),
        (lambda: build_method("torch.nn.Linear"), ValueError, "path of a Method or Aggregator class, but got 'torch"),
        (
            lambda: build_method("fedss"),
            ValueError,
            r"'fedss' with the options \['num_negatives'\], which have no default",
        ),
        (
            lambda: build_method("fedprox", nu=1),
            ValueError,
            r"option of fedprox` to be one of \['mu', 'row_.*\], but got 'nu'. Did you mean 'mu'",
        ),
        (lambda: build_method("fedprox:mu"), ValueError, "`option=value`, but got 'mu' in 'fedprox:mu'"),
        (lambda: build_method("fedprox:mu=1:mu=2"), ValueError, "each option only once, but got 'mu' again"),
        (lambda: build_method(FedAvg(), mu=1), TypeError, r"only with a method's name, but got \['mu'\] with"),
        (lambda: build_method(FedBN), TypeError, "a name, a Method or an Aggregator object, but got <class"),
        (lambda: Method("fedsgd"), ValueError, r"`method` to be one of 39 names, but got 'fedsgd'"),
        (lambda: FedBN(3), TypeError, "a name, a Method or an Aggregator object, but got 3"),
    ],
)
def test_what_is_no_method(make, error, message):
    with pytest.raises(error, match=message):
        make()


# --- Entry points -----------------------------------------------------------------------------------------------------


def test_what_means_the_same_trains_the_same(federated_trainer):
    """A name, a text with options, a rule, and a method around a rule."""
    given = ["fedavgm", FedAvgM(), "fedavgm:momentum=0.9", Method(FedAvgM()), Method("fedavgm")]
    states = []
    for method in given:
        module = models.Module(models.BaseAndHead(), models.momentum)
        clients = models.as_datasets(models.vectors({"ann": 10, "bob": 7}))
        federated_trainer(max_rounds=2, method=method, seed=3).fit(module, clients)
        states.append(state_of(module))
    for state in states[1:]:
        assert_same(states[0], state)


def test_the_first_argument_of_both_doors():
    for federation in (FederatedTrainer("fairavg", logger=False).federation, Federation("fairavg")):
        assert type(federation.method) is FairAvg
        assert [type(step) for step in federation.server.chain.steps] == [UniformWeights]
    trainer = FederatedTrainer(FedSS(num_negatives=4), logger=False)
    assert type(trainer.federation.method) is FedSS
    with pytest.raises(ValueError, match=r"`federation` or its arguments, but got `federation` and \['method'\]"):
        FederatedTrainer("fairavg", federation=Federation(), logger=False)


# --- Custom methods ---------------------------------------------------------------------------------------------------


@pytest.fixture
def my_method(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "examples")
    import my_method

    yield my_method
    for name in ("my_method", "classifier"):
        sys.modules.pop(name, None)


def test_the_example_without_its_option_is_fedavg(my_method, federated_trainer):
    states = {}
    for method in ("fedavg", my_method.FedLoss(q=0.0), my_method.FedLoss(q=3.0)):
        module = models.Module(models.mlp(), models.momentum)
        federated_trainer(max_rounds=2, method=method, seed=1).fit(module, models.as_datasets(models.vectors()))
        states[method if isinstance(method, str) else method.aggregator.q] = state_of(module)
    assert_same(states["fedavg"], states[0.0])
    assert any(not torch.equal(value, states["fedavg"][name]) for name, value in states[3.0].items())


def test_the_example_by_its_path(my_method):
    assert build_method("my_method.FedLoss:q=2").aggregator.q == 2
    choice = MethodChoice.parse("my_method.FedLoss:q=2:clients_per_round=5")
    federation = choice.federation(Federation(local_epochs=2))
    assert (federation.method.name, federation.method.aggregator.q) == ("FedLoss", 2)
    assert (federation.schedule.clients_per_round, federation.schedule.local_epochs) == (5, 2)
    assert choice.label == "my_method.FedLoss:q=2:clients_per_round=5"


def test_the_example_runs(tmp_path):
    text, _ = warm_process.run(ROOT / "examples" / "my_method.py", "--rounds", "1", "--samples", "200", cwd=tmp_path)
    assert re.findall(r"^(\w+): validation accuracy 0\.\d+$", text, re.M) == ["FedAvg", "FedLoss"]


def test_the_tutorial_shows_the_example():
    """The classes in the file appear verbatim."""
    example = (ROOT / "examples" / "my_method.py").read_text()
    page = (ROOT / "docs" / "tutorials" / "method.md").read_text()
    shown = example[example.index("class ReportLoss") : example.index("def train")].rstrip()
    assert shown in page


# --- Command ----------------------------------------------------------------------------------------------------------


def test_the_list_of_methods(capsys):
    main(["methods"])
    header, _, *lines = capsys.readouterr().out.split("\n\n")[0].splitlines()
    assert header.split() == ["METHOD", "FOR"]
    assert [line.split()[0] for line in lines] == method_names()
    assert all(len(line.split()) > 2 for line in lines)
    main(["methods", *method_names()])
    said = capsys.readouterr().out
    names = re.findall(r"^(\w+)$", said, re.M)
    assert names == method_names()
    for name, kind in METHODS.items():
        text = re.search(rf"^{name}\n((?: .*\n)+)", said, re.M)[1]
        words = " ".join(text.split())
        assert inspect.getdoc(kind).splitlines()[0] in words
        for option in inspect.signature(kind).parameters:
            assert re.search(rf"\b{option}\b", words), (name, option)
    assert max(map(len, said.splitlines())) <= 120
    main(["methods", "FedAwS"])
    assert "SampledSoftmax: num_negatives=0, objective='posonly'" in capsys.readouterr().out


class Passes(models.Module):
    """Counts the batches of `training_step` inside and outside visits."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Sequential(nn.Linear(6, 96), nn.ReLU(), nn.Linear(96, models.CLASSES)), models.sgd)
        self.counts = Counts()

    def training_step(self, batch, batch_idx):
        self.counts.batches["trained" if self.training else "beside"] += 1
        return super().training_step(batch, batch_idx)


class Counts:
    """Not a container, which an isolated pass would restore."""

    def __init__(self):
        self.batches = Counter()


class Reset(FederatedCallback):
    def on_train_epoch_start(self, trainer, module):
        module.counts.batches.clear()


def test_the_listed_methods_are_those_registered():
    assert read_methods() == {name: inspect.getdoc(METHODS[name]) for name in method_names()}


COSTS = {name: costs_of(inspect.getdoc(kind)) for name, kind in METHODS.items()}
NUMBERS = [name for name, costs in COSTS.items() if re.match(r"\d+ models? down, \d+ up", costs["Sends"])]


def number_in(pattern, text):
    """The number before these words; 0 if missing."""
    found = re.search(rf"(\d+) {pattern}", text)
    return int(found[1]) if found else 0


def test_every_method_says_what_it_costs():
    assert all(list(costs) == ["Sends", "Keeps", "Costs", "For"] for costs in COSTS.values())
    assert len(NUMBERS) >= 17


# Each kind of costs once: messages, state of clients and server, additional passes, models of the asynchronous rules.
CHOSEN = ("fedavg", "scaffold", "ditto", "moon", "fedala", "fedavgm", "fesem", "qffl", "fedbuff", "fedasync")


@pytest.mark.parametrize("name", quick(NUMBERS, CHOSEN))
def test_what_a_method_says_of_its_costs_is_what_is_measured(name, federated_trainer):
    """In round 2: bytes of messages and client state, batches of additional passes; except for small parts."""
    costs, recorder, module = COSTS[name], Recorder(), Passes()
    clients = models.vectors({"ann": 32, "bob": 32, "cid": 32})
    trainer = federated_trainer(max_rounds=3, method=name, callbacks=[recorder, Reset()])
    trainer.fit(module, models.as_datasets(clients))
    model = bytes_of(recorder.aggregates[0])
    federation = find_federation(trainer)
    traffic = federation.server.report
    count = len(traffic.received)
    assert traffic.down_bytes / (count * model) == pytest.approx(number_in("models? down", costs["Sends"]), abs=0.05)
    up = int(re.search(r"down, (\d+) up", costs["Sends"])[1])
    assert traffic.up_bytes / (count * model) == pytest.approx(up, abs=0.05)
    kept = [bytes_of(federation.store.get(client) or {}) / model for client in clients]
    partly = 0.35 if name == "fedala" else 0.0  # the weights of the last layer, a third of this model
    assert kept == pytest.approx([number_in("models? per client", costs["Keeps"]) + partly] * 3, abs=0.06)
    on_server = sum(bytes_of({"": value}) for value in tensors_in(federation.server.chain.state_dict())) / model
    expected = number_in("models? on the server", costs["Keeps"])
    expected = federation.server.rule.num_centers if name == "fesem" else expected
    if federation.server.rule.has_versions:
        expected = len({arrival.version for arrival in federation.server.rule.order.clock.flying})
    assert on_server == pytest.approx(expected, abs=0.05)
    # Each client has one batch; FedALA's passes cover a share of the batch.
    assert module.counts.batches["beside"] == count * number_in("pass(?:es)? over", costs["Costs"])
    assert module.counts.batches["trained"] == count * (2 if name == "ditto" else 1)


def tensors_in(value):
    if isinstance(value, torch.Tensor):
        return [value]
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [tensor for element in inside for tensor in tensors_in(element)]


def test_a_list_of_what_there_is_not(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["methods", "fedsgd"])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "but got 'fedsgd'. Did you mean 'fed" in said
    assert "'krum'" not in said  # with a close match, not all names
