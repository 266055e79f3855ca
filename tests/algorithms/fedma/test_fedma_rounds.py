"""FedMA's rounds: messages, participants, and passes that cannot continue."""

import itertools

import lightning as L
import pytest
import torch
from torch import nn

from lightning_fed import Faults, Federation
from lightning_fed.algorithms import FedMA
from lightning_fed.callbacks import CommunicationReport, FederatedCallback
from tests import models
from tests.algorithms.fedma.fits import (
    CLASSES,
    WIDTHS,
    Visitors,
    data_of,
    fit,
    logged,
    many,
    mlp,
    momentum,
    norm_net,
    parts,
)
from tests.breadth import quick
from tests.recorders import MemoryLogger, assert_same, state_of

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


class Forget(L.Callback):
    def __init__(self, round):
        self.round = round

    def on_train_epoch_start(self, trainer, pl_module):
        if trainer.current_epoch == self.round:
            store = trainer.federation.store.checkpoint(self.round)
            kept = [index for index, client in enumerate(store["clients"]) if client != "c2"]
            store = {name: [values[index] for index in kept] for name, values in store.items()}
            trainer.federation.store.restore(self.round, store)


# --- Messages ---------------------------------------------------------------------------------------------------------


def test_bytes_of_a_pass(federated_trainer):
    """Every layer is sent up once; down go the model, then each matched layer with neuron positions."""
    logger, clients_data = MemoryLogger(), parts()
    rule = FedMA("permute")
    trainer = federated_trainer(max_rounds=6, method=rule, logger=logger)
    fit(trainer, models.Module(mlp(), momentum), data_of(clients_data))
    layer = [4 * (a * b + b) for a, b in itertools.pairwise(WIDTHS)]
    up = logged(logger, "comm/up_bytes")
    down = logged(logger, "comm/down_bytes")
    counts = 8 * CLASSES  # class counts, with the output layer
    step = 2 * 8  # pass and stage, both required and stored
    sent = [layer[0], layer[1] + step, layer[2] + counts + step]
    assert up == [3 * size for size in (*sent, sent[0] + step, *sent[1:])]
    assignments = [8 * (width + 1) for width in WIDTHS[1:3]]
    middle = [3 * (layer[0] + assignments[0] + 2 * step), 3 * (layer[1] + assignments[1] + 2 * step)]
    first = 3 * (sum(layer) + step)
    again = 3 * (layer[2] + 2 * step)  # the client has all other layers
    assert down == [first, *middle, again, *middle]


@pytest.mark.parametrize(
    ("mode", "net"),
    quick([("permute", mlp), ("grow", mlp), ("grow", norm_net)], [("grow", norm_net)]),
)
def test_a_client_without_its_model_is_sent_its_own_neurons_of_the_global_one(federated_trainer, mode, net):
    """At the start of a pass this costs bytes and changes nothing else; the client's request decides."""
    layer = [4 * (a * b + b) for a, b in itertools.pairwise(WIDTHS)]
    states, down, starts = [], [], {}

    class Watch(FederatedCallback):
        def on_client_start(self, trainer, module, client, broadcast):
            if client == "c2" and trainer.current_epoch == 3:
                starts[lost] = state_of(module)

    for lost in (False, True):
        logger, report = MemoryLogger(), CommunicationReport()
        # With this score layers grow by half. With the default score, rounding decides about growth and thus about the
        # bytes.
        rule = FedMA(mode, score="published", gamma=7.0, max_width=None)
        callbacks = [report, Watch(), *([Forget(3)] if lost else [])]
        trainer = federated_trainer(max_rounds=4, method=rule, logger=logger, callbacks=callbacks)
        module = models.Module(net(), momentum)
        fit(trainer, module, data_of(parts()))
        states.append(state_of(module))
        down.append(logged(logger, "comm/down_bytes"))
        if net is mlp:  # measuring statistics is not in the report
            requests = [0, 48, 48, 32 if lost else 48]  # the stage reached by the client
            for name, field, more in (("down", "down_bytes", [0] * 4), ("up", "up_bytes", requests)):
                counted = [sum(getattr(row, field) for row in report.rows if row.round == round) for round in range(4)]
                assert [a + b for a, b in zip(counted, more, strict=True)] == logged(logger, f"comm/{name}_bytes")
    assert_same(*states)
    first = "net.0.weight"
    assert (len(states[0][first]) > len(starts[True][first]) + 2) == (mode == "grow")
    assert_same(starts[False], starts[True])
    more = [lost - had for had, lost in zip(*down, strict=True)]
    if net is mlp:
        assert more == [0, 0, 0, layer[0] + layer[1] - 16]  # a message without a base need not name a base
    else:  # the statistics were sent in both cases
        numbers = 4 * 6 + 6 + 2 * 6 + 6 * 5 + 5 + 2 * 5
        assert more == [0, 0, 0, 4 * numbers + 2 * 8 - 16]  # and the numbers of batches


def test_a_model_is_in_a_checkpoint_once(federated_trainer):
    """The last complete pass is not stored twice; an unfinished pass stores the matched layers."""

    class Held(L.Callback):
        def on_train_epoch_end(self, trainer, pl_module):
            state = trainer.federation.server.rule.state_dict()
            last = state["last"]["matched_state"] if trainer.current_epoch > 1 else {}
            held.append((len(last), len(state.get("current", {"matched_state": ()})["matched_state"])))

    rule, held = FedMA("permute"), []
    trainer = federated_trainer(max_rounds=5, method=rule, callbacks=[Held()])
    fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
    assert held == [(0, 2), (0, 4), (0, 0), (0, 2), (0, 4)]


class Watch(FederatedCallback):
    def __init__(self):
        self.states = []

    def on_client_start(self, trainer, module, client, broadcast):
        self.states.append((client, state_of(module)))


def test_independent_clients_are_sent_nothing_at_the_start(federated_trainer):
    """Each client draws its initialisation, equal in every fit and independent of other clients."""
    watch = Watch()
    for _ in range(2):
        logger = MemoryLogger()
        trainer = federated_trainer(
            max_rounds=1, method=FedMA(initial="independent"), callbacks=[watch], logger=logger, seed=3
        )
        fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
        assert logged(logger, "comm/down_bytes") == [3 * 16]
    states = dict(watch.states[:3])
    assert len(states) == 3
    for client, state in watch.states[3:]:
        assert_same(state, states[client])
    weights = [*(state["net.0.weight"] for state in states.values()), mlp()[0].weight]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(weights, 2))


def test_independent_clients_draw_from_the_modules_own_initialisation(federated_trainer):
    """Any initialisation: the same values as the module, zeros in place, frozen entries unchanged."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.net, self.scale = mlp(), nn.Parameter(torch.ones(3))
            self.shift = nn.Parameter(torch.tensor([1.0, 2.0, 4.0]), requires_grad=False)
            for layer in (self.net[0], self.net[2], self.net[4]):
                nn.init.kaiming_normal_(layer.weight, nonlinearity="relu")
                nn.init.zeros_(layer.bias)
            with torch.no_grad():
                self.net[2].weight[1] = 0.0

        def forward(self, inputs):
            return self.net(inputs) * self.scale + self.shift

    torch.manual_seed(0)
    net, watch = Net(), Watch()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    trainer = federated_trainer(max_rounds=1, method=FedMA(initial="independent"), callbacks=[watch], seed=3)
    fit(trainer, models.Module(net, momentum), data_of(parts()))
    assert len(watch.states) == 3
    for (_, state), (name, value) in itertools.product(watch.states, before.items()):
        drawn = state[f"net.{name}"]
        assert torch.equal(drawn.flatten().sort().values, value.flatten().sort().values)
        assert torch.equal(drawn == 0, value == 0)
        assert torch.equal(drawn, value) == (name in {"shift", "scale"} or name.endswith("bias"))
        if value.ndim == 2:  # independent draws: the common part is within three standard deviations of 0
            assert abs(float((drawn * value).sum() / value.square().sum())) < 3 / value.count_nonzero() ** 0.5


# --- Participants -----------------------------------------------------------------------------------------------------


def test_a_pass_has_the_same_clients_and_the_next_one_others(federated_trainer):
    """New clients start from the most common neurons, at client widths."""
    watch = Visitors()
    rule = FedMA("grow", score="published", gamma=7.0, max_width=None)
    module = models.Module(mlp(), momentum)
    trainer = federated_trainer(max_rounds=6, method=rule, clients_per_round=3, callbacks=[watch], seed=1)
    fit(trainer, module, data_of(many()))
    assert watch.rounds[0] == watch.rounds[1] == watch.rounds[2]
    assert watch.rounds[3] == watch.rounds[4] == watch.rounds[5]
    assert set(watch.rounds[3]) - set(watch.rounds[0])
    assert all(watch.widths[3, client] == [7, 6, 3] for client in watch.rounds[3])
    assert trainer.callback_metrics["fed/clients"] == 3


@pytest.mark.parametrize(
    ("store", "personal"),
    quick(itertools.product(["memory", "folder"], [[], ["net.4.bias"]]), [("folder", ["net.4.bias"])]),
)
def test_only_clients_of_the_last_pass_keep_a_model(federated_trainer, tmp_path, store, personal):
    """The number of stored models stays constant, even with failed clients or a failed pass."""

    class Broken(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            round, earlier = trainer.current_epoch, watch.rounds[trainer.current_epoch][:-1]
            if (round == 4 and not earlier) or (round == 6 and earlier):
                next(iter(update.state.values())).fill_(float("nan"))

        def on_server_round_end(self, trainer, module, is_new):
            counting[trainer.current_epoch] = set(trainer.federation.server.report.received)

    watch, counting = Visitors(), {}
    folder = None if store == "memory" else tmp_path
    federation = Federation(
        FedMA("permute"), clients_per_round=3, faults=Faults(min_clients=2), personal=personal, store=folder, seed=4
    )
    trainer = federated_trainer(max_rounds=13, federation=federation, callbacks=[watch, Broken()])
    fit(trainer, models.Module(mlp(), momentum), data_of(many(12)))
    kept = {client: federation.store.get(client) or {} for client in many(12)}
    visited = set(itertools.chain(*watch.rounds.values()))
    assert {client for client, state in kept.items() if "memory:fedma:step" in state} == set(watch.rounds[12])
    assert counting.pop(6) < set(watch.rounds[6])  # too few clients: nothing is stored in this round
    settled = set().union(*counting.values())
    assert {client for client, state in kept.items() if "net.4.bias" in state} == (settled if personal else set())
    assert len(visited) > len(settled) > 6
    assert watch.rounds[6][0] not in {*watch.rounds[7], *watch.rounds[10]}  # with a valid update
    assert all(len(state) <= len(personal) for client, state in kept.items() if client not in watch.rounds[12])


def test_a_client_that_fails_is_left_out_for_the_rest_of_the_pass(federated_trainer, caplog):
    watch = Visitors()

    class Broken(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1 and client == "c1":
                next(iter(update.state.values())).fill_(float("nan"))

    trainer = federated_trainer(max_rounds=4, method=FedMA(), callbacks=[watch, Broken()])
    fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
    assert [sorted(watch.rounds[round]) for round in range(4)] == [
        ["c0", "c1", "c2"],
        ["c0", "c1", "c2"],
        ["c0", "c2"],
        ["c0", "c1", "c2"],
    ]
    assert "excluded for the rest of the pass: c1" in caplog.text


def test_a_new_pass_begins_where_nothing_came_of_a_round(federated_trainer, caplog):
    watch = Visitors()

    class Broken(FederatedCallback):
        changes_update = True

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == 1:
                next(iter(update.state.values())).fill_(float("nan"))

    module = models.Module(mlp(), momentum)
    trainer = federated_trainer(max_rounds=5, method="fedma", callbacks=[watch, Broken()])
    fit(trainer, module, data_of(parts()))
    rule = trainer.federation.server.rule
    untrained = models.Module(mlp(), momentum)
    assert "so matching restarts with the first layers" in caplog.text
    assert rule.unfinished is None
    assert rule.state_dict()["last"]["origin"] == 2
    assert all(watch.rounds[round] == ["c0", "c1", "c2"] for round in range(5))
    assert not all(torch.equal(value, state_of(untrained)[name]) for name, value in state_of(module).items())


@pytest.mark.parametrize(("broken", "min_clients"), quick(itertools.product([3, 4, 5], [1, 3]), [(5, 3)]))
def test_a_pass_after_one_that_came_to_nothing_starts_from_the_last_model(federated_trainer, broken, min_clients):
    """Even after clients have moved, they restart from their neurons in the global model, at client widths."""
    seen = {}

    class Broken(FederatedCallback):
        changes_update = True

        def on_client_start(self, trainer, module, client, broadcast):
            seen[trainer.current_epoch, client] = state_of(module)

        def on_client_end(self, trainer, module, client, update):
            if trainer.current_epoch == broken and (min_clients == 1 or client == "c1"):
                next(iter(update.state.values())).fill_(float("nan"))

    rule = FedMA(score="published", gamma=7.0, max_width=None)
    options = {"callbacks": [Broken()], "faults": Faults(min_clients=min_clients)}
    trainer = federated_trainer(max_rounds=broken + 4, method=rule, **options)
    fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
    last = trainer.federation.server.rule.state_dict()["last"]
    assert last["origin"] == broken + 1
    assert last["assignments"].keys() == parts().keys()
    for client in parts():
        assert_same(seen[broken + 1, client], seen[3, client])


def test_a_client_that_has_lost_its_model_is_left_out(federated_trainer, caplog):
    trainer = federated_trainer(max_rounds=3, method=FedMA(), callbacks=[Forget(1)])

    fit(trainer, models.Module(mlp(), momentum), data_of(parts()))
    assert "client 'c2' is excluded: the client's model from the previous stage is missing" in caplog.text
    assert trainer.callback_metrics["fed/clients"] == 2
