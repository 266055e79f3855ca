"""Each federation copies rules, steps and callbacks inside a method."""

import threading

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_fed import FederatedCallback, Federation, Method
from lightning_fed.algorithms import FedAdam, FedAvg, FedAvgM, FedDyn, FedMargin, ServerOptimizer
from tests import models
from tests.breadth import quick
from tests.recorders import Recorder, assert_same, state_of

SIZES = {"ann": 6, "bob": 9, "cid": 4}, {"eve": 7, "fay": 5}


class Rising(FederatedCallback):
    changes_update = True

    def __init__(self):
        self.visits = 0

    def on_client_end(self, trainer, module, client, update):
        self.visits += 1
        update.state = {name: value + 0.01 * self.visits for name, value in update.state.items()}


SHARED = {
    "rule": FedMargin,
    "rule with callbacks": FedDyn,
    "method with a step": FedAdam,
    "method from a rule": lambda: FedAvgM(aggregator=FedMargin()),
    "callback of a method": lambda: Method(FedAvg(), [Rising()]),
    "step of a method": lambda: Method(steps=[ServerOptimizer("SGD", lr=1.0, momentum=0.9)]),
}


def clients_of(place):
    clients = models.as_datasets(models.vectors(SIZES[place]))
    return clients, next(iter(clients.values()))


def fit(federated_trainer, method, place):
    trainer = federated_trainer(max_rounds=2, federation=Federation(method, seed=1))
    module = models.Module(models.mlp())
    trainer.fit(module, *clients_of(place))
    return trainer, module


@pytest.mark.parametrize("kind", quick(SHARED, ["rule with callbacks", "callback of a method", "step of a method"]))
def test_one_object_in_two_fits(federated_trainer, kind):
    """A second fit with the same object changes nothing in the first fit."""
    states = []
    for is_shared in (True, False):
        method = SHARED[kind]()
        trainer, module = fit(federated_trainer, method, 0)
        fit(federated_trainer, method if is_shared else SHARED[kind](), 1)
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, *clients_of(0))
        states.append(state_of(module))
    assert_same(*states)


def test_results_are_with_the_federation(federated_trainer):
    """The given objects do not change; callbacks of the Trainer are not copied."""
    rule, step, brought, own = FedMargin(), ServerOptimizer("SGD", lr=1.0, momentum=0.9), Rising(), Recorder()
    federation = Federation(Method(rule, [brought]), steps=[step], seed=1)
    trainer = federated_trainer(max_rounds=2, federation=federation, callbacks=[own])
    trainer.fit(models.Module(models.mlp()), *clients_of(0))
    assert federation.server.rule.prototypes is not None
    assert federation.steps[0].state_dict()["entries"]
    assert federation.method.callbacks[0].visits == 6
    assert (rule.prototypes, step.state_dict()["entries"], brought.visits) == (None, {}, 0)
    assert own in trainer.callbacks
    assert len(own.visits) == 6
    assert federation.replace(seed=2).server.rule.prototypes is None


def test_a_federation_that_served_another_trainer_is_refused(federated_trainer):
    """The server no longer has the rounds of the first Trainer."""
    federation, clients = Federation("scaffold", seed=1), clients_of(0)
    first, second = (federated_trainer(max_rounds=1, federation=federation) for _ in range(2))
    module = models.Module(models.mlp())
    first.fit(module, *clients)
    second.fit(models.Module(models.mlp()), *clients)
    first.fit_loop.max_epochs = 2
    with pytest.raises(
        MisconfigurationException,
        match=r"another Trainer has used .*federation\.replace\(\)",
    ):
        first.fit(module, *clients)


def test_a_method_that_cannot_be_copied_is_refused():
    callback = Rising()
    callback.lock = threading.Lock()
    with pytest.raises(TypeError, match=r"can be copied, but an object in `FedAvg` cannot .*, give the callback to"):
        Federation(Method(FedAvg(), [callback]))
